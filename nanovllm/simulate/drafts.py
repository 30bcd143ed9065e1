"""Speculative decoding: the scheduler's own decisions, and drafts that are accepted by chance."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.features.speculation.scheduling import DRAFTS, num_drafts_wanted
from nanovllm.router.policies import random_bits
from nanovllm.simulate.cost import StepCost
from nanovllm.simulate.engine import TOKEN, SimulatedEngine, StepInFlight
from nanovllm.simulate.requests import SimulatedRequest
from nanovllm.simulate.workload import SECOND


class DraftingEngine(SimulatedEngine):
    """An engine whose runner has a draft model. Drafts are verified in the next step, which
    computes them like tokens of a prompt.

    Args:
        scheduler: has `Speculation`, with another method than "ngram".
        cost, steps_ahead, num_stages: see `SimulatedEngine`.
        acceptance: for each position, the share of drafts that are accepted there, as vLLM counts
            them: with all before them. It does not increase. Empty: there are no drafts.
        draft_time: picoseconds in which the draft model makes one draft for all requests.
        seed: of what is accepted.

    Attributes:
        result: that of the last step.
    """

    result: ModelRunnerOutput

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        *,
        acceptance: Sequence[float] = (),
        draft_time: int = 0,
        seed: int = 0,
        steps_ahead: int = 0,
        num_stages: int = 1,
    ) -> None:
        super().__init__(scheduler, cost, steps_ahead=steps_ahead, num_stages=num_stages)
        self.acceptance = acceptance
        self.draft_time = draft_time
        self.seed = seed
        self._num_draws = 0

    def _launch(self, plan: SchedulerOutput, now: int) -> None:
        super()._launch(plan, now)
        step = self._in_flight[-1]
        time = self.draft_time * max(num_drafts_wanted(plan).values(), default=0)
        step.end += time
        self._stage_ends[-1] += time

    def _take(self, step: StepInFlight) -> list[SimulatedRequest]:
        plan = step.plan
        sampled = {}
        known: list[tuple[SimulatedRequest, int]] = []
        for share in plan.requests:
            if share.samples:
                num_accepted = self._accept(len(share.extra_token_ids))
                sampled[share.request_id] = [TOKEN] * (1 + num_accepted)
                request = self.scheduler.queues.requests.get(share.request_id)
                if isinstance(request, SimulatedRequest):  # not aborted
                    known.append((request, request.num_tokens))
        drafts = {name: [0] * count for name, count in num_drafts_wanted(plan).items()}
        result = self.result = ModelRunnerOutput(sampled, extras={DRAFTS: drafts})
        self.scheduler.update_from_output(plan, result)
        self.scheduler.took(plan, (step.end - step.start) / SECOND)
        for request, num_tokens in known:
            for _ in range(request.num_tokens - num_tokens):
                self._count_token(request, step.end)
        return [request for request, _ in known if request.finish_reason is not None]

    def _accept(self, num_drafts: int) -> int:
        """Return how many of a request's drafts are accepted."""
        self._num_draws += num_drafts > 0
        chance = random_bits(self.seed, self._num_draws) / 2**64
        return sum(chance < share for share in self.acceptance[:num_drafts])
