"""Commands, streams and deliveries, rule by rule, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import CompletionOutput, EngineStats, RequestFailedError, RequestOutput
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine import client
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.errors import EngineDeadError
from nanovllm.engine.process import Command, EngineLoop, Report
from nanovllm.engine.report_reader import ReportReader
from nanovllm.engine.request_stream import RequestStream
from nanovllm.engine.request_times import EngineObserver, RequestTimes
from nanovllm.processes.channel import Failure
from nanovllm.text.prompts import EngineLimits
from nanovllm.text.tokenizer import Tokenizer
from tests.oracle import make_tokenizer

# ----------------------------------------------------------------------------------- EngineLoop.run


class Core:
    """An engine that notes what it is asked to do."""

    is_idle = True
    has_work = False
    idle_seconds = limits = None
    sources = ()
    stats = EngineStats()

    def __init__(self) -> None:
        self.asked: list[Any] = []
        waves = SimpleNamespace(start=lambda number: self.asked.append(("wave", number)))
        self.peers = SimpleNamespace(waves=waves)
        second = SimpleNamespace(watch=self.note("watch 1"), unwatch=self.note("unwatch 1"))
        self.engines: list[Any] = [self, second]
        for engine in self.engines:
            engine.trace_settings = {}

    def note(self, name: str) -> Any:
        return lambda *arguments: self.asked.append((name, *arguments))

    def add_request(self, request: EngineRequest) -> None:
        self.asked.append(("add", request.request_id))
        if request.request_id == "bad":
            raise ValueError("too long")
        if request.request_id == "fatal":
            raise RuntimeError("a bug")

    def check_health(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return self.note(name)


def obey(core: Core, *commands: Command) -> list[Report]:
    """What a loop reports after each of these commands; then it gets an order to stop."""
    left = [*commands, Command(order="shutdown")]
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        pairs = []
        for name in ("commands", "reports"):
            pair = context.socket(zmq.PUSH), context.socket(zmq.PULL)
            pair[0].bind(f"inproc://{name}")
            pair[1].connect(f"inproc://{name}")
            pairs.append(pair)
            for end in pair:
                stack.callback(end.close, linger=0)
        (command_end, loop_end), (report_end, our_end) = pairs

        def step() -> list[EngineOutput]:
            command_end.send(msgspec.msgpack.encode(left.pop(0)))
            return []

        core.step = step  # type: ignore[attr-defined]
        step()
        EngineLoop(core, loop_end, report_end).run()  # type: ignore[arg-type]
        reports = []
        while our_end.poll(0):
            reports.append(msgspec.msgpack.decode(our_end.recv(), type=Report))
        assert left == [], "only a shutdown ends the loop"
        return reports[1:]  # without the one that says that it is ready


def test_requests_are_added_and_refusals_reported() -> None:
    requests = [EngineRequest(name, [1], SamplingParams()) for name in ("a", "bad", "c")]
    core = Core()
    reports = obey(
        core, Command(add=requests, abort={"c": "abort", "d": "stop"}), Command(add=requests[:1])
    )
    assert core.asked == [
        ("add", "a"),
        ("add", "bad"),
        ("add", "c"),
        ("abort_request", "c", "abort"),
        ("abort_request", "d", "stop"),
        ("add", "a"),
    ], "a refusal concerns one request; aborts come after the requests that they may be about"
    assert [report.refused for report in reports] == [{"bad": "too long"}, {}]
    assert [report.num_taken for report in reports] == [3, 4], (
        "requests that were taken over or refused since the start"
    )


def test_an_error_that_is_no_refusal_is_raised() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        obey(Core(), Command(add=[EngineRequest("fatal", [1], SamplingParams())]))


def test_orders() -> None:
    core = Core()
    orders = [
        Command(order="reset_prefix_cache"),
        Command(order="start_wave", wave=7),
        Command(),
        Command(order="shutdown", abort={"a": "abort"}),
    ]
    with pytest.raises(AssertionError, match="only a shutdown"):
        obey(core, *orders)
    assert core.asked == [("reset_prefix_cache",), ("wave", 7), ("abort_request", "a", "abort")]


def test_an_engine_is_watched_and_unwatched_with_the_same_sink() -> None:
    class Watched(Core):
        def note(self, name: str) -> Any:
            def noted(sink: Any) -> None:
                self.asked.append((name, sink))
                sink({"step": len(self.asked)})

            return noted

    core = Watched()
    reports = obey(
        core, *[Command(order=order, engine=1) for order in ("watch", "watch", "unwatch")]
    )
    names, sinks = zip(*core.asked, strict=True)
    assert names == ("watch 1", "watch 1", "unwatch 1"), "orders for engine 1 go to engine 1"
    assert sinks[0] is sinks[1] is sinks[2], "an engine knows a sink by its identity"
    records = [
        {engine: list(map(msgspec.msgpack.decode, steps)) for engine, steps in report.steps.items()}
        for report in reports
    ]
    assert records == [{1: [{"step": number}]} for number in (1, 2, 3)], (
        "a record goes into the next report, under the number of its engine"
    )


# -------------------------------------------------------------------------- RequestStream.__anext__


def output(
    text: str, finished: bool = False, error: Exception | None = None, name: str = "a"
) -> RequestOutput:
    piece = CompletionOutput(0, text, [len(text)])
    return RequestOutput(name, "p", [1], [piece], finished, None, 0, None, error)  # type: ignore[arg-type]


TOKENIZER = Tokenizer(make_tokenizer())


def stream(name: str = "a") -> RequestStream:
    requests = [EngineRequest(name, [1], SamplingParams())]
    return RequestStream(name, "p", requests, TOKENIZER, on_close=lambda stream: None)


async def rest(of: RequestStream) -> list[str]:
    """The texts of all outputs to come."""
    return [each.outputs[0].text async for each in of]


async def within(awaitable: Any) -> Any:
    """Fails if it would wait for ever."""
    try:
        return await asyncio.wait_for(awaitable, 60)
    except TimeoutError:
        raise AssertionError(
            "it waits for ever, but an output, an error or the end is there"
        ) from None


async def test_a_reader_gets_each_output_and_the_end() -> None:
    one = stream()
    reader = asyncio.create_task(within(rest(one)))
    for text in ("a", "b", "c"):
        await asyncio.sleep(0.01)
        one.put(output(text, finished=text == "c"))
    assert await reader == ["a", "b", "c"], (
        "the reader gets each output as it comes, and stops behind the last"
    )
    with pytest.raises(StopAsyncIteration):
        await within(one.__anext__())


async def test_a_slow_reader_gets_one_merged_output() -> None:
    one = stream()
    for text in ("a", "b", "c"):
        one.put(output(text))
    assert (await within(one.__anext__())).outputs[0].text == "abc"
    waiting = asyncio.create_task(one.__anext__())
    await asyncio.sleep(0.01)
    assert not waiting.done(), "all has been read, so a reader waits"
    one.put(output("d", finished=True))
    assert (await within(waiting)).outputs[0].text == "d", "without what has been read before"


async def test_an_error_comes_after_the_outputs_and_once() -> None:
    one = stream()
    one.put(output("a"))
    one.fail(RuntimeError("the engine is dead"))
    assert (await within(one.__anext__())).outputs[0].text == "a", (
        "outputs that have come are not lost"
    )
    with pytest.raises(RuntimeError, match="dead"):
        await within(one.__anext__())
    with pytest.raises(StopAsyncIteration):
        await within(one.__anext__())


async def test_a_closed_stream_has_ended() -> None:
    one = stream()
    one.put(output("a"))
    one.close()
    assert await within(rest(one)) == [], "whoever closes it wants no more"


# ------------------------------------------------------------------------ what AsyncEngine delivers


class Client:
    """An engine without a process, which reports what it is told to."""

    is_ready = True
    num_in_flight = 0
    stats = EngineStats()
    limits = EngineLimits(max_model_len=99, max_request_tokens=99, vocab_size=260)

    def __init__(self, *_: Any) -> None:
        self.news = [Report()]  # it is ready
        self.sent: list[Command] = []
        self.file = os.eventfd(1, os.EFD_NONBLOCK)
        self.sources = [self.file]
        self.failure: Failure | None = None

    def report(self, outputs: list[EngineOutput], time: float = 0.0) -> None:
        self.news.append(Report(outputs, time=time))
        os.eventfd_write(self.file, 1)

    def take_reports(self) -> list[Report]:
        news, self.news = self.news, []
        return news

    def look(self) -> Failure | None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.file)
        return self.failure

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def shutdown(self, seconds: float) -> None:
        os.close(self.file)


async def test_whatever_comes_from_an_engine_wakes_who_waits_for_reports() -> None:
    engine: Any = Client()
    connection = os.eventfd(0, os.EFD_NONBLOCK)  # stays readable, as a closed connection does
    engine.sources.append(connection)
    reader = ReportReader(engine)
    assert await reader.next() == [Report()]
    waits = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    engine.failure = Failure(False, "no luck")
    os.eventfd_write(connection, 1)
    for _ in range(9):  # the loop looks at the files each time, and waits for nothing
        await asyncio.sleep(0)
    assert waits.done(), "it has not heard of the failure"
    with pytest.raises(EngineDeadError, match="no luck"):
        await waits
    assert not asyncio.get_running_loop().remove_reader(connection), "it would be called for ever"
    reader.close()
    os.close(connection)
    engine.shutdown(0)


class Observer(EngineObserver):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def tokens(self, times: RequestTimes, piece: CompletionOutput, now: float) -> None:
        self.noted.append((times, piece.text, now))


Front = tuple[AsyncEngine, Client, dict[str, RequestStream]]


@pytest_asyncio.fixture
async def front_end(
    tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Front]:
    """A front end with requests a and b, and its engine."""
    made: list[Client] = []
    monkeypatch.setattr(client, "EngineClient", lambda *_: made.append(Client()) or made[-1])
    front = await AsyncEngine.start(EngineConfig(str(tiny_model)))
    params = SamplingParams(stop="END")
    streams = {name: await front.add_request(name, "p", params) for name in "ab"}
    made[0].sent.clear()
    yield front, made[0], streams
    await front.shutdown()


def tokens(front: AsyncEngine, name: str, text: str, **end: Any) -> EngineOutput:
    return EngineOutput(name, front.tokenizer.encode(text, add_special_tokens=False), **end)


async def test_each_stream_gets_its_outputs(front_end: Front) -> None:
    front, client, streams = front_end
    observer = front.observer = Observer()
    outputs = [tokens(front, "a", "xx"), tokens(front, "b", "yy")]
    client.report([*outputs, tokens(front, "a", "zz", finish_reason="length")], time=7.0)
    assert "".join(await within(rest(streams["a"]))) == "xxzz"
    assert (await within(streams["b"].__anext__())).outputs[0].text == "yy"
    a, b = streams["a"].times, streams["b"].times
    assert [text for times, text, _ in observer.noted if times is a] == ["xx", "zz"]
    assert [text for times, text, _ in observer.noted if times is b] == ["yy"]
    assert {now for *_, now in observer.noted} == {7.0} == {a.first_token, b.first_token}
    assert client.sent == [], "the engine has ended request a itself"
    client.report([tokens(front, "b", ".", finish_reason="length")])
    assert await within(rest(streams["b"])) == ["."]
    assert front.num_requests == 0


async def test_the_engine_is_told_of_a_stop_string(front_end: Front) -> None:
    front, client, streams = front_end
    client.report([tokens(front, "a", "xEND more")])
    assert "".join(await within(rest(streams["a"]))) == "x"
    assert client.sent == [Command(abort={"a": "stop"})], "otherwise it would go on computing it"


async def test_a_failed_request_raises_its_error(front_end: Front) -> None:
    front, client, streams = front_end
    client.report([EngineOutput("a", finish_reason="error", error="no KV")])
    with pytest.raises(RequestFailedError, match="no KV"):
        await within(rest(streams["a"]))
    client.report([tokens(front, "b", "yy", finish_reason="length")])
    assert await within(rest(streams["b"])) == ["yy"], "b goes on"
