"""An executor whose ranks are processes of this machine."""

from __future__ import annotations

import logging
import pathlib
import shutil

import torch

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.shared_memory import MessageQueue
from nanovllm.executor.remote import ORDER_SECONDS, RemoteExecutor
from nanovllm.executor.uniproc import CreateWorker, WorkerSetup
from nanovllm.models.config import ModelConfig

logger = logging.getLogger(__name__)


class MultiprocessExecutor(RemoteExecutor):
    """Starts a process for each rank. Orders go to all of them at once through shared memory;
    answers come back through one socket per rank."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: pathlib.Path,
        create_worker: CreateWorker,
    ) -> None:
        self._orders: MessageQueue | None = None
        super().__init__(config, model_config, folder, create_worker)
        if not self.on_gpu:  # NCCL uses the file when two ranks first talk; gloo has used it
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start_ranks(self, setup: WorkerSetup) -> None:
        size = self.grid.world_size
        self._folder = self.supervisor.make_folder()
        environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // size))}
        for rank in range(size):
            self._start_rank(rank, environment, rank)
        try:
            self._orders = MessageQueue.create(size)
            setup.orders = self._orders.handle
        except OSError as error:
            logger.warning(
                "sending commands through one socket per rank, which is slower: no shared memory "
                "(%s)",
                error,
            )
        setup.init_method = self.config.data_parallel_address or f"file://{self._folder}/rendezvous"

    def _send(self, order: bytes) -> None:
        if self._orders is None:
            return super()._send(order)
        try:
            self._orders.put(order, ORDER_SECONDS)
        except OSError as error:  # a rank is gone or takes nothing
            self.supervisor.hear()  # finds out which
            self.supervisor.fail(str(error))
