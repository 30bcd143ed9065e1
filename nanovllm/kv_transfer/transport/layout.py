"""What of the KV cache a rank has, and which parts of it two ranks of different engines have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from nanovllm.layers.tensor_parallel import num_kv_heads_of_rank

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_MOST = 1 << 20  # of anything that a peer may say it has, but blocks


@dataclass(frozen=True)
class Strip:
    """Where some heads of a layer stand within a block: `planes` runs of contiguous bytes, one for keys and one for
    values; a single one where nothing lies between them."""

    offset: int
    run: int
    planes: int
    plane_stride: int


@dataclass(frozen=True)
class KVLayout:
    """The part of a model's KV cache that one rank has, and how it lies in memory; plain data, which peers exchange.

    Attributes:
        num_layers, num_kv_heads: of the model; 0 KV heads: latent attention, of which every rank has all.
        first_layer, end_layer: the layers of this rank, `end_layer` excluded (pipeline parallelism).
        tp_rank, tp_size: which KV heads it has (tensor parallelism): its share, or one that several ranks have.
        block_size: tokens a block.
        width: numbers a token and head (`head_dim`), or a token (latent attention).
        dtype: torch's name, such as "bfloat16".
        num_blocks: of this rank's cache.

    Raises:
        ValueError: no rank can have that.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    width: int
    dtype: str
    num_blocks: int
    first_layer: int
    end_layer: int
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"a KV cache of {self.dtype!r} cannot be transferred, only {', '.join(_ITEM_BYTES)}")
        sizes = (self.num_layers, self.block_size, self.width, self.tp_size, self.num_kv_heads + 1)
        if not all(1 <= size <= _MOST for size in sizes) or not 1 <= self.num_blocks < 1 << 40:
            raise ValueError(f"sizes of a KV cache that cannot be: {self}")
        if not 0 <= self.first_layer < self.end_layer <= self.num_layers or not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"a rank that the model does not have: {self}")
        if self.num_kv_heads and self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads do not fit on {self.tp_size} ranks")

    @property
    def is_latent(self) -> bool:
        """Whether there is one latent a token (multi-head latent attention) and no heads."""
        return self.num_kv_heads == 0

    @property
    def layers(self) -> range:
        """This rank's layers."""
        return range(self.first_layer, self.end_layer)

    @property
    def heads(self) -> range:
        """This rank's KV heads, as the model counts them. A latent counts as the one head that everybody has."""
        if self.is_latent:
            return range(1)
        first = self.tp_rank * self.num_kv_heads // self.tp_size
        return range(first, first + num_kv_heads_of_rank(self.num_kv_heads, self.tp_size))

    @property
    def num_replicas(self) -> int:
        """How many ranks of a pipeline stage have the same heads."""
        return max(1, self.tp_size // max(1, self.num_kv_heads))

    @property
    def replica(self) -> int:
        """The number of this rank among those with the same heads."""
        return self.tp_rank % self.num_replicas

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Of the cache of one layer."""
        rows = (self.block_size, self.width)
        return (self.num_blocks, *rows) if self.is_latent else (self.num_blocks, 2, len(self.heads), *rows)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one layer of this rank."""
        return math.prod(self.cache_shape[1:]) * _ITEM_BYTES[self.dtype]

    def strip(self, first_head: int, num_heads: int) -> Strip:
        """Where `num_heads` heads stand in a block, counted from this rank's first head.

        Raises:
            ValueError: this rank does not have them.
        """
        if first_head < 0 or num_heads < 1 or first_head + num_heads > len(self.heads):
            raise ValueError(f"heads {first_head} to {first_head + num_heads - 1} of a rank with {len(self.heads)}")
        head = self.block_size * self.width * _ITEM_BYTES[self.dtype]
        planes = 1 if self.is_latent else 2
        if num_heads == len(self.heads):
            return Strip(0, planes * num_heads * head, 1, 0)
        return Strip(first_head * head, num_heads * head, planes, len(self.heads) * head)

    def check_blocks(self, block_ids: Sequence[int]) -> None:
        """Refuse blocks that this rank does not have.

        Raises:
            ValueError: names one.
        """
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            wrong = next(block for block in block_ids if not 0 <= block < self.num_blocks)
            raise ValueError(f"block {wrong} of a KV cache that has {self.num_blocks} blocks")

    def check_part(
        self, first_layer: int, end_layer: int, first_head: int, num_heads: int, block_ids: Sequence[int]
    ) -> None:
        """Refuse what this rank does not have; heads are counted from its first one.

        Raises:
            ValueError: says what.
        """
        self.check_blocks(block_ids)
        self.strip(first_head, num_heads)
        if not self.first_layer <= first_layer < end_layer <= self.end_layer:
            raise ValueError(f"layers {first_layer} to {end_layer - 1} of a rank that has {self.layers}")

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What has to be the same wherever blocks are exchanged; the ranks may be divided differently."""
        same = {"num_layers": self.num_layers, "num_kv_heads": self.num_kv_heads, "block_size": self.block_size}
        return {**same, "latent_width" if self.is_latent else "head_dim": self.width, "dtype": self.dtype}

    def check_fits(self, other: KVLayout) -> None:
        """Refuse a rank with which no block can be exchanged.

        Raises:
            ValueError: names what differs, and both values.
        """
        check_same(self.fingerprint, other.fingerprint)


def check_same(mine: dict[str, str | int], theirs: dict[str, str | int]) -> None:
    """Compare two fingerprints.

    Raises:
        ValueError: names every field that differs, and both values.
    """
    differing = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if differing:
        values = (f"{key} is {mine.get(key)!r} here and {theirs.get(key)!r} there" for key in differing)
        raise ValueError("these two cannot exchange KV blocks: " + ", ".join(values))


@dataclass(frozen=True)
class Piece:
    """What this rank and one of another engine have in common.

    Attributes:
        peer: the other one's number in the list of its engine's ranks.
        layers: as the model counts them.
        local_head, remote_head: the first of the heads, counted from each rank's first one.
        num_heads: how many they share.
    """

    peer: int
    layers: range
    local_head: int
    remote_head: int
    num_heads: int


def common_piece(mine: KVLayout, theirs: KVLayout, peer: int = 0) -> Piece | None:
    """What two ranks have in common, if anything."""
    layers = range(max(mine.first_layer, theirs.first_layer), min(mine.end_layer, theirs.end_layer))
    first = max(mine.heads.start, theirs.heads.start)
    num_heads = min(mine.heads.stop, theirs.heads.stop) - first
    if not layers or num_heads < 1:
        return None
    return Piece(peer, layers, first - mine.heads.start, first - theirs.heads.start, num_heads)


@lru_cache(maxsize=256)
def pieces_from(mine: KVLayout, theirs: tuple[KVLayout, ...]) -> tuple[Piece, ...]:
    """From which ranks of another engine this one gets what: every layer and head of its own exactly once, also where
    several ranks have the same. Ranks that hold the same here ask different ones there.

    Args:
        theirs: of all ranks of the other engine.

    Raises:
        ValueError: they do not fit, or something is missing or there twice.
    """
    found = []
    for peer, other in enumerate(theirs):
        mine.check_fits(other)
        if other.replica == mine.replica % other.num_replicas and (piece := common_piece(mine, other, peer)):
            found.append(piece)
    cells = [(layer, p.local_head + head) for p in found for layer in p.layers for head in range(p.num_heads)]
    if len(cells) != len(set(cells)) or len(cells) != len(mine.layers) * len(mine.heads):
        raise ValueError(f"the other engine's {len(theirs)} ranks do not have every layer and KV head exactly once")
    return tuple(found)


@lru_cache(maxsize=256)
def pieces_to(mine: KVLayout, theirs: tuple[KVLayout, ...]) -> tuple[Piece, ...]:
    """Which ranks of another engine get what from this one: what `pieces_from` says to them, seen from here.

    Raises:
        ValueError: they do not fit.
    """
    found = []
    for peer, other in enumerate(theirs):
        mine.check_fits(other)
        if mine.replica == other.replica % mine.num_replicas and (piece := common_piece(mine, other, peer)):
            found.append(piece)
    return tuple(found)
