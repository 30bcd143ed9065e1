"""The picture "Where you are" knows the rooms in their order, and shows each lecture a call that it
builds."""

import json
import sys

import matplotlib.pyplot as plt
import pytest

from nanovllm.lab.course.build import find_lectures
from tests.house import ROOMS, ROOT
from tests.pairwise import in_turn


@pytest.fixture
def where(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import where

    yield where
    plt.close("all")
    del sys.modules["where"]


def test_the_floors_are_those_of_the_house(where):
    drawn = [room for floor in reversed(where.FLOORS.strip().split("\n")) for room in floor.split()]
    assert sorted(drawn) == sorted(ROOMS)
    heights = {
        room: row
        for row, floor in enumerate(where.FLOORS.strip().split("\n"))
        for room in floor.split()
    }
    assert sorted(ROOMS, key=lambda room: (-heights[room], ROOMS.index(room))) == ROOMS


# By day every third.
LECTURES = [int(path.stem[:2]) for path in find_lectures(ROOT) if path.stem[:2] != "00"]


@pytest.mark.parametrize("lecture", in_turn(LECTURES, one_in=3))
def test_each_lecture_finds_its_rooms_and_its_calls(where, lecture):
    rooms, calls = where.draw(lecture).axes
    new = where.PALETTE[0]
    assert any(
        patch.get_facecolor()[:3] == plt.matplotlib.colors.to_rgb(new) for patch in rooms.patches
    )
    assert any(text.get_fontweight() == "bold" for text in calls.texts)


@pytest.mark.parametrize(
    "path",
    [path for path in find_lectures(ROOT) if path.stem[:2] != "00"],
    ids=lambda path: path.stem,
)
def test_a_lecture_ends_with_a_picture_of_the_engine_as_it_is(where, path):
    lecture = int(path.stem[:2])
    last = json.loads(path.read_text())["cells"][-1]
    assert f"where_you_are({lecture})" in last["source"][-1]
    (output,) = last["outputs"]
    assert output["metadata"]["image/png"]["map"] == where.fingerprint(lecture), (
        f"the saved picture shows an older engine: make run LECTURES={path.stem[:2]}"
    )


def test_the_tour_shows_the_house_as_it_is(where):
    cells = json.loads((ROOT / "notebooks" / "00_tour.ipynb").read_text("utf-8"))["cells"]
    [cell] = [cell for cell in cells if "show_house()" in "".join(cell["source"])]
    output = cell["outputs"][0]
    assert output["metadata"]["image/png"]["map"] == where.house_fingerprint(), (
        "the saved picture shows an older engine: make run LECTURES=00"
    )
    shown = [text.get_text() for text in where.draw_house().axes[0].texts]
    assert any(text.startswith("kv_transfer\n31, 32") for text in shown), shown
    assert sorted(text.split("\n")[0] for text in shown) == sorted(ROOMS)
