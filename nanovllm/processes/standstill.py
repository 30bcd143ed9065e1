"""Finds ranks that wait for ever in a collective because another rank is idle or waits in a
different collective.

Each rank counts the collectives that it calls in each group, and its heartbeats carry the counts.
The process that watches the ranks compares them. A rank that computes may still come:
`HangDetector` watches it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from nanovllm.processes.activity import Block

# Both ends of a transfer count it as one call; each has its own name for it.
TRANSFER = {"send", "receive"}


class CollectiveError(Exception):
    """A collective failed: a rank has died, did not come, or is in another collective. The message
    says which."""


class Call(NamedTuple):
    """A rank's latest collective in a group.

    Attributes:
        ranks: all ranks that must call it.
        number: how many collectives this rank has called in the group.
        is_inside: the call has not returned.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    name: str
    is_inside: bool

    def __str__(self) -> str:
        return f"{self.name} no {self.number} of group {self.group}"


class Activity(NamedTuple):
    """What a rank does, as of its latest heartbeat.

    Attributes:
        is_idle: it waits for an order.
        step: when its latest step began, in seconds of its own clock.
        calls: its latest collective in each group.
    """

    is_idle: bool
    step: float
    calls: tuple[Call, ...]


class CallCounter(Block):
    """Counts the collectives that this rank calls in a group. Costs less than a microsecond per
    collective.

    `with counter.call("all_reduce"):` while the rank is in that collective.
    """

    def __init__(self, group: str, ranks: Iterable[int]) -> None:
        self.group = group
        self.ranks = tuple(ranks)
        self.number = 0
        self.name = ""
        _counters.append(weakref.ref(self))

    def call(self, name: str) -> CallCounter:
        """The next collective."""
        self.number += 1
        self.name = name
        return self


_counters: list[weakref.ref[CallCounter]] = []


def latest_calls() -> tuple[Call, ...]:
    """The latest collective of this process in each group."""
    counters = [counter for reference in list(_counters) if (counter := reference()) is not None]
    return tuple(
        Call(c.group, c.ranks, c.number, c.name, c.depth > 0) for c in counters if c.number
    )


def explain_standstill(
    activities: dict[int, Activity], names: dict[int, str], seconds: float
) -> str:
    """Find out whether ranks wait for one another in vain.

    Args:
        activities: what each rank has done all the time.
        names: of the ranks.
        seconds: how long.

    Returns:
        Which rank hangs, and why; "" while none does.
    """
    if not (waiting := _waiting_in_vain(activities)):
        return ""
    # A rank that waits for an idle one explains more than ranks that wait for one another.
    rank, call, missed = min(waiting, key=lambda each: not activities[each[2]].is_idle)
    hangs = f"hangs: for {seconds:g} seconds it has"
    where = _waits_in(activities[missed])
    if where is None:
        return f"{names[missed]}, {hangs} been idle while {names[rank]}, waits for it in {call}"
    return f"{names[rank]}, {hangs} waited in {call} for {names[missed]}, which waits in {where}"


def _waits_in(activity: Activity) -> Call | None:
    return next((call for call in activity.calls if call.is_inside), None)


def _waiting_in_vain(activities: dict[int, Activity]) -> list[tuple[int, Call, int]]:
    """(rank, its call, the rank for which it waits there), if no rank computes, which may end the
    waiting of all others."""
    for activity in activities.values():
        call = _waits_in(activity)
        if not activity.is_idle and (call is None or not activities.keys() >= set(call.ranks)):
            return []
    return [
        (rank, call, other)
        for rank, activity in activities.items()
        for call in activity.calls
        for other in call.ranks
        if other != rank and other in activities and _misses(activity, call, activities[other])
    ]


def _misses(activity: Activity, call: Call, other: Activity) -> bool:
    """Whether a rank waits for another one in this collective.

    On a GPU a call returns before the collective has finished, so that the rank may be idle. It
    then waits for a rank that is idle, too, and has called fewer collectives."""
    number, name = next(((c.number, c.name) for c in other.calls if c.group == call.group), (0, ""))
    if not call.is_inside:
        return (
            activity.is_idle
            and other.is_idle
            and number < call.number
            and call.name not in TRANSFER
        )
    return number < call.number or (
        number == call.number and name != call.name and {name, call.name} != TRANSFER
    )
