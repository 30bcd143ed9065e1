"""An executor whose ranks are processes of this machine."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import sys
import tempfile
import weakref

import torch

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid
from nanovllm.distributed.life_signs import SILENCE_SECONDS
from nanovllm.distributed.shared_memory import MessageQueue, PeerLost
from nanovllm.executor.remote import (
    ORDER_SECONDS,
    RemoteExecutor,
    RemoteRank,
    end_processes,
    how_it_ended,
    start_process,
)
from nanovllm.executor.worker import WorkerSetup
from nanovllm.models.config import ModelConfig
from nanovllm.scheduler.data_parallel import engine_grid

logger = logging.getLogger(__name__)


class RankProcess(RemoteRank):
    """A rank in a process that the executor starts.

    Attributes:
        program: the module that runs as the rank.
    """

    program = "nanovllm.executor.worker"

    def __init__(self, rank: int, grid: Grid, threads: int) -> None:
        loopback = "lo" if sys.platform == "linux" else "lo0"  # all ranks are on this machine
        environment = {
            f"{library}_SOCKET_IFNAME": os.environ.get(f"{library}_SOCKET_IFNAME", loopback)
            for library in ("GLOO", "NCCL")
        }
        self.process, connection = start_process(["-m", self.program], environment | {"OMP_NUM_THREADS": str(threads)})
        super().__init__(rank, grid, connection, f"process {self.process.pid}")
        self.pid = self.process.pid

    def end(self) -> str:
        """How its process ended, in words; "" while it lives."""
        return how_it_ended(self.process)


def _order_queue(num_ranks: int) -> MessageQueue | None:
    try:
        return MessageQueue.create(num_ranks)
    except OSError as error:
        logger.warning("orders go through one socket per rank, which is slower: no shared memory (%s)", error)
        return None


class MultiprocessExecutor(RemoteExecutor):
    """Starts a process for each rank. Orders go to all of them at once through shared memory; answers come back through one
    socket per rank.

    Raises:
        ValueError: a rank refuses a checkpoint, a device or a size; in its words.
        ExecutorError: a rank could not start.
    """

    ranks: list[RankProcess]  # type: ignore[assignment]

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        super().__init__(config)
        threads = max(1, torch.get_num_threads() // self.grid.world_size)
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")  # readable by this user alone
        self._orders: MessageQueue | None = None
        try:
            for rank in range(self.grid.world_size):
                self.ranks.append(RankProcess(rank, self.grid, threads))
            processes = [rank.process for rank in self.ranks]
            self._finalizer = weakref.finalize(self, end_processes, processes, self._folder)
            self._orders = _order_queue(self.grid.world_size)
            handle = self._orders.handle if self._orders is not None else None
            address = config.data_parallel_address or f"file://{self._folder}/rendezvous"
            _, first = engine_grid(config)
            for r in self.ranks:
                place, level = (first + r.rank, r.rank), logger.getEffectiveLevel()
                setup = WorkerSetup(config, model_config, folder, *place, address, threads, handle, level)
                r.connection.send(setup)
            self._start()
            if self._orders is not None:
                self._orders.wait_until_attached(SILENCE_SECONDS)  # where its memory has a name, it loses that now
            if not self.on_gpu:  # NCCL uses the file when two ranks first talk; gloo has used it
                shutil.rmtree(self._folder, ignore_errors=True)
        except BaseException:
            self._end("the ranks could not start")
            raise

    def _send(self, order: bytes) -> None:
        if self._orders is None:
            return super()._send(order)
        try:
            self._orders.put(order, ORDER_SECONDS)
        except PeerLost:
            pass  # `_listen` finds out which
        except TimeoutError as error:
            self._fail(str(error))

    def _kill(self) -> None:
        end_processes([rank.process for rank in self.ranks], self._folder)
        if self._orders is not None:
            self._orders.close()
