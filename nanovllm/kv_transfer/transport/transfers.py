"""Keeps the book of a rank's transfers: which are open, how many threads touch their blocks, and which have ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

_REMEMBERED = 10_000  # ids of ended transfers: messages about them are refused at once


@dataclass(frozen=True)
class Ended:
    """A transfer that has ended: its blocks are no longer touched, on this side or on the other.

    Attributes:
        error: why it is not complete; empty if it is.
        invalid_block_ids: this rank's blocks whose content did not arrive, or not completely.
    """

    transfer_id: str
    error: str = ""
    invalid_block_ids: frozenset[int] = frozenset()


@dataclass
class _Transfer:
    """An open transfer.

    Attributes:
        waiting: the peers whose part has not ended.
        blocks: of this rank, that peers may fill.
        missing: by peer and layer, those of them that have not arrived yet.
        patience: seconds without progress, and with no thread touching a block, after which the transfer fails.
        touching: how many threads are moving blocks at the moment.
    """

    waiting: set[str]
    blocks: frozenset[int]
    missing: dict[tuple[str, int], set[int]]
    patience: float
    touching: int = 0
    error: str = ""
    progress: float = field(default_factory=time.monotonic)


class Transfers:
    """All transfers of a rank, shared by its threads.

    A transfer has a part per peer. A thread calls `enter` before it moves blocks, and `leave` afterwards. After an error `enter`
    refuses, and the transfer ends when the last thread has left.

    Attributes:
        on_ended: called, by any thread, when `poll` has a transfer to report.
    """

    def __init__(self) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._open: dict[str, _Transfer] = {}
        self._ended: list[Ended] = []
        self._recent: deque[str] = deque()
        self._known: set[str] = set()  # open and recent

    def begin(
        self,
        transfer_id: str,
        peers: Iterable[str],
        blocks: Iterable[int] = (),
        parts: Iterable[tuple[str, int]] = (),
        patience: float = float("inf"),
    ) -> None:
        """Note a new transfer.

        Args:
            peers: whose parts must end; without any, the transfer has ended already.
            blocks: of this rank, to be filled.
            parts: pairs of a peer that fills them and a layer.
            patience: seconds without progress after which the transfer fails.

        Raises:
            ValueError: its id has been used before.
        """
        blocks = frozenset(blocks)
        with self._changed:
            if transfer_id in self._known:
                raise ValueError(f"a transfer {transfer_id!r} has begun before: each needs an id of its own")
            self._known.add(transfer_id)
            missing = {part: set(blocks) for part in parts}
            self._open[transfer_id] = _Transfer(set(peers), blocks, missing, patience)
            self._settle(transfer_id)
            self._changed.notify_all()

    def is_known(self, transfer_id: str, wait_seconds: float = 0.0) -> bool:
        """Whether a transfer has begun, and perhaps ended; waits until it has begun."""
        with self._changed:
            return self._changed.wait_for(lambda: transfer_id in self._known, wait_seconds)

    def enter(self, transfer_id: str, peer: str, layers: Sequence[int] = (), blocks: Collection[int] = ()) -> str:
        """Note that a thread is about to move blocks with a peer; returns why it must not, empty if it may.

        Args:
            layers, blocks: what the peer is going to fill, perhaps again, if it is the peer that writes.
        """
        with self._changed:
            transfer = self._open.get(transfer_id)
            if transfer is None:
                return f"transfer {transfer_id!r} has ended, or was never asked for"
            if transfer.error or peer not in transfer.waiting:
                return transfer.error or "this part of the transfer has ended"
            if layers and not (
                all((peer, layer) in transfer.missing for layer in layers) and transfer.blocks.issuperset(blocks)
            ):
                return f"these blocks of the layers from {layers[0]} are not what this rank was asked for"
            transfer.touching += 1
            transfer.progress = time.monotonic()
            return ""

    def leave(
        self,
        transfer_id: str,
        peer: str,
        arrived: Iterable[tuple[int, Iterable[int]]] = (),
        error: str = "",
        finished: bool = False,
    ) -> str:
        """Note that a thread no longer touches the blocks.

        Args:
            arrived: layers, and the blocks that are filled there if there is no error.
            error: why they are not filled; the whole transfer fails.
            finished: the peer's part has ended.

        Returns:
            Why the transfer has failed, if it has.
        """
        with self._changed:
            if (transfer := self._open.get(transfer_id)) is None:
                return ""
            transfer.touching -= 1
            transfer.progress = time.monotonic()
            if not error:
                for layer, blocks in arrived:
                    transfer.missing.get((peer, layer), set()).difference_update(blocks)
            if finished and not error:
                left = [layer for (owner, layer), blocks in transfer.missing.items() if owner == peer and blocks]
                if left:
                    error = f"a peer says that all has been written, but blocks of layer {left[0]} have not come"
                transfer.waiting.discard(peer)
            transfer.error = transfer.error or error
            self._settle(transfer_id)
            return transfer.error

    def fail(self, transfer_id: str, error: str) -> None:
        """Refuse anything new for a transfer. It ends when the threads that touch its blocks have left."""
        with self._changed:
            if transfer := self._open.get(transfer_id):
                transfer.error = transfer.error or error
                self._settle(transfer_id)

    def fail_all(self, error: str, writer: str | None = None) -> None:
        """Fail all transfers, or only those for which a peer that is gone had still to write."""
        with self._changed:
            for transfer_id, transfer in list(self._open.items()):
                if writer is None or (writer in transfer.waiting and transfer.missing):
                    self.fail(transfer_id, error)

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._open)

    @property
    def open_blocks(self) -> dict[str, list[int]]:
        """The blocks of this rank that peers may fill, by transfer that has not ended."""
        with self._changed:
            return {key: sorted(one.blocks) for key, one in self._open.items() if one.blocks}

    def _settle(self, transfer_id: str) -> None:
        """Close the transfer if it is over. The caller holds the lock."""
        transfer = self._open[transfer_id]
        if transfer.touching or (transfer.waiting and not transfer.error):
            return
        del self._open[transfer_id]
        invalid = frozenset().union(*transfer.missing.values())
        self._ended.append(Ended(transfer_id, transfer.error, invalid))
        self._recent.append(transfer_id)
        if len(self._recent) > _REMEMBERED:
            self._known.remove(self._recent.popleft())
        self._changed.notify_all()
        self.on_ended()

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """Transfers that have ended since the last call; waits for one if there is none."""
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                overdue = {i: t.progress + t.patience for i, t in self._open.items() if not t.touching}
                for transfer_id in [i for i, limit in overdue.items() if limit <= now]:
                    self.fail(transfer_id, f"nothing has come for {self._open[transfer_id].patience:g} s")
                if self._ended or now >= deadline:
                    break
                self._changed.wait(min(deadline - now, *(limit - now for limit in overdue.values()), 3600))
            ended, self._ended = self._ended, []
            return ended
