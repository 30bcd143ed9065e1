"""What the executors have in common whose ranks run elsewhere: orders go out, answers come back, and when something goes
wrong they find out whose fault it is."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import psutil

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.distributed.groups import Grid
from nanovllm.distributed.life_signs import LOOK_SECONDS, TRANSFER_ENDED, Peer, Watch, waiting_for_others
from nanovllm.executor.base import Executor, ExecutorError
from nanovllm.kv.connector import OutputAggregator

# Loading a large model takes long; a rank that has not begun to serve after this will not.
START_SECONDS = 600.0
# A rank that lives and does not come to the end of an order will not, after this.
ORDER_SECONDS = 300.0


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done: after half a message there would be no talking any more."""
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


def interface_of(address: str) -> str | None:
    """The name of the network interface of this machine that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (a.address for a in addresses):
            return name
    return None


class RemoteRank(Peer):
    """A rank as its executor knows it, and what it has said. Its name tells its place in the grid if there are stages.

    Attributes:
        answers: by the number of the order.
        transfer_has_ended: a KV transfer has ended on the rank since it was last asked.
    """

    transfer_has_ended = False

    def __init__(self, rank: int, grid: Grid) -> None:
        stage, tensor = divmod(rank, grid.tensor)
        place = f" (stage {stage}, tensor rank {tensor})" if grid.pipeline > 1 else ""
        super().__init__(f"rank {rank}{place}")
        self.rank = rank
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
    """Orders go to all ranks, in one order; of a step, one rank tells the result: the first of the last stage.

    A subclass makes `ranks`, calls `_start`, and says how to send, listen and end.
    """

    ranks: list[RemoteRank]

    def __init__(self, config: EngineConfig) -> None:
        self.grid = Grid(1, config.pipeline_parallel_size, config.tensor_parallel_size)
        self._config = config
        self._num_orders = 0
        self._transfers = OutputAggregator(self.grid.world_size)
        self._reason = ""

    def _send(self, order: bytes) -> None:
        """Send an order to all ranks, without waiting for them. A rank that is gone is found out by `_listen`."""
        raise NotImplementedError

    def _listen(self, timeout: float) -> None:
        """Let the ranks `take` what has come, and mark those that are gone; wait up to `timeout` seconds for something."""
        raise NotImplementedError

    def _end(self) -> None:
        """End all ranks, whatever they do."""
        raise NotImplementedError

    def _start(self) -> None:
        """Wait until every rank has loaded its part of the model.

        Raises:
            ValueError: what a rank refuses (a checkpoint, a device, a size), in its words.
            ExecutorError: a rank could not start.
        """
        self._watch = Watch(self.ranks)
        memory = [self._answer(rank, 0, START_SECONDS) for rank in self.ranks]
        for rank in self.ranks:
            rank.expect_heartbeats()
        self._num_blocks = min(count for count, _, _ in memory)
        self.bytes_per_block = max(size for _, size, _ in memory)
        self.on_gpu = memory[0][2]

    # ---------------------------------------------------------------- what the engine wants

    def num_blocks_that_fit(self) -> int:
        """The least over the ranks."""
        return self._num_blocks

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Have every rank make its caches and buffers; the settings are settled now."""
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
        """The result of a step in which something is transferred: a transfer has ended when it has on every rank."""
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
        for answer in answers:  # a rank whose part has ended will not say so again
            missing = {key for other in answers for key in other} - answer.keys()
            self._transfers.add([KVConnectorOutput(finished_recving=missing)])
        return {key: block_ids for answer in answers for key, block_ids in answer.items()}

    def check_health(self) -> None:
        """See whether a rank has ended, hangs, or has been silent for too long."""
        self._check()
        self._hear(0)

    # ---------------------------------------------------------------- orders and answers

    def _check(self) -> None:
        if self.is_broken:
            raise ExecutorError(self._reason)

    def _order(self, name: str, *arguments: Any) -> int:
        """Tell all ranks; returns the number of the order."""
        self._check()
        order = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
        with uninterrupted(), waiting_for_others():  # a full queue is theirs to empty
            self._num_orders += 1
            self._send(order)
        return self._num_orders

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """Have every rank do something, and wait for all answers."""
        number = self._order(name, *arguments)
        return [self._answer(rank, number) for rank in self.ranks]

    def _answer(self, rank: RemoteRank, order: int, timeout: float = ORDER_SECONDS) -> Any:
        """What this rank answers to an order, while all are listened to. Earlier answers are not waited for any more."""
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
        """Listen to all; the first word of trouble is the end.

        Raises:
            ValueError: a rank refuses what the user has asked for.
            ExecutorError: all else.
        """
        if (verdict := self._watch.look(self._listen, timeout)) is not None:
            self._fail(verdict.text, ValueError if verdict.is_users else ExecutorError)

    def _fail(self, reason: str, kind: type[Exception] = ExecutorError) -> NoReturn:
        self._reason = reason
        self._end()
        raise kind(reason)
