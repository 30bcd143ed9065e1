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
import pathlib
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.distributed.life_signs import Complaint, Mouth
from nanovllm.executor.base import check_grid, read_model_config
from nanovllm.executor.remote import (
    CLOSE_SECONDS,
    START_SECONDS,
    Reception,
    RemoteExecutor,
    RemoteRank,
    connect,
    interface_of,
)
from nanovllm.executor.worker import WorkerSetup, run_worker
from nanovllm.models.config import ModelConfig

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
    node: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> Launch:
        """Read the variables.

        Raises:
            ValueError: torchrun has not started this process.
        """
        try:
            rank, local_rank, local_world_size, world_size, node, port = (
                int(os.environ[name])
                for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
            )
            return cls(rank, local_rank, local_world_size, world_size, node, os.environ["MASTER_ADDR"], port)
        except KeyError as error:
            raise ValueError(
                f"distributed_executor_backend 'external_launcher' needs torchrun, and {error} is not in the environment: "
                "start with torchrun --nproc-per-node N, or use 'mp'"
            ) from None

    def open_store(self) -> dist.Store:
        """The store of the ranks, which torchrun's agent hosts (or rank 0, if told so); each restart has its own keys."""
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(self.address, self.port, None, is_host, wait_for_workers=False, multi_tenant=True)
        return dist.PrefixStore(f"nanovllm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def choose_interface(self) -> None:
        """Have gloo use the network that leads to rank 0, unless the user names another. (By default, gloo uses the address of this
        host's name, which other machines often cannot reach.)"""
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return
        if self.local_world_size == self.world_size:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
            return
        found = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], found[1]) as probe:
            probe.connect(found[4])  # sends nothing
            ours = probe.getsockname()[0]
        interface = interface_of(ours)
        if ours.startswith("127."):  # as a host's own name does on some systems
            logger.warning(
                "--master-addr %s is a loopback address here (%s), which ranks on other machines cannot reach: give an address "
                "that they can, or name the network interface in GLOO_SOCKET_IFNAME", self.address, ours,
            )  # fmt: skip
        elif interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface

    def own_address(self) -> str:
        """The address at which other ranks reach this process: that of gloo's network."""
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        found = [
            a.address for a in psutil.net_if_addrs().get(interface, ()) if a.family in (socket.AF_INET, socket.AF_INET6)
        ]
        return found[0] if found else self.address


def _settings(config: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in OWN_SETTINGS}


def _introduce(launch: Launch, store: dist.Store, config: EngineConfig) -> None:
    """Tell the other ranks who this is, and with which settings it was started."""
    card = {"node": launch.node, "host": socket.gethostname(), "pid": os.getpid(), "settings": _settings(config)}
    store.set(f"rank {launch.rank}", json.dumps(card))


def _meet(launch: Launch, store: dist.Store, config: EngineConfig) -> list[dict[str, Any]]:
    """Wait until all ranks have introduced themselves; returns their cards.

    Raises:
        ValueError: a rank has not come, or was started with other settings.
    """
    deadline = time.monotonic() + START_SECONDS
    while missing := [r for r in range(launch.world_size) if not store.check([f"rank {r}"])]:
        if time.monotonic() > deadline:
            raise ValueError(f"of {launch.world_size} ranks, {missing} have not come after {START_SECONDS:g} seconds")
        time.sleep(0.02)
    cards = [json.loads(store.get(f"rank {r}")) for r in range(launch.world_size)]
    for r, card in enumerate(cards):
        for name, ours in _settings(config).items():
            if card["settings"][name] != ours:
                raise ValueError(
                    f"rank {r} (process {card['pid']} on {card['host']}) was started with {name}="
                    f"{card['settings'][name]!r}, rank 0 with {ours!r}: start all ranks with the same settings"
                )
    return cards


class TorchrunExecutor(RemoteExecutor):
    """Rank 0's view of the ranks that torchrun has started. Rank 0 itself runs in a thread.

    Raises:
        ValueError: not under torchrun, or not with as many processes as the grid has ranks; what a rank refuses.
        ExecutorError: a rank could not start.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        super().__init__(config)
        launch, store = _enter()
        if store.add("engines", 1) > 1:
            raise ValueError("the other ranks have followed an engine already: under torchrun, a program can have one")
        _introduce(launch, store, config)
        cards = _meet(launch, store, config)
        self._neighbours = [psutil.Process(card["pid"]) for card in cards[1:] if card["node"] == launch.node]
        reception = Reception(launch.own_address())
        store.set("executor", json.dumps(reception.invitation))
        connections = reception.wait_for(list(range(1, launch.world_size)))
        connections[0], theirs = Pipe()
        setup = _setup(launch, config, model_config, folder)
        thread = threading.Thread(target=_run_rank_0, args=(setup, theirs), name="rank 0", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, list(connections.values()), thread)
        for rank, card in enumerate(cards):
            where = f"process {card['pid']} on {card['host']}"
            self.ranks.append(RemoteRank(rank, self.grid, connections[rank], where))
        try:
            self._start()
        except BaseException:
            self._end("the ranks could not start")
            raise

    def _kill(self) -> None:
        """Wait for the ranks of this machine: they end when their connections are closed, unless they hang. (torchrun would wait
        for those.)"""
        if self._finalizer.detach():
            for process in psutil.wait_procs(self._neighbours, CLOSE_SECONDS)[1]:
                process.kill()


def _run_rank_0(setup: WorkerSetup, connection: Connection) -> None:
    run_worker(setup, connection, Mouth(connection.send, on_lost=lambda: None))
    connection.close()


def _shut_down(connections: list[Connection], rank_0: threading.Thread) -> None:
    """End all ranks when the program ends without having closed its engine."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(("shutdown", ())))
    rank_0.join(2 * CLOSE_SECONDS)


def _enter() -> tuple[Launch, dist.Store]:
    launch = Launch.from_environment()
    launch.choose_interface()
    return launch, launch.open_store()


def _setup(launch: Launch, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> WorkerSetup:
    threads = max(1, torch.get_num_threads() // launch.local_world_size)
    return WorkerSetup(config, model_config, folder, launch.rank, launch.local_rank, "env://", threads)


def follow_to_the_end(config: EngineConfig) -> NoReturn:
    """Be one of the ranks above 0: load a part of the model, carry out rank 0's orders, and end the process together with rank 0.
    (At once: threads of libraries that still talk to other ranks do not survive the end of the interpreter.)

    Raises:
        ValueError: not under torchrun, not with as many processes as the grid has ranks, or no such model.
    """
    folder = resolve_model(config.model, config.revision)
    model_config = read_model_config(config, folder)
    check_grid(config, model_config)
    launch, store = _enter()
    _introduce(launch, store, config)
    # Rank 0 compares the settings before anything loads; if it refuses them, it ends, and torchrun ends this process.
    store.wait(["executor"], timedelta(seconds=START_SECONDS))
    # From here on, rank 0 decides when this rank ends: torchrun and terminals signal all ranks at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = connect(json.loads(store.get("executor")), launch.rank)

    def send(message: Any) -> None:
        if isinstance(message, Complaint):  # torchrun may end rank 0 before it reports this
            logger.error("rank %d: %s", launch.rank, message.text)
        connection.send(message)

    was_shut_down = run_worker(_setup(launch, config, model_config, folder), connection, Mouth(send))
    if not was_shut_down:
        with contextlib.suppress(
            EOFError, OSError
        ):  # rank 0 tells the user why; torchrun ends it once this process ends
            while True:
                connection.recv_bytes()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if was_shut_down else 1)
