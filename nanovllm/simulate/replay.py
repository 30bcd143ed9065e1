"""Replays a recorded run: gives its arrivals, results and step times to the real engine's loop and
scheduler, on a virtual clock, and compares each step that is planned with the recorded one."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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
from nanovllm.kv_transfer.scheduling import KVTransfer
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
# An event between two steps, with the number of steps whose results were missing.
Event = tuple[int, Callable[[], object]]
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


class Difference(Exception):
    """A step differs from the recorded one."""


def replay(trace: Trace) -> ReplayResult:
    """Replay the trace of an engine's whole life, as `nanovllm serve --trace` and `LLM(trace=True)`
    record it.

    Raises:
        UsageError: the trace does not have what a replay needs.
    """
    for first in trace.steps[:1]:
        if first.step or {*first.waiting, *first.running} - first.arrived.keys():
            raise UsageError(
                "the trace begins in the middle of a run: record one with `nanovllm serve --trace`"
            )
    return _Replay(trace).run()


def run(path: str) -> int:
    """Replay a file, and print the result. Return the command's exit status: 1 if a step differs.

    Raises:
        UsageError: the file cannot be replayed.
    """
    result = replay(Trace.load(path))
    print(result)
    return int(bool(result.difference))


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


class BlockNames:
    """Names of the blocks of all requests of a trace, equal for blocks with equal tokens. They take
    the place of the blocks' hashes."""

    def __init__(self, trace: Trace) -> None:
        self._block_size = trace.settings.block_size
        # By arrival: request id, prompt length, and which arrival had how many of the first blocks.
        self._arrivals: list[tuple[str, int, tuple[int, int]]] = []
        # The same of blocks with output.
        self._prefixes: dict[int, tuple[int, int]] = {}
        self._num_sampled: Counter[str] = Counter()
        numbers: dict[str, int] = {}
        for record in trace.steps:
            for name, length in record.arrived.items():
                numbers[name] = len(self._arrivals)
                self._arrivals.append((name, length, record.arrivals[name].prefix or (0, 0)))
            self._prefixes |= {numbers[name]: prefix for name, prefix in record.prefixes.items()}
            for share in record.requests:
                self._num_sampled[share.request_id] += len(share.sampled)

    def of(self, number: int) -> list[bytes]:
        """Return the names of an arrival's full blocks, those with output included."""
        name, length, _ = self._arrivals[number]
        count = (length + self._num_sampled[name]) // self._block_size
        return [b"%d %d" % (self._first_with(number, i), i) for i in range(count)]

    def _first_with(self, number: int, index: int) -> int:
        """Return which arrival was the first with this block."""
        while True:
            _, length, (owner, count) = self._arrivals[number]
            if index >= length // self._block_size:
                owner, count = self._prefixes.get(number, (0, 0))
            if index >= count:
                return number
            number = owner


class ManyDrafts(NgramProposer):
    """Drafts as many tokens as the scheduler wants."""

    def propose(self, token_ids: list[int], count: int) -> list[int]:
        """Return the drafts."""
        return [TOKEN] * count


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


class _Replay(StepRecorder, Executor):
    """Takes the places of the engine's ranks, whose results are the recorded ones, and of its
    recorder, which compares each step.

    Attributes:
        now: the virtual time, in seconds.
        expected: the next record of the trace; None once it was compared.
        in_flight: the records of steps whose results are missing.
        num_steps: steps that are equal.
    """

    def __init__(self, trace: Trace) -> None:
        config = config_of(trace.settings)
        connector = None
        peers = Peers()
        if config.given.kv_transfer is not None:
            connector = RecordedTransfers(config.given, trace.steps)
            peers.may_free_blocks = True
        scheduler = create_scheduler(config, create_manager(config), connector)
        super().__init__(None, scheduler)
        self.now = 0.0
        settings = loop_settings(config)
        self.core = EngineCore(scheduler, self, settings, peers, clock=lambda: self.now)
        self.core.recorder = self
        self.steps = trace.steps
        self.names = BlockNames(trace)
        self.speculation = [f for f in scheduler.features if isinstance(f, Speculation)]
        self.expected: StepRecord | None = None
        self.in_flight: deque[StepRecord] = deque()
        self.num_steps = 0

    def run(self) -> ReplayResult:
        """Replay all steps, or those up to the first that differs."""
        for record in self.steps:
            shares = {share.request_id for share in record.requests}
            lost = record.finished.keys() - record.aborted.keys() - shares
            if any(record.finished[name] == "error" for name in lost):
                failed = f"the recorded engine failed before step {record.step}"
                return ReplayResult(self.num_steps, ended_by=failed)
            self.expected = record
            try:
                for in_flight, event in self._events(record):
                    while len(self.in_flight) > in_flight:
                        self._step(record)
                    event()
                while record.requests and self.expected is record:
                    self._step(record)
                if self.expected is record and not self.in_flight:
                    self._look(record)
            except (Difference, InvariantError, LookupError, ValueError) as error:
                return ReplayResult(self.num_steps, f"step {record.step} differs: {error}")
        return ReplayResult(self.num_steps)

    def _step(self, record: StepRecord) -> None:
        """Let the engine plan a step, or take a result."""
        for share in record.requests:
            if (request := self.scheduler.queues.requests.get(share.request_id)) is not None:
                del request.extra_token_ids[share.num_drafts :]
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

    def flush(self, step: int, start: float, is_idle: bool = True) -> None:
        """The trace states when the recorded engine did this."""

    def _events(self, record: StepRecord) -> list[Event]:
        """Return what happened before a step, in order."""
        core = self.core
        aborts: dict[str, Event] = {
            name: (in_flight, functools.partial(core.abort_request, name, record.finished[name]))
            for name, in_flight in record.aborted.items()
            if record.finished[name] != "error"  # its KV did not arrive
        }
        arrivals: list[Event] = [
            (arrival.in_flight, functools.partial(self._add, name, record))
            for name, arrival in record.arrivals.items()
        ]
        resets: list[Event] = [(count, core.reset_prefix_cache) for count in record.cache_resets]
        # A request that has not arrived yet is aborted after it has.
        live = core.scheduler.queues.requests.keys()
        first = [aborts.pop(name) for name in list(aborts) if name in live]
        transfers: list[Event] = [
            (ended.in_flight, functools.partial(self._end_transfers, ended))
            for ended in record.transfers
        ]
        events = [*resets, *first, *arrivals, *aborts.values(), *transfers]
        return sorted(events, key=lambda event: -event[0])

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
        transfer = self.scheduler.external_kv
        assert isinstance(transfer, KVTransfer)
        output = KVConnectorOutput(
            finished_sending=set(ended.sent),
            finished_recving=set(ended.received),
            invalid_block_ids={name: set(ids) for name, ids in ended.invalid_blocks.items()},
            reasons=dict.fromkeys(ended.failed, "as recorded"),
        )
        transfer.update_from_transfers(output, self.scheduler)

    # ---------------------------------------------------------------- as the ranks

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Return a function that returns a step's recorded result."""
        return functools.partial(self._result, plan)

    def _result(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        record = self.in_flight[0]
        self.now = round(record.start + record.duration, 6)
        result = ModelRunnerOutput()
        for share in record.requests:
            reason = record.finished.get(share.request_id)
            if tokens := [SampledToken(TOKEN) for _ in share.sampled]:
                tokens[-1].token_id = STOP if reason == "stop" else TOKEN
                tokens[0].error = "as recorded" if reason == "error" else ""
                result.sampled[share.request_id] = tokens
        drafts = num_drafts_wanted(plan).items()
        result.extras[DRAFTS] = {name: [TOKEN] * count for name, count in drafts}
        return result

    def forget_requests(self) -> None:
        """Called after a difference was found, which ends the replay."""

    # ---------------------------------------------------------------- as the recorder

    def arrived(self, request: Request, time: float) -> None:
        """Name a request's blocks as in the recorded run."""
        request.block_hashes = self.names.of(self._num_arrivals)
        for speculation in self.speculation:
            speculation.history_of(request).ngrams = ManyDrafts(1, 1)
        super().arrived(request, time)

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
