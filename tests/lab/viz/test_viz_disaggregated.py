"""Pictures of prefill/decode disaggregation: the data behind them, and that the same data give the same bytes."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import FancyArrowPatch

from nanovllm.lab.viz import PoolState, image_bytes
from nanovllm.lab.viz.disaggregated import (
    Clocked,
    draw_crossing,
    draw_crossover,
    draw_engines,
    draw_gaps,
    draw_split,
    quantile,
    transfers_between,
)
from nanovllm.trace.trace import StepRecord, Trace, TracedRequest


def trace_of(*steps: tuple[float, float, str, int, int]) -> Trace:
    """A trace with a step for each (start, duration, request id, first token, number of tokens); prompts have 8 tokens."""
    records = []
    for number, (start, duration, request_id, first, count) in enumerate(steps):
        share = TracedRequest(request_id, first, count, 8, [])
        arrived = {request_id: 8} if number == 0 else {}
        records.append(StepRecord(number, start, duration, 64, [share], arrived=arrived, running=[request_id]))
    trace = Trace(settings={"block_size": 4, "num_blocks": 8})
    trace.steps = records
    return trace


@pytest.fixture
def two_engines() -> tuple[Clocked, Clocked]:
    """A prompt's prefill from 11.0 to 12.5 on the shared clock, and its first step elsewhere at 13.0."""
    return Clocked(trace_of((1.0, 1.5, "p", 0, 8)), 10.0), Clocked(
        trace_of((0.5, 0.1, "d", 7, 1), (0.6, 0.1, "d", 8, 1)), 12.5
    )


def test_a_transfer_lies_between_two_clocks(two_engines):
    assert transfers_between(*two_engines, {"d": "p"}) == {"d": (12.5, 13.0)}
    assert transfers_between(*two_engines, {"d": "p"}, since=11.0) == {"d": (1.5, 2.0)}


def test_the_timelines_show_all_of_both_engines(two_engines):
    producer, consumer = two_engines
    figure = draw_engines({"producer": producer, "consumer": consumer}, 11.0, {"d": "p"})
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["for d"]
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 2.2))
    assert len(above.patches) == 1 and len(below.patches) == 3  # two steps, and the way to them
    assert above.patches[0].get_facecolor() == below.patches[0].get_facecolor()  # one request, one colour
    first = image_bytes(figure, "svg")
    assert first == image_bytes(draw_engines({"producer": producer, "consumer": consumer}, 11.0, {"d": "p"}), "svg")


def test_every_block_that_crosses_has_an_arrow():
    pools = PoolState(8, 4, {"r": [5, 6]}, {"r": 7}), PoolState(8, 4, {"r": [1, 0]}, {"r": 7})
    figure = draw_crossing(*pools, {"r": [(5, 1), (6, 0)]})
    arrows = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 2 * 2  # each with its rim


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4), (0.25, 1)])
def test_quantiles_are_values_that_were_seen(share, expected):
    assert quantile([4, 2, 1, 3], share) == expected


def test_the_other_figures_show_what_they_are_given():
    gaps = draw_gaps({"one": [0.1, 0.2, 0.4], "two": [0.1]})
    assert [label.get_text() for label in gaps.axes[0].get_yticklabels()] == ["one", "two"]
    axes = draw_crossover([1, 10], [1.0, 10.0], {"link": [2.0, 3.0]}, {"seen": [(1, 1.5)]})
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["compute again", "link", "seen"]
    split = draw_split({"work": [1.0, 3.0, 2.0]}, 4)
    assert [label.get_text() for label in split.axes[0].get_xticklabels()] == ["1P 3D", "2P 2D", "3P 1D"]
    circle = split.axes[0].lines[1]
    assert list(circle.get_xdata()) == [2] and list(circle.get_ydata()) == [3.0]
    plt.close("all")
