"""Where each unfinished request is: plain state, which the scheduler and its features share.

Built by notebooks/13_scheduler.ipynb: edit it there.
"""

from __future__ import annotations

from bisect import insort

from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import SchedulerOutput


class Queues:
    """The unfinished requests, by id and by status.

    All queues are sorted by `Request.order` (priority, then arrival).

    Attributes:
        by_status: the queue of each status; the queue of finished requests stays empty.
        waiting: requests without computed tokens.
        running: requests that hold blocks on the device.
        swapped: preempted requests that hold blocks in host memory.
        removed_ids: requests whose state the runner drops before its next step.
        in_flight: plans whose results are still missing, oldest first.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.by_status: dict[RequestStatus, list[Request]] = {s: [] for s in RequestStatus}
        self.waiting = self.by_status[RequestStatus.WAITING]
        self.running = self.by_status[RequestStatus.RUNNING]
        self.swapped = self.by_status[RequestStatus.SWAPPED]
        self.removed_ids: list[str] = []
        self.in_flight: list[SchedulerOutput] = []

    @property
    def num_seated(self) -> int:
        """Requests that count against `max_num_seqs`: those with blocks on the device."""
        # More than `running`: a feature may keep requests with blocks in a queue of its own.
        return len(self.requests) - len(self.waiting) - len(self.swapped)

    @property
    def next_in_line(self) -> Request | None:
        """The next request to admit: the head of `swapped` or of `waiting`, whichever has the lower
        `order`."""
        heads = [queue[0] for queue in (self.swapped, self.waiting) if queue]
        return min(heads, key=lambda r: r.order, default=None)

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue."""
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=lambda r: r.order)

    def move(self, request: Request, status: RequestStatus) -> None:
        """Put a request into the queue of another status. If the runner has state for the request,
        the next step tells it to drop this state."""
        self.by_status[request.status].remove(request)
        if request.num_sent_tokens:
            self.removed_ids.append(request.request_id)
            request.num_sent_tokens = 0
        request.status = status
        if status is RequestStatus.FINISHED:
            del self.requests[request.request_id]
        else:
            insort(self.by_status[status], request, key=lambda r: r.order)

    def clear(self) -> list[str]:
        """Forget all requests and all steps in flight; returns the requests' ids."""
        lost = list(self.requests)
        self.requests.clear()
        for queue in self.by_status.values():
            queue.clear()
        self.removed_ids = []
        self.in_flight = []
        return lost

    def is_in_flight(self, request_id: str) -> bool:
        """Whether a step in flight computes tokens for this id, even if its request has ended."""
        return any(
            scheduled.request_id == request_id
            for plan in self.in_flight
            for scheduled in plan.requests
        )

    def check_invariants(self) -> None:
        """Check that each request is in the queue of its status, once, and in order; and that a
        step in flight has one share of a request, at most, and none of one that it preempts."""
        queued = [request for queue in self.by_status.values() for request in queue]
        assert len(queued) == len(self.requests), "a request is in no queue, or in two"
        for request in queued:
            assert self.requests[request.request_id] is request
            assert request in self.by_status[request.status]
        for queue in self.by_status.values():
            assert queue == sorted(queue, key=lambda r: r.order), "a queue is out of order"
        for plan in self.in_flight:
            names = [share.request_id for share in plan.requests]
            assert len(names) == len(set(names)), f"a request has two shares of a step: {names}"
            lost = plan.preempted.keys() & set(names)
            assert not lost, f"a step computes requests whose blocks it takes away: {lost}"
