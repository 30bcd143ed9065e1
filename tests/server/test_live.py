"""Looking on while the engine works, and looking back: the stream of a server, the page, recorded
traces."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.testclient import TestClient

import nanovllm
from nanovllm import SamplingParams
from nanovllm.assembly.engine import Engine
from nanovllm.cli import serve as serve_cli
from nanovllm.cli import trace as trace_cli
from nanovllm.cli.main import main
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import CompletionOutput, RequestOutput
from nanovllm.data.request import EngineRequest
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.process import Report
from nanovllm.lab.viz import SimulatedRequest, simulate
from nanovllm.lab.viz.data import pool_states
from nanovllm.lab.viz.film import VIEWS
from nanovllm.server import page
from nanovllm.server.access import Access
from nanovllm.trace import stream as step_stream
from nanovllm.trace.format import HIDDEN_TOKEN, TraceDecoder, header_line, parse_header
from nanovllm.trace.stream import MAX_CHARACTERS, MAX_PROMPT_TOKENS, RequestTexts, StepBroadcast
from nanovllm.trace.trace import Snapshot, StepRecord, Trace
from tests.server_process import ServerProcess, wait_until
from tests.stand_ins import set_constants
from tests.trace.drafting import drafting_trace

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Viewer:
    """Reads a stream as it comes, from an engine in this process."""

    def __init__(self, engine: AsyncEngine, rank: int = 0) -> None:
        self.stream = engine.watch(rank)
        self.raw = b""
        self.trace = Trace()
        self._decoder: TraceDecoder | None = None

    async def read_until(self, is_enough: Any) -> None:
        """Read on until a record is enough."""
        async with asyncio.timeout(30):
            while not any(map(is_enough, self.trace.steps)):
                self.take(await anext(self.stream))

    def take(self, chunk: bytes) -> None:
        assert chunk.endswith(b"\n"), "a chunk ends where a line ends"
        self.raw += chunk
        for line in chunk.splitlines():
            if self._decoder is None:
                self.trace.settings = parse_header(line, "the stream")
                self._decoder = TraceDecoder(self.trace.settings)
            else:
                self.trace.steps.append(self._decoder.decode(line))


def ends(*request_ids: str) -> Any:
    return lambda step: set(request_ids) <= step.finished.keys()


async def answer(
    engine: AsyncEngine, prompt: Any, request_id: str, params: SamplingParams = GREEDY
) -> str:
    return "".join(
        [output.outputs[0].text async for output in engine.generate(prompt, params, request_id)]
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: pathlib.Path) -> AsyncIterator[AsyncEngine]:
    """An engine that shows no text."""
    config = EngineConfig(
        str(tiny_model), attention_backend="torch", dtype="float32", num_kv_blocks=64
    )
    running = await AsyncEngine.start(config)
    yield running
    await running.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_engine(tiny_model: pathlib.Path) -> AsyncIterator[AsyncEngine]:
    """An engine that shows text, under the name "tiny"."""
    config = EngineConfig(
        str(tiny_model),
        served_model_name="tiny",
        attention_backend="torch",
        dtype="float32",
        num_kv_blocks=64,
        async_scheduling=True,
    )
    running = await AsyncEngine.start(config, show_text=True)
    yield running
    await running.shutdown()


# ---------------------------------------------------------------- the stream


@pytest.mark.asyncio(loop_scope="module")
async def test_a_viewer_sees_every_step_and_no_text(engine: AsyncEngine) -> None:
    viewer = Viewer(engine)
    # At once, although nothing happens.
    await viewer.read_until(lambda step: step.snapshot is not None)
    assert viewer.trace.settings.live is True and viewer.trace.settings.num_blocks == 64
    text = await answer(engine, "a secret of mine", "seen")
    await viewer.read_until(ends("seen"))
    first, *steps = viewer.trace.steps
    assert not first.requests and not first.snapshot.tables
    assert [share.request_id for step in steps for share in step.requests] == ["seen"] * len(steps)
    assert sum(step.num_tokens for step in steps) == len("a secret of mine") + 12 - 1
    assert {token for s in steps for share in s.requests for token in share.sampled} == {
        HIDDEN_TOKEN
    }
    assert text and not any(step.text or step.prompts for step in steps)
    for secret in ("secret", text, json.dumps(text)[1:-1]):
        assert secret.encode() not in viewer.raw
    *_, last = pool_states(viewer.trace)
    assert last.tables  # the last step's blocks are given up when the next one is planned
    viewer.stream.close()


def reports_of(engine: AsyncEngine, patch: pytest.MonkeyPatch) -> list[Report]:
    """The reports that come from the engine's process from now on."""
    reports: list[Report] = []
    take = engine.client.take_reports

    def take_reports() -> list[Report]:
        news = take()
        reports.extend(news)
        return news

    patch.setattr(engine.client, "take_reports", take_reports)
    return reports


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_recorded_unless_somebody_looks(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = reports_of(engine, monkeypatch)
    await answer(engine, "unseen", "alone")
    assert reports and not any(report.steps for report in reports)
    viewers = [Viewer(engine), Viewer(engine)]
    await answer(engine, "seen", "together")
    for viewer in viewers:
        await viewer.read_until(ends("together"))
    viewers[0].stream.close()
    viewers[0].stream.close()  # twice is as good as once
    await answer(engine, "seen", "still")
    await viewers[1].read_until(ends("still"))
    assert not any(map(ends("still"), viewers[0].trace.steps))
    viewers[1].stream.close()
    assert not engine.watching.broadcasts[0].streams
    # The order to stop is carried out before this one is taken.
    await answer(engine, "unseen", "last")
    await answer(engine, "unseen", "very last")
    del reports[:]
    await answer(engine, "unseen", "alone again")
    assert reports and not any(report.steps for report in reports)


@pytest.mark.asyncio(loop_scope="module")
async def test_who_comes_late_starts_at_a_snapshot(engine: AsyncEngine) -> None:
    early = Viewer(engine)
    long = GREEDY.clone(max_tokens=150)
    task = asyncio.create_task(answer(engine, "a long story", "long", long))
    await early.read_until(lambda step: bool(step.requests))
    late = Viewer(engine)
    await late.read_until(ends("long"))
    await early.read_until(ends("long"))
    await task
    first = late.trace.steps[0]
    assert first.snapshot is not None and list(first.snapshot.tables) == ["long"]
    assert (
        first.snapshot.prompt_lens == {"long": len("a long story")} and "long" not in first.arrived
    )
    states = {
        r.step: s for r, s in zip(early.trace, pool_states(early.trace), strict=True) if r.requests
    }
    shared = [
        (r, s) for r, s in zip(late.trace, pool_states(late.trace), strict=True) if r.requests
    ]
    assert len(shared) > 5
    for record, state in shared:
        assert (
            state.tables == states[record.step].tables
            and state.num_tokens == states[record.step].num_tokens
        )
    for viewer in (early, late):
        viewer.stream.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_with_show_text_everybody_can_read(open_engine: AsyncEngine) -> None:
    engine = open_engine
    early = Viewer(engine)
    await early.read_until(lambda step: step.snapshot is not None)
    assert early.trace.settings.model == "tiny"
    long = GREEDY.clone(max_tokens=120, n=2, temperature=1.0, seed=3)
    ids = [5, 6, 7, 300]

    async def both() -> list[str]:
        texts = ["", ""]
        async for output in engine.generate({"prompt_token_ids": ids}, long, "two"):
            for piece in output.outputs:
                texts[piece.index] += piece.text
        return texts

    task = asyncio.create_task(both())
    await early.read_until(lambda step: bool(step.text))
    late = Viewer(engine)
    await late.read_until(ends("two-0", "two-1"))
    await early.read_until(ends("two-0", "two-1"))
    texts = await task
    prompt = engine.tokenizer.decode(ids, skip_special_tokens=False)
    for viewer in (early, late):
        said = {f"two-{i}": "" for i in range(2)}
        for step in viewer.trace:
            for request_id, text in step.text.items():
                said[request_id] += text
        assert list(said.values()) == texts, "who comes late gets what has been said so far"
        prompts: dict[str, str] = {}
        for step in viewer.trace:
            prompts |= step.prompts
        assert prompts == {"two-0": prompt, "two-1": prompt}
        assert all(
            token >= 0 for s in viewer.trace for share in s.requests for token in share.sampled
        )
        viewer.stream.close()
    assert any(step.text for step in late.trace.steps[1:])
    texts_kept = engine.watching.broadcasts[0].texts
    assert texts_kept is not None
    await answer(engine, "nobody looks", "unseen")
    assert not texts_kept.sequences


# ---------------------------------------------------------------- several engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_engines(tiny_model: pathlib.Path) -> AsyncIterator[AsyncEngine]:
    """Data parallelism; the engines show text."""
    config = EngineConfig(
        str(tiny_model),
        attention_backend="torch",
        dtype="float32",
        num_kv_blocks=64,
        device="cpu",
        data_parallel_size=2,
    )
    running = await AsyncEngine.start(config, show_text=True)
    yield running
    await running.shutdown()


@pytest.mark.asyncio(loop_scope="module")
async def test_each_of_several_engines_shows_what_it_computes(two_engines: AsyncEngine) -> None:
    before = [stats.num_queried_tokens for stats in two_engines.stats.engines]
    viewers = [Viewer(two_engines, rank) for rank in range(2)]
    for viewer in viewers:
        await viewer.read_until(lambda step: step.snapshot is not None)
    prompts = {f"r{i}": f"{i} is where this begins" for i in range(6)}
    texts = await asyncio.gather(*(answer(two_engines, prompts[name], name) for name in prompts))
    ended: list[set[str]] = [set(), set()]

    async def follow(rank: int) -> None:
        viewer = viewers[rank]
        while True:
            ended[rank] = {name for step in viewer.trace for name in step.finished}
            viewer.take(await anext(viewer.stream))

    # The share of an engine depends on how fast it answers: on a busy machine one got five of six
    # requests. So the test waits for all six, wherever they are computed.
    readers = [asyncio.create_task(follow(rank)) for rank in range(2)]
    async with asyncio.timeout(30):
        while set().union(*ended) != prompts.keys():
            await asyncio.sleep(0.01)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    seen: dict[str, int] = {}
    for rank, viewer in enumerate(viewers):
        settings = viewer.trace.settings
        assert (settings.data_rank, settings.data_parallel_size) == (rank, 2)
        arrived = {name for step in viewer.trace for name in step.arrived}
        assert arrived and arrived == ended[rank]
        assert not seen.keys() & arrived
        seen |= dict.fromkeys(arrived, rank)
        shown = {
            name: "".join(step.text.get(name, "") for step in viewer.trace) for name in arrived
        }
        assert shown == {
            name: text for name, text in zip(prompts, texts, strict=True) if name in arrived
        }
        told = {name: prompt for step in viewer.trace for name, prompt in step.prompts.items()}
        assert told == {name: prompts[name] for name in arrived}
        assert list(pool_states(viewer.trace))[-1].tables
        viewer.stream.close()
    assert seen.keys() == prompts.keys()
    each = two_engines.stats.engines
    assert [stats.num_queried_tokens for stats in each] == [
        before[rank] + sum(len(prompts[name]) for name in prompts if seen[name] == rank)
        for rank in range(2)
    ]
    assert two_engines.stats.num_steps == sum(stats.num_steps for stats in each)


@pytest.mark.asyncio(loop_scope="module")
async def test_only_the_engine_that_somebody_looks_at_records(
    two_engines: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = reports_of(two_engines, monkeypatch)

    async def burst(name: str) -> None:
        await asyncio.gather(*(answer(two_engines, f"{i}{name}", f"{name}{i}") for i in range(4)))

    await burst("unseen")
    assert reports and not any(report.steps for report in reports)
    viewer = Viewer(two_engines, 1)
    await viewer.read_until(lambda step: step.snapshot is not None)
    await burst("seen")
    assert {engine for report in reports for engine in report.steps} == {1}
    texts = two_engines.watching.broadcasts[0].texts
    assert texts is not None and not any(s.new for s in texts.sequences.values() if s.engine == 0)
    viewer.stream.close()
    for name in ("on its way", "gone"):  # the order to stop is carried out before the second burst
        await burst(name)
    del reports[:]
    await burst("unseen again")
    assert reports and not any(report.steps for report in reports)
    assert not texts.sequences


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (1, 1)])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_there_is_not(
    two_engines: AsyncEngine, engine: AsyncEngine, rank: int, size: int
) -> None:
    fitting = {1: "engine must be 0, the only one", 2: "engine must be from 0 to 1"}[size]
    with pytest.raises(ValueError, match=f"^{fitting}, not {rank}$"):
        {1: engine, 2: two_engines}[size].watch(rank)


def test_texts_come_with_the_lines_of_their_engine() -> None:
    texts = RequestTexts(Words())  # type: ignore[arg-type]
    for name in ("a", "b", "never begun"):
        texts.expect(name, f"prompt {name}", [EngineRequest(name, [1], GREEDY)])

    def shown(engine: int, name: str) -> tuple[dict[str, str], ...]:
        record = StepRecord(1, 0.0, 0.1, 64, [], running=[name])
        record.snapshot = Snapshot({name: [1]}, {name: 1}, [], {name: 1})
        new, start = texts.new(record, engine), texts.so_far(record)
        texts.forget(engine)
        return start.prompts, start.text, new.text

    def say(engine: int, name: str, text: str, reason: str | None = None) -> None:
        piece = CompletionOutput(0, text, finish_reason=reason, engine=engine)
        texts.add(RequestOutput(name, None, [], [piece], False))

    say(0, "a", "of the first")
    say(1, "b", "of the second")
    for engine, name, text in ((1, "b", "of the second"), (0, "a", "of the first")):
        assert shown(engine, name) == ({name: f"prompt {name}"}, {name: text}, {name: text})
    say(1, "b", ".", "stop")
    texts.forget(0)
    assert shown(1, "b")[1:] == ({"b": "of the second."}, {"b": "."}), "until then it was kept"
    say(0, "never begun", "", "abort")
    texts.forget(0)
    assert [(s.sequence_id, s.new) for s in texts.sequences.values()] == [("a", "")]


# ---------------------------------------------------------------- slow readers


def broadcast() -> tuple[StepBroadcast, list[str]]:
    orders: list[str] = []
    return StepBroadcast(TraceSettings(live=True), orders.append), orders


def record(step: int, snapshot: Snapshot | None = None) -> msgspec.Raw:
    """A record as an engine sends it."""
    return msgspec.Raw(
        msgspec.msgpack.encode(StepRecord(step, 0.0, 0.0, 64, [], snapshot=snapshot))
    )


def steps(lines: bytes) -> list[int]:
    """The numbers of the steps in some lines, without the header."""
    parsed = map(json.loads, lines.splitlines())
    return [line["step"] for line in parsed if "step" in line]


async def test_news_are_gathered() -> None:
    shared, _ = broadcast()
    stream = shared.watch()
    assert await anext(stream) == header_line(TraceSettings(live=True))
    shared.put([record(0), record(1, Snapshot())])
    for i in range(2, 100):
        shared.put([record(i)])
    assert steps(await anext(stream)) == list(range(1, 100))
    shared.put([record(100)])
    shared.end()
    assert [steps(chunk) async for chunk in stream] == [[100]]
    header = header_line(TraceSettings(live=True))
    assert [chunk async for chunk in shared.watch()] == [header], "it is over"


async def test_a_slow_reader_costs_no_memory_and_goes_on_at_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_constants(monkeypatch, step_stream, MAX_BACKLOG_BYTES=1000)
    shared, orders = broadcast()
    slow, fast = shared.watch(), shared.watch()
    assert orders == ["watch", "watch"]
    shared.put([record(0, Snapshot())])
    read = await anext(fast)
    for i in range(1, 1000):
        shared.put([record(i)])
        assert sum(map(len, slow._lines[1:])) <= 1000
        if i % 15 == 0:
            read += await anext(fast)
    assert orders == ["watch"] * 3, "it is resynchronised once: until then it waits"
    shared.put([record(1000, Snapshot()), record(1001)])
    read += await anext(fast)
    assert steps(read) == list(range(1002))
    assert steps(await anext(slow)) == [1000, 1001]
    # Larger than what may wait, but there is no other way to start; and one can go on from there.
    shared.put([record(1002, Snapshot(cached=list(range(2000)))), record(1003)])
    assert steps(await anext(slow)) == [1002, 1003] and orders == ["watch"] * 3
    slow.close()
    assert orders[3:] == []
    fast.close()
    assert orders[3:] == ["unwatch"]


class Words:
    """A tokenizer whose tokens are words of four characters; it counts those that it writes out."""

    num_decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return "".join(f"{token:3d} " for token in token_ids)


def test_who_comes_gets_the_texts_of_what_runs_and_no_more_than_can_be_shown() -> None:
    words = Words()
    texts = RequestTexts(words)  # type: ignore[arg-type]
    ids = [f"r{i}" for i in range(500)]
    long = list(range(9_000))
    for i, request_id in enumerate(ids):
        request = EngineRequest(request_id, long, GREEDY)
        texts.expect(request_id, "a text " * 9_000 if i == 1 else None, [request])
    for piece in ("the beginning ", "and so on " * 9_000, "the end"):
        texts.add(RequestOutput("r0", None, [], [CompletionOutput(0, piece)], False))
    record = StepRecord(1, 0.0, 0.1, 64, [], running=ids[:2], waiting=ids[2:])
    record.snapshot = Snapshot(
        {"r0": [1], "r1": [2]}, {"r0": 9, "r1": 9}, [], dict.fromkeys(ids, 9_000)
    )
    assert texts.new(record, None) == record, "who reads on knows them"
    start = texts.so_far(record)
    prompts, text = start.prompts, start.text
    assert words.num_decoded <= MAX_PROMPT_TOKENS
    assert list(prompts) == ["r0", "r1"] and prompts["r1"].startswith("a text a text")
    assert all(
        len(prompt) == MAX_CHARACTERS + 2 and prompt.endswith(" …") for prompt in prompts.values()
    )
    assert len(text["r0"]) == MAX_CHARACTERS and re.match(r"… .*so on the end$", text["r0"])
    begins = StepRecord(
        2, 0.1, 0.1, 64, [], admitted={"r2": 0}, resumed=["r3"], running=ids[:4], waiting=ids[4:]
    )
    assert list(texts.new(begins, 0).prompts) == ["r2", "r3"]


# ---------------------------------------------------------------- over HTTP


@pytest.fixture
def guarded(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[ServerProcess]:
    """A server with a key that shows texts. Each test has its own: one ends it."""
    with ServerProcess(tiny_model, tmp_path, "--api-key", "open sesame", "--show-text") as running:
        yield running


def test_the_page_asks_for_the_key_and_the_stream_needs_it(guarded: ServerProcess) -> None:
    assert f"{guarded.url}/\n" in guarded.text, "the server says where the page is"
    assert guarded.get("/web/style.json").status_code == 200
    for path in ("/trace", "/web", "/webs/style.json", "/trace/"):
        assert guarded.get(path).status_code == 401, path
    for query, message in (("1", "engine must be 0, the only one, not 1"), ("x", "engine: ")):
        answer = guarded.get(
            f"/trace?engine={query}", headers={"Authorization": "Bearer open sesame"}
        )
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].startswith(message)
        assert error["param"] == "engine" and error["type"] == "invalid_request_error"
    described = guarded.get("/openapi.json").json()["paths"]["/trace"]["get"]["responses"]
    assert "application/x-ndjson" in described["200"]["content"]


def test_the_stream_over_http_and_its_end(guarded: ServerProcess) -> None:
    headers = {"Authorization": "Bearer open sesame"}
    with guarded.client.stream("GET", "/trace", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = response.iter_lines()
        settings = parse_header(next(lines).encode(), "the stream")
        assert settings.model == "tiny" and settings.live is True
        decoder = TraceDecoder(settings)
        assert decoder.decode(next(lines).encode()).snapshot is not None
        body = {"prompt": "open text", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = guarded.post("/v1/completions", body, headers=headers).json()
        steps: list[StepRecord] = []
        while not steps or not steps[-1].finished:
            steps.append(decoder.decode(next(lines).encode()))
        (request_id,) = steps[-1].finished
        assert request_id.startswith(answer["id"])
        assert (
            "".join(step.text.get(request_id, "") for step in steps) == answer["choices"][0]["text"]
        )
        assert steps[0].prompts == {request_id: "open text"}
        guarded.process.send_signal(signal.SIGTERM)  # who looks on does not delay the end
        assert guarded.process.wait(60) == 0
        assert all(decoder.decode(line.encode()) for line in lines), (
            "the stream ends with a whole line"
        )


FOLDERS = [pathlib.Path(nanovllm.__file__).parent / room / "web" for room in ("server", "trace")]


def client() -> TestClient:
    app = page.create_replay(header_line(TraceSettings()), [], Access())
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_every_file_of_the_page_is_served(folder: pathlib.Path) -> None:
    types = {
        ".js": ("text/javascript", "application/javascript"),
        ".css": "text/css",
        ".html": "text/html",
        ".json": "application/json",
    }
    files = sorted(folder.iterdir())
    assert files
    for file in files:
        response = client().get(f"/web/{file.name}")
        assert response.status_code == 200 and response.content == file.read_bytes()
        assert response.headers["content-type"].startswith(types[file.suffix])
        assert response.headers["cache-control"] == "no-cache"
        assert "default-src 'self'" in response.headers["content-security-policy"]


def test_the_page_itself() -> None:
    response = client().get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "script" not in policy and "unsafe" not in policy, (
        "only scripts and styles from files of our own"
    )
    assert "frame-ancestors 'none'" in policy
    scripts = re.findall(r'(?:src|href)="/?web/([\w.]+)"', response.text)
    assert scripts and all(client().get(f"/web/{name}").status_code == 200 for name in scripts)


def test_the_page_of_a_demo_server_sends_bursts_by_itself() -> None:
    demo = TestClient(Starlette(routes=page.page_routes(demo=True)), follow_redirects=False)
    assert demo.get("/").headers["location"] == "?demo"
    assert demo.get("/?demo").content == client().get("/").content


def test_a_long_trace_arrives_whole() -> None:
    lines = [b"%d" % i for i in range(1001)]
    app = page.create_replay(header_line(TraceSettings()), lines, Access())
    assert TestClient(app).get("/trace").content == header_line(TraceSettings()) + b"".join(
        line + b"\n" for line in lines
    )


@pytest.mark.parametrize(
    ("words", "is_open"),
    [
        (["--show-text", "--host", "0.0.0.0"], True),
        (["--show-text", "--host", "localhost"], False),
        (["--show-text", "--host", "0.0.0.0", "--api-key", "open sesame"], False),
        (["--host", "0.0.0.0"], False),
    ],
)
def test_one_is_told_when_everybody_can_read(
    words: list[str],
    is_open: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(config: EngineConfig, listener: socket.socket, *settings: Any) -> None:
        listener.close()

    monkeypatch.setattr(serve_cli, "_serve", serve)
    assert main(["serve", "--port", "0", *words]) == 0
    error = capsys.readouterr().err
    assert (
        error.count("\n")
        == error.count("all who can reach 0.0.0.0 can read all prompts")
        == is_open
    )


@pytest.mark.parametrize(
    "path",
    [
        "none.js",
        "../page.py",
        "..%2Fpage.py",
        "%2e%2e/page.py",
        "..%5Cpage.py",
        ".hidden",
        "",
        "page.py",
        "style.json%00.js",
        "%2Fetc%2Fpasswd",
        "....//page.py",
        "x" * 3000 + ".js",
    ],
)
def test_nothing_else_is_served(path: str) -> None:
    assert client().get(f"/web/{path}").status_code == 404


# ---------------------------------------------------------------- recorded traces


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    requests = [SimulatedRequest(3 * i, list(range(40)) if i % 2 else 30, 12) for i in range(8)]
    simulate(requests, num_kv_blocks=20, block_size=4, max_num_batched_tokens=64).save(path)
    return path


def test_replay_shows_the_page_without_a_model(
    recorded: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "output.txt"
    command = [sys.executable, "-m", "nanovllm", "replay", str(recorded), "--port", "0"]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "http://" in output.read_text() or process.poll() is not None, 60)
        (last, url) = re.findall(r"watch steps 0 to (\d+) at (http://\S+)/ ", output.read_text())[0]
        assert int(last) == Trace.load(recorded).steps[-1].step
        assert httpx.get(f"{url}/").text == (FOLDERS[0] / "index.html").read_text()
        header, *lines = httpx.get(f"{url}/trace").content.splitlines(keepends=True)
        trace = Trace.load(recorded)
        assert parse_header(header, "") == trace.settings | TraceSettings(live=False)
        assert b"".join(lines) == recorded.read_bytes().partition(b"\n")[2]
        taken = subprocess.run(
            [*command[:-1], url.rpartition(":")[2]], capture_output=True, text=True
        )
        assert (
            taken.returncode == 2
            and "cannot listen on" in taken.stderr
            and taken.stderr.count("\n") == 1
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.started
def test_looking_at_traces_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, nanovllm.cli.trace, nanovllm.server.page, nanovllm.trace.perfetto; "
        "print(*{'torch', 'transformers', 'matplotlib', 'zmq'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "\n"


def test_the_summary_of_a_trace(recorded: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(recorded)]) == 0
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"│ (\S.*?) +│ +(.*?) │", printed))
    trace = Trace.load(recorded)
    assert (
        rows["steps"]
        == f"0 to {trace.steps[-1].step} ({sum(bool(step.requests) for step in trace)} compute)"
    )
    assert rows["requests"] == "8" and rows["ended"] == "8 length"
    assert rows["tokens generated"] == str(8 * 12)
    assert rows["preemptions"] == str(sum(len(step.preempted) for step in trace)) != "0"
    assert "drafts accepted" not in rows
    found = sum(tokens for step in trace for tokens in step.admitted.values())
    assert rows["prompt tokens from the prefix cache"].startswith(f"{found} of ") and found
    assert rows["KV blocks held at most"] == "20 of 20 (100%)"


def test_a_trace_with_drafts_sums_them_up(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, path, events = drafting_trace(), tmp_path / "run.jsonl", tmp_path / "run.json"
    trace.save(path)
    assert main(["trace", str(path)]) == 0
    rows = dict(re.findall(r"│ (\S.*?) +│ +(.*?) │", capsys.readouterr().out))
    drafts = [share for record in trace for share in record.requests if share.num_drafts]
    proposed, accepted = (
        sum(share.num_drafts for share in drafts),
        sum(len(share.sampled) - 1 for share in drafts),
    )
    assert (
        rows["drafts accepted"]
        == f"{accepted} of {proposed} ({1 + accepted / len(drafts):.2f} tokens per step)"
    )
    sampled = [token for record in trace for share in record.requests for token in share.sampled]
    assert rows["tokens generated"] == str(len(sampled)) and 0 < accepted < proposed
    assert main(["trace", str(path), "--perfetto", str(events)]) == 0
    spans = [
        event["args"]
        for event in json.loads(events.read_text())["traceEvents"]
        if "drafts" in event.get("args", {})
    ]
    assert [(span["drafts"], span["accepted"]) for span in spans] == [
        (s.num_drafts, s.num_accepted) for s in drafts
    ]


def test_a_trace_becomes_a_picture_and_events(
    recorded: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    gif, events = tmp_path / "run.gif", tmp_path / "run.json"
    assert (
        main(
            ["trace", str(recorded), "--gif", str(gif), "--steps", "0:3", "--perfetto", str(events)]
        )
        == 0
    )
    assert gif.read_bytes().startswith(b"GIF89a")
    content = json.loads(events.read_text())["traceEvents"]
    instants = [event["name"] for event in content if event["ph"] == "i"]
    assert instants.count("first token") == 8 and instants.count("finished (length)") == 8
    assert len({event["tid"] for event in content if event["ph"] == "X" and event["tid"]}) == 8, (
        "one track per request"
    )


def test_the_views_are_those_that_can_be_drawn() -> None:
    assert list(trace_cli.VIEWS) == list(VIEWS)


def test_prefix_hits_are_those_that_the_engine_counts(tiny_model: pathlib.Path) -> None:
    trace = Trace()
    sizes = {"num_kv_blocks": 20, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8}
    core = Engine(
        EngineConfig(str(tiny_model), dtype="float32", max_num_batched_tokens=64, **sizes), trace
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for i in range(8):
        prompt = list(range(40)) if i % 2 else [50 + i] * 30
        core.add_request(EngineRequest(f"r{i}", prompt, params))
        for _ in range(3):
            core.step()
    while core.has_unfinished:
        core.step()
    stats = core.stats
    admissions = [request_id for record in trace for request_id in record.admitted]
    assert len(admissions) > len(set(admissions)), "somebody is meant to be admitted twice"
    counted = f"{stats.num_hit_tokens:,} of {stats.num_queried_tokens:,} "
    assert trace_cli.summary(trace)["prompt tokens from the prefix cache"].startswith(counted)
    assert stats.num_hit_tokens > 0


MISTAKES = [
    (["trace", "{folder}/none.jsonl"], r"none.jsonl: No such file"),
    (["replay", "{folder}/none.jsonl", "--port", "0"], r"none.jsonl: No such file"),
    (["trace", "{folder}"], "Is a directory"),
    (["trace", "{foreign}"], "not a nanovllm trace"),
    (["replay", "{foreign}", "--port", "0"], "not a nanovllm trace"),
    (["trace", "{cut}"], r"cut.jsonl, line \d+: .*cut off after \d+ complete steps.*--partial"),
    (["replay", "{cut}", "--port", "0"], r"cut.jsonl, line \d+: .*cut off"),
    (["replay", "{damaged}", "--port", "0"], r"damaged.jsonl, line 2: not a step record"),
    (
        ["replay", "{sizeless}", "--port", "0"],
        r"sizeless.jsonl cannot be drawn: its first line does not say block_size",
    ),
    (["trace", "{sizeless}", "--gif", "{folder}/a.gif"], r"sizeless.jsonl cannot be drawn"),
    (["trace", "{trace}", "--view", "pool"], "--view and --steps .* add --gif"),
    (["trace", "{trace}", "--steps", "0:3"], "--view and --steps .* add --gif"),
    (["trace", "{trace}", "--steps", "3"], "two step numbers such as 10:20"),
    (["trace", "{trace}", "--steps", "5:5"], "two step numbers such as 10:20"),
    (["trace", "{trace}", "--gif", "{folder}/a.gif", "--steps", "900:901"], "none of these steps"),
    (
        ["trace", "{folder}/none.jsonl", "--gif", "{folder}/a.gif", "--view", "tarot"],
        "--view.*'tarot'",
    ),
    (
        ["trace", "{trace}", "--gif", "{folder}/none/a.gif", "--steps", "0:1"],
        "--gif: there is no folder .*/none",
    ),
    (["trace", "{folder}/none.jsonl", "--gif", "out.mp4"], r"--gif: must end in .gif, .*'out.mp4'"),
]


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=lambda part: part[:40] if isinstance(part, str) else None
)
def test_mistakes_are_told_in_a_line(
    words: list[str],
    message: str,
    recorded: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("foreign", "cut", "damaged", "sizeless")}
    files["foreign"].write_text("step,start\n")
    files["cut"].write_bytes(recorded.read_bytes()[:-30])
    files["damaged"].write_bytes(
        header_line(TraceSettings(block_size=4, num_blocks=4)) + b'{"step": "one"}\n'
    )
    files["sizeless"].write_bytes(header_line(TraceSettings(model="tiny")))
    places = {"folder": tmp_path, "trace": recorded} | files
    try:
        code = main([word.format(**places) for word in words])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert re.search(message, printed.err)


def test_a_full_disk_is_told_in_a_line(
    recorded: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(recorded), "--perfetto", "/dev/full"]) == 1
    error = capsys.readouterr().err
    assert (
        "error: /dev/full: No space left on device: free space" in error and error.count("\n") == 1
    )


def test_a_trace_that_was_cut_off_can_be_read_all_the_same(
    recorded: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(recorded.read_bytes()[:-30])
    assert main(["trace", str(cut), "--partial"]) == 0
    assert "steps" in capsys.readouterr().out


def test_without_matplotlib_pictures_are_a_clear_error(
    recorded: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("nanovllm.lab.viz")]:
        monkeypatch.delitem(sys.modules, name)
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["trace", str(recorded), "--gif", "never.gif"]) == 2
    assert "pip install 'nanovllm[course]'" in capsys.readouterr().err
