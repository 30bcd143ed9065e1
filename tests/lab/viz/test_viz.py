"""Pictures: the data behind them, what they say about it, and that the same record gives the same
bytes."""

import ast
import itertools
import json
import pathlib
import random
import subprocess
import sys
import time

import matplotlib
import matplotlib.pyplot as plt
import msgspec
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import nanovllm
from nanovllm.core.block_pool import BlockPool
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab.viz import (
    PALETTE,
    PoolState,
    RequestColors,
    SimulatedRequest,
    compare,
    draw_block_tables,
    draw_blocks,
    draw_budget,
    draw_memory,
    draw_pool,
    draw_timeline,
    draw_usage,
    image_bytes,
    overview,
    percentile,
    pool_state,
    pool_state_at,
    request_color,
    request_ids,
    request_metrics,
    simulate,
    step_edges,
    timeline_events,
    timeline_spans,
    use_style,
)
from nanovllm.lab.viz.blocks import draw_still
from nanovllm.lab.viz.memory import cell_columns
from nanovllm.lab.viz.style import mark_style
from nanovllm.trace.trace import StepRecord, Trace, TracedRequest

DRAWINGS = [draw_timeline, draw_budget, draw_usage]


@pytest.fixture(autouse=True)
def style():
    matplotlib.use("agg")
    with matplotlib.rc_context():
        use_style()
        yield
    plt.close("all")


def small_trace(**options) -> Trace:
    """Three requests, two of them with long prompts, and a budget of 32 tokens a step."""
    requests = [
        SimulatedRequest(0, 40, 12),
        SimulatedRequest(2, 120, 10),
        SimulatedRequest(3, 24, 14),
    ]
    settings = {"num_kv_blocks": 24, "max_num_batched_tokens": 32, "check_invariants": True}
    return simulate(requests, **(settings | options))


def busy_trace(num_requests=40, **options) -> Trace:
    """Many requests, some with a common prefix, in a pool that is too small for them."""
    draw = random.Random(0)
    common = list(range(64))
    requests = [
        SimulatedRequest(
            i * 3 // 2,
            common + [1000 + i] * draw.randint(5, 40) if i % 3 == 0 else draw.randint(10, 150),
            draw.randint(5, 60),
        )
        for i in range(num_requests)
    ]
    settings = {"num_kv_blocks": 100, "max_num_batched_tokens": 128, "max_num_seqs": 32}
    return simulate(requests, **(settings | options))


# ---------------------------------------------------------------- simulation


def test_simulated_requests_get_every_token():
    trace = busy_trace(check_invariants=True)
    sampled = {request_id: 0 for request_id in request_ids(trace)}
    for step in trace:
        assert step.num_tokens <= step.token_budget == 128
        for share in step.requests:
            sampled[share.request_id] += len(share.sampled)
    draw = random.Random(0)
    for i in range(40):
        draw.randint(5, 40) if i % 3 == 0 else draw.randint(10, 150)
        assert sampled[f"r{i}"] == draw.randint(5, 60)
    assert any(step.preempted for step in trace), "the pool is meant to be too small"
    assert any(any(step.admitted.values()) for step in trace), (
        "some prefixes are meant to be shared"
    )


def test_simulation_is_deterministic_and_survives_a_file(tmp_path):
    first, second = busy_trace(preemption_mode="swap"), busy_trace(preemption_mode="swap")
    assert first.steps == second.steps
    first.save(tmp_path / "trace.jsonl")
    loaded = Trace.load(tmp_path / "trace.jsonl")
    assert timeline_spans(loaded) == timeline_spans(first)
    assert loaded.settings == first.settings


def test_simulation_of_many_requests_is_cheap():
    requests = [SimulatedRequest(i * 7, 200, 100) for i in range(256)]
    start = time.process_time()
    trace = simulate(requests, num_kv_blocks=2000, max_num_seqs=64)
    assert len(trace) > 1500
    assert time.process_time() - start < 5, "about half a second of a processor's time"


def test_idle_steps_are_counted_and_not_recorded():
    trace = simulate(
        [SimulatedRequest(0, 4, 2), SimulatedRequest(100, 4, 2)], step_cost=2.0, token_cost=0.5
    )
    assert [s.step for s in trace] == [0, 1, 100, 101]
    assert [s.duration for s in trace] == [4.0, 2.5, 4.0, 2.5]
    assert trace.steps[2].start == 4.0 + 2.5 + 98 * 2.0
    assert request_metrics(trace, "time")["r1"]["ttft"] == 4.0


def test_priority_and_abort():
    requests = [
        SimulatedRequest(0, 8, 50, priority=2, abort_step=6),
        SimulatedRequest(0, 8, 3, priority=1),
    ]
    trace = simulate(requests, max_num_seqs=1, scheduling_policy="priority")
    assert next(s.requests[0].request_id for s in trace) == "r1"
    assert [(e.request_id, e.at) for e in timeline_events(trace) if e.kind == "aborted"] == [
        ("r0", 6)
    ]
    assert not trace.steps[-1].requests and len(trace) == 7, (
        "nothing is left to compute after the abort"
    )


def test_an_end_after_which_nothing_is_left_takes_no_room():
    requests = [
        SimulatedRequest(0, 8, 50, abort_step=3),
        SimulatedRequest(5, 8, 2),
        SimulatedRequest(9, 8, 2),
    ]
    trace = simulate(requests)
    assert [(s.step, len(s.requests)) for s in trace] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 0),
        (5, 1),
        (6, 1),
        (9, 1),
        (10, 1),
    ]
    for x in ("step", "tokens", "time", lambda step: 2.0):
        edges = step_edges(trace, x)
        assert edges[3] == (edges[2][1], edges[2][1])
        assert all(begin >= end for (_, end), (begin, _) in itertools.pairwise(edges))
        for draw in DRAWINGS:
            draw(trace, x)
            plt.close("all")
    assert request_metrics(trace)["r0"]["latency"] == 3
    assert not pool_state_at(trace, 3).tables


def test_simulation_refuses_what_can_never_run():
    with pytest.raises(ValueError, match="1 to 31 tokens"):
        simulate([SimulatedRequest(0, 100, 2)], num_kv_blocks=2)
    with pytest.raises(RuntimeError, match="after 3 steps"):
        simulate([SimulatedRequest(0, 10, 20)], max_steps=3)


# ---------------------------------------------------------------- the data behind the timeline


def test_spans_of_a_small_trace():
    spans = [
        (s.request_id, s.kind, s.begin, s.end, s.num_tokens) for s in timeline_spans(small_trace())
    ]
    assert spans == [
        ("r0", "prefill", 0, 2, 40),
        ("r0", "decode", 2, 13, 11),
        ("r1", "prefill", 2, 6, 120),
        ("r2", "waiting", 3, 5, 0),
        ("r2", "prefill", 5, 7, 24),
        ("r1", "decode", 6, 15, 9),
        ("r2", "decode", 7, 20, 13),
    ]


def test_unmerged_spans_are_one_a_step():
    trace = small_trace()
    spans = timeline_spans(trace, merge=False)
    assert all(s.first_step == s.last_step for s in spans)
    assert sum(s.num_tokens for s in spans) == sum(step.num_tokens for step in trace)


def test_prefill_first_stalls_those_who_decode():
    stalled = [
        s
        for s in timeline_spans(small_trace(batching_policy="prefill_first"))
        if s.kind == "stalled"
    ]
    assert [(s.request_id, s.begin, s.end) for s in stalled] == [("r0", 2, 7), ("r1", 6, 7)]
    assert not [s for s in timeline_spans(small_trace()) if s.kind == "stalled"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_step_of_a_request_has_one_span(mode):
    trace = busy_trace(preemption_mode=mode)
    kinds = set()
    for request_id in request_ids(trace):
        spans = [
            s for s in timeline_spans(trace) if s.request_id == request_id and s.kind != "cached"
        ]
        assert all(a.end == b.begin for a, b in itertools.pairwise(spans))
        kinds |= {s.kind for s in spans}
    assert ("swapped" in kinds) == (mode == "swap")


def test_cached_span_names_the_tokens_found():
    prompt = list(range(40))
    trace = simulate([SimulatedRequest(0, prompt, 2), SimulatedRequest(5, [*prompt, 1], 2)])
    cached = [s for s in timeline_spans(trace) if s.kind == "cached"]
    assert [(s.request_id, s.num_tokens, s.first_step) for s in cached] == [("r1", 32, 5)]


def test_recomputed_tokens_are_prefill():
    trace = Trace()
    trace.record(StepRecord(0, 0.0, 1.0, 8, [TracedRequest("a", 0, 7, 4, [0])], admitted={"a": 0}))
    trace.record(StepRecord(1, 1.0, 1.0, 8, [TracedRequest("a", 7, 1, 4, [])]))
    assert [s.kind for s in timeline_spans(trace)] == ["prefill", "decode"]


def test_events():
    events = [(e.request_id, e.kind, e.at, e.detail) for e in timeline_events(small_trace())]
    assert events == [
        ("r0", "first token", 2, ""),
        ("r1", "first token", 6, ""),
        ("r2", "first token", 7, ""),
        ("r0", "finished", 13, "length"),
        ("r1", "finished", 15, "length"),
        ("r2", "finished", 20, "length"),
    ]


def test_abort_is_an_event_at_the_next_step():
    trace = simulate([SimulatedRequest(0, 8, 50, abort_step=4), SimulatedRequest(0, 8, 10)])
    assert ("r0", "aborted", 4.0) in [(e.request_id, e.kind, e.at) for e in timeline_events(trace)]


def test_a_stop_string_finishes_a_request_between_two_steps():
    trace = simulate([SimulatedRequest(0, 8, 50, abort_step=4), SimulatedRequest(0, 8, 10)])
    trace.steps[4].finished["r0"] = "stop"  # as a front end ends it that finds the string
    events = [(e.kind, e.at) for e in timeline_events(trace) if e.request_id == "r0"]
    assert events == [("first token", 1.0), ("finished", 4.0)]


def test_first_token_stays_first_after_a_preemption():
    trace = busy_trace()
    first = [e.request_id for e in timeline_events(trace) if e.kind == "first token"]
    assert sorted(first) == sorted(set(first)) == sorted(request_ids(trace))


def test_who_came_before_the_trace_began_has_no_first_token_in_it(tmp_path):
    whole = small_trace()
    rest = Trace(settings=whole.settings)
    rest.steps = whole.steps[4:]  # r0 decodes since step 1, r1 and r2 have not begun to
    assert [e.request_id for e in timeline_events(rest) if e.kind == "first token"] == ["r1", "r2"]
    rest.to_perfetto(tmp_path / "events.json")
    events = json.loads((tmp_path / "events.json").read_text())["traceEvents"]
    tracks = {
        event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"
    }
    assert [e["tid"] for e in events if e["name"] == "first token"] == [tracks["r1"], tracks["r2"]]
    metrics = request_metrics(rest)
    assert all(
        metrics[r]["ttft"] is None and metrics[r]["latency"] is None for r in ("r0", "r1", "r2")
    )
    assert metrics["r0"]["itl"] == request_metrics(whole)["r0"]["itl"][3:]


def test_step_edges():
    trace = small_trace()
    assert step_edges(trace)[:3] == [(0, 1), (1, 2), (2, 3)]
    assert step_edges(trace, "tokens")[:4] == [(0, 32), (32, 40), (40, 72), (72, 104)]
    assert step_edges(trace, lambda step: 0.5)[3] == (1.5, 2.0)
    assert step_edges(trace, "time") == [(s.start, s.start + s.duration) for s in trace]
    with pytest.raises(ValueError, match="x must be"):
        step_edges(trace, "seconds")


def test_metrics_in_steps_and_tokens():
    metrics = request_metrics(small_trace())
    assert list(metrics) == ["r0", "r1", "r2"]
    assert metrics["r0"] == {
        "arrival": 0,
        "ttft": 2,
        "itl": [1] * 11,
        "latency": 13,
        "num_preemptions": 0,
    }
    assert metrics["r2"]["ttft"] == 4
    tokens = request_metrics(small_trace(), "tokens")
    assert tokens["r0"]["ttft"] == 40
    assert tokens["r0"]["itl"][0] == 32, "its second token shares a step with a chunk of r1"
    stalled = request_metrics(small_trace(batching_policy="prefill_first"))
    assert max(stalled["r0"]["itl"]) == 6


def test_metrics_count_preemptions():
    trace = busy_trace()
    counted = sum(m["num_preemptions"] for m in request_metrics(trace).values())
    assert counted == sum(len(step.preempted) for step in trace) > 0


def test_percentile_is_the_nearest_rank():
    values = [5, 1, None, 4, 2, 3]
    assert [percentile(values, p) for p in (0, 20, 50, 99, 100)] == [1, 1, 3, 5, 5]
    with pytest.raises(ValueError, match="no values"):
        percentile([None], 50)


# ---------------------------------------------------------------- the pool


def test_pool_state_of_a_pool_and_its_tables():
    pool = BlockPool(6)
    tables = {"a": pool.get_new_blocks(3), "b": pool.get_new_blocks(1)}
    tables["b"] = [tables["a"][0], *tables["b"]]
    pool.touch(tables["b"][:1])
    state = pool_state(pool, tables, {"a": 9, "b": 5}, block_size=4)
    assert state.ref_counts == [2, 1, 1, 1, 0, 0]
    assert state.holders(0) == ["a", "b"]
    assert [state.filled(b) for b in range(6)] == [4, 4, 1, 1, 0, 0]
    assert pool_state(state) is state


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_pool_state_rebuilt_from_a_trace_counts_the_same_free_blocks(mode):
    trace = busy_trace(preemption_mode=mode)
    for step in trace.steps[::5]:
        state = pool_state_at(trace, step.step)
        assert state.ref_counts.count(0) == step.num_free_blocks
        assert sorted(state.tables) == sorted(step.running)
        for share in step.requests:
            assert len(state.tables[share.request_id]) * 16 >= share.start + share.num_tokens
    assert any(max(pool_state_at(trace, s.step).ref_counts) > 1 for s in trace), (
        "prefixes are shared"
    )


def test_freed_full_blocks_stay_findable():
    trace = simulate([SimulatedRequest(0, 20, 2), SimulatedRequest(3, 20, 2)], num_kv_blocks=8)
    state = pool_state_at(trace, 3)
    assert state.cached == {0}, "r0 left one full block and one that is not full"
    assert pool_state_at(trace, 0).cached == set()


@pytest.mark.parametrize(
    "size, columns", [(1, 1), (2, 2), (4, 2), (7, 7), (8, 4), (16, 4), (32, 8)]
)
def test_cells_of_a_block_fill_a_rectangle(size, columns):
    assert cell_columns(size) == columns


def test_pool_drawing_shows_owners_fill_and_counts():
    colors = RequestColors(["a", "b"])
    ax = draw_pool(4, {"a": [2, 0], "b": [2]}, {"a": 6, "b": 4}, block_size=4, colors=colors)
    fills = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_zorder() == 2]
    area = {c: 0.0 for c in (colors["a"], colors["b"])}
    for patch in fills:
        area[to_hex(patch.get_facecolor()).upper()] += patch.get_width() * patch.get_height()
    block = 0.86**2
    # Block 2 is full and shared, block 0 holds two of four tokens.
    assert area[colors["a"]] == pytest.approx(block / 2 + block / 2)
    assert area[colors["b"]] == pytest.approx(block / 2)
    assert sorted(t.get_text() for t in ax.texts) == ["0", "1", "2", "3", "×2"]


def test_block_table_drawing_has_an_arrow_an_entry():
    ax = draw_block_tables({"a": [7, 1, 3], "b": [7, 2]}, {"a": 35, "b": 20}, 16)
    arrows = [p for p in ax.patches if type(p).__name__ == "FancyArrowPatch"]
    assert len(arrows) == 2 * 5, "an arrow and its white rim"


def bars_of_block(ax, block_id):
    """Begin, end and label of a block's bars, from left to right."""
    bars = sorted(
        (p for p in ax.patches if round(p.get_y() + 0.42) == block_id), key=Rectangle.get_x
    )
    names = {round(t.xy[0] - 0.12): t.get_text() for t in ax.texts if t.xy[1] == block_id}
    ends = [(round(bar.get_x()), round(bar.get_x() + bar.get_width())) for bar in bars]
    return [(begin, end, names.get(begin, "")) for begin, end in ends]


def test_blocks_are_drawn_with_their_holders_by_steps():
    prefix = list(range(100, 108))
    requests = [
        SimulatedRequest(0, [*prefix, 1], 4, request_id="a"),
        SimulatedRequest(2, [*prefix, 2], 4, request_id="b"),
        SimulatedRequest(8, 30, 2, request_id="c"),
    ]
    trace = simulate(requests, num_kv_blocks=8, block_size=4)
    ax = draw_blocks(trace)
    assert bars_of_block(ax, 1) == [
        (0, 2, "a"),
        (2, 4, "a+b"),
        (4, 6, "b"),
        (6, 8, ""),
        (8, 10, "c"),
    ]
    assert [end for *_, end in bars_of_block(ax, 2)] == ["a", "", "c"], "free, but still cached"


def test_content_of_free_blocks_stays_while_no_request_is_left():
    requests = [
        SimulatedRequest(0, 9, 2, request_id="a"),
        SimulatedRequest(6, 5, 2, request_id="b"),
    ]
    ax = draw_blocks(simulate(requests, num_kv_blocks=4, block_size=4))
    assert bars_of_block(ax, 0) == [(0, 2, "a"), (2, 8, "")], "full: it can still be found"
    assert bars_of_block(ax, 2) == [(0, 2, "a"), (6, 8, "b")], "it had room"
    off = simulate(requests, num_kv_blocks=4, block_size=4, enable_prefix_caching=False)
    assert bars_of_block(draw_blocks(off), 1) == [(0, 2, "a")]


def test_a_still_of_a_step_has_its_pages_and_its_tokens():
    requests = [
        SimulatedRequest(0, 6, 8, request_id="a"),
        SimulatedRequest(2, 9, 4, request_id="b"),
    ]
    trace = simulate(requests, num_kv_blocks=10, block_size=4, max_num_batched_tokens=6)
    figure = draw_still(trace, ["attention", "batch"], [3, 5]).get_figure(root=True)
    panels = [[text.get_text() for text in ax.texts] for ax in figure.axes[1:]]
    assert [panel[0] for panel in panels] == ["step 3", "step 5"], "the timeline is above"
    # a has 8 tokens in blocks 0 and 1, and is to write the first of block 4; b has 5.
    slots = {5: 13, 6: 14, 7: 15, 8: 20}
    assert panels[0] == (
        ["step 3"]
        + ["a", "0", "1", "4", "decode: reads 8 in 2 pages, writes 1"]
        + ["b", "2", "3", "5", "prefill: reads 5 in 2 pages, writes 4"]
        + ["request", "position", "slot", "a", "8", "16"]
        + [word for position, slot in slots.items() for word in ("b", str(position), str(slot))]
    )
    only = draw_still(trace, ["attention"], [3]).get_figure(root=True).axes[1]
    assert "slot" not in [text.get_text() for text in only.texts]
    assert len(draw_still(trace, ["tables"], [3]).get_figure(root=True).axes) == 2, "no such view"


def test_tokens_of_a_large_step_are_drawn_in_part_and_counted():
    trace = simulate([SimulatedRequest(0, 300, 2)], max_num_batched_tokens=400)
    panel = draw_still(trace, ["batch"], [0]).get_figure(root=True).axes[1]
    assert panel.texts[-1].get_text() == "and 204 more tokens"


def test_drafts_have_their_own_marks():
    record = StepRecord(0, 0, 1, 8, [TracedRequest("a", 4, 4, 4, [0, 1], [7, 8], num_drafts=3)])
    trace = Trace(settings=TraceSettings(block_size=4, num_blocks=4))
    trace.record(record)
    panel = draw_still(trace, ["batch"], [0]).get_figure(root=True).axes[1]
    faces = [to_hex(patch.get_facecolor()) for patch in panel.patches]
    assert faces == [
        to_hex(mark_style(kind, PALETTE[0])["facecolor"])
        for kind in ("decode", "accepted draft", "rejected draft", "rejected draft")
    ]


@pytest.mark.parametrize(
    ("views", "labels"),
    [
        (["pool", "timeline"], ["", "block"]),
        (["queues", "budget", "timeline"], ["", "tokens per step"]),
        (["timeline", "usage", "tables"], ["", "block", "KV blocks"]),
    ],
)
def test_a_still_shows_the_views_of_its_player(views, labels):
    figure = draw_still(small_trace(), views).get_figure(root=True)
    assert [ax.get_ylabel() for ax in figure.axes] == labels
    many = draw_still(small_trace(num_kv_blocks=41), views).get_figure(root=True)
    assert "block" not in [ax.get_ylabel() for ax in many.axes], "too many to be read"


def test_memory_bars_add_up():
    ax = draw_memory(
        {"contiguous": {"used": 2, "reserved": 6}, "paged": {"used": 2, "wasted": 0.1}}
    )
    widths: dict[float, float] = {}
    for bar in ax.patches:
        widths[round(bar.get_y(), 2)] = widths.get(round(bar.get_y(), 2), 0) + bar.get_width()
    assert list(widths.values()) == pytest.approx([100, 100])
    assert {t.get_text() for t in ax.texts} == {"25 %", "75 %", "95 %"}


# ---------------------------------------------------------------- drawings


def test_colors_follow_the_order_of_appearance():
    colors = RequestColors(["x", "y"])
    assert (colors["x"], colors["y"], colors["z"]) == PALETTE[:3]
    assert colors["x"] == PALETTE[0]
    assert len({request_color(i) for i in range(24)}) == 24
    assert request_color(24) == PALETTE[0]


@pytest.mark.parametrize(
    ("draw", "x"),
    [
        *itertools.product([draw_timeline], ["step", "tokens", "time"]),
        (draw_budget, "tokens"),
        (draw_usage, "time"),
    ],
)
def test_same_trace_same_bytes(draw, x):
    pictures = []
    for _ in range(2):
        pictures.append(
            image_bytes(draw(busy_trace(12, num_kv_blocks=40, preemption_mode="swap"), x))
        )
        plt.close("all")
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")
    assert b"Software" not in pictures[0] and b"matplotlib" not in pictures[0].lower()


def test_same_svg_bytes_without_a_date():
    one, two = (image_bytes(draw_pool(pool_state_at(busy_trace(12), 10)), "svg") for _ in range(2))
    assert one == two
    assert b"<dc:date>" not in one


@pytest.mark.parametrize("draw", DRAWINGS)
@pytest.mark.parametrize("num_requests", [1, 3, 40])
def test_nothing_is_clipped_and_figures_stay_narrow(draw, num_requests):
    ax = draw(busy_trace(num_requests))
    figure = ax.get_figure()
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    assert figure.get_size_inches()[0] <= 9
    page = figure.bbox
    low, high = sorted(ax.get_ylim())
    ticks = [label for label in ax.get_yticklabels() if low <= label.get_position()[1] <= high]
    for part in [*ax.texts, *ticks, ax.xaxis.label, ax.yaxis.label, *figure.legends]:
        box = part.get_window_extent(renderer)
        if box.width:
            assert page.x0 <= box.x0 and box.x1 <= page.x1, part
            assert page.y0 <= box.y0 and box.y1 <= page.y1, part
    labels = [label.get_window_extent(renderer) for label in ticks if label.get_text()]
    labels.sort(key=lambda box: box.y0)
    assert all(a.y1 <= b.y0 for a, b in itertools.pairwise(labels)), "labels overlap"
    assert all(label.get_fontsize() >= 9 for label in [*ax.texts, *ax.get_yticklabels()])


def test_axes_given_are_used_and_no_legend_is_added():
    figure, ax = plt.subplots()
    assert draw_budget(small_trace(), ax=ax) is ax
    assert not figure.legends


def test_timeline_legend_explains_what_is_there():
    legend = draw_timeline(small_trace()).get_figure().legends[0]
    assert [t.get_text() for t in legend.get_texts()] == [
        "prefill",
        "decode",
        "waiting",
        "first token",
        "finished",
    ]


def test_compare_shares_axis_colors_and_one_legend():
    policies = ["static", "prefill_first", "chunked"]
    traces = {policy: small_trace(batching_policy=policy) for policy in policies}
    axes = compare(traces, x="tokens")
    assert [ax.get_title(loc="left") for ax in axes] == policies
    assert len({ax.get_xlim() for ax in axes}) == 1
    assert len(axes[0].get_figure().legends) == 1
    assert "stalled" in [t.get_text() for t in axes[0].get_figure().legends[0].get_texts()]


def test_overview_stacks_views_of_one_trace():
    axes = overview(busy_trace(), title="all of it")
    assert len(axes) == 3 and len({ax.get_xlim() for ax in axes}) == 1
    assert [ax.get_xlabel() for ax in axes] == ["", "", "step"]
    labels = [t.get_text() for t in axes[0].get_figure().legends[0].get_texts()]
    assert len(labels) == len(set(labels)) and {
        "prefill",
        "preempted",
        "token budget",
        "held by requests",
    } <= set(labels)


def test_empty_trace_can_be_drawn():
    for draw in DRAWINGS:
        image_bytes(draw(Trace()))
    image_bytes(draw_pool(PoolState(4, 16)))
    image_bytes(draw_block_tables({}))


# ---------------------------------------------------------------- the package's place


def test_engine_does_not_import_viz():
    package = pathlib.Path(nanovllm.__file__).parent
    for path in package.rglob("*.py"):
        if not {"viz", "course", "site"}.isdisjoint(path.relative_to(package).parts):
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("nanovllm.lab.viz") for name in names), path


@pytest.mark.started
def test_simulation_needs_no_torch():
    code = "import sys, nanovllm.lab.viz; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_engine_and_simulation_write_the_same_record(tmp_path):
    """The real engine, with random weights, schedules and records as the simulation does."""
    from nanovllm.assembly.engine import Engine
    from nanovllm.data.config import EngineConfig
    from nanovllm.data.request import EngineRequest
    from nanovllm.data.sampling_params import SamplingParams

    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    shape |= {"num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 256}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config | shape))
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_kv_blocks": 8, "block_size": 8}
    core = Engine(
        EngineConfig(
            model=str(tmp_path), load_format="dummy", dtype="float32", device="cpu", **options
        ),
        trace=Trace(),
    )
    prompts = [list(range(20)), list(range(40)), [*range(16), 100]]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, seed=0)
        core.add_request(EngineRequest(f"r{i}", prompt, params))
    while core.has_unfinished:
        core.step()
    simulated = simulate([SimulatedRequest(0, prompt, 6) for prompt in prompts], **options)
    assert core.trace is not None
    for real, other in zip(core.trace.steps, simulated.steps, strict=True):
        assert real.duration > 0
        for share in [*real.requests, *other.requests]:
            share.sampled = [0] * len(share.sampled)
        real.start, real.duration = other.start, other.duration
        for step in (real, other):
            step.arrivals = {
                name: msgspec.structs.replace(arrival, time=0.0)
                for name, arrival in step.arrivals.items()
            }
        assert real == other
    stated = msgspec.to_builtins(core.trace.settings)
    assert stated.keys() >= {"model", "block_size", "num_blocks", "enable_prefix_caching"}


def test_every_committed_figure_is_drawn_by_the_command() -> None:
    """tests/lab/viz/test_film.py proves the same of the animations."""
    import films

    from nanovllm.lab.viz.__main__ import FILMS, visual_language

    committed = pathlib.Path(__file__).parents[3] / "figures"
    names, measured = {"visual_language.svg", *FILMS, *films.FILMS}, {"roofline.svg"}
    assert {
        path.name for path in committed.iterdir() if path.suffix in (".gif", ".svg")
    } == names | measured
    assert (committed / "page.png").stat().st_size < 150_000
    assert visual_language() == (committed / "visual_language.svg").read_bytes(), "run make figures"
    page = (committed / "README.md").read_text(encoding="utf-8")
    assert all(
        f"`{name}`" in page or f"({name})" in page for name in (*names, *measured, "page.png")
    )
