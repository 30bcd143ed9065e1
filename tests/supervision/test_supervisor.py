"""Who hangs, and who is to blame: the rules, without ranks."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.processes import hang, supervisor
from nanovllm.processes.activity import in_step, waiting_for_others
from nanovllm.processes.channel import Channel, Failure
from nanovllm.processes.hang import HangDetector
from nanovllm.processes.standstill import Activity
from nanovllm.processes.supervisor import Child, heard_activities
from tests.server_process import wait_until
from tests.stand_ins import set_constants
from tests.supervision.silence import set_silence
from tests.supervision.supervised import Supervised

SILENCE = 0.8
RESTS = 1.4  # more than SILENCE and the looks after it


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    set_silence(SILENCE, monkeypatch)


found = threading.Event()


class Wire:
    """Takes the place of the connection to a parent.

    Attributes:
        sent: what has been sent.
    """

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Failure):
            found.set()


def failures_of(work: Callable[[], Any]) -> list[Failure]:
    """What a channel reports while the thread that it watches does this."""
    wire: Any = Wire()
    found.clear()

    def run() -> None:
        channel = Channel(wire)
        for _ in range(5):  # a machine that stands still lets the time pass without a heartbeat
            work()
            if {} in wire.sent:
                break
        channel.close()

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    assert {} in wire.sent, "the heart has gone on"
    return [message for message in wire.sent if isinstance(message, Failure)]


def rest() -> None:
    found.wait(RESTS)


def burn() -> None:
    end = time.thread_time() + RESTS
    while time.thread_time() < end:
        pass


def rest_in_step() -> None:
    with in_step():
        found.wait(20)
        time.sleep(1.5 * SILENCE)  # a second failure would be reported now, and the heart beats


def test_who_rests_in_a_step_hangs_and_says_where_once() -> None:
    (failure,) = failures_of(rest_in_step)
    line = rest_in_step.__code__.co_firstlineno + 2
    name = "/".join(pathlib.Path(__file__).parts[-2:])
    assert failure.text.startswith(f"hangs: for {SILENCE:g} seconds it has been at ")
    assert f", called from {name}:{line} in rest_in_step, called from {name}" in failure.text
    assert failure.is_certain and not failure.is_users


def wait_for_others() -> None:
    with in_step(), waiting_for_others():
        rest()


def compute() -> None:
    with in_step():
        burn()


def have_a_thread_compute() -> None:
    with in_step():
        thread = threading.Thread(target=burn)
        thread.start()
        thread.join()


def compute_after_a_wait() -> None:
    with in_step():
        with waiting_for_others():
            rest()
        burn()


def many_short_steps() -> None:
    for _ in range(round(RESTS / 0.1)):
        with in_step():
            time.sleep(0.1)


def compile_something() -> None:
    with in_step():
        for _ in range(2):  # whoever looks when one ends shall not report
            # No program of Python: the process that forks those in tests may be slow to do so.
            subprocess.run(["sleep", str(RESTS)], check=True)


@pytest.mark.parametrize(
    "work",
    [
        rest,
        wait_for_others,
        compute,
        have_a_thread_compute,
        compute_after_a_wait,
        many_short_steps,
        compile_something,
    ],
)
def test_who_does_not_hang(work: Callable[[], None]) -> None:
    assert failures_of(work) == []


def test_a_process_that_was_there_before_the_step_is_no_excuse() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        time.sleep(0.3)
        assert len(failures_of(rest_in_step)) == 1
        assert rank.poll() is None
        rank.kill()


def test_who_was_stopped_and_goes_on_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    detectors: list[HangDetector] = []
    found.clear()

    def run() -> None:
        with in_step():
            detectors.append(HangDetector())
            found.wait()

    worker = threading.Thread(target=run)
    worker.start()
    wait_until(lambda: detectors)
    set_constants(monkeypatch, hang, HEARTBEAT_SECONDS=0.05)
    for _ in range(10):  # the heart was stopped, too, between any two looks
        time.sleep(0.1)
        assert detectors[0].look() == ""
    set_constants(monkeypatch, hang, HEARTBEAT_SECONDS=SILENCE / 2)
    assert detectors[0].look() == ""
    wait_until(detectors[0].look)
    found.set()
    worker.join()


# ---------------------------------------------------------------- blame


class Rank(Child):
    def __init__(self, name: str) -> None:
        super().__init__(name, "process 7")
        self.is_ready = True


def look(children: list[Rank], listen: Callable[[float], None] = lambda timeout: None) -> str:
    verdict = Supervised(children, listen).look()
    return str(verdict or "")


def test_who_was_first_is_to_blame() -> None:
    ranks = [Rank("rank 0"), Rank("rank 1"), Rank("rank 2")]
    assert look(ranks) == ""
    ranks[0].failure = Failure(False, "somebody is gone", time=11.0)

    def listen(timeout: float) -> None:  # one who was first, and speaks later
        ranks[2].failure = Failure(False, "no luck", time=10.0)

    assert look(ranks, listen) == "rank 2, process 7, failed: no luck"
    ranks[1].is_gone = True  # without a word
    assert look(ranks, listen) == "rank 1, process 7, has ended, or cannot be reached"
    ranks[1].is_gone = False
    ranks[0].failure = Failure(False, "hangs: here", time=12.0, is_certain=True)
    assert look(ranks, listen) == "rank 0, process 7, hangs: here"
    ranks[0].failure = Failure(True, "lower num_kv_blocks", time=12.0)
    assert look(ranks, listen) == "lower num_kv_blocks"


def test_who_hangs_is_to_blame_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, supervisor, BLAME_SECONDS=1000)
    ranks = [Rank("rank 0"), Rank("rank 1")]
    ranks[1].failure = Failure(False, "hangs: here", is_certain=True)
    assert look(ranks) == "rank 1, process 7, hangs: here"


def test_when_all_have_failed_the_first_is_blamed_at_once() -> None:
    ranks = [Rank("rank 0"), Rank("rank 1")]
    ranks[0].failure = Failure(False, "somebody is gone", time=11.0)
    looks = []

    def listen(timeout: float) -> None:
        assert len(looks) < 9, "it waits for what cannot come"
        looks.append(timeout)
        if len(looks) == 3:
            ranks[1].failure = Failure(False, "no luck", time=10.0)

    assert look(ranks[:1], listen) == "rank 0, process 7, failed: somebody is gone"
    looks.clear()
    assert look(ranks, listen) == "rank 1, process 7, failed: no luck"


def test_silence_counts_only_while_somebody_listens() -> None:
    ranks = [Rank("rank 0"), Rank("rank 1")]
    watch = Supervised(ranks)
    time.sleep(2 * SILENCE)
    assert watch.look() is None

    def listen(timeout: float) -> None:
        time.sleep(0.1)
        ranks[0].heard = time.monotonic()

    verdicts = []
    wait_until(lambda: verdicts.append(watch.look_with(listen)) or verdicts[-1])
    assert str(verdicts[-1]).startswith("rank 1, process 7, hangs: nothing was heard")


def test_silence_does_not_count_while_the_listener_is_stopped() -> None:
    """A machine that stands still stops all processes: the listener mostly waits for messages."""

    def stand_still(timeout: float) -> None:
        time.sleep(2 * SILENCE)

    assert Supervised([Rank("rank 0")], stand_still).look() is None


def test_what_was_silent_while_it_loaded_is_not_blamed_when_it_is_ready() -> None:
    child = Child("an engine")
    child.heard -= 100
    child.expect_heartbeats()
    assert Supervised([child]).look() is None
    child.heard -= 100
    verdict = Supervised([child]).look()
    assert verdict is not None and "nothing was heard of it" in verdict.text


def test_the_silence_of_a_rank_that_a_debugger_holds_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = {8}
    monkeypatch.setattr(supervisor, "is_debugged_or_dumps_core", held.__contains__)
    ranks = [Rank("rank 0"), Rank("rank 1")]
    ranks[1].pid = 8
    ranks[1].take({1: Activity(True, 0.0, ())})  # it waits for an order, as far as is known
    watch = Supervised(ranks)

    def verdict() -> Failure | None:
        ranks[0].heard, ranks[1].heard = time.monotonic(), ranks[1].heard - SILENCE - 0.1
        return watch.look()

    assert verdict() is None
    assert ranks[1].activities == {} and 1 not in heard_activities
    assert verdict() is None
    held.clear()
    failure = verdict()
    assert failure is not None and str(failure).startswith(
        "rank 1, process 7, hangs: nothing was heard"
    )
