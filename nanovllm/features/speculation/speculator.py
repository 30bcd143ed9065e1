"""The runner's half of speculative decoding: verifies a step's drafts, and makes new ones."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nanovllm.core.runner_hooks import LaunchedStep, RunnerHooks, Wait
from nanovllm.core.sampling import Sampler, SamplingRow
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.features.speculation.draft_models import DraftModel, Eagle
from nanovllm.features.speculation.drafter import Drafter
from nanovllm.features.speculation.scheduling import DRAFTS
from nanovllm.features.speculation.verification import DraftedRow, RejectionSampler, keep_accepted

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.assembly.model import LoadedModel
    from nanovllm.core.runner import ModelRunner
    from nanovllm.data.speculative_config import SpeculativeConfig


class Speculator(RunnerHooks):
    """Verifies drafts, and makes drafts unless the scheduler does.

    Unless drafts are drawn, the sampler is the same as without speculation: a draft is accepted if
    it equals the sampled token. This works at any temperature, because a draw depends only on the
    request's seed and the token's position.

    Attributes:
        max_drafts: the most drafts of a request in a step.
        drafter: makes drafts; None if the scheduler drafts n-grams.
        sampler: what the runner samples with; None if any sampler will do.
    """

    def __init__(self, config: SpeculativeConfig, target: LoadedModel) -> None:
        self.max_drafts = config.num_speculative_tokens or 0
        kinds: dict[str | None, type[Drafter]] = {
            "draft_model": DraftModel,
            "eagle": Eagle,
            "eagle3": Eagle,
        }
        kind = kinds.get(config.method)
        self.drafter = kind(target, config) if kind is not None else None
        is_drawn = config.draft_sample_method == "probabilistic"
        self.sampler: Sampler | None = RejectionSampler() if is_drawn else None
        # By request, the distributions from which its newest drafts were drawn, `[vocab_size]`
        # each; empty if drafts are not drawn.
        self._distributions: dict[str, list[Tensor]] = {}

    def keep_outputs(self) -> None:
        """See `Drafter.keep`."""
        if self.drafter is not None:
            self.drafter.keep()

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of the caches of the drafter's layers."""
        return self.drafter.cache_shapes(num_blocks) if self.drafter is not None else []

    def allocated(self, runner: ModelRunner) -> None:
        """Let the drafter use the runner's rows and caches. The runner owns this object: a cycle
        would keep its memory until Python's garbage collection."""
        if self.drafter is not None:
            self.drafter.runner = weakref.proxy(runner)

    def before_step(self, plan: SchedulerOutput) -> None:
        """See `Drafter.prepare`."""
        if self.drafter is not None and not plan.empty:
            self.drafter.prepare(plan)

    def rows_ready(self, plan: SchedulerOutput, rows: list[SamplingRow]) -> None:
        """Replace the rows that verify drawn drafts by `DraftedRow`s."""
        if not self._distributions:
            return
        first: dict[str, int] = {}
        for i, row in enumerate(rows):
            first.setdefault(row.request_id, i)
        for scheduled in plan.requests:
            name = scheduled.request_id
            drawn = zip(scheduled.extra_token_ids, self._distributions.get(name, []), strict=False)
            for place, (draft, distribution) in enumerate(drawn):
                i = first[name] + place
                row = rows[i]
                rows[i] = DraftedRow(
                    params=row.params,
                    history=row.token_ids,
                    num_prompt_tokens=row.num_prompt_tokens,
                    stop_ids=row.stop_ids,
                    request_id=row.request_id,
                    draft=draft,
                    distribution=distribution,
                )

    def after_step(self, step: LaunchedStep, wait: Wait) -> Wait:
        """Verify the step's drafts, and make new ones. A drafter starts after the accepted drafts,
        so it waits for the step's result."""
        if step.batch is None or step.hidden is None:
            return wait
        plan = step.plan
        if self.drafter is None:
            return lambda: self._verified(plan, wait())
        result = self._verified(plan, wait())
        emitted = {
            name: [token.token_id for token in tokens] for name, tokens in result.sampled.items()
        }
        drafted = self.drafter.propose(plan, step.batch, step.hidden, emitted)
        result.extras[DRAFTS] = {request.request_id: request.drafts for request in drafted}
        self._distributions = {
            request.request_id: request.distributions
            for request in drafted
            if request.distributions
        }
        return lambda: result

    def _verified(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        return replace(result, sampled=keep_accepted(plan, result.sampled))
