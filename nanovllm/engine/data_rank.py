"""An engine in a process of its own, as the process that starts it sees it.

`DataRank` starts a process in which `main` runs, with the number of a socket to this process. The first message on it holds the
engine's settings; heartbeats go back. Commands and reports go over sockets of their own, see `engine.process`.

Built by notebooks/25_data_parallel.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any

import msgspec
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats
from nanovllm.data.parts import load
from nanovllm.distributed.life_signs import Complaint, Mouth, Peer, activity_of_this_thread, heard_activities
from nanovllm.distributed.standstill import CollectiveError
from nanovllm.engine.process import Command, Report, run_engine
from nanovllm.executor.remote import end_processes, start_process
from nanovllm.scheduler.data_parallel import load_score
from nanovllm.text.processor import EngineLimits

if TYPE_CHECKING:
    from nanovllm.trace.recorder import RecordSink


class DataRank(Peer):
    """One of the engines, as the coordinator knows it.

    Args:
        config: its settings.
        environment: variables of its process that differ from those of this process.
        wrapper, log: see `start_process`.

    Attributes:
        program: what runs as the engine.
        folder: for the names of the sockets, until both sides are connected; readable by this user alone.
        reports: the socket on which `Report`s arrive.
        limits, trace_settings: see `EngineCore`; known when it is ready.
        stats, reported: its statistics as of its last report, and the time of that.
        news: its reports since the last call of `take_reports`.
    """

    program = "from nanovllm.engine.data_rank import main; main()"
    limits: EngineLimits
    trace_settings: dict[str, Any]

    def __init__(
        self, config: EngineConfig, environment: dict[str, str], wrapper: Sequence[str] = (), log: IO[Any] | None = None
    ) -> None:
        self.rank = config.data_parallel_rank or 0
        # Heartbeats arrive on this connection, and the complaint that a step hangs.
        process, pulse = start_process(["-c", self.program], environment, wrapper, log)
        super().__init__(f"data rank {self.rank}", "", pulse, process)
        self.folder = tempfile.mkdtemp(prefix="nanovllm-")
        addresses = [f"ipc://{self.folder}/{kind}" for kind in ("commands", "reports")]
        self._bind(*addresses)
        pulse.send((config, *addresses))

    def _bind(self, *addresses: str) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self.commands, self.reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, address in zip((self.commands, self.reports), addresses, strict=True):
            socket.set_hwm(0)  # neither side ever waits for the other
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self.stats, self.reported = EngineStats(), 0.0
        self.news: list[Report] = []
        self._num_sent = self._num_taken = 0
        self._sink: Callable[[msgspec.Raw], None] = lambda encoded: None

    def watch(self, sink: RecordSink) -> None:
        """Hand `sink`, the only one, a record of every step from now on; see `EngineCore.watch`."""
        decode = load("nanovllm.trace.record:decode_record", "a trace")
        self._sink = lambda encoded: sink(decode(encoded))
        self.send(Command(order="watch"))

    def unwatch(self, sink: RecordSink) -> None:
        """Hand `sink` no more records."""
        self._sink = lambda encoded: None
        self.send(Command(order="unwatch"))

    @property
    def load(self) -> int:
        """How busy it is, including requests that it has not taken over yet."""
        return load_score(self.num_waiting + self.stats.num_swapped, self.stats.num_running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait there or are on their way."""
        return self.stats.num_waiting + self._num_sent - self._num_taken

    def send(self, command: Command) -> None:
        """Send it a command; does nothing if it is gone."""
        self._num_sent += len(command.add)
        with contextlib.suppress(zmq.ZMQError):
            self.commands.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)

    def receive(self) -> None:
        """Take in its heartbeats, complaints and reports."""
        self.drain()
        while self.complaint is None and self.reports.poll(0):
            report = msgspec.msgpack.decode(self.reports.recv(), type=Report)
            if report.fatal:
                ended = time.time() - (time.monotonic() - report.time)
                text = report.fatal if report.user_error else f"failed: {report.fatal}"
                self.complaint = Complaint(report.user_error, text, ended)
                return
            if report.limits is not None:
                self.limits, (self.trace_settings,) = report.limits, report.trace_settings
                self.expect_heartbeats()
                shutil.rmtree(self.folder, ignore_errors=True)
            self.stats, self.reported, self._num_taken = report.stats, report.time, report.num_taken
            for encoded in report.steps.get(0, ()):
                self._sink(encoded)
            self.news.append(report)

    def take_reports(self) -> list[Report]:
        """The reports that have arrived since the last call."""
        news, self.news = self.news, []
        return news

    def shutdown(self, seconds: float) -> None:
        """Order it to end, and kill it after this time."""
        self.send(Command(order="shutdown"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.close()

    def close(self) -> None:
        """Kill its process if that has not ended, and close the sockets."""
        end_processes([self.process], self.folder)
        self.connection.close()
        self.commands.close()
        self.reports.close()


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
    is_rank = config.world_size == 1  # else its ranks have processes of their own
    Mouth(connection.send, activity_of_this_thread(config.data_parallel_rank) if is_rank else heard_activities.copy)
    code: Any = 0
    try:
        run_engine(config, commands, reports, connection.fileno())
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    os._exit(code)  # at once: groups that other ranks have left would wait for them
