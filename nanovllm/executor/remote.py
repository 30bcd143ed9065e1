"""What executors of ranks in other processes have in common: orders go out and answers come back over one connection per rank,
and when something fails, the executor finds out which rank is to blame."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import pickle
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import psutil

from nanovllm.data.config import EngineConfig
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.distributed.activity import LOOK_SECONDS, waiting_for_others
from nanovllm.distributed.groups import Grid
from nanovllm.distributed.life_signs import TRANSFER_ENDED, Peer, Watch
from nanovllm.distributed.processes import start_process
from nanovllm.executor.base import Executor, ExecutorError
from nanovllm.executor.uniproc import WorkerSetup
from nanovllm.kv.connector import OutputAggregator
from nanovllm.models.config import ModelConfig
from nanovllm.scheduler.data_parallel import engine_grid

logger = logging.getLogger(__name__)

# Loading a large model takes long; a rank that is not ready after this time will not be.
START_SECONDS = 600.0
# The longest time for a live rank to carry out an order.
ORDER_SECONDS = 300.0
# The longest time for what connects to say what it is.
GREETING_SECONDS = 5.0
# A connection whose other end acknowledges or takes nothing for this long is closed.
LOST_SECONDS = 60.0
# What ranks get to end by themselves.
CLOSE_SECONDS = 1.0


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: after half a message, a connection could not be used any more."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


# ---------------------------------------------------------------- connections between machines


def use_network_of(address: str) -> None:
    """Have gloo use this machine's network interface that has the address, unless the user names another."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class Reception:
    """Where ranks that the executor has not started connect to it. Only ranks that know the key are let in.

    Args:
        host: the address of this machine at which the ranks can reach it.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._key = secrets.token_hex(32)
        self.invitation = (host, self._listener.getsockname()[1], self._key)

    def wait_for(self, ranks: Collection[int], seconds: float = START_SECONDS) -> list[dict[str, Any]]:
        """Wait until these ranks have connected; nothing listens any more after that. Returns the arguments of each `RemoteRank`.

        Raises:
            ExecutorError: a rank has not connected in time.
        """
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        with self._listener:
            self._listener.settimeout(LOOK_SECONDS)
            while missing := [rank for rank in ranks if rank not in found]:
                if time.monotonic() > deadline:
                    raise ExecutorError(f"ranks {missing} have not connected within {seconds:g} seconds")
                with contextlib.suppress(OSError, EOFError):  # it may be a stranger
                    connection = _connection(self._listener.accept()[0])
                    key = connection.recv_bytes(256) if connection.poll(GREETING_SECONDS) else b""
                    if secrets.compare_digest(key, self._key.encode()):
                        card = {"connection": connection} | connection.recv()
                        found[card["rank"]] = card
        return [found[rank] for rank in ranks]


def connect(invitation: Sequence[Any], here: str, **card: Any) -> Connection:
    """A rank's connection to its executor.

    Args:
        invitation: see `Reception`.
        here: the name of this machine.
        card: arguments of `RemoteRank`.
    """
    host, port, key = invitation
    connection = _connection(socket.create_connection((host, port), START_SECONDS))
    connection.send_bytes(key.encode())
    connection.send(card | {"where": f"process {os.getpid()} on {here}"})
    return connection


def _connection(line: socket.socket) -> Connection:
    """A connection over TCP: messages leave at once, and sending fails when the other end is gone or stopped."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
    return Connection(line.detach())


# ---------------------------------------------------------------- ranks


class WatchedProcesses:
    """Processes that work together: if one fails, all are ended. A subclass says how to `_listen` to them and how to `_end` them.

    Attributes:
        ranks: the processes.
    """

    def __init__(self) -> None:
        self.ranks: list[Any] = []
        self._watch = Watch(self.ranks)
        self._reason = ""  # why they have been ended

    def _listen(self, timeout: float) -> None:
        """Take in what they have sent, and mark those that are gone; wait up to `timeout` seconds for something."""
        raise NotImplementedError

    def _end(self, reason: str) -> None:
        """End all, whatever they do."""
        raise NotImplementedError

    def check_health(self) -> None:
        """Check whether one has ended, hangs, or has been silent for too long.

        Raises:
            ValueError: one refuses what the user has asked for.
            ExecutorError: any other trouble.
        """
        self._hear(0)

    def _check(self) -> None:
        if self._reason:
            raise ExecutorError(self._reason)

    def _hear(self, timeout: float) -> None:
        """Listen to all; the first sign of trouble ends them."""
        self._check()
        if (verdict := self._watch.look(self._listen, timeout)) is not None:
            self._fail(verdict.text, ValueError if verdict.is_users else ExecutorError)

    def _fail(self, reason: str, kind: type[Exception] = ExecutorError) -> NoReturn:
        self._end(reason)
        raise kind(reason)


class RemoteRank(Peer):
    """A rank as its executor knows it. Its name tells its place in the grid if there are several stages.

    Args:
        peer: see `Peer`.

    Attributes:
        local_rank: its number on its machine.
        answers: by the number of the order; TRANSFER_ENDED while a KV transfer has ended that no step has taken in yet.
    """

    def __init__(self, rank: int, grid: Grid, local_rank: int = 0, pid: int | None = None, **peer: Any) -> None:
        stage, tensor = divmod(rank, grid.tensor)
        place = f" (stage {stage}, tensor rank {tensor})" if grid.pipeline > 1 else ""
        super().__init__(f"rank {rank}{place}", **peer)
        self.local_rank, self.pid = local_rank, self.pid or pid
        self.answers: dict[int, Any] = {}

    def take(self, message: Any) -> None:
        """Take in a message, which may be an answer."""
        super().take(message)
        if isinstance(message, tuple):  # the number of an order, and the answer
            self.answers.update([message])


class RemoteExecutor(WatchedProcesses, Executor):
    """Sends every order to all ranks, in the same sequence; the first rank of the last stage answers with a step's result.

    A subclass says how to start the ranks and how to kill them.

    Attributes:
        program: the module that runs as a rank on this machine.

    Raises:
        ValueError: there is no room for the ranks, or one refuses a checkpoint, a device or a size; in its words.
        ExecutorError: a rank could not start.
    """

    program = "nanovllm.executor.worker"

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        super().__init__()
        self.config = config
        self.grid = Grid(1, config.pipeline_parallel_size, config.tensor_parallel_size)
        self._num_orders = 0
        self._transfers = OutputAggregator(self.grid.world_size)
        setup = WorkerSetup(config, model_config, folder, log_level=logger.getEffectiveLevel())
        try:
            self._start_ranks(setup)
            _, first = engine_grid(config)
            for number, rank in enumerate(self.ranks):
                setup.rank, setup.local_rank = first + number, rank.local_rank
                with contextlib.suppress(OSError):  # `_answer` finds out why
                    rank.connection.send(setup)
            self._take_memory()
        except BaseException:
            self._end("the ranks could not start")
            raise
        for rank in self.ranks:
            rank.expect_heartbeats()
        self.sources = [rank.connection for rank in self.ranks]

    def _start_ranks(self, setup: WorkerSetup) -> None:
        """Start the processes that the ranks will run in, and put the ranks into `ranks`, with a connection to each. They wait for
        `setup`, which this method completes (except for their numbers)."""
        raise NotImplementedError

    def _start_rank(self, rank: int, environment: Mapping[str, str], local_rank: int) -> None:
        """Start a rank on this machine."""
        process, connection = start_process(["-m", self.program], environment)
        self.ranks.append(RemoteRank(rank, self.grid, local_rank, connection=connection, process=process))

    def _kill(self) -> None:
        """End all ranks, whatever they do. Their connections are closed."""
        raise NotImplementedError

    def _send(self, order: bytes) -> None:
        """Send an order to all ranks. `_listen` finds out if a rank is gone."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(order)

    def _listen(self, timeout: float) -> None:
        ready = wait([rank for rank in self.ranks if not rank.is_gone], timeout)
        with uninterrupted():
            for rank in ready:
                rank.drain()  # type: ignore[union-attr]

    def _end(self, reason: str) -> None:
        self._reason = reason
        for rank in self.ranks:
            rank.connection.close()
        self._kill()

    def close(self) -> None:
        """End all ranks; those that have not ended after CLOSE_SECONDS are killed."""
        if self._reason:
            return
        with contextlib.suppress(ExecutorError, OSError):
            self._order("shutdown")
            deadline = time.monotonic() + CLOSE_SECONDS
            while not all(rank.is_gone for rank in self.ranks) and time.monotonic() < deadline:
                self._listen(0.01)
        self._end("the ranks have been shut down")

    # ---------------------------------------------------------------- what the engine calls

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """See `Executor`."""
        number = self._order(method, *arguments)
        return [self._answer(rank, number) for rank in self.ranks]

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Tell every rank; the result comes from the first rank of the last stage."""
        output_rank, has_transfers = -self.grid.tensor, schedule.connector_metadata is not None
        if has_transfers:
            self.forget_ends()
        number = self._order("launch", schedule)

        def gather() -> ModelRunnerOutput:
            if not has_transfers:
                return self._answer(self.ranks[output_rank], number)
            results = [self._answer(rank, number) for rank in self.ranks]
            # A KV transfer has ended once it has ended on every rank.
            results[output_rank].connector_output = self._transfers.add([r.connector_output for r in results])
            return results[output_rank]

        return gather

    @property
    def transfer_has_ended(self) -> bool:  # type: ignore[override]
        """See `Executor`."""
        return any(TRANSFER_ENDED in rank.answers for rank in self.ranks)

    def forget_ends(self) -> None:
        """See `Executor`."""
        for rank in self.ranks:
            rank.answers.pop(TRANSFER_ENDED, None)

    def forget_requests(self) -> None:
        """Drop the state of all requests on every rank; see `Executor`."""
        if not self._reason:
            super().forget_requests()
            self._transfers = OutputAggregator(self.grid.world_size)

    # ---------------------------------------------------------------- orders and answers

    def _order(self, name: str, *arguments: Any) -> int:
        """Send all ranks an order; returns its number."""
        self._check()
        order = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
        with uninterrupted(), waiting_for_others():  # a full queue is for the ranks to empty
            self._num_orders += 1
            self._send(order)
        return self._num_orders

    def _answer(self, rank: RemoteRank, order: int) -> Any:
        """Wait for a rank's answer to an order, and drop its answers to earlier ones. Watches all ranks meanwhile."""
        self._check()
        what, seconds = ("answered", ORDER_SECONDS) if rank.is_ready else ("started", START_SECONDS)
        deadline = time.monotonic() + seconds
        while order not in rank.answers:
            with waiting_for_others():
                self._hear(LOOK_SECONDS)
            if time.monotonic() > deadline:
                self._fail(f"{rank}, has not {what} after {seconds:g} seconds")
        answer = rank.answers[order]
        rank.answers = {number: other for number, other in rank.answers.items() if number > order}
        return answer
