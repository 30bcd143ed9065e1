"""The runner's part in speculative decoding: verifies a step's drafts, and makes new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.data.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.runner.batch import Batch
from nanovllm.runner.sampling import SampleKey, SamplingRow
from nanovllm.runner.speculative.drafter import Drafter, DraftModel, Eagle
from nanovllm.runner.speculative.verification import DraftedRow, RejectionSampler, keep_accepted

if TYPE_CHECKING:
    from nanovllm.runner.runner import ModelRunner


class Speculator:
    """Verifies drafts, and makes drafts unless the scheduler does.

    Unless drafts are drawn, the sampler is the same as without speculation: a draft is accepted if
    it equals the sampled token. This works at any temperature, because a draw depends only on the
    request's seed and the token's position.

    Attributes:
        drafter: makes drafts; None if the scheduler drafts n-grams.
        keep: see `Drafter.keep`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config.speculative
        assert config is not None
        kinds: dict[str | None, type[Drafter]] = {
            "draft_model": DraftModel,
            "eagle": Eagle,
            "eagle3": Eagle,
        }
        kind = kinds.get(config.method)
        self.drafter = kind(runner, config) if kind is not None else None
        self.keep = self.drafter.keep if self.drafter is not None else lambda: None
        is_drawn = config.draft_sample_method == "probabilistic"
        if is_drawn:
            runner.sampler = RejectionSampler()

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of the caches of the drafter's layers."""
        return self.drafter.cache_shapes(num_blocks) if self.drafter is not None else []

    def mark(self, rows: dict[SampleKey, SamplingRow], schedule: SchedulerOutput) -> None:
        """Replace the rows that verify drawn drafts by `DraftedRow`s, with the distributions from
        which the drafts were drawn."""
        if self.drafter is not None:
            self.drafter.prepare(schedule)
        drawn = self.drafter.probabilities if self.drafter is not None else {}
        for scheduled in schedule.requests:
            for place, draft in enumerate(
                scheduled.extra_token_ids if scheduled.request_id in drawn else ()
            ):
                key = (scheduled.request_id, place) if place else scheduled.request_id
                rows[key] = DraftedRow(
                    **vars(rows[key]), draft=draft, probabilities=drawn[scheduled.request_id][place]
                )

    def finish(
        self,
        schedule: SchedulerOutput,
        batch: Batch,
        hidden: Tensor,
        sampled: Callable[[], dict[SampleKey, SampledToken]],
    ) -> Callable[[], ModelRunnerOutput]:
        """Verify the step's drafts, and make new ones. A drafter starts after the accepted drafts,
        so it waits for the step's result."""
        if self.drafter is None:
            return lambda: keep_accepted(schedule, sampled())
        output = keep_accepted(schedule, sampled())
        if schedule.requests:
            emitted = {
                name: [token.token_id for token in tokens]
                for name, tokens in output.sampled.items()
            }
            output.draft_token_ids = self.drafter.propose(schedule, batch, hidden, emitted)
        return lambda: output
