"""The book of transfers: which are under way, who touches whose blocks just now, and which have come to their end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

_REMEMBERED = 10_000  # ids of transfers that have ended: who comes late is refused at once


@dataclass(frozen=True)
class Ended:
    """A transfer has ended: nobody touches its blocks any more, on this side or on the other.

    Attributes:
        error: why it is not complete; empty if it is.
        invalid_block_ids: of this rank's blocks, those whose content has not come, or not whole.
        num_bytes: that have been moved.
        seconds: from its beginning to its end.
    """

    transfer_id: str
    error: str = ""
    invalid_block_ids: frozenset[int] = frozenset()
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass
class _Transfer:
    """A transfer that is under way.

    Attributes:
        waiting: the peers whose part has not come to its end.
        blocks: of this rank, that peers may fill.
        missing: those of them that have still to come, by peer and layer.
        patience: seconds without progress, and with nobody touching a block, after which it is given up.
        touching: how many are moving blocks just now.
    """

    waiting: set[str]
    blocks: frozenset[int]
    missing: dict[tuple[str, int], set[int]]
    patience: float
    touching: int = 0
    error: str = ""
    num_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    progress: float = field(default_factory=time.monotonic)

    def expects(self, peer: str, layers: Sequence[int], blocks: Collection[int]) -> bool:
        """Whether a peer may fill blocks, perhaps again."""
        return all((peer, layer) in self.missing for layer in layers) and self.blocks.issuperset(blocks)

    @property
    def is_over(self) -> bool:
        return not self.touching and (bool(self.error) or not self.waiting)


class Transfers:
    """All transfers of a rank, as its threads see them.

    A transfer has a part for each peer. Whoever is going to move blocks says so before (`enter`) and after (`leave`); after
    an error nobody may enter any more, and the transfer has ended when the last one has left.

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
            peers: with whom a part of it has to be finished; with nobody: it has ended.
            blocks: of this rank, to be filled by
            parts: the pairs of a peer and a layer.
            patience: seconds without progress after which it is given up.

        Raises:
            ValueError: its id has been used before.
        """
        blocks = frozenset(blocks)
        with self._changed:
            if transfer_id in self._known:
                raise ValueError(f"a transfer {transfer_id!r} has begun before: every one needs an id of its own")
            self._known.add(transfer_id)
            missing = {part: set(blocks) for part in parts}
            self._open[transfer_id] = _Transfer(set(peers), blocks, missing, patience)
            self._settle(transfer_id)
            self._changed.notify_all()

    def is_known(self, transfer_id: str, wait_seconds: float = 0.0) -> bool:
        """Whether a transfer has begun, perhaps also ended; waits until it has begun."""
        with self._changed:
            return self._changed.wait_for(lambda: transfer_id in self._known, wait_seconds)

    def enter(self, transfer_id: str, peer: str, layers: Sequence[int] = (), blocks: Collection[int] = ()) -> str:
        """Blocks are going to be moved with a peer; returns why they must not, empty if they may.

        Args:
            layers, blocks: what the peer is going to fill, if it is the one who writes.
        """
        with self._changed:
            transfer = self._open.get(transfer_id)
            if transfer is None:
                return f"transfer {transfer_id!r} has ended, or was never asked for"
            if transfer.error or peer not in transfer.waiting:
                return transfer.error or "this part of the transfer has ended"
            if layers and not transfer.expects(peer, layers, blocks):
                return f"these blocks of the layers from {layers[0]} are not what this rank was asked for"
            transfer.touching += 1
            transfer.progress = time.monotonic()
            return ""

    def leave(
        self,
        transfer_id: str,
        peer: str,
        arrived: Iterable[tuple[int, Iterable[int]]] = (),
        num_bytes: int = 0,
        error: str = "",
        finished: bool = False,
    ) -> str:
        """The blocks that were being moved with a peer are not touched any more.

        Args:
            arrived: layers, and the blocks that are filled there.
            error: why they are not; the whole transfer fails.
            finished: the peer's part has ended.

        Returns:
            Why the transfer has failed, if it has.
        """
        with self._changed:
            if (transfer := self._open.get(transfer_id)) is None:
                return ""
            transfer.touching -= 1
            transfer.progress = time.monotonic()
            transfer.num_bytes += num_bytes
            for layer, blocks in arrived:
                transfer.missing.get((peer, layer), set()).difference_update(blocks)
            if finished and not error:
                left = [layer for (owner, layer), blocks in transfer.missing.items() if owner == peer and blocks]
                if left and not transfer.error:
                    error = f"a peer says that all has been written, but blocks of layer {left[0]} have not come"
                transfer.waiting.discard(peer)
            transfer.error = transfer.error or error
            self._settle(transfer_id)
            return transfer.error

    def fail(self, transfer_id: str, error: str) -> None:
        """Nobody may begin anything for this transfer any more; it ends when what has begun has ended."""
        with self._changed:
            if transfer := self._open.get(transfer_id):
                transfer.error = transfer.error or error
                self._settle(transfer_id)

    def fail_all(self, error: str, writer: str | None = None) -> None:
        """The same for all transfers, or for all in which a peer, which is gone now, had still to write."""
        with self._changed:
            for transfer_id, transfer in list(self._open.items()):
                if writer is None or (writer in transfer.waiting and transfer.missing):
                    self.fail(transfer_id, error)

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        with self._changed:
            return len(self._open)

    @property
    def open_blocks(self) -> dict[str, list[int]]:
        """Of the transfers that have not ended, the blocks of this rank that peers may fill."""
        with self._changed:
            return {key: sorted(one.blocks) for key, one in self._open.items() if one.blocks}

    def _settle(self, transfer_id: str) -> None:
        """Close the transfer if it is over; called by the one who holds the lock."""
        transfer = self._open[transfer_id]
        if not transfer.is_over:
            return
        del self._open[transfer_id]
        invalid = frozenset().union(*transfer.missing.values())
        seconds = time.monotonic() - transfer.begun
        self._ended.append(Ended(transfer_id, transfer.error, invalid, transfer.num_bytes, seconds))
        self._recent.append(transfer_id)
        if len(self._recent) > _REMEMBERED:
            self._known.remove(self._recent.popleft())
        self._changed.notify_all()
        self.on_ended()

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """What has ended since the last call; if nothing has, waits for it."""
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
