"""The record of the engine: what is written can be read, and what is read tells exactly what the
memory manager did."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import pathlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm.assembly.core
import nanovllm.trace.trace
from nanovllm.assembly.engine import Engine
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab.viz import SimulatedRequest, pool_state_at, simulate
from nanovllm.lab.viz.data import pool_states
from nanovllm.processes.activity import waiting_for_others
from nanovllm.trace.format import (
    HIDDEN_TOKEN,
    MIN_KNOWN,
    TraceDecoder,
    TraceEncoder,
    header_line,
    parse_header,
    require_sizes,
)
from nanovllm.trace.record import Arrival
from nanovllm.trace.trace import Snapshot, StepRecord, Trace, TracedRequest, TraceError, read_trace
from tests.examples import examples
from tests.oracle import make_checkpoint
from tests.pairwise import in_turn
from tests.stages import StagedExecutor
from tests.stand_ins import set_executor
from tests.trace.drafting import SPECULATION, drafting_engine

IDS = st.sampled_from(["a", "b", 'quoted "c"', "d\n", "é", "f"])
COUNTS = st.integers(0, 10**6)
BLOCKS = st.lists(st.integers(0, 63), max_size=4)
WORDS = st.text(max_size=8)
ARRIVALS = st.builds(
    Arrival,
    time=st.floats(0, 1e6),
    max_tokens=COUNTS,
    in_flight=COUNTS,
    priority=st.integers(-5, 5),
    prefix=st.none() | st.tuples(COUNTS, COUNTS),
    looks_back=st.booleans(),
    prompt_logprobs=st.booleans(),
    num_speculative_tokens=st.none() | COUNTS,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


# ---------------------------------------------------------------- the format


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    """Any record, however unlikely; but a request has one prompt length in it."""
    lengths = {request_id: draw(COUNTS) for request_id in draw(st.sets(IDS, min_size=1))}
    known = st.sampled_from(sorted(lengths))
    queues = [draw(st.lists(known, max_size=4)) for _ in range(3)]
    shares = [
        TracedRequest(
            r,
            draw(COUNTS),
            size,
            lengths[r],
            draw(BLOCKS),
            draw(BLOCKS),
            draw(st.integers(0, size - 1)),
        )
        for r, size in draw(st.lists(st.tuples(known, st.integers(1, 4)), max_size=4))
    ]
    snapshot = Snapshot(
        {r: draw(BLOCKS) for r in queues[1]},
        {r: draw(COUNTS) for r in queues[1]},
        draw(BLOCKS),
        {r: lengths[r] for queue in queues for r in queue},
        draw(COUNTS),
    )
    pairs = st.lists(st.tuples(COUNTS, COUNTS), max_size=3)
    arrived = {r: lengths[r] for r in draw(st.sets(known))}
    return StepRecord(
        step=draw(COUNTS),
        start=draw(st.floats(0, 1e6)),
        duration=draw(st.floats(0, 10)),
        token_budget=draw(COUNTS),
        requests=shares,
        arrived=arrived,
        arrivals=draw(st.dictionaries(IDS, ARRIVALS, max_size=2)),
        prefixes=draw(st.dictionaries(IDS, st.tuples(COUNTS, COUNTS), max_size=2)),
        aborted=draw(st.dictionaries(IDS, COUNTS, max_size=2)),
        cache_resets=draw(BLOCKS),
        admitted=draw(st.dictionaries(IDS, COUNTS, max_size=3)),
        resumed=draw(st.lists(IDS, max_size=2)),
        preempted=draw(st.dictionaries(IDS, WORDS, max_size=2)),
        finished=draw(st.dictionaries(IDS, WORDS, max_size=2)),
        swap_out=draw(pairs),
        swap_in=draw(pairs),
        blocked_by=draw(WORDS),
        waiting=queues[0],
        running=queues[1],
        swapped=queues[2],
        num_free_blocks=draw(COUNTS),
        num_blocks=draw(COUNTS),
        num_evictions=draw(COUNTS),
        snapshot=snapshot if draw(st.booleans()) else None,
        prompts=draw(st.dictionaries(IDS, WORDS, max_size=2)),
        text=draw(st.dictionaries(IDS, WORDS, max_size=2)),
    )


@given(st.lists(records(), max_size=6))
@settings(max_examples=examples(150))
def test_any_record_survives_the_way_through_a_line(steps: list[StepRecord]) -> None:
    trace = Trace(settings=TraceSettings(num_blocks=64))
    trace.steps = steps
    header, *lines = trace.lines()
    decoder = TraceDecoder(parse_header(header, "a trace"))
    assert [decoder.decode(line) for line in lines] == steps
    starts = [i for i, step in enumerate(steps) if step.snapshot is not None]
    for start in starts:  # who starts at a snapshot needs nothing of what stood before
        decoder = TraceDecoder(TraceSettings())
        assert [decoder.decode(line) for line in lines[start:]] == steps[start:]


def crowd(seed: int, **options: Any) -> Trace:
    """A simulated run with prefix hits, aborts, and a pool that is too small."""
    draw = random.Random(seed)
    requests = [
        SimulatedRequest(
            arrival_step=draw.randint(0, 40),
            prompt=draw.choice([draw.randint(1, 50), list(range(draw.randint(1, 50)))]),
            output_len=draw.randint(1, 30),
            priority=draw.randint(0, 2),
            abort_step=draw.choice([None, None, None, draw.randint(0, 60)]),
        )
        for _ in range(draw.randint(1, 25))
    ]
    defaults = {
        "num_kv_blocks": 20,
        "block_size": 4,
        "max_num_batched_tokens": 40,
        "check_invariants": True,
    }
    return simulate(requests, **(defaults | options))


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preemption_mode": "swap"},
        {"scheduling_policy": "priority"},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_a_real_trace_survives_the_way_through_a_file(
    options: dict[str, Any], name: str, tmp_path: pathlib.Path
) -> None:
    for seed in range(5):
        trace = crowd(seed, **options)
        trace.save(tmp_path / name)
        loaded = Trace.load(tmp_path / name)
        assert loaded.steps == trace.steps and loaded.settings == trace.settings
        assert loaded.steps and (tmp_path / name).read_bytes().startswith(
            b"\x1f\x8b"
        ) == name.endswith(".gz")


def test_a_decode_step_costs_few_bytes() -> None:
    trace = simulate([SimulatedRequest(0, 8, 100) for _ in range(64)], num_kv_blocks=1024)
    _, *lines = trace.lines()
    assert len(lines) == 100 and len(lines[2]) < 64 * 12 and max(map(len, lines[1:])) < 64 * 30


def test_an_id_may_come_back_as_another_request() -> None:
    def served(step: int, length: int) -> StepRecord:
        share = TracedRequest("a", 0, length, length, [0], [7])
        return StepRecord(
            step, float(step), 1.0, 64, [share], arrived={"a": length}, finished={"a": "length"}
        )

    steps = [served(0, 5), served(1, 3), served(2, 3)]
    encoder, decoder = TraceEncoder(TraceSettings()), TraceDecoder(TraceSettings())
    lines = [encoder.encode(step) for step in steps]
    assert [decoder.decode(line) for line in lines] == steps
    assert [json.loads(line)["named"] for line in lines] == [
        [[0, "a", 5]],
        [[1, "a", 3]],
        [[2, "a", 3]],
    ]


def test_an_encoder_remembers_only_those_who_live() -> None:
    trace = simulate([SimulatedRequest(5 * i, 8, 4) for i in range(200)], num_kv_blocks=64)
    encoder = TraceEncoder(trace.settings)
    for step in trace:
        encoder.encode(step)
        assert len(encoder.known) <= 2 * 3 + MIN_KNOWN + 1 < 200


def test_one_who_has_ended_keeps_its_number_while_it_is_in_a_queue(checkpoint: str) -> None:
    """With asynchronous scheduling a request still runs in the record after its end, without a
    share if its length is known."""
    config = EngineConfig(
        checkpoint, dtype="float32", device="cpu", num_kv_blocks=18, async_scheduling=True
    )
    trace = Trace()
    core = Engine(config, trace)
    for i in range(6):
        core.add_request(
            EngineRequest(f"r{i}", [5, 6, 7], SamplingParams(max_tokens=2 + i, ignore_eos=True))
        )
    while core.has_unfinished:
        core.step()
    late = [
        request_id
        for before, record in itertools.pairwise(trace)
        for request_id in before.finished.keys() & set(record.running)
        if request_id not in {share.request_id for share in record.requests}
    ]
    assert late, "nobody runs after its end: this tests nothing"
    encoder = TraceEncoder(trace.settings)
    named = [name for step in trace for name in json.loads(encoder.encode(step)).get("named", [])]
    assert sorted(named) == [[i, f"r{i}", 3] for i in range(6)]


def test_one_who_is_mentioned_long_after_its_end_is_not_remembered() -> None:
    encoder = TraceEncoder(TraceSettings())
    for step in range(500):
        encoder.encode(
            StepRecord(step, float(step), 0.0, 8, [], finished={"a": "stop"}, running=[f"r{step}"])
        )
    assert len(encoder.known) <= 2 + MIN_KNOWN + 1


@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_can_be_hidden(drafts: bool, checkpoint: str) -> None:
    trace = drafting_engine(checkpoint)[1] if drafts else crowd(1)
    encoder = TraceEncoder(TraceSettings(), hide_tokens=True)
    decoder = TraceDecoder(TraceSettings())
    for step in trace:
        shown = decoder.decode(encoder.encode(step))
        for mine, theirs in zip(step.requests, shown.requests, strict=True):
            assert theirs.sampled == [HIDDEN_TOKEN] * len(mine.sampled)
            assert theirs.num_accepted == mine.num_accepted
            mine.sampled = theirs.sampled
        assert shown.requests == step.requests


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 14},
        {"preemption_mode": "swap", "swap_space": 0.01, "num_kv_blocks": 14},
    ],
    ids=str,
)
def test_a_trace_tells_what_became_of_drafts(
    checkpoint: str, options: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """From a file: which tokens each request got, in which steps, and which slots were written
    again."""
    core, recorded, outputs = drafting_engine(checkpoint, **options)
    recorded.save(tmp_path / "run.jsonl")
    trace = Trace.load(tmp_path / "run.jsonl")
    known: dict[str, int] = {}  # of each request, tokens that are computed
    told: dict[str, list[int]] = {request_id: [] for request_id in outputs}
    for record in trace:
        known |= dict.fromkeys(record.admitted, -1) | {r: -1 for r in record.preempted}
        for share in record.requests:
            assert known.get(share.request_id, -1) in (-1, share.start), (
                "it goes on behind its last computed token"
            )
            known[share.request_id] = (
                share.start + share.num_tokens - share.num_drafts + share.num_accepted
            )
            told[share.request_id] += share.sampled
            assert not share.num_drafts or share.kind == "decode"
    assert told == outputs
    drafts = [share for record in trace for share in record.requests if share.num_drafts]
    stats = core.stats.spec_decoding
    assert stats.num_drafts == len(drafts) and stats.num_draft_tokens == sum(
        s.num_drafts for s in drafts
    )
    assert (
        0
        < stats.num_accepted_tokens
        == sum(s.num_accepted for s in drafts)
        < stats.num_draft_tokens
    )
    assert {s.num_accepted for s in drafts} >= {0, 3}
    assert any(record.preempted for record in trace) == bool(options)
    _, plain, same = drafting_engine(checkpoint, speculative_config=None)
    assert same | {"r4": []} == outputs | {"r4": []}, "r4 is aborted after some step"
    assert not any(share.num_drafts for record in plain for share in record.requests)


# ---------------------------------------------------------------- files that are none, or not whole


def test_a_file_that_was_cut_off(tmp_path: pathlib.Path) -> None:
    trace, path = crowd(2), tmp_path / "run.jsonl"
    trace.save(path)
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[3] + 2, ends[4]):
        path.write_bytes(whole[:cut])
        if cut == ends[4]:  # only the line's end is missing
            assert Trace.load(path).steps == trace.steps[:4]
            continue
        with pytest.raises(
            TraceError, match=rf"{path}, line 5: .*cut off after 3 complete steps.*--partial"
        ):
            Trace.load(path)
        assert Trace.load(path, partial=True).steps == trace.steps[:3]
    path.write_bytes(whole[: ends[0] - 3])
    for partial in (False, True):
        with pytest.raises(TraceError, match="not a nanovllm trace"):
            Trace.load(path, partial)


def test_a_compressed_file_that_was_cut_off_or_damaged(tmp_path: pathlib.Path) -> None:
    trace, path = crowd(3), tmp_path / "run.jsonl.gz"
    trace.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(TraceError, match="cut off"):
        Trace.load(path)
    assert Trace.load(path, partial=True).steps == trace.steps
    path.write_bytes(whole[: len(whole) * 2 // 3])
    partly = Trace.load(path, partial=True).steps
    assert 0 < len(partly) < len(trace) and partly == trace.steps[: len(partly)]
    path.write_bytes(whole[:-200] + b"\xff" * 100 + whole[-100:])
    with pytest.raises(TraceError, match="damaged"):
        Trace.load(path)


FOREIGN = [
    b"",
    b"\n",
    b"{}\n",
    b"[1]\n",
    b"7\n",
    b'"nanovllm_trace"\n',
    b"\xff\xfe\x00",
    b"step,start\n0,1\n",
    b'{"nanovllm_trace": "2"}\n',
    b'{"nanovllm_trace": 2, "settings": []}\n',
    b"\x00" * 1000,
]


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: repr(content[:40]))
@pytest.mark.parametrize("compressed", [False, True])
def test_a_foreign_file(content: bytes, compressed: bool, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(TraceError, match=rf"{path} is not a nanovllm trace"):
        Trace.load(path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device")
def test_a_device_without_an_end_is_no_trace() -> None:
    with pytest.raises(TraceError, match="/dev/zero is not a nanovllm trace"):
        Trace.load("/dev/zero")


def test_a_trace_of_another_version(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text('{"nanovllm_trace": 1, "settings": {}}\n')
    with pytest.raises(TraceError, match="has version 1, but this nanovllm reads version 2"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": "first", "start": 0}', "int"),
        ('{"start": 0}', "step"),
        ('{"step": 0, "start": 0, "arrived": [5]}', "request number 5 is unknown"),
        ('{"step": 0, "start": 0, "requests": [[0, 1]]}', "not a share"),
        (
            '{"step": 0, "start": 0, "named": [[0, "a", 1]], "requests": [[0, 0, 1, 2, 3]]}',
            "not a share",
        ),
        (
            (
                '{"step": 0, "start": 0, "named": [[0, "a", 1]], "requests": [[0, 0, 4, [], [],'
                " [3]]]}"
            ),
            "not a share",
        ),
        (
            (
                '{"step": 0, "start": 0, "named": [[0, "a", 1]], "requests": [[0, 0, 4, [], [], 3,'
                " 3]]}"
            ),
            "not a share",
        ),
        ('{"step": 0, "start": 0} and more', "malformed"),
    ],
)
def test_a_damaged_line_is_named(line: str, reason: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.jsonl"
    settings = '{"block_size": 4, "num_blocks": 4}'
    path.write_text(f'{{"nanovllm_trace": 2, "settings": {settings}}}\n{line}\n')
    for read in (Trace.load, lambda path: list(read_trace(path)[2])):
        with pytest.raises(TraceError, match=rf"{path}, line 2: not a step record \(.*{reason}"):
            read(path)


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "token_budget"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "16", [16]], ids=repr)
def test_a_size_that_is_none(name: str, value: object, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.jsonl"
    sizes = {"block_size": 4, "num_blocks": 4} | {name: value}
    path.write_text(json.dumps({"nanovllm_trace": 2, "settings": sizes}) + "\n")
    with pytest.raises(TraceError, match=f"{path}: its {name} must be an integer from 1 to"):
        Trace.load(path)


@pytest.mark.parametrize("name", ["block_size", "num_blocks"])
def test_without_its_size_a_pool_cannot_be_shown(name: str, tmp_path: pathlib.Path) -> None:
    sizes = {"block_size": 4, "num_blocks": 4}
    del sizes[name]
    settings = TraceSettings(**sizes)
    path = tmp_path / "run.jsonl"
    path.write_bytes(header_line(settings))
    assert Trace.load(path).settings == settings
    with pytest.raises(
        TraceError, match=f"{path} cannot be drawn: its first line does not say {name}"
    ):
        require_sizes(read_trace(path)[0], path)


# ---------------------------------------------------------------- what the records say of the pool


@dataclass
class Truth:
    """What the memory manager looked like right after a step had been scheduled."""

    tables: dict[str, list[int]]
    ref_counts: list[int]
    cached: set[int]
    num_computed: dict[str, int]
    num_preemptions: int


class Witness:
    """Notes the truth of every step that a scheduler plans, by the step's number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Truth] = []
        schedule = Scheduler.schedule

        def watched(scheduler: Scheduler) -> SchedulerOutput:
            plan = schedule(scheduler)
            if not plan.empty:
                self.steps.append(self.look(scheduler))
            return plan

        monkeypatch.setattr(Scheduler, "schedule", watched)

    @staticmethod
    def look(scheduler: Scheduler) -> Truth:
        manager = scheduler.manager
        return Truth(
            {request_id: list(table) for request_id, table in manager.tables.items()},
            list(manager.pool.ref_counts),
            {b for b in manager.pool.cached_blocks.values() if not manager.pool.ref_counts[b]},
            {
                request_id: scheduler.queues.requests[request_id].num_computed_tokens
                for request_id in manager.tables
            },
            scheduler.num_preemptions,
        )

    def check(self, trace: Trace) -> None:
        """Every record of the trace leads to the state that was seen."""
        ended, rejected = set[str](), dict[str, int]()
        for i, (record, state) in enumerate(zip(trace, pool_states(trace), strict=True)):
            ended -= record.arrived.keys()
            if record.snapshot is not None:
                # They may have ended with the step before this one, whose results were not there
                # yet.
                ended |= (
                    trace.steps[i + 1].finished.keys()
                    if i + 1 < len(trace)
                    else set(record.running)
                )
            if record.requests:
                truth = self.steps[record.step]
                assert state.tables == truth.tables, record.step
                assert state.ref_counts == truth.ref_counts
                written = {r: n for r, n in truth.num_computed.items() if r not in ended}
                told = {r: n for r, n in state.num_tokens.items() if r not in ended}
                # The scheduler counts drafts as computed until it knows that they are rejected.
                rejected |= {s.request_id: s.num_drafts - s.num_accepted for s in record.requests}
                computed = {s.request_id for s in record.requests}
                assert written.keys() == told.keys()
                for r, number in written.items():
                    more = rejected.get(r, 0)
                    assert number - told[r] == more or (r not in computed and number == told[r]), (
                        record.step,
                        r,
                    )
                if record.snapshot is not None:
                    assert state.cached == truth.cached
                    assert record.snapshot.num_preemptions == truth.num_preemptions
                assert not state.cached & {b for b, count in enumerate(state.ref_counts) if count}
            else:
                assert not state.tables and not any(state.ref_counts)
            assert state.ref_counts.count(0) == record.num_free_blocks
            ended |= record.finished.keys()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preemption_mode": "swap"},
        {"preemption_mode": "swap", "num_host_blocks": 6},
        {"scheduling_policy": "priority"},
        {"enable_prefix_caching": False},
        {"batching_policy": "prefill_first"},
        {"batching_policy": "static"},
    ],
    ids=str,
)
def test_the_pool_of_a_simulation_can_be_rebuilt(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(examples(9, by_day=1)):
        with monkeypatch.context() as patch:
            witness = Witness(patch)
            trace = crowd(seed, **options)
        for number, record in enumerate(r for r in trace if r.requests):
            # Idle steps are counted, not scheduled.
            record.step = number
        witness.check(trace)
        middle = trace.steps[len(trace) // 2]
        assert pool_state_at(trace, middle.step).tables == witness.steps[middle.step].tables


def test_rebuilding_all_states_is_linear() -> None:
    """`pool_states` looks at each record once; asking `pool_state_at` for every step would look at
    half of all each time."""
    trace = crowd(4)
    looks = 0

    class Counted(Trace):
        def __iter__(self) -> Iterator[StepRecord]:
            nonlocal looks
            for step in self.steps:
                looks += 1
                yield step

    counted = Counted(settings=trace.settings)
    counted.steps = trace.steps
    assert len(list(pool_states(counted))) == len(trace)
    assert looks == 2 * len(trace), "once for the order of appearance, once for the states"


# ---------------------------------------------------------------- watching the engine

ENGINES: list[dict[str, Any]] = [
    {"async_scheduling": False},
    {"async_scheduling": True},
    {"async_scheduling": True, "preemption_mode": "swap", "swap_space": 0.01},
    {"async_scheduling": False, "preemption_mode": "swap", "swap_space": 0.01},
    {"async_scheduling": True, "enable_prefix_caching": False},
    {"pipeline_parallel_size": 3},
    {"pipeline_parallel_size": 2, "preemption_mode": "swap", "swap_space": 0.01},
    {"speculative_config": SPECULATION},
    {"speculative_config": SPECULATION, "preemption_mode": "swap", "swap_space": 0.01},
    {"speculative_config": SPECULATION, "pipeline_parallel_size": 2},
]
WEIGHTS = {
    "add": 8,
    "step": 10,
    "abort": 2,
    "watch": 2,
    "unwatch": 1,
    "refresh": 2,
    "reset cache": 1,
    "break": 0.3,
}


class Reader:
    """Watches an engine as a page does: what it sees has gone through the lines of a stream."""

    def __init__(self, core: Engine) -> None:
        self.trace = Trace(settings=core.trace_settings)
        self._encoder, self._decoder = TraceEncoder(TraceSettings()), TraceDecoder(TraceSettings())

    def see(self, record: StepRecord) -> None:
        self.trace.record(self._decoder.decode(self._encoder.encode(record)))


class Session:
    """An engine, and people who come, look and go."""

    def __init__(self, core: Engine, seed: int) -> None:
        self.core = core
        self.draw = random.Random(seed)
        self.readers: list[Reader] = []
        self.gone: list[Reader] = []

    def do(self, action: str) -> None:
        core, draw = self.core, self.draw
        reader = draw.choice(self.readers) if self.readers else None
        if action == "add":
            self.add(f"{draw.random()}")
        elif action == "step":
            for _ in range(draw.randint(1, 6)):
                core.step()
        elif action == "abort" and core.has_unfinished:
            core.abort_request(draw.choice(sorted(core.scheduler.queues.requests)))
        elif action == "watch":
            self.readers.append(Reader(core))
            core.watch(self.readers[-1].see)
        elif action == "refresh" and reader is not None:
            core.watch(reader.see)
        elif action == "unwatch" and reader is not None:
            self.readers.remove(reader)
            self.gone.append(reader)
            core.unwatch(reader.see)
        elif action == "reset cache":
            core.reset_prefix_cache()
        elif action == "break":
            self.break_off()

    def add(self, name: str) -> None:
        draw = self.draw
        first = draw.choice([5, 5, draw.randint(6, 300)])  # some prompts begin alike
        prompt = [3 + (first + 11 * i) % 300 for i in range(draw.randint(1, 30))]
        stops = list(range(0, 320, 16)) if draw.random() < 0.5 else []
        params = SamplingParams(
            max_tokens=draw.randint(1, 25), seed=draw.randint(0, 99), stop_token_ids=stops
        )
        if self.core.config.speculative is not None:
            # Answers that n-grams can foresee, some of the time.
            params.logit_bias = dict.fromkeys((5, 6, 7), 100.0)
        self.core.add_request(EngineRequest(name, prompt, params))

    def break_off(self) -> None:
        launch = self.core.runner.launch
        self.core.runner.launch = refuse  # type: ignore[method-assign]
        try:
            self.core.step()
        except ArithmeticError:
            assert not self.core.has_unfinished
        finally:
            self.core.runner.launch = launch  # type: ignore[method-assign]

    def close(self) -> None:
        while self.core.has_unfinished:
            self.core.step()
        self.core.abort_request("nobody")  # what broke off last is told as soon as anything happens


def refuse(plan: SchedulerOutput) -> Any:
    raise ArithmeticError("the device is on fire")


@pytest.mark.parametrize(("options", "traced"), in_turn(ENGINES, [False, True]), ids=str)
def test_who_starts_at_any_moment_ends_with_the_truth(
    checkpoint: str, options: dict[str, Any], traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        checkpoint,
        dtype="float32",
        device="cpu",
        max_model_len=64,
        num_kv_blocks=18,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        check_invariants=True,
        **options,
    )
    witness = Witness(monkeypatch)
    trace = Trace() if traced else None
    if config.pipeline_parallel_size > 1:
        set_executor(monkeypatch, StagedExecutor)
    core = Engine(config, trace)

    readers = []
    for seed in range(examples(9, by_day=2)):
        session = Session(core, seed)
        for action in session.draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=80):
            session.do(action)
            del witness.steps[core.num_steps :]  # a plan that was broken off
        session.close()
        for reader in session.readers:
            core.unwatch(reader.see)
        assert all(reader.trace.steps for reader in session.readers)
        readers += session.gone + session.readers
    seen = [reader.trace.steps for reader in readers if reader.trace.steps]
    for reader in readers:
        witness.check(reader.trace)
    assert all(steps[0].snapshot is not None for steps in seen)
    assert {bool(steps[0].requests) for steps in seen} == {True, False}, (
        "some start while it works, some while it does not"
    )
    assert any(step.preempted for steps in seen for step in steps)
    assert (
        any(max(step.admitted.values(), default=0) for steps in seen for step in steps)
        == config.enable_prefix_caching
    )
    shares = [
        share for steps in seen for step in steps for share in step.requests if share.num_drafts
    ]
    assert {bool(share.num_accepted) for share in shares} == (
        {True, False} if config.speculative else set()
    )
    if trace is not None:
        witness.check(trace)
    else:
        assert not core.recorder.is_on


def test_what_no_step_tells_is_shown_at_once(checkpoint: str) -> None:
    """The prefix cache is emptied between two steps, and a step breaks off: both change the pool,
    and neither is a step."""
    config = EngineConfig(checkpoint, dtype="float32", device="cpu", num_kv_blocks=18, block_size=4)
    core, reader = Engine(config), []
    core.watch(reader.append)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    core.add_request(EngineRequest("a", list(range(3, 20)), params))
    while core.has_unfinished:
        core.step()
    core.watch(reader.append)  # asks for a fresh snapshot
    assert len(reader[-1].snapshot.cached) == 5, "five blocks of 21 computed tokens are full"
    core.reset_prefix_cache()
    assert (
        reader[-1].snapshot is not None
        and not reader[-1].snapshot.cached
        and not reader[-1].requests
    )
    core.add_request(EngineRequest("b", list(range(3, 20)), params))
    core.step()
    core.runner.launch = refuse  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        core.step()
    del core.runner.launch
    core.add_request(EngineRequest("c", [5], params))
    core.step()
    assert reader[-1].finished == {"b": "error"} and list(reader[-1].snapshot.tables) == ["c"]
    count = len(reader)
    core.unwatch(reader.append)
    core.unwatch(reader.append)  # twice is as good as once
    core.step()
    assert len(reader) == count and not core.recorder.is_on


def write_traces_to(patch: pytest.MonkeyPatch, file: Any) -> None:
    """Give whoever opens a trace's file this one."""
    patch.setattr(nanovllm.trace.trace, "_open_for_writing", lambda _: file)


class FullDisk(io.RawIOBase):
    """A file on a disk that takes so many bytes, and then none."""

    def __init__(self, room: int) -> None:
        self.room, self.failures = room, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if len(data) > self.room:
            self.failures += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return len(data)


@pytest.mark.parametrize("room", [0, 300])
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "compressed"])
def test_a_full_disk_ends_the_trace_and_not_the_engine(
    checkpoint: str,
    room: int,
    compressed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FullDisk(room)
    file: Any = io.BufferedWriter(disk, 100)
    write_traces_to(monkeypatch, gzip.GzipFile("", "wb", 5, file) if compressed else file)
    config = EngineConfig(
        checkpoint, dtype="float32", device="cpu", num_kv_blocks=18, trace="run.jsonl"
    )
    core = Engine(config)
    assert core.trace is not None
    for name in "abc":
        core.add_request(
            EngineRequest(name, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
        )
        outputs = []
        while core.has_unfinished:
            outputs += core.step()
        assert sum(len(output.new_token_ids) for output in outputs) == 20
        if name == "b":  # a compressor hands out what it has at the latest when it is closed
            core.trace.close()
    core.close()
    assert disk.failures
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "run.jsonl ends here" in warning
    assert warning.endswith("No space left on device: free space on the disk, or name another one")


def test_a_slow_disk_is_no_hang(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread says of every write that it may wait: also of the records between steps,
    and of the last one."""
    waits: list[bool] = []

    class Disk(io.BytesIO):
        def write(self, data: Any) -> int:
            waits.append(waiting_for_others().depth > 0)
            return io.BytesIO.write(self, data)

        def close(self) -> None:
            waits.append(waiting_for_others().depth > 0)
            io.BytesIO.close(self)

    write_traces_to(monkeypatch, Disk())
    core = Engine(EngineConfig(checkpoint, dtype="float32", num_kv_blocks=18, trace="run.jsonl"))
    core.add_request(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True)))
    while core.has_unfinished:
        core.step()
    core.add_request(EngineRequest("b", [5, 6, 7], SamplingParams()))
    core.abort_request("b")
    core.close()
    assert len(waits) == 5 and all(waits), "header, two steps, the abort, the end"


def test_a_trace_that_cannot_be_begun_is_an_error_at_the_start(
    checkpoint: str, tmp_path: pathlib.Path
) -> None:
    config = EngineConfig(
        checkpoint, dtype="float32", num_kv_blocks=18, trace=str(tmp_path / "none" / "a")
    )
    with pytest.raises(TraceError, match=r"cannot write the trace .*none/a .*a folder that exists"):
        Engine(config)
