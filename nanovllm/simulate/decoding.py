"""Decoding requests that cost nothing until something happens to them."""

from __future__ import annotations

from heapq import heappop, heappush

from msgspec.structs import replace

from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ScheduledRequest, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.pool import SimulatedManager
from nanovllm.simulate.requests import NEVER, RUNNING, SimulatedRequest


class Shares(list[ScheduledRequest]):
    """The shares of a plan, of which `silent` are not listed. Each of these is a single token.

    Attributes:
        context: tokens that the silent ones attend to; their sum.
    """

    silent = 0
    context = 0

    def __bool__(self) -> bool:
        return self.silent > 0 or len(self) > 0


# Silent plans share its lists, which stay empty: lists of their own would take longer.
_NOTHING = SchedulerOutput()


def silent_plan(shares: Shares) -> SchedulerOutput:
    """Return a plan with these shares, all of which are silent."""
    plan = replace(_NOTHING, num_tokens=shares.silent, num_samples=shares.silent)
    plan.requests = shares
    return plan


class DecodingQueues(Queues):
    """Queues that advance decoding requests as a group.

    The group is the head of `running`, as far as each request computes a single token in the next
    step. A step is an *event* for a member if the member takes a block or samples its last token.
    It then has a share in the plan's list, and the scheduler treats it as any other request.
    Otherwise it is silent: the plan only counts it, and its own counters are brought up to date
    later (`settle`). So the time of planning a step depends on its events, not on the number of
    running requests.

    Blocks are cached late, when their request is settled. This changes nothing, since no other
    request has blocks with these hashes (`_has_own_hashes`), and requests are settled before they
    lose blocks.

    Steps have numbers, from 0. At most one step is in flight when the next one is planned.

    Attributes:
        planned, taken: steps that were planned, and whose results were taken.
        ahead: steps that were in flight when the last one was planned.
        last_end: when the last result was taken.
        size: members that compute in the next step.
        context: tokens that these attend to in the next step; their sum.
        ending: the members whose last tokens the last step of `advance` samples.
    """

    requests: dict[str, SimulatedRequest]  # type: ignore[assignment]
    running: list[SimulatedRequest]  # type: ignore[assignment]

    def __init__(self, manager: SimulatedManager) -> None:
        super().__init__()
        self.manager = manager
        self.planned = self.taken = self.ahead = 0
        self.last_end = 0
        self.size = self.context = 0
        self.ending: list[SimulatedRequest] = []
        # Requests at the head of `running` that sample their last token in a step in flight.
        self._num_ending = 0
        # `running` may have another request before a member.
        self._is_mixed = False
        # The next event of each member, and the step of its last token, as heaps. Entries of
        # requests that have left, or had the event, stay until they are at the top.
        self._events: list[tuple[int, tuple[int, int], SimulatedRequest]] = []
        self._last_steps: list[tuple[int, tuple[int, int], SimulatedRequest]] = []

    # ---------------------------------------------------------------- members

    @property
    def next_in_line(self) -> Request | None:
        """The next request to admit, see `Queues`."""
        waiting = self.waiting
        swapped = self.swapped
        if not swapped:
            return waiting[0] if waiting else None
        return super().next_in_line

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue, at whose end it usually is."""
        waiting = self.waiting
        if waiting and request.order < waiting[-1].order:
            super().add(request)
        else:
            waiting.append(request)
            self.requests[request.request_id] = request  # type: ignore[assignment]

    def move(self, request: Request, status: RequestStatus) -> None:
        """Put a request into the queue of another status. It is no member (see
        `settle_ended`)."""
        running = self.running
        if status is RUNNING and not (running and request.order < running[-1].order):
            # The most frequent move: an admission, to the end of the queue.
            self.by_status[request.status].remove(request)
            request.status = status
            running.append(request)  # type: ignore[arg-type]
            return
        super().move(request, status)
        head = self.size + self._num_ending
        if status is RUNNING and head and request.order < self.running[head].order:
            self._is_mixed = True

    def leave(self, request: SimulatedRequest) -> None:
        """Take a request out of the group, if it is a member. A silent share of it in flight
        becomes a listed one."""
        if request.is_member:
            self.settle(request)
        if request.is_ending:
            self._num_ending -= 1
        elif request.is_member:
            self.size -= 1
            self.context -= request.num_computed_tokens + 1
            for plan in self.in_flight:
                if isinstance(plan.requests, Shares) and request.last_event != self.planned - 1:
                    plan.requests.silent -= 1
                    start = request.num_computed_tokens - 1
                    share = ScheduledRequest(request.request_id, start, 1, [], [], samples=1)
                    plan.requests.append(share)
                    plan.requests.context -= start + 1
        request.is_member = request.is_ending = False
        request.last_step = request.event = NEVER

    def settle(self, request: SimulatedRequest) -> None:
        """Bring a member's counters and cached blocks up to date."""
        end = request.last_step + 1
        planned = self.planned if self.planned < end else end
        taken = self.taken if self.taken < end else end
        num_planned = planned - request.planned
        num_taken = taken - request.taken
        if not num_planned and not num_taken:
            return
        before = request.num_computed_tokens
        if before > request.num_tokens:
            before = request.num_tokens
        request.planned = planned
        request.taken = taken
        request.num_computed_tokens += num_planned
        request.num_sent_tokens = request.num_computed_tokens - self.ahead
        request.num_pending_tokens = planned - taken
        if num_taken:
            request.num_tokens += num_taken
            request.last_token = self.last_end
        self.manager.cache_blocks(request, before)

    def join(self) -> None:
        """Let requests join the group that follow it in `running`, as far as they can."""
        if self._is_mixed:
            self._separate()
        head = self.size + self._num_ending
        if head == len(self.running):
            return
        ahead = self.planned - self.taken
        for request in self.running[head:]:
            known = request.num_tokens
            pending = request.num_pending_tokens
            if pending and known + pending >= request.max_num_tokens:
                request.is_ending = True
                self._num_ending += 1
            elif (
                request.num_computed_tokens + 1 == known + pending
                and request.num_computed_tokens >= request.num_prompt_tokens
                and pending == ahead
                and request.num_sent_tokens
                and (pending or request.last_token == self.last_end)
                and self._has_own_hashes(request)
            ):
                self._add_member(request)
            else:
                return

    def _has_own_hashes(self, request: SimulatedRequest) -> bool:
        """Whether no other request has the hashes that this one may still use, and none of them is
        in the cache. One may be if it has lost blocks by preemption, and computes them again."""
        hashes = request.block_hashes[request.num_computed_tokens // self.manager.block_size :]
        if hashes and hashes[0] >= 0:  # type: ignore[operator]  # see `RequestMaker`
            return False
        cached = self.manager.pool.cached_blocks
        return not request.num_preemptions or cached.keys().isdisjoint(hashes)

    def _add_member(self, request: SimulatedRequest) -> None:
        request.is_member = True
        request.planned = self.planned
        request.taken = self.taken
        request.last_event = self.planned - 1  # in flight, it has a share in the list
        computed = request.num_computed_tokens
        request.last_step = self.planned + request.max_num_tokens - 2 - computed
        self.size += 1
        self.context += computed + 1
        heappush(self._last_steps, (request.last_step, request.order, request))
        self._await_event(request, self.planned + -computed % self.manager.block_size)

    def _await_event(self, request: SimulatedRequest, step: int) -> None:
        """Note the step in which a member takes a block, or the one that samples its last token."""
        last_step = request.last_step
        request.event = event = step if step < last_step else last_step
        heappush(self._events, (event, request.order, request))

    def _separate(self) -> None:
        """Let members leave that are no longer at the head of `running`."""
        self._is_mixed = False
        is_head = True
        for request in self.running:
            is_head = is_head and (request.is_member or request.is_ending)
            if not is_head:
                self.leave(request)

    # ---------------------------------------------------------------- one step

    def fill(self, scheduler: Scheduler, plan: SchedulerOutput) -> None:
        """Do what `decodes_first` does, but leave silent members out of the plan's list. Call
        `join` before."""
        if not self.size or self._continue_group(scheduler, plan):
            rest = self.running[self.size + self._num_ending :]
            if rest:
                scheduler.continue_running(plan, rest)
        if self.waiting or self.swapped:
            scheduler.admit(plan)

    def _continue_group(self, scheduler: Scheduler, plan: SchedulerOutput) -> bool:
        """Schedule a token for each member. Return False if results have to come first, since the
        first member needs a block and none is free."""
        shares = plan.requests = Shares()
        number = self.planned
        events = self._events
        listed = self._list_events(scheduler, plan) if events and events[0][0] <= number else []
        if listed is None:
            return False
        shares.silent = silent = self.size - len(listed)
        shares.context = self.context
        plan.num_tokens += silent
        plan.num_samples += silent
        self.context += self.size
        for request in listed:
            shares.context -= request.num_computed_tokens
            if number == request.last_step:
                self._await_end(request)
            else:
                self._await_event(request, number + self.manager.block_size)
        return True

    def _list_events(
        self, scheduler: Scheduler, plan: SchedulerOutput
    ) -> list[SimulatedRequest] | None:
        """Schedule a token for each member with an event in the next step. Return these; None if
        results have to come first."""
        number = self.planned
        shares = plan.requests
        assert isinstance(shares, Shares)
        found = self._pop_events(number)
        if found:
            # The scheduler asks whether the plan is empty when it needs a block.
            first = next(each for each in self.running if not each.is_ending)
            shares.silent = int(first is not found[0])
        listed = []
        for request in found:
            if not request.is_member:
                continue  # preempted for a member before it
            self.settle(request)
            scheduler.continue_running(plan, [request])
            if not shares:
                for each in found:
                    self._await_event(each, number)
                return None
            if request.is_member:
                request.planned = number + 1
                request.last_event = number
                listed.append(request)
        return listed

    def _await_end(self, request: SimulatedRequest) -> None:
        """A member's last token is in flight: no later step computes one for it."""
        request.is_ending = True
        self.size -= 1
        self._num_ending += 1
        self.context -= request.max_num_tokens

    def _pop_events(self, last: int) -> list[SimulatedRequest]:
        """Return the members with an event up to a step, by step and order."""
        found = []
        events = self._events
        while events and events[0][0] <= last:
            step, _, request = heappop(events)
            if request.is_member and request.event == step:
                request.event = NEVER  # it may be in the heap twice
                found.append(request)
        return found

    # ---------------------------------------------------------------- many steps

    def num_uneventful(self) -> tuple[int, int]:
        """Return how many of the next steps compute one token for each request, and nothing else,
        since blocks suffice; and up to which one of them none has ended: it samples the first last
        token. Call `join` before."""
        if not self.size or self.size + self._num_ending < len(self.running):
            return 0, 0
        last_steps = self._last_steps
        while last_steps[0][0] != last_steps[0][2].last_step or last_steps[0][0] < self.planned:
            heappop(last_steps)
        to_end = last_steps[0][0] + 1 - self.planned
        num_free = self.manager.pool.num_free
        # Each member takes at most one block in `block_size` steps.
        num_steps = num_free // self.size * self.manager.block_size
        if num_steps < to_end and num_free < self.size:
            events = sorted([each.event for each in self.running])  # those that are ending: NEVER
            num_steps = events[num_free] - self.planned
        return num_steps, to_end

    @property
    def num_silent(self) -> int:
        """How many of the next steps take no blocks, if `num_uneventful` counts that many."""
        return self._events[0][0] - self.planned

    def may_unblock(self, request: Request, scheduler: Scheduler) -> bool:
        """Whether fewer blocks may suffice to admit a request after members have taken blocks.

        A member's new block may evict the last block of the request's cached prefix. The request
        then has to take one block less out of the free list, and to compute one more block. This
        does not help it, unless the prefix loses several blocks with one, and the step cannot
        compute all of them."""
        is_limited = bool(scheduler.hooks.limit_share)
        return is_limited or not self.manager.unordered.isdisjoint(request.block_hashes)

    def lacks_blocks(self, request: Request, scheduler: Scheduler) -> bool:
        """Whether the next request in line waits, and too few blocks are free to admit it to a step
        in which all members compute."""
        if request.status is RequestStatus.SWAPPED or request.num_pending_tokens:
            return False
        manager = self.manager
        if manager.blocks_for(request.num_tokens) <= manager.pool.num_free:
            return False  # it fits without any cached block, too
        computed = manager.get_computed_blocks(request)
        request.num_computed_tokens = len(computed) * manager.block_size
        shares = Shares()
        shares.silent = self.size
        share = scheduler.share(request, silent_plan(shares))
        end = request.num_computed_tokens + share
        request.num_computed_tokens = 0
        num_new = manager.blocks_for(end) - len(computed)
        return share > 0 and not manager.has_room(num_new, computed)

    def advance(self, num_steps: int) -> int:
        """Plan steps that `num_uneventful` has counted, at most up to the first last token. Return
        how many blocks requests hold, summed over these steps."""
        end = self.planned + num_steps
        pool = self.manager.pool
        num_held = num_steps * (pool.num_blocks - pool.num_free)
        events = self._events
        self.ending = []
        growing = []  # a table for each block that a step takes, in the order of the steps
        while events and events[0][0] < end:
            step, _, request = heappop(events)
            if request.is_member and request.event == step:
                start = request.num_computed_tokens + step - request.planned
                if start % self.manager.block_size == 0:
                    growing.append(self.manager.tables[request.request_id])
                    num_held += end - step
                if step == request.last_step:
                    request.event = NEVER  # it may be in the heap twice
                    self.ending.append(request)
                else:
                    self._await_event(request, step + self.manager.block_size)
        if growing:
            for i, block_id in enumerate(pool.get_new_blocks(len(growing))):
                growing[i].append(block_id)
        self.context += num_steps * self.size
        self.planned = end
        for request in self.ending:
            self._await_end(request)
        return num_held

    def plan_silently(self) -> SchedulerOutput:
        """Return the plan of the last step that `advance` has made, which stays in flight."""
        shares = Shares()
        shares.silent = self.size
        shares.context = self.context - self.size
        plan = silent_plan(shares)
        for request in self.ending:
            start = request.max_num_tokens - 2
            plan.add(ScheduledRequest(request.request_id, start, 1, [], [], samples=1))
        self.in_flight.append(plan)
        return plan

    def settle_ended(self, request: Request) -> bool:
        """A hook of the scheduler (`keeps_blocks`): a request that ends leaves the group."""
        assert isinstance(request, SimulatedRequest)
        self.leave(request)
        return False

    def settle_victim(self, request: Request, num_tokens: int, running: list[Request]) -> Request:
        """A strategy of the scheduler: the last running request leaves the group, and is
        preempted."""
        self.leave(self.running[-1])
        return running[-1]


def work_of(plan: SchedulerOutput) -> StepWork:
    """Return what a step computes."""
    shares = plan.requests
    num_decodes = 0
    decode_context = 0
    if isinstance(shares, Shares):
        num_decodes = shares.silent
        decode_context = shares.context
    prefills = []
    for share in shares:
        if share.num_tokens == 1:
            num_decodes += 1
            decode_context += share.start + 1
        else:
            prefills.append((share.start, share.num_tokens))
    return StepWork(num_decodes, decode_context, prefills, plan.num_samples)
