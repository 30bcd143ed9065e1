"""Engines in processes of their own, for lectures that measure them.

The lecture takes the place of front end, router and HTTP: it sends requests, and receives tokens with the times at which
they were sampled.
"""

from __future__ import annotations

import logging
import pathlib
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.engine.process import Command, Report, run_engine
from nanovllm.lab.course.ranks import CONTEXT
from nanovllm.trace.format import TraceDecoder
from nanovllm.trace.trace import Trace

_START_SECONDS = 120.0


class EngineProcess:
    """An engine in a process of its own, with a given number of threads.

    Attributes:
        limits: the engine's limits; `limits.kv_transfer` has the addresses for other engines.
        trace: its steps, if they are recorded.
        began: time 0 of the trace, in seconds of the system's monotonic clock, which all processes share.
    """

    def __init__(self, config: EngineConfig, threads: int = 1, record: bool = False) -> None:
        self.trace, self.began = Trace(), float("inf")
        self._record = record
        self._folder = tempfile.mkdtemp(prefix="nanovllm-fleet-")  # of sockets, readable by this user only
        self._context = zmq.Context()
        self._commands, self.reports = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        addresses = [f"ipc://{pathlib.Path(self._folder) / name}" for name in ("commands", "reports")]
        for socket, address in zip((self._commands, self.reports), addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self.process = CONTEXT.Process(target=_run, args=(config, threads, *addresses), daemon=True)
        self.process.start()
        weakref.finalize(self, self.process.kill)  # the process ignores SIGTERM

    def wait_until_ready(self) -> EngineProcess:
        """Wait until its model is loaded.

        Raises:
            RuntimeError: it could not start; the message says why.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self.reports.poll(100):
            if not self.process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the engine's process has ended, or has not started in time")
        ready = self._receive()
        assert ready.limits is not None, "the first report has the engine's limits"
        self.limits = ready.limits
        self.trace.settings = ready.trace_settings[0]
        self._decoder = TraceDecoder(self.trace.settings)
        if self._record:
            self._send(Command(order="watch"))
        return self

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._send(Command(add=[request]))

    def forget_prefixes(self) -> None:
        """Empty its prefix cache."""
        self._send(Command(order="reset_prefix_cache"))

    def take(self) -> list[tuple[float, EngineOutput]]:
        """Return the outputs since the last call, with the times at which their steps ended."""
        found = []
        while self.reports.poll(0):
            report = self._receive()
            found += [(report.time, output) for output in report.outputs]
            for line, _ in report.steps.get(0, ()):
                record = self._decoder.decode(line)
                self.trace.steps.append(record)
                # A report is sent right after its step: the smallest difference is that of the two clocks.
                self.began = min(self.began, report.time - record.start - record.duration)
        return found

    def _receive(self) -> Report:
        report = msgspec.msgpack.decode(self.reports.recv(), type=Report)
        if report.fatal or report.refused:
            raise RuntimeError(report.fatal or f"refused: {report.refused}")
        return report

    def _send(self, command: Command) -> None:
        self._commands.send(msgspec.msgpack.encode(command))

    def close(self) -> None:
        """Shut the engine down, or kill it after five seconds."""
        self._send(Command(order="shutdown"))
        self.process.join(5)
        self.process.kill()
        self.process.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _run(config: EngineConfig, threads: int, commands: str, reports: str) -> None:
    """The main function of an engine's process."""
    logging.disable(logging.INFO)  # a lecture shows no log of the engine
    torch.set_num_threads(threads)
    run_engine(config, commands, reports)


def start_fleet(*engines: EngineProcess) -> tuple[EngineProcess, ...]:
    """Wait until all engines, which start in parallel, are ready."""
    return tuple(engine.wait_until_ready() for engine in engines)


def play(
    engines: Sequence[EngineProcess],
    actions: Sequence[tuple[float, Callable[[], None]]],
    on_output: Callable[[float, EngineOutput], bool],
    timeout: float = 120.0,
) -> float:
    """Run actions at their times and pass on the engines' outputs, until `on_output` returns True.

    Args:
        actions: pairs (seconds from now, function).
        on_output: receives each output with the time of its step; returns True to end.

    Returns:
        The time of the start, in seconds of the monotonic clock.

    Raises:
        TimeoutError: `timeout` seconds have passed.
        RuntimeError: an engine has failed.
    """
    poller: Any = zmq.Poller()
    for engine in engines:
        poller.register(engine.reports, zmq.POLLIN)
    begin, pending, over = time.monotonic(), sorted(actions, key=lambda pair: pair[0]), False
    while not over or pending:
        now = time.monotonic() - begin
        if now > timeout:
            raise TimeoutError(f"the engines have not come to an end after {timeout:g} seconds")
        while pending and pending[0][0] <= now:
            pending.pop(0)[1]()
        wait = min(pending[0][0] - now, 0.5) if pending else 0.5
        poller.poll(max(0, int(wait * 1000)))
        for engine in engines:
            for at, output in engine.take():
                over = on_output(at, output) or over
    return begin
