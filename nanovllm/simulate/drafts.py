"""Speculative decoding: the scheduler's own decisions, and drafts that are accepted by chance."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.features.speculation.scheduling import DRAFTS, num_drafts_wanted
from nanovllm.router.policies import random_bits
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.runner import SimulatedRunner


class DraftingRunner(SimulatedRunner):
    """A runner with a draft model. Drafts are verified in the next step, which computes them like
    tokens of a prompt. The scheduler has `Speculation`, with another method than "ngram".

    Args:
        acceptance: for each position, the share of drafts that are accepted there, as vLLM counts
            them: with all before them. It does not increase. Empty: there are no drafts.
        draft_time: picoseconds in which the draft model makes one draft for all requests.
        seed: of what is accepted.
    """

    def __init__(self, acceptance: Sequence[float], draft_time: int = 0, seed: int = 0) -> None:
        self.acceptance = acceptance
        self.draft_time = draft_time
        self.seed = seed
        self._num_draws = 0

    def decodes(self, plan: SchedulerOutput, work: StepWork) -> tuple[int, int, int]:
        """See `SimulatedRunner`. Requests that verify drafts cost what prompts of this length do,
        and yet they decode."""
        drafting = [s for s in plan.requests if s.num_tokens == 1 + len(s.extra_token_ids) > 1]
        return (
            work.num_decodes + len(drafting),
            work.decode_context + sum(share.start + 1 for share in drafting),
            sum(len(share.extra_token_ids) for share in drafting),
        )

    def time_after(self, plan: SchedulerOutput) -> int:
        """Return the time to make as many drafts as the request with most of them gets."""
        return self.draft_time * max(num_drafts_wanted(plan).values(), default=0)

    def sample(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Return the accepted drafts of each request that samples, a token after them, and new
        drafts."""
        result = super().sample(plan)
        for share in plan.requests:
            if share.samples:
                result.sampled[share.request_id] *= 1 + self._accept(len(share.extra_token_ids))
        wanted = num_drafts_wanted(plan)
        result.extras[DRAFTS] = {name: [0] * count for name, count in wanted.items()}
        return result

    def _accept(self, num_drafts: int) -> int:
        """Return how many of a request's drafts are accepted."""
        self._num_draws += num_drafts > 0
        chance = random_bits(self.seed, self._num_draws) / 2**64
        return sum(chance < share for share in self.acceptance[:num_drafts])
