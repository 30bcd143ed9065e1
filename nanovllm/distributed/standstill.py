"""Finds ranks that wait for ever in a collective because another rank is idle or waits in a different collective.

Each rank counts the collectives that it calls in each group, and its heartbeats carry the counts. The process that watches the
ranks compares them. A rank that computes may still come: `life_signs.HangDetector` watches it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Both ends of a transfer count it as one call; each has its own name for it.
TRANSFER = {"send", "receive"}


class CollectiveError(RuntimeError):
    """A collective failed: a rank has died, did not come, or is in another collective. The message says which."""


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


@dataclass(frozen=True)
class Activity:
    """What a rank does, as of its latest heartbeat.

    Attributes:
        is_idle: it waits for an order.
        step: when its latest step began, in seconds of its own clock.
        calls: its latest collective in each group.
    """

    is_idle: bool
    step: float
    calls: tuple[Call, ...]

    def call_of(self, group: str) -> Call:
        """The latest collective in a group."""
        return next((call for call in self.calls if call.group == group), Call(group, (), 0, "", False))


class CallCounter:
    """Counts the collectives that this rank calls in a group. Costs less than a microsecond per collective.

    `with counter.call("all_reduce"):` while the rank is in that collective.
    """

    def __init__(self, group: str, ranks: Iterable[int]) -> None:
        self.group, self.ranks = group, tuple(ranks)
        self.number, self.name, self.is_inside = 0, "", False
        _counters.append(weakref.ref(self))

    def call(self, name: str) -> CallCounter:
        """The next collective."""
        self.number += 1
        self.name = name
        return self

    def __enter__(self) -> None:
        self.is_inside = True

    def __exit__(self, *details: object) -> None:
        self.is_inside = False


_counters: list[weakref.ref[CallCounter]] = []


def latest_calls() -> tuple[Call, ...]:
    """The latest collective of this process in each group."""
    counters = [counter for reference in list(_counters) if (counter := reference()) is not None]
    return tuple(Call(c.group, c.ranks, c.number, c.name, c.is_inside) for c in counters if c.number)


class Waiting(NamedTuple):
    """A rank waits for another one, `missed`, in a collective. `missed_activity` is None if this process does not watch it."""

    rank: int
    activity: Activity
    call: Call
    missed: int
    missed_activity: Activity | None

    def describe(self, names: Mapping[int, str], seconds: float) -> str:
        """Which rank hangs, and why.

        Args:
            names: of the ranks.
            seconds: how long it has waited.
        """
        rank, missed = names[self.rank], names[self.missed]
        other = self.missed_activity
        where = next((call for call in other.calls if call.is_inside), None) if other is not None else None
        if where is None:
            return (
                f"{missed}, hangs: for {seconds:g} seconds it has been idle while {rank}, waits for it in {self.call}"
            )
        return (
            f"{rank}, hangs: for {seconds:g} seconds it has waited in {self.call} for {missed}, which waits in {where}"
        )


class StandstillDetector:
    """Finds a rank that has waited too long. Use a new one after heartbeats have been missed."""

    def __init__(self) -> None:
        self._since: dict[Waiting, float] = {}

    def look(self, activities: Mapping[int, Activity], heard: Mapping[int, float], seconds: float) -> Waiting | None:
        """Compare the ranks. Call this whenever heartbeats may have arrived.

        Args:
            activities: the latest of each rank.
            heard: when it arrived.
            seconds: how long the heartbeats of both ranks must have said the same.
        """
        age = {each: min(heard[each.rank], heard[each.missed]) for each in _in_vain(activities)}
        self._since = {each: self._since.get(each, last) for each, last in age.items()}
        return next((each for each, last in age.items() if last - self._since[each] > seconds), None)


def _in_vain(activities: Mapping[int, Activity]) -> list[Waiting]:
    """The ranks that wait for a rank that is idle, or that waits for ever itself. Those that wait for an idle rank come first."""
    waits = {rank: _waits_of(rank, activities) for rank in activities}
    moving = {rank for rank, activity in activities.items() if not activity.is_idle and not waits[rank]}
    size = -1
    while size != len(moving):
        size = len(moving)
        moving |= {
            r for r, missed in waits.items() if any(w.missed in moving or w.missed_activity is None for w in missed)
        }
    found = [each for rank, missed in waits.items() if rank not in moving for each in missed]
    return sorted(found, key=lambda each: not (each.missed_activity and each.missed_activity.is_idle))


def _waits_of(rank: int, activities: Mapping[int, Activity]) -> list[Waiting]:
    """The ranks for which a rank waits."""
    activity = activities[rank]
    return [
        Waiting(rank, activity, call, other, activities.get(other))
        for call in activity.calls
        for other in call.ranks
        if other != rank and _misses(activity, call, activities.get(other))
    ]


def _misses(activity: Activity, call: Call, other: Activity | None) -> bool:
    """Whether a rank waits for another one in this collective.

    On a GPU a call returns before the collective has finished, so that the rank may be idle. It then waits for a rank that is idle,
    too, and has called fewer collectives.
    """
    if other is None:
        return call.is_inside
    theirs = other.call_of(call.group)
    if not call.is_inside:
        is_early = theirs.number < call.number and call.name not in TRANSFER
        return activity.is_idle and other.is_idle and is_early
    is_other = theirs.name != call.name and {theirs.name, call.name} != TRANSFER
    return theirs.number < call.number or (theirs.number == call.number and is_other)
