"""Animations: their files, and what the ones of memory say about a trace."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Iterator

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from nanovllm.lab.viz import SimulatedRequest, animate, simulate
from nanovllm.lab.viz.__main__ import FIGURES
from nanovllm.lab.viz.animation import memory_figures
from nanovllm.lab.viz.animation.animate import VIEWS
from nanovllm.lab.viz.animation.memory import tables_scene
from nanovllm.lab.viz.animation.moments import Moment, moments
from nanovllm.lab.viz.animation.pool import pool_scene
from nanovllm.lab.viz.animation.stage import HEIGHT, WIDTH, new_frame, pace, several
from nanovllm.lab.viz.data import PoolState, pool_states
from nanovllm.trace.trace import Trace

FOLDER = pathlib.Path(__file__).parents[3] / "figures"
ANIMATIONS = sorted(name for name in FIGURES if name.endswith(".gif"))


def small_trace(**options: object) -> Trace:
    """Two requests with a common beginning, and one that comes when they are gone and needs their blocks."""
    prefix = [1, 2, 3, 4]
    requests = [
        SimulatedRequest(0, [*prefix, 5, 6], 4, request_id="A"),
        SimulatedRequest(1, [*prefix, 7], 3, request_id="B"),
        SimulatedRequest(6, list(range(20, 37)), 2, request_id="C"),
    ]
    return simulate(requests, num_kv_blocks=6, block_size=4, **options)  # type: ignore[arg-type]


def crowded_trace(mode: str = "recompute") -> Trace:
    """More requests than the pool has room for: they wait, and are preempted."""
    requests = [SimulatedRequest(i, [1, 2, 3, 4, 5 + i, 6], 13, request_id=f"request-{i}") for i in range(5)]
    return simulate(requests, num_kv_blocks=9, block_size=4, preemption_mode=mode, check_invariants=True)


def all_steps(trace: Trace) -> list[int]:
    return list(dict.fromkeys(record.step for record in trace))


def whole_story(trace: Trace) -> list[Moment]:
    return moments(trace, all_steps(trace), most=1e9)


def durations(data: bytes) -> list[float]:
    image = Image.open(io.BytesIO(data))
    found = []
    for number in range(image.n_frames):  # type: ignore[attr-defined]
        image.seek(number)
        found.append(image.info["duration"] / 1000)
    return found


@pytest.mark.parametrize("name", ANIMATIONS)
def test_committed_animations_keep_their_limits(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    seconds = durations(data)
    assert len(data) < 1.5e6
    assert 8 <= sum(seconds) <= 15
    assert seconds[0] >= 1.5 and seconds[-1] >= 1.5
    assert Image.open(io.BytesIO(data)).size == (WIDTH, HEIGHT)
    assert Image.open(io.BytesIO(data)).info["loop"] == 0  # for ever


def test_every_animation_in_the_folder_can_be_redrawn() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.gif")) == ANIMATIONS


def test_redrawing_gives_the_committed_bytes() -> None:
    assert memory_figures.block_tables() == (FOLDER / "block_tables.gif").read_bytes()


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_each_view_animates_any_trace(view: str, tmp_path: pathlib.Path) -> None:
    trace = crowded_trace()
    trace.save(tmp_path / "run.jsonl")
    data = animate(tmp_path / "run.jsonl", view, range(3, 6))
    assert data.startswith(b"GIF8")
    assert 8 <= sum(durations(data)) <= 15
    assert data == animate(trace, view, [3, 4, 5])


def test_steps_and_views_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no such view: 'films'"):
        animate(small_trace(), "films")
    with pytest.raises(ValueError, match="it has steps 0 to"):
        animate(small_trace(), steps=[99])
    with pytest.raises(ValueError, match="it is empty"):
        animate(Trace(settings={"num_blocks": 1, "block_size": 1}))


def test_moments_say_what_happened_to_which_blocks() -> None:
    told = [(m.step, m.topic, m.caption) for m in whole_story(small_trace()) if m.topic != "decode"]
    assert told[0] == (0, "admitted", "A comes. Its 6 tokens need 2 blocks of 4. It gets blocks 0 and 1.")
    assert (1, "hit", "B's prompt begins like A's: block 0 is shared, not computed again.") in told
    assert (1, "prefill", "Only B's other token must be computed.") in told
    freed = [caption for _, topic, caption in told if topic.startswith("freed")]
    assert freed[0] == "A and B are done: blocks 0 to 3 are free. What is full keeps its content."
    last = [caption for _, topic, caption in told if topic == "overwritten"]
    assert last == [
        "C comes. Its 17 tokens need 5 blocks of 4. It gets blocks 1 to 5. What was in block 1, unused for longest, is lost."
    ]


def test_a_cache_that_is_switched_off_keeps_nothing() -> None:
    told = whole_story(small_trace(enable_prefix_caching=False))
    assert not any(moment.state.cached for moment in told)
    assert {moment.topic for moment in told} == {"admitted", "prefill", "decode", "freed", "grown"}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_return_are_told(mode: str) -> None:
    told = whole_story(crowded_trace(mode))
    thrown_out = [moment for moment in told if moment.topic == "preempted"]
    assert thrown_out
    for moment in thrown_out:
        assert "No block is free for the next token" in moment.caption
        assert moment.lit and moment.free_order is not None
    back = [m for m in told if ("is back" in m.caption or "comes back" in m.caption)]
    assert back and back[0].step > thrown_out[0].step


@pytest.mark.parametrize("make", [small_trace, crowded_trace, lambda: crowded_trace("swap")])
def test_blocks_are_taken_in_the_order_that_was_shown(make: Callable[[], Trace]) -> None:
    """What is drawn as the free list is the free list of the real pool: its next blocks are those that are taken next."""
    trace = make()
    before = list(range(trace.settings["num_blocks"]))
    num_taken = 0
    for record in trace:
        shown = [m for m in whole_story(trace) if m.step == record.step]
        for moment in shown:
            assert moment.free_order is not None
            free = [b for b, count in enumerate(moment.state.ref_counts) if not count]
            assert sorted(moment.free_order) == free
            held = [b for b in before if moment.state.ref_counts[b]]
            found = {b for s in record.requests for b in s.new_block_ids if _was_found(record, s, b, trace)}
            new = [b for b in held if b not in found]
            order = [b for b in before if b not in found]
            assert new == order[: len(new)]
            num_taken += len(new)
            before = moment.free_order
        assert not record.requests or record.num_free_blocks == len(before)
    assert num_taken > trace.settings["num_blocks"]  # so that blocks were used again


def _was_found(record, share, block_id, trace) -> bool:  # type: ignore[no-untyped-def]
    """True if the block came from the prefix cache, as far as a swapped request may find its own again."""
    if share.request_id in record.resumed:
        return block_id not in {to for _, to in record.swap_in} and share.new_block_ids.index(block_id) < (
            share.start // trace.settings["block_size"]
        )
    hits = record.admitted.get(share.request_id, 0) // trace.settings["block_size"]
    return block_id in share.new_block_ids[:hits]


def test_long_stories_are_abridged_but_no_step_is_lost() -> None:
    trace = crowded_trace()
    story = moments(trace, all_steps(trace), most=12.0)
    assert [m.step for m in story] == sorted(m.step for m in story)
    assert {m.step for m in story} == set(all_steps(trace))
    assert sum(moment.seconds for moment in story) <= 12.0
    assert any(moment.topic == "preempted" and moment.seconds > 1 for moment in story)


def test_what_comes_after_the_last_step_wanted_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, followed = crowded_trace(), []

    def watched(trace: Trace) -> Iterator[PoolState]:
        for state in pool_states(trace):
            followed.append(state)
            yield state

    monkeypatch.setattr("nanovllm.lab.viz.animation.moments.pool_states", watched)
    assert moments(trace, [0, 3], most=1e9)[-1].step == 3
    assert len(followed) <= 5 < len(trace)


def test_captions_can_be_replaced() -> None:
    trace = small_trace()
    story = moments(trace, [0, 1], {1: "by step"}, {(1, "hit"): "by moment"}, most=1e9)
    assert {m.caption for m in story if m.step == 1} == {"by step", "by moment"}
    assert [m.caption for m in story if m.topic == "hit"] == ["by moment"]


@pytest.mark.parametrize("scene", [tables_scene, pool_scene])
@pytest.mark.parametrize("make", [small_trace, crowded_trace])
def test_nothing_is_written_outside_the_frame(scene, make: Callable[[], Trace]) -> None:  # type: ignore[no-untyped-def]
    trace = make()
    draw, seconds = scene(trace, all_steps(trace))
    for number in range(0, len(seconds), 5):
        assert_texts_inside(draw(number))


def test_a_pool_of_thousands_of_blocks_is_drawn() -> None:
    requests = [SimulatedRequest(i // 4, 200, 4, request_id=f"chatcmpl-{i}") for i in range(40)]
    trace = simulate(requests, num_kv_blocks=4096)
    draw, seconds = tables_scene(trace, all_steps(trace))
    assert_texts_inside(draw(len(seconds) // 2))


def test_captions_stay_in_their_box() -> None:
    for caption in ("MMMM WWWW " * 30, "a " * 300, "word", "x" * 60 + " " + "y" * 60):
        assert_texts_inside(new_frame("title", caption).get_figure(root=True))  # type: ignore[arg-type]


def assert_texts_inside(figure: Figure) -> None:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for ax in figure.axes for text in ax.texts]
    legends = [ax.get_legend() for ax in figure.axes]
    for artist in [*texts, *(legend for legend in legends if legend)]:
        box = artist.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= WIDTH, artist
        assert box.y0 >= 0 and box.y1 <= HEIGHT, artist


@pytest.mark.parametrize("seconds", [[0.1], [0.1, 0.1], [1.0] * 40, [0.2] * 10, [2.0, 0.05, 0.05, 9.0]])
def test_an_animation_takes_eight_to_fifteen_seconds(seconds: list[float]) -> None:
    paced = pace(seconds)
    assert len(paced) == len(seconds)
    assert 8 <= sum(paced) <= 15
    assert paced[0] >= 1.5 and paced[-1] >= 1.5
    assert all(round(100 * each) == pytest.approx(100 * each) for each in paced)


def test_several_things_read_as_one_would_say_them() -> None:
    assert several(["A"]) == "A"
    assert several(["A", "B"]) == "A and B"
    assert several(["A", "B", "C"]) == "A, B and C"
    assert several(list("ABCDEF")) == "A, B, C and 3 more"
