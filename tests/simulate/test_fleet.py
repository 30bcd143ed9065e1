"""The event loop of a fleet: which event comes next, which are void, and round robin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanovllm.simulate.fleet import Fleet, RoundRobin
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.workload import Workload, WorkloadRequest
from tests.simulate.engines import engine_of, request_of, workload_of

# With `AffineCost`: 1000 per step, 100 per token, and 1 per token of context.
FIRST_STEP = 1000 + 10 * 100 + 10  # of a prompt of 10 tokens


def test_round_robin_takes_turns() -> None:
    router = RoundRobin(3)
    request = request_of(0, 0, 1, 1)
    assert [router.choose(request, now) for now in range(5)] == [0, 1, 2, 0, 1]
    router.set_available(2, False)
    router.set_available(0, False)
    assert [router.choose(request, now) for now in range(3)] == [1, 1, 1]
    router.set_available(0, True)
    assert [router.choose(request, now) for now in range(3)] == [0, 1, 0]


class Watched(Fleet):
    """Notes the clock and the version of an engine's event whenever something is handled."""

    def __init__(self, num_engines: int) -> None:
        super().__init__([engine_of() for _ in range(num_engines)])
        self.handled: list[tuple[int, str]] = []

    def _arrive(self, source: WorkloadRequest) -> None:
        self.handled.append((self.now, source.request_id))
        super()._arrive(source)

    def _advance(self, replica: int) -> None:
        self.handled.append((self.now, f"engine {replica}"))
        super()._advance(replica)

    def note(self) -> None:
        """Note an action."""
        self.handled.append((self.now, "action"))


def test_at_the_same_time_arrivals_come_first_then_actions_then_results() -> None:
    fleet = Watched(1)
    fleet.at(FIRST_STEP, fleet.note)
    work = workload_of(request_of(0, 0, 10, 1), request_of(1, FIRST_STEP, 10, 1))
    fleet.run(work)
    assert fleet.handled[:4] == [
        (0, "r0"),
        (FIRST_STEP, "r1"),
        (FIRST_STEP, "action"),
        (FIRST_STEP, "engine 0"),
    ]


def test_events_are_handled_in_the_order_of_their_times() -> None:
    fleet = Watched(2)
    fleet.at(5, fleet.note)
    fleet.at(3, fleet.note)
    fleet.at(10**6, fleet.note)
    result = fleet.run(workload_of(*(request_of(i, 4 * i, 10, 30) for i in range(6))))
    times = [time for time, _ in fleet.handled]
    assert times == sorted(times)
    assert [time for time, what in fleet.handled if what == "action"] == [3, 5, 10**6]
    assert len(result.requests) == 6
    assert result.duration == max(time for time, what in fleet.handled if what != "action")


def test_a_client_that_disconnects_after_its_answer_makes_the_duration_no_longer() -> None:
    result = Fleet([engine_of()]).run(workload_of(request_of(0, 0, 10, 1, abort=10**9)))
    assert [each.outcome for each in result.requests] == ["length"]
    assert result.duration == FIRST_STEP


def test_an_action_is_called_once_and_may_add_others() -> None:
    fleet = Watched(1)
    fleet.at(7, lambda: fleet.at(9, fleet.note))
    fleet.run(workload_of(request_of(0, 8, 10, 1)))
    assert fleet.handled == [(8, "r0"), (9, "action"), (8 + FIRST_STEP, "engine 0")]


def served(requests: list[WorkloadRequest], fast: bool) -> FleetResult:
    return Fleet([engine_of(fast=fast)]).run(workload_of(*requests))


def test_the_result_of_steps_that_an_arrival_has_interrupted_is_void() -> None:
    """Alone, the first request decodes for a long time in a single event, which its engine
    announces. The second request arrives in the middle of it."""
    long = request_of(0, 0, prompt=10, output=200)
    requests = [long, request_of(1, 50_000, prompt=10, output=5)]
    fleet = Watched(1)
    result = fleet.run(workload_of(*requests))
    assert result.requests == served(requests, fast=False).requests
    alone = served([long], fast=True).duration
    # The event at the time at which it would have ended alone changes nothing, not even the clock.
    assert all(time != alone for time, _ in fleet.handled)
    assert result.duration > alone


def test_requests_are_read_while_they_are_needed() -> None:
    """A workload of any length takes no memory."""
    fleet = Fleet([engine_of()])
    most = 0

    def requests() -> Iterator[WorkloadRequest]:
        nonlocal most
        for number in range(50):
            most = max(most, number - len(fleet._served))
            yield request_of(number, 10_000 * number, 10, 1)

    fleet.run(Workload(requests()))
    assert len(fleet._served) == 50 and most <= 2


@pytest.mark.parametrize("fast", [False, True])
def test_a_fleet_without_requests_ends_at_once(fast: bool) -> None:
    result = served([], fast)
    assert (result.requests, result.duration) == ([], 0)
