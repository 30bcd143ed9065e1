"""A rank with its part of the model, and the executor of an engine whose only rank is this
process."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.core.runner import ModelRunner, RunnerSettings
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.distributed.mailbox import Mailbox
from nanovllm.executor.base import Executor
from nanovllm.models.config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.distributed.shared_memory import SegmentHandle


@dataclass
class WorkerSetup:
    """What a rank needs to know before it starts.

    Attributes:
        folder: the checkpoint.
        create_worker: makes the rank from this.
        rank, local_rank: in the grid, and on this machine.
        init_method: where the ranks meet; see `initialize_groups`. "": this is the only rank.
        orders: the handle of the shared memory that carries orders; None if they come through the
            connection.
        log_level: of this process's loggers.
    """

    config: EngineConfig
    model_config: ModelConfig
    folder: pathlib.Path
    create_worker: CreateWorker
    rank: int = 0
    local_rank: int = 0
    init_method: str = ""
    orders: SegmentHandle | None = None
    log_level: int = logging.WARNING


class Worker:
    """A rank with its part of the model. Executors call its methods by name, and other functions
    with it as their first argument.

    Args:
        num_blocks: KV blocks that fit here.
        description: what this rank computes with, in words, under the names of the settings.
        leave: leaves the other ranks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        num_blocks: int,
        description: dict[str, str],
        leave: Callable[[], None],
    ) -> None:
        self.runner = runner
        self._num_blocks = num_blocks
        self._description = description
        self._leave = leave

    def call(self, method: str | WorkerFunction, *arguments: object) -> object:
        """Call a method by its name, or a function with this rank as its first argument."""
        if isinstance(method, str):
            return getattr(self, method)(*arguments)
        return method(self, *arguments)

    def memory(self) -> tuple[int, int, bool]:
        """KV blocks that fit here, bytes per block, and whether this rank computes on a GPU."""
        return self._num_blocks, self.runner.bytes_per_block, self.runner.device.type != "cpu"

    def describe(self) -> dict[str, str]:
        """Return what this rank computes with, in words, under the names of the settings."""
        return self._description

    def allocate(self, settings: RunnerSettings, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate caches and buffers."""
        self.runner.allocate(settings, num_blocks, num_host_blocks)

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See `ModelRunner.launch`; every rank computes its part."""
        return self.runner.launch(plan)

    def forget_requests(self) -> None:
        """See `ModelRunner.forget_requests`."""
        self.runner.forget_requests()

    def close(self) -> None:
        """Leave all others: other ranks, and engines with which a feature works."""
        self.runner.close()
        self._leave()


class UniProcExecutor(Executor):
    """One rank, in this process. In lock-step, it is one rank of several, each of which has an
    engine of its own."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: pathlib.Path,
        create_worker: CreateWorker,
    ) -> None:
        # "" unless in lock-step
        rank = config.data_parallel_rank or 0
        address = config.data_parallel_address
        setup = WorkerSetup(
            config, model_config, folder, create_worker, rank=rank, init_method=address
        )
        self.worker = create_worker(setup)
        self.runner = self.worker.runner
        ends = self._ends = Mailbox[None]()
        self.runner.notify = lambda: ends.put(None)
        self.sources = [ends.fileno()]
        self._take_memory()

    def collective_rpc(self, method: str | WorkerFunction, *arguments: object) -> list[Any]:
        """See `Executor`."""
        return [self.worker.call(method, *arguments)]

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See `Executor`."""
        self.forget_ends()  # before the runner asks: a later end notifies again
        return self.worker.launch(plan)

    def forget_ends(self) -> None:
        """See `Executor`."""
        self._ends.take()

    def close(self) -> None:
        """See `Worker.close`."""
        self.worker.close()
        self._ends.close()


CreateWorker = Callable[[WorkerSetup], Worker]
# A function for `Executor.collective_rpc`.
WorkerFunction = Callable[..., object]
