"""A process that gets no processor for seconds does not hang, and one that is stopped or hangs is
found even so.

The processes here are pinned to one core, which they share with busy loops. A thread of lower
priority gets it every second or so, for some milliseconds: a silence of SILENCE would be a hang.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from nanovllm.processes import starvation, supervisor
from nanovllm.processes.channel import Failure
from nanovllm.processes.standstill import Activity, Call
from nanovllm.processes.start import start_process
from nanovllm.processes.starvation import RunDelay, ThreadTimes, thread_times
from nanovllm.processes.supervisor import Child
from tests.server_process import wait_until
from tests.stand_ins import set_constants
from tests.supervision.silence import set_silence
from tests.supervision.starved import (
    PROGRAM,
    beat,
    compute_in_a_step,
    hang_in_a_step,
    have_a_thread_compute_in_a_step,
    hold_the_lock,
)
from tests.supervision.starved import SILENCE_SECONDS as SILENCE
from tests.supervision.supervised import Supervised

pytestmark = pytest.mark.skipif(
    not thread_times(os.getpid()), reason="this kernel does not count run delay"
)

NUM_LOOPS = 8
NUM_BEATS = 5
# So many heartbeats take several times as long as what would be a hang.
MANY_BEATS = 40
BUSY = (
    "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() == "
    "int(sys.argv[2]): pass"
)


@dataclass
class BusyCore:
    """A core that several processes occupy, while they are not paused."""

    number: int
    loops: list[subprocess.Popen[bytes]]

    def signal(self, number: signal.Signals) -> None:
        for loop in self.loops:
            loop.send_signal(number)


@pytest.fixture(scope="module")
def core() -> Iterator[BusyCore]:
    number = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", BUSY, str(number), str(os.getpid())]
    core = BusyCore(number, [subprocess.Popen(command) for _ in range(NUM_LOOPS)])
    core.signal(signal.SIGSTOP)
    yield core
    core.signal(signal.SIGKILL)
    for loop in core.loops:
        loop.wait()


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    set_silence(SILENCE, monkeypatch)


# ---------------------------------------------------------------- what their parent finds


@pytest.fixture
def begin(core: BusyCore) -> Iterator[Callable[[Callable[..., None]], Child]]:
    """A function that starts a process, and occupies its core from its first heartbeat on."""
    children: list[Child] = []

    def begin(what: Callable[..., None]) -> Child:
        process, connection = start_process(["-c", PROGRAM.format(what.__name__)], {})
        child = Child("rank 0", connection=connection, process=process)
        children.append(child)
        connection.send(core.number)
        wait_until(lambda: connection.poll(0))
        child.receive()
        core.signal(signal.SIGCONT)
        child.expect_heartbeats()
        return child

    yield begin
    core.signal(signal.SIGSTOP)
    for child in children:
        assert child.process is not None
        child.process.kill()
        child.process.wait()
        child.connection.close()


class Listener:
    """Watches one process.

    Attributes:
        num_beats: how many heartbeats have come.
        longest: the longest time without one, in seconds.
    """

    def __init__(self, child: Child) -> None:
        self._child, self._watch = child, Supervised([child], self._listen)
        self.num_beats, self.longest = 0, 0.0

    def verdict(self) -> Failure | None:
        """What is wrong."""
        return self._watch.look(0.05)

    def _listen(self, timeout: float) -> None:
        if self._child.connection.poll(timeout):
            self.longest = max(self.longest, time.monotonic() - self._child.heard)
            self.num_beats += 1
            self._child.take(self._child.connection.recv())

    def failure(self) -> Failure:
        """Wait until something is wrong."""
        verdicts: list[Failure | None] = []
        wait_until(lambda: verdicts.append(self.verdict()) or verdicts[-1])
        assert verdicts[-1] is not None
        return verdicts[-1]

    def until_beats(self, count: int) -> None:
        """Wait for so many heartbeats; nothing may be wrong."""
        while self.num_beats < count:
            verdict = self.verdict()
            assert verdict is None, verdict


@pytest.mark.nightly  # a loaded machine may delay the heartbeats themselves
def test_a_process_that_gets_no_processor_does_not_hang(begin: Callable[..., Child]) -> None:
    listener = Listener(begin(beat))
    # When the kernel makes it wait is the kernel's choice.
    for count in range(NUM_BEATS, 20 * NUM_BEATS, NUM_BEATS):
        listener.until_beats(count)
        if listener.longest > SILENCE:
            return
    pytest.skip(
        f"the kernel never made it wait for {SILENCE} s: the longest was {listener.longest:.2f} s"
    )


def test_a_process_without_a_processor_that_is_stopped_is_found(
    begin: Callable[..., Child],
) -> None:
    child = begin(beat)
    listener = Listener(child)
    listener.until_beats(2)
    assert child.process is not None
    child.process.send_signal(signal.SIGSTOP)
    assert "hangs: nothing was heard" in str(listener.failure())


def test_a_library_that_keeps_the_interpreters_lock_on_a_busy_core_is_found(
    begin: Callable[..., Child],
) -> None:
    """The other threads wait for the lock: they wake every 5 ms, and wait for their processor each
    time."""
    child = begin(hold_the_lock)
    listener = Listener(child)
    child.connection.send("now")
    assert "hangs: nothing was heard" in str(listener.failure())


@pytest.mark.parametrize("what", [compute_in_a_step, have_a_thread_compute_in_a_step])
def test_a_step_that_gets_no_processor_does_not_hang(
    begin: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, what: Callable[..., None]
) -> None:
    set_constants(monkeypatch, supervisor, SILENCE_SECONDS=60.0)  # what it says itself matters
    listener = Listener(begin(what))
    listener.until_beats(MANY_BEATS)


# a forked program has a helper process, just older than its step: it would wait for that one
@pytest.mark.started
def test_a_step_that_hangs_on_a_busy_core_is_found(
    begin: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, supervisor, SILENCE_SECONDS=60.0)
    listener = Listener(begin(hang_in_a_step))
    assert "hangs: for 0.6 seconds it has been at " in str(listener.failure())


# ---------------------------------------------------------------- the rules, without processes


class Kernel:
    """What the kernel tells of a process: the time, and the times of its threads by their ids."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.threads: dict[int, ThreadTimes] = {}
        patch.setattr(starvation.time, "monotonic", lambda: self.now)
        patch.setattr(starvation, "thread_times", lambda pid: self.threads)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def delay_after(kernel: Kernel, *looks: ThreadTimes | None) -> float:
    """Run delay of a process with one thread, which has these times, a second apart."""
    told = [{} if times is None else {7: times} for times in looks]
    kernel.threads = told[0]
    run_delay = RunDelay(1)
    for kernel.threads in told[1:]:
        kernel.now += 1.0
        delay = run_delay.look()
    return delay


@pytest.mark.parametrize(
    ("looks", "seconds"),
    [
        # It has got its processor once.
        ([ThreadTimes(1.0, 2.0, 30, True), ThreadTimes(1.004, 3.5, 31, False)], 1.5),
        # It waits: the kernel has not added that yet.
        ([ThreadTimes(1.0, 2.0, 30, True)] * 4, 3.0),
        # After it has run.
        (
            [*[ThreadTimes(1.0, 2.0, 30, True)] * 2, *[ThreadTimes(1.004, 3.2, 31, True)] * 2],
            1.2 + 1.0,
        ),
        # It sleeps or is stopped.
        ([ThreadTimes(1.0, 2.0, 30, False)] * 4, 0.0),
        # It has just woken.
        ([*[ThreadTimes(1.0, 2.0, 30, False)] * 3, ThreadTimes(1.0, 2.0, 30, True)], 1.0),
        # It runs all the time.
        ([ThreadTimes(1.0, 2.0, 30, True), ThreadTimes(2.0, 2.0, 30, True)], 0.0),
        # It computes, and is preempted.
        ([ThreadTimes(1.0, 2.0, 30, True), ThreadTimes(1.4, 2.6, 130, False)], 0.6),
        # It wakes often, to look whether a lock is free.
        ([ThreadTimes(1.0, 2.0, 30, True), ThreadTimes(1.01, 2.6, 130, False)], 0.0),
        # The kernel does not tell.
        ([None, None], 0.0),
    ],
)
def test_run_delay_of_a_thread(
    kernel: Kernel, looks: list[ThreadTimes | None], seconds: float
) -> None:
    assert delay_after(kernel, *looks) == pytest.approx(seconds)


def test_a_thread_that_does_not_count_and_a_process_elsewhere(kernel: Kernel) -> None:
    delay_after(kernel, None, None)
    kernel.threads = {7: ThreadTimes(1.0, 2.0, 30, True), 8: ThreadTimes(1.0, 2.0, 30, False)}
    run_delay, remote = RunDelay(1), RunDelay(None)
    kernel.now += 1
    assert run_delay.look(besides=7) == remote.look() == 0.0
    kernel.now += 1
    assert run_delay.look() == 2.0


@pytest.mark.parametrize("text", ["0 0 0\n", None])
def test_kernels_that_do_not_count_tell_nothing(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    def read_text(path: pathlib.Path) -> str:
        if text is None:
            raise FileNotFoundError(path)
        return text if path.name == "schedstat" else "1 (a) b) S 2 3"

    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    assert thread_times(os.getpid()) == {}


def test_a_rank_that_gets_no_processor_to_take_its_order_is_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its heartbeats come, from another thread."""
    delays = {5: 0.0, 6: 0.0}

    class Delay:
        def __init__(self, pid: int) -> None:
            self.pid, self.before = pid, delays[pid]

        def look(self) -> float:
            return delays[self.pid] - self.before

    monkeypatch.setattr(supervisor, "RunDelay", Delay)
    set_constants(monkeypatch, supervisor, LOOK_SECONDS=0.0)
    children = [Child("rank 0"), Child("rank 1")]
    now = time.monotonic()
    call = Call("world", (0, 1), 3, "all_reduce", True)
    for pid, child in enumerate(children, start=5):
        child.pid, child.is_ready = pid, True
    activities = (
        {0: Activity(False, 1.0, (call,))},
        {1: Activity(True, 1.0, (call._replace(number=2, is_inside=False),))},
    )
    watch = Supervised(children)

    def verdict(seconds: float) -> Failure | None:
        def listen(timeout: float) -> None:
            for child, activity in zip(children, activities, strict=True):
                child.take(activity)
                child.heard = now + seconds

        return watch.look_with(listen)

    assert verdict(0.0) is None
    assert verdict(SILENCE / 2) is None
    delays[6] = 3 * SILENCE
    assert verdict(2 * SILENCE) is None
    assert verdict(3.9 * SILENCE) is None
    failure = verdict(4.1 * SILENCE)
    assert failure is not None and "been idle while rank 0" in failure.text
