"""Puts a scheduler together: which features have a say, and in which order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nanovllm.core.engine import EngineSettings
from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.queues import Queues
from nanovllm.core.scheduler import Scheduler, SchedulerSettings
from nanovllm.data.parts import MissingPartError, load
from nanovllm.data.resolved_config import ResolvedConfig
from nanovllm.features.async_scheduling import OneStepAhead

if TYPE_CHECKING:
    from nanovllm.features.data_parallel.lock_step import LockStep
    from nanovllm.features.pipeline.scheduling import PipelineSteps
    from nanovllm.features.speculation.scheduling import Speculation
    from nanovllm.kv_transfer.connector import KVConnectorScheduler
    from nanovllm.kv_transfer.scheduling import KVTransfer

POLICIES = "nanovllm.features.batching_policies"


def create_manager(config: ResolvedConfig) -> KVCacheManager:
    """Create the manager of the KV blocks, all of which are free."""
    return KVCacheManager(
        config.num_kv_blocks,
        config.given.block_size,
        config.given.enable_prefix_caching,
        config.num_host_blocks,
    )


def create_scheduler(
    config: ResolvedConfig,
    manager: KVCacheManager,
    connector: KVConnectorScheduler | None = None,
    scheduler_class: type[Scheduler] = Scheduler,
    queues: Queues | None = None,
) -> Scheduler:
    """Create a scheduler with empty queues, and the features that the settings ask for.

    Args:
        config: the settings with which the engine runs.
        connector: the scheduler's half of the KV connector, if the engine has one.
        scheduler_class: for experiments, a class that decides in another way.
        queues: empty; by default new ones.
    """
    queues = queues or Queues()
    features = choose_features(config, queues, manager)
    choose_victim = None
    if connector is not None:
        create: type[KVTransfer] = load("nanovllm.kv_transfer.scheduling:KVTransfer", "KV transfer")
        kv_transfer = create(connector, queues, manager)
        features.append(kv_transfer)
        choose_victim = kv_transfer.choose_victim
    scheduler = scheduler_class(
        SchedulerSettings(
            token_budget=config.token_budget,
            max_num_seqs=config.given.max_num_seqs,
            max_request_tokens=config.max_request_tokens,
            swaps=config.given.preemption_mode == "swap",
        ),
        queues=queues,
        manager=manager,
        features=features,
        choose_victim=choose_victim,
    )
    if config.given.batching_policy != "chunked":
        scheduler.fill = load(f"{POLICIES}:prefill_first", "batching_policy")
    elif not scheduler.hooks.concerns_decodes:
        with contextlib.suppress(MissingPartError):
            scheduler.fill = load("nanovllm.features.decodes_first:decodes_first", "the fast path")
    return scheduler


def loop_settings(config: ResolvedConfig) -> EngineSettings:
    """Return the settings of the engine's loop."""
    stages = config.given.pipeline_parallel_size
    return EngineSettings(
        by_priority=config.given.scheduling_policy == "priority",
        steps_ahead=stages - 1 or int(config.async_scheduling),
        is_one_device=stages == 1,
        check_invariants=config.given.check_invariants,
    )


def choose_features(
    config: ResolvedConfig, queues: Queues, manager: KVCacheManager
) -> list[SchedulerHooks]:
    """Create the features that the settings ask for, in the order in which they are asked. If
    several have a reason why a request is not admitted, the trace shows that of the first one."""
    given = config.given
    features: list[SchedulerHooks] = []
    if given.speculative is not None:
        create: type[Speculation] = load(
            "nanovllm.features.speculation.scheduling:Speculation", "speculative_config"
        )
        features.append(create(given.speculative, queues, manager, given.max_num_seqs))
    if not given.enable_chunked_prefill:
        features.append(load(f"{POLICIES}:WholePrompts", "enable_chunked_prefill=False")())
    elif given.long_prefill_token_threshold > 0:
        long_prompts = load(f"{POLICIES}:LongPrompts", "long_prefill_token_threshold")
        features.append(long_prompts(given.long_prefill_token_threshold))
    # With another policy, a step is all prefill or all decode.
    if given.max_step_ms and given.batching_policy == "chunked":
        limit = load("nanovllm.features.step_time_limit:StepTimeLimit", "max_step_ms")
        features.append(limit(queues, given.max_step_ms, given.enable_chunked_prefill))
    if given.pipeline_parallel_size > 1:
        divide: type[PipelineSteps] = load(
            "nanovllm.features.pipeline.scheduling:PipelineSteps", "pipeline_parallel_size"
        )
        features.append(divide(queues, given.pipeline_parallel_size, given.max_num_seqs))
    elif config.async_scheduling:
        features.append(OneStepAhead(queues, needs_tokens=given.speculative is not None))
    if given.batching_policy == "static":
        features.append(load(f"{POLICIES}:StaticBatch", "batching_policy")(queues))
    waves = None
    if given.in_lock_step:
        keep_step: type[LockStep] = load(
            "nanovllm.features.data_parallel.lock_step:LockStep", "data_parallel_size"
        )
        lock_step = keep_step(queues)
        features.append(lock_step)
        waves = lock_step.waves
    if given.sleep is not None:
        create_clock = load("nanovllm.executor.virtual_clock:VirtualClock", "device 'sleep'")
        features.append(create_clock(queues, given.sleep.scale, waves))
    return features
