"""Pictures of lecture 32: what they show is what they were given."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

from nanovllm.lab import viz
from nanovllm.lab.viz.kv_sharing import (
    Move,
    draw_crossings,
    draw_deviation,
    draw_file,
    draw_hit_rates,
    draw_places,
    draw_presence,
    draw_trade,
)


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    viz.use_style()
    yield
    plt.close("all")


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def boxes_of(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_places_and_moves() -> None:
    places = {"above": ["A0", "B0", ""], "below": ["A1", ""]}
    moves = [Move("spilled", ("above", 0), ("below", 1)), Move("loaded on a hit", ("below", 0), ("above", 2))]
    figure = draw_places(places, moves, "title", "note")
    (axes,) = figure.axes
    boxes = boxes_of(axes)
    arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
    assert len(boxes) == 5 and len(arrows) == 2
    assert [t for t in texts(figure) if t] == ["above", "A0", "B0", "below", "A1", "note"]
    assert boxes[0].get_facecolor() == boxes[3].get_facecolor() != boxes[1].get_facecolor()
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["spilled", "loaded on a hit"]
    with pytest.raises(KeyError):
        draw_places(places, [Move("stolen", ("above", 0), ("below", 0))])


def test_presence_shows_each_share_and_who_gave() -> None:
    above, below = np.zeros((2, 3)), np.zeros((2, 3))
    above[0, 1], below[0, 1:], below[1, 2] = 1.0, 0.5, 1.0
    served = [{"above": 0, "below": 0}, {"above": 4, "below": 0}, {"above": 0, "below": 2}]
    figure = draw_presence({"above": above, "below": below}, [0, 0, 1], served)
    sizes = [[round(box.get_height(), 2) for box in boxes_of(axes)] for axes in figure.axes]
    assert sizes == [[0.84], [0.42, 0.42, 0.84]]
    marks = [[(line.get_marker(), xs(line)[0]) for line in axes.lines] for axes in figure.axes]
    assert marks == [[("x", 0.45), ("o", 1.45)], [("o", 2.45)]]


def test_hit_rates() -> None:
    figure = draw_hit_rates({"a": 0.25, "b": 0.5}, {"a": 0.2, "b": 0.55}, {"a": 0.2, "b": 0.1})
    assert texts(figure) == ["25%", "50%", " 200", " 100"]
    assert [xs(line)[0] for line in figure.axes[0].lines] == [0.2, 0.55]


def test_crossings() -> None:
    lines = {"computed again": [0.1, 0.2, 0.4], "near": [0.05, 0.05, 0.05]}
    axes = draw_crossings([16, 32, 64], lines, {"near": [0.04, 0.05, 0.06]}, {"near": 20.0, "never": 1e9})
    assert len(axes.lines) == 4, "two lines, points, and a crossing within the picture"
    assert ys(axes.lines[2]) == [0.04, 0.05, 0.06]
    assert xs(axes.lines[3])[0] == 20.0


def test_deviation_marks_the_chosen() -> None:
    figure = draw_deviation(np.full((10, 6), 0.1), [0, 3, 6], [0, 4], num_layers=3)
    upper, lower = figure.axes[:2]
    assert upper.images[0].get_array().shape == (3, 6)  # type: ignore[union-attr]
    assert [round(bar.get_x() + 0.5) for bar in boxes_of(lower)] == [1, 2, 3, 5, 0, 4]


def test_trade() -> None:
    figure = draw_trade([0, 0.5, 1], {"measured": [0.1, 0.6, 1.0]}, {"kl": [3, 2, 0]}, "KL", {"other": (0.5, 1)})
    left, right = figure.axes
    assert ys(left.lines[0]) == [0.1, 0.6, 1.0]
    assert [ys(line) for line in right.lines] == [[3, 2, 0], [1]]


def test_file_says_how_long_its_parts_are() -> None:
    assert texts(draw_file({"key": 32, "rest": 1234})) == ["key", "32 bytes", "rest", "1,234 bytes"]
