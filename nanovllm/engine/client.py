"""An engine in a process of its own, as the process that starts it sees it.

`EngineClient` starts a process in which `main` runs, with the number of a socket to this process.
The first message on it holds the engine's settings; heartbeats go back, and the reason if it fails.
Commands and reports go over sockets of their own, see `process`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING

import msgspec
import psutil
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.engine.lifetime import STOP_STARTING, run_engine
from nanovllm.engine.process import Command, Report
from nanovllm.processes.activity import SILENCE_SECONDS
from nanovllm.processes.channel import Channel, Failure, activity_of_this_thread
from nanovllm.processes.standstill import Activity, CollectiveError
from nanovllm.processes.start import kill_tree, make_socket_folder, start_process
from nanovllm.processes.supervisor import Child, Supervisor, heard_activities
from nanovllm.text.prompts import EngineLimits

if TYPE_CHECKING:
    from nanovllm.trace.recorder import RecordSink

# A process that is killed while it starts gets this time to clean up.
CLEAN_UP_SECONDS = 1.0


class EngineClient(Child):
    """Starts an engine's process, sends it commands, and takes in its reports.

    Args:
        config: its settings.
        environment: variables of its process that differ from those of this process.
        wrapper, log: see `start_process`.

    Attributes:
        program: what runs as the engine.
        rank: its number among the engines of a coordinator, from 0.
        folder: for the names of the sockets, until both sides are connected; readable by this user
            alone.
        reports: the socket on which `Report`s arrive.
        limits, trace_settings: see `EngineCore`; known when it is ready, which its first report
            says.
        stats, reported: its statistics as of its last report, and the time of that.
    """

    program = "from nanovllm.engine.client import main; main()"
    process: subprocess.Popen[bytes]
    limits: EngineLimits
    trace_settings: TraceSettings

    def __init__(
        self,
        config: EngineConfig,
        environment: dict[str, str],
        wrapper: Sequence[str] = (),
        log: IO[bytes] | IO[str] | None = None,
    ) -> None:
        process, connection = start_process(["-c", self.program], environment, wrapper, log)
        self.rank = config.data_parallel_rank or 0
        name = (
            "the engine process" if config.data_parallel_rank is None else f"data rank {self.rank}"
        )
        super().__init__(name, connection=connection, process=process)
        self.folder = make_socket_folder()
        addresses = [f"ipc://{self.folder}/{kind}" for kind in ("commands", "reports")]
        self._bind(*addresses)
        self.connection.send((config, *addresses))

    def _bind(self, *addresses: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.commands = context.socket(zmq.PUSH)
        self.reports = context.socket(zmq.PULL)
        for socket, address in zip((self.commands, self.reports), addresses, strict=True):
            # Neither side ever waits for the other. The requests bound the commands in flight, and
            # this side's speed of reading bounds the reports.
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self.stats = EngineStats()
        self.reported = 0.0
        self._unread: list[Report] = []
        self._num_sent = self._num_taken = 0
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._sink: Callable[[msgspec.Raw], None] = lambda encoded: None
        # For a client without a coordinator. It need not end the process, which ends with this one.
        self._supervisor = Supervisor[EngineClient]()
        self._supervisor.children.append(self)

    # ---------------------------------------------------------------- commands

    def send(self, command: Command) -> None:
        """Send it a command; does nothing if it is gone.

        Raises:
            OverflowError, UnicodeEncodeError: a number over 64 bits; half of a surrogate pair.
        """
        encoded = msgspec.msgpack.encode(command)
        self._num_sent += len(command.add)
        with contextlib.suppress(zmq.ZMQError):
            self.commands.send(encoded, zmq.NOBLOCK)

    def watch(self, sink: RecordSink) -> None:
        """Hand `sink`, the only one, a record of every step from now on; see `EngineCore.watch`."""
        from nanovllm.trace.record import decode_record as decode

        self._sink = lambda encoded: sink(decode(encoded))
        self.send(Command(order="watch"))

    def unwatch(self, sink: RecordSink) -> None:
        """Hand `sink` no more records."""
        self._sink = lambda encoded: None
        self.send(Command(order="unwatch"))

    # ---------------------------------------------------------------- reports

    @property
    def num_in_flight(self) -> int:
        """Sequences that were sent, and that no report counts yet."""
        return self._num_sent - self._num_taken

    @property
    def num_waiting(self) -> int:
        """Requests that wait there or are in flight to it."""
        return self.stats.num_waiting + self.num_in_flight

    @property
    def sources(self) -> list[int | zmq.Socket[bytes]]:
        """What becomes readable when it has sent something."""
        return [self.reports, *super().sources]

    def receive(self) -> None:
        """Take in its heartbeats and reports."""
        super().receive()
        with contextlib.suppress(zmq.Again):  # all have been taken in
            while True:
                report = self._decoder.decode(self.reports.recv(zmq.NOBLOCK))
                if report.limits is not None:
                    self.limits = report.limits
                    self.trace_settings = report.trace_settings[0]
                    self.expect_heartbeats()
                    # Both sides are connected, so the sockets' names can go. Nothing is left behind
                    # even if this process is killed.
                    shutil.rmtree(self.folder, ignore_errors=True)
                self.stats = report.stats
                self.reported = report.time
                self._num_taken = report.num_taken
                for encoded in report.steps.get(0, ()):
                    self._sink(encoded)
                self._unread.append(report)

    def take_reports(self) -> list[Report]:
        """The reports that have arrived since the last call."""
        reports = self._unread
        self._unread = []
        return reports

    def look(self) -> Failure | None:
        """Take in its reports. Returns why it has ended, or must be ended; None while it works. An
        exception needs no name: this is the only engine."""
        failure = self._supervisor.look()
        if failure is None or failure.is_certain:
            return failure
        return dataclasses.replace(failure, process="")

    # ---------------------------------------------------------------- its end

    def shutdown(self, seconds: float) -> None:
        """Order it to end, kill it after this time, and close the connections."""
        self.send(Command(order="shutdown"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()
        self.process.wait()
        self.close()

    def kill(self) -> None:
        """Kill its process, if that has not ended, and all that it has started, even if they are
        stopped or hang."""
        if self.process.poll() is None and not self.is_ready:
            self._stop_starting()
        if self.process.poll() is None:
            kill_tree(self.process.pid)

    def _stop_starting(self) -> None:
        """Have a process that still starts remove what it has begun, such as a compilation; kill
        what it has started."""
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(STOP_STARTING)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLEAN_UP_SECONDS)
            for each in started:
                with contextlib.suppress(psutil.Error):  # it has ended by now
                    each.kill()

    def close(self) -> None:
        """Close the connections."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.commands.close()
        self.reports.close()


def ranks_of_engine(config: EngineConfig) -> Callable[[], dict[int, Activity]]:
    """Activities of an engine's ranks for its heartbeats, if a coordinator compares engines."""
    if config.data_parallel_rank is None:
        return dict
    if config.world_size == 1:
        return activity_of_this_thread(config.data_parallel_rank)
    return heard_activities.copy  # they have processes of their own


def main() -> None:
    """Run the process of one engine from beginning to end."""
    connection = Connection(int(sys.argv[1]))
    config, commands, reports = connection.recv()
    if config.data_parallel_rank is not None:
        # If an engine has ended, the coordinator names it; tracebacks of the engines that miss it
        # would only hide that.
        logging.getLogger("nanovllm.engine").addFilter(
            lambda record: not (record.exc_info and isinstance(record.exc_info[1], CollectiveError))
        )
    # If the parent is gone, the engine's loop notices that as well and ends, unless it hangs.
    channel = Channel(connection, ranks_of_engine(config), patience=2 * SILENCE_SECONDS)
    code = 0
    try:
        run_engine(config, commands, reports, channel)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    channel.close()
    sys.stdout.flush()
    os._exit(code)  # at once: groups that other ranks have left would wait for them
