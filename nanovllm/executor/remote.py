"""What executors of ranks in other processes have in common: orders go out and answers come back over one connection per rank,
and when something fails, the executor finds out which rank is to blame."""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import psutil

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.distributed.groups import Grid
from nanovllm.distributed.life_signs import LOOK_SECONDS, TRANSFER_ENDED, Peer, Watch, waiting_for_others
from nanovllm.executor.base import Executor, ExecutorError
from nanovllm.kv.connector import OutputAggregator

# Loading a large model takes long; a rank that is not ready after this time will not be.
START_SECONDS = 600.0
# The longest time for a live rank to carry out an order.
ORDER_SECONDS = 300.0
# The longest time for a rank that is known to live to connect.
CONNECT_SECONDS = 60.0
# The longest time for what connects to say what it is.
GREETING_SECONDS = 5.0
# A connection whose other machine acknowledges nothing for this long is closed.
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


# ---------------------------------------------------------------- processes of this machine


def start_process(words: Sequence[str], environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start Python with these arguments, and a connection to it. The number of its socket is the last argument.

    Args:
        environment: variables that differ from those of this process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *words, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal is for the parent alone
        )
    return process, Connection(ours.detach())


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, in words; "" while it lives."""
    code = process.poll()
    if code is None:
        return ""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_processes(processes: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    """Kill processes and remove a folder."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- connections between machines


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (a.address for a in addresses):
            return name
    return None


class Reception:
    """Where ranks that the executor has not started itself connect to it. Only ranks that know the key are let in.

    Args:
        host: the address of this machine at which the ranks can reach it.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._key = secrets.token_hex(32)
        self.invitation = (host, self._listener.getsockname()[1], self._key)

    def wait_for(self, ranks: list[int]) -> dict[int, Connection]:
        """Wait until these ranks have connected; nothing listens any more after that.

        Raises:
            ExecutorError: a rank has not connected in time.
        """
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + CONNECT_SECONDS
        with self._listener:
            while missing := [rank for rank in ranks if rank not in found]:
                if time.monotonic() > deadline:
                    raise ExecutorError(f"ranks {missing} have not connected within {CONNECT_SECONDS:g} seconds")
                self._listener.settimeout(CONNECT_SECONDS)
                with contextlib.suppress(OSError, EOFError):  # it may be a stranger
                    connection = _connection(self._listener.accept()[0])
                    greeting = connection.recv_bytes(256) if connection.poll(GREETING_SECONDS) else b""
                    key, _, rank = greeting.partition(b" ")
                    if hmac.compare_digest(key, self._key.encode()):
                        found[int(rank)] = connection
        return found


def connect(invitation: Sequence[Any], rank: int) -> Connection:
    """A rank's connection to its executor; see `Reception.invitation`."""
    host, port, key = invitation
    connection = _connection(socket.create_connection((host, port), CONNECT_SECONDS))
    connection.send_bytes(f"{key} {rank}".encode())
    return connection


def _connection(line: socket.socket) -> Connection:
    """A connection over TCP: messages leave at once, and sending fails when the other machine is gone."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ORDER_SECONDS), 0))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
    return Connection(line.detach())


# ---------------------------------------------------------------- ranks


class RemoteRank(Peer):
    """A rank as its executor knows it. Its name tells its place in the grid if there are several stages.

    Attributes:
        connection: to the rank, see `worker.run_worker`.
        answers: by the number of the order.
        transfer_has_ended: a KV transfer has ended on the rank, and no step has taken that in yet.
    """

    transfer_has_ended = False

    def __init__(self, rank: int, grid: Grid, connection: Connection, where: str) -> None:
        stage, tensor = divmod(rank, grid.tensor)
        place = f" (stage {stage}, tensor rank {tensor})" if grid.pipeline > 1 else ""
        super().__init__(f"rank {rank}{place}", where)
        self.rank, self.connection = rank, connection
        self.answers: dict[int, Any] = {}

    def take(self, message: Any) -> None:
        """Take in a message, which may be an answer."""
        super().take(message)
        if message == TRANSFER_ENDED:
            self.transfer_has_ended = True
        elif isinstance(message, tuple):
            order, answer = message
            self.answers[order] = answer


class RemoteExecutor(Executor):
    """Sends every order to all ranks, in the same sequence; the first rank of the last stage answers with a step's result.

    A subclass makes `ranks`, calls `_start`, and says how to `_kill` them.
    """

    ranks: list[RemoteRank]

    def __init__(self, config: EngineConfig) -> None:
        self.grid = Grid(1, config.pipeline_parallel_size, config.tensor_parallel_size)
        self.ranks = []
        self._config = config
        self._num_orders = 0
        self._transfers = OutputAggregator(self.grid.world_size)
        self._reason = ""

    def _start(self) -> None:
        """Wait until every rank has loaded its part of the model.

        Raises:
            ValueError: a rank refuses a checkpoint, a device or a size; in its words.
            ExecutorError: a rank could not start.
        """
        self._watch = Watch(self.ranks)
        memory = [self._answer(rank, 0, START_SECONDS) for rank in self.ranks]
        for rank in self.ranks:
            rank.expect_heartbeats()
        self.sources = [rank.connection for rank in self.ranks]
        self._num_blocks = min(count for count, _, _ in memory)
        self.bytes_per_block = max(size for _, size, _ in memory)
        self.on_gpu = memory[0][2]

    def _send(self, order: bytes) -> None:
        """Send an order to all ranks. `_listen` finds out if a rank is gone."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(order)

    def _listen(self, timeout: float) -> None:
        """Take in what the ranks have sent, and mark ranks that are gone; wait up to `timeout` seconds for something."""
        by_connection = {rank.connection: rank for rank in self.ranks if not rank.is_gone}
        ready = wait(list(by_connection), timeout)
        with uninterrupted():
            for connection in ready:
                by_connection[connection].drain(connection)  # type: ignore[index,arg-type]

    def _kill(self) -> None:
        """End all ranks, whatever they do. Their connections are closed."""
        raise NotImplementedError

    def _end(self, reason: str) -> None:
        self.is_broken, self._reason = True, reason
        for rank in self.ranks:
            rank.connection.close()
        self._kill()

    def close(self) -> None:
        """End all ranks; those that have not ended after CLOSE_SECONDS are killed."""
        if self.is_broken:
            return
        with contextlib.suppress(ExecutorError, OSError):
            self._order("shutdown")
            deadline = time.monotonic() + CLOSE_SECONDS
            while not all(rank.is_gone for rank in self.ranks) and time.monotonic() < deadline:
                self._listen(0.01)
        self._end("the ranks have been shut down")

    # ---------------------------------------------------------------- what the engine calls

    def num_blocks_that_fit(self) -> int:
        """The minimum over the ranks."""
        return self._num_blocks

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Have every rank allocate its caches and buffers; the settings are complete now."""
        self._call("allocate", self._config, num_blocks, num_host_blocks)

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Tell every rank; the result comes from the first rank of the last stage."""
        if schedule.connector_metadata is not None:
            self.forget_ends()
        number = self._order("launch", schedule)
        output_rank = self.ranks[self.grid.world_size - self.grid.tensor]
        if schedule.connector_metadata is None:
            return lambda: self._answer(output_rank, number)
        return lambda: self._gather(number, output_rank)

    @property
    def transfer_has_ended(self) -> bool:
        """See `Executor`."""
        return any(rank.transfer_has_ended for rank in self.ranks)

    def forget_ends(self) -> None:
        """See `Executor`."""
        for rank in self.ranks:
            rank.transfer_has_ended = False

    def _gather(self, number: int, output_rank: RemoteRank) -> ModelRunnerOutput:
        """The result of a step with KV transfers: a transfer has ended once it has ended on every rank."""
        results = [self._answer(rank, number) for rank in self.ranks]
        result = results[output_rank.rank]
        result.connector_output = self._transfers.add([r.connector_output for r in results])
        return result

    def handshake_metadata(self) -> list[Any]:
        """Of every rank."""
        return self._call("handshake_metadata")

    def forget_requests(self) -> dict[str, list[int]]:
        """Drop the state of all requests on every rank; see `Executor`."""
        if self.is_broken:
            return {}
        answers = self._call("forget_requests")
        self._transfers = OutputAggregator(self.grid.world_size)
        for answer in answers:  # a rank whose part of a transfer has ended does not report that again
            missing = {key for other in answers for key in other} - answer.keys()
            self._transfers.add([KVConnectorOutput(finished_recving=missing)])
        return {key: block_ids for answer in answers for key, block_ids in answer.items()}

    def check_health(self) -> None:
        """Check whether a rank has ended, hangs, or has been silent for too long."""
        self._check()
        self._hear(0)

    # ---------------------------------------------------------------- orders and answers

    def _check(self) -> None:
        if self.is_broken:
            raise ExecutorError(self._reason)

    def _order(self, name: str, *arguments: Any) -> int:
        """Send all ranks an order; returns its number."""
        self._check()
        order = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
        with uninterrupted(), waiting_for_others():  # a full queue is for the ranks to empty
            self._num_orders += 1
            self._send(order)
        return self._num_orders

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """Have every rank do something, and wait for all answers."""
        number = self._order(name, *arguments)
        return [self._answer(rank, number) for rank in self.ranks]

    def _answer(self, rank: RemoteRank, order: int, timeout: float = ORDER_SECONDS) -> Any:
        """Wait for a rank's answer to an order, and drop its answers to earlier ones. Watches all ranks meanwhile."""
        self._check()
        deadline = time.monotonic() + timeout
        while order not in rank.answers:
            with waiting_for_others():
                self._hear(LOOK_SECONDS)
            if time.monotonic() > deadline:
                what = "answered" if rank.is_ready else "started"
                self._fail(f"{rank.name}, {rank.where}, has not {what} after {timeout:g} seconds")
        answer = rank.answers[order]
        rank.answers = {number: other for number, other in rank.answers.items() if number > order}
        return answer

    def _hear(self, timeout: float) -> None:
        """Listen to all ranks; the first sign of trouble ends them all.

        Raises:
            ValueError: a rank refuses what the user has asked for.
            ExecutorError: any other trouble.
        """
        if (verdict := self._watch.look(self._listen, timeout)) is not None:
            self._fail(verdict.text, ValueError if verdict.is_users else ExecutorError)

    def _fail(self, reason: str, kind: type[Exception] = ExecutorError) -> NoReturn:
        self._end(reason)
        raise kind(reason)
