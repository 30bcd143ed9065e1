"""The ranks as processes that torchrun has started, on one machine or on several.

Rank 0 owns the engine: it tells the others what to do, over gloo connections of their own, and is itself one of the ranks, in
a thread. All others `follow`. Nothing listens here but gloo and the store that torchrun has opened.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.distributed.life_signs import Complaint, Mouth
from nanovllm.executor.base import check_grid, with_expert_settings
from nanovllm.executor.remote import START_SECONDS, RemoteExecutor, RemoteRank, interface_of
from nanovllm.executor.worker import WorkerSetup, run_worker
from nanovllm.models.config import ModelConfig

# A follower that hears nothing of rank 0 for so long is alone. Rank 0's program may keep the interpreter to itself meanwhile.
ORPHAN_SECONDS = 60.0
# What may differ from machine to machine, or is rank 0's business alone.
OWN_SETTINGS = ("model", "tokenizer", "revision", "served_model_name", "trace")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What torchrun says of this process in its environment."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    node: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> Launch:
        """Read it.

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
        """The store of the ranks, which torchrun's agent keeps (or rank 0, if told so); each restart has its own keys."""
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(self.address, self.port, None, is_host, wait_for_workers=False, multi_tenant=True)
        return dist.PrefixStore(f"nanovllm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def choose_interface(self) -> None:
        """Tell gloo which network to use, unless the user has: the one that leads to rank 0. (Its own guess is where the name
        of this host leads, which often is no address that others can reach.)"""
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
                "--master-addr %s is a loopback address here (%s), where ranks on other machines cannot come: give one of "
                "the network that leads to them, or name that network in GLOO_SOCKET_IFNAME", self.address, ours,
            )  # fmt: skip
        elif interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


class Lines:
    """Messages between rank 0 and all others, on connections of their own: what the groups compute, or hang in, does not
    get in their way, and the end of a process is noticed at once.

    Raises:
        RuntimeError: they cannot be connected.
    """

    # A message's length and its beginning travel together, so that most messages are one piece.
    PIECE = 4096
    _LENGTH = 8

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        # Nobody knows when the next request comes; heartbeats tell whether somebody is still there.
        forever = timedelta(days=365)
        # torch's stubs leave out its methods.
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("lines", store), rank, world_size, forever)

    def send(self, message: bytes, targets: list[int]) -> None:
        """Send to some ranks.

        Raises:
            ConnectionError: one of them is gone.
        """
        data = len(message).to_bytes(self._LENGTH, "little") + message
        pieces = [data[: self.PIECE].ljust(self.PIECE, b"\0"), data[self.PIECE :]]
        tensors = [torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pieces if piece]
        try:
            for work in [self._group.send([t], target, 0) for t in tensors for target in targets]:
                work.wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from None

    def receive(self, source: int, timeout: float | None = None) -> bytes:
        """The next message of a rank. When none has come in time, all lines are cut.

        Raises:
            ConnectionError: the rank is gone, or silent.
        """
        first = self._receive(source, self.PIECE, timeout)
        size = int.from_bytes(first[: self._LENGTH], "little")
        message = first[self._LENGTH : self._LENGTH + size]
        if len(message) < size:
            message += self._receive(source, size - len(message), timeout)
        return message

    def _receive(self, source: int, size: int, timeout: float | None) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        try:
            work = self._group.recv([buffer], source, 0)
            work.wait(timedelta(seconds=timeout)) if timeout else work.wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from None
        return buffer.numpy().tobytes()

    def cut(self) -> None:
        """End all talk: every rank that listens gets an error. (gloo closes all connections when somebody loses patience.)"""
        try:
            self._group.recv_anysource([torch.empty(1)], 1).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return
        raise AssertionError("nobody sends under this tag")


def _settings(config: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in OWN_SETTINGS}


def _introduce(launch: Launch, store: dist.Store, config: EngineConfig) -> None:
    """Tell the other ranks who this is, and what it was started with."""
    card = {"node": launch.node, "host": socket.gethostname(), "pid": os.getpid(), "settings": _settings(config)}
    store.set(f"rank {launch.rank}", json.dumps(card))


def _meet(launch: Launch, store: dist.Store, config: EngineConfig) -> list[dict[str, Any]]:
    """Wait until all ranks have introduced themselves; returns who they are.

    Raises:
        ValueError: some have not come, or were started with other settings.
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


class Conductor:
    """What of the executor runs in threads: one that tells the others what to do, one that listens to each of them, and this
    process's own rank. They know nothing of the executor, so that it can be collected."""

    def __init__(self, setup: WorkerSetup, lines: Lines, world_size: int) -> None:
        self.lines = lines
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()  # rank and message, or EOFError
        self._others = list(range(1, world_size))
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._speaker = Mouth(self._tell_others, on_lost=lambda: None)  # who is gone is heard by the ears
        mouth = Mouth(lambda message: self.inbox.put((0, message)))
        self._rank = threading.Thread(
            target=run_worker, args=(setup, self._orders.get, mouth), name="rank 0", daemon=True
        )
        self._ears = [
            threading.Thread(target=self._hear, args=(r,), name=f"ear {r}", daemon=True) for r in self._others
        ]
        for thread in (self._speaker, mouth, self._rank, *self._ears):
            thread.start()

    def _tell_others(self, order: bytes | None) -> None:
        self.lines.send(order or b"", self._others)

    def tell(self, order: bytes) -> None:
        """An order for all ranks."""
        self._speaker.say(lambda: order)
        self._orders.put(order)

    def _hear(self, rank: int) -> None:
        try:
            while True:
                self.inbox.put((rank, pickle.loads(self.lines.receive(rank))))
        except ConnectionError:
            self.inbox.put((rank, EOFError()))

    def shut_down(self, patience: float = 2.0) -> None:
        """End the other ranks and all threads; who does not obey in time is cut off."""
        deadline = time.monotonic() + patience
        self.tell(pickle.dumps(("shutdown", ())))
        for thread in (self._rank, *self._ears):
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._ears):
            self.cut()
        self._speaker.close()

    def cut(self) -> None:
        """Leave the others, who end themselves when they notice."""
        if self._others:
            self.lines.cut()
        for thread in (self._speaker, *self._ears):
            thread.join(1)


class TorchrunExecutor(RemoteExecutor):
    """Rank 0's view of the ranks that torchrun has started.

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
        self.ranks = [RemoteRank(rank, self.grid) for rank in range(launch.world_size)]
        for rank, card in zip(self.ranks, cards, strict=True):
            rank.where = f"process {card['pid']} on {card['host']}"
        self._neighbours = [psutil.Process(card["pid"]) for card in cards[1:] if card["node"] == launch.node]
        lines = Lines(store, launch.rank, launch.world_size)
        self._conductor = Conductor(_setup(launch, config, model_config, folder), lines, launch.world_size)
        self._finalizer = weakref.finalize(self, self._conductor.shut_down)
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End all ranks."""
        if not self.is_broken:
            self.is_broken = True
            self._reason = "the ranks have been shut down"
            self._finalizer()

    def _send(self, order: bytes) -> None:
        self._conductor.tell(order)

    def _listen(self, timeout: float) -> None:
        inbox = self._conductor.inbox
        try:
            rank, message = inbox.get(timeout=timeout) if timeout else inbox.get_nowait()
            while True:
                if isinstance(message, EOFError):
                    self.ranks[rank].is_gone = True
                else:
                    self.ranks[rank].take(message)
                rank, message = inbox.get_nowait()
        except queue.Empty:
            return

    def _end(self) -> None:
        self.is_broken = True
        if not self._finalizer.detach():
            return
        self._conductor.cut()
        # They end themselves, unless they hang: then torchrun would wait for them.
        for process in psutil.wait_procs(self._neighbours, 1)[1]:
            process.kill()


def _enter() -> tuple[Launch, dist.Store]:
    launch = Launch.from_environment()
    launch.choose_interface()
    return launch, launch.open_store()


def _setup(launch: Launch, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> WorkerSetup:
    threads = max(1, torch.get_num_threads() // launch.local_world_size)
    return WorkerSetup(config, model_config, folder, launch.rank, launch.local_rank, "env://", threads)


def follow(config: EngineConfig) -> bool:
    """Be one of the ranks above 0: load a part of the model, and do what rank 0 says, until it ends.

    Returns:
        True if rank 0 has said that it is over, False if it is lost.

    Raises:
        ValueError: not under torchrun, not with as many processes as the grid has ranks, or no such model.
    """
    folder = resolve_model(config.model, config.revision)
    model_config = with_expert_settings(ModelConfig.from_pretrained(folder), config)
    check_grid(config, model_config)
    launch, store = _enter()
    _introduce(launch, store, config)
    # The rank's settings are compared before anything loads, and a rank 0 that refuses them ends.
    lines = Lines(store, launch.rank, launch.world_size)
    # From here on it is rank 0 that decides when this rank ends: torchrun and terminals signal all ranks at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(message: Any) -> None:
        if isinstance(message, Complaint):  # rank 0 may be ended by torchrun before it has told
            logger.error("rank %d: %s", launch.rank, message.text)
        lines.send(pickle.dumps(message), [0])

    mouth = Mouth(send)
    ear = threading.Thread(target=_take_orders, args=(lines, orders), name="ear", daemon=True)
    mouth.start()
    ear.start()
    was_told = run_worker(_setup(launch, config, model_config, folder), orders.get, mouth)
    if not was_told:
        ear.join()  # rank 0 has heard why, and tells the user before torchrun ends everybody
    return was_told


def follow_to_the_end(config: EngineConfig) -> NoReturn:
    """Be one of the ranks above 0, and end with rank 0: at once, since threads of libraries that still talk to the others do
    not survive the end of the interpreter.

    Raises:
        ValueError: see `follow`.
    """
    was_told = follow(config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if was_told else 1)


def _take_orders(lines: Lines, orders: queue.SimpleQueue[bytes]) -> None:
    """A thread that hears rank 0, also while the rank computes or hangs; the process ends with rank 0."""
    timeout = None  # rank 0 may be loading
    try:
        while True:
            order = lines.receive(0, timeout)
            if order:
                timeout = ORPHAN_SECONDS
                orders.put(order)
                if pickle.loads(order)[0] == "shutdown":
                    return
    except ConnectionError:
        os._exit(1)
