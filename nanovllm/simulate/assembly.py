"""Puts a simulated engine together, as its settings want it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from nanovllm.assembly.scheduling import create_scheduler, loop_settings
from nanovllm.data.resolved_config import ResolvedConfig
from nanovllm.simulate.cost import StepCost
from nanovllm.simulate.decoding import DecodingQueues
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.pool import SimulatedManager
from nanovllm.simulate.runner import SimulatedRunner

if TYPE_CHECKING:
    from nanovllm.kv_transfer.connector import KVConnectorScheduler

EngineT = TypeVar("EngineT", bound=SimulatedEngine)


def create_engine(
    kind: Callable[..., EngineT],
    config: ResolvedConfig,
    cost: StepCost,
    *,
    connector: KVConnectorScheduler | None = None,
    runner: SimulatedRunner | None = None,
    copy_time: int = 0,
    fast: bool = True,
) -> EngineT:
    """Create an engine with these settings.

    Args:
        kind: its class.
        connector: see `create_scheduler`.
        runner, copy_time: see `SimulatedEngine`.
        fast: make steps in one call in which requests only decode, with equal results. Settings
            with which more happens, such as drafts, are simulated step by step. Between two calls,
            `manager.pool` does not show the blocks that such steps take, unless the engine is
            watched.
    """
    given = config.given
    manager = SimulatedManager(
        config.num_kv_blocks, given.block_size, given.enable_prefix_caching, config.num_host_blocks
    )
    makes_each_step = (
        not fast
        or connector is not None
        or given.speculative is not None
        or bool(given.max_step_ms)
        or given.batching_policy != "chunked"
        or given.pipeline_parallel_size > 1
    )
    group = None if makes_each_step else DecodingQueues(manager)
    scheduler = create_scheduler(config, manager, connector, queues=group)
    if group is not None:
        scheduler.fill = group.fill
        scheduler.hooks.may_plan = ()  # the tokens of simulated requests are always known
        scheduler.hooks.keeps_blocks = (group.settle_ended,)
        scheduler.choose_victim = group.settle_victim
    settings = loop_settings(config)
    return kind(
        scheduler,
        cost,
        steps_ahead=settings.steps_ahead,
        num_stages=given.pipeline_parallel_size,
        runner=runner,
        copy_time=copy_time,
        by_priority=settings.by_priority,
    )
