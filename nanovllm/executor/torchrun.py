"""An executor whose ranks are processes that torchrun has started, on one machine or on several.

Rank 0's process owns the engine, and starts rank 0 as a process of its own. All other ranks
`follow_to_the_end`: each connects to the executor, which listens only until all of them have. They
get rank 0's settings."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import pickle
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nanovllm.data.config import EngineConfig
from nanovllm.executor.grid import check_grid
from nanovllm.executor.reception import Card, Reception, connect, use_network_of
from nanovllm.executor.remote import CLOSE_SECONDS, RemoteExecutor, RemoteRank
from nanovllm.executor.uniproc import WorkerSetup
from nanovllm.executor.worker import run_worker
from nanovllm.models.config import ModelConfig

logger = logging.getLogger(__name__)


class Launch:
    """What torchrun's environment variables say about this process.

    Raises:
        ValueError: torchrun has not started this process.
    """

    def __init__(self) -> None:
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        try:
            numbers = [int(os.environ[name]) for name in names]
            self.rank, self.local_rank, self.local_world_size, self.world_size = numbers
            self.address = os.environ["MASTER_ADDR"]
        except KeyError as error:
            raise ValueError(
                f"distributed_executor_backend 'external_launcher' needs torchrun, and {error} is "
                "not in the environment: start with torchrun --nproc-per-node N, or use 'mp'"
            ) from None

    def join_network(self) -> str:
        """Have gloo use the network that leads to rank 0, unless the user names another; returns
        the address of this process in the former. (By default, gloo uses the address of this host's
        name, which other machines often cannot reach.)"""
        is_alone = self.local_world_size == self.world_size
        found = socket.getaddrinfo(
            "127.0.0.1" if is_alone else self.address, 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(found[0], found[1]) as probe:
            probe.connect(found[4])  # sends nothing
            ours: str = probe.getsockname()[0]
        if ours.startswith("127.") and not is_alone:  # as a host's own name does on some systems
            logger.warning(
                "--master-addr %s is a loopback address here (%s), which ranks on other machines "
                "cannot reach: give torchrun an address that they can, as --master-addr or, with "
                "--rdzv-endpoint, as --local-addr",
                self.address,
                ours,
            )
        else:
            use_network_of(ours)
        return ours


def open_store() -> Store:
    """The store that torchrun's ranks share; each restart has its own keys."""
    store, _, _ = next(rendezvous("env://"))
    return PrefixStore(f"nanovllm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class TorchrunExecutor(RemoteExecutor):
    """Rank 0's view of the ranks that torchrun has started."""

    def _start_ranks(self, setup: WorkerSetup) -> None:
        setup.init_method = "env://"
        launch = Launch()
        reception = Reception(launch.join_network())
        store = open_store()
        if store.add("engines", 1) > 1:
            raise ValueError(
                "the other ranks already serve an engine: under torchrun, a program can have "
                "only one"
            )
        store.set("executor", json.dumps(reception.invitation))
        cards = reception.wait_for(range(1, launch.world_size))
        self._start_rank(0, {}, launch.local_rank)
        for card, connection in cards:
            rank = RemoteRank(
                card.rank,
                self.grid,
                connection=connection,
                where=card.where,
                local_rank=card.local_rank,
                pid=card.pid,
            )
            self.supervisor.add(rank)
        neighbours = [psutil.Process(rank.pid) for rank in self.ranks if rank.pid is not None]
        self.supervisor.resources.callback(
            _shut_down, [rank.connection for rank in self.ranks], neighbours
        )


def _shut_down(connections: list[Connection], neighbours: list[psutil.Process]) -> None:
    """End all ranks, also when the program ends without having closed its engine. Those of this
    machine end when their connections are closed, unless they hang. (torchrun would wait for
    those.)"""
    for connection in connections:
        with contextlib.suppress(OSError):  # it is closed
            connection.send_bytes(pickle.dumps(("shutdown", ())))
    for process in psutil.wait_procs(neighbours, CLOSE_SECONDS)[1]:
        process.kill()


def follow_to_the_end(
    config: EngineConfig, folder: pathlib.Path, model_config: ModelConfig
) -> NoReturn:
    """Be one of the ranks above 0: load a part of the model, carry out rank 0's orders, and end the
    process together with rank 0. (At once: threads of libraries that still talk to other ranks do
    not survive the end of the interpreter.)

    Args:
        folder: where this machine has the checkpoint.

    Raises:
        ValueError: not under torchrun, or not with as many processes as the grid has ranks.
    """
    check_grid(config, model_config)
    launch = Launch()
    launch.join_network()
    host, port, key = json.loads(open_store().get("executor"))  # waits for rank 0
    # From here on, rank 0 decides when this rank ends: torchrun and terminals signal all ranks at
    # once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pid = os.getpid() if os.environ.get("GROUP_RANK") == "0" else None  # this is rank 0's machine
    card = Card(launch.rank, launch.local_rank, pid)
    connection = connect((host, port, key), socket.gethostname(), card)
    was_shut_down = False
    with contextlib.suppress(EOFError, OSError):
        # Rank 0 tells the user why; torchrun ends it once this process ends.
        setup = dataclasses.replace(connection.recv(), folder=folder)
        was_shut_down = run_worker(setup, connection)
        while not was_shut_down:
            connection.recv_bytes()
    sys.stdout.flush()
    os._exit(0 if was_shut_down else 1)
