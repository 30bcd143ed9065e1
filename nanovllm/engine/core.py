"""The engine: scheduler, KV cache manager and runner in one loop. It works on token ids, not on
text.

Built by notebooks/18_engine.ipynb and 23, 25, 31, 42, 43, 91: edit it there.
"""

from __future__ import annotations

import pathlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats
from nanovllm.data.parts import load
from nanovllm.data.request import EngineOutput, EngineRequest, Request
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.distributed.activity import IDLE_SECONDS, waiting_for_others
from nanovllm.engine.start_log import log_start
from nanovllm.executor.base import create_executor, read_model_config
from nanovllm.kv.block_pool import InvariantError
from nanovllm.kv.manager import KVCacheManager
from nanovllm.kv.no_connector import NoConnector
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.text.prompts import EngineLimits

if TYPE_CHECKING:
    from nanovllm.engine.group import DataParallelCore
    from nanovllm.executor.uniproc import InProcessExecutor
    from nanovllm.kv.connector import KVConnectorScheduler
    from nanovllm.runner.runner import ModelRunner
    from nanovllm.scheduler.data_parallel import Waves
    from nanovllm.trace.recorder import RecordSink, StepRecorder
    from nanovllm.trace.trace import StepRecord, Trace


class NoRecorder:
    """Takes the place of a `StepRecorder` while no reader wants records: all its methods do
    nothing."""

    def flush(self, *arguments: object, **options: object) -> None:
        """Do nothing, like all methods here."""

    arrived = ended = begin = finish = start_over = ask_for_snapshot = unwatch = flush


class EngineCore:
    """Owns one model and its KV cache, and runs all requests, step by step.

    Args:
        config: the settings; the engine fills in those that are left open.
        trace: records every step; by default a file if `config.trace` names one.

    Attributes:
        recorder: records steps and requests; a `NoRecorder` while records have no reader.
    """

    def __init__(self, config: EngineConfig, trace: Trace | None = None) -> None:
        self.config = config
        folder = resolve_model(config.model, config.revision)
        self.model_config = read_model_config(config, folder)
        self.executor = create_executor(config, self.model_config, folder)
        try:
            num_blocks, num_host_blocks = self._allocate()
            self.connector = self._connect(folder)
        except BaseException:
            self.executor.close()
            raise
        self._reset(num_blocks, num_host_blocks)
        settings = TraceSettings(model=config.model_names[0]) | self.trace_settings
        if trace is None and config.trace is not None:
            trace = load("nanovllm.trace.trace:Trace", "a trace")(config.trace, settings)
        self.trace = trace
        self.recorder: StepRecorder | NoRecorder = NoRecorder()
        if trace is not None:
            trace.settings |= settings
            self.recorder = self._record_to(trace)
        self.num_steps = self._num_added = 0
        self.first_scheduled: dict[str, float] | None = None  # set by EngineLoop, which reports it
        self._started = time.perf_counter()
        # When the last step's results arrived, in seconds since the engine started.
        self._last_results = 0.0
        self._num_idle_steps = 0  # since the last step that computed something

    @cached_property
    def waves(self) -> Waves | None:
        """Decides when an engine in lock-step computes (`Waves`); None for any other engine."""
        if not self.config.in_lock_step:
            return None
        create = load("nanovllm.scheduler.data_parallel:Waves", "data_parallel_size")
        return cast("Waves", create())

    def _record_to(self, trace: Trace | None) -> StepRecorder:
        create = load("nanovllm.trace.recorder:StepRecorder", "a trace")
        return cast("StepRecorder", create(trace, self.scheduler))

    def _allocate(self) -> tuple[int, int]:
        """Have the ranks allocate their caches; returns the numbers of KV blocks on the device and
        in host memory."""
        config = self.config
        executor = self.executor
        num_blocks = executor.num_blocks
        config.check_limits(self.model_config.max_position_embeddings, num_blocks)
        config.settle(self.model_config.max_position_embeddings, num_blocks, executor.on_gpu)
        num_host_blocks = config.count_host_blocks(executor.bytes_per_block)
        executor.allocate(num_blocks, num_host_blocks)
        return num_blocks, num_host_blocks

    def _connect(self, folder: pathlib.Path) -> KVConnectorScheduler | NoConnector:
        """Create the scheduler's half of the KV connector; the ranks have their halves already."""
        if self.config.kv_transfer is None:
            return NoConnector()
        if self.config.in_lock_step:
            raise ValueError(
                "kv_role and kv_connector cannot be combined with experts that several engines "
                "share: do not set enable_expert_parallel, or use data_parallel_size 1"
            )
        create = load("nanovllm.kv_transfer.factory:create_scheduler_connector", "KV transfer")
        ranks = self.executor.collective_rpc("handshake_metadata")
        connector = create(self.config, self.model_config, folder, ranks)
        return cast("KVConnectorScheduler", connector)

    def _reset(self, num_blocks: int, num_host_blocks: int) -> None:
        """Create empty queues and an empty block pool; no step is in flight."""
        config = self.config
        self.manager = KVCacheManager(
            num_blocks, config.block_size, config.enable_prefix_caching, num_host_blocks
        )
        self.scheduler = Scheduler(self.config, self.manager, self.connector)
        self._in_flight: deque[StepInFlight] = deque()

    @property
    def runner(self) -> ModelRunner:
        """The runner of the only rank, if that is in this process.

        Raises:
            AttributeError: the ranks are in other processes.
        """
        return cast("InProcessExecutor", self.executor).runner

    @property
    def limits(self) -> EngineLimits:
        """The limits against which a front end checks requests."""
        config = self.config
        model = self.model_config
        assert config.max_model_len is not None
        connector = self.connector
        peers = [] if isinstance(connector, NoConnector) else [connector.information]
        return EngineLimits(
            max_model_len=config.max_model_len,
            max_request_tokens=config.max_request_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            generation_defaults=model.generation_defaults,
            kv_transfer=peers,
            scheduling_policy=config.scheduling_policy,
            disable_any_whitespace=config.structured_outputs.disable_any_whitespace,
        )

    @property
    def stats(self) -> EngineStats:
        """Queue lengths, memory and counters."""
        s = self.scheduler
        stats = EngineStats(
            num_running=len(s.running),
            num_waiting=len(s.waiting) + len(s.receiving),
            num_swapped=len(s.swapped),
            kv_cache_usage=self.manager.pool.usage,
            num_preemptions=s.num_preemptions,
            num_queried_tokens=s.num_queried_tokens,
            num_hit_tokens=s.num_hit_tokens,
            num_steps=self.num_steps,
            num_waves=self.waves.ended if self.waves is not None else 0,
            num_receiving=len(s.receiving),
            num_held_requests=len(self.manager.held),
            num_external_queried_tokens=s.num_external_queried_tokens,
            num_external_hit_tokens=s.num_external_hit_tokens,
        )
        if s.speculation is not None:
            stats.spec_decoding = s.speculation.stats
        return stats

    @property
    def trace_settings(self) -> TraceSettings:
        """The header of the engine's trace: sizes and policies, and which of several engines this
        is."""
        config = self.config
        settings = config.trace_settings(self.manager.pool.num_blocks)
        if config.data_parallel_size == 1:
            return settings
        return settings | TraceSettings(
            data_rank=config.data_parallel_rank, data_parallel_size=config.data_parallel_size
        )

    @property
    def has_unfinished(self) -> bool:
        """True while a request has not ended."""
        return self.scheduler.has_unfinished

    @property
    def has_work(self) -> bool:
        """True if there is a step to run: for this engine's requests or transfers; in lock-step,
        for the requests of any engine."""
        if self.waves is not None:
            return self.waves.running
        return self.has_unfinished or self.connector.has_work

    @property
    def engines(self) -> list[EngineCore]:
        """The engines that can be watched: this one. See `DataParallelCore.engines`."""
        return [self]

    @property
    def sources(self) -> list[object]:
        """Sockets that become readable when the next `step` has a notification to read."""
        return [*self.connector.sources, *self.executor.sources]

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to compute. The next step can then wait until a request arrives,
        one of `sources` is readable, or `idle_seconds` have passed."""
        if not self.has_work or self.config.kv_transfer is None:
            return not self.has_work
        waits = (
            self._num_idle_steps > 0
            and not self._in_flight
            and not self.executor.transfer_has_ended
        )
        return waits and not self.connector.has_news

    @property
    def idle_seconds(self) -> float | None:
        """Seconds that an idle engine may sleep if nothing arrives; None: no limit."""
        return PATIENT_SECONDS if self.has_work else self.connector.idle_seconds

    def add_request(self, source: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never run here; see `Scheduler.add_request`.
        """
        request = Request(source, self._num_added)
        if self.config.scheduling_policy == "fcfs":
            request.order = (0, self._num_added)
        self.connector.check_request(request)
        try:
            self.scheduler.add_request(request)
        except ValueError as error:
            self.connector.decline(request, str(error))
            raise
        self._num_added += 1
        self.recorder.arrived(source.request_id, request.num_prompt_tokens)

    def abort_request(self, request_id: str, reason: str = "abort") -> bool:
        """End a request between two steps and free its blocks; returns False if it has ended
        already."""
        self.connector.revoke(request_id)
        aborted = self.scheduler.abort_request(request_id)
        if aborted:
            self.recorder.ended(request_id, reason)
        self._drain_if_idle()
        return aborted

    def step(self) -> list[EngineOutput]:
        """Launch one step for the requests that the scheduler picks; returns new outputs. Without
        work, do nothing.

        After an error or Ctrl-C, it is unknown which parts of the KV cache the step has written.
        The engine then ends all requests, forgets all cached prefixes, and raises the error. It
        accepts new requests as before."""
        if not self.has_work:
            self.executor.forget_ends()
            return []
        with self._all_or_nothing():
            outputs = self._step()
            self._drain_if_idle()
            return outputs

    def _step(self) -> list[EngineOutput]:
        start = self._now()
        outputs = self._take_transfers() if self.config.kv_transfer is not None else []
        plan = self.scheduler.schedule()
        # The end of a transfer will free blocks.
        waits_for_transfers = (
            self.scheduler.receiving or self.manager.held or self.connector.has_news
        )
        self._num_idle_steps = self._num_idle_steps + 1 if plan.empty and not self._in_flight else 0
        if plan.empty and self.has_unfinished and not self._in_flight and not waits_for_transfers:
            raise InvariantError(f"requests wait, yet none could be scheduled: {plan.blocked_by}")
        if plan.empty and not self.config.in_lock_step and plan.connector_metadata is None:
            if waits_for_transfers and not self._in_flight:
                self.executor.forget_ends()  # the ranks have no transfer in flight
                with waiting_for_others():
                    time.sleep(IDLE_SECONDS)
            return outputs + self.take_results()  # finish the steps in flight first
        if plan.empty:
            # Launch an empty step. In lock-step, the other engines need this one's collectives.
            # Otherwise, the step only transfers KV.
            plan = SchedulerOutput(connector_metadata=plan.connector_metadata)
        self._launch(plan, start)
        outputs += self.take_results(keep=self._steps_ahead)
        while self._in_flight and all(
            s.plan.empty and s.plan.connector_metadata is not None for s in self._in_flight
        ):
            outputs += self.take_results()
        return outputs

    def _take_transfers(self) -> list[EngineOutput]:
        """Handle what the connector has received: requests of other engines, and the ends of
        transfers."""
        assert not isinstance(self.connector, NoConnector)
        received = self.connector.take_output()
        for request in received.requests:
            with suppress(ValueError):  # the connector has told the other engine
                self.add_request(request)
        for request_id in received.aborts:
            self.abort_request(request_id)
        update = load("nanovllm.scheduler.transfers:update_from_transfers", "KV transfer")
        failed: list[EngineOutput] = update(self.scheduler, received)
        for output in failed:
            self.recorder.ended(output.request_id, "error")
        return failed

    @property
    def _steps_ahead(self) -> int:
        """The most steps in flight when `step` returns. The scheduler plans the next step without
        their results. With `async_scheduling`, it may therefore schedule a finished request once
        more, and its result is discarded."""
        return self.config.pipeline_parallel_size - 1 or int(bool(self.config.async_scheduling))

    def _launch(self, plan: SchedulerOutput, start: float) -> None:
        plan.unfinished = self.has_unfinished
        counts = self.config.in_lock_step or not plan.empty
        record = self.recorder.begin(plan, self.num_steps, start) if counts else None
        wave = self.waves.ended if self.waves is not None else 0
        if plan.admitted and self.first_scheduled is not None:
            self.first_scheduled |= dict.fromkeys(plan.admitted, time.monotonic())
        self._in_flight.append(StepInFlight(plan, self.executor.launch(plan), record, start, wave))
        self.num_steps += counts

    def take_results(self, keep: int = 0) -> list[EngineOutput]:
        """Wait for the oldest step in flight, and pass its result to the scheduler; returns the
        outputs for the front end.

        Return [] immediately while at most `keep` steps are in flight: the device still has work,
        so the engine can plan the next step. When no work is left, take all other steps in flight,
        too: `step` will not be called again.

        If no engine in lock-step has unfinished requests (`result.anyone_unfinished`), end the
        step's wave (`waves`). With `config.check_invariants`, the scheduler checks itself after
        each result. The time of a step is

            now - max(step.start, _last_results)    with `config.async_scheduling`: the device has
                                                    begun when it had finished the previous step
            now - step.start                        otherwise

        Then set `_last_results` to now, and the start of the step's record, if it has one, to the
        start in this formula. Pass record, time (in seconds, rounded to microseconds), result and
        outputs to `recorder.finish`, and plan and time to `scheduler.step_times.add`."""
        if len(self._in_flight) <= keep:
            return []
        step = self._in_flight.popleft()
        result = step.wait()
        outputs = self.scheduler.update_from_output(step.plan, result)
        if self.waves is not None and not result.anyone_unfinished:
            self.waves.end(step.wave)
        # In a pipeline, a step begins at its launch, because the first stage is free.
        before = self._last_results if self.config.async_scheduling else 0.0
        start = max(step.start, before)
        self._last_results = self._now()
        if step.record is not None:
            step.record.start = start
        self.recorder.finish(step.record, round(self._last_results - start, 6), result, outputs)
        self.scheduler.step_times.add(step.plan, self._last_results - start)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.add(step.plan, self._last_results - start)
        if self.config.check_invariants:
            self.scheduler.check_invariants()
        return outputs if self.has_work else outputs + self.take_results()

    def _now(self) -> float:
        """Return the seconds since the engine started, rounded to microseconds as in a trace."""
        return round(time.perf_counter() - self._started, 6)

    def _drain_if_idle(self) -> None:
        """When idle, drain steps in flight and flush the trace."""
        if not self.has_work:
            with self._all_or_nothing():
                self.take_results()
        if not self._in_flight:
            self.recorder.flush(self.num_steps, self._now(), is_idle=not self.has_work)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        lost = list(self.scheduler.requests)
        self._reset(self.manager.pool.num_blocks, self.manager.host_pool.num_blocks)
        self.executor.forget_requests()
        self.connector.forget_requests()
        self.recorder.start_over(self.scheduler, lost)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.manager.pool.reset_prefix_cache()
        self.recorder.ask_for_snapshot()
        self._drain_if_idle()

    def watch(self, sink: RecordSink) -> None:
        """Pass a record of each further step to `sink`. The first record contains a snapshot. An
        idle engine sends it immediately. A sink that is already registered gets a new snapshot.
        Without a sink or a trace, nothing is recorded."""
        if isinstance(self.recorder, NoRecorder):
            self.recorder = self._record_to(None)
        self.recorder.watch(sink)
        self._drain_if_idle()

    def unwatch(self, sink: RecordSink) -> None:
        """Pass no more records to `sink`. Stop recording if there is no other sink and no trace."""
        if not self.recorder.unwatch(sink):
            self.recorder = NoRecorder()
            for step in self._in_flight:
                step.record = None

    def check_health(self) -> None:
        """Check that every rank is alive.

        Raises:
            ExecutorError: a rank is not.
        """
        self.executor.check_health()

    def close(self) -> None:
        """Finish the trace file, if there is one, and end ranks in other processes."""
        self.connector.close()
        self.executor.close()
        self.recorder.flush(self.num_steps, self._now())
        if self.trace is not None:
            self.trace.close()


def create_core(
    config: EngineConfig, trace: Trace | None = None, blocking: bool = True
) -> EngineCore | DataParallelCore:
    """Create the engine for these settings: an `EngineCore` or, with `data_parallel_size`, several
    engines with the same interface.

    Args:
        blocking: see `DataParallelCore`.

    Raises:
        ValueError: settings that do not fit.
        ExecutorError: a process could not start.
    """
    if config.is_divided:
        create = load("nanovllm.engine.group:DataParallelCore", "data_parallel_size")
        return cast("DataParallelCore", create(config, trace, blocking))
    core = EngineCore(config, trace)
    log_start(config, core.model_config, core.executor, core.manager.pool.num_blocks)
    return core


@dataclass
class StepInFlight:
    """A step in flight: its plan, the function that waits for its result, its record (None without
    a reader), its start, and its wave."""

    plan: SchedulerOutput
    wait: Callable[[], ModelRunnerOutput]
    record: StepRecord | None
    start: float
    wave: int


# Seconds that an engine sleeps while it only waits for KV transfers, before it checks their
# timeouts. Its ranks notify it when a transfer ends.
PATIENT_SECONDS = 0.25
