"""An engine on a virtual clock: the real scheduler; only the time of its steps is computed."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from nanovllm.core.block_pool import InvariantError
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.requests import SimulatedRequest
from nanovllm.simulate.results import ReplicaCounters, TokenGaps
from nanovllm.simulate.workload import SECOND

TOKEN = SampledToken(0)


class StepInFlight(NamedTuple):
    """A step whose result is still missing.

    Attributes:
        start: when it was planned, or when the step before it ended, if that was later.
        end: when its result arrives.
    """

    plan: SchedulerOutput
    start: int
    end: int


class SimulatedEngine:
    """Does what `EngineCore` does, on a virtual clock. All times are in picoseconds.

    The caller calls `finish` and then `begin` when the clock reaches `end`. Requests may arrive and
    be aborted in between.

    Args:
        steps_ahead: the most steps in flight while the next one is planned; see `EngineSettings`.
        num_stages: stages of the pipeline, each of which takes an equal part of a step's time.
        gaps: counts the times between tokens; engines may share one.

    Attributes:
        end: when the next result arrives; None: the engine is idle.
        counters: its totals so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        *,
        steps_ahead: int = 0,
        num_stages: int = 1,
        gaps: TokenGaps | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.steps_ahead = steps_ahead
        self.gaps = gaps or TokenGaps()
        self.end: int | None = None
        self._in_flight: deque[StepInFlight] = deque()
        self._stage_ends = [0] * num_stages
        self._aborts: list[str] = []
        # All requests have ended: the results that are missing come before the next plan.
        self._is_draining = False
        self.num_requests = 0
        self.num_steps = 0
        self.num_decode_steps = 0
        self.num_decodes = 0
        self.decode_context = 0
        self.num_prefill_tokens = 0
        self.busy = 0

    @property
    def counters(self) -> ReplicaCounters:
        """The totals so far."""
        scheduler = self.scheduler
        return ReplicaCounters(
            num_steps=self.num_steps,
            num_decode_steps=self.num_decode_steps,
            num_decodes=self.num_decodes,
            decode_context=self.decode_context,
            num_prefill_tokens=self.num_prefill_tokens,
            busy=self.busy,
            num_requests=self.num_requests,
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.num_queried_tokens,
            num_hit_tokens=scheduler.num_hit_tokens,
            num_evictions=scheduler.manager.pool.num_evictions,
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for another one after a preemption."""
        queues = self.scheduler.queues
        return len(queues.waiting) + len(queues.swapped) + len(queues.receiving)

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
        self.scheduler.add_request(request)
        self.num_requests += 1
        return self.end is None and self.begin(now)

    def abort(self, request_id: str, now: int) -> bool:
        """End a request as soon as the next result has arrived: requests end between two steps.
        Returns whether `end` has changed."""
        if request_id in self.scheduler.queues.requests:
            self._aborts.append(request_id)
        return False

    def wake(self, now: int) -> bool:
        """Plan again, since a KV transfer has ended, if the engine is idle. Returns whether `end`
        has changed."""
        return self.end is None and self.begin(now)

    @property
    def _awaits_transfers(self) -> bool:
        """KV transfers fill or hold blocks, so more can be planned once they are complete."""
        return bool(self.scheduler.queues.receiving or self.scheduler.manager.held)

    def _abort_requests(self) -> list[SimulatedRequest]:
        requests = self.scheduler.queues.requests
        found = [requests[name] for name in dict.fromkeys(self._aborts) if name in requests]
        for request in found:
            self.scheduler.abort_request(request.request_id)
        self._aborts.clear()
        return found  # type: ignore[return-value]

    # ---------------------------------------------------------------- steps

    def begin(self, now: int) -> bool:
        """Plan and launch steps, until enough are in flight or nothing can be planned. Returns
        whether a result is to come: at `end`."""
        scheduler = self.scheduler
        in_flight = self._in_flight
        while len(in_flight) <= self.steps_ahead and scheduler.has_unfinished:
            if self._is_draining and in_flight:
                break
            self._is_draining = False
            plan = scheduler.schedule()
            if plan.empty:
                if not in_flight and not self._awaits_transfers:
                    raise InvariantError(f"requests wait, yet none runs: {plan.blocked_by}")
                break
            self._launch(plan, now)
        self.end = in_flight[0].end if in_flight else None
        return bool(in_flight)

    def finish(self) -> list[SimulatedRequest]:
        """Take the result that arrives at `end`. Returns the requests that have ended."""
        step = self._in_flight.popleft()
        ended = self._take(step)
        if self._aborts:
            ended += self._abort_requests()
        self._is_draining = not self.scheduler.has_unfinished
        return ended

    def _launch(self, plan: SchedulerOutput, now: int) -> None:
        work = work_of(plan)
        seconds = self.cost.step(work)
        stages = self._stage_ends
        start = max(now, stages[0])
        self.num_steps += 1
        self.num_decode_steps += not work.prefills
        self.num_decodes += work.num_decodes
        self.decode_context += work.decode_context
        self.num_prefill_tokens += sum(num_tokens for _, num_tokens in work.prefills)
        self.busy += seconds
        end = start
        for i in range(len(stages)):
            # The last stage gets the rest, so that the parts add up.
            part = seconds * (i + 1) // len(stages) - seconds * i // len(stages)
            end = stages[i] = max(end, stages[i]) + part
        self._in_flight.append(StepInFlight(plan, start, end))

    def _take(self, step: StepInFlight) -> list[SimulatedRequest]:
        plan = step.plan
        now = step.end
        requests = self.scheduler.queues.requests
        sampling = [requests.get(share.request_id) for share in plan.requests if share.samples]
        result = ModelRunnerOutput(
            {share.request_id: [TOKEN] for share in plan.requests if share.samples}
        )
        self.scheduler.update_from_output(plan, result)
        self.scheduler.took(plan, (now - step.start) / SECOND)
        ended = []
        for request in sampling:
            if request is None:  # aborted
                continue
            assert isinstance(request, SimulatedRequest)
            self._count_token(request, now)
            if request.finish_reason is not None:
                ended.append(request)
        return ended

    def _count_token(self, request: SimulatedRequest, now: int) -> None:
        if request.last_token is None:
            request.first_token = now
        else:
            self.gaps.add(now - request.last_token)
        request.last_token = now


def work_of(plan: SchedulerOutput) -> StepWork:
    """Return what a step computes."""
    num_decodes = 0
    decode_context = 0
    prefills = []
    for share in plan.requests:
        if share.num_tokens == 1:
            num_decodes += 1
            decode_context += share.start + 1
        else:
            prefills.append((share.start, share.num_tokens))
    return StepWork(num_decodes, decode_context, prefills, plan.num_samples)
