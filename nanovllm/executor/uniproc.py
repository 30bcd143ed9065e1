"""A rank with its part of the model, and the executor of an engine whose only rank is this
process."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.attention.base import backend_name
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.distributed.groups import get_world_group
from nanovllm.executor.base import Executor
from nanovllm.models.config import ModelConfig
from nanovllm.ops.device import choose_device
from nanovllm.runner.memory import num_blocks_that_fit
from nanovllm.runner.runner import ModelRunner

if TYPE_CHECKING:
    from nanovllm.distributed.shared_memory import SegmentHandle
    from nanovllm.kv_transfer.pd.control import Mailbox


@dataclass
class WorkerSetup:
    """What a rank needs to know before it starts.

    Attributes:
        folder: the checkpoint.
        rank, local_rank: in the grid, and on this machine.
        init_method: where the ranks meet; see `initialize_groups`. "": this is the only rank.
        orders: the handle of the shared memory that carries orders; None if they come through the
            connection.
        log_level: of this process's loggers.
    """

    config: EngineConfig
    model_config: ModelConfig
    folder: pathlib.Path
    rank: int = 0
    local_rank: int = 0
    init_method: str = ""
    orders: SegmentHandle | None = None
    log_level: int = logging.WARNING


class Worker:
    """A rank with its part of the model. Executors call its methods by name.

    Raises:
        ValueError: settings, a checkpoint or a device that do not fit.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        config = setup.config
        if setup.init_method:
            grid, _ = load(
                "nanovllm.features.data_parallel:engine_grid", "an engine of several processes"
            )(config)
            where = (
                "cpu" if choose_device(config.device).type == "cpu" else f"cuda:{setup.local_rank}"
            )
            join = load(
                "nanovllm.distributed.process_groups:initialize_groups",
                "an engine of several processes",
            )
            join(
                grid,
                setup.rank,
                setup.init_method,
                where,
                disable_custom_all_reduce=config.disable_custom_all_reduce,
            )
        self.runner = ModelRunner(config, setup.model_config, setup.folder)

    def memory(self) -> tuple[int, int, bool]:
        """KV blocks that fit here, bytes per block, and whether this rank computes on a GPU."""
        return (
            num_blocks_that_fit(self.runner),
            self.runner.bytes_per_block,
            self.runner.device.type != "cpu",
        )

    def describe(self) -> dict[str, str]:
        """Return what this rank computes with, in words, under the names of the settings."""
        runner = self.runner
        device = str(runner.device)
        if runner.device.type == "cuda":
            device += f" ({torch.cuda.get_device_name(runner.device)})"
        return {
            "device": device,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "kv_dtype": str(runner.kv_dtype).removeprefix("torch."),
            "attention_backend": backend_name(runner.backend, runner.config.attention_backend),
        }

    def allocate(self, config: EngineConfig, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate caches and buffers; the settings are complete now."""
        self.runner.config = config
        self.runner.allocate(num_blocks, num_host_blocks)

    def handshake_metadata(self) -> object:
        """See `KVConnectorWorker.get_handshake_metadata`."""
        return self.runner.connector.get_handshake_metadata()

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See `ModelRunner.launch`; every rank computes its part."""
        return self.runner.launch(schedule)

    def forget_requests(self) -> None:
        """See `ModelRunner.forget_requests`."""
        self.runner.forget_requests()

    def close(self) -> None:
        """Leave the other ranks, and the engines with which this one shares KV."""
        self.runner.connector.close()
        if get_world_group().world_size > 1:
            load(
                "nanovllm.distributed.process_groups:destroy_groups",
                "an engine of several processes",
            )()


class InProcessExecutor(Executor):
    """One rank, in this process. In lock-step, it is one rank of several, each of which has an
    engine of its own."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
    ) -> None:
        self.config = config
        # "" unless in lock-step
        rank = config.data_parallel_rank or 0
        address = config.data_parallel_address
        self.worker = Worker(WorkerSetup(config, model_config, folder, rank, init_method=address))
        self.runner = self.worker.runner
        self._ends: Mailbox[None] | None = None  # once this rank has KV transfers
        self._take_memory()

    def collective_rpc(self, method: str, *arguments: object) -> list[Any]:
        """See `Executor`."""
        return [getattr(self.worker, method)(*arguments)]

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """See `Executor`."""
        super().allocate(num_blocks, num_host_blocks)
        if self.config.kv_transfer is not None:
            mailbox: Mailbox[None] = load(
                "nanovllm.kv_transfer.pd.control:Mailbox", "KV transfer"
            )()
            self._ends = mailbox
            self.runner.connector.notify = lambda: mailbox.put(None)
            self.sources = [mailbox.fileno()]

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See `Executor`."""
        self.forget_ends()  # before the runner asks: a later end notifies again
        return self.worker.launch(schedule)

    def forget_ends(self) -> None:
        """See `Executor`."""
        if self._ends is not None:
            self._ends.take()

    def close(self) -> None:
        """See `Worker.close`."""
        self.worker.close()
        if self._ends is not None:
            self._ends.close()
