"""Keeps the book of a rank's transfers: which are open, how many threads touch their blocks, and
which have ended."""

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from nanovllm.kv_transfer.transport.messages import Refused

_REMEMBERED = 10_000  # ids of ended transfers: messages about them are refused at once


@dataclass(frozen=True)
class Ended:
    """A transfer that has ended: its blocks are no longer touched, on this side or on the other.

    Attributes:
        error: why it is not complete; empty if it is.
    """

    transfer_id: str
    error: str = ""


@dataclass
class _Transfer:
    """An open transfer.

    Attributes:
        blocks: of this rank, that peers may fill.
        missing: those of them that have not arrived yet, by layer, of each peer whose part has not
            ended.
        touching: how many threads are moving blocks at the moment.
    """

    blocks: frozenset[int]
    missing: dict[Hashable, dict[int, set[int]]]
    error: str
    touching: int = 0

    def check(self, peer: Hashable, layers: Iterable[int], blocks: Collection[int]) -> None:
        """Refuse what the peer has no part in."""
        if self.error or peer not in self.missing:
            raise Refused(self.error or "this part of the transfer has ended")
        if not self.missing[peer].keys() >= {*layers} or not self.blocks.issuperset(blocks):
            raise Refused("these blocks are not the requested ones")

    def arrived(
        self, peer: Hashable, layers: Iterable[int], blocks: Collection[int], is_last: bool
    ) -> None:
        """Note that the peer's blocks have moved, and perhaps the end of its part."""
        self.check(peer, layers, blocks)
        for layer in layers:
            self.missing[peer][layer].difference_update(blocks)
        if is_last:
            if left := [layer for layer, blocks in self.missing[peer].items() if blocks]:
                raise Refused(f"a peer has finished, but blocks of layer {left[0]} are missing")
            del self.missing[peer]


class Transfers:
    """All transfers of a rank, shared by its threads.

    A transfer has a part per peer (of a peer that pushes, its id; else the `Rank` that serves it),
    and ends when all have ended. After an error it refuses everything new, and ends when no thread
    touches its blocks any more.

    Attributes:
        on_ended: called, by any thread, when `poll` has a transfer to report.
    """

    def __init__(self) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._open: dict[str, _Transfer] = {}
        self._ended: list[Ended] = []
        self._recent: dict[str, None] = {}  # the last that have ended

    def begin(
        self,
        transfer_id: str,
        parts: Mapping[Hashable, Iterable[int]],
        blocks: Collection[int] = (),
        error: str = "",
    ) -> None:
        """Note a new transfer.

        Args:
            parts: the layers that each peer fills; without any, the transfer has ended already.
            blocks: of this rank, to be filled.
            error: why it cannot be done; it has ended, too.

        Raises:
            ValueError: its id has been used before.
        """
        with self._changed:
            if transfer_id in self._open or transfer_id in self._recent:
                raise ValueError(f"transfer {transfer_id!r} already exists: use a unique id")
            missing = {
                peer: {layer: set(blocks) for layer in layers} for peer, layers in parts.items()
            }
            self._open[transfer_id] = _Transfer(frozenset(blocks), missing, error)
            self._settle(transfer_id)
            self._changed.notify_all()

    def is_known(self, transfer_id: str, wait_seconds: float = 0.0) -> bool:
        """Whether a transfer has begun, and perhaps ended; waits until it has begun."""
        with self._changed:
            return self._changed.wait_for(
                lambda: transfer_id in self._open or transfer_id in self._recent, wait_seconds
            )

    @contextmanager
    def moving(
        self,
        transfer_id: str,
        peer: Hashable,
        layers: Iterable[int] = (),
        blocks: Collection[int] = (),
        is_last: bool = False,
    ) -> Iterator[None]:
        """While a thread moves blocks with a peer, or takes note of the end of its part. An
        exception inside fails the transfer.

        Args:
            layers, blocks: what is filled here, perhaps again.
            is_last: the peer's part ends with that.

        Raises:
            Refused: the transfer has failed or ended, or the peer has no such part in it.
        """
        with self._changed:
            if (transfer := self._open.get(transfer_id)) is None:
                raise Refused(f"transfer {transfer_id!r} has ended, or was never requested")
            transfer.check(peer, layers, blocks)
            transfer.touching += 1
        try:
            yield
            with self._changed:
                transfer.arrived(peer, layers, blocks, is_last)
        except BaseException as error:
            self.fail(transfer_id, str(error) or repr(error))
            raise
        finally:
            with self._changed:
                transfer.touching -= 1
                self._settle(transfer_id)

    def fail(self, transfer_id: str, error: str) -> None:
        """Refuse anything new for a transfer. It ends when the threads that touch its blocks have
        left."""
        with self._changed:
            if transfer := self._open.get(transfer_id):
                transfer.error = transfer.error or error
                self._settle(transfer_id)

    def of(self, peer: Hashable = None) -> list[str]:
        """The open transfers, or only those in which a peer's part has not ended."""
        with self._changed:
            return [
                key
                for key, transfer in self._open.items()
                if peer is None or peer in transfer.missing
            ]

    def _settle(self, transfer_id: str) -> None:
        """Close the transfer if it is over. The caller holds the lock."""
        transfer = self._open[transfer_id]
        if transfer.touching or (transfer.missing and not transfer.error):
            return
        del self._open[transfer_id]
        self._ended.append(Ended(transfer_id, transfer.error))
        self._recent[transfer_id] = None
        if len(self._recent) > _REMEMBERED:
            del self._recent[next(iter(self._recent))]
        self._changed.notify_all()
        self.on_ended()

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """Transfers that have ended since the last call; waits for one if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, wait_seconds)
            ended = self._ended
            self._ended = []
            return ended
