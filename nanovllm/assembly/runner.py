"""Puts a rank together: its groups, what runs its model, and the features of its runner."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from nanovllm.assembly.memory import num_blocks_that_fit
from nanovllm.assembly.model import LoadedModel, load_for_running
from nanovllm.attention.backends import backend_name
from nanovllm.attention.base import AttentionBackend
from nanovllm.core.forward import Forward
from nanovllm.core.runner import ModelRunner, RunnerSettings
from nanovllm.core.runner_hooks import RunnerHooks
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import MissingPartError, load
from nanovllm.data.resolved_config import ResolvedConfig
from nanovllm.executor.uniproc import Worker, WorkerSetup
from nanovllm.models.config import ModelConfig
from nanovllm.ops.device import choose_device, choose_dtype, zeros

if TYPE_CHECKING:
    from nanovllm.distributed.stage_link import StageLink
    from nanovllm.features.cuda_graphs.graphs import CudaGraph, GraphForward
    from nanovllm.features.pipeline.stage import StageForward
    from nanovllm.features.speculation.graphs import DraftGraphForward
    from nanovllm.features.speculation.speculator import Speculator
    from nanovllm.features.structured_output.masks import StructuredOutputManager

SEVERAL = "an engine of several processes"
GRAPHS = "nanovllm.features.cuda_graphs.graphs"


def create_worker(setup: WorkerSetup) -> Worker:
    """Make a rank: join the others, and load the model.

    Raises:
        ValueError: settings, a checkpoint or a device that do not fit.
    """
    config = setup.config
    if setup.init_method:
        _join(setup)
    leave: Callable[[], None] = (
        load("nanovllm.distributed.process_groups:destroy_groups", SEVERAL)
        if setup.init_method
        else lambda: None
    )
    if config.device == "sleep":
        create: Callable[..., Worker] = load(
            "nanovllm.assembly.sleeping:create_sleeping_worker", "device 'sleep'"
        )
        features = lock_step(config) + kv_transfer(config, setup.model_config)
        return create(setup, features, cache_maker(config), leave)
    runner = create_runner(config, setup.model_config, setup.folder)
    return Worker(
        runner,
        num_blocks=num_blocks_that_fit(runner, config, setup.model_config),
        description=describe(runner, config),
        leave=leave,
    )


def _join(setup: WorkerSetup) -> None:
    """Form the groups of ranks."""
    config = setup.config
    grid, _ = load("nanovllm.features.data_parallel.ranks:engine_grid", SEVERAL)(config)
    is_on_cpu = choose_device(config.device).type == "cpu"
    join = load("nanovllm.distributed.process_groups:initialize_groups", SEVERAL)
    join(
        grid,
        setup.rank,
        setup.init_method,
        "cpu" if is_on_cpu else f"cuda:{setup.local_rank}",
        disable_custom_all_reduce=config.disable_custom_all_reduce,
    )


def describe(runner: ModelRunner, config: EngineConfig) -> dict[str, str]:
    """Return what a rank computes with, in words, under the names of the settings."""
    device = str(runner.device)
    if runner.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(runner.device)})"
    return {
        "device": device,
        "dtype": str(choose_dtype(config.dtype, runner.device)).removeprefix("torch."),
        "kv_dtype": str(runner.kv_dtype).removeprefix("torch."),
        "attention_backend": backend_name(runner.forward.backend, config.attention_backend),
    }


def runner_settings(config: ResolvedConfig) -> RunnerSettings:
    """Return the sizes of a runner's caches and buffers."""
    return RunnerSettings(
        max_num_seqs=config.given.max_num_seqs,
        max_request_tokens=config.max_request_tokens,
        max_blocks=-(-config.max_request_tokens // config.given.block_size),
        token_budget=config.token_budget,
        max_num_samples=config.max_num_samples,
        max_decodes=config.max_decodes,
    )


def create_runner(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
) -> ModelRunner:
    """Load the model, and make what runs it, with the features that the settings ask for.

    Args:
        model_config: the model's shape.
        folder: the checkpoint.

    Raises:
        ValueError: this machine does not support the device, dtype or backend, or the weights do
            not fit in the GPU's memory.
    """
    loaded = load_for_running(config, model_config, folder)
    speculator = None
    if config.speculative is not None:
        create: type[Speculator] = load(
            "nanovllm.features.speculation.speculator:Speculator", "speculative_config"
        )
        speculator = create(config.speculative, loaded)
    return ModelRunner(
        create_forward(loaded, speculator),
        loaded.device,
        loaded.backend.kv_dtype or loaded.dtype,
        config.block_size,
        eos_token_ids=model_config.eos_token_ids,
        sampler=None if speculator is None else speculator.sampler,
        features=choose_features(loaded, speculator),
        make_cache=cache_maker(config),
    )


def create_forward(loaded: LoadedModel, speculator: Speculator | None) -> Forward:
    """Choose how the model runs: operator by operator or in graphs, as a whole or in stages."""
    config = loaded.config
    forward = Forward(loaded.model, loaded.backend)
    moe = loaded.model_config.moe
    # Expert parallelism needs the number of tokens per rank on the host, in the middle of a step.
    # A graph cannot wait for the host.
    needs_host = moe is not None and moe.enable_expert_parallel
    create_graph = graph_maker(loaded.device, loaded.backend, config.enforce_eager or needs_host)
    if create_graph is not None:
        forward = _create_graph_forward(loaded, speculator, create_graph)
    if config.pipeline_parallel_size == 1:
        return forward
    part = "pipeline_parallel_size"
    connect: type[StageLink] = load("nanovllm.distributed.stage_link:StageLink", part)
    stage: type[StageForward] = load("nanovllm.features.pipeline.stage:StageForward", part)
    link = connect(loaded.dtype, loaded.device)
    return stage(forward, link, reuses_output=create_graph is not None)


def _create_graph_forward(
    loaded: LoadedModel, speculator: Speculator | None, create_graph: Callable[[], CudaGraph]
) -> GraphForward:
    if speculator is None:
        record: type[GraphForward] = load(f"{GRAPHS}:GraphForward", "CUDA graphs")
        return record(loaded.model, loaded.backend, create_graph)
    record_drafts: type[DraftGraphForward] = load(
        "nanovllm.features.speculation.graphs:DraftGraphForward", "speculative_config"
    )
    return record_drafts(
        loaded.model,
        loaded.backend,
        create_graph,
        max_decode_tokens=1 + speculator.max_drafts,
        keep_outputs=speculator.keep_outputs,
    )


def graph_maker(
    device: torch.device, backend: AttentionBackend, is_eager: bool
) -> Callable[[], CudaGraph] | None:
    """Return a function that makes an empty CUDA graph; None if each step launches its kernels
    separately."""
    if device.type != "cuda" or is_eager or not backend.supports_graphs:
        return None
    create: type[CudaGraph] = load(f"{GRAPHS}:CudaGraph", "CUDA graphs")
    return partial(create, torch.cuda.Stream(device))


def choose_features(loaded: LoadedModel, speculator: Speculator | None) -> list[RunnerHooks]:
    """Create the features that take part in a step, in the order in which they are asked: KV
    transfer last, since its transfers end after all that others do in a step."""
    config = loaded.config
    features: list[RunnerHooks] = []
    if loaded.device.type != "cpu" and loaded.backend.compiles_kernels:
        num_heads = loaded.model_config.num_heads // config.tensor_parallel_size
        features.append(load(f"{GRAPHS}:WarmUp", "Triton")(num_heads))
    with contextlib.suppress(MissingPartError):  # the front end rejects grammars then
        forbid = load("nanovllm.features.structured_output.running:StructuredOutput", "grammars")
        features.append(forbid(partial(_create_masks, loaded)))
    if speculator is not None:
        features.append(speculator)
    features += lock_step(config)
    if config.enable_eplb:
        part = "enable_eplb"
        create_balancer = load("nanovllm.distributed.load_balancer:create_balancer", part)
        balancer = create_balancer(loaded.model, config.eplb_config or "{}")
        features.append(load("nanovllm.features.expert_balance:ExpertBalance", part)(balancer))
    return features + kv_transfer(config, loaded.model_config)


def lock_step(config: EngineConfig) -> list[RunnerHooks]:
    """Create the feature that joins the steps of other engines, if the engine steps with others."""
    if not config.in_lock_step:
        return []
    part = "data_parallel_size"
    return [load("nanovllm.features.data_parallel.lock_step:LockStepRunner", part)()]


def kv_transfer(config: EngineConfig, model_config: ModelConfig) -> list[RunnerHooks]:
    """Create the feature that moves KV, if the engine shares KV."""
    if config.kv_transfer is None:
        return []
    part = "KV transfer"
    create = load("nanovllm.kv_transfer.factory:create_worker_connector", part)
    connector = partial(create, config, model_config)
    return [load("nanovllm.kv_transfer.running:KVTransferRunner", part)(connector)]


def _create_masks(loaded: LoadedModel) -> StructuredOutputManager:
    create: type[StructuredOutputManager] = load(
        "nanovllm.features.structured_output.masks:StructuredOutputManager", "structured_outputs"
    )
    return create(loaded.config, loaded.model_config, loaded.folder)


def cache_maker(config: EngineConfig) -> Callable[..., Tensor]:
    """Return the function that makes a layer's cache `(shape, dtype, device)`."""
    if config.kv_transfer is None:
        return zeros
    choose = load("nanovllm.kv_transfer.factory:cache_maker", "KV transfer")
    return cast("Callable[..., Tensor]", choose(config))
