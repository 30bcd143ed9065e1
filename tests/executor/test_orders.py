"""Orders and answers, without processes: how an executor waits for its ranks, and when a member of
shared memory is lost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest

from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.distributed.groups import Grid
from nanovllm.distributed.shared_memory import Segment
from nanovllm.executor import remote
from nanovllm.executor.base import ExecutorError
from nanovllm.executor.remote import RemoteExecutor, RemoteRank
from nanovllm.kv_transfer.aggregator import OutputAggregator
from nanovllm.processes.channel import TRANSFER_ENDED
from nanovllm.processes.supervisor import Supervisor
from tests.stand_ins import set_constants


class Mail(Supervisor[RemoteRank]):
    """What a test puts into `coming` arrives, one message each time that the executor listens.

    Attributes:
        is_silent: nothing arrives.
    """

    is_silent = False

    def __init__(self, error: type[Exception]) -> None:
        super().__init__(error)
        self.coming: list[tuple[int, Any]] = []

    def hear(self, timeout: float = 0.0) -> None:
        assert timeout <= 1, "a rank that dies has to be noticed soon, so no long sleep"
        if self.is_silent:
            return
        assert self.coming, "all answers have come: this waits for one that no rank will send"
        rank, message = self.coming.pop(0)
        if isinstance(message, str):
            self.fail(message)
        self.children[rank].take(message)

    def end(self, reason: str) -> None:
        self.reason = reason


class Orders(RemoteExecutor):
    """Two stages of two ranks."""

    def __init__(self) -> None:
        self._num_orders, self.sent = 0, list[bytes]()
        self.grid = Grid(1, 2, 2)
        self.supervisor = self.mail = Mail(ExecutorError)
        self.ranks = self.mail.children
        self.ranks += [RemoteRank(number, self.grid) for number in range(4)]

    def _send(self, order: bytes) -> None:
        self.sent.append(order)


def test_an_answer_is_waited_for_and_older_ones_are_dropped() -> None:
    executor = Orders()
    rank = executor.ranks[2]  # which answers for all
    rank.answers = {0: "old", 2: "next", TRANSFER_ENDED: None}
    first, second = executor.launch(SchedulerOutput()), executor.launch(SchedulerOutput())
    executor.mail.coming = [(0, (1, "of another rank")), (2, (3, "after it")), (2, (1, "this one"))]
    assert first() == "this one"
    assert {2: "next", 3: "after it"}.items() <= rank.answers.items(), (
        "later orders' answers are still to be fetched"
    )
    assert not {0, 1} & rank.answers.keys(), (
        "an answer that has been fetched, and older ones, must not pile up"
    )
    assert second() == "next" and not executor.mail.coming
    rank.answers[3] = None
    assert executor.launch(SchedulerOutput())() is None, "None is an answer, too"


def test_a_rank_that_fails_ends_the_wait() -> None:
    executor = Orders()
    executor.mail.coming = [(0, "rank 3, process 7, has died")]
    result = executor.launch(SchedulerOutput())
    with pytest.raises(ExecutorError, match="has died"):
        result()
    executor.ranks[2].answers[1] = "too late"
    with pytest.raises(ExecutorError, match="has died"):
        result()


@pytest.mark.parametrize(("is_ready", "what"), [(True, "answered"), (False, "started")])
def test_a_rank_that_never_answers_is_named(
    monkeypatch: pytest.MonkeyPatch, is_ready: bool, what: str
) -> None:
    set_constants(monkeypatch, remote, **{"ORDER_SECONDS" if is_ready else "START_SECONDS": 0.01})
    executor = Orders()
    executor.mail.is_silent = True
    executor.ranks[2].is_ready = is_ready
    result = executor.launch(SchedulerOutput())
    with pytest.raises(
        ExecutorError,
        match=rf"rank 2 \(stage 1, tensor rank 0\), .*has not {what} after 0.01 seconds",
    ):
        result()


def test_the_first_rank_of_the_last_stage_answers() -> None:
    executor = Orders()
    first, second = executor.launch(SchedulerOutput()), executor.launch(SchedulerOutput())
    assert len(executor.sent) == 2, (
        "both steps are with the ranks before either result is waited for"
    )
    results = [ModelRunnerOutput(), ModelRunnerOutput()]
    executor.mail.coming = [(2, (1, results[0])), (2, (2, results[1]))]
    assert first() is results[0], "the result of the step that was launched first, from rank 2"
    assert second() is results[1]


def test_all_ranks_report_on_a_step_that_says_so() -> None:
    executor = Orders()
    for rank in executor.ranks:
        rank.answers[TRANSFER_ENDED] = None
    gather = executor.launch(SchedulerOutput(all_report=True))
    assert not executor.transfer_has_ended, (
        "this step asks every rank what has ended: the notifications are old"
    )
    executor.mail.coming = [
        (rank, (1, ModelRunnerOutput({"x": rank}, extras={"told": rank})))  # type: ignore[dict-item]
        for rank in range(4)
    ]
    output = gather()
    assert output.sampled == {"x": 2}, "the tokens come from the first rank of the last stage"
    assert output.extras == {"told": 2}
    assert output.others == [{"told": 0}, {"told": 1}, {"told": 3}], "in the order of the ranks"
    executor.ranks[0].answers[TRANSFER_ENDED] = None
    executor.launch(SchedulerOutput())
    assert executor.transfer_has_ended, (
        "a step on which not all report asks nothing, so the notification must stay"
    )


def test_a_transfer_has_ended_when_it_has_ended_on_every_rank() -> None:
    together = OutputAggregator()
    reports = [
        KVConnectorOutput(finished_recving={"a", "b"} if rank < 3 else {"a"}) for rank in range(4)
    ]
    assert together.add(reports).finished_recving == {"a"}, "rank 3 still receives b"
    nothing = KVConnectorOutput()
    late = KVConnectorOutput(finished_recving={"b"})
    assert together.add([nothing, nothing, nothing, late]).finished_recving == {"b"}


def test_why_a_member_is_lost() -> None:
    segment = Segment.create(3, 64)
    assert segment.why_lost(0) == "", "this process is alive"
    assert segment.why_lost(1) == "", "it has not joined yet"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        segment._words[16 * 1 + 2] = process.pid
        assert segment.why_lost(1) == "", "it is alive"
        process.kill()
        process.wait()
    assert segment.why_lost(1) == f"process {process.pid} has died"
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        segment._words[16 * 1 + 2] = process.pid
        process_has_ended(process)
        assert segment.why_lost(1) == f"process {process.pid} has died", "a zombie is dead, too"
    other = Segment(segment.handle, 2)
    assert segment.why_lost(2) == ""
    other.close()
    assert segment.why_lost(2) == "it has left"


def process_has_ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until it is a zombie: it has ended, and its parent has not fetched its exit status."""
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass
