"""Replays a recorded run: gives its arrivals, results and step times to the real engine's loop and
scheduler, on a virtual clock, and compares each step that is planned with the recorded one."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm.assembly.scheduling import create_manager, create_scheduler, loop_settings
from nanovllm.core.block_pool import InvariantError
from nanovllm.core.engine import EngineCore
from nanovllm.core.peers import Peers
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.resolved_config import ResolvedConfig
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.executor.base import Executor
from nanovllm.features.speculation.scheduling import (
    DRAFTS,
    NgramProposer,
    Speculation,
    num_drafts_wanted,
)
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.simulate.links import transfer_of
from nanovllm.simulate.recorded import Sample, first_with_block, recorded_requests
from nanovllm.trace.record import StepRecord, TransfersEnded
from nanovllm.trace.recorder import StepRecorder
from nanovllm.trace.trace import Trace

# Compared fields of a step, besides the requests' shares: all of its plan, and where it leaves
# requests and blocks.
COMPARED = (
    "admitted",
    "resumed",
    "preempted",
    "swap_out",
    "swap_in",
    "blocked_by",
    "token_budget",
    "waiting",
    "running",
    "swapped",
    "held",
    "num_free_blocks",
    "num_evictions",
)
# Connectors of prefill and decode engines.
PEER_CONNECTORS = ("local", "nixl")
# Token ids do not matter, except that one of them ends a request.
TOKEN = 0
STOP = 1


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        num_steps: steps that are equal.
        difference: the first difference, in words; "" if there is none.
        ended_by: why the replay ended before the trace did; "" if it did not.
    """

    num_steps: int
    difference: str = ""
    ended_by: str = ""

    def __str__(self) -> str:
        text = self.difference or f"{self.num_steps:,} steps, all plans equal"
        return f"{text} ({self.ended_by})" if self.ended_by else text


class Event(NamedTuple):
    """What happened between two steps.

    Attributes:
        in_flight: the number of steps whose results were missing.
        time: in seconds; for all but arrivals, that of the next plan.
    """

    in_flight: int
    time: float
    action: Callable[[], object]


class Difference(Exception):
    """A step differs from the recorded one."""


def replay(trace: Trace) -> ReplayResult:
    """Replay the trace of an engine's whole life, as `nanovllm serve --trace` and `LLM(trace=True)`
    record it.

    Raises:
        UsageError: the trace does not have what a replay needs.
    """
    check_begin(trace)
    return _StepByStep(trace).run()


def check_begin(trace: Trace) -> None:
    """Check that a trace begins with the engine.

    Raises:
        UsageError: it does not.
    """
    for first in trace.steps[:1]:
        if first.step or {*first.waiting, *first.running} - first.arrived.keys():
            raise UsageError(
                "the trace begins in the middle of a run: record one with `nanovllm serve --trace`"
            )


def has_failed(record: StepRecord) -> bool:
    """Return whether the engine has lost requests before a step: others were to blame for it."""
    shares = {share.request_id for share in record.requests}
    lost = record.finished.keys() - record.aborted.keys() - shares
    return any(record.finished[name] == "error" for name in lost)


def config_of(settings: TraceSettings) -> ResolvedConfig:
    """Return the settings of the engine that wrote a trace, as far as they decide its plans.

    Raises:
        UsageError: the trace does not state them, or others have decided its plans, too.
    """
    if settings.async_scheduling is None:
        raise UsageError(
            "the trace does not state the settings that decide plans: record it again, with this "
            "version of nanovllm"
        )
    if settings.in_lock_step:
        raise UsageError(
            "the trace is of an engine in lock-step with others: replay one of an engine that "
            "steps alone"
        )
    if settings.kv_connector not in ("", *PEER_CONNECTORS):
        raise UsageError(
            f"the trace does not state what the store of kv_connector {settings.kv_connector!r} "
            f"held: replay one without it, or with {' or '.join(PEER_CONNECTORS)}"
        )
    given = EngineConfig(
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        batching_policy=settings.batching_policy or "chunked",
        enable_prefix_caching=bool(settings.enable_prefix_caching),
        enable_chunked_prefill=settings.enable_chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        max_step_ms=settings.max_step_ms,
        scheduling_policy=settings.scheduling_policy,
        preemption_mode=settings.preemption_mode,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        speculative_config=settings.speculative_config or None,
        kv_connector=settings.kv_connector or None,
    )
    return ResolvedConfig(
        given=given,
        max_model_len=settings.max_request_tokens,
        max_request_tokens=settings.max_request_tokens,
        token_budget=settings.token_budget,
        async_scheduling=settings.async_scheduling,
        num_kv_blocks=settings.num_blocks,
        num_host_blocks=settings.num_host_blocks,
    )


class RecordedNgrams(NgramProposer):
    """Drafts as many tokens as the recorded request had in its next step."""

    def __init__(self, samples: deque[Sample]) -> None:
        super().__init__(1, 1)
        self.samples = samples

    def propose(self, token_ids: list[int], count: int) -> list[int]:
        """Return the drafts."""
        return [TOKEN] * min(count, self.samples[0].num_drafts if self.samples else count)


class RecordedTransfers(KVConnectorScheduler):
    """Takes the place of a connector between prefill and decode engines."""

    def __init__(self, config: EngineConfig, steps: Sequence[StepRecord]) -> None:
        super().__init__(config, identity={}, ranks=())
        # Requests that load their prompt's KV once there are blocks for it, and those whose blocks
        # are held after their end.
        self.remote: set[str] = set()
        self.held: set[str] = set()
        loaded: set[str] = set()
        ended: set[str] = set()
        for record in steps:
            loaded |= record.held.keys() & record.waiting
            self.held |= ended.intersection(record.held, *(each.sent for each in record.transfers))
            self.remote |= {name for name, each in record.arrivals.items() if each.is_remote}
            self.remote -= {share.request_id for share in record.requests} - loaded
            ended |= record.finished.keys()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See `ConsumerSide`."""
        is_remote = request.request_id in self.remote
        return (request.num_prompt_tokens - num_computed_tokens) * is_remote, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Load the KV of each request once."""
        self.remote.discard(request.request_id)

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """See `KVConnectorScheduler`."""
        return request.request_id in self.held, None


class ReplayedEngine(StepRecorder, Executor):
    """The engine's loop and scheduler on a virtual clock. This class takes the place of the ranks,
    whose results are the recorded ones, and of the engine's recorder.

    Args:
        trace: of the recorded engine.
        replayed: gets the records of the steps that this engine makes; None: they are not kept.

    Attributes:
        now: the virtual time, in seconds.
        samples: by request, the samples that it did not get yet.
    """

    def __init__(self, trace: Trace, replayed: Trace | None = None) -> None:
        config = config_of(trace.settings)
        connector = None
        peers = Peers()
        if config.given.kv_transfer is not None:
            connector = RecordedTransfers(config.given, trace.steps)
            peers.may_free_blocks = True
            peers.is_quiet = True
        scheduler = create_scheduler(config, create_manager(config), connector)
        super().__init__(replayed, scheduler)
        self.now = 0.0
        settings = loop_settings(config)
        self.core = EngineCore(scheduler, self, settings, peers, clock=lambda: self.now)
        self.core.recorder = self
        self.recorded = recorded_requests(trace.steps)
        self.samples: dict[str, deque[Sample]] = {}
        self._reasons: dict[str, str] = {}
        self._speculation = [f for f in scheduler.features if isinstance(f, Speculation)]

    # ---------------------------------------------------------------- what happened

    def events(self, record: StepRecord, live: Container[str]) -> list[Event]:
        """Return what happened before a step, in order.

        Args:
            live: ids of the requests that have not ended.
        """
        core = self.core
        planned = record.planned or record.start
        arrivals = [
            Event(arrival.in_flight, arrival.time, functools.partial(self._add, name, record))
            for name, arrival in record.arrivals.items()
        ]
        resets = [Event(n, planned, core.reset_prefix_cache) for n in record.cache_resets]
        aborts = {
            name: Event(n, planned, functools.partial(core.abort_request, name, reason))
            for name, n in record.aborted.items()
            # Those whose KV did not arrive have ended with a transfer.
            if (reason := record.finished[name]) != "error"
        }
        # A request that has not arrived yet is aborted after it has.
        first = [aborts.pop(name) for name in list(aborts) if name in live]
        transfers = [
            Event(ended.in_flight, planned, functools.partial(self._end_transfers, ended))
            for ended in record.transfers
        ]
        return [*resets, *first, *arrivals, *aborts.values(), *transfers]

    def _add(self, name: str, record: StepRecord) -> None:
        """Queue a request that the scheduler treats like the recorded one."""
        arrival = record.arrivals[name]
        params = SamplingParams(
            max_tokens=arrival.max_tokens,
            ignore_eos=True,
            stop_token_ids=[STOP],
            presence_penalty=float(arrival.looks_back),
            prompt_logprobs=0 if arrival.prompt_logprobs else None,
            num_speculative_tokens=arrival.num_speculative_tokens,
        )
        prompt = [TOKEN] * record.arrived[name]
        self.core.add_request(EngineRequest(name, prompt, params, priority=arrival.priority))

    def _end_transfers(self, ended: TransfersEnded) -> None:
        output = KVConnectorOutput(
            finished_sending=set(ended.sent),
            finished_recving=set(ended.received),
            invalid_block_ids={name: set(ids) for name, ids in ended.invalid_blocks.items()},
            reasons=dict.fromkeys(ended.failed, "as recorded"),
        )
        transfer_of(self.scheduler).update_from_transfers(output, self.scheduler)

    def arrived(self, request: Request, time: float) -> None:
        """Give a request what the trace says of it."""
        number = self._num_arrivals
        recorded = self.recorded[number]
        size = self.scheduler.manager.block_size
        # All blocks that it may fill. Equal blocks have equal names, as their hashes were equal.
        request.block_hashes = [
            b"%d %d" % (first_with_block(self.recorded, number, i, size), i)
            for i in range(request.max_num_tokens // size)
        ]
        samples = self.samples[request.request_id] = deque(recorded.samples)
        self._reasons[request.request_id] = "" if recorded.is_aborted else recorded.reason
        for speculation in self._speculation:
            speculation.history_of(request).ngrams = RecordedNgrams(samples)
        super().arrived(request, recorded.arrival.time)

    # ---------------------------------------------------------------- as the ranks

    def result(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Return what the recorded requests got when they had computed as much."""
        result = ModelRunnerOutput()
        for share in plan.requests:
            if share.samples:
                tokens = self._sample(share.request_id, share.samples)
                result.sampled[share.request_id] = tokens
        drafts = num_drafts_wanted(plan).items()
        result.extras[DRAFTS] = {name: [TOKEN] * count for name, count in drafts}
        return result

    def _sample(self, name: str, most: int) -> list[SampledToken]:
        """Return a request's next tokens."""
        samples = self.samples[name]
        num_tokens = min(most, samples.popleft().num_tokens if samples else most)
        tokens = [SampledToken(TOKEN) for _ in range(num_tokens)]
        if not samples and self._reasons[name] == "stop":
            tokens[-1].token_id = STOP
        elif not samples and self._reasons[name] == "error":
            tokens[0].error = "as recorded"
        return tokens

    def forget_requests(self) -> None:
        """A step has failed; the caller learns why."""


class _StepByStep(ReplayedEngine):
    """Gives events to the engine before the steps before which they happened, and compares each
    step.

    Attributes:
        expected: the next record of the trace; None once it was compared.
        in_flight: the records of steps whose results are missing.
        num_steps: steps that are equal.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.steps = trace.steps
        self.expected: StepRecord | None = None
        self.in_flight: deque[StepRecord] = deque()
        self.num_steps = 0

    def run(self) -> ReplayResult:
        """Replay all steps, or those up to the first that differs."""
        for record in self.steps:
            if has_failed(record):
                failed = f"the recorded engine failed before step {record.step}"
                return ReplayResult(self.num_steps, ended_by=failed)
            self.expected = record
            try:
                self._replay(record)
            except (Difference, InvariantError, LookupError, ValueError) as error:
                return ReplayResult(self.num_steps, f"step {record.step} differs: {error}")
        return ReplayResult(self.num_steps)

    def _replay(self, record: StepRecord) -> None:
        events = self.events(record, self.scheduler.queues.requests.keys())
        for event in sorted(events, key=lambda event: -event.in_flight):
            while len(self.in_flight) > event.in_flight:
                self._step(record)
            event.action()
        while record.requests and self.expected is record:
            self._step(record)
        if self.expected is record and not self.in_flight:
            self._look(record)

    def _step(self, record: StepRecord) -> None:
        """Let the engine plan a step, or take a result."""
        self.now = record.start
        num_in_flight = len(self.in_flight)
        self.core.step()
        if self.expected is record and len(self.in_flight) == num_in_flight:
            raise Difference("replayed, it has nothing to compute")

    def _look(self, record: StepRecord) -> None:
        """Compare the state of an engine that has planned nothing."""
        if self._held() != record.held:  # it has begun to load KV
            self.core.step()
        mine = self.begin(SchedulerOutput(), record.step, record.start)
        self.finish(mine, 0.0, ModelRunnerOutput(), [])

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Return a function that returns a step's recorded result."""

        def wait() -> ModelRunnerOutput:
            record = self.in_flight[0]
            self.now = round(record.start + record.duration, 6)
            return self.result(plan)

        return wait

    def flush(self, step: int, start: float, is_idle: bool = True) -> None:
        """The trace states when the recorded engine did this."""

    def begin(self, plan: SchedulerOutput, step: int, start: float) -> StepRecord:
        """Compare a step.

        Raises:
            Difference: it is not the recorded one.
        """
        mine = super().begin(plan, step, start)
        recorded = self.expected or replace(mine, requests=[])
        shares = [replace(share, sampled=[]) for share in recorded.requests]
        compare("requests", mine.requests, shares)
        for name in COMPARED:
            read = operator.attrgetter(name)
            compare(name, read(mine), read(recorded))
        self.expected = None
        if recorded.requests:
            self.in_flight.append(recorded)
            self.num_steps += 1
        return mine

    def finish(
        self,
        record: StepRecord | None,
        duration: float,
        result: ModelRunnerOutput,
        outputs: Iterable[EngineOutput],
    ) -> None:
        """Compare the requests that have ended with a step.

        Raises:
            Difference: they are not the recorded ones.
        """
        super().finish(record, duration, result, outputs)
        if record is not None and record.requests:
            recorded = self.in_flight.popleft()
            names = {share.request_id for share in record.requests}
            ends = [
                {name: why for name, why in each.finished.items() if name in names}
                for each in (record, recorded)
            ]
            compare(f"requests that ended with step {recorded.step}", ends[0], ends[1])


def compare(what: str, mine: object, recorded: object) -> None:
    """Compare what was planned with what was recorded.

    Raises:
        Difference: they differ.
    """
    if isinstance(mine, list) and isinstance(recorded, list) and mine != recorded:
        pairs = enumerate(itertools.zip_longest(mine, recorded))
        index, (mine, recorded) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        what = f"{what}[{index}]"
    if mine != recorded:
        raise Difference(f"{what}: replayed {mine}, recorded {recorded}")
