"""Runs the engine in a separate process: a busy loop between two sockets.

The front end tokenizes, detokenizes and serves HTTP in another process, under another interpreter
lock, so that this work does not delay steps. Both exchange plain data: msgpack over ZMQ sockets in
a private folder.

Built by notebooks/91_llama_server.ipynb: edit it there.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import msgspec
import zmq

from nanovllm.data.outputs import EngineStats
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.processes.activity import LOOK_SECONDS, at_rest, in_step
from nanovllm.text.prompts import EngineLimits

if TYPE_CHECKING:
    from nanovllm.assembly.engine import Engine
    from nanovllm.engine.group import DataParallelCore
    from nanovllm.features.data_parallel.lock_step import LockStep
    from nanovllm.trace.record import StepRecord
    from nanovllm.trace.recorder import RecordSink


@dataclass
class Command:
    """A message from the front end: requests to add, sequences to abort (id to reason), or another
    order.

    Attributes:
        order: "watch" asks for the records of all further steps or, if the engine sends them
            already, for a new snapshot; "start_wave" tells an engine in lock-step to run steps
            together with the other engines (lecture 25).
        engine: with "watch" and "unwatch", the number of the engine.
        wave: with "start_wave", the number of the wave.
    """

    add: list[EngineRequest] = field(default_factory=list)
    abort: dict[str, str] = field(default_factory=dict)
    order: Literal["", "reset_prefix_cache", "watch", "unwatch", "start_wave", "shutdown"] = ""
    engine: int = 0
    wave: int = 0


@dataclass
class Report:
    """A message from the engine, sent after each step that has changed something.

    Attributes:
        time: when the step ended, in seconds of the system's monotonic clock.
        num_taken: sequences that the engine has accepted or rejected since it started.
        first_scheduled: sequence id to time, for sequences that a step since the last report has
            computed for the first time, or for the first time after a preemption.
        refused: sequence id to reason, for sequences that the engine has rejected.
        steps: by engine, its `StepRecord`s in msgpack, while the engine is watched.
        limits: only in the first report, which says that the engine is ready.
        trace_settings: only in the first report: for each engine, the settings in the trace's
            header.
    """

    outputs: list[EngineOutput] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    time: float = 0.0
    num_taken: int = 0
    first_scheduled: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    steps: dict[int, list[msgspec.Raw]] = field(default_factory=dict)
    limits: EngineLimits | None = None
    trace_settings: list[TraceSettings] = field(default_factory=list)


class EngineLoop:
    """Runs an engine core until a "shutdown" command, the end of the parent process, or a failed
    step.

    Args:
        core: the engine.
        commands: a PULL socket with encoded `Command`s.
        reports: a PUSH socket for encoded `Report`s.
        parent_sentinel: a file descriptor that becomes readable when the parent process has ended.
    """

    def __init__(
        self,
        core: Engine | DataParallelCore,
        commands: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        parent_sentinel: int | None = None,
    ) -> None:
        self.core = core
        self.commands = commands
        self.reports = reports
        self._decoder = msgspec.msgpack.Decoder(Command)
        # The next one; until it is sent, its statistics are those of the previous report.
        self._report = Report()
        self._has_news = False  # a report is due although no sequence has a new token
        self._sinks: dict[int, RecordSink] = {}  # by engine
        self._parent_sentinel = parent_sentinel
        self._poller = zmq.Poller()
        for source in (
            commands,
            *core.sources,
            *([] if parent_sentinel is None else [parent_sentinel]),
        ):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Take commands, compute a step, report; sleep while there is nothing to compute."""
        self.core.first_scheduled = {}
        self._report.limits = self.core.limits
        self._report.trace_settings = [engine.trace_settings for engine in self.core.engines]
        self._send_report()
        while self._take_commands(wait=self.core.is_idle):
            # Without requests this step computes nothing, but its report shows the blocks that an
            # abort has freed. It counts as rest: if peers wait for this engine, its heartbeats must
            # consistently say that it is at rest.
            with in_step() if self.core.has_work else contextlib.nullcontext():
                self._report.outputs = self.core.step()
            if self._report.outputs or self._has_news or self.core.stats != self._report.stats:
                self._send_report()

    def _take_commands(self, wait: bool) -> bool:
        """Carry out the commands that have arrived; with `wait`, sleep until one arrives or there
        is work. Returns False to stop the loop."""
        with at_rest():
            # Without steps, the loop wakes up every `LOOK_SECONDS` to check the ranks.
            seconds = (
                [s for s in (LOOK_SECONDS, self.core.idle_seconds) if s is not None]
                if wait
                else [0.0]
            )
            events = dict(self._poller.poll(math.ceil(1000 * min(seconds))))
        # Without steps, only this call notices that a rank has died, and sends heartbeats to the
        # ranks.
        if wait:
            self.core.check_health()
        if self._parent_sentinel in events:
            return False  # without its parent the engine gets no more commands
        while self.commands.poll(0):
            self._has_news = True
            with in_step():  # an abort may wait for the results of a step
                if not self._obey(self._decoder.decode(self.commands.recv())):
                    return False
        return True

    def _obey(self, command: Command) -> bool:
        """Carry out a command: add requests, then abort requests, then run its order:

            "reset_prefix_cache"   core.reset_prefix_cache()
            "start_wave"           core.peers.waves.start(command.wave)
            "watch", "unwatch"     core.engines[command.engine].watch(sink) or .unwatch(sink)
            "shutdown"             return False; return True for all other commands

        A request that the core rejects (ValueError) fails alone: its reason goes into
        `_report.refused`. Any other error ends the engine. `_report.num_taken` includes rejected
        requests: the front end subtracts it from the number of requests that it has sent, to know
        how many are in flight.

        `sink` is `functools.partial(_note, command.engine)`, which puts records into the next
        report. It must be the same object in each call for an engine: `_sinks` keeps it."""
        for request in command.add:
            self._report.num_taken += 1
            try:
                self.core.add_request(request)
            except ValueError as error:
                self._report.refused[request.request_id] = str(error)
        for sequence_id, reason in command.abort.items():
            self.core.abort_request(sequence_id, reason)
        if command.order == "reset_prefix_cache":
            self.core.reset_prefix_cache()
        elif command.order == "start_wave":
            lock_step = cast("LockStep", cast("Engine", self.core).peers)
            lock_step.waves.start(command.wave)
        elif command.order in ("watch", "unwatch"):
            sink = self._sinks.setdefault(
                command.engine, functools.partial(self._note, command.engine)
            )
            engine = self.core.engines[command.engine]
            (engine.watch if command.order == "watch" else engine.unwatch)(sink)
        return command.order != "shutdown"

    def _note(self, engine: int, record: StepRecord) -> None:
        """Put a record of an engine's step into the next report."""
        self._has_news = True
        self._report.steps.setdefault(engine, []).append(
            msgspec.Raw(msgspec.msgpack.encode(record))
        )

    def _send_report(self) -> None:
        report = self._report
        report.stats = self.core.stats
        report.time = time.monotonic()
        if self.core.first_scheduled:
            report.first_scheduled = self.core.first_scheduled
            self.core.first_scheduled = {}
        self.reports.send(msgspec.msgpack.encode(report))
        self._report = Report(stats=report.stats, num_taken=report.num_taken)
        self._has_news = False
