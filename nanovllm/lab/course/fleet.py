"""Engines in processes of their own, for lectures that measure them.

The lecture takes the place of front end, router and HTTP: it sends requests, and receives tokens
with the times at which they were sampled."""

from __future__ import annotations

import logging
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any

import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.engine.client import EngineClient, main
from nanovllm.engine.process import Command
from nanovllm.processes.start import end_processes
from nanovllm.trace.record import StepRecord
from nanovllm.trace.trace import Trace

# A cell of a lecture has 300 seconds under `make lectures`. A slow machine needs most of them.
_START_SECONDS = 240.0


class EngineProcess(EngineClient):
    """An engine in a process of its own, with a given number of threads.

    Args:
        record: its steps.
        wrapper, log: see `EngineClient`.

    Attributes:
        trace: its steps, if they are recorded.
        began: time 0 of the trace, in seconds of the system's monotonic clock, which all processes
            share.
    """

    program = "from nanovllm.lab.course.fleet import run_quietly; run_quietly()"

    def __init__(
        self,
        config: EngineConfig,
        threads: int = 1,
        record: bool = False,
        wrapper: Sequence[str] = (),
        log: IO[bytes] | IO[str] | None = None,
    ) -> None:
        super().__init__(config, {"OMP_NUM_THREADS": str(threads)}, wrapper, log)
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        weakref.finalize(self, end_processes, [self.process])
        self.trace = Trace()
        self.began = float("inf")
        self._record = record

    def wait_until_ready(self) -> EngineProcess:
        """Wait until its model is loaded.

        Raises:
            RuntimeError: it could not start; the message says why.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self.is_ready:
            self.reports.poll(100)
            self.outputs()
            if time.monotonic() > deadline:
                raise RuntimeError("the engine's process did not start in time")
        self.trace.settings = self.trace_settings
        if self._record:
            self.watch(self._note)
        return self

    def _note(self, step: StepRecord) -> None:
        self.trace.record(step)
        # A report is sent right after its step: the smallest difference is that of the two clocks.
        self.began = min(self.began, self.reported - step.start - step.duration)

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self.send(Command(add=[request]))

    def outputs(self) -> list[tuple[float, EngineOutput]]:
        """Return the outputs since the last call, with the times at which their steps ended.

        Raises:
            RuntimeError: the engine has failed, or refuses a request.
        """
        failure = self.look()
        reports = self.take_reports()
        refused = [
            f"rejected request {key}: {why}"
            for report in reports
            for key, why in report.refused.items()
        ]
        if failure is not None:
            raise RuntimeError(f"{self.name} fails: {failure.text}")
        if refused:
            raise RuntimeError(f"{self.name} {', '.join(refused)}")
        return [(report.time, output) for report in reports for output in report.outputs]


def run_quietly() -> None:
    """The main function of an engine's process."""
    logging.disable(logging.INFO)  # a lecture shows no log of the engine
    main()


def start_fleet(*engines: EngineProcess) -> tuple[EngineProcess, ...]:
    """Wait until all engines, which start in parallel, are ready."""
    return tuple(engine.wait_until_ready() for engine in engines)


def play(
    engines: Sequence[EngineProcess],
    actions: Sequence[tuple[float, Callable[[], None]]],
    on_output: Callable[[float, EngineOutput], bool],
    timeout: float = 270.0,
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
    begin = time.monotonic()
    pending = sorted(actions, key=lambda pair: pair[0])
    over = False
    while not over or pending:
        now = time.monotonic() - begin
        if now > timeout:
            raise TimeoutError(f"the engines have not finished after {timeout:g} seconds")
        while pending and pending[0][0] <= now:
            pending.pop(0)[1]()
        wait = min(pending[0][0] - now, 0.5) if pending else 0.5
        poller.poll(max(0, int(wait * 1000)))
        for engine in engines:
            for at, output in engine.outputs():
                over = on_output(at, output) or over
    return begin
