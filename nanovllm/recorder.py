"""Turns what the scheduler decides into step records: the same for the engine and for a simulation of it."""

from __future__ import annotations

from nanovllm.request import EngineOutput
from nanovllm.scheduler import Schedule, Scheduler, StepResult
from nanovllm.trace import StepRecord, Trace, TracedRequest


class StepRecorder:
    """Watches one scheduler and writes its steps into a trace.

    Args:
        trace: where the records go.
        scheduler: whose steps they are. Its settings are noted in the trace, for those who draw it.
    """

    def __init__(self, trace: Trace, scheduler: Scheduler) -> None:
        self.trace = trace
        self.scheduler = scheduler
        config, manager = scheduler.config, scheduler.manager
        trace.settings |= {
            "block_size": manager.block_size,
            "num_blocks": manager.pool.num_blocks,
            "token_budget": config.token_budget,
            "max_num_seqs": config.max_num_seqs,
            "batching_policy": config.batching_policy,
            "enable_prefix_caching": manager.enable_prefix_caching,
        }
        self._arrived: dict[str, int] = {}
        self._ended: dict[str, str] = {}
        self._begun: list[StepRecord] = []

    def arrived(self, request_id: str, num_prompt_tokens: int) -> None:
        """A request was queued; the next record says so."""
        self._arrived[request_id] = num_prompt_tokens

    def ended(self, request_id: str, reason: str) -> None:
        """A request ended between two steps; the next record says so."""
        self._ended[request_id] = reason

    def begin(self, plan: Schedule, step: int, start: float) -> StepRecord:
        """What the scheduler decided, before the step changes the queues again.

        Args:
            step: number of the step.
            start: when it began, in seconds (or simulated units) since the trace began.
        """
        scheduler, pool = self.scheduler, self.scheduler.manager.pool
        # The next step may begin before this one is finished: what has happened until now belongs to this one.
        arrived, self._arrived = self._arrived, {}
        ended, self._ended = self._ended, {}
        record = StepRecord(
            step=step,
            start=start,
            duration=0.0,
            token_budget=scheduler.config.token_budget,
            requests=[
                TracedRequest(
                    r.request_id,
                    r.start,
                    r.num_tokens,
                    scheduler.requests[r.request_id].num_prompt_tokens,
                    r.new_block_ids,
                )
                for r in plan.requests
            ],
            arrived=arrived,
            admitted=plan.admitted,
            resumed=plan.resumed,
            preempted=plan.preempted,
            finished=ended,
            swap_out=plan.swap_out,
            swap_in=plan.swap_in,
            blocked_by=plan.blocked_by,
            waiting=[r.request_id for r in scheduler.waiting],
            running=[r.request_id for r in scheduler.running],
            swapped=[r.request_id for r in scheduler.swapped],
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_evictions=pool.num_evictions,
        )
        self._begun.append(record)
        return record

    def finish(
        self, record: StepRecord, duration: float, result: StepResult, outputs: list[EngineOutput]
    ) -> None:
        """Add what the step sampled and who ended with it, and write the record. Steps finish in the order in which
        they began."""
        self._begun.remove(record)
        record.duration = duration
        for request in record.requests:
            token = result.sampled.get(request.request_id)
            request.sampled = [token.token_id] if token else []
        record.finished |= {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
        self.trace.record(record)

    def start_over(self, scheduler: Scheduler, lost: list[str]) -> None:
        """The steps that had begun broke off, and these requests with them; the next record says so."""
        for record in reversed(self._begun):
            self._arrived = record.arrived | self._arrived
            self._ended = record.finished | self._ended
        self._begun = []
        self._ended |= dict.fromkeys(lost, "error")
        self.scheduler = scheduler

    def flush(self, step: int, start: float) -> None:
        """Write the ends since the last step, if any, as a record without requests: no step may ever follow.

        Args:
            step, start: number of the step that would come next, and the time now.
        """
        if self._ended:
            self.finish(self.begin(Schedule(), step, start), 0.0, StepResult(), [])
