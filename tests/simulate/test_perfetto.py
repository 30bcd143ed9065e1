"""What `nanovllm simulate --perfetto` writes of links, tiers and failures."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from nanovllm.simulate.links import Transfer
from nanovllm.simulate.perfetto import Lanes, arrows_of
from nanovllm.simulate.report import Summary
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.workload import SECOND
from nanovllm.trace.record import StepRecord, TracedRequest
from nanovllm.trace.trace import Trace

Event = dict[str, Any]
PREFILL_DECODE: dict[str, object] = {
    "prefill": 2,
    "decode": 3,
    "request_rate": 30.0,
    "num_prompts": 120,
    "random_input_len": 300,
    "random_output_len": 30,
    "burst_size": 12,
}
SHARED: dict[str, object] = {
    "num_prompts": 80,
    "request_rate": 6.0,
    "burst_size": 4,
    "random_prefix_len": 3000,
    "num_prefixes": 20,
    "random_input_len": 100,
    "random_output_len": 8,
    "num_kv_blocks": 1500,
    "kv_offloading_size": 2.0,
    "kv_store_size": 20.0,
    "replicas": 2,
    "routing_policy": "round_robin",
}
FAILURES: dict[str, object] = {
    "replicas": 3,
    "request_rate": 20.0,
    "num_prompts": 200,
    "random_input_len": 1000,
    "random_output_len": 100,
    "failures": ["0@2", "0@3", "1@0", "2@5"],
    "cold_start": 2.5,
}
# To the nanosecond to which times are rounded, in microseconds.
ROUNDING = 0.0021


class Events:
    """The events of a simulation, which are checked on the way."""

    def __init__(self, settings: dict[str, object], path: Path) -> None:
        self.summary: Summary = simulate(settings, path / "events.json")
        assert self.summary == simulate(settings), "recording changes nothing"
        self.all: list[Event] = json.loads((path / "events.json").read_bytes())["traceEvents"]
        self.names = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in self.all
            if event["name"] == "thread_name"
        }
        self.processes = {
            event["pid"]: event["args"]["name"]
            for event in self.all
            if event["name"] == "process_name"
        }
        for event in self.all:
            assert event["ph"] == "M" or event["ts"] >= 0
        self._check_tracks()
        self._check_arrows()

    def spans(self, track: str) -> list[Event]:
        """The spans of all tracks with this beginning of their name."""
        return [event for event in self._of_kind("X") if self.name_of(event).startswith(track)]

    def name_of(self, event: Event) -> str:
        """The name of an event's track."""
        return str(self.names[event["pid"], event["tid"]])

    def shares(self, pid: int, request_id: str) -> list[Event]:
        """The spans of a request in an engine."""
        return [span for span in self.spans(request_id) if self.track_is(span, pid, request_id)]

    def track_is(self, span: Event, pid: int, request_id: str) -> bool:
        """Whether a span is on the track of this request."""
        return span["pid"] == pid and self.name_of(span) == request_id

    def ways(self) -> dict[str, list[Event]]:
        """The spans that arrows join, in the order of their times."""
        found = defaultdict(list)
        for span in sorted(self._of_kind("X"), key=lambda event: event["ts"]):
            if "bind_id" in span:
                found[span["bind_id"]].append(span)
        return found

    def _of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.all if event["ph"] == kind]

    def _check_tracks(self) -> None:
        """Spans of a track do not overlap, to the nanosecond: Perfetto would not show them."""
        busy_until: dict[tuple[int, int], int] = defaultdict(int)
        for span in sorted(self._of_kind("X"), key=lambda event: event["ts"]):
            track = span["pid"], span["tid"]
            begin = round(span["ts"] * 1000)
            assert begin == pytest.approx(span["ts"] * 1000, abs=1e-3), "whole nanoseconds"
            assert begin >= busy_until[track] and span["dur"] >= 0
            busy_until[track] = begin + round(span["dur"] * 1000)
            assert track in self.names

    def _check_arrows(self) -> None:
        """As Perfetto wants it: the first span of a way begins it, and each other one goes on."""
        for way in self.ways().values():
            assert len(way) >= 2
            assert [span["flow_in"] for span in way] == [False] + [True] * (len(way) - 1)
            assert [span["flow_out"] for span in way] == [True] * (len(way) - 1) + [False]


def total_ms(spans: list[Event]) -> float:
    return sum(span["dur"] for span in spans) / 1000


def test_transfers_are_spans_between_the_steps_of_two_engines(tmp_path: Path) -> None:
    events = Events(PREFILL_DECODE, tmp_path)
    assert list(events.processes.values()) == [
        *(f"engine {i} (prefill)" for i in range(2)),
        *(f"engine {i} (decode)" for i in range(2, 5)),
    ]
    spans = events.spans("KV from engine ")
    summary = events.summary
    assert len(spans) == summary["num_transfers"] == 120
    assert sum(span["args"]["bytes"] for span in spans) == summary["num_transferred_bytes"]
    assert total_ms(spans) / 120 == pytest.approx(summary["mean_transfer_ms"], rel=1e-6)
    ways = events.ways()
    for span in spans:
        args = span["args"]
        assert events.name_of(span) == f"KV from {args['from']}"
        assert events.processes[span["pid"]] == f"{args['to']} (decode)"
        assert args["alone_ms"] + args["sharing_ms"] == pytest.approx(span["dur"] / 1000, abs=1e-5)
        before, kv, after = ways[span["bind_id"]]
        assert kv == span
        assert events.processes[before["pid"]] == f"{args['from']} (prefill)"
        assert events.name_of(before) == events.name_of(after) == span["name"]
        assert before == events.shares(before["pid"], span["name"])[-1]
        assert after == events.shares(span["pid"], span["name"])[0]
        assert before["ts"] + before["dur"] <= span["ts"] + ROUNDING
        assert span["ts"] + span["dur"] <= after["ts"] + ROUNDING
    # Bursts share links: on tracks next to each other, and longer than alone.
    shared = [span for span in spans if span["args"]["sharing_ms"] > 0.1]
    assert len(shared) > 20
    lanes = Counter((span["pid"], events.name_of(span), span["tid"]) for span in spans)
    assert len(lanes) > len({lane[:2] for lane in lanes})


def test_loads_from_each_tier_are_spans_before_the_steps_that_wait(tmp_path: Path) -> None:
    events = Events(SHARED, tmp_path)
    summary = events.summary
    for name, track in (("host", "KV from host memory"), ("store", "KV from store")):
        spans = events.spans(track)
        count = summary[f"num_{name}_loads"]
        assert isinstance(count, int) and len(spans) == count > 5
        assert sum(s["args"]["bytes"] for s in spans) == summary[f"num_{name}_loaded_bytes"]
        assert total_ms(spans) / count == pytest.approx(summary[f"mean_{name}_load_ms"], rel=1e-6)
    waited = 0
    for span in events.spans("KV from host memory"):
        way = events.ways()[span["bind_id"]]
        following = way[way.index(span) + 1]
        assert following == next(
            share
            for share in events.shares(span["pid"], span["name"])
            if share["ts"] >= span["ts"] + span["dur"] - ROUNDING
        )
        waited += following["ts"] < span["ts"] + span["dur"] + ROUNDING
        first = way[0]
        if events.name_of(first) == "KV from store":
            assert first["ts"] + first["dur"] == pytest.approx(span["ts"], abs=ROUNDING)
    assert waited > 5, "idle engines compute as soon as the KV is there"


def test_failures_and_late_starts_are_spans_without_steps(tmp_path: Path) -> None:
    events = Events(FAILURES, tmp_path)
    spans = {events.processes[span["pid"]]: span for span in events.spans("failures")}
    assert len(events.spans("failures")) == len(spans) == 3
    times = {
        name: (span["name"], span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6)
        for name, span in spans.items()
    }
    assert times == {
        "engine 0": ("failed, replacement starting", 2.0, 5.5),
        "engine 1": ("starting", 0.0, 2.5),
        "engine 2": ("failed, replacement starting", 5.0, 7.5),
    }
    assert spans["engine 0"]["args"] == {"failures_s": [2.0, 3.0], "ready_s": 5.5}
    for failure in spans.values():
        begin, end = failure["ts"], failure["ts"] + failure["dur"]
        steps = [each for each in events.spans("engine") if each["pid"] == failure["pid"]]
        # The step in flight at a failure still counts; one more was planned, and is dropped.
        begun = [each for each in steps if begin < each["ts"] < end - ROUNDING]
        assert len(steps) > 50 and not begun
        aborted = [
            each["ts"]
            for each in events.all
            if each["pid"] == failure["pid"] and each["name"] == "finished (abort)"
        ]
        assert all(begin <= time < begin + 1e5 for time in aborted), "not at the next step"
        assert bool(aborted) == (begin > 0)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pipeline_parallel_size": 4},
        {"spec_acceptance": "0.6,0.3"},
        {"prefill": 1, "decode": 2, "replicas": 1},
    ],
)
def test_an_engine_that_has_failed_computes_nothing(
    tmp_path: Path, more: dict[str, object]
) -> None:
    settings = {**FAILURES, "random_input_len": 6000, "failures": ["0@2.03", "2@3.07"]}
    events = Events({**settings, "cold_start": None, **more}, tmp_path)
    failures = events.spans("failures")
    assert {failure["pid"] for failure in failures} == {1, 3}
    for failure in failures:
        begin, end = failure["ts"], failure["ts"] + failure["dur"]
        engine = [event for event in events.all if event["pid"] == failure["pid"]]
        assert not [e for e in engine if e["ph"] == "X" and begin < e["ts"] < end and e["tid"] == 0]
        ended = {
            event["tid"]: event["ts"]
            for event in engine
            if event["name"] == "finished (abort)" and begin <= event["ts"] < end
        }
        assert ended
        for event in engine:
            if event["name"] == "first token" and event["tid"] in ended:
                assert event["ts"] <= ended[event["tid"]]
        # Nothing holds blocks, waits or runs once the last request has ended.
        for name in ("held KV blocks", "running requests", "waiting requests"):
            values = [e for e in engine if e["name"] == name and e["ts"] < end]
            assert values[-1]["args"]["value"] == 0


def test_an_engine_without_replacement_has_failed_until_the_end(tmp_path: Path) -> None:
    events = Events({**FAILURES, "failures": ["1@4", "2@500"], "cold_start": None}, tmp_path)
    (span,) = events.spans("failures")
    assert (span["pid"], span["name"], span["ts"]) == (2, "failed", 4e6)
    duration = events.summary["duration"]
    assert isinstance(duration, float)
    assert span["ts"] + span["dur"] == pytest.approx(1e6 * duration, abs=ROUNDING)
    assert span["args"]["ready_s"] is None


def test_arrows_lead_from_a_failed_engine_to_the_next(tmp_path: Path) -> None:
    # Long prompts, in parts: some requests lose an engine that has begun with them.
    events = Events({**FAILURES, "random_input_len": 6000, "random_output_len": 8}, tmp_path)
    again = {name for name in events.names.values() if name.endswith(", again")}
    assert again
    ways = list(events.ways().values())
    for way in ways:
        assert events.name_of(way[1]) == f"{events.name_of(way[0])}, again"
        assert way[0]["pid"] != way[1]["pid"]
        assert way[0]["ts"] + way[0]["dur"] <= way[1]["ts"] + ROUNDING
    # Those that only waited have no span in the failed engine.
    computed = {events.name_of(span) for span in events.spans("")}
    expected = {name for name in again if {name, name.removesuffix(", again")} <= computed}
    assert {events.name_of(way[1]) for way in ways} == expected
    assert expected


def test_a_request_arrives_where_it_was_sent(tmp_path: Path) -> None:
    events = Events(PREFILL_DECODE, tmp_path)
    arrived = [event for event in events.all if event["name"] == "arrived"]
    replicas = events.summary["replicas"]
    assert isinstance(replicas, list)
    assert Counter(event["pid"] for event in arrived) == {
        pid: replica["num_requests"] for pid, replica in enumerate(replicas, start=1)
    }
    for event in arrived:
        assert event["ts"] <= events.shares(event["pid"], events.name_of(event))[0]["ts"]


@pytest.mark.parametrize(
    "more",
    [
        {"failures": ["0@1", "3@2"], "cold_start": 1.0, "kv_offloading_size": 8.0},
        {"kv_store_size": 30.0, "random_prefix_len": 1000, "num_prefixes": 5},
        {"pipeline_parallel_size": 2},
        {"spec_acceptance": "0.6,0.3"},
        {"prefill_config": '{"tensor_parallel_size": 2}', "decode_config": '{"machine": "A100"}'},
    ],
)
def test_whatever_happens_spans_and_arrows_are_in_order(
    tmp_path: Path, more: dict[str, object]
) -> None:
    events = Events({**PREFILL_DECODE, **more}, tmp_path)
    assert len(events.spans("KV from engine ")) == events.summary["num_transfers"]
    for span in events.spans("KV from "):
        assert span["args"]["alone_ms"] > 0 and span["args"]["sharing_ms"] >= 0


def test_lanes_hold_spans_that_do_not_overlap() -> None:
    lanes = Lanes()
    tracks = [
        lanes.span(name, "x", begin * 10**6, end * 10**6, {})["tid"]
        for name, begin, end in [("a", 0, 5), ("b", 0, 9), ("a", 3, 6), ("a", 5, 7), ("a", 6, 8)]
    ]
    assert tracks == [1, 2, 3, 1, 3]
    assert lanes.first_free == 4
    order = {
        event["tid"]: event["args"]
        for event in lanes.names()
        if event["name"] == "thread_sort_index"
    }
    assert order == {1: {"sort_index": 1}, 3: {"sort_index": 2}, 2: {"sort_index": 3}}


def step_of(number: int, start: float, request_id: str) -> StepRecord:
    share = TracedRequest(request_id, 0, 8, 8, [])
    return StepRecord(number, start, 1.0, 8, [share])


def transfer_of(request_id: str, source: int, *, begin: int, end: int) -> Transfer:
    """A transfer to engine 2 that has ended, with times in seconds."""
    return Transfer(
        request_id=request_id,
        source=source,
        target=2,
        num_bytes=100,
        left=0,
        begin=begin * SECOND,
        alone=SECOND,
        arrived=lambda: None,
        end=end * SECOND,
    )


def test_arrows_of_a_request_that_fails_on_its_way() -> None:
    prefill, other, decode = Trace(), Trace(), Trace()
    # It computes the prompt, sends it to an engine that fails, and is sent again.
    prefill.steps = [step_of(0, 0.0, "r"), step_of(1, 1.0, "r"), step_of(2, 2.0, "s")]
    other.steps = [step_of(0, 9.0, "r, again")]
    decode.steps = [step_of(0, 13.0, "r, again"), step_of(1, 14.0, "r, again")]
    received = [transfer_of("r", 0, begin=2, end=4), transfer_of("r, again", 1, begin=10, end=13)]
    arrows = arrows_of([prefill, other, decode], [[], [], received])
    way = [arrows[0][1, "r"], arrows[2][-1, "r"], arrows[1][0, "r, again"]]
    way += [arrows[2][-2, "r, again"], arrows[2][0, "r, again"]]
    assert sum(map(len, arrows)) == len(way)
    assert {each["bind_id"] for each in way} == {"0x0"}
    assert [(each["flow_in"], each["flow_out"]) for each in way] == [
        (False, True),
        *[(True, True)] * 3,
        (True, False),
    ]
