"""Takes the place of the ranks of a simulated engine."""

from __future__ import annotations

from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.simulate.cost import StepWork

TOKEN = SampledToken(0)


class SimulatedRunner:
    """Takes the place of the ranks of an engine. This base class samples a token for each request
    that samples, and adds nothing to the time that `StepCost` predicts."""

    def time_after(self, plan: SchedulerOutput) -> int:
        """Return by how much the result arrives later."""
        return 0

    def decodes(self, plan: SchedulerOutput, work: StepWork) -> tuple[int, int, int]:
        """Return how many requests of a step decode, tokens that these attend to, and drafts."""
        return work.num_decodes, work.decode_context, 0

    def sample(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Return the result of a step."""
        names = [share.request_id for share in plan.requests if share.samples]
        return ModelRunnerOutput({name: [TOKEN] for name in names})
