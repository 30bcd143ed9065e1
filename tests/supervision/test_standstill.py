"""Who waits for whom in collectives, and when that is for ever: the rules, without ranks."""

from __future__ import annotations

import time

import pytest

from nanovllm.processes import supervisor
from nanovllm.processes.standstill import (
    Activity,
    Call,
    CallCounter,
    explain_standstill,
    latest_calls,
)
from nanovllm.processes.supervisor import Child
from tests.stand_ins import set_constants
from tests.supervision.supervised import Supervised

SECONDS = 4.0
NAMES = {0: "rank 0", 1: "rank 1", 2: "rank 2"}


def call(
    number: int, name: str = "all_reduce", inside: bool = True, group: str = "tp", *ranks: int
) -> Call:
    return Call(group, ranks or (0, 1, 2), number, name, inside)


def returned(number: int, name: str = "all_reduce") -> Call:
    return call(number, name, inside=False)


def idle(*calls: Call) -> Activity:
    return Activity(True, 1.0, calls)


def busy(*calls: Call) -> Activity:
    return Activity(False, 1.0, calls)


def verdict(*activities: Activity) -> str:
    """What is said of ranks that do the same again and again."""
    return explain_standstill(dict(enumerate(activities)), NAMES, SECONDS)


def test_an_idle_rank_is_missed() -> None:
    assert (
        verdict(busy(call(17)), idle(returned(16)), busy(call(17)))
        == "rank 1, hangs: for 4 seconds it has been idle while rank 0, waits for it in all_reduce "
        "no 17 of group tp"
    )
    assert "rank 1, hangs" in verdict(busy(call(1)), idle(), busy(call(1))), "it has not called any"


def test_an_idle_rank_is_missed_by_others_that_are_idle() -> None:
    """As on a GPU, where a call returns before the collective has ended."""
    assert "rank 2, hangs: " in verdict(idle(returned(17)), idle(returned(17)), idle(returned(16)))


def test_two_collectives_of_one_group() -> None:
    other = busy(call(17, "all_gather"))
    assert (
        verdict(busy(call(17)), other, busy(call(17)))
        == "rank 0, hangs: for 4 seconds it has waited in all_reduce no 17 of group tp for rank 1, "
        "which waits in all_gather no 17 of group tp"
    )


def test_collectives_of_two_groups() -> None:
    one, other = call(3, "all_reduce", True, "tp", 0, 1), call(5, "barrier", True, "world", 0, 1)
    assert "which waits in barrier no 5 of group world" in verdict(busy(one), busy(other))


def test_a_chain_ends_at_the_idle_one() -> None:
    first, second = call(1, "all_reduce", True, "a", 0, 1), call(1, "all_reduce", True, "b", 1, 2)
    assert verdict(busy(first), busy(second), idle()).startswith("rank 2, hangs: ")


@pytest.mark.parametrize(
    "activities",
    [
        pytest.param([busy(call(17)), busy(returned(16)), busy(call(17))], id="rank 1 computes"),
        pytest.param([busy(call(17)), busy(call(17)), busy(call(17))], id="all have come"),
        pytest.param(
            [busy(call(17)), busy(returned(17)), idle(returned(17))], id="two are through"
        ),
        pytest.param(
            [idle(returned(17)), idle(returned(17)), idle(returned(17))], id="all are idle"
        ),
        pytest.param([busy(call(17)), idle(returned(16))], id="nothing is known of rank 2"),
        pytest.param(
            [
                busy(call(4, "receive", True, "pp from rank 1 to rank 0", 0, 1)),
                busy(call(4, "send", True, "pp from rank 1 to rank 0", 0, 1)),
            ],
            id="both ends of a transfer",
        ),
        pytest.param(
            [idle(call(4, "send", False, "pp from rank 0 to rank 1", 0, 1)), idle()],
            id="sent ahead",
        ),
        pytest.param(
            [
                busy(call(1, "all_reduce", True, "a", 0, 1)),
                busy(call(1, "all_reduce", True, "b", 1, 2)),
                busy(),
            ],
            id="the last one of a chain computes",
        ),
    ],
)
def test_who_may_still_move(activities: list[Activity]) -> None:
    assert verdict(*activities) == ""


def test_only_fresh_news_of_both_count() -> None:
    children = [Child("rank 0", "process 5"), Child("rank 1", "process 6")]
    watch = Supervised(children)

    def compare(number: int, *heard: int) -> str:
        children[0].activities = {0: busy(call(number, "all_reduce", True, "tp", 0, 1))}
        children[1].activities = {1: idle()}
        for child, second in zip(children, heard, strict=True):
            child.heard = float(second)
        verdict = watch._compare(0.0)
        return verdict.text if verdict is not None else ""

    for second in range(10):
        assert not compare(17, second, 0), "rank 1 is silent"
    for second in range(10, 20):
        assert not compare(8 + second, second, second), "rank 0 moves"
    for second in range(20, 26):
        assert bool(compare(28, second, second)) == (second > 20 + SECONDS), (
            "too early, or too late"
        )


def test_a_watch_names_the_ranks_of_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, supervisor, SILENCE_SECONDS=0.2)
    children = [Child("data rank 0", "process 5"), Child("data rank 1", "process 6")]
    watch, found = Supervised(children), None
    for _ in range(200):

        def listen(timeout: float) -> None:
            ranks = (0, 1, 2)
            children[0].take({0: busy(Call("ep", ranks, 2, "all_to_all", True))})
            children[1].take({1: busy(Call("ep", ranks, 2, "all_to_all", True)), 2: idle()})

        found = found or watch.look_with(listen)
        if found is None:
            time.sleep(0.01)
    assert (
        found is not None
        and found.text
        == "rank 2 of data rank 1, process 6, hangs: for 0.2 seconds it has been idle while data "
        "rank 0, process 5, waits for it in all_to_all no 2 of group ep"
    )


def test_a_counter_tells_what_it_is_in() -> None:
    counter = CallCounter("somewhere", (0, 1))
    assert not [each for each in latest_calls() if each.group == "somewhere"], "nothing was called"
    with pytest.raises(RuntimeError), counter.call("all_reduce"):
        assert latest_calls()[-1] == Call("somewhere", (0, 1), 1, "all_reduce", True)
        raise RuntimeError("the other one is gone")
    assert latest_calls()[-1] == Call("somewhere", (0, 1), 1, "all_reduce", False)
