"""Executors: how the engine hands each step to its ranks and gets back what they sampled."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import EngineConfig

if TYPE_CHECKING:
    from nanovllm.core.runner import RunnerSettings
    from nanovllm.executor.uniproc import WorkerFunction


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

    on_gpu: bool
    num_blocks: int
    bytes_per_block: int
    sources: Sequence[object] = ()
    transfer_has_ended: bool = False

    def collective_rpc(self, method: str | WorkerFunction, *arguments: object) -> list[Any]:
        """Call a method of the `Worker` on every rank; returns the results by rank.

        Args:
            method: its name, or a function of a module, which gets the worker as its first
                argument.

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

    def allocate(self, settings: RunnerSettings, num_blocks: int, num_host_blocks: int) -> None:
        """Have every rank allocate its caches and buffers."""
        self.collective_rpc("allocate", settings, num_blocks, num_host_blocks)

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
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


def choose_backend(config: EngineConfig) -> str:
    """The name of the executor that the settings ask for; what "auto" stands for."""
    if config.distributed_executor_backend != "auto":
        return config.distributed_executor_backend
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "external_launcher"
    return "uni" if config.world_size == 1 else "mp"


def is_follower(config: EngineConfig) -> bool:
    """True in a process that torchrun has started and that is not rank 0, which owns the engine.
    See `torchrun.follow_to_the_end`."""
    return choose_backend(config) == "external_launcher" and int(os.environ.get("RANK", "0")) > 0
