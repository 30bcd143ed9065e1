"""Chooses the executor, once it is clear that the settings fit the model. Imports no torch before
that."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.checks import check_pipeline_parallel
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load
from nanovllm.executor.base import Executor, choose_backend, is_follower
from nanovllm.models.config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.checkpoint.quantization import QuantizationConfig
    from nanovllm.data.resolved_config import ResolvedConfig
    from nanovllm.data.sleep_config import SleepConfig
    from nanovllm.executor.uniproc import CreateWorker

SEVERAL = "an engine of several processes"
# What `choose_backend` returns -> module and class.
EXECUTORS = {
    "uni": "nanovllm.executor.uniproc:UniProcExecutor",
    "mp": "nanovllm.executor.multiprocess:MultiprocessExecutor",
    "external_launcher": "nanovllm.executor.torchrun:TorchrunExecutor",
    "ray": "nanovllm.executor.ray:RayExecutor",
}


def read_model_config(config: EngineConfig, folder: pathlib.Path) -> ModelConfig:
    """The checkpoint's configuration, together with what the engine's settings say about sampling
    defaults and experts. Does not import torch, so that a setting that does not fit the model shows
    at once.

    Raises:
        ValueError: the model is not supported, or the settings do not fit it.
    """
    model_config = ModelConfig.from_pretrained(folder)
    if config.sleep is not None:
        model_config = predicted_model(config, config.sleep, model_config)
    config.check_limits(model_config.max_position_embeddings, config.num_kv_blocks)
    if config.generation_config == "vllm":
        model_config.generation_defaults = {}
    if model_config.moe is not None:
        model_config = replace(model_config, moe=model_config.moe.with_settings(config))
    elif config.enable_eplb:
        raise ValueError(f"enable_eplb: {model_config.architecture} has no experts; do not set it")
    if model_config.quantization or config.quantization != "auto" or config.quantize_head:
        with_settings: Callable[..., QuantizationConfig] = load(
            "nanovllm.checkpoint.quantization:with_settings", "quantization"
        )
        model_config = replace(
            model_config, quantization=with_settings(model_config.quantization, config)
        )
    if config.world_size > 1:
        check_tensor_parallel: Callable[[ModelConfig, int], None] = load(
            "nanovllm.executor.grid:check_tensor_parallel", SEVERAL
        )
        check_tensor_parallel(model_config, config.tensor_parallel_size)
        check_pipeline_parallel(model_config.num_layers, config.pipeline_parallel_size)
    return model_config


def predicted_model(config: EngineConfig, sleep: SleepConfig, served: ModelConfig) -> ModelConfig:
    """Return the shape of the model for which the devices sleep, with the tokens of the served one.

    Raises:
        ValueError: an unknown model, or an executor on several machines.
    """
    if (backend := choose_backend(config)) not in ("uni", "mp"):
        raise ValueError(
            f"device 'sleep' does not work with distributed_executor_backend {backend!r}: its "
            "ranks need the clock of one machine; choose 'uni' or 'mp'"
        )
    if sleep.model is None:
        return served
    find: Callable[[str], ModelConfig] = load(
        "nanovllm.simulate.ranks:find_model_config", "device 'sleep'"
    )
    return replace(
        find(sleep.model),
        vocab_size=served.vocab_size,
        eos_token_ids=served.eos_token_ids,
        generation_defaults=served.generation_defaults,
    )


def create_executor(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
) -> Executor:
    """Create the executor that the settings ask for, with the model loaded on every rank.

    Raises:
        ValueError: the model or this machine cannot take the grid; nothing has been loaded.
        ExecutorError: a rank could not start.
    """
    backend = choose_backend(config)
    if backend != "uni" or config.enable_expert_parallel:
        check_grid: Callable[[EngineConfig, ModelConfig], None] = load(
            "nanovllm.executor.grid:check_grid", SEVERAL
        )
        check_grid(config, model_config)
    from nanovllm.assembly.runner import create_worker  # and torch

    create: Callable[[EngineConfig, ModelConfig, pathlib.Path, CreateWorker], Executor] = load(
        EXECUTORS[backend], SEVERAL
    )
    return create(config, model_config, folder, create_worker)


def allocate(executor: Executor, config: ResolvedConfig) -> None:
    """Have every rank allocate its caches and buffers."""
    from nanovllm.assembly.runner import runner_settings

    executor.allocate(runner_settings(config), config.num_kv_blocks, config.num_host_blocks)


def follow_rank_0(config: EngineConfig) -> None:
    """In a process that torchrun has started, with another rank than 0: compute for rank 0, and end
    with it. Anywhere else, do nothing.

    Raises:
        ValueError: see `torchrun.follow_to_the_end`.
    """
    if not is_follower(config):
        return
    follow: Callable[[EngineConfig, pathlib.Path, ModelConfig], NoReturn] = load(
        "nanovllm.executor.torchrun:follow_to_the_end", "torchrun"
    )
    folder = resolve_model(config.model, config.revision)
    follow(config, folder, read_model_config(config, folder))
