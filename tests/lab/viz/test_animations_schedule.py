"""Animations of the scheduler, of timelines, attention and batches: what they say is what the records say."""

from __future__ import annotations

import itertools
import pathlib
import random
from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from nanovllm import LLM
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest, Request
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.schedule import ModelRunnerOutput, SampledToken
from nanovllm.kv.manager import KVCacheManager
from nanovllm.lab.viz import SimulatedRequest, animate, draw_attention, simulate, use_style
from nanovllm.lab.viz.animation import schedule_figures
from nanovllm.lab.viz.animation.animate import VIEWS
from nanovllm.lab.viz.animation.batch import packed_batch
from nanovllm.lab.viz.animation.beats import Beat, abridge, beats, short_names
from nanovllm.lab.viz.animation.split import split_of
from nanovllm.lab.viz.animation.stage import HEIGHT, WIDTH
from nanovllm.lab.viz.animation.timeline import first_token_at, policies_scene, worst_pause
from nanovllm.lab.viz.attention import attended_pages, most_telling_step
from nanovllm.lab.viz.data import pool_state_at
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.trace.recorder import StepRecorder
from nanovllm.trace.trace import StepRecord, Trace, TracedRequest
from tests.oracle import make_checkpoint
from tests.runner.test_runner import BareRunner

MINE = ["scheduler", "timeline", "attention", "batch"]


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    matplotlib.use("agg")
    with matplotlib.rc_context():
        use_style()
        yield
    plt.close("all")


def busy_trace(seed: int = 0, mode: str = "recompute", num_requests: int = 12, **options) -> Trace:
    """A pool that is too small for its requests, some of which are aborted; some prompts share their beginning."""
    dice = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt = [1] * dice.choice([0, 8]) + [dice.randrange(9) for _ in range(dice.randint(1, 30))]
        arrival, abort = dice.randrange(12), dice.choice([None, None, None, dice.randrange(5, 30)])
        requests.append(SimulatedRequest(arrival, prompt, dice.randint(1, 14), abort_step=abort))
    chosen = {"num_kv_blocks": 24, "block_size": 4, "max_num_batched_tokens": 20, "max_num_seqs": 5}
    return simulate(requests, preemption_mode=mode, check_invariants=True, **(chosen | options))


def steps_of(trace: Trace) -> list[int]:
    return list(dict.fromkeys(record.step for record in trace))


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(6))
def test_beats_end_where_the_record_says(seed: int, mode: str) -> None:
    """Queues, computed tokens and blocks are followed event by event, and must come out as the scheduler left them."""
    trace = busy_trace(seed, mode)
    told = beats(trace, steps_of(trace))
    checked = 0
    for record in trace:
        mine = [beat for beat in told if beat.record is record]
        assert [beat.num_shares for beat in mine] == sorted(beat.num_shares for beat in mine)
        scheduled = [b for b in mine if b.num_shares == len(record.requests) and b.topic not in ("finished", "aborted")]
        if not record.requests:
            continue
        queues = scheduled[0].queues  # nobody has yet been asked who waits for what
        assert set(queues.running) == set(record.running)
        assert set(queues.waiting) == set(record.waiting)
        assert set(queues.swapped) == set(record.swapped)
        for share in record.requests:
            assert scheduled[0].computed[share.request_id] == share.start + share.num_tokens
            assert scheduled[0].known[share.request_id] >= share.start + share.num_tokens
        held = sum(1 for count in scheduled[0].pool.ref_counts if count)
        assert held == record.num_blocks - record.num_free_blocks
        checked += 1
    assert checked > 10
    if mode == "recompute":
        assert {"preempted", "kv blocks", "finished", "chunk", "admitted"} <= {beat.topic for beat in told}


def test_a_request_that_ends_frees_its_blocks_at_once() -> None:
    trace = schedule_figures.scheduler_trace()
    done = [beat for beat in beats(trace, steps_of(trace)) if beat.topic == "finished"]
    assert [beat.caption for beat in done] == [
        "B is done. 4 blocks are free again.",
        "A and C are done. 12 blocks are free again.",
    ]
    assert not any(done[-1].pool.ref_counts) and "B" not in done[0].pool.tables


def test_captions_of_the_scheduler_figure() -> None:
    trace = schedule_figures.scheduler_trace()
    captions = {beat.topic: beat.caption for beat in reversed(beats(trace, steps_of(trace)))}
    assert captions["arrived"] == "A and B arrive, with prompts of 6 and 7 tokens."
    assert captions["chunk"] == "C gets in: its prompt of 26 tokens gets the 14 tokens left over."
    assert captions["preempted"].startswith(
        "No block is free: C, the last in line, is preempted; its blocks go to host"
    )
    assert captions["kv blocks"] == "C has to wait: too few blocks are free for it."
    assert captions["resumed"] == "C comes back from host memory and goes on where it stopped."


def test_captions_count_what_is_cached_and_what_is_computed_again() -> None:
    traces = [busy_trace(seed) for seed in range(6)]
    told = [beat for trace in traces for beat in beats(trace, steps_of(trace))]
    cached = [beat for beat in told if beat.topic == "cached"]
    again = [beat for beat in told if beat.topic == "again"]
    assert cached and again
    for beat in cached + again:
        (request_id,) = beat.lit
        share = next(s for s in beat.record.requests if s.request_id == request_id)
        assert str(share.num_tokens) in beat.caption.split() or f"all {share.num_tokens}" in beat.caption
        if beat.topic == "cached":
            assert f"{beat.record.admitted[request_id]} of its" in beat.caption


def test_given_captions_stand_instead() -> None:
    trace = schedule_figures.scheduler_trace()
    told = beats(trace, [2, 3], {3: "Look here."})
    assert {beat.record.step for beat in told} == {2, 3}
    assert {beat.caption for beat in told if beat.record.step == 3} == {"Look here."}
    assert "Look here." not in {beat.caption for beat in told if beat.record.step == 2}


@pytest.mark.parametrize("most", [8.0, 15.0])
def test_an_abridged_story_is_short_and_keeps_its_ends(most: float) -> None:
    trace = busy_trace(num_requests=40)
    told = beats(trace, steps_of(trace))
    assert sum(beat.seconds for beat in told) > 2 * most
    short = abridge(told, most)
    assert sum(beat.seconds for beat in short) <= most + 0.01
    assert (short[0].caption, short[-1].caption) == (told[0].caption, told[-1].caption)
    order = [told.index(next(b for b in told if b.record is beat.record)) for beat in short]
    assert order == sorted(order)
    read = [beat.topic for beat in short if beat.seconds > 1]
    assert "preempted" in read, "what teaches most is told at leisure"
    gaps = [b.record.step - a.record.step for a, b in itertools.pairwise(short)]
    assert max(gaps) < len(trace) / 2, "steps are left out evenly"


def test_names_are_short() -> None:
    trace = Trace(settings={"num_blocks": 4, "block_size": 4})
    share = TracedRequest("chatcmpl-1", 0, 1, 1, [0])
    trace.steps = [StepRecord(0, 0.0, 1.0, 8, [share], running=["chatcmpl-1"], waiting=["waits-only"])]
    assert short_names(trace) == {"chatcmpl-1": "R1", "waits-only": "R2"}
    assert short_names(schedule_figures.scheduler_trace()) == {"A": "A", "B": "B", "C": "C"}


# ---------------------------------------------------------------- the batch


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(4))
def test_packed_batch_is_what_the_runner_builds(seed: int, mode: str) -> None:
    """The real scheduler, recorded, and the real runner beside it: the same tensors, by the same names."""
    dice, num_blocks = random.Random(seed), 12
    config = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=11, preemption_mode=mode)
    config.settle(40, num_blocks)
    runner = BareRunner(config)
    runner.allocate(num_blocks)
    scheduler = Scheduler(config, KVCacheManager(num_blocks, 4, True, num_blocks if mode == "swap" else 0))
    recorder = StepRecorder(Trace(), scheduler)
    for i in range(8):
        prompt = [dice.randrange(3) for _ in range(dice.randint(1, 25))]
        params = SamplingParams(max_tokens=dice.randint(1, 12), ignore_eos=True)
        scheduler.add_request(Request(EngineRequest(f"r{i}", prompt, params), i))
        recorder.arrived(f"r{i}", len(prompt))
    built = []
    while not (plan := scheduler.schedule()).empty:
        for request_id in plan.removed_ids:
            runner.rows.remove(request_id)
        record = recorder.begin(plan, len(built), 0.0)
        batch = runner.prepare_inputs(plan)
        tensors = (batch.metadata.query_start_loc, batch.metadata.seq_lens, batch.positions)
        tensors += (batch.metadata.slot_mapping, batch.last_rows)
        built.append([tensor.tolist() for tensor in tensors])
        result = ModelRunnerOutput({r.request_id: SampledToken(dice.randrange(3)) for r in plan.requests if r.samples})
        recorder.finish(record, 1.0, result, scheduler.update_from_output(plan, result))
    trace = recorder.trace
    assert any(record.preempted for record in trace) and len(built) == len(trace)
    for step, tensors in enumerate(built):
        mine = packed_batch(trace, step)
        assert [mine.query_start_loc, mine.seq_lens, mine.positions, mine.slot_mapping, mine.last_rows] == tensors
    with pytest.raises(ValueError, match="no step 999"):
        packed_batch(trace, 999)


# ---------------------------------------------------------------- attention


def test_attended_pages_are_those_that_hold_what_the_queries_see() -> None:
    trace = busy_trace(3)
    for record in trace:
        if not record.requests:
            continue
        state = pool_state_at(trace, record.step)
        for pages in attended_pages(trace, record.step):
            share, size = pages.share, state.block_size
            queries = range(share.start, share.start + share.num_tokens)
            table = state.tables[share.request_id]
            seen = [(query, key) for query in queries for key in range(query + 1)]
            assert pages.table == list(dict.fromkeys(table[key // size] for key in range(queries[-1] + 1)))
            assert pages.written == list(dict.fromkeys(table[query // size] for query in queries))
            assert (pages.num_products, pages.num_keys) == (len(seen), queries[-1] + 1)


def test_the_step_that_is_shown_has_a_decode_and_a_chunk() -> None:
    trace = schedule_figures.batch_trace()
    step = most_telling_step(trace, steps_of(trace))
    record = next(record for record in trace if record.step == step)
    assert any(s.num_tokens == 1 and s.start >= s.num_prompt_tokens for s in record.requests)
    assert any(s.num_tokens > 1 and s.start > 0 for s in record.requests)
    with pytest.raises(ValueError, match="nothing is computed"):
        most_telling_step(trace, [])


@pytest.mark.parametrize("context", [1, 100, 8192, 131072])
@pytest.mark.parametrize("num_requests", [1, 16, 256])
def test_the_split_is_the_kernels(num_requests: int, context: int) -> None:
    backend = pytest.importorskip("nanovllm.attention.triton")
    hardware = backend.Hardware(132, 227 * 1024)
    split = split_of(num_requests, context, 8, 4, 128)
    assert split.num_parts == backend.choose_splits(num_requests, 8, hardware)
    assert split.tile == backend.choose_tiles(4, 128, torch.bfloat16, hardware).keys
    assert split.keys % split.tile == 0 and split.keys * split.num_parts >= context
    assert (split.keys - split.tile) * split.num_parts < context, "no more than needed"


# ---------------------------------------------------------------- policies


def test_the_longest_pause_counts_one_that_has_not_ended() -> None:
    def step(number: int, duration: float, sampled: list[str], **more) -> StepRecord:
        shares = [TracedRequest(r, 0, 1, 1, [], [7]) for r in sampled]
        start = float(10 * number)
        return StepRecord(number, start, duration, 8, shares, **more)

    trace = Trace(settings={"num_blocks": 4, "block_size": 4})
    trace.steps = [
        step(0, 10, ["A", "B"]),
        step(1, 10, ["A"]),
        step(2, 10, ["A", "B"], finished={"B": "length"}),
        step(3, 10, ["C"]),
    ]
    assert worst_pause(trace, 5) == (0.0, "")  # before the first token one waits, and does not pause
    assert worst_pause(trace, 20) == (10.0, "A")
    assert worst_pause(trace, 25) == (15.0, "B")
    assert worst_pause(trace, 30) == (20.0, "B")
    assert worst_pause(trace, 45) == (20.0, "B"), "B has ended, and A has paused for 15"
    assert worst_pause(trace, 60) == (30.0, "A")


def test_policies_differ_as_their_figure_says() -> None:
    first, chunked = schedule_figures.policies_traces().values()
    assert first_token_at(first, "D") < first_token_at(chunked, "D")
    assert worst_pause(first, 1e9)[0] > 3 * worst_pause(chunked, 1e9)[0]


# ---------------------------------------------------------------- pictures


def frames_of(scene, most: int = 6) -> Iterator[FigureCanvasAgg]:
    draw, seconds = scene
    chosen = sorted({i * (len(seconds) - 1) // max(1, most - 1) for i in range(most)})
    for number in chosen:
        canvas = FigureCanvasAgg(draw(number))
        canvas.draw()
        yield canvas


def assert_legible(canvas: FigureCanvasAgg) -> None:
    """All text stands inside the frame, no two pieces of it on top of each other."""
    figure = canvas.figure
    assert tuple(figure.canvas.get_width_height()) == (WIDTH, HEIGHT)
    places = []
    for text in figure.findobj(Text):
        if not text.get_text() or not text.get_visible():
            continue
        box = text.get_window_extent(canvas.get_renderer())
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= WIDTH and box.y1 <= HEIGHT, text.get_text()
        places.append((text.get_text(), box))
    for (one, a), (other, b) in itertools.combinations(places, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 4, f"{one!r} lies over {other!r}"


@pytest.mark.parametrize("view", MINE)
@pytest.mark.parametrize("make", [schedule_figures.scheduler_trace, schedule_figures.engine_trace, busy_trace])
def test_nothing_overlaps_and_nothing_is_cut_off(view: str, make) -> None:
    trace = make()
    for canvas in frames_of(VIEWS[view](trace, steps_of(trace), {})):
        assert_legible(canvas)


@pytest.mark.parametrize("view", MINE)
def test_a_large_trace_is_legible_too(view: str) -> None:
    dice = random.Random(1)
    requests = [
        SimulatedRequest(dice.randrange(100), dice.randint(5, 900), dice.randint(1, 60), request_id=f"chatcmpl-{i}")
        for i in range(64)
    ]
    trace = simulate(requests, num_kv_blocks=600, max_num_batched_tokens=512, max_num_seqs=32)
    for canvas in frames_of(VIEWS[view](trace, steps_of(trace), {}), 5):
        assert_legible(canvas)


def test_figures_that_are_no_views_are_legible() -> None:
    from nanovllm.lab.viz.animation.split import split_scene

    pytest.importorskip("nanovllm.attention.triton")
    scenes = [split_scene(), policies_scene(schedule_figures.policies_traces(), [(0.0, "Look."), (150.0, "There.")])]
    for scene in scenes:
        for canvas in frames_of(scene):
            assert_legible(canvas)


@pytest.mark.parametrize("view", MINE)
def test_views_take_any_trace(view: str, tmp_path: pathlib.Path) -> None:
    """One step; steps in which nothing is computed; a file; and the same trace gives the same bytes."""
    one = simulate([SimulatedRequest(0, 3, 1)], num_kv_blocks=4, block_size=4)
    assert animate(one, view)[:6] == b"GIF89a"
    aborted = simulate(
        [SimulatedRequest(0, 9, 5, abort_step=2), SimulatedRequest(6, 2, 2)], num_kv_blocks=9, block_size=4
    )
    assert any(not record.requests for record in aborted)
    aborted.save(tmp_path / "run.jsonl")
    assert animate(tmp_path / "run.jsonl", view) == animate(aborted, view)


def test_views_take_a_trace_of_an_engine_that_is_one_step_ahead(tmp_path: pathlib.Path) -> None:
    """There, requests are computed once more after their end, and blocks are given back later."""
    llm = LLM(
        str(make_checkpoint(tmp_path)), dtype="float32", device="cpu", num_kv_blocks=12, block_size=4,
        max_num_batched_tokens=12, max_num_seqs=4, async_scheduling=True, trace=True, check_invariants=True,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 300 for j in range(9 + 6 * i)]} for i in range(4)]
    params = [SamplingParams(temperature=0, max_tokens=6, stop_token_ids=list(range(i, 320, 4))) for i in range(4)]
    llm.generate(prompts, params, use_tqdm=False)
    trace = llm.trace
    assert trace is not None
    ended: set[str] = set()
    late = 0
    for record in trace:
        late += sum(share.request_id in ended for share in record.requests)
        ended |= record.finished.keys()
    assert late, "nobody was computed in vain"
    told = beats(trace, steps_of(trace))
    assert sum(len(beat.record.finished) for beat in told if beat.topic == "finished") >= 3
    for beat in told:
        there = {*beat.record.running, *beat.record.waiting, *beat.record.finished}
        assert beat.known.keys() <= there and {*beat.queues.running, *beat.queues.waiting} <= there
    for view in MINE:
        for canvas in frames_of(VIEWS[view](trace, steps_of(trace), {}), 4):
            assert_legible(canvas)


@pytest.mark.parametrize("name", ["attention.gif", "batch.gif"])
def test_committed_animations_are_what_is_drawn(name: str) -> None:
    committed = pathlib.Path(__file__).parents[3] / "figures" / name
    assert schedule_figures.FIGURES[name]() == committed.read_bytes(), "run make figures"


def test_the_still_shows_each_share() -> None:
    trace = schedule_figures.batch_trace()
    ax = draw_attention(trace, 8)
    words = {text.get_text() for text in ax.texts}
    assert {"A: 1 query, 16 keys in 4 pages", "C: 10 queries, 20 keys in 5 pages"} <= words
    with pytest.raises(ValueError, match="no step 99"):
        draw_attention(trace, 99)


def test_beats_are_plain_data() -> None:
    trace = schedule_figures.scheduler_trace()
    told = beats(trace, steps_of(trace))
    assert all(isinstance(beat, Beat) for beat in told)
    before = told[0].queues.copy()
    told[-1].queues.move("A", told[-1].queues.waiting)
    assert told[0].queues == before, "beats do not share their queues"
