"""Turns the scheduler's decisions into step records, for the engine and for a simulation of it."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from nanovllm.core.recorder import Recorder
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import EngineOutput
from nanovllm.trace.record import Arrival, TransfersEnded
from nanovllm.trace.trace import Snapshot, StepRecord, Trace, TracedRequest

RecordSink = Callable[[StepRecord], None]
# Blocks that a recorder remembers at least, if so many have arrived.
MIN_NAMES = 10_000


def new_record() -> StepRecord:
    """Return a record of a step that is not planned yet."""
    return StepRecord(step=0, start=0.0, duration=0.0, token_budget=0, requests=[])


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
        # What happened since the last step.
        self._next = new_record()
        # The unfinished requests that have arrived since the recorder was made, with their numbers;
        # and the arrival that first had each block, by the block's hash.
        self._known: dict[str, tuple[int, Request]] = {}
        self._num_arrivals = 0
        self._owners: dict[bytes, int] = {}
        self._max_owners = MIN_NAMES
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

    def cache_reset(self) -> None:
        """Take a snapshot in the next record: no record describes how the pool has changed."""
        self._snapshot_due = True
        self._next.cache_resets.append(len(self._begun))

    # ---------------------------------------------------------------- records

    def arrived(self, request: Request, time: float) -> None:
        """Note in the next record that a request was queued, in seconds (or simulated units) since
        the trace began."""
        params = request.sampling_params
        drafts = params.num_speculative_tokens
        self._known[request.request_id] = (self._num_arrivals, request)
        self._next.arrived[request.request_id] = request.num_prompt_tokens
        self._next.arrivals[request.request_id] = Arrival(
            time=time,
            in_flight=len(self._begun),
            max_tokens=request.max_num_tokens - request.num_prompt_tokens,
            priority=request.order[0],
            prefix=self._shared_blocks(request, self._num_arrivals, 0),
            looks_back=request.looks_back,
            prompt_logprobs=params.prompt_logprobs is not None,
            is_remote=bool((request.kv_transfer_params or {}).get("do_remote_prefill")),
            num_speculative_tokens=0 if params.structured_outputs is not None else drafts,
        )
        self._num_arrivals += 1

    def _shared_blocks(self, request: Request, number: int, first: int) -> tuple[int, int] | None:
        """Name a request's blocks, beginning with index `first`. Return which arrival had how many
        of its blocks before, if one of these is among them; see `Arrival.prefix`."""
        manager = self.scheduler.manager
        hashes = manager.block_hashes(request) if manager.enable_prefix_caching else []
        names = [self._owners.setdefault(block_hash, number) for block_hash in hashes[first:]]
        # The last block that is known decides: its hash names the whole prefix.
        shared = next((i for i in reversed(range(len(names))) if names[i] != number), None)
        if len(self._owners) > self._max_owners:  # forget blocks that no request can find
            used = [h for _, known in self._known.values() for h in known.block_hashes]
            kept = {*manager.pool.cached_blocks, *used} & self._owners.keys()
            self._owners = {block_hash: self._owners[block_hash] for block_hash in kept}
            self._max_owners = 2 * len(kept) + MIN_NAMES
        return None if shared is None else (names[shared], first + shared + 1)

    def ended(self, request_id: str, reason: str) -> None:
        """Note in the next record that a request ended between two steps."""
        self._next.finished[request_id] = reason
        self._next.aborted[request_id] = len(self._begun)
        self._forget([request_id], self._next)

    def transfers_ended(self, ended: KVConnectorOutput) -> None:
        """Note in the next record that KV transfers have ended between two steps."""
        invalid = ended.invalid_block_ids.items()
        self._next.transfers.append(
            TransfersEnded(
                in_flight=len(self._begun),
                sent=sorted(ended.finished_sending),
                received=sorted(ended.finished_recving),
                invalid_blocks={name: sorted(block_ids) for name, block_ids in invalid},
                failed=sorted(ended.reasons),
            )
        )

    def _forget(self, request_ids: Iterable[str], record: StepRecord) -> None:
        """Name the last blocks of requests that have ended; see `StepRecord.prefixes`."""
        for request_id in [name for name in request_ids if name in self._known]:
            number, request = self._known.pop(request_id)
            first = request.num_prompt_tokens // self.scheduler.manager.block_size
            if (shared := self._shared_blocks(request, number, first)) is not None:
                record.prefixes[request_id] = shared

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
        receiving = queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
        waiting = sorted(queues.waiting + receiving, key=lambda r: r.order)
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
        record = replace(
            self._next,
            step=step,
            start=start,
            planned=start,
            token_budget=plan.token_budget,
            requests=shares,
            admitted=plan.admitted,
            resumed=plan.resumed,
            preempted=plan.preempted,
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
        self._next = new_record()
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
        receiving = queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
        tables = {r.request_id: list(manager.tables[r.request_id]) for r in [*receiving, *arrived]}
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
        self._forget(ends, self._next if record is None else record)
        self._begun = [begun for begun in self._begun if begun is not record]
        self._tell_latecomers(ends)
        if record is None:
            return
        record.duration = duration
        if record.planned == record.start:
            record.planned = 0.0
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
                self._next.finished |= {request_id: ends[request_id] for request_id in shown}
                for share in record.requests:
                    if share.request_id in shown:  # computed once more in vain
                        record.snapshot.num_tokens[share.request_id] = share.start

    def start_over(self, lost: list[str]) -> None:
        """Note in the next record that the steps in flight broke off, and that these requests
        ended."""
        for record in reversed(self._begun):
            self._next.arrived = record.arrived | self._next.arrived
            self._next.arrivals = record.arrivals | self._next.arrivals
            self._next.finished = record.finished | self._next.finished
        self._begun = []
        self._next.finished |= dict.fromkeys(lost, "error")
        self._forget(lost, self._next)
        self._snapshot_due = True

    def flush(self, step: int, start: float, is_idle: bool = True) -> None:
        """Write what no record contains yet, if anything, as a record without requests: the blocks
        that transfers hold now and, if the engine is idle, the requests that have ended. No step is
        in flight.

        Args:
            step, start: the number of the next step, and the time now.
            is_idle: there may be no next step.
        """
        if is_idle:
            self._forget(self._known, self._next)
        is_due = (
            self._next.finished
            or self._next.prefixes
            or (self._snapshot_due and not self.scheduler.has_unfinished)
        )
        if (is_idle and is_due) or self._held() != self._held_before:
            self.finish(self.begin(SchedulerOutput(), step, start), 0.0, ModelRunnerOutput(), [])

    def close(self) -> None:
        """Finish the trace's file, if there is one."""
        if self._trace is not None:
            self._trace.close()
