"""The ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from multiprocessing.connection import Connection, wait

import torch

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid
from nanovllm.distributed.life_signs import SILENCE_SECONDS
from nanovllm.distributed.shared_memory import MessageQueue, PeerLost
from nanovllm.executor.base import ExecutorError
from nanovllm.executor.remote import ORDER_SECONDS, RemoteExecutor, RemoteRank, uninterrupted
from nanovllm.executor.worker import WorkerSetup
from nanovllm.models.config import ModelConfig
from nanovllm.scheduler.data_parallel import engine_grid

logger = logging.getLogger(__name__)


class RankProcess(RemoteRank):
    """A rank in a process that is started here.

    Attributes:
        program: the module that runs as the rank.
    """

    program = "nanovllm.executor.worker"

    def __init__(self, rank: int, grid: Grid, threads: int) -> None:
        super().__init__(rank, grid)
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        # All ranks are on this machine, so nothing has to listen beyond it.
        for library in ("GLOO", "NCCL"):
            environment.setdefault(f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the parent to see
            )
        self.pid, self.where = self.process.pid, f"process {self.process.pid}"

    def listen(self) -> None:
        """Take in everything that has come."""
        self.drain(self.connection)

    def end(self) -> str:
        """How it ended, in words; "" if it lives."""
        return how_it_ended(self.process)


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """In words; "" if it lives."""
    code = process.poll()
    if code is None:
        return ""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def clean_up(processes: list[subprocess.Popen[bytes]], folder: str) -> None:
    """End processes, whatever they do, and remove a folder."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _order_queue(num_ranks: int) -> MessageQueue | None:
    try:
        return MessageQueue.create(num_ranks)
    except OSError as error:
        logger.warning("orders go through a socket a rank, which is slower: no shared memory (%s)", error)
        return None


class MultiprocessExecutor(RemoteExecutor):
    """Starts a process for each rank. Orders go to all of them at once through shared memory, answers come back through
    a socket from each.

    Raises:
        ValueError: what a rank refuses (a checkpoint, a device, a size), in its words.
        ExecutorError: a rank could not start.
    """

    ranks: list[RankProcess]  # type: ignore[assignment]

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        super().__init__(config)
        threads = max(1, torch.get_num_threads() // self.grid.world_size)
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")  # for this user alone
        self.ranks = []
        self._orders: MessageQueue | None = None
        try:
            for rank in range(self.grid.world_size):
                self.ranks.append(RankProcess(rank, self.grid, threads))
            processes = [rank.process for rank in self.ranks]
            self._finalizer = weakref.finalize(self, clean_up, processes, self._folder)
            self._orders = _order_queue(self.grid.world_size)
            handle = self._orders.handle if self._orders is not None else None
            address = config.data_parallel_address or f"file://{self._folder}/rendezvous"
            _, first = engine_grid(config)
            for r in self.ranks:
                place, level = (first + r.rank, r.rank), logger.getEffectiveLevel()
                setup = WorkerSetup(config, model_config, folder, *place, address, threads, handle, level)
                r.connection.send(setup)
            self._start()
            self.sources = [rank.connection for rank in self.ranks]
            if self._orders is not None:
                self._orders.wait_until_attached(SILENCE_SECONDS)  # where its memory has a name, it loses that now
            if not self.on_gpu:  # NCCL meets when two ranks first talk, gloo has met
                shutil.rmtree(self._folder, ignore_errors=True)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End all ranks; those that do not in a second are killed."""
        if self.is_broken:
            return
        with contextlib.suppress(ExecutorError, OSError):
            self._order("shutdown")
            deadline = time.monotonic() + 1
            while any(not r.end() for r in self.ranks) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._reason = "the ranks have been shut down"
        self._end()

    def _send(self, order: bytes) -> None:
        if self._orders is None:
            for rank in self.ranks:
                with contextlib.suppress(OSError):  # it is gone, and will be blamed
                    rank.connection.send_bytes(order)
            return
        try:
            self._orders.put(order, ORDER_SECONDS)
        except PeerLost:
            pass  # it will be blamed
        except TimeoutError as error:
            self._fail(str(error))

    def _listen(self, timeout: float) -> None:
        by_connection = {rank.connection: rank for rank in self.ranks if not rank.is_gone}
        ready = wait(list(by_connection), timeout)
        with uninterrupted():
            for connection in ready:
                by_connection[connection].listen()  # type: ignore[index]

    def _end(self) -> None:
        self.is_broken = True
        clean_up([rank.process for rank in self.ranks], self._folder)
        for rank in self.ranks:
            rank.connection.close()
        if self._orders is not None:
            self._orders.close()
