"""Puts a scheduler together: which features have a say, and in which order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.queues import Queues
from nanovllm.core.scheduler import Scheduler, SchedulerSettings
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import MissingPartError, load
from nanovllm.features.async_scheduling import OneStepAhead
from nanovllm.kv.manager import KVCacheManager

if TYPE_CHECKING:
    from nanovllm.features.lock_step import LockStep
    from nanovllm.features.pipeline import PipelineSteps
    from nanovllm.features.speculation.scheduling import Speculation
    from nanovllm.kv.connector import KVConnectorScheduler
    from nanovllm.kv_transfer.scheduling import KVTransfer

POLICIES = "nanovllm.features.batching_policies"


def create_scheduler(
    config: EngineConfig,
    manager: KVCacheManager,
    connector: KVConnectorScheduler | None = None,
    scheduler_class: type[Scheduler] = Scheduler,
) -> Scheduler:
    """Create a scheduler with empty queues, and the features that the settings ask for.

    Args:
        config: the settings, of which none is left open.
        connector: the scheduler's half of the KV connector, if the engine has one.
        scheduler_class: for experiments, a class that decides in another way.
    """
    queues = Queues()
    features = choose_features(config, queues, manager)
    kv_transfer = None
    if connector is not None:
        create: type[KVTransfer] = load("nanovllm.kv_transfer.scheduling:KVTransfer", "KV transfer")
        kv_transfer = create(connector, queues, manager)
        features.append(kv_transfer)
    scheduler = scheduler_class(
        SchedulerSettings(
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            max_request_tokens=config.max_request_tokens,
            swaps=config.preemption_mode == "swap",
        ),
        queues=queues,
        manager=manager,
        features=features,
        external_kv=kv_transfer,
    )
    if config.batching_policy != "chunked":
        scheduler.fill = load(f"{POLICIES}:prefill_first", "batching_policy")
    elif not scheduler.hooks.concerns_decodes:
        with contextlib.suppress(MissingPartError):
            scheduler.fill = load("nanovllm.features.decodes_first:decodes_first", "the fast path")
    return scheduler


def choose_features(
    config: EngineConfig, queues: Queues, manager: KVCacheManager
) -> list[SchedulerHooks]:
    """Create the features that the settings ask for, in the order in which they are asked. If
    several have a reason why a request is not admitted, the trace shows that of the first one."""
    features: list[SchedulerHooks] = []
    if config.speculative is not None:
        create: type[Speculation] = load(
            "nanovllm.features.speculation.scheduling:Speculation", "speculative_config"
        )
        features.append(create(config.speculative, queues, manager, config.max_num_seqs))
    if not config.enable_chunked_prefill:
        features.append(load(f"{POLICIES}:WholePrompts", "enable_chunked_prefill=False")())
    elif config.long_prefill_token_threshold > 0:
        long_prompts = load(f"{POLICIES}:LongPrompts", "long_prefill_token_threshold")
        features.append(long_prompts(config.long_prefill_token_threshold))
    # With another policy, a step is all prefill or all decode.
    if config.max_step_ms and config.batching_policy == "chunked":
        limit = load("nanovllm.features.step_time_limit:StepTimeLimit", "max_step_ms")
        features.append(limit(queues, config.max_step_ms, config.enable_chunked_prefill))
    if config.pipeline_parallel_size > 1:
        divide: type[PipelineSteps] = load(
            "nanovllm.features.pipeline:PipelineSteps", "pipeline_parallel_size"
        )
        features.append(divide(queues, config.pipeline_parallel_size, config.max_num_seqs))
    elif config.async_scheduling:
        features.append(OneStepAhead(queues, needs_tokens=config.speculative is not None))
    if config.batching_policy == "static":
        features.append(load(f"{POLICIES}:StaticBatch", "batching_policy")(queues))
    if config.in_lock_step:
        keep_step: type[LockStep] = load(
            "nanovllm.features.lock_step:LockStep", "data_parallel_size"
        )
        features.append(keep_step(queues))
    return features
