"""An engine in a process of its own, as the process that starts it sees it.

`EngineClient` starts a process in which `main` runs, with the number of a socket to this process.
The first message on it holds the engine's settings; heartbeats may go back, see `data_rank`.
Commands and reports go over sockets of their own, see `process`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING

import msgspec
import psutil
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.distributed.processes import how_it_ended, kill_tree, start_process
from nanovllm.engine.process import STOP_STARTING, Command, Report, run_engine
from nanovllm.text.prompts import EngineLimits

if TYPE_CHECKING:
    from nanovllm.trace.recorder import RecordSink

# The last report of a process may still be in flight when its end is noticed.
LAST_WORDS_SECONDS = 0.1
# A process that is killed while it starts gets this time to clean up.
CLEAN_UP_SECONDS = 1.0


def start_no_heart(connection: Connection, config: EngineConfig) -> None:
    """In the engine's process: send no heartbeats. If it hangs, its parent does not notice."""


class EngineClient:
    """Starts an engine's process, sends it commands, and takes in its reports.

    Args:
        config: its settings.
        environment: variables of its process that differ from those of this process.
        wrapper, log: see `start_process`.

    Attributes:
        program: what runs as the engine.
        start_heart: called in its process before the engine starts: begins to send heartbeats.
        connection: heartbeats arrive on it; it is closed when the process ends.
        folder: for the names of the sockets, until both sides are connected; readable by this user
            alone.
        reports: the socket on which `Report`s arrive.
        is_ready: its first report has arrived.
        limits, trace_settings: see `EngineCore`; known when it is ready.
        stats, reported: its statistics as of its last report, and the time of that.
        last_words: the report with the reason why it ends.
    """

    program = "from nanovllm.engine.client import main; main()"
    start_heart = staticmethod(start_no_heart)
    is_ready = False
    limits: EngineLimits
    trace_settings: TraceSettings
    last_words: Report | None = None

    def __init__(
        self,
        config: EngineConfig,
        environment: dict[str, str],
        wrapper: Sequence[str] = (),
        log: IO[bytes] | IO[str] | None = None,
    ) -> None:
        self.process, self.connection = start_process(
            ["-c", self.program], environment, wrapper, log
        )
        self.folder = tempfile.mkdtemp(prefix="nanovllm-")
        addresses = [f"ipc://{self.folder}/{kind}" for kind in ("commands", "reports")]
        self._bind(*addresses)
        self.connection.send((config, *addresses, self.start_heart))

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
        self._news: list[Report] = []
        self._num_sent = self._num_taken = 0
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._sink: Callable[[msgspec.Raw], None] = lambda encoded: None

    def watch(self, sink: RecordSink) -> None:
        """Hand `sink`, the only one, a record of every step from now on; see `EngineCore.watch`."""
        from nanovllm.trace.record import decode_record as decode

        self._sink = lambda encoded: sink(decode(encoded))
        self.send(Command(order="watch"))

    def unwatch(self, sink: RecordSink) -> None:
        """Hand `sink` no more records."""
        self._sink = lambda encoded: None
        self.send(Command(order="unwatch"))

    @property
    def num_in_flight(self) -> int:
        """Sequences that were sent, and that no report counts yet."""
        return self._num_sent - self._num_taken

    def send(self, command: Command) -> None:
        """Send it a command; does nothing if it is gone.

        Raises:
            OverflowError, UnicodeEncodeError: a number over 64 bits; half of a surrogate pair.
        """
        encoded = msgspec.msgpack.encode(command)
        self._num_sent += len(command.add)
        with contextlib.suppress(zmq.ZMQError):
            self.commands.send(encoded, zmq.NOBLOCK)

    def receive(self) -> None:
        """Take in its reports."""
        with contextlib.suppress(zmq.Again):  # all have been taken in
            while True:
                self._take(self._decoder.decode(self.reports.recv(zmq.NOBLOCK)))

    def _take(self, report: Report) -> None:
        if report.fatal:
            self.last_words = report
            return
        if report.limits is not None:
            self.limits = report.limits
            self.trace_settings = report.trace_settings[0]
            self.expect_heartbeats()
            # Both sides are connected, so the sockets' names can go. Nothing is left behind even if
            # this process is killed.
            shutil.rmtree(self.folder, ignore_errors=True)
        self.stats = report.stats
        self.reported = report.time
        self._num_taken = report.num_taken
        for encoded in report.steps.get(0, ()):
            self._sink(encoded)
        self._news.append(report)

    def expect_heartbeats(self) -> None:
        """From now on, its silence counts, if heartbeats are heard: it is ready."""
        self.is_ready = True

    def take_reports(self) -> list[Report]:
        """The reports that have arrived since the last call."""
        news = self._news
        self._news = []
        return news

    def poll(self) -> str:
        """Take in its reports. Returns why it has ended, or must be ended; "" while it works."""
        self.receive()
        if (end := how_it_ended(self.process)) and self.last_words is None:
            self.reports.poll(int(1000 * LAST_WORDS_SECONDS))
            self.receive()
        if self.last_words is not None:
            return self.last_words.fatal
        if end.endswith(signal.SIGKILL.name) and not self.is_ready:
            end += " while it started: does it need more memory than there is?"
        return f"the engine process {end}" if end else ""

    def shutdown(self, seconds: float) -> None:
        """Order it to end, and kill it after this time."""
        self.send(Command(order="shutdown"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
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
        """Kill its process if that has not ended, and close the connections."""
        self.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        for each in (self.connection, self.commands, self.reports):
            each.close()


def main() -> None:
    """Run the process of one engine from beginning to end."""
    connection = Connection(int(sys.argv[1]))
    config, commands, reports, start_heart = connection.recv()
    start_heart(connection, config)
    code = 0
    try:
        run_engine(config, commands, reports, connection.fileno())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    os._exit(code)  # at once: groups that other ranks have left would wait for them
