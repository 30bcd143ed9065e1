"""Workload files: every format, compressed or not, and a line for every kind of damage."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nanovllm.data.errors import UsageError
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.simulate.traces import MAX_LINE, read_workload
from nanovllm.simulate.workload import SECOND, WorkloadRequest
from nanovllm.trace.record import Arrival
from nanovllm.trace.trace import StepRecord, Trace, TracedRequest

MOONCAKE = (
    '{"timestamp": 3000, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 4500, "input_length": 2, "output_length": 1, "hash_ids": [9]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.9799601,513,5\n"
    "2023-11-17 00:00:01.4799602,2,1\n"
)
AZURE_2024 = AZURE.replace(",513", "+00:00,513").replace(",2,", "+00:00,2,")
BURST_GPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "45,,1,ChatGPT,513,5,518,Conversation log\n"
    "46,,1,GPT-4,70,0,70,API log\n"
    "46.5,,1,GPT-4,2,1,3,API log\n"
)
BENCH = {
    "date": "20261129",
    "request_throughput": 1.5,
    "input_lens": [2, 70, 513],
    "output_lens": [1, 0, 5],
    "start_times": [1001.5, 1000.5, 1000.0],
}


def read(path: Path, **options: float) -> list[WorkloadRequest]:
    return list(read_workload(path, **options).requests)


def write(folder: Path, text: str | bytes, name: str = "workload") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


FILES = {
    "mooncake": MOONCAKE,
    "azure": AZURE,
    "azure 2024": AZURE_2024,
    "windows": "\ufeff" + AZURE.replace("\n", "\r\n"),
    "burst": BURST_GPT,
    "bench": json.dumps(BENCH),
    "bench, indented": json.dumps(BENCH, indent=1),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", FILES)
def test_every_format_is_recognised_by_its_content(
    tmp_path: Path, kind: str, compressed: bool
) -> None:
    content = FILES[kind].encode()
    first, second = read(write(tmp_path, gzip.compress(content) if compressed else content))
    assert (first.arrival, first.num_prompt_tokens, first.num_output_tokens) == (0, 513, 5)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (2, 1)
    expected = 3 * SECOND // 2
    if kind.startswith(("azure", "windows")):
        expected += SECOND // 10**7  # whose files have seven digits
    assert second.arrival == expected
    assert first.prefix_ids == ([0, 7] if kind == "mooncake" else ())


def test_a_trace_of_serve_is_a_workload(tmp_path: Path) -> None:
    trace = Trace(settings=TraceSettings(block_size=16, num_blocks=9, token_budget=64))
    share = TracedRequest("a", 0, 20, 20, [0, 1], [5])
    more = TracedRequest("a", 20, 1, 20, [], [6])
    other = TracedRequest("b", 0, 3, 3, [2], [5])
    trace.record(StepRecord(0, 1.0, 0.5, 64, [share], arrived={"a": 20, "c": 9}))
    trace.record(
        StepRecord(1, 1.5, 0.5, 64, [more, other], arrived={"b": 3}, finished={"b": "length"})
    )
    trace.record(StepRecord(2, 2.0, 0.5, 64, [], finished={"c": "abort", "a": "abort"}))
    path = tmp_path / "run.jsonl.gz"
    trace.save(path)
    a, b = read(path)  # c was aborted without output
    assert (a.request_id, a.arrival, a.num_prompt_tokens, a.num_output_tokens) == ("a", 0, 20, 2)
    assert a.abort == SECOND
    assert (b.request_id, b.arrival, b.num_prompt_tokens, b.num_output_tokens) == (
        "b",
        SECOND // 2,
        3,
        1,
    )
    assert b.abort is None


def test_a_trace_says_when_requests_arrived_and_what_they_share(tmp_path: Path) -> None:
    trace = Trace(settings=TraceSettings(block_size=16, num_blocks=9, token_budget=64))
    arrivals = {
        "a": Arrival(time=0.25, max_tokens=30, priority=2),
        "b": Arrival(time=0.75, max_tokens=30, prefix=(0, 2)),
        "c": Arrival(time=0.75, max_tokens=30, prefix=(1, 2)),
    }
    shares = [TracedRequest(name, 0, 40, 40, [0], [5] * 9) for name in arrivals]
    arrived = dict.fromkeys(arrivals, 40)
    trace.record(StepRecord(0, 1.0, 0.5, 64, shares, arrived=arrived, arrivals=arrivals))
    ends = {"a": "length", "b": "stop", "c": "abort"}
    trace.record(StepRecord(1, 1.5, 0.5, 64, [], finished=ends))
    path = tmp_path / "run.jsonl"
    trace.save(path)
    workload = read_workload(path)
    assert (workload.prefix_block_size, workload.names_outputs) == (16, True)
    a, b, c = workload.requests
    assert [r.arrival for r in (a, b, c)] == [0, SECOND // 2, SECOND // 2]
    assert (a.priority, b.priority) == (2, 0)
    assert [r.num_output_tokens for r in (a, b, c)] == [9, 9, 30], "c would have continued"
    assert (a.abort, c.abort) == (None, 5 * SECOND // 4)
    assert [len(r.prefix_ids) for r in (a, b, c)] == [4, 4, 5]
    assert list(b.prefix_ids[:2]) == list(a.prefix_ids[:2])
    assert list(c.prefix_ids[:2]) == list(b.prefix_ids[:2])
    others = [*a.prefix_ids, *b.prefix_ids[2:], *c.prefix_ids[2:]]
    assert len(set(others)) == len(others)


def trace_of(path: Path, *arrivals: Arrival, names: str = "ab", length: int = 40) -> Path:
    """A trace of requests that arrive before the first step and get a token from it."""
    trace = Trace(settings=TraceSettings(block_size=16, num_blocks=9, token_budget=64))
    for number, (name, arrival) in enumerate(zip(names, arrivals, strict=True)):
        share = TracedRequest(name, 0, length, length, [0], [5])
        record = StepRecord(number, 1.0 + number, 0.5, 64, [share], arrived={name: length})
        record.arrivals = {name: arrival}
        record.finished = {name: "length"}
        trace.record(record)
    trace.save(path)
    return path


def test_requests_of_a_trace_are_in_the_order_of_their_arrivals(tmp_path: Path) -> None:
    arrivals = [Arrival(time=time, max_tokens=1) for time in (0.75, 0.25)]
    found = read(trace_of(tmp_path / "run.jsonl", *arrivals))
    assert [(each.request_id, each.arrival) for each in found] == [("b", 0), ("a", SECOND // 2)]


def test_requests_of_a_trace_with_the_same_id_have_one_each(tmp_path: Path) -> None:
    arrivals = [Arrival(time=time, max_tokens=1) for time in (0.25, 1.75)]
    found = read(trace_of(tmp_path / "run.jsonl", *arrivals, names="aa"))
    assert [each.request_id for each in found] == ["a", "a, arrival 1"]


@pytest.mark.parametrize(
    ("message", "second", "length"),
    [
        ("no request is the first one with block 0 of 'b'", {"prefix": (1, 1)}, 40),
        ("no request is the first one with block 0 of 'b'", {"prefix": (7, 1)}, 40),
        ("no request is the first one with block 0 of 'b'", {"prefix": (-1, 1)}, 40),
        (r"request 'b' arrived at 1e\+300 s", {"time": 1e300}, 40),
        ("request 'a' arrived at 0 s with 1000000000 tokens", {}, 10**9),
    ],
)
def test_a_trace_that_cannot_be_served_again_is_reported_in_a_line(
    tmp_path: Path, message: str, second: dict[str, Any], length: int
) -> None:
    arrivals = Arrival(time=0, max_tokens=1), Arrival(**{"time": 0, "max_tokens": 1, **second})
    path = trace_of(tmp_path / "run.jsonl", *arrivals, length=length)
    with pytest.raises(UsageError, match=f"the trace is damaged: .*{message}"):
        read(path)


def test_a_workload_can_be_faster_and_shorter(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE)
    assert [request.arrival for request in read(path, speedup=3.0)] == [0, SECOND // 2]
    assert len(read(path, limit=1)) == 1


def test_rows_are_read_while_they_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE + "damaged\n")
    requests = iter(read_workload(path).requests)
    assert next(requests).num_prompt_tokens == 513
    assert next(requests).num_prompt_tokens == 2
    with pytest.raises(UsageError, match="row 3: JSON is malformed"):
        next(requests)


ROW = '{"timestamp": 3000, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]}'
DAMAGE = {
    "row 1, column input_length: Expected int >= 1": ROW.replace("513", "-513"),
    "row 2, column input_length: Expected int >= 1": f"{ROW}\n{ROW.replace('513', '0')}",
    "row 1, column input_length: Expected int <= 100000000": ROW.replace("513", "9" * 40),
    "row 1, column input_length: Expected int, got float": ROW.replace("513", "5.5"),
    "row 1, column output_length: Expected int, got str": ROW.replace(" 5,", ' "5",'),
    "row 1: JSON is malformed": ROW.replace("3000", "NaN"),
    "row 1, column timestamp: Number out of range": ROW.replace("3000", "1e999"),
    "row 1, column timestamp: Expected float <= 10": ROW.replace("3000", "1e99"),
    "row 2: Object missing required field timestamp": f"{ROW}\n" + '{"input_length": 1}',
    "row 1, column hash_ids: Expected 2 numbers, got 3": ROW.replace("7]", "7, 8]"),
    "row 1, column hash_ids: Expected int, got str": ROW.replace("7]", '"7"]'),
    "row 1, column hash_ids: Expected int >= 0": ROW.replace("7]", "-7]"),
    r"row 1, column hash_ids: Expected numbers below 2\*\*64": ROW.replace("7]", "9" * 40 + "]"),
    "row 2: maximum recursion depth": f"{ROW}\n" + ROW[:-1] + ', "x": ' + "[" * 9**5,
    "row 1: maximum recursion depth": '{"a":' * 9**5,
    "is no workload .*new-line character": AZURE.replace("\n", "\r"),
    "row 2: Input data was truncated": f"{ROW}\n{ROW[:30]}",
    "row 3: earlier than the row before": f"{ROW}\n\n{ROW.replace('3000', '2999')}",
    "row 2: Expected 3 columns, got 4": AZURE.replace("513", "5,13"),
    "row 3: Expected 3 columns, got 2": AZURE.replace(",1\n", "\n"),
    "row 3, column GeneratedTokens: Expected int, got str, got 'many'": AZURE.replace(
        ",1\n", ",many\n"
    ),
    "row 2, column ContextTokens: Expected int >= 1, got '-513'": AZURE.replace("513", "-513"),
    "row 2, column TIMESTAMP: .*, got 'noon'": AZURE.replace("2023-11-16 23:59:59.9799601", "noon"),
    "row 2, column TIMESTAMP: .*, got '2023-13-16": AZURE.replace("2023-11-16", "2023-13-16"),
    "row 3, column Timestamp: Expected float >= 0.0, got 'nan'": BURST_GPT.replace("46,", "nan,"),
    "row 2, column Timestamp: Expected float <= .*, got 'inf'": BURST_GPT.replace("45,", "inf,"),
    "row 4: earlier than the row before": BURST_GPT.replace("46.5", "45.5"),
    "row 1, column input_lens: Expected int >= 1": json.dumps(BENCH | {"input_lens": [2, -1, 3]}),
    "required field start_times: record it with --save-detailed": '{"request_throughput": 1}',
    "row 1, column input_lens: missing, although start_times has 3": json.dumps(
        BENCH | {"input_lens": [2]}
    ),
    "row 2, column start_times: missing, although output_lens has 4": json.dumps(
        BENCH | {"start_times": [1.0, 2.0], "output_lens": [1, 2, 3, 4]}
    ),
    "is empty": "",
    "is no workload: name a file with Mooncake": "a,b\n1,2\n",
    "has no request with output tokens": AZURE.split("\n")[0],
    "Trace.*row|line 2: not a step record": '{"nanovllm_trace": 2}\n{"step": "x"}\n',
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_reported_in_a_line(tmp_path: Path, message: str) -> None:
    path = write(tmp_path, DAMAGE[message])
    with pytest.raises(UsageError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_is_reported_in_a_line(tmp_path: Path) -> None:
    contents = {
        "utf-16": MOONCAKE.encode("utf-16"),
        "binary": bytes(range(256)) * 10,
        "truncated": gzip.compress(MOONCAKE.encode() * 100)[:-20],
        "not gzip": b"\x1f\x8b" + b"x" * 100,
        "latin-1": AZURE.replace("5\n", "5é\n").encode("latin-1"),
        "one byte": b"{",
    }
    for name, content in contents.items():
        path = write(tmp_path, content, name)
        with pytest.raises(UsageError, match=str(path)) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="directory: name a file"):
            read(path)


@pytest.mark.parametrize("content", ["\0", "a,"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_line_has_an_end(tmp_path: Path, content: str, compressed: bool) -> None:
    data = (content * MAX_LINE)[:MAX_LINE].encode()
    path = write(tmp_path, gzip.compress(data) if compressed else data)
    with pytest.raises(UsageError, match=rf"row 1 has {MAX_LINE:,} bytes or more: name a file"):
        read(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_result_in_a_single_line_may_be_longer(tmp_path: Path, mark: str) -> None:
    text = json.dumps(BENCH | {"generated_texts": ["x" * MAX_LINE]})
    assert len(read(write(tmp_path, mark + text))) == 2


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device")
def test_a_device_without_an_end_is_no_workload() -> None:
    with pytest.raises(UsageError, match="/dev/zero, row 1 has"):
        read(Path("/dev/zero"))


def test_a_trace_may_come_through_a_pipe(tmp_path: Path) -> None:
    arrivals = [Arrival(time=time, max_tokens=1) for time in (0.25, 1.75)]
    path = trace_of(tmp_path / "run.jsonl", *arrivals)
    read_end, write_end = os.pipe()
    os.write(write_end, path.read_bytes())
    os.close(write_end)
    try:
        assert read(Path(f"/dev/fd/{read_end}")) == read(path)
    finally:
        os.close(read_end)
