"""An executor whose ranks are processes that torchrun has started, on one machine or on several.

Rank 0's process owns the engine and runs rank 0 in a thread. All other ranks `follow_to_the_end`: each connects to rank 0's process, which
listens only until all of them have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.distributed.life_signs import Complaint, Mouth
from nanovllm.executor.base import check_grid, read_model_config
from nanovllm.executor.remote import (
    CLOSE_SECONDS,
    START_SECONDS,
    Card,
    Reception,
    RemoteExecutor,
    RemoteRank,
    connect,
    interface_of,
)
from nanovllm.executor.uniproc import WorkerSetup
from nanovllm.executor.worker import run_worker

# Settings that may differ from machine to machine, or that rank 0 alone uses.
OWN_SETTINGS = ("model", "tokenizer", "revision", "served_model_name", "trace")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What torchrun's environment variables say about this process."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    address: str

    @classmethod
    def from_environment(cls) -> Launch:
        """Read the variables.

        Raises:
            ValueError: torchrun has not started this process.
        """
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        try:
            rank, local_rank, local_world_size, world_size = (int(os.environ[name]) for name in names)
            return cls(rank, local_rank, local_world_size, world_size, os.environ["MASTER_ADDR"])
        except KeyError as error:
            raise ValueError(
                f"distributed_executor_backend 'external_launcher' needs torchrun, and {error} is not in the environment: "
                "start with torchrun --nproc-per-node N, or use 'mp'"
            ) from None

    def join_network(self) -> str:
        """Have gloo use the network that leads to rank 0, unless the user names another; returns the address of this process in it.
        (By default, gloo uses the address of this host's name, which other machines often cannot reach.)"""
        if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
            addresses = psutil.net_if_addrs().get(interface, ())
            usable = (a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
            return next(usable, self.address)
        is_alone = self.local_world_size == self.world_size
        found = socket.getaddrinfo("127.0.0.1" if is_alone else self.address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], found[1]) as probe:
            probe.connect(found[4])  # sends nothing
            ours = probe.getsockname()[0]
        if ours.startswith("127.") and not is_alone:  # as a host's own name does on some systems
            logger.warning(
                "--master-addr %s is a loopback address here (%s), which ranks on other machines cannot reach: give an address "
                "that they can, or name the network interface in GLOO_SOCKET_IFNAME", self.address, ours,
            )  # fmt: skip
        elif (found_interface := interface_of(ours)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = found_interface
        return ours

    def card(self, config: EngineConfig) -> Card:
        """Who this process is, and with which settings it was started."""
        return Card(self.rank, self.local_rank, socket.gethostname(), config)


def open_store() -> dist.Store:
    """The store that torchrun's ranks share; each restart has its own keys."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"nanovllm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def check_settings(cards: Sequence[Card]) -> None:
    """Check that all ranks were started with rank 0's settings.

    Raises:
        ValueError: names the first difference.
    """
    for card in cards:
        for name, ours in vars(cards[0].config).items():
            if name not in OWN_SETTINGS and (theirs := getattr(card.config, name)) != ours:
                raise ValueError(
                    f"rank {card.rank} ({card.where}) was started with {name}={theirs!r}, rank 0 with {ours!r}: "
                    "start all ranks with the same settings"
                )


class TorchrunExecutor(RemoteExecutor):
    """Rank 0's view of the ranks that torchrun has started. Rank 0 itself runs in a thread."""

    _neighbours: Sequence[psutil.Process] = ()

    def _start_ranks(self, setup: WorkerSetup) -> None:
        setup.init_method = "env://"
        launch = Launch.from_environment()
        reception, store = Reception(launch.join_network()), open_store()
        if store.add("engines", 1) > 1:
            raise ValueError("the other ranks have followed an engine already: under torchrun, a program can have one")
        store.set("executor", json.dumps(reception.invitation))
        ours, theirs = Pipe()
        guests = {0: (ours, launch.card(self.config))} | reception.wait_for(range(1, launch.world_size))
        cards = [guests[rank][1] for rank in range(launch.world_size)]
        check_settings(cards)
        # torchrun gives the first ranks to the first machine.
        self._neighbours = [psutil.Process(card.pid) for card in cards[1 : launch.local_world_size]]
        thread = threading.Thread(target=_run_rank_0, args=(theirs,), name="rank 0", daemon=True)
        thread.start()
        connections = [guests[card.rank][0] for card in cards]
        weakref.finalize(self, _shut_down, connections, thread)
        for card, connection in zip(cards, connections, strict=True):
            self.ranks.append(RemoteRank(card.rank, self.grid, connection, card.where, card.local_rank))

    def _kill(self) -> None:
        """Wait for the ranks of this machine: they end when their connections are closed, unless they hang. (torchrun would wait
        for those.)"""
        for process in psutil.wait_procs(self._neighbours, CLOSE_SECONDS)[1]:
            process.kill()


def _run_rank_0(connection: Connection) -> None:
    run_worker(connection.recv(), connection, Mouth(connection.send, on_lost=lambda: None))
    connection.close()


def _shut_down(connections: list[Connection], rank_0: threading.Thread) -> None:
    """End all ranks when the program ends without having closed its engine."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(("shutdown", ())))
    rank_0.join(2 * CLOSE_SECONDS)


def follow_to_the_end(config: EngineConfig) -> NoReturn:
    """Be one of the ranks above 0: load a part of the model, carry out rank 0's orders, and end the process together with rank 0.
    (At once: threads of libraries that still talk to other ranks do not survive the end of the interpreter.)

    Raises:
        ValueError: not under torchrun, not with as many processes as the grid has ranks, or no such model.
    """
    folder = resolve_model(config.model, config.revision)
    check_grid(config, read_model_config(config, folder))
    launch = Launch.from_environment()
    launch.join_network()
    store = open_store()
    store.wait(["executor"], timedelta(seconds=START_SECONDS))
    # From here on, rank 0 decides when this rank ends: torchrun and terminals signal all ranks at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = connect(json.loads(store.get("executor")), launch.card(config))

    def send(message: Any) -> None:
        if isinstance(message, Complaint):  # torchrun may end rank 0 before it reports this
            logger.error("rank %d: %s", launch.rank, message.text)
        connection.send(message)

    was_shut_down = False
    with contextlib.suppress(EOFError, OSError):  # rank 0 tells the user why; torchrun ends it once this process ends
        setup = dataclasses.replace(connection.recv(), folder=folder)  # where this machine has the checkpoint
        was_shut_down = run_worker(setup, connection, Mouth(send))
        while not was_shut_down:
            connection.recv_bytes()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if was_shut_down else 1)
