"""Puts an engine together: model, executor, memory, scheduler, peers and recorder."""

from __future__ import annotations

import functools
import pathlib
from typing import TYPE_CHECKING, cast

from nanovllm.assembly.executor import allocate, create_executor, read_model_config
from nanovllm.assembly.scheduling import create_manager, create_scheduler, loop_settings
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.core.engine import EngineCore
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.peers import Peers
from nanovllm.core.recorder import Recorder
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load
from nanovllm.data.resolved_config import ResolvedConfig, resolve
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.executor.base import Executor
from nanovllm.models.config import ModelConfig
from nanovllm.text.prompts import EngineLimits

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner
    from nanovllm.core.schedule import SchedulerOutput
    from nanovllm.executor.uniproc import UniProcExecutor
    from nanovllm.executor.virtual_clock import VirtualClock
    from nanovllm.kv_transfer.connector import KVConnectorScheduler
    from nanovllm.kv_transfer.scheduling import KVTransfer
    from nanovllm.trace.trace import Trace


class Engine(EngineCore):
    """An engine that was made from settings, and what others have to know of these.

    Args:
        config: the settings; the engine decides what they leave open.
        trace: records every step; by default a file if `config.trace` names one.

    Attributes:
        config: as given.
        resolved: the settings with which the engine runs.
        limits: the limits against which a front end checks requests.
        trace_settings: the header of the engine's trace: sizes and policies, and which of several
            engines this is.
    """

    executor: Executor

    def __init__(self, config: EngineConfig, trace: Trace | None = None) -> None:
        self.config = config
        folder = resolve_model(config.model, config.revision)
        self.model_config = read_model_config(config, folder)
        executor = create_executor(config, self.model_config, folder)
        try:
            self._assemble(executor, folder)
            self.trace = self._start_trace(trace)
        except BaseException:
            executor.close()
            raise

    def _assemble(self, executor: Executor, folder: pathlib.Path) -> None:
        config = self.config
        self.resolved = _resolve(config, self.model_config, executor)
        allocate(executor, self.resolved)
        connector = _connect(config, self.model_config, folder, executor)
        scheduler = create_scheduler(self.resolved, create_manager(self.resolved), connector)
        super().__init__(
            scheduler=scheduler,
            executor=executor,
            settings=loop_settings(self.resolved),
            peers=create_peers(scheduler, executor, connector),
            create_recorder=functools.partial(create_recorder, scheduler),
        )
        self.limits = limits_of(self.resolved, self.model_config, connector, executor.on_gpu)
        self.trace_settings = trace_settings_of(self.resolved)

    def _start_trace(self, trace: Trace | None) -> Trace | None:
        """Record all steps to a trace, or to the file that `config.trace` names, if there is
        one."""
        config = self.config
        settings = TraceSettings(model=config.model_names[0]) | self.trace_settings
        if trace is None and config.trace is not None:
            trace = load("nanovllm.trace.trace:Trace", "a trace")(config.trace, settings)
        if trace is not None:
            trace.settings |= settings
            self.recorder = create_recorder(self.scheduler, trace)
        return trace

    @functools.cached_property
    def virtual_clock(self) -> VirtualClock | None:
        """The clock by which steps are timed and recorded; None: that of the machine."""
        if self.config.sleep is None:
            return None
        kind: type[VirtualClock] = load(
            "nanovllm.executor.virtual_clock:VirtualClock", "device 'sleep'"
        )
        return next(each for each in self.scheduler.features if isinstance(each, kind))

    def _now(self) -> float:
        clock = self.virtual_clock
        return super()._now() if clock is None else clock.seconds(clock.now)

    def _launch(self, plan: SchedulerOutput, start: float, is_counted: bool) -> None:
        if self.virtual_clock is not None:
            start = self.virtual_clock.seconds(self.virtual_clock.ordered)
        super()._launch(plan, start, is_counted)

    @property
    def engines(self) -> list[Engine]:
        """The engines that can be watched: this one. See `DataParallelCore.engines`."""
        return [self]

    @property
    def idle_seconds(self) -> float | None:
        """Seconds that an idle engine may sleep if nothing arrives; None: no limit."""
        return self.peers.idle_seconds(self.has_work)

    @property
    def sources(self) -> list[object]:
        """Sockets that become readable when the next `step` has a notification to read."""
        return [*self.peers.sources, *self.executor.sources]

    def check_health(self) -> None:
        """Check that every rank is alive.

        Raises:
            ExecutorError: a rank is not.
        """
        self.executor.check_health()

    @property
    def manager(self) -> KVCacheManager:
        """The block tables and pools."""
        return self.scheduler.manager

    @property
    def runner(self) -> ModelRunner:
        """The runner of the only rank, if that is in this process.

        Raises:
            AttributeError: the ranks are in other processes.
        """
        return cast("UniProcExecutor", self.executor).runner


def _resolve(config: EngineConfig, model_config: ModelConfig, executor: Executor) -> ResolvedConfig:
    """Decide what the settings leave open, now that the ranks have the model and know how many KV
    blocks they have room for."""
    config.check_limits(model_config.max_position_embeddings, executor.num_blocks)
    return resolve(
        config,
        model_max_len=model_config.max_position_embeddings,
        num_kv_blocks=executor.num_blocks,
        num_host_blocks=config.count_host_blocks(executor.bytes_per_block),
        on_gpu=executor.on_gpu,
    )


def _connect(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path, executor: Executor
) -> KVConnectorScheduler | None:
    """Create the scheduler's half of the KV connector, if the settings ask for one; the ranks have
    their halves already."""
    if config.kv_transfer is None:
        return None
    if config.in_lock_step:
        raise ValueError(
            "kv_role and kv_connector cannot be combined with experts that several engines "
            "share: do not set enable_expert_parallel, or use data_parallel_size 1"
        )
    create = load("nanovllm.kv_transfer.factory:create_scheduler_connector", "KV transfer")
    ranks = executor.collective_rpc(
        load("nanovllm.kv_transfer.factory:handshake_metadata", "KV transfer")
    )
    return cast("KVConnectorScheduler", create(config, model_config, folder, ranks))


def create_peers(
    scheduler: Scheduler, executor: Executor, connector: KVConnectorScheduler | None
) -> Peers | None:
    """Create what connects the engine's loop to other engines; None for an engine alone."""
    if connector is not None:
        create = load("nanovllm.kv_transfer.peers:TransferPeers", "KV transfer")
        kind: type[KVTransfer] = load("nanovllm.kv_transfer.scheduling:KVTransfer", "KV transfer")
        kv_transfer = next(each for each in scheduler.features if isinstance(each, kind))
        return cast("Peers", create(kv_transfer, executor))
    # In lock-step, one of the scheduler's features.
    return next((each for each in scheduler.features if isinstance(each, Peers)), None)


def create_recorder(scheduler: Scheduler, trace: Trace | None = None) -> Recorder:
    """Create what records a scheduler's steps. Without a trace, only sinks get the records."""
    create = load("nanovllm.trace.recorder:StepRecorder", "a trace")
    return cast("Recorder", create(trace, scheduler))


def limits_of(
    config: ResolvedConfig,
    model_config: ModelConfig,
    connector: KVConnectorScheduler | None,
    on_gpu: bool,
) -> EngineLimits:
    """Return the limits against which a front end checks requests."""
    return EngineLimits(
        max_model_len=config.max_model_len,
        max_request_tokens=config.max_request_tokens,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        generation_defaults=model_config.generation_defaults,
        kv_transfer=[] if connector is None else [connector.information],
        scheduling_policy=config.given.scheduling_policy,
        disable_any_whitespace=config.given.structured_outputs.disable_any_whitespace,
        on_gpu=on_gpu,
    )


def trace_settings_of(config: ResolvedConfig) -> TraceSettings:
    """Return the header of an engine's trace; see `Engine.trace_settings`."""
    given = config.given
    if given.data_parallel_size == 1:
        return config.trace_settings
    return config.trace_settings | TraceSettings(
        data_rank=given.data_parallel_rank, data_parallel_size=given.data_parallel_size
    )
