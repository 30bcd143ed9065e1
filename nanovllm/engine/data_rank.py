"""One engine of several: its process, and what the coordinator knows about it.

`DataRank` starts a process in which `main` runs, with the number of a socket to the coordinator. The first message on it holds the
engine's settings; heartbeats go back. Commands and reports go over sockets of their own, see `engine.process`.

Built by notebooks/25_data_parallel.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats
from nanovllm.data.parts import load
from nanovllm.distributed.life_signs import (
    STEP_SECONDS,
    Complaint,
    Mouth,
    Peer,
    activity_of_this_thread,
    heard_activities,
)
from nanovllm.distributed.standstill import CollectiveError
from nanovllm.engine.process import Command, Report, run_engine
from nanovllm.executor.remote import how_it_ended, start_process
from nanovllm.scheduler.data_parallel import load_score

if TYPE_CHECKING:
    from nanovllm.trace.format import TraceDecoder
    from nanovllm.trace.recorder import RecordSink


class DataRank(Peer):
    """One of the engines, as the coordinator knows it.

    Args:
        context: of the sockets.
        folder: for the names of the sockets; readable by this user alone.
        rank: its number.
        config: its settings.
        environment: variables of its process that differ from those of this process.

    Attributes:
        program: what runs as the engine.
        reports: the socket on which `Report`s arrive.
        stats: as of its last report.
        ready: its first report; None until that has arrived.
    """

    program = "from nanovllm.engine.data_rank import main; main()"

    def __init__(
        self, context: zmq.Context[Any], folder: str, rank: int, config: EngineConfig, environment: dict[str, str]
    ) -> None:
        # Heartbeats arrive on this connection, and the complaint that a step hangs.
        self.process, self._pulse = start_process(["-c", self.program], environment)
        super().__init__(f"data rank {rank}", f"process {self.process.pid}")
        self.rank, self.pid = rank, self.process.pid
        self.stats = EngineStats()
        self.ready: Report | None = None
        self._num_sent = self._num_taken = 0
        self.commands, self.reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        addresses = [f"ipc://{folder}/{kind}{rank}" for kind in ("commands", "reports")]
        for bound, address in zip((self.commands, self.reports), addresses, strict=True):
            bound.set_hwm(0)  # neither side ever waits for the other
            bound.setsockopt(zmq.LINGER, 0)
            bound.bind(address)
        self._pulse.send((config, *addresses))

    @property
    def load(self) -> int:
        """How busy it is, including requests that it has not taken over yet."""
        return load_score(self.num_waiting, self.stats.num_running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait there or are on their way."""
        return self.stats.num_waiting + self.stats.num_swapped + self._num_sent - self._num_taken

    def send(self, command: Command) -> None:
        """Send it a command; does nothing if it is gone."""
        self._num_sent += len(command.add)
        with contextlib.suppress(zmq.Again):
            self.commands.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)

    def receive(self) -> list[Report]:
        """The reports that have arrived."""
        found = []
        while self.reports.poll(0):
            report = msgspec.msgpack.decode(self.reports.recv(), type=Report)
            if report.fatal:
                ended = time.time() - (time.monotonic() - report.time)
                text = report.fatal if report.user_error else f"failed: {report.fatal}"
                self.complaint = Complaint(report.user_error, text, ended)
                break
            self.ready = self.ready or report
            self.expect_heartbeats()
            self.stats, self._num_taken = report.stats, report.num_taken
            found.append(report)
        return found

    def feel_pulse(self) -> None:
        """Take in its heartbeats and complaints."""
        self.drain(self._pulse)

    def end(self) -> str:
        """How its process ended, in words; "" while it lives."""
        return how_it_ended(self.process)

    def close(self) -> None:
        """Close the sockets."""
        self._pulse.close()
        self.commands.close()
        self.reports.close()


class WatchedRank:
    """The steps of one of the engines: decodes the trace lines in its reports into records, while a sink watches.

    Attributes:
        trace_settings: see `EngineCore.trace_settings`.
    """

    def __init__(self, rank: DataRank) -> None:
        assert rank.ready is not None, "its first report has not come"
        self._rank = rank
        (self.trace_settings,) = rank.ready.trace_settings
        self._sinks: list[RecordSink] = []
        self._new_sinks: list[RecordSink] = []  # their first record is the next one with a snapshot
        self._decoder: TraceDecoder | None = None  # while a sink watches

    def watch(self, sink: RecordSink) -> None:
        """Hand `sink` a record of every step from now on; see `EngineCore.watch`."""
        if sink not in self._sinks + self._new_sinks:
            self._new_sinks.append(sink)
        create = load("nanovllm.trace.format:TraceDecoder", "a trace")
        self._decoder = self._decoder or create(self.trace_settings)
        self._rank.send(Command(order="watch", show_tokens=True))

    def unwatch(self, sink: RecordSink) -> None:
        """Hand `sink` no more records."""
        self._sinks = [s for s in self._sinks if s != sink]
        self._new_sinks = [s for s in self._new_sinks if s != sink]
        if self._decoder is not None and not self._sinks + self._new_sinks:
            self._decoder = None
            self._rank.send(Command(order="unwatch"))

    def show(self, report: Report) -> None:
        """Pass on the steps in a report."""
        for line, is_start in report.steps.get(0, ()):
            if self._decoder is None or not (is_start or self._sinks):
                continue
            record = self._decoder.decode(line)
            if is_start:
                self._sinks, self._new_sinks = self._sinks + self._new_sinks, []
            for sink in self._sinks:
                sink(record)


def rank_environments(config: EngineConfig) -> list[dict[str, str]]:
    """For each engine, the variables of its process: its share of the cores, and its GPUs.

    Raises:
        ValueError: there are not enough GPUs.
    """
    import torch

    size, ranks = config.data_parallel_size, config.world_size
    threads = max(1, torch.get_num_threads() // size)
    environments = [{"OMP_NUM_THREADS": str(threads)} for _ in range(size)]
    if config.device == "cpu" or not torch.cuda.is_available():
        return environments
    count = torch.cuda.device_count()
    if count < size * ranks:
        raise ValueError(
            f"data_parallel_size {size} x {ranks} ranks of an engine need {size * ranks} GPUs, and this machine has "
            f"{count}: use data_parallel_size {max(1, count // ranks)}, or device cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = visible.split(",")
    for rank, environment in enumerate(environments):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[rank * ranks : (rank + 1) * ranks])
    return environments


def main() -> None:
    """Run the process of one engine from beginning to end."""
    # If an engine is gone, the coordinator names it; tracebacks of the engines that miss it would only hide that.
    logging.getLogger("nanovllm.engine").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], CollectiveError))
    )
    connection = Connection(int(sys.argv[1]))
    config, commands, reports = connection.recv()
    mouth = Mouth(connection.send)
    is_rank = config.world_size == 1  # else its ranks have processes of their own
    mouth.watch_this_thread(
        activity_of_this_thread(config.data_parallel_rank) if is_rank else heard_activities,
        STEP_SECONDS if config.in_lock_step else math.inf,  # only then do other engines wait for its step
    )
    mouth.start()
    code: Any = 0
    try:
        run_engine(config, commands, reports, connection.fileno())
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    os._exit(code)  # at once: groups that other ranks have left would wait for them
