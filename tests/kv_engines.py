"""Engines that share KV: several in one process, stepped by turns, so that a test says what happens
when; and one in a process of its own, which can be killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.assembly.engine import Engine
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.kv_transfer.connector import KVConnectorWorker
from nanovllm.kv_transfer.factory import connector_of
from tests.processes import CONTEXT

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 120,
    "num_kv_blocks": 64,
    "block_size": 8,
    "check_invariants": True,
}


def make_engine(
    checkpoint: str, role: str = "kv_both", extra: dict[str, Any] | None = None, **options: Any
) -> Engine:
    """An engine with a connector; `extra` goes into its kv_transfer_config."""
    transfer = {"kv_connector": "local", "kv_role": role} | (extra or {})
    return Engine(
        EngineConfig(model=checkpoint, **(OPTIONS | {"kv_transfer_config": transfer} | options))
    )


class Fleet:
    """Engines, stepped by turns; everything that they have said."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.outputs: dict[str, list[EngineOutput]] = {}

    def step(self) -> bool:
        """One step of each that has something to do; whether a request got an output."""
        outputs = [output for engine in self.engines for output in engine.step()]
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return bool(outputs)

    def run_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Steps until something holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.step():
                time.sleep(0.0005)  # for the threads and processes that move KV
            assert time.monotonic() < deadline, "it never came to that"

    def finished(self, request_id: str) -> EngineOutput | None:
        """A request's last output, if it has ended."""
        outputs = self.outputs.get(request_id, [])
        return outputs[-1] if outputs and outputs[-1].finish_reason else None

    def tokens(self, request_id: str) -> list[int]:
        """All that was sampled for a request."""
        return [
            token for output in self.outputs.get(request_id, []) for token in output.new_token_ids
        ]

    def complete(self, request_id: str) -> list[int]:
        """Steps until the request has ended; its tokens."""
        self.run_until(lambda: self.finished(request_id) is not None)
        return self.tokens(request_id)

    def settle(self) -> None:
        """Steps until no engine holds a block of anybody, and none has anything to do."""
        self.run_until(
            lambda: all(
                engine.manager.pool.usage == 0 and not engine.has_work for engine in self.engines
            )
        )

    def close(self) -> None:
        """End all."""
        for engine in self.engines:
            engine.close()


def worker_connector(core: Engine) -> KVConnectorWorker:
    """The rank's half of an engine whose only rank is in this process."""
    return connector_of(core.runner)


def ask(
    engine: Engine,
    request_id: str,
    prompt: list[int],
    max_tokens: int = 14,
    params: Any = None,
    priority: int = 0,
    **options: Any,
) -> None:
    """Queue a request, a greedy one unless the sampling options say otherwise."""
    sampling = SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )
    engine.add_request(
        EngineRequest(request_id, prompt, sampling, priority=priority, kv_transfer_params=params)
    )


def address(engine: Engine) -> list[Any]:
    """Where consumers can ask it."""
    (information,) = engine.limits.kv_transfer
    return [information["kv_host"], information["kv_port"]]


def decode_first(place: Engine | list[Any], direction: str) -> dict[str, Any]:
    """What a router tells a consumer that shall ask a producer, or whoever is at that address."""
    place = address(place) if isinstance(place, Engine) else place
    return {"do_remote_prefill": True, "prefill_addresses": [place], "kv_direction": direction}


class Gate:
    """A function that waits, whenever a thread other than the test's own calls it, until the gate
    is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.entered, self._opened = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def gated(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.entered.set()
                assert self._opened.wait(60)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, gated)

    def open(self) -> None:
        """Let all go on."""
        self._opened.set()


# --------------------------------------------------------------------- an engine that can be killed


class Child:
    """An engine in a process of its own.

    Args:
        frozen_at: a class of its process and the name of a method: whoever calls it says so, and
            never returns.
    """

    def __init__(
        self, checkpoint: str, role: str, frozen_at: tuple[type, str] | None = None
    ) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        arguments = theirs, checkpoint, role, frozen_at
        self.process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.address = self.hear()

    def hear(self) -> Any:
        """What it says next: its address, then outputs, or "frozen"."""
        assert self._pipe.poll(60), "it says nothing"
        return self._pipe.recv()

    @property
    def is_frozen(self) -> bool:
        """It has come to where it was to freeze; what else it has said is dropped."""
        while self._pipe.poll(0):
            if self._pipe.recv() == "frozen":
                return True
        return False

    def ask(self, *arguments: Any, **options: Any) -> None:
        """See `ask`."""
        self._pipe.send((arguments, options))

    def answer(self) -> EngineOutput:
        """The last output of a request."""
        while not (output := self.hear()).finish_reason:
            pass
        return output

    def kill(self) -> None:
        """Without a chance to say goodbye."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _serve(
    pipe: Connection, checkpoint: str, role: str, frozen_at: tuple[type, str] | None
) -> None:
    def freeze(*arguments: Any) -> None:
        pipe.send("frozen")
        threading.Event().wait()

    engine = make_engine(checkpoint, role)
    if frozen_at is not None:
        setattr(*frozen_at, freeze)
    pipe.send(address(engine))
    while True:
        if pipe.poll(0 if engine.has_work else 0.001):
            arguments, options = pipe.recv()
            ask(engine, *arguments, **options)
        for output in engine.step():
            pipe.send(output)
