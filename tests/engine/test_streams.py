"""Commands, streams and deliveries, rule by rule, without an engine."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.data.outputs import CompletionOutput, RequestFailedError, RequestOutput
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.process import Command, EngineLoop, Report
from nanovllm.engine.request_stream import RequestStream, RequestTimes

# --------------------------------------------------------------------------------- EngineLoop._obey


class Core:
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.waves = SimpleNamespace(start=lambda number: self.asked.append(("wave", number)))
        self.engines = [
            self,
            SimpleNamespace(watch=self.note("watch 1"), unwatch=self.note("unwatch 1")),
        ]

    def note(self, name: str) -> Any:
        return lambda *arguments: self.asked.append((name, *arguments))

    def add_request(self, request: EngineRequest) -> None:
        self.asked.append(("add", request.request_id))
        if request.request_id == "bad":
            raise ValueError("too long")

    def __getattr__(self, name: str) -> Any:
        return self.note(name)


@pytest.fixture
def loop() -> Any:
    made: Any = object.__new__(EngineLoop)
    made.core, made._report, made._sinks = Core(), Report(num_taken=10), {}
    return made


def test_requests_are_added_and_refusals_reported(loop: Any) -> None:
    requests = [EngineRequest(name, [1], SamplingParams()) for name in ("a", "bad", "c")]
    assert loop._obey(Command(add=requests, abort={"c": "abort", "d": "stop"})) is True, (
        "only a shutdown ends the loop"
    )
    assert loop.core.asked == [
        ("add", "a"),
        ("add", "bad"),
        ("add", "c"),
        ("abort_request", "c", "abort"),
        ("abort_request", "d", "stop"),
    ], "a refusal concerns one request; aborts come after the requests that they may be about"
    assert loop._report.refused == {"bad": "too long"}
    assert loop._report.num_taken == 13, "requests that were taken over or refused since the start"


def test_an_error_that_is_no_refusal_is_raised(loop: Any) -> None:
    def broken(request: EngineRequest) -> None:
        raise RuntimeError("a bug")

    loop.core.add_request = broken
    with pytest.raises(RuntimeError, match="a bug"):
        loop._obey(Command(add=[EngineRequest("a", [1], SamplingParams())]))


def test_orders(loop: Any) -> None:
    assert loop._obey(Command(order="reset_prefix_cache")) is True and loop.core.asked == [
        ("reset_prefix_cache",)
    ]
    assert loop._obey(Command(order="start_wave", wave=7)) is True and loop.core.asked[1:] == [
        ("wave", 7)
    ]
    assert loop._obey(Command()) is True and len(loop.core.asked) == 2
    assert loop._obey(Command(order="shutdown", abort={"a": "abort"})) is False
    assert loop.core.asked[2:] == [("abort_request", "a", "abort")]


def test_an_engine_is_watched_and_unwatched_with_the_same_sink(loop: Any) -> None:
    for order in ("watch", "watch", "unwatch"):
        assert loop._obey(Command(order=order, engine=1)) is True
    names, sinks = zip(*loop.core.asked, strict=True)
    assert names == ("watch 1", "watch 1", "unwatch 1"), "orders for engine 1 go to engine 1"
    assert sinks[0] is sinks[1] is sinks[2], "an engine knows a sink by its identity"
    assert (
        isinstance(sinks[0], functools.partial)
        and sinks[0].func == loop._note
        and sinks[0].args == (1,)
    )


# -------------------------------------------------------------------------- RequestStream.__anext__


def output(
    text: str, finished: bool = False, error: Exception | None = None, name: str = "a"
) -> RequestOutput:
    piece = CompletionOutput(0, text, [len(text)])
    return RequestOutput(name, "p", [1], [piece], finished, None, 0, None, error)  # type: ignore[arg-type]


def stream(name: str = "a") -> RequestStream:
    return RequestStream(name, RequestTimes(0.0, 1), lambda request_id: None)


async def rest(of: RequestStream) -> list[str]:
    """The texts of all outputs to come."""
    return [each.outputs[0].text async for each in of]


async def within(awaitable: Any) -> Any:
    """Fails if it would wait for ever."""
    try:
        return await asyncio.wait_for(awaitable, 20)
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


# ----------------------------------------------------------------------------- AsyncEngine._deliver


def front_end(*processed: tuple[list[RequestOutput], list[str]]) -> Any:
    """A front end whose `OutputProcessor` returns these, with streams a and b."""
    made: Any = object.__new__(AsyncEngine)
    made._streams, made.sent, made.noted = {name: stream(name) for name in "ab"}, [], []
    made.output_processor = SimpleNamespace(
        process=lambda outputs, left=list(processed): left.pop(0)
    )
    made._client, made._texts = SimpleNamespace(send=made.sent.append), None
    made._note_times = lambda times, output, now: made.noted.append((times, output, now))
    return made


async def test_each_stream_gets_its_outputs() -> None:
    outputs = [output("x"), output("y", name="b"), output("z", finished=True)]
    made = front_end((outputs, []))
    a, b = made._streams["a"], made._streams["b"]
    made._deliver([EngineOutput("a")], 7.0)
    assert await within(rest(a)) == ["xz"]
    assert (await within(b.__anext__())).outputs[0].text == "y"
    assert list(made._streams) == ["b"], "request a has ended"
    assert made.noted == [
        (a.times, outputs[0], 7.0),
        (b.times, outputs[1], 7.0),
        (a.times, outputs[2], 7.0),
    ]
    assert made.sent == [], "the engine has ended them itself"


async def test_the_engine_is_told_of_a_stop_string() -> None:
    made = front_end(([output("x", finished=True)], ["a", "a-1"]))
    made._deliver([], 7.0)
    assert made.sent == [Command(abort={"a": "stop", "a-1": "stop"})], (
        "otherwise it would go on computing them"
    )


async def test_a_failed_request_raises_its_error() -> None:
    made = front_end(([output("", finished=True, error=RequestFailedError("no KV"))], []))
    a = made._streams["a"]
    made._deliver([], 7.0)
    with pytest.raises(RequestFailedError, match="no KV"):
        await within(a.__anext__())
    assert list(made._streams) == ["b"]


async def test_texts_are_kept_for_those_who_read_the_trace() -> None:
    outputs = [output("x"), output("y", name="b")]
    made, texts = front_end((outputs, [])), list[RequestOutput]()
    made._texts = SimpleNamespace(add=texts.append)
    made._deliver([], 7.0)
    assert texts == outputs
