"""An engine on a virtual clock: the real scheduler; only the time of its steps is computed."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from nanovllm.core.block_pool import InvariantError
from nanovllm.core.recorder import Recorder
from nanovllm.core.request import RequestStatus
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.request import EngineOutput
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.decoding import DecodingQueues, Shares, work_of
from nanovllm.simulate.requests import NEVER, RUNNING, SimulatedRequest
from nanovllm.simulate.results import ReplicaCounters, TokenGaps
from nanovllm.simulate.run import Run
from nanovllm.simulate.runner import SimulatedRunner
from nanovllm.simulate.workload import SECOND

if TYPE_CHECKING:
    from nanovllm.trace.record import StepRecord


class StepInFlight(msgspec.Struct, gc=False):
    """A step whose result is still missing.

    Attributes:
        start: when it was planned, or when the step before it ended, if that was later.
        end: when its result arrives.
        num_held_blocks: KV blocks that requests hold in it.
        record: see `Recorder.begin`.
    """

    plan: SchedulerOutput
    start: int
    end: int
    num_held_blocks: int
    record: StepRecord | None = None


class SimulatedEngine:
    """Does what `EngineCore` does, on a virtual clock. All times are in picoseconds.

    The caller calls `finish` and then `begin` when the clock reaches `end`. Requests may arrive and
    be aborted in between.

    Args:
        steps_ahead: the most steps in flight while the next one is planned; see `EngineSettings`.
        num_stages: stages of the pipeline. Each takes an equal part of a step's time, and the last
            one the time of the head, too.
        runner: takes the place of the ranks. With `group`, it is a plain `SimulatedRunner`.
        copy_time: time to copy a KV block between device and host memory, when a request is
            swapped: the step that makes the copies begins with them.
        by_priority: requests run in the order of their priorities.

    Attributes:
        group: the scheduler's queues, if they advance decoding requests as a group. Then steps in
            which nothing else happens are made in one call, with equal results.
        is_watched: a router looks at the block pool between two calls. So a step that takes blocks
            is not made in one call with others.
        end: when the next result arrives; None: the engine is idle.
        gaps: counts the times between tokens. The engines of a fleet share one.
        recorder: records the steps, if they are made one by one.
        counters: its totals so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        *,
        steps_ahead: int = 0,
        num_stages: int = 1,
        runner: SimulatedRunner | None = None,
        copy_time: int = 0,
        by_priority: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.steps_ahead = steps_ahead
        self.gaps = TokenGaps()
        self.runner = runner or SimulatedRunner()
        self.copy_time = copy_time
        self.by_priority = by_priority
        self.recorder = Recorder()
        queues = scheduler.queues
        self.group = queues if isinstance(queues, DecodingQueues) else None
        self.is_watched = False
        self.end: int | None = None
        self._in_flight: deque[StepInFlight] = deque()
        self._run: Run | None = None
        self._blocked_by = ""  # why the last plan admitted no more; "": this may have changed
        self._stage_ends = [0] * num_stages
        self._aborts: list[str] = []
        # All requests have ended: the results that are missing come before the next plan.
        self._is_draining = False
        self._totals = ReplicaCounters()

    @property
    def counters(self) -> ReplicaCounters:
        """The totals so far."""
        scheduler = self.scheduler
        return replace(
            self._totals,
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.num_queried_tokens,
            num_hit_tokens=scheduler.num_hit_tokens,
            num_evictions=scheduler.manager.pool.num_evictions,
            num_accepted_tokens=scheduler.stats.spec_decoding.num_accepted_tokens,
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for another one after a preemption."""
        queues = self.scheduler.queues
        return len(queues.requests) - len(queues.running)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and compute."""
        return len(self.scheduler.queues.running)

    # ---------------------------------------------------------------- in and out

    def arrive(self, request: SimulatedRequest, now: int) -> bool:
        """Queue a request, and begin a step if the engine is idle. Returns whether `end` has
        changed.

        Raises:
            ValueError: the request could never run here; see `Scheduler.add_request`.
        """
        self.recorder.arrived(request, now / SECOND)
        self.scheduler.add_request(request)
        self._totals.num_requests += 1
        if self.end is None:
            return self.begin(now)
        if request is self.scheduler.queues.next_in_line:
            self._blocked_by = ""
        run = self._run
        if run is None:
            return False
        if not self._is_blocked():
            return self._shorten(run, now)
        num_planned = self._num_results(run, now) + self.steps_ahead
        if num_planned < run.first_wait:
            self._run = msgspec.structs.replace(run, first_wait=num_planned)
        return False

    def abort(self, request_id: str, now: int) -> bool:
        """End a request as soon as the next result has arrived: requests end between two steps.
        Returns whether `end` has changed."""
        if request_id not in self.scheduler.queues.requests:
            return False
        self._aborts.append(request_id)
        return self._run is not None and self._shorten(self._run, now)

    def wake(self, now: int) -> bool:
        """Plan again, since a KV transfer has ended, if the engine is idle. Returns whether `end`
        has changed."""
        return self.end is None and self.begin(now)

    @property
    def _awaits_transfers(self) -> bool:
        """KV transfers fill or hold blocks, so more can be planned once they are complete."""
        receiving = self.scheduler.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
        return bool(receiving or self.scheduler.manager.held)

    def _abort_requests(self) -> list[SimulatedRequest]:
        requests = self.scheduler.queues.requests
        found = [requests[name] for name in dict.fromkeys(self._aborts) if name in requests]
        for request in found:
            self.scheduler.abort_request(request.request_id)
            self.recorder.ended(request.request_id, "abort")
        self._aborts.clear()
        return found  # type: ignore[return-value]

    # ---------------------------------------------------------------- steps

    def begin(self, now: int) -> bool:
        """Plan and launch steps, until enough are in flight or nothing can be planned. Returns
        whether a result is to come: at `end`."""
        scheduler = self.scheduler
        in_flight = self._in_flight
        unfinished = scheduler.queues.requests
        group = self.group
        while len(in_flight) <= self.steps_ahead and unfinished:
            if self._is_draining and in_flight:
                break
            self._is_draining = False
            if group is not None:
                group.join()
                if len(in_flight) == self.steps_ahead and self._begin_run(now):
                    return True
            plan = scheduler.schedule()
            self._blocked_by = plan.blocked_by
            if not plan.num_tokens:
                if not in_flight and not self._awaits_transfers:
                    raise InvariantError(f"requests wait, yet none runs: {plan.blocked_by}")
                break
            self._launch(plan, now)
        self.end = in_flight[0].end if in_flight else None
        return bool(in_flight)

    def finish(self) -> list[SimulatedRequest]:
        """Take the result that arrives at `end`; an idle engine has none, but requests that wait
        for transfers may be aborted. Returns the requests that have ended."""
        if self._run is not None:
            ended = self._finish_run(self._run)
            self._run = None
        else:
            ended = self._take(self._in_flight.popleft()) if self._in_flight else []
        if self._aborts:
            ended += self._abort_requests()
        if ended:
            self._blocked_by = ""
        self._is_draining = not self.scheduler.queues.requests
        return ended

    def drop_steps(self, now: int) -> None:
        """End the steps in flight without results: the engine has failed, and their requests were
        aborted. They never run, so they do not count. None of them has drafts, which are made from
        the result of the step before."""
        while self._in_flight:
            step = self._in_flight.popleft()
            step.end = step.start
            self._take(step)
            work = work_of(step.plan)
            self._totals.num_prefill_tokens -= step.plan.num_tokens - work.num_decodes
            self._count(-1, -work.num_decodes, -work.decode_context, 0, -step.num_held_blocks)
        self._totals.busy -= max(0, self._stage_ends[-1] - now)
        self._stage_ends = [min(end, now) for end in self._stage_ends]
        self.end = None

    def _launch(self, plan: SchedulerOutput, now: int) -> None:
        work = work_of(plan)
        num_copies = len(plan.swap_out) + len(plan.swap_in)
        time = num_copies * self.copy_time + self.cost.step(work)
        stages = self._stage_ends
        start = now if now > stages[0] else stages[0]
        busy_since = stages[-1]  # in a pipeline, the step before may still run
        if start > busy_since:
            time += self.cost.after_idle(start - busy_since)
            busy_since = start
        record = self.recorder.begin(plan, self._totals.num_steps, start / SECOND)
        pool = self.scheduler.manager.pool
        held = pool.num_blocks - pool.num_free
        num_decodes, context, num_drafts = self.runner.decodes(plan, work)
        self._totals.num_draft_tokens += num_drafts
        self._totals.num_prefill_tokens += plan.num_tokens - num_decodes - num_drafts
        end = start + time if len(stages) == 1 else self._pass_stages(start, time, work)
        end = stages[-1] = end + self.runner.time_after(plan)
        self._count(1, num_decodes, context, end - busy_since, held)
        if plan.blocked_by:
            self._totals.waits[plan.blocked_by] += 1
        # A request that is swapped in the step of its admission is first computed when it resumes.
        for name in (*plan.admitted, *plan.resumed):
            request = self.scheduler.queues.requests[name]
            assert isinstance(request, SimulatedRequest)
            if request.scheduled is None:
                request.scheduled = now
        if self.group is not None:
            self.group.ahead = len(self._in_flight)
            self.group.planned += 1
        self._in_flight.append(StepInFlight(plan, start, end, held, record))

    def _pass_stages(self, start: int, time: int, work: StepWork) -> int:
        """Let a step pass through all stages. Returns when the last one ends."""
        stages = self._stage_ends
        head = self.cost.head(work)
        part = (time - head) // len(stages)
        end = start
        for i, stage_end in enumerate(stages):
            end = stages[i] = max(end, stage_end) + part
        # The last stage gets the rest, so that the parts add up.
        end = stages[-1] = end + time - part * len(stages)
        return end

    def _take(self, step: StepInFlight) -> list[SimulatedRequest]:
        """Take a step's result. Returns the requests that have ended."""
        plan = step.plan
        now = step.end
        group = self.group
        if group is not None:
            group.in_flight.remove(plan)
            ended = self._append_tokens(plan, now, group)
            self._count_silent(plan, now, group)
            return ended
        scheduler = self.scheduler
        result = self.runner.sample(plan)
        requests = scheduler.queues.requests
        # Those that are not aborted, and their tokens.
        known = {name: requests[name].num_tokens for name in result.sampled if name in requests}
        sampling = [requests[name] for name in known]
        scheduler.update_from_output(plan, result)
        scheduler.took(plan, (now - step.start) / SECOND)
        ended = []
        for request in sampling:
            assert isinstance(request, SimulatedRequest)
            for _ in range(request.num_tokens - known[request.request_id]):
                self._count_token(request, now)
            if request.finish_reason is not None:
                ended.append(request)
        outputs = [EngineOutput(r.request_id, finish_reason=r.finish_reason) for r in ended]
        self.recorder.finish(step.record, (now - step.start) / SECOND, result, outputs)
        return ended

    def _append_tokens(
        self, plan: SchedulerOutput, now: int, group: DecodingQueues
    ) -> list[SimulatedRequest]:
        """Do what `Scheduler.update_from_output` does for the shares that are listed. Returns the
        requests that have ended."""
        ended = []
        for share in plan.requests:
            request = group.requests.get(share.request_id)
            if request is None or not share.samples:  # aborted, or in the middle of its prompt
                continue
            if request.is_member:
                group.settle(request)
            request.num_pending_tokens -= 1
            request.num_tokens = num_tokens = request.num_tokens + 1
            self._count_token(request, now)
            if num_tokens >= request.max_num_tokens:
                self.scheduler.finish(request, "length")
                ended.append(request)
            elif request.status is RUNNING:
                group.manager.cache_blocks(request, num_tokens - 1)
            request.taken += 1  # the step counts as taken when all its shares are
        return ended

    def _count_silent(self, plan: SchedulerOutput, now: int, group: DecodingQueues) -> None:
        """Count a step that has ended, and the tokens of its silent shares."""
        shares = plan.requests
        if isinstance(shares, Shares) and shares.silent:
            self.gaps.add(now - group.last_end, shares.silent)
        group.taken += 1
        group.last_end = now

    def _count(
        self, num_steps: int, num_decodes: int, context: int, time: int, num_held_blocks: int
    ) -> None:
        """Count steps, and what was summed over them."""
        totals = self._totals
        totals.num_steps += num_steps
        totals.num_decodes += num_decodes
        totals.decode_context += context
        totals.busy += time
        totals.num_held_blocks += num_held_blocks

    def _count_token(self, request: SimulatedRequest, now: int) -> None:
        if request.last_token is None:
            request.first_token = now
        else:
            self.gaps.add(now - request.last_token)
        request.last_token = now

    # ---------------------------------------------------------------- many steps

    def _is_full(self) -> bool:
        """Whether no request is admitted until another one ends."""
        scheduler = self.scheduler
        return scheduler.queues.num_seated >= scheduler.settings.max_num_seqs

    def _is_blocked(self) -> bool:
        """Whether no request is admitted as long as only decoding requests compute and none
        ends."""
        return self._blocked_by == "kv blocks" or self._is_full()

    def _begin_run(self, now: int) -> bool:
        """Begin to make steps in one call, if the next one is uneventful. Returns whether it is."""
        group = self.group
        assert group is not None
        num_steps, to_end = group.num_uneventful()
        if not num_steps:
            return False
        request = group.next_in_line
        if request is not None and not self._is_blocked():
            if not group.lacks_blocks(request, self.scheduler):
                return False
            self._blocked_by = "kv blocks"
        may_unblock = request is not None and group.may_unblock(request, self.scheduler)
        if self.is_watched or may_unblock:
            num_steps = min(num_steps, group.num_silent)
            if num_steps <= 0:
                return False
        ahead = self.steps_ahead
        if self._may_end_requests():
            num_steps = 1
            ends = False
        else:
            ends = to_end + ahead <= num_steps
            if num_steps > to_end:
                num_steps = to_end
        group.removed_ids = []
        origin = self._in_flight[0].end if self._in_flight else now
        base, per_context = self.cost.decode(group.size)
        self._run = run = Run(
            num_steps=num_steps,
            num_results=num_steps if ends else num_steps - ahead,
            ends=ends,
            origin=origin,
            first=base + per_context * group.context,
            growth=per_context * group.size,
            size=group.size,
            context=group.context,
            first_wait=NEVER if request is None else 0,
        )
        self.end = origin + run.price(run.num_results)
        return True

    def _may_end_requests(self) -> bool:
        """Whether requests may end with the step in flight."""
        assert self.group is not None
        for step in self._in_flight:
            for share in step.plan.requests:
                request = self.group.requests.get(share.request_id)
                if request is None or not request.is_member or request.is_ending:
                    return True
        return False

    def _num_results(self, run: Run, now: int) -> int:
        """Return how many steps of a run end before one can be planned at `now`."""
        return max(1 - self.steps_ahead, run.steps_in(now - run.origin))

    def _shorten(self, run: Run, now: int) -> bool:
        """Make only the steps that were planned before `now`. Returns whether `end` has changed."""
        num_results = self._num_results(run, now)
        if num_results >= run.num_results:
            return False
        num_steps = num_results + self.steps_ahead
        self._run = msgspec.structs.replace(
            run, num_steps=num_steps, num_results=num_results, ends=False
        )
        self.end = run.origin + run.price(num_results)
        return True

    def _finish_run(self, run: Run) -> list[SimulatedRequest]:
        """Make the steps of a run. Returns the requests that have ended.

        With a step in flight, its result follows the first plan, and the last plan stays in
        flight."""
        group = self.group
        assert group is not None
        group.ahead = self.steps_ahead
        self._count_waits(run.num_steps - run.first_wait)
        held = group.advance(run.num_steps)
        last_held = group.manager.pool.num_blocks - group.manager.pool.num_free
        ended = self._take(self._in_flight.popleft()) if self._in_flight else []
        num_steps = run.num_steps
        size = run.size
        time = run.price(num_steps)
        context = num_steps * run.context + size * (num_steps * (num_steps - 1) // 2)
        self._count(num_steps, num_steps * size, context, time, held)
        self.gaps.add_growing(
            first=run.first, growth=run.growth, num_steps=run.num_results, count=size
        )
        end = self._stage_ends[0] = run.origin + time
        last_end = end if run.num_results == num_steps else run.origin + run.price(run.num_results)
        ending = group.ending
        if self.steps_ahead and run.ends:
            self._count_waits(int(run.first_wait <= num_steps and group.size > 0))
            self._plan_after(end)
        elif self.steps_ahead:
            self._in_flight.append(StepInFlight(group.plan_silently(), last_end, end, last_held))
        group.taken += run.num_results
        group.last_end = last_end
        if run.ends:
            for request in ending:
                self.scheduler.finish(request, "length")
            ended += ending
        return ended

    def _count_waits(self, num_steps: int) -> None:
        """Count steps in which only decoding requests compute, while others wait."""
        if num_steps > 0:
            self._totals.waits["max_num_seqs" if self._is_full() else "kv blocks"] += num_steps

    def _plan_after(self, start: int) -> None:
        """Plan the step after a run, before the last result of the run is taken."""
        group = self.group
        assert group is not None
        size, context = group.size, group.context
        if not size:
            return
        base, per_context = self.cost.decode(size)
        time = base + per_context * context
        held = group.advance(1)
        self._count(1, size, context, time, held)
        end = self._stage_ends[0] = start + time
        self._in_flight.append(StepInFlight(group.plan_silently(), start, end, held))
