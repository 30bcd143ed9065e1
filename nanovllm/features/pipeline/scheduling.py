"""Pipeline parallelism, the scheduler's half: a step in flight for each stage.

Built by notebooks/23_pipeline_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import SchedulerOutput


class PipelineSteps(SchedulerHooks):
    """Divides the requests among the steps in flight, so that each stage has work.

    Args:
        num_stages: stages of the pipeline, and steps in flight.
        max_num_seqs: the most running requests.
    """

    def __init__(self, queues: Queues, num_stages: int, max_num_seqs: int) -> None:
        self.queues = queues
        self.num_stages = num_stages
        self.max_num_seqs = max_num_seqs

    def limit_share(self, request: Request, share: int, plan: SchedulerOutput) -> int:
        """Give a request no share while its newest token is pending: the first stage needs the
        token that the last stage has not sampled yet. A full step (`is_full`) has none either."""
        return 0 if request.num_pending_tokens or self.is_full(plan, request) else share

    def why_not(self, request: Request, plan: SchedulerOutput) -> str:
        """Admit no request to a full step, and none that was preempted while a step in flight
        samples its token."""
        waits = request.num_pending_tokens or self.is_full(plan, request)
        return "pipeline_parallel_size" if waits else ""

    def is_full(self, plan: SchedulerOutput, request: Request) -> bool:
        """Return True once the step samples for ⌈n / num_stages⌉ requests. The others are for the
        steps that keep the other stages busy.

        For a running request, n is the number of running requests. For any other one, it is the
        number of all unfinished requests, or `max_num_seqs` if that is lower."""
        if request.status is RequestStatus.RUNNING:
            num_requests = len(self.queues.running)
        else:
            num_requests = min(len(self.queues.requests), self.max_num_seqs)
        return plan.num_samples >= -(-num_requests // self.num_stages)

    def check_invariants(self) -> None:
        """Check that no request samples in two steps in flight."""
        sampling = [
            scheduled.request_id
            for plan in self.queues.in_flight
            for scheduled in plan.requests
            if scheduled.samples
        ]
        assert len(sampling) == len(set(sampling)), f"two steps sample for one request: {sampling}"
