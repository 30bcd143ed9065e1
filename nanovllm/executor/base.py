"""Executors: how the engine hands each step to its ranks and gets back what they sampled."""

import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from nanovllm.data.checks import check_pipeline_parallel
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.models.config import ModelConfig


class ExecutorError(RuntimeError):
    """A rank has died, hangs, or failed during a step; the message says which rank and why. All
    other ranks have been ended."""


class Executor:
    """Runs steps on all ranks of one engine.

    Attributes:
        on_gpu: the ranks compute on GPUs.
        num_blocks: KV blocks for which every rank has room.
        bytes_per_block: device memory of one KV block, on the rank that needs most.
        sources: file descriptors or connections that become readable, at the latest, when a KV
            transfer of a rank has ended.
        transfer_has_ended: a rank has reported the end of a KV transfer that no step has taken in
            yet.
    """

    config: EngineConfig
    on_gpu: bool
    num_blocks: int
    bytes_per_block: int
    sources: Sequence[object] = ()
    transfer_has_ended: bool = False

    def collective_rpc(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of the `Worker` on every rank; returns the results by rank.

        Raises:
            ExecutorError: a rank has died, hangs, or failed.
        """
        raise NotImplementedError

    def _take_memory(self) -> None:
        """Take in what `Worker.memory` says on every rank."""
        counts, sizes, on_gpu = zip(*self.collective_rpc("memory"), strict=True)
        self.num_blocks = min(counts)
        self.bytes_per_block = max(sizes)
        self.on_gpu = on_gpu[0]

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Have every rank allocate its caches and buffers; the settings are complete now."""
        self.collective_rpc("allocate", self.config, num_blocks, num_host_blocks)

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step; returns a function that waits for its result. Steps run in the order of the
        calls, and their results must be fetched in that order.

        Raises:
            ExecutorError: here or while waiting.
        """
        raise NotImplementedError

    def forget_ends(self) -> None:
        """Drop notifications that a KV transfer has ended. Call this when the next step asks every
        rank what has ended, or when no transfer is in flight: a notification can arrive after the
        step that has taken in its transfer's end, and would wake an idle engine again and again."""

    def forget_requests(self) -> None:
        """Drop the state of all requests after a step was broken off."""
        self.collective_rpc("forget_requests")

    def check_health(self) -> None:
        """Check that every rank is alive.

        Raises:
            ExecutorError: a rank is not.
        """

    def close(self) -> None:
        """End all other processes and remove temporary files."""


# Backend -> module and class, imported when chosen.
EXECUTORS = {
    "uni": "nanovllm.executor.uniproc:InProcessExecutor",
    "mp": "nanovllm.executor.multiprocess:MultiprocessExecutor",
    "external_launcher": "nanovllm.executor.torchrun:TorchrunExecutor",
    "ray": "nanovllm.executor.ray:RayExecutor",
}


def choose_backend(config: EngineConfig) -> str:
    """The name in `EXECUTORS` that "auto" stands for."""
    if config.distributed_executor_backend != "auto":
        return config.distributed_executor_backend
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "external_launcher"
    return "uni" if config.world_size == 1 else "mp"


def is_follower(config: EngineConfig) -> bool:
    """True in a process that torchrun has started and that is not rank 0, which owns the engine.
    See `torchrun.follow_to_the_end`."""
    return choose_backend(config) == "external_launcher" and int(os.environ.get("RANK", "0")) > 0


def read_model_config(config: EngineConfig, folder: pathlib.Path) -> ModelConfig:
    """The checkpoint's configuration, together with what the engine's settings say about sampling
    defaults and experts. Does not import torch, so that a setting that does not fit the model shows
    at once.

    Raises:
        ValueError: the model is not supported, or the settings do not fit it.
    """
    model_config = ModelConfig.from_pretrained(folder)
    config.check_limits(model_config.max_position_embeddings, config.num_kv_blocks)
    if config.generation_config == "vllm":
        model_config.generation_defaults = {}
    if model_config.moe is not None:
        model_config = replace(model_config, moe=model_config.moe.with_settings(config))
    elif config.enable_eplb:
        raise ValueError(f"enable_eplb: {model_config.architecture} has no experts; do not set it")
    if model_config.quantization or config.quantization != "auto" or config.quantize_head:
        with_settings = load("nanovllm.checkpoint.quantization:with_settings", "quantization")
        model_config = replace(
            model_config, quantization=with_settings(model_config.quantization, config)
        )
    if config.world_size > 1:
        check_tensor_parallel = load(
            "nanovllm.executor.grid:check_tensor_parallel", "an engine of several processes"
        )
        check_tensor_parallel(model_config, config.tensor_parallel_size)
        check_pipeline_parallel(model_config.num_layers, config.pipeline_parallel_size)
    return model_config


def create_executor(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
) -> Executor:
    """The executor that the settings ask for, with the model loaded on every rank.

    Raises:
        ValueError: the model or this machine cannot take the grid; nothing has been loaded.
        ExecutorError: a rank could not start.
    """
    several = "an engine of several processes"
    backend = choose_backend(config)
    if backend != "uni" or config.enable_expert_parallel:
        load("nanovllm.executor.grid:check_grid", several)(config, model_config)
    return cast(Executor, load(EXECUTORS[backend], several)(config, model_config, folder))
