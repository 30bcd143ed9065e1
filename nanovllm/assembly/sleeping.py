"""Puts a rank with a sleeping device together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from nanovllm.assembly.memory import longest_request
from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import kv_cache_shape
from nanovllm.core.runner_hooks import RunnerHooks
from nanovllm.data.config import EngineConfig, parse_bytes
from nanovllm.data.parts import load
from nanovllm.data.sleep_config import SleepConfig
from nanovllm.distributed.groups import get_pp_group, get_tp_group, get_world_group
from nanovllm.distributed.pipeline_parallel import layer_range
from nanovllm.executor.rank_cost import RankCost
from nanovllm.executor.sleeping import SleepingForward, SleepingModel, SleepingRunner
from nanovllm.executor.uniproc import Worker, WorkerSetup
from nanovllm.executor.virtual_clock import TimelineWriter
from nanovllm.layers.tensor_parallel import num_kv_heads_of_rank
from nanovllm.models.config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.distributed.stage_link import StageLink

PART = "device 'sleep'"


def create_sleeping_worker(
    setup: WorkerSetup,
    features: Sequence[RunnerHooks],
    make_cache: Callable[..., torch.Tensor],
    leave: Callable[[], None],
) -> Worker:
    """Make a rank that sleeps instead of computing.

    Args:
        features: take part in each step.
        make_cache, leave: see `ModelRunner` and `Worker`.

    Raises:
        ValueError: an unknown machine or model, or settings for which there is no prediction.
    """
    config = setup.config
    sleep = config.sleep
    assert sleep is not None, "another device was asked for"
    create_clock = None
    if config.kv_transfer is not None:
        create_clock = load("nanovllm.executor.sleeping_transfers:ReadClock", "KV transfer")
    runner = SleepingRunner(
        _create_forward(config, sleep, setup),
        config.block_size,
        eos_token_ids=setup.model_config.eos_token_ids,
        features=features,
        make_cache=make_cache,
        create_read_clock=create_clock,
    )
    return Worker(
        runner,
        num_blocks=_count_blocks(runner, config, setup.model_config),
        description={
            "device": f"sleep ({sleep.machine}, {sleep.scale:g} s per predicted second)",
            "dtype": "predicted",
            "kv_dtype": "predicted",
            "attention_backend": "none",
        },
        leave=leave,
    )


def _create_forward(
    config: EngineConfig, sleep: SleepConfig, setup: WorkerSetup
) -> SleepingForward:
    model_config = setup.model_config
    create_cost: Callable[..., RankCost] = load("nanovllm.simulate.ranks:create_rank_cost", PART)
    stages = get_pp_group()
    tp = get_tp_group().world_size
    layers = layer_range(model_config.num_layers, stages.world_size, stages.rank_in_group)
    is_latent = model_config.kv_lora_rank > 0
    heads = num_kv_heads_of_rank(model_config.num_kv_heads, tp)
    # One byte per token, and per head unless all share a latent.
    shape = () if is_latent else kv_cache_shape(1, heads, config.block_size, 1)[1:]
    link = None
    if stages.world_size > 1:
        connect: type[StageLink] = load("nanovllm.distributed.stage_link:StageLink", PART)
        link = connect(torch.int64)
    rank = _rank_of_all(config)
    return SleepingForward(
        SleepingModel(layers, model_config.vocab_size),
        get_backend("torch", torch.device("cpu"), model_config.head_dim, is_latent),
        create_cost(config, sleep, str(setup.folder), layers),
        link,
        cache_shape=shape or (config.block_size, 1),
        slowdown=sleep.stragglers.get(str(rank), 1.0),
        scale=sleep.scale,
        timeline=TimelineWriter(sleep.timelines, _name_of(config, rank)),
    )


def _rank_of_all(config: EngineConfig) -> int:
    """Return this rank's number among those of all engines of a data-parallel group."""
    rank = get_world_group().rank
    if config.in_lock_step:  # these engines form one grid
        return rank
    return (config.data_parallel_rank or 0) * config.world_size + rank


def _name_of(config: EngineConfig, rank: int) -> str:
    """Return a rank's name, for its timeline."""
    roles = {"kv_producer": "prefill ", "kv_consumer": "decode "}
    role = "" if config.kv_transfer is None else roles.get(config.kv_transfer.kv_role, "")
    return f"{role}rank {rank}"


def _count_blocks(runner: SleepingRunner, config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the number of blocks for the KV pool, by the rules of `memory.num_blocks_that_fit`,
    but in the memory of the predicted device."""
    size = runner.bytes_per_block
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        return max(1, parse_bytes(config.kv_cache_memory, "kv_cache_memory") // size)
    longest = -(-longest_request(config, model_config) // config.block_size)
    count = runner.sleeper.cost.num_blocks(config)
    return min(count, config.max_num_seqs * longest)
