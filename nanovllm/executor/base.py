"""What the engine knows of its ranks: it hands them a plan, and gets back what they sampled."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.models.config import ModelConfig
from nanovllm.scheduler.data_parallel import engine_grid

if TYPE_CHECKING:
    from nanovllm.kv_transfer.pd.control import Mailbox
    from nanovllm.runner.runner import ModelRunner


class ExecutorError(RuntimeError):
    """A rank has died, hangs, or failed in mid-step; the message says which one and why. All others have been ended."""


class Executor:
    """Runs plans on all ranks of one engine.

    Attributes:
        on_gpu: the ranks compute on GPUs.
        bytes_per_block: device memory of one KV block, on the rank that needs most.
        is_broken: no plan can be run any more.
        is_in_process: there is no other process that could die.
        sources: become readable, at the latest, when a KV transfer of a rank has ended; empty if nothing tells of that.
    """

    on_gpu: bool
    bytes_per_block: int
    is_broken: bool = False
    is_in_process: bool = False
    sources: Sequence[Any] = ()

    @property
    def transfer_has_ended(self) -> bool:
        """True if a rank has reported the end of a transfer since the last step: the next step takes it in."""
        return False

    def forget_ends(self) -> None:
        """Drop notifications that a KV transfer has ended. Call this when the next step asks every rank what has ended, or when no
        transfer is in flight: a notification may come after the step that has taken in its transfer's end, and would wake an
        idle engine again and again."""

    def num_blocks_that_fit(self) -> int:
        """KV blocks for which every rank has room: the least over the ranks."""
        raise NotImplementedError

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Have every rank make its caches and buffers."""
        raise NotImplementedError

    def handshake_metadata(self) -> list[Any]:
        """How other engines' ranks reach those of this one, in order; see `kv_transfer`."""
        raise NotImplementedError

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step; returns what waits for its results. Plans are carried out in order, and their results fetched in
        that order.

        Raises:
            ExecutorError: here or while waiting.
        """
        raise NotImplementedError

    def forget_requests(self) -> dict[str, list[int]]:
        """Drop the state of all requests, once a step was broken off. Returns blocks to which peers of a rank may still write, by
        the KV transfer's id: until all ranks have said that it has ended."""
        raise NotImplementedError

    def check_health(self) -> None:
        """See that every rank is alive.

        Raises:
            ExecutorError: one is not.
        """

    def close(self) -> None:
        """End all other processes, and leave nothing behind."""


class InProcessExecutor(Executor):
    """One rank: this process."""

    is_in_process = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        from nanovllm.distributed.groups import initialize_groups
        from nanovllm.ops.device import choose_device
        from nanovllm.runner.runner import ModelRunner

        if config.in_lock_step:  # then this process is one rank of several, each with an engine of its own
            grid, rank = engine_grid(config)
            initialize_groups(
                grid,
                rank,
                init_method=config.data_parallel_address,
                device="cpu" if choose_device(config.device).type == "cpu" else "cuda:0",  # the only one it sees
                disable_custom_all_reduce=config.disable_custom_all_reduce,
            )
        self.runner: ModelRunner = ModelRunner(config, model_config, folder)
        self._ends: Mailbox | None = None  # of KV transfers
        self.on_gpu = self.runner.device.type != "cpu"
        self.bytes_per_block = self.runner.bytes_per_block

    def num_blocks_that_fit(self) -> int:
        """See `runner.memory.num_blocks_that_fit`."""
        from nanovllm.runner.memory import num_blocks_that_fit

        return num_blocks_that_fit(self.runner)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """See `ModelRunner.allocate`."""
        self.runner.allocate(num_blocks, num_host_blocks)
        if self.runner.config.kv_transfer is not None:
            from nanovllm.kv_transfer.pd.control import Mailbox

            mailbox = self._ends = Mailbox()
            self.runner.connector.notify = lambda: mailbox.put(None)
            self.sources = [mailbox.fileno()]

    def handshake_metadata(self) -> list[Any]:
        """Of the only rank."""
        return [self.runner.connector.get_handshake_metadata()]

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See `ModelRunner.launch`."""
        self.forget_ends()  # before the runner asks: a later end notifies anew
        return self.runner.launch(schedule)

    def forget_ends(self) -> None:
        """See `Executor`."""
        if self._ends is not None:
            self._ends.take()

    def forget_requests(self) -> dict[str, list[int]]:
        """See `ModelRunner.forget_requests`."""
        return self.runner.forget_requests()

    def close(self) -> None:
        """Leave the other engines, if it is in lock-step with any or shares KV with them."""
        self.runner.close()
        if self._ends is not None:
            self._ends.close()
        if self.runner.config.in_lock_step:
            from nanovllm.distributed.groups import destroy_groups

            destroy_groups()


# Backend -> module and class; imported when chosen.
EXECUTORS = {
    "uni": ("nanovllm.executor.base", "InProcessExecutor"),
    "mp": ("nanovllm.executor.multiprocess", "MultiprocessExecutor"),
    "external_launcher": ("nanovllm.executor.torchrun", "TorchrunExecutor"),
    "ray": ("nanovllm.executor.ray", "RayExecutor"),
}


def launched_by_torchrun() -> bool:
    """True if this process is one of several that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def choose_backend(config: EngineConfig) -> str:
    """The name in `EXECUTORS` that "auto" stands for."""
    if config.distributed_executor_backend != "auto":
        return config.distributed_executor_backend
    if launched_by_torchrun():
        return "external_launcher"
    return "uni" if config.world_size == 1 else "mp"


def is_follower(config: EngineConfig) -> bool:
    """True in a process that torchrun has started and that is not rank 0, which owns the engine. See `torchrun.follow`."""
    return choose_backend(config) == "external_launcher" and int(os.environ.get("RANK", "0")) > 0


def with_expert_settings(model_config: ModelConfig, config: EngineConfig) -> ModelConfig:
    """A model's configuration with what the engine's settings say about its experts.

    Raises:
        ValueError: experts shall be balanced that the model has not, or the settings for that cannot be read.
    """
    if config.enable_eplb and model_config.moe is None:
        raise ValueError(f"enable_eplb: {model_config.architecture} has no experts; leave it out")
    if not config.enable_expert_parallel or model_config.moe is None:
        return model_config
    moe = replace(model_config.moe, enable_expert_parallel=True)
    if config.enable_eplb:
        from nanovllm.distributed.load_balance import EPLBConfig

        settings = EPLBConfig.from_json(config.eplb_config or "{}")
        moe = replace(
            moe, num_redundant_experts=settings.num_redundant_experts, shared_as_routed=settings.shared_as_routed
        )
    return replace(model_config, moe=moe)


def check_grid(config: EngineConfig, model_config: ModelConfig) -> None:
    """See, before anything loads, whether a model can be divided as the settings say, and whether there are as many
    processes and devices.

    Raises:
        ValueError: no; the message names what would fit.
    """
    from nanovllm.distributed.pipeline_parallel import check_pipeline_parallel
    from nanovllm.models.config import check_tensor_parallel
    from nanovllm.models.moe import check_experts

    check_tensor_parallel(model_config, config.tensor_parallel_size)
    check_pipeline_parallel(model_config.num_layers, config.pipeline_parallel_size)
    if model_config.moe is not None:
        check_experts(model_config.moe, config.tensor_parallel_size, config.data_parallel_size)
    backend = choose_backend(config)
    asked = (
        f"tensor_parallel_size {config.tensor_parallel_size} x pipeline_parallel_size "
        f"{config.pipeline_parallel_size} is {config.world_size} ranks"
    )
    if backend == "external_launcher" and config.data_parallel_size > 1:
        raise ValueError(
            "data_parallel_size above 1 does not go with torchrun: start the engine without, or leave it out"
        )
    processes = int(os.environ.get("WORLD_SIZE", config.world_size))
    if backend == "external_launcher" and processes != config.world_size:
        raise ValueError(
            f"{asked}, and torchrun has started WORLD_SIZE = {processes} processes: start {config.world_size}, or "
            f"use {_fitting_grids(model_config, processes, processes)}"
        )
    if backend == "ray" or config.device == "cpu":  # Ray knows where its GPUs are
        return
    import torch

    devices = torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if backend == "external_launcher" else config.world_size
    if torch.cuda.is_available() and here > devices:
        raise ValueError(
            f"{asked}, {here} of them here, and this machine has {devices} GPUs: "
            f"use {_fitting_grids(model_config, 1, devices)}, several machines, or device cpu"
        )


def _fitting_grids(model_config: ModelConfig, least: int, most: int) -> str:
    """In words: the grids of `least` to `most` ranks that a model can be divided into."""
    from nanovllm.distributed.pipeline_parallel import check_pipeline_parallel
    from nanovllm.models.config import check_tensor_parallel
    from nanovllm.models.moe import check_experts

    found = []
    for tensor in range(1, most + 1):
        for pipeline in range(-(-least // tensor), most // tensor + 1):
            with contextlib.suppress(ValueError):
                check_tensor_parallel(model_config, tensor)
                check_pipeline_parallel(model_config.num_layers, pipeline)
                if model_config.moe is not None:
                    check_experts(model_config.moe, tensor)
                found.append(f"{tensor} x {pipeline}")
    return " or ".join(found) or "another number of processes: no grid of this model has as many ranks"


def create_executor(config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> Executor:
    """The executor that the settings ask for, with the model loaded on every rank.

    Raises:
        ValueError: a grid that the model or this machine cannot take; nothing has been loaded then.
        ExecutorError: a rank could not start.
    """
    check_grid(config, model_config)
    module, name = EXECUTORS[choose_backend(config)]
    return getattr(importlib.import_module(module), name)(config, model_config, folder)
