"""Computes which parts of the KV cache two ranks of different engines have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport.messages import Fetch

BlockIds = Sequence[int]


def check_same(mine: dict[str, str | int], theirs: dict[str, str | int]) -> None:
    """Compare two fingerprints.

    Raises:
        ValueError: names every field that differs, and both values.
    """
    differing = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if differing:
        values = (
            f"{key} is {mine.get(key)!r} here and {theirs.get(key)!r} there" for key in differing
        )
        raise ValueError("these two cannot exchange KV blocks: " + ", ".join(values))


@dataclass(frozen=True)
class Piece:
    """The layers and heads that this rank and one of another engine have in common.

    Attributes:
        peer: index of the other rank in the list of its engine's ranks.
        layers: numbered as in the model.
        local_head, remote_head: the first of the heads, counted from each rank's first one.
        num_heads: how many they share.
    """

    peer: int
    layers: range
    local_head: int
    remote_head: int
    num_heads: int

    def fetch(self, remote_ids: BlockIds) -> Fetch:
        """The message that asks the other rank for these of its blocks."""
        return Fetch(
            first_layer=self.layers.start,
            end_layer=self.layers.stop,
            head=self.remote_head,
            num_heads=self.num_heads,
            block_ids=list(remote_ids),
        )

    def runs(self, mine: KVLayout, theirs: KVLayout) -> tuple[int, int]:
        """In how many contiguous runs of each block the heads are, here and there, and the bytes of
        a run."""
        if self.num_heads == len(mine.heads) == len(theirs.heads):
            return 1, mine.block_bytes
        return mine.num_planes, self.num_heads * mine.head_bytes


def common_piece(mine: KVLayout, theirs: KVLayout, peer: int = 0) -> Piece | None:
    """What two ranks have in common; None if nothing."""
    layers = range(max(mine.first_layer, theirs.first_layer), min(mine.end_layer, theirs.end_layer))
    first = max(mine.heads.start, theirs.heads.start)
    num_heads = min(mine.heads.stop, theirs.heads.stop) - first
    if not layers or num_heads < 1:
        return None
    return Piece(peer, layers, first - mine.heads.start, first - theirs.heads.start, num_heads)


def _pieces(
    mine: KVLayout, theirs: tuple[KVLayout, ...], exchanges: Callable[[KVLayout], bool]
) -> tuple[Piece, ...]:
    for other in theirs:
        check_same(mine.fingerprint, other.fingerprint)
    peers = [(common_piece(mine, other, peer), other) for peer, other in enumerate(theirs)]
    return tuple(piece for piece, other in peers if piece is not None and exchanges(other))


@lru_cache(maxsize=256)
def pieces_from(mine: KVLayout, theirs: tuple[KVLayout, ...]) -> tuple[Piece, ...]:
    """What this rank reads from which ranks of another engine: every layer and head of its own
    exactly once.

    Where several ranks hold the same heads on both sides, each of them reads from a different one.

    Args:
        theirs: the layouts of all ranks of the other engine.

    Raises:
        ValueError: the layouts do not fit, or a layer or head is missing or there twice.
    """
    found = _pieces(mine, theirs, lambda other: other.replica == mine.replica % other.num_replicas)
    cells = [
        (layer, p.local_head + head)
        for p in found
        for layer in p.layers
        for head in range(p.num_heads)
    ]
    if len(cells) != len(set(cells)) or len(cells) != len(mine.layers) * len(mine.heads):
        raise ValueError(
            f"the other engine's {len(theirs)} ranks do not have every layer and KV head exactly "
            "once"
        )
    return found


@lru_cache(maxsize=256)
def pieces_to(mine: KVLayout, theirs: tuple[KVLayout, ...]) -> tuple[Piece, ...]:
    """What this rank pushes to which ranks of another engine: the counterpart of what `pieces_from`
    computes there.

    Raises:
        ValueError: the layouts do not fit.
    """
    return _pieces(mine, theirs, lambda other: mine.replica == other.replica % mine.num_replicas)
