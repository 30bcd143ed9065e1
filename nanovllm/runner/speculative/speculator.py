"""The runner's part in speculative decoding: verifies a step's drafts, and has new ones made."""

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
    """Verifies drafts, and makes them if the scheduler does not.

    Where drafts are not drawn, the sampler is that of every other engine: a draft is right if it is
    the token that is sampled without it, at any temperature, because a draw depends on the
    request's seed and on the token's place alone.

    Attributes:
        drafter: None if the scheduler drafts n-grams.
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
        """Caches that the runner shall make for the drafter's layers."""
        return self.drafter.cache_shapes(num_blocks) if self.drafter is not None else []

    def mark(self, rows: dict[SampleKey, SamplingRow], schedule: SchedulerOutput) -> None:
        """Before a step: tell the sampler which rows verify drafts that were drawn, and from
        what."""
        if self.drafter is not None:
            self.drafter.prepare(schedule)
        drawn = self.drafter.probabilities if self.drafter is not None else {}
        for scheduled in schedule.requests:
            for place, draft in enumerate(
                scheduled.draft_token_ids if scheduled.request_id in drawn else ()
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
        """Verify the step's drafts. A drafter begins where the accepted ones end, so it waits for
        the step."""
        if self.drafter is None:
            return lambda: keep_accepted(schedule, sampled())
        output = keep_accepted(schedule, sampled())
        if schedule.requests:
            after = output.sampled_after
            emitted = {
                name: [token.token_id, *(more.token_id for more in after.get(name, ()))]
                for name, token in output.sampled.items()
            }
            output.draft_token_ids = self.drafter.propose(schedule, batch, hidden, emitted)
        return lambda: output
