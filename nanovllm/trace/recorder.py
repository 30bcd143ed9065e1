"""Turns the scheduler's decisions into step records, for the engine and for a simulation of it."""

from collections.abc import Callable, Iterable

from nanovllm.core.recorder import Recorder
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.request import EngineOutput
from nanovllm.trace.trace import Snapshot, StepRecord, Trace, TracedRequest

RecordSink = Callable[[StepRecord], None]


class StepRecorder(Recorder):
    """Makes records of one scheduler's steps, and passes them to a trace and to the sinks that
    watch.

    Args:
        trace: gets all records; None if only sinks watch.
        scheduler: makes the steps.
    """

    is_on = True

    def __init__(self, trace: Trace | None, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._trace = trace
        # False: the sink's first record is the next one with a snapshot.
        self._sinks: dict[RecordSink, bool] = {}
        if trace is not None:
            self.trace = trace
            self._sinks[trace.record] = True
        self._snapshot_due = False
        self._arrived: dict[str, int] = {}
        self._ended: dict[str, str] = {}
        self._begun: list[StepRecord] = []
        self._held_before: dict[str, list[int]] = {}  # as of the last record

    # ---------------------------------------------------------------- sinks

    def watch(self, sink: RecordSink) -> None:
        """Pass all records to a sink, from the next one with a snapshot on. A sink that watches
        already gets a new snapshot."""
        self._sinks.setdefault(sink, False)
        self._snapshot_due = True

    def unwatch(self, sink: RecordSink) -> bool:
        """Pass no more records to a sink. Nothing happens if it does not watch. Returns whether
        another one watches."""
        self._sinks.pop(sink, None)
        return bool(self._sinks)

    def ask_for_snapshot(self) -> None:
        """Take a snapshot in the next record: the pool has changed in a way that no record
        describes."""
        self._snapshot_due = True

    # ---------------------------------------------------------------- records

    def arrived(self, request_id: str, num_prompt_tokens: int) -> None:
        """Note in the next record that a request was queued."""
        self._arrived[request_id] = num_prompt_tokens

    def ended(self, request_id: str, reason: str) -> None:
        """Note in the next record that a request ended between two steps."""
        self._ended[request_id] = reason

    def begin(self, plan: SchedulerOutput, step: int, start: float) -> StepRecord:
        """Record what the scheduler has decided, before the step changes the queues again.

        Args:
            step: the step's number.
            start: when it began, in seconds (or simulated units) since the trace began.
        """
        queues = self.scheduler.queues
        pool = self.scheduler.manager.pool
        requests = queues.requests
        # A request that waits for remote KV counts as waiting, although it has blocks.
        waiting = sorted(queues.waiting + queues.receiving, key=lambda r: r.order)
        shares = [
            TracedRequest(
                request_id=r.request_id,
                start=r.start,
                num_tokens=r.num_tokens,
                num_prompt_tokens=requests[r.request_id].num_prompt_tokens,
                new_block_ids=[*r.new_block_ids],
                num_drafts=max(0, r.samples - 1),
            )
            for r in plan.requests
        ]
        record = StepRecord(
            step=step,
            start=start,
            duration=0.0,
            token_budget=plan.token_budget,
            requests=shares,
            arrived=self._arrived,
            admitted=plan.admitted,
            resumed=plan.resumed,
            preempted=plan.preempted,
            finished=self._ended,
            swap_out=plan.swap_out,
            swap_in=plan.swap_in,
            blocked_by=plan.blocked_by,
            waiting=[r.request_id for r in waiting],
            running=[r.request_id for r in queues.running],
            swapped=[r.request_id for r in queues.swapped],
            held=self._held(),
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_evictions=pool.num_evictions,
        )
        # The next step may begin before this one is finished: everything up to now belongs to this
        # one.
        self._arrived = {}
        self._ended = {}
        self._held_before = record.held
        if self._snapshot_due:
            self._snapshot_due = False
            record.snapshot = self._snapshot(record.held)
        self._begun.append(record)
        return record

    def _held(self) -> dict[str, list[int]]:
        """Block tables that KV transfers hold; see `StepRecord`."""
        queues = self.scheduler.queues
        manager = self.scheduler.manager
        arrived = [request for request in queues.running if not request.num_sent_tokens]
        tables = {
            r.request_id: list(manager.tables[r.request_id]) for r in [*queues.receiving, *arrived]
        }
        return tables | manager.held

    def _snapshot(self, held: dict[str, list[int]]) -> Snapshot:
        manager = self.scheduler.manager
        requests = self.scheduler.queues.requests
        tables = {
            request_id: list(table)
            for request_id, table in manager.tables.items()
            if request_id not in held
        }
        num_tokens = {request_id: requests[request_id].num_computed_tokens for request_id in tables}
        cached = [
            b for b in manager.pool.free_block_queue if manager.pool.block_hashes[b] is not None
        ]
        prompt_lens = {
            request_id: request.num_prompt_tokens for request_id, request in requests.items()
        }
        return Snapshot(
            tables=tables,
            num_tokens=num_tokens,
            cached=cached,
            prompt_lens=prompt_lens,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def finish(
        self,
        record: StepRecord | None,
        duration: float,
        result: ModelRunnerOutput,
        outputs: Iterable[EngineOutput],
    ) -> None:
        """Add to a record what the step sampled and which requests ended, and pass it on. Steps
        finish in the order in which they began.

        Args:
            record: None for a step that began when no sink watched.
        """
        by_id = {output.request_id: output for output in outputs}
        ends = {
            name: output.finish_reason for name, output in by_id.items() if output.finish_reason
        }
        self._begun = [begun for begun in self._begun if begun is not record]
        self._tell_latecomers(ends)
        if record is None:
            return
        record.duration = duration
        for request in record.requests:
            # Accepted drafts behind the request's end do not count.
            if request.num_drafts and request.request_id in by_id:
                request.sampled += by_id[request.request_id].new_token_ids
            elif (tokens := result.sampled.get(request.request_id)) is not None:
                request.sampled.append(tokens[0].token_id)
        record.finished |= ends
        for sink, has_started in list(self._sinks.items()):
            if has_started or record.snapshot is not None:
                self._sinks[sink] = True
                sink(record)

    def _tell_latecomers(self, ends: dict[str, str]) -> None:
        """Repeat ended requests for new readers. A snapshot that was taken while a step was in
        flight contains requests that end with that step. A reader that starts at the snapshot never
        sees that step's record, so a later record repeats their ends."""
        for record in self._begun:
            if record.snapshot is not None:
                shown = ends.keys() & record.snapshot.prompt_lens.keys()
                self._ended |= {request_id: ends[request_id] for request_id in shown}
                for share in record.requests:
                    if share.request_id in shown:  # computed once more in vain
                        record.snapshot.num_tokens[share.request_id] = share.start

    def start_over(self, lost: list[str]) -> None:
        """Note in the next record that the steps in flight broke off, and that these requests
        ended."""
        for record in reversed(self._begun):
            self._arrived = record.arrived | self._arrived
            self._ended = record.finished | self._ended
        self._begun = []
        self._ended |= dict.fromkeys(lost, "error")
        self._snapshot_due = True

    def flush(self, step: int, start: float, is_idle: bool = True) -> None:
        """Write what no record contains yet, if anything, as a record without requests: the blocks
        that transfers hold now and, if the engine is idle, the requests that have ended. No step is
        in flight.

        Args:
            step, start: the number of the next step, and the time now.
            is_idle: there may be no next step.
        """
        is_due = self._ended or (self._snapshot_due and not self.scheduler.has_unfinished)
        if (is_idle and is_due) or self._held() != self._held_before:
            self.finish(self.begin(SchedulerOutput(), step, start), 0.0, ModelRunnerOutput(), [])

    def close(self) -> None:
        """Finish the trace's file, if there is one."""
        if self._trace is not None:
            self._trace.close()
