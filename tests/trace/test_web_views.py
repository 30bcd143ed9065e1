"""The JavaScript that reads and draws traces, in a real browser: its states are those of Python,
and its pictures show them."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab.viz import (
    PALETTE,
    SimulatedRequest,
    request_color,
    request_ids,
    request_metrics,
    simulate,
)
from nanovllm.lab.viz.data import PoolState, pool_states
from nanovllm.lab.viz.style import FAINT, INK, MUTED
from nanovllm.trace.format import TraceEncoder, header_line
from nanovllm.trace.record import Snapshot, StepRecord
from nanovllm.trace.trace import Trace, TracedRequest
from tests.browser import open_site
from tests.trace.drafting import drafting_trace

pytest_plugins = ["tests.browser"]

DEFAULT_POOL = 11_650  # blocks, as an engine with the course model has
VIEWS = ("tables", "pool", "timeline", "budget", "queues", "usage", "attention", "batch")

# What the page keeps in `window`, beside the modules: how to read a trace, and how to draw a view
# and look at the picture.
SETUP = """async () => {
  Object.assign(window, await import("/web/history.js"), await import("/web/views.js"));
  window.readTrace = (text, options) => {
    const reader = new TraceReader();
    let history;
    for (const line of text.trim().split("\\n")) {
      const read = reader.readLine(line);
      if (read.header) history = new History(read.header.settings, options);
      else history.append(read.record);
    }
    return history;
  };
  window.stateOf = (history, index) => {
    const state = history.stateAt(index);
    const blocks = Array.from({ length: state.numBlocks }, (_, block) => block);
    return {
      tables: Object.fromEntries(state.tables),
      numTokens: Object.fromEntries(state.numTokens),
      refCounts: blocks.map((block) => state.refCount(block)).join(" "),
      cached: blocks.filter((block) => state.isCached(block)).join(" "),
      filled: blocks.map((block) => state.filled(block)).join(" "),
      holders: blocks.map((block) => [...state.holders(block)].sort().join()).join(" "),
    };
  };
  // Draws a view and keeps its context, its regions and every text with the box it fills.
  window.drawn = (name, history, index, options = {}) => {
    const { width = 900, theme = LIGHT, selection = null, hover = null, follow = false, more = 0 } = options;
    const canvas = document.createElement("canvas");
    const view = VIEWS[name];
    const size = { width, height: Math.ceil(view.height(history, width, index)) + more };
    Object.assign(canvas, size);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const texts = [];
    const fillText = context.fillText.bind(context);
    context.fillText = (text, x, y) => {
      const measured = context.measureText(text);
      texts.push({ text, pixels: parseFloat(/([\\d.]+)px/.exec(context.font)[1]), left: x - measured.actualBoundingBoxLeft,
        right: x + measured.actualBoundingBoxRight, top: y - measured.actualBoundingBoxAscent, bottom: y + measured.actualBoundingBoxDescent });
      fillText(text, x, y);
    };
    const regions = view.draw(context, size, { history, index, selection, hover, theme, follow, settings: {} });
    return { canvas, context, size, regions, texts };
  };
  window.colorAt = ({ context }, x, y) => {
    const [r, g, b] = context.getImageData(Math.round(x), Math.round(y), 1, 1).data;
    return "#" + [r, g, b].map((c) => c.toString(16).padStart(2, "0")).join("").toUpperCase();
  };
}"""


def prefix_trace(num_requests: int = 24, seed: int = 0, **options: Any) -> Trace:
    """Requests with common beginnings in a pool that is too small for them; one is aborted."""
    draw = random.Random(seed)
    common = list(range(64))
    requests = [
        SimulatedRequest(
            i * 3 // 2,
            common + [1000 + i] * draw.randint(5, 40) if i % 3 == 0 else draw.randint(10, 150),
            draw.randint(5, 50),
        )
        for i in range(num_requests)
    ]
    requests[7].abort_step = requests[7].arrival_step + 12
    settings = {"num_kv_blocks": 40, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    return simulate(requests, **(settings | options))


def small_trace(**options: Any) -> Trace:
    """Two requests that share a prefix, and two more; so few blocks that arrows are drawn."""
    common = list(range(16))
    requests = [(0, common + [100] * 7, 10), (3, common + [200] * 10, 12), (6, 9, 14), (9, 13, 6)]
    return simulate(
        [SimulatedRequest(*r) for r in requests],
        num_kv_blocks=12,
        block_size=8,
        max_num_batched_tokens=16,
        **options,
    )


TRACES = {
    "small": small_trace,
    "recompute": prefix_trace,
    "swap": lambda: prefix_trace(preemption_mode="swap"),
    "no prefix cache": lambda: prefix_trace(12, 3, enable_prefix_caching=False),
    "prefill first": lambda: prefix_trace(
        20, 4, batching_policy="prefill_first", max_num_batched_tokens=512
    ),
    "evictions": lambda: prefix_trace(40, 5, num_kv_blocks=24, max_num_seqs=4),
    "many": lambda: prefix_trace(80, 6, num_kv_blocks=300, max_num_seqs=80),
    "drafts": drafting_trace,
    "drafts and a preemption": lambda: drafting_trace(30),
}


# By night those that others are like: pools that run out, many requests, drafts.
NIGHTLY = "recompute", "many", "drafts"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in TRACES],
)
def trace(request) -> Trace:
    return TRACES[request.param]()


@pytest.fixture(scope="module")
def shared_site(browser) -> Iterator[tuple[Any, list[str]]]:
    """One page for all tests here, which keep nothing in it; and its errors."""
    context = browser.new_context()
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    open_site(page)
    page.evaluate(SETUP)
    yield page, errors
    context.close()


@pytest.fixture
def site(shared_site) -> Iterator[Any]:
    page, errors = shared_site
    yield page
    assert not errors, errors


def encode(trace: Trace, records: list[StepRecord] | None = None) -> str:
    encoder = TraceEncoder(trace.settings)
    lines = [encoder.encode(record) for record in (trace.steps if records is None else records)]
    return b"".join([header_line(trace.settings), *lines]).decode()


def as_in_the_browser(state: PoolState) -> dict[str, Any]:
    blocks = range(state.num_blocks)
    return {
        "tables": state.tables,
        "numTokens": state.num_tokens,
        "refCounts": " ".join(map(str, state.ref_counts)),
        "cached": " ".join(map(str, sorted(state.cached))),
        "filled": " ".join(str(state.filled(block)) for block in blocks),
        "holders": " ".join(",".join(sorted(state.holders(block))) for block in blocks),
    }


# ---------------------------------------------------------------- the data


def test_the_state_after_every_step_is_that_of_python(site, trace):
    wanted = [as_in_the_browser(state) for state in pool_states(trace)]
    assert any(state["cached"] != "" for state in wanted) == trace.settings.enable_prefix_caching
    got = site.evaluate(
        "text => { const history = readTrace(text); return Array.from({length: history.length}, "
        "(_, i) => stateOf(history, i)); }",
        encode(trace),
    )
    assert len(got) == len(wanted)
    for index, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert mine == theirs, f"record {index}"


def test_seeking_in_any_order_gives_the_same_states(site, trace):
    wanted = [as_in_the_browser(state) for state in pool_states(trace)]
    order = [random.Random(0).randrange(len(trace)) for _ in range(60)]
    got = site.evaluate(
        "([text, order]) => { const history = readTrace(text); return order.map((i) => "
        "stateOf(history, i)); }",
        [encode(trace), order],
    )
    assert got == [wanted[index] for index in order]


def steps_from(trace: Trace, middle: int) -> list[StepRecord]:
    """What somebody gets who looks at a server in mid-course: a snapshot first."""
    lengths: dict[str, int] = {}
    for record in trace:
        lengths |= record.arrived
    state, first = list(pool_states(trace))[middle], trace.steps[middle]
    live = {*first.waiting, *first.running, *first.swapped, *state.tables}
    # A snapshot is taken before it is known which drafts are rejected.
    vain = {share.request_id: share.num_drafts - share.num_accepted for share in first.requests}
    scheduled = {
        request_id: number + vain.get(request_id, 0)
        for request_id, number in state.num_tokens.items()
    }
    snapshot = Snapshot(
        tables=state.tables,
        num_tokens=scheduled,
        cached=sorted(state.cached),
        prompt_lens={name: length for name, length in lengths.items() if name in live},
        num_preemptions=sum(len(record.preempted) for record in trace.steps[: middle + 1]),
    )
    return [StepRecord(**(vars(first) | {"snapshot": snapshot})), *trace.steps[middle + 1 :]]


def test_a_reader_who_starts_at_a_snapshot_sees_the_same(site, trace):
    middle = len(trace) // 2
    got = site.evaluate(
        "text => { const history = readTrace(text); return Array.from({length: history.length}, "
        "(_, i) => stateOf(history, i)); }",
        encode(trace, steps_from(trace, middle)),
    )
    assert got == [as_in_the_browser(state) for state in list(pool_states(trace))[middle:]]


def test_a_reader_who_starts_in_mid_course_counts_right(site, trace):
    """Answers of requests that sample after the start are as long as for those who saw everything,
    and nobody gets a second first token; no more can be found in the prefix cache than was looked
    for."""
    middle = len(trace) // 2
    got = site.evaluate(
        """([whole, part, middle]) => {
          const [all, joined] = [readTrace(whole), readTrace(part)];
          const stories = [];
          for (let index = 0; index < joined.length; index++) for (const id of joined.record(index).ids) {
            const [right, seen] = [all.requestStory(id, middle + index), joined.requestStory(id, index)];
            stories.push([id, index, right.outputTokens, seen.outputTokens, joined.record(index).share(joined.record(index).ids.indexOf(id))]);
          }
          const firstTokens = [...joined.requests.values()].map(({ id, firstToken }) => [id, firstToken, all.requests.get(id).firstToken]);
          return { stories, firstTokens, hits: Array.from({ length: joined.length }, (_, i) => joined.prefixHitRate(i) ?? 0) };
        }""",
        [encode(trace), encode(trace, steps_from(trace, middle)), middle],
    )
    for request_id, index, right, seen, share in got["stories"]:
        if share["sampled"]:
            assert seen == right, (request_id, index)
    for request_id, seen, right in got["firstTokens"]:
        assert seen == (None if right is None or right < middle else right - middle), request_id
    assert all(0 <= rate <= 1 for rate in got["hits"])


def test_prefix_hits_of_who_was_preempted_before_the_start(site):
    """Its answer so far is not seen; but the share that admits it again shows how much was looked
    for."""
    share = {
        "named": [[0, "a", 4]],
        "waiting": [0],
        "snapshot": {"tables": [], "num_tokens": [], "cached": []},
    }
    again = {
        "step": 1,
        "admitted": [[0, 16]],
        "requests": [[0, 16, 4, [0, 1], [7]]],
        "waiting": [],
        "running": [0],
    }
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          return [history.prefixHitRate(), history.requestStory("a", 1).outputTokens, history.requests.get("a").firstToken];
        }""",
        "\n".join([HEADER, json.dumps(STEP | share), json.dumps(STEP | again)]),
    )
    assert got == [16 / 20, 17, None]


def test_a_reader_who_missed_steps_knows_who_has_ended(site):
    """After a gap there is a snapshot, and whoever is not in it will never be heard of again."""
    trace = prefix_trace()
    middle = len(trace) // 2
    before, after = trace.steps[: middle // 2], steps_from(trace, middle)
    got = site.evaluate(
        """([text, at]) => {
          const history = readTrace(text);
          const missed = [...history.requests.values()].filter((info) => info.ended === at && info.reason === undefined);
          const open = [...history.requests.values()].filter((info) => info.ended === undefined);
          return [missed.map((info) => info.id), open.length, missed.map((info) => history.requestStory(info.id, at).queue)];
        }""",
        [encode(trace, [*before, *after]), len(before)],
    )
    seen = {r for record in before for r in record.arrived}
    ended = {r for record in trace.steps[:middle] for r in record.finished}
    told = {r for record in before for r in record.finished}
    assert set(got[0]) == (seen & ended) - told != set()
    assert got[1] == 0 and set(got[2]) == {"ended"}


def test_what_is_sampled_after_the_end_is_no_answer(site):
    first = {
        "named": [[0, "a", 4]],
        "arrived": [0],
        "admitted": [[0, 0]],
        "finished": [[0, "stop"]],
    }
    first |= {"requests": [[0, 0, 4, [1], [7]]], "running": [0]}
    got = site.evaluate(
        "text => { const { outputTokens, lastToken } = readTrace(text).requestStory('a', 1); "
        "return [outputTokens, lastToken]; }",
        "\n".join(
            [
                HEADER,
                json.dumps(STEP | first),
                json.dumps(STEP | {"step": 1, "requests": [[0, 4, 8]]}),
            ]
        ),
    )
    assert got == [1, 0]


def test_the_text_of_an_answer_is_not_told_twice(site):
    """A snapshot after a gap comes with all of the text so far, one without a gap only with what is
    new."""
    line = {
        "named": [[0, "a", 4]],
        "running": [0],
        "snapshot": {"tables": [[0, [1]]], "num_tokens": [[0, 5]]},
    }
    lines = [
        line | {"text": [[0, "One"]]},
        line | {"step": 1, "text": [[0, " two"]]},
        line | {"step": 9, "text": [[0, "One two three"]]},
    ]
    got = site.evaluate(
        "text => readTrace(text).requests.get('a').text",
        "\n".join([HEADER, *(json.dumps(STEP | each) for each in lines)]),
    )
    assert got == "One two three"


def test_preemptions_count_from_the_start_of_the_engine_whenever_a_page_was_opened(site, trace):
    total = sum(len(record.preempted) for record in trace)
    for middle in range(0, len(trace), 7):
        got = site.evaluate(
            "text => { const history = readTrace(text); return history.record(history.length - "
            "1).sums.preemptions; }",
            encode(trace, steps_from(trace, middle)),
        )
        assert got == total, middle


def test_preemptions_are_summed_up(site, trace):
    got = site.evaluate(
        "text => { const history = readTrace(text); return Array.from({length: history.length}, "
        "(_, i) => history.record(i).sums.preemptions); }",
        encode(trace),
    )
    assert got == list(itertools.accumulate(len(record.preempted) for record in trace))


def asynchronous_trace() -> Trace:
    """As an engine writes it that schedules a step before the results of the one before it are
    there. "a" ends with step 1 and is computed once more in step 2; "b" ends with step 2 and,
    though it has no share in step 3, still holds its blocks; then another request takes the id "a".
    """
    share = TracedRequest
    trace = Trace(
        settings=TraceSettings(
            block_size=4, num_blocks=12, token_budget=16, enable_prefix_caching=True
        )
    )
    common = {"token_budget": 16, "num_blocks": 12}
    records = [
        StepRecord(
            step=0,
            start=0.0,
            duration=1.0,
            requests=[share("a", 0, 7, 7, [0, 1], [5]), share("b", 0, 6, 6, [2, 3], [5])],
            arrived={"a": 7, "b": 6},
            admitted={"a": 0, "b": 0},
            running=["a", "b"],
            num_free_blocks=8,
            **common,
        ),
        StepRecord(
            step=1,
            start=0.9,
            duration=1.0,
            requests=[share("a", 7, 1, 7, [], [6]), share("b", 6, 1, 6, [], [6])],
            finished={"a": "stop"},
            running=["a", "b"],
            num_free_blocks=8,
            **common,
        ),
        StepRecord(
            step=2,
            start=1.8,
            duration=1.0,
            requests=[share("a", 8, 1, 7, [4], []), share("b", 7, 1, 6, [], [6])],
            finished={"b": "length"},
            running=["a", "b"],
            num_free_blocks=7,
            **common,
        ),
        StepRecord(
            step=3,
            start=2.7,
            duration=1.0,
            requests=[share("c", 0, 5, 5, [5, 6], [])],
            arrived={"c": 5},
            admitted={"c": 0},
            running=["b", "c"],
            num_free_blocks=8,
            **common,
        ),
        StepRecord(
            step=4,
            start=3.6,
            duration=1.0,
            requests=[share("a", 4, 3, 7, [0, 7], [5]), share("c", 5, 1, 5, [], [5])],
            arrived={"a": 7},
            admitted={"a": 4},
            finished={"c": "length"},
            running=["c", "a"],
            num_free_blocks=8,
            **common,
        ),
    ]
    for record in records:
        trace.record(record)
    return trace


def test_a_request_that_has_ended_may_be_computed_once_more(site):
    trace = asynchronous_trace()
    got, number, story = site.evaluate(
        """text => {
          const history = readTrace(text);
          const states = Array.from({ length: history.length }, (_, i) => stateOf(history, i));
          return [states, history.requests.get("a").number, history.requestStory("a", 4)];
        }""",
        encode(trace),
    )
    assert got == [as_in_the_browser(state) for state in pool_states(trace)]
    assert [sorted(state["tables"]) for state in got] == [["a", "b"]] * 3 + [["b", "c"], ["a", "c"]]
    assert got[2]["numTokens"]["a"] == 8, "what is computed after the end does not count"
    assert number == 0 and story["outputTokens"] == 1 and story["cachedTokens"] == 4, (
        "the second one of this id"
    )


def test_what_is_forgotten_changes_nothing_in_what_is_kept(site):
    trace = prefix_trace(80, 9)
    assert len(trace) > 3 * 64
    got = site.evaluate(
        """text => {
          const [all, kept] = [readTrace(text), readTrace(text, { keep: 70 })];
          const indices = Array.from({ length: kept.length - kept.first }, (_, i) => kept.first + i);
          return {
            first: kept.first, length: kept.length, dropped: kept.record(kept.first - 1) === undefined,
            same: indices.every((i) => JSON.stringify(stateOf(all, i)) === JSON.stringify(stateOf(kept, i))),
            gone: [...all.requests.keys()].filter((id) => !kept.requests.has(id)),
            ended: [...all.requests.values()].filter((info) => info.ended < kept.first).map((info) => info.id),
            error: (() => { try { kept.stateAt(kept.first - 1); } catch (error) { return error.message; } })(),
          };
        }""",
        encode(trace),
    )
    assert (
        got["length"] == len(trace) and got["length"] - 2 * 70 <= got["first"] <= got["length"] - 70
    )
    assert got["dropped"] and got["same"] and got["gone"] == got["ended"] != []
    assert got["error"] == f"no record {got['first'] - 1} is kept"


def test_who_ended_before_the_oldest_record_may_still_stand_in_it(site):
    """With asynchronous scheduling; only then is a request forgotten that had ended long ago."""
    share, common = TracedRequest, {"token_budget": 16, "num_blocks": 12, "duration": 1.0}
    trace = Trace(settings=TraceSettings(block_size=4, num_blocks=12, token_budget=16))
    for step in range(140):
        # Of who runs: ends with the 8th step, and still holds its blocks in the step after it.
        number = step // 8
        now, first = f"r{number}", step % 8 == 0
        mine = (
            share(now, 0, 3, 3, [number % 12], [5])
            if first
            else share(now, 2 + step % 8, 1, 3, [], [5])
        )
        trace.record(
            StepRecord(
                step=step,
                start=float(step),
                requests=[mine],
                arrived={now: 3} if first else {},
                admitted={now: 0} if first else {},
                finished={now: "length"} if step % 8 == 7 else {},
                running=[f"r{number - 1}", now] if first and number else [now],
                **common,
            )
        )
    got = site.evaluate(
        """([text, names]) => {
          const history = readTrace(text, { keep: 64 });
          for (const name of names) drawn(name, history, history.first);
          return [history.first, history.record(history.first).running, [...history.requests.keys()]];
        }""",
        [encode(trace), VIEWS],
    )
    assert got == [64, ["r7", "r8"], [f"r{i}" for i in range(7, 18)]]


def test_stories_agree_with_the_metrics(site, trace):
    metrics = request_metrics(trace, "time")
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          return [...history.requests.keys()].map((id) => history.requestStory(id, history.length - 1));
        }""",
        encode(trace),
    )
    assert [story["id"] for story in got] == request_ids(trace), (
        "numbers, and so colours, go by appearance"
    )
    assert [story["number"] for story in got] == list(range(len(got)))
    for story in got:
        expected = metrics[story["id"]]
        assert story.get("timeToFirstToken") == expected["ttft"]
        assert story["numPreemptions"] == expected["num_preemptions"]
        in_last_step = story["ended"] == len(trace) - 1 and not story["betweenSteps"]
        assert story["queue"] == ("running" if in_last_step else "ended")
        assert bool(story["blocks"]) == in_last_step
        if expected["ttft"] is not None:
            assert story["outputTokens"] == len(expected["itl"]) + 1
        if not story["betweenSteps"]:
            assert story["latency"] == pytest.approx(expected["latency"])


@pytest.mark.parametrize(("reason", "aborted"), [("abort", True), ("stop", False)])
def test_a_stop_string_is_no_abort(site, reason, aborted):
    """Both ends come between two steps; only one of them is drawn as aborted."""
    trace = simulate([SimulatedRequest(0, 8, 50, abort_step=4), SimulatedRequest(0, 8, 10)])
    trace.steps[4].finished["r0"] = reason
    got = site.evaluate(
        """text => {
          const history = readTrace(text), info = history.requests.get("r0");
          return [info.betweenSteps, info.aborted, history.seen.has("aborted")];
        }""",
        encode(trace),
    )
    assert got == [True, aborted, aborted]


def test_the_story_of_a_block_is_what_happened_to_it(site):
    trace = small_trace()
    got = site.evaluate(
        "text => { const history = readTrace(text); return [3, 19].map((i) => "
        "history.blockStory(0, i)); }",
        encode(trace),
    )
    assert got[0]["holders"] == ["r0", "r1"] and got[0]["refCount"] == 2 and got[0]["filled"] == 8
    assert got[0]["history"] == [
        "step 0: allocated to r0",
        "step 3: found in the prefix cache by r1",
    ]
    assert got[1]["cached"] and got[1]["holders"] == []
    assert got[1]["history"][-1] == "step 15: freed by its last request"


def test_hits_and_evictions_are_those_of_the_scheduler(site, trace):
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          return Array.from({ length: history.length }, (_, i) => {
            const { hits, allocated, evicted } = history.stateAt(i);
            return { hits: [...hits], allocated: [...allocated], evicted: evicted.size };
          });
        }""",
        encode(trace),
    )
    size, evicted = trace.settings.block_size, 0
    for record, seen in zip(trace, got, strict=True):
        evicted += seen["evicted"]
        hits, fresh = set(), set()
        for share in record.requests:
            found = record.admitted.get(share.request_id, 0) // size
            if share.request_id in record.resumed:
                copied = {to for _, to in record.swap_in}
                found = next(
                    (i for i, b in enumerate(share.new_block_ids) if b in copied),
                    share.start // size,
                )
            hits |= set(share.new_block_ids[:found])
            fresh |= set(share.new_block_ids[found:])
        assert set(seen["hits"]) == hits and set(seen["allocated"]) == fresh
    if trace.settings.enable_prefix_caching:
        # Which free blocks can be found is reckoned: a copy of a block that is cached already is
        # not, though it is full.
        assert evicted >= trace.steps[-1].num_evictions
    else:
        assert evicted == 0


def test_rates(site):
    trace = small_trace()
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          const hits = history.prefixHitRate(3);
          return [history.tokensPerSecond(4, 19), history.tokensPerSecond(4, 19, 22), history.tokensPerSecond(4, 19, 99), hits];
        }""",
        encode(trace),
    )
    sampled = [sum(len(share.sampled) for share in record.requests) for record in trace]
    assert got == [
        sum(sampled[16:20]) / 4,
        sum(sampled[18:20]) / 4,
        0,
        pytest.approx(16 / (23 + 26)),
    ]


DRAFTS = [
    {"nanovllm_trace": 2, "settings": {"block_size": 4, "num_blocks": 8, "token_budget": 16}},
    {
        "named": [[0, "a", 3]],
        "arrived": [0],
        "admitted": [[0, 0]],
        "running": [0],
        "requests": [[0, 0, 3, [1], [7]]],
    },
    # One draft of three is accepted; the slots of positions 5 and 6 are written again.
    {"requests": [[0, 3, 4, [2], [7, 8], 3]]},
    {"requests": [[0, 5, 4, [3], [9, 9, 9, 9], 3]]},
    {"requests": [[0, 9, 4]]},
]


def draft_lines(hidden: bool = False) -> str:
    """A trace of one request with drafts; if `hidden`, without token ids."""
    header, *records = json.loads(json.dumps(DRAFTS))
    for record in records if hidden else []:
        record["requests"] = [
            (
                [*share[:-1], -1]
                if len(share) == 3
                else [*share[:4], [-1] * len(share[4]), *share[5:]]
            )
            for share in record["requests"]
        ]
    steps = [
        {"step": i, "start": float(i), "duration": 1.0} | record for i, record in enumerate(records)
    ]
    return "\n".join(json.dumps(line) for line in [header, *steps])


@pytest.mark.parametrize("hidden", [False, True])
def test_rejected_drafts_are_not_computed(site, hidden):
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          return Array.from({ length: history.length }, (_, i) => {
            const [state, record, story] = [history.stateAt(i), history.record(i), history.requestStory("a", i)];
            return {
              computed: story.computedTokens, output: story.outputTokens, kind: record.share(0).kind, parts: record.parts(0),
              filled: [1, 2, 3].map((block) => state.filled(block)), fading: [1, 2, 3].map((block) => state.fading(block)),
              acceptance: history.acceptanceLength(i) ?? null, firstToken: history.requests.get("a").firstToken,
            };
          });
        }""",
        draft_lines(hidden),
    )
    assert [each["computed"] for each in got] == [3, 5, 9, 10] and [
        each["output"] for each in got
    ] == [1, 3, 7, 8]
    assert [each["kind"] for each in got] == ["prefill", "decode", "decode", "decode"]
    assert [each["filled"] for each in got] == [[3, 0, 0], [4, 1, 0], [4, 4, 1], [4, 4, 2]]
    assert [each["fading"] for each in got] == [[0, 0, 0], [0, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert [each["acceptance"] for each in got] == [None, 2, 3, 3]
    assert [each["parts"] for each in got] == [
        [["prefill", 3]],
        [["decode", 1], ["accepted draft", 1], ["rejected draft", 2]],
        [["decode", 1], ["accepted draft", 3]],
        [["decode", 1]],
    ]
    assert {each["firstToken"] for each in got} == {0}


HEADER = json.dumps({"nanovllm_trace": 2, "settings": {"block_size": 16, "num_blocks": 8}})
STEP = {"step": 0, "start": 0.0, "duration": 1.0}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "line 1 of the trace: not a nanovllm trace"),
        (["{}"], "line 1 of the trace: not a nanovllm trace: the first line must name the format"),
        (
            ['{"nanovllm_trace": 1, "settings": {}}'],
            "the trace has format 1; this page reads format 2",
        ),
        (['{"nanovllm_trace": 2, "settings": {}}'], "the settings lack block_size"),
        (['{"nanovllm_trace": 2}'], "the settings lack block_size"),
        ([HEADER, '{"step": 0, "sta'], "line 2 of the trace: not JSON .*; was the file cut off"),
        ([HEADER, "7"], "line 2 of the trace: not a step record"),
        ([HEADER, "null"], "not a step record"),
        ([HEADER, "{}"], "not a step record"),
        (
            [HEADER, STEP, STEP | {"requests": [[3, 0, 5]]}],
            "line 3 .*request 3 was not named by any line before",
        ),
        ([HEADER, STEP | {"named": [[0, "a", 5]], "requests": [[0, 0]]}], "a damaged share"),
        (
            [HEADER, STEP | {"named": [[0, "a", 5]], "requests": [[0, 0, 5, 1, []]]}],
            "a damaged share",
        ),
        ([HEADER, STEP | {"named": [[0, "a", 5]], "requests": [7]}], "a damaged share"),
        (
            [HEADER, STEP | {"named": [[0, "a", 5]], "requests": [[0, 5, 4, [], [], [3]]]}],
            "a damaged share",
        ),
        (
            [HEADER, STEP | {"named": [[0, "a", 5]], "requests": [[0, 5, 4, [], [], 3, 3]]}],
            "a damaged share",
        ),
        ([HEADER, STEP | {"named": [7]}], "damaged names of requests"),
        ([HEADER, STEP | {"requests": 7}], "requests is not a list"),
        ([HEADER, STEP | {"waiting": [9]}], "request 9 was not named"),
        ([HEADER, STEP | {"finished": [[9, "stop"]]}], "request 9 was not named"),
        ([HEADER, STEP | {"start": "now"}], '"now" is not a number'),
        ([HEADER, STEP | {"snapshot": {"tables": [[9, []]]}}], "request 9 was not named"),
        # Names are not kept for ever: not beyond a snapshot, and not long after the end.
        (
            [
                HEADER,
                STEP | {"named": [[0, "a", 5]]},
                STEP | {"snapshot": {}},
                STEP | {"waiting": [0]},
            ],
            "line 4 .*request 0 was not named",
        ),
        (
            [HEADER, STEP | {"named": [[0, "a", 5]], "finished": [[0, "stop"]]}]
            + [STEP | {"running": [0]}] * 2
            + [STEP] * 8
            + [STEP | {"running": [0]}],
            "line 13 .*request 0 was not named",
        ),
    ],
)
def test_the_reader_rejects_what_is_foreign(site, lines, message):
    lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    got = site.evaluate(
        """lines => {
          const reader = new TraceReader();
          const good = lines.slice(0, -1).map((line) => reader.readLine(line));
          try { reader.readLine(lines.at(-1)); } catch (error) { return [good.length, error.message]; }
          return [good.length, "no error"];
        }""",
        lines,
    )
    assert got[0] == len(lines) - 1 and re.search(message, got[1]), got[1]


# ---------------------------------------------------------------- the pictures


def test_colours_are_those_of_the_figures(site):
    got = site.evaluate(
        "() => [Array.from({length: 30}, (_, i) => requestColor(i, LIGHT)), LIGHT.ink, "
        "LIGHT.muted, LIGHT.faint]"
    )
    assert [color.lower() for color in got[0]] == [request_color(i).lower() for i in range(30)]
    assert got[0][:6] == list(PALETTE) and got[1:] == [INK, MUTED, FAINT]
    assert len(set(got[0])) == 24, "the default burst has 16 requests, and chats come beside it"


def test_requests_of_http_clients_have_different_short_names(site):
    ids = [f"cmpl-5c1e35ab77d94d0b9f2e6a31c1d2e{i:03}-{i}" for i in range(12)] + [
        "cmpl-5c1e99ab77d94d0b9f2e6a31c1d2e-0"
    ]
    trace = simulate(
        [SimulatedRequest(0, 4, 2, request_id=each) for each in ids], num_kv_blocks=40, block_size=4
    )
    got = site.evaluate(
        "text => Array.from(readTrace(text).requests.values(), ({ label }) => label)", encode(trace)
    )
    assert got == [*(f"5c1e-{i}" for i in range(12)), "5c1e99-0"]


POOL = """([text, index, width, more = 0]) => {
  const history = readTrace(text);
  const { regions, texts, size } = drawn("pool", history, index, { width, more });
  const state = history.stateAt(index);
  const shown = new Set(regions.map(({ id }) => id));
  const missing = (is) => Array.from({ length: state.numBlocks }, (_, i) => i).filter((i) => is(i) && !shown.has(i)).length;
  const lowest = Math.max(...regions.map(({ y, height }) => y + height));
  const below = Math.min(...texts.filter(({ text }) => text.startsWith("Held")).map(({ top }) => top)) - lowest;
  return { side: regions[0].width, number: regions.length, below, room: size.height - lowest, height: size.height, words: texts.map(({ text }) => text).join(" "),
    held: missing((i) => state.refCount(i) > 0), cached: missing((i) => state.isCached(i)), inAll: state.numHeld };
}"""


@pytest.mark.parametrize("width", [340, 560, 900])
def test_a_large_pool_shows_the_blocks_in_use_and_the_rest_as_a_number(site, width):
    trace = prefix_trace(num_kv_blocks=DEFAULT_POOL)
    got = site.evaluate(POOL, [encode(trace), len(trace) // 2, width])
    assert got["held"] == got["cached"] == 0 and got["side"] >= 8
    assert f"Held: {got['inAll']} of 11,650 blocks." in got["words"]
    assert f"Not drawn: {11_650 - got['number']:,} empty." in got["words"]


def test_a_picture_that_keeps_its_height_has_no_hole_in_it(site):
    """Squares shrink while a pool fills, and the picture shrinks later: rows of free blocks fill
    the room."""
    trace = prefix_trace(num_kv_blocks=DEFAULT_POOL)
    needed = site.evaluate(POOL, [encode(trace), len(trace) // 2, 560])
    got = site.evaluate(POOL, [encode(trace), len(trace) // 2, 560, 150])
    assert got["number"] > needed["number"] and got["side"] == needed["side"]
    assert got["below"] == pytest.approx(needed["below"]) and got["below"] < 20
    assert got["room"] < needed["room"] + got["side"] + 8, "what is left is less than one more row"
    assert f"Not drawn: {11_650 - got['number']:,} empty." in got["words"]


def test_a_small_pool_is_drawn_once_in_however_high_a_picture(site):
    trace = prefix_trace(num_kv_blocks=40)
    needed = site.evaluate(POOL, [encode(trace), len(trace) // 2, 560])
    got = site.evaluate(POOL, [encode(trace), len(trace) // 2, 560, 150])
    assert got["number"] == needed["number"] == 40 and got["below"] == pytest.approx(
        needed["below"]
    )


def test_held_blocks_are_drawn_first_where_all_blocks_have_content(site):
    trace = prefix_trace(num_kv_blocks=DEFAULT_POOL)
    middle = len(trace) // 2
    first, *rest = steps_from(trace, middle)
    assert first.snapshot is not None
    held = {block for table in first.snapshot.tables.values() for block in table}
    first.snapshot.cached = [block for block in range(DEFAULT_POOL) if block not in held]
    got = site.evaluate(POOL, [encode(trace, [first, *rest]), 0, 560])
    assert got["held"] == 0 < got["cached"] and got["side"] >= 8 and got["height"] < 480
    assert f"Not drawn: {got['cached']:,} cached." in got["words"]


def test_a_full_pool_is_drawn_whole(site):
    table = list(range(DEFAULT_POOL))
    share = {
        "named": [[0, "a", 186_400]],
        "running": [0],
        "snapshot": {"tables": [[0, table]], "num_tokens": [[0, 186_400]]},
    }
    header = json.dumps(
        {"nanovllm_trace": 2, "settings": {"block_size": 16, "num_blocks": DEFAULT_POOL}}
    )
    got = site.evaluate(POOL, ["\n".join([header, json.dumps(STEP | share)]), 0, 900])
    assert got["held"] == 0 and got["number"] == DEFAULT_POOL


@pytest.mark.parametrize(("tokens", "budget"), [(14, 2048), (300, 2048), (1000, 2048), (7, 0)])
def test_the_budget_bar_shows_what_is_used_and_names_the_limit(site, tokens, budget):
    share = {
        "named": [[0, "a", 9000]],
        "requests": [[0, 0, tokens, [], []]],
        "running": [0],
        "token_budget": budget,
    }
    got = site.evaluate(
        """text => {
          const { regions, texts, size } = drawn("budget", readTrace(text), 0, { width: 560 });
          const bar = regions.filter((r) => r.kind === "request");
          return [bar.reduce((sum, r) => sum + r.width, 0) / size.width, texts.map(({ text }) => text).join("; ")];
        }""",
        "\n".join([HEADER, json.dumps(STEP | share)]),
    )
    assert (
        0.14 < got[0] < 1
        and f"budget: {budget:,} tokens" in got[1]
        and f"{tokens:,} tokens" in got[1]
    )


@pytest.mark.parametrize(("of_step", "note"), [(79, " (--max-step-ms)"), (256, "")])
def test_a_step_below_the_budget_names_what_limits_it(site, of_step, note):
    share = {
        "named": [[0, "a", 9000]],
        "requests": [[0, 0, 15, [], []]],
        "running": [0],
        "token_budget": of_step,
    }
    sizes = {"block_size": 16, "num_blocks": 64, "token_budget": 256}
    header = json.dumps({"nanovllm_trace": 2, "settings": sizes})
    got = site.evaluate(
        """async text => {
          const { StoryPanel } = await import("/web/story.js");
          const history = readTrace(text);
          const panel = new StoryPanel(() => {}, () => {});
          panel.show(history, 0, null, LIGHT);
          return [panel.content.textContent, drawn("budget", history, 0, { width: 560 }).texts.map(({ text }) => text).join("; ")];
        }""",
        "\n".join([header, json.dumps(STEP | share)]),
    )
    assert (
        f"15 of at most {of_step}{note}" in got[0] and f"budget: {of_step} tokens{note}" in got[1]
    )
    assert ("--max-step-ms" in got[0] + got[1]) == bool(note)


def test_the_use_of_a_large_pool_is_drawn_to_its_peak_and_the_pool_is_named(site):
    trace = prefix_trace(num_kv_blocks=DEFAULT_POOL)
    peak = max(record.num_blocks - record.num_free_blocks for record in trace)
    got = site.evaluate(
        "text => drawn('usage', readTrace(text), 3).texts.map(({ text }) => text)", encode(trace)
    )
    assert str(peak) in got and "pool: 11,650 ↑" in got


def test_a_live_table_view_gives_up_the_room_that_a_burst_needed(site):
    trace = prefix_trace(20, max_num_seqs=20, num_kv_blocks=400)
    trace.settings |= TraceSettings(live=True)
    heights = site.evaluate(
        """text => {
          const history = readTrace(text);
          return Array.from({ length: history.length }, (_, i) => VIEWS.tables.height(history, 560, i));
        }""",
        encode(trace),
    )
    assert heights[-1] < max(heights) / 2


def steps_to_look_at(trace: Trace) -> list[int]:
    """The first, the last, some between, and where something rare happens."""
    rare = [
        i
        for i, r in enumerate(trace)
        if r.preempted or r.resumed or not r.requests or any(r.admitted.values())
    ]
    return sorted({0, len(trace) // 2, len(trace) - 1, *rare[1:2], *rare[-1:]})


@pytest.mark.parametrize("name", [*TRACES, "default pool"])
def test_every_view_draws_every_trace(site, name):
    """No exception, no text that is too small, cut or over another one, regions within the picture,
    and the same picture when drawn again."""
    trace = TRACES[name]() if name in TRACES else prefix_trace(24, 7, num_kv_blocks=DEFAULT_POOL)
    problems = site.evaluate(
        """([text, names, steps]) => {
          const history = readTrace(text);
          const problems = [];
          const check = (name, index, width, theme) => {
            const say = (what) => problems.push(`${name}, record ${index}, ${width} px, ${theme.name}: ${what}`);
            const once = drawn(name, history, index, { width, theme });
            const { texts, regions, size } = once;
            if (drawn(name, history, index, { width, theme }).canvas.toDataURL() !== once.canvas.toDataURL()) say("drawn differently");
            if (!texts.length) say("no text at all");
            for (const t of texts) {
              if (t.pixels < 11) say(`too small: ${t.text}`);
              if (t.left < -1 || t.right > width + 1 || t.top < -1 || t.bottom > size.height + 1) say(`cut: ${t.text}`);
            }
            texts.forEach((one, i) => texts.slice(i + 1).forEach((other) => {
              const beside = one.right <= other.left + 1 || other.right <= one.left + 1;
              const above = one.bottom <= other.top + 1 || other.bottom <= one.top + 1;
              if (!beside && !above) say(`"${one.text}" and "${other.text}" overlap`);
            }));
            for (const r of regions) {
              const inside = r.x >= -1 && r.y >= -1 && r.x + r.width <= width + 1 && r.y + r.height <= size.height + 1;
              if (!inside) say(`region outside: ${JSON.stringify(r)}`);
              if (r.kind === "request" && !history.requests.has(r.id)) say(`no such request: ${r.id}`);
            }
          };
          for (const name of names) for (const index of steps) {
            for (const [width, theme] of [[360, DARK], [620, LIGHT], [900, index % 2 ? DARK : LIGHT]]) check(name, index, width, theme);
          }
          return problems;
        }""",
        [encode(trace), VIEWS, steps_to_look_at(trace)],
    )
    assert not problems, "\n".join(problems[:20]) + f"\n{len(problems)} in all"


def test_blocks_that_transfers_hold(site):
    """A request's blocks are filled by a producer, computed with, and then read by a peer: they are
    dotted while no request computes with them, and the pool's line counts them as held."""
    settings = TraceSettings(
        block_size=4, num_blocks=6, enable_prefix_caching=True, token_budget=16
    )
    trace, table = Trace(settings=settings), [4, 2]
    share = TracedRequest("a", 6, 1, 7, table, [9])
    ended = {
        "finished": {"a": "length"},
        "admitted": {"a": 6},
        "requests": [share],
        "running": ["a"],
    }
    for i, changes in enumerate([{"held": {"a": table}}, ended, {"held": {"a": table}}, {}]):
        number, free = i // 2, 4 if i < 3 else 6
        fields = {
            "step": number,
            "start": float(i),
            "duration": 0.5,
            "token_budget": 16,
            "requests": [],
        }
        sizes = {"num_blocks": 6, "num_free_blocks": free}
        trace.record(
            StepRecord(**(fields | sizes | ({} if i else {"arrived": {"a": 7}}) | changes))
        )
    states = [as_in_the_browser(state) for state in pool_states(trace)]
    assert [state["refCounts"].count("1") for state in states] == [2, 2, 2, 0]
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          return Array.from({length: history.length}, (_, i) => {
            const picture = drawn("pool", history, i);
            const { x, y, width } = picture.regions[4];
            const { data } = picture.context.getImageData(x + 2, y + 2, width - 4, width - 4);
            const colors = new Set();
            for (let at = 0; at < data.length; at += 4) colors.add(data.slice(at, at + 3).join());
            return [stateOf(history, i), picture.texts.map(({ text }) => text).join(), colors.has("34,34,34")];
          });
        }""",
        encode(trace),
    )
    assert [state for state, _, _ in got] == states
    assert ["Held: 2 of 6 blocks" in text for _, text, _ in got] == [True, True, True, False]
    assert [state["cached"] for state in states] == ["", "", "", "4"]
    assert got[0][2] and got[2][2]


def test_everything_can_be_pointed_at(site, trace):
    """The regions name each block of the pool, each table that fits, each request of the step, each
    step in the window."""
    index = len(trace) // 2
    got = site.evaluate(
        """([text, names, index]) => {
          const history = readTrace(text);
          return Object.fromEntries(names.map((name) => [name, drawn(name, history, index).regions.map((r) => `${r.kind} ${r.id ?? r.index}`)]));
        }""",
        [encode(trace), VIEWS, index],
    )
    record, state = trace.steps[index], list(pool_states(trace))[index]
    computed = {f"request {share.request_id}" for share in record.requests}
    queued = {f"request {r}" for r in [*record.waiting, *record.running, *record.swapped]}
    assert set(got["pool"]) == {f"block {block}" for block in range(state.num_blocks)}
    assert {f"request {r}" for r in state.tables} <= set(got["tables"])
    assert {f"block {b}" for table in state.tables.values() for b in table} <= set(got["tables"])
    assert queued | computed <= set(got["timeline"]) and set(got["queues"]) == queued
    for name in ("timeline", "budget", "usage"):
        assert f"step {index}" in got[name]
    assert computed == {region for region in got["budget"] if region.startswith("request")}
    assert computed & set(got["attention"]) and computed & set(got["batch"])
    if len(record.requests) <= 16:
        assert computed <= set(got["attention"]) and computed <= set(got["batch"])


def test_attention_and_batch_say_what_the_runner_gets(site) -> None:
    """Pages, positions and slots of each share, as block tables and shares have them."""
    trace = small_trace()
    states = list(pool_states(trace))
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          return Array.from({ length: history.length }, (_, index) => {
            const [attention, batch] = [drawn("attention", history, index), drawn("batch", history, index)];
            return [attention.texts.map((t) => t.text), attention.regions.filter((r) => r.kind === "block").map((r) => r.id), batch.texts.map((t) => t.text)];
          });
        }""",
        encode(trace),
    )
    size, computed = trace.settings.block_size, 0
    for record, state, (words, pages, cells) in zip(trace, states, got, strict=True):
        if not record.requests:
            continue
        assert pages == [
            block for share in record.requests for block in state.tables[share.request_id]
        ]
        positions, slots = [], []
        for share in record.requests:
            before = -(-share.start // size)
            reads = (
                f"reads {share.start} in {before} page{'s' * (before != 1)}"
                if share.start
                else "reads nothing before"
            )
            assert f"{share.kind}: {reads}, writes {share.num_tokens}" in words
            for position in range(share.start, share.start + share.num_tokens):
                positions.append(position)
                slots.append(
                    state.tables[share.request_id][position // size] * size + position % size
                )
        numbers = [int(text) for text in cells if text.isdigit()]
        assert [number for pair in zip(positions, slots, strict=True) for number in pair] == numbers
        computed += len(positions)
    assert computed > 50


def test_the_pool_shows_who_holds_what(site):
    trace = small_trace()
    state = list(pool_states(trace))[12]
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          const picture = drawn("pool", history, 12);
          return picture.regions.map((r) => [colorAt(picture, r.x + 4, r.y + 4), colorAt(picture, r.x + r.width - 4, r.y + r.height - 4)]);
        }""",
        encode(trace),
    )
    order = request_ids(trace)
    for block, (first, last) in enumerate(got):
        holders = [order.index(holder) for holder in state.holders(block)]
        if holders:
            assert first == request_color(min(holders)).upper(), f"block {block}"
            full = state.filled(block) == state.block_size
            assert last == (request_color(max(holders)).upper() if full else "#FFFFFF"), (
                f"block {block}"
            )
        elif block not in state.cached:
            assert first == last == "#FFFFFF", f"block {block}"


def test_the_timeline_shows_kinds_of_tokens(site):
    """Prefill is solid, decode pale, in the colour of the request; what comes after the current
    step is veiled."""
    trace = small_trace()
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          const picture = drawn("timeline", history, history.length - 1);
          const bars = picture.regions.filter((r) => r.kind === "request" && r.x > 80);
          const pale = Array.from({ length: 4 }, (_, i) => LIGHT.pale(i).toUpperCase());
          return { bars: bars.map((r) => [r.id, r.x, colorAt(picture, r.x + 4, r.y + r.height * 0.72)]), pale };
        }""",
        encode(trace),
    )
    bars = {(request_id, color) for request_id, _, color in got["bars"]}
    for number, request_id in enumerate(request_ids(trace)):
        assert (request_id, request_color(number).upper()) in bars, "its prefill"
        assert (request_id, got["pale"][number]) in bars, "its decode"
        kinds = [
            color for r, _, color in sorted(got["bars"], key=lambda bar: bar[1]) if r == request_id
        ]
        assert kinds[0] == request_color(number).upper() and kinds[-1] == got["pale"][number]


def test_drafts_have_the_colours_of_what_became_of_them(site):
    """One of three is accepted. In the batch, the budget, the timeline and memory, rejected ones
    fade."""
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          const middle = (picture, { x, y, width, height }, down = 0.5) => colorAt(picture, x + width / 4, y + height * down);
          const [batch, budget, timeline] = ["batch", "budget", "timeline"].map((name) => drawn(name, history, 1));
          const bar = budget.regions.find((r) => r.kind === "request");
          const run = timeline.regions.filter((r) => r.kind === "request" && r.x > 80)[1];
          const [pool, tables] = ["pool", "tables"].map((name) => drawn(name, history, 1));
          const block = pool.regions.find((r) => r.id === 2); // of two by two cells
          const entry = tables.regions.findLast((r) => r.id === 2 && r.x < 300); // a strip of four
          return {
            wanted: ["decode", "accepted draft", "rejected draft", "rejected draft"].map((kind) => LIGHT.ofTokens(kind, 0).toUpperCase()),
            batch: batch.regions.map((region) => middle(batch, region, 0.1)),
            budget: [1, 3, 5, 7].map((part) => colorAt(budget, bar.x + (bar.width * part) / 8, bar.y + 4)),
            timeline: [0.77, 0.59, 0.41, 0.23].map((down) => colorAt(timeline, run.x + run.width / 2, run.y + run.height * down)),
            fill: LIGHT.fill(0).toUpperCase(),
            pool: [[1, 1], [3, 1], [1, 3], [3, 3]].map(([x, y]) => colorAt(pool, block.x + (block.width * x) / 4 - 2, block.y + (block.width * y) / 4 - 2)),
            tables: [1, 3, 5, 7].map((part) => colorAt(tables, entry.x + (entry.width * part) / 8, entry.y + 4)),
          };
        }""",
        draft_lines(),
    )
    assert len(set(got["wanted"])) == 3
    for view in ("batch", "budget", "timeline"):
        assert got[view] == got["wanted"], view
    for view in ("pool", "tables"):
        assert got[view] == [got["fill"], got["wanted"][2], got["wanted"][2], "#FFFFFF"], view


def test_drafts_are_told(site):
    """In words beside the pictures, and in legends: there only if there are any."""
    views = ("tables", "pool", "timeline", "budget", "attention", "batch")
    told, words = site.evaluate(
        """async ([texts, names]) => {
          const { describeStep } = await import("/web/story.js");
          const { tellChanges } = await import("/web/film.js");
          const histories = texts.map((text) => readTrace(text));
          const [drafts] = histories;
          const legends = histories.map((history) => names.map((name) => drawn(name, history, 1).texts.map(({ text }) => text)));
          return [legends, [describeStep(drafts, 1), tellChanges(drafts, 1), tellChanges(drafts, 3)]];
        }""",
        [[draft_lines(), encode(small_trace())], views],
    )
    for view, mine, others in zip(views, *told, strict=True):
        assert "rejected draft" in mine and "rejected draft" not in others, view
        assert ("accepted draft" in mine) == (view in ("timeline", "budget", "batch")), view
    assert (
        "decode: reads 3 in 1 page, writes 4, 1 of 3 drafts accepted"
        in told[0][views.index("attention")]
    )
    assert "0 prefill, 1 decode, 3 drafted of 16 tokens" in words[0]
    assert words[1:] == [
        "This step computes: 0 prefill and 1 decode tokens. Drafts accepted: 1 of 3.",
        "This step computes: 0 prefill and 1 decode tokens.",
    ]


def test_the_legend_of_the_tables_explains_free_blocks_where_they_are_drawn(site):
    """With arrows into a small pool, its blocks that are free and still cached are hatched; of a
    large pool, only blocks that requests hold are drawn."""
    uncached = small_trace(enable_prefix_caching=False)
    legends = site.evaluate(
        """texts => texts.map((text) => {
          const history = readTrace(text);
          return drawn("tables", history, history.length - 1).texts.map(({ text }) => text);
        })""",
        [encode(trace) for trace in (small_trace(), uncached, TRACES["many"]())],
    )
    kinds = ("logical blocks", "free block", "free, still cached", "new block", "prefix hit")
    assert [[kind for kind in kinds if kind in legend] for legend in legends] == [
        ["logical blocks", "free block", "free, still cached", "new block", "prefix hit"],
        ["logical blocks", "free block", "new block"],
        ["new block", "prefix hit"],
    ]


def test_another_step_is_another_picture(site):
    different = site.evaluate(
        """([text, names]) => {
          const history = readTrace(text);
          const pictures = (name) => new Set([0, 3, 8, 12, 15].map((i) => drawn(name, history, i).canvas.toDataURL()));
          return names.map((name) => pictures(name).size);
        }""",
        [encode(prefix_trace()), VIEWS],
    )
    assert different == [5] * len(VIEWS)


def test_what_the_reader_points_at_is_seen_in_every_view(site):
    got = site.evaluate(
        """([text, names]) => {
          const history = readTrace(text);
          const request = { kind: "request", id: "r2" };
          const picture = (name, options) => drawn(name, history, 12, options).canvas.toDataURL();
          return names.map((name) => [{}, { selection: request }, { hover: request }].map((options) => picture(name, options)));
        }""",
        [encode(prefix_trace()), VIEWS],
    )
    for view, (plain, selected, hovered) in zip(VIEWS, got, strict=True):
        assert view == "usage" or plain not in (selected, hovered), view


def test_a_view_without_steps_says_what_would_be_there(site):
    got = site.evaluate(
        """([text, names]) => {
          const empty = names.map((name) => drawn(name, readTrace(text), 0));
          return empty.map(({ texts, regions }) => [texts.map((t) => t.text).join(), regions]);
        }""",
        [HEADER, VIEWS],
    )
    for view, (words, regions) in zip(VIEWS, got, strict=True):
        assert regions == [] and "once steps are recorded" in words, view


def test_a_long_trace_is_shown_in_a_window_around_the_step(site):
    trace = prefix_trace(300, 8)
    got = site.evaluate(
        """text => {
          const history = readTrace(text);
          const steps = (index, follow) => drawn("timeline", history, index, { follow }).regions.filter((r) => r.kind === "step").map((r) => r.index);
          const last = history.length - 1;
          return [steps(0), steps(Math.floor(last / 2)), steps(last), steps(last, true)].map((s) => [s[0], s.at(-1)]);
        }""",
        encode(trace),
    )
    last = len(trace) - 1
    assert got[0][0] == 0 and got[0][1] < last
    assert 0 < got[1][0] <= last // 2 <= got[1][1] < last
    assert got[2] == got[3] and got[2][1] == last
