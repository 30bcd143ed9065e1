"""Finds out which process is to blame for a failure, and ends those that work with it: how an
executor supervises its ranks, a coordinator its engines, and a front end its engine.

A process can be lost in three ways. If it has died, its connection is closed. If it is stopped, or
a library holds the interpreter's lock, its heartbeats stop. If its thread waits for something that
never comes, it still sends heartbeats, so it must detect its own hang: see `hang`.

A rank that loops for ever is found by the other ranks, whose collectives wait for it in vain. The
supervisor, which hears all ranks, finds those that wait for one another in collectives: see
`standstill`.

Under load a process may get no processor for seconds. The time for which it waits for one does not
count: see `starvation`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, NoReturn, TypeVar, cast

import zmq

from nanovllm.processes.activity import HEARTBEAT_SECONDS, LOOK_SECONDS, SILENCE_SECONDS
from nanovllm.processes.channel import Failure
from nanovllm.processes.standstill import Activity, explain_standstill
from nanovllm.processes.start import end_processes, how_it_ended, uninterrupted
from nanovllm.processes.starvation import RunDelay

# Processes that lose a peer report that, too: how long to look for the first failure.
BLAME_SECONDS = 0.5


def is_debugged_or_dumps_core(pid: int) -> bool:
    """Whether a debugger has stopped a process, or it has crashed and writes its core dump. Only
    Linux tells."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        return any(line.startswith("State:\tt") or line == "CoreDumping:\t1" for line in lines)
    return False


# What the ranks that this process watches do: a process reports it to its own parent.
heard_activities: dict[int, Activity] = {}


class Child:
    """A process as the one that watches it knows it: a rank or an engine.

    Args:
        pid: of its process, if that runs on this machine and another program has started it.

    Attributes:
        name, where: "rank 1" and "process 77", for messages.
        connection: to its `Channel`.
        process: that this process has started (a `Popen`); None if another program has.
        pid: of its process, if that runs on this machine.
        answers: by the number of the order, see `Channel.answer`.
        failure: the reason why it ends, if it has sent one.
        heard: when its latest message arrived, in seconds of the monotonic clock.
        activities: what the ranks in it do, as of its latest heartbeat.
        is_ready: it has loaded everything.
        is_gone: its connection is closed.
    """

    def __init__(
        self,
        name: str,
        where: str = "",
        connection: Connection | None = None,
        process: subprocess.Popen[bytes] | None = None,
        pid: int | None = None,
    ) -> None:
        self.name = name
        self.where = where if process is None else f"process {process.pid}"
        self.connection = cast(Connection, connection)  # None in tests that send nothing
        self.process = process
        self.pid = process.pid if process is not None else pid
        self.answers: dict[int, object] = {}
        self.failure: Failure | None = None
        self.heard = time.monotonic()
        self.activities: dict[int, Activity] = {}
        self.is_ready = self.is_gone = False
        self._run_delay: RunDelay | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.where}"

    # ---------------------------------------------------------------- what it sends

    @property
    def sources(self) -> list[int | zmq.Socket[bytes]]:
        """What becomes readable when it has sent something."""
        return [] if self.is_gone else [self.connection.fileno()]

    def receive(self) -> None:
        """Take in every message that has arrived, without waiting for more."""
        try:
            while self.connection.poll(0):
                self.take(self.connection.recv())
        except (EOFError, OSError):
            self.is_gone = True

    def take(self, message: object) -> None:
        """Take in a message: an answer, a heartbeat or a failure."""
        self.heard = time.monotonic()
        self._run_delay = None
        if isinstance(message, tuple):  # the number of an order, and the answer
            self.answers.update([message])
        elif isinstance(message, Failure):
            self.failure = message
        elif isinstance(message, dict):
            self.activities = message
            heard_activities.update(message)

    def close(self) -> None:
        """Close what leads to it."""
        self.connection.close()

    # ---------------------------------------------------------------- how it is

    def expect_heartbeats(self) -> None:
        """From now on, its silence counts: it is ready. (While it loads, a library may hold the
        interpreter's lock for long.)"""
        self.is_ready = True
        self.heard = time.monotonic()

    def unexplained_silence(self, now: float) -> float:
        """Seconds for which nothing was heard of it, without those in which it waited for a
        processor. Only Linux tells the latter, and only about a process of this machine; otherwise
        all of the silence."""
        silence = now - self.heard
        if silence < SILENCE_SECONDS / 4:
            self._run_delay = None
            return silence
        if self._run_delay is None:
            self._run_delay = RunDelay(self.pid)
        return silence - self._run_delay.look()

    def how_it_ended(self) -> str:
        """How it ended, in words; "" while it seems to live."""
        if self.process is None:
            return "has ended, or cannot be reached" if self.is_gone else ""
        end = how_it_ended(self.process)
        if end.endswith(signal.SIGKILL.name) and not self.is_ready:
            end += " while it started: does it need more memory than there is?"
        return end

    def find_failure(self) -> Failure | None:
        """Return the failure that it has sent, or how it ended without a word, as when it was
        killed: failures of others may result from that."""
        if self.failure is None and (end := self.how_it_ended()):
            return Failure(False, end, time=0.0, is_certain=True)
        return self.failure


C = TypeVar("C", bound=Child)


class Supervisor(Generic[C]):
    """Watches processes that work together: if one fails, all are ended. They also end when this
    object does, or the program.

    Args:
        error: what methods raise once a process has failed.

    Attributes:
        children: the processes.
        reason: why they have been ended; "" until then.
        resources: what is given back when they have been ended.
    """

    def __init__(self, error: type[Exception] = RuntimeError) -> None:
        self.children: list[C] = []
        self.reason = ""
        self.resources = contextlib.ExitStack()
        self._error = error
        self._started: list[subprocess.Popen[bytes]] = []
        self.resources.callback(end_processes, self._started)
        weakref.finalize(self, self.resources.close)
        self._looked = time.monotonic()
        self._compared = 0.0
        self._since = 0.0
        self._activities: dict[int, Activity] = {}  # of all ranks, the same since then
        self._run_delays: list[RunDelay] = []  # of all ranks, while they seem to stand still

    def add(self, child: C) -> None:
        """Watch this process, too."""
        self.children.append(child)
        if child.process is not None:
            self._started.append(child.process)

    def make_folder(self) -> str:
        """Make a temporary folder for the processes, which goes with them. It is readable by this
        user alone."""
        folder = tempfile.mkdtemp(prefix="nanovllm-")
        self.resources.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    # ---------------------------------------------------------------- what its owner calls

    def check(self) -> None:
        """Raise the error if the processes have been ended."""
        if self.reason:
            raise self._error(self.reason)

    def hear(self, timeout: float = 0.0) -> None:
        """Take in what all have sent; wait up to `timeout` seconds for something. The first failure
        ends all.

        Raises:
            ValueError: one refuses what the user has asked for.
            error: one has ended, hangs, or has been silent for too long.
        """
        self.check()
        if (failure := self.look(timeout)) is not None:
            self.fail(str(failure), ValueError if failure.is_users else self._error)

    def listen(self, timeout: float) -> None:
        """Take in what they have sent, and mark those that are gone; wait up to `timeout` seconds
        for something."""
        poller = zmq.Poller()
        for child in self.children:
            for source in child.sources:
                poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * timeout)))
        with uninterrupted():
            for child in self.children:
                if not ready.keys().isdisjoint(child.sources):
                    child.receive()

    def listen_until(self, condition: Callable[[], bool], seconds: float = 1.0) -> None:
        """Take in what they send until the condition holds, for at most this many seconds."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.listen(0.01)

    def fail(self, reason: str, kind: type[Exception] | None = None) -> NoReturn:
        """End all, and raise an error with this reason."""
        self.end(reason)
        raise (kind or self._error)(reason)

    def end(self, reason: str) -> None:
        """End all, whatever they do."""
        self.reason = reason
        for child in self.children:
            child.close()
        self.resources.close()

    # ---------------------------------------------------------------- who is to blame

    def look(self, timeout: float = 0.0) -> Failure | None:
        """Check all processes.

        Args:
            timeout: how long to wait for messages, in seconds, while all is well.

        Returns:
            What has failed, with the name of the process that is to blame; None while all is well.
        """
        before = self._looked
        self.listen(timeout)
        self._looked = now = time.monotonic()
        # The caller has not listened meanwhile, or this process was stopped, between two looks or
        # while it listened: perhaps the others were stopped with it.
        if now - before > timeout + 2 * HEARTBEAT_SECONDS:
            self._activities = {}
            for child in self.children:
                child.heard = now
        for child in self.children:
            if child.is_gone or child.find_failure() is not None:
                return self._blame(child)
            # Until it is ready, a process may hold the interpreter's lock while it imports
            # libraries.
            if child.is_ready and child.unexplained_silence(now) > SILENCE_SECONDS:
                if child.pid is not None and is_debugged_or_dumps_core(child.pid):
                    for rank in child.activities:  # they may be outdated
                        heard_activities.pop(rank, None)
                    child.heard = now
                    child.activities = {}
                    continue
                silence = f"hangs: nothing was heard of it for {SILENCE_SECONDS:g} seconds"
                return Failure(False, silence, is_certain=True, process=str(child))
        # Heartbeats arrive every second, while this is called in every step.
        return self._compare(now) if now - self._compared > LOOK_SECONDS else None

    def _compare(self, now: float) -> Failure | None:
        """Find ranks that wait for one another for ever: the heartbeats of all ranks have said the
        same for long."""
        self._compared = now
        children = {rank: child for child in self.children for rank in child.activities}
        activities = {rank: child.activities[rank] for rank, child in children.items()}
        heard = min((child.heard for child in children.values()), default=0.0)
        if activities != self._activities:
            self._activities = activities
            self._since = heard
        # An engine may have several ranks.
        names = {
            rank: str(child) if len(child.activities) == 1 else f"rank {rank} of {child}"
            for rank, child in children.items()
        }
        silence = heard - self._since
        text = ""
        if silence > SILENCE_SECONDS / 4:
            text = explain_standstill(activities, names, SILENCE_SECONDS)
        if not text:
            self._run_delays = []
            return None
        if not self._run_delays:
            self._run_delays = [RunDelay(child.pid) for child in set(children.values())]
        # A rank may seem idle because it gets no processor to take its order.
        starved = max(run_delay.look() for run_delay in self._run_delays)
        return Failure(False, text) if silence - starved > SILENCE_SECONDS else None

    def _blame(self, suspect: C) -> Failure:
        """Find out which process has failed first: the suspect, or another one that it works
        with."""
        deadline = time.monotonic() + BLAME_SECONDS
        is_known = False
        failures: list[Failure] = []
        while not is_known:
            # What was sent just before the end arrives with the last look.
            is_known = (
                time.monotonic() > deadline
                or any(each.is_certain for each in failures)
                or len(failures) == len(self.children)
            )
            self.listen(0.01)
            failures = [
                dataclasses.replace(failure, process=str(child))
                for child in self.children
                if (failure := child.find_failure()) is not None
            ]
        if not failures:
            failures = [
                Failure(False, "has closed its connection", is_certain=True, process=str(suspect))
            ]
        return min(failures, key=lambda each: (not each.is_users, not each.is_certain, each.time))
