"""Describes which part of the KV cache a rank has, and how that part lies in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.layers.tensor_parallel import num_kv_heads_of_rank

_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
_MAX_SIZE = 1 << 20  # of any dimension that a peer may claim, except the number of blocks


@dataclass(frozen=True)
class KVLayout:
    """The part of a model's KV cache that one rank has, and how it lies in memory. Peers exchange
    it as plain data.

    Attributes:
        num_layers, num_kv_heads: of the model. 0 KV heads means latent attention: every rank has
            all of the latent.
        block_size: tokens per block.
        width: numbers per token and head (`head_dim`, and 4 bytes of scale if the cache is
            quantized), or per token (latent attention).
        dtype: torch's name, such as "bfloat16".
        num_blocks: blocks in this rank's cache.
        first_layer, end_layer: the layers of this rank, without `end_layer` (pipeline parallelism).
        tp_rank, tp_size: determine the KV heads of this rank (tensor parallelism).

    Raises:
        ValueError: no rank can have such a layout.
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
            raise ValueError(
                f"a KV cache of {self.dtype!r} cannot be transferred, only {', '.join(_ITEM_BYTES)}"
            )
        sizes = (self.num_layers, self.block_size, self.width, self.tp_size, self.num_kv_heads + 1)
        if not all(1 <= size <= _MAX_SIZE for size in sizes) or not 1 <= self.num_blocks < 1 << 40:
            raise ValueError(f"impossible sizes of a KV cache: {self}")
        if (
            not 0 <= self.first_layer < self.end_layer <= self.num_layers
            or not 0 <= self.tp_rank < self.tp_size
        ):
            raise ValueError(f"a rank that the model does not have: {self}")
        if (
            self.num_kv_heads
            and self.num_kv_heads % self.tp_size
            and self.tp_size % self.num_kv_heads
        ):
            raise ValueError(f"{self.num_kv_heads} KV heads do not fit on {self.tp_size} ranks")

    @property
    def is_latent(self) -> bool:
        """True if each token has one latent (multi-head latent attention) and no heads."""
        return self.num_kv_heads == 0

    @property
    def layers(self) -> range:
        """This rank's layers."""
        return range(self.first_layer, self.end_layer)

    @property
    def heads(self) -> range:
        """This rank's KV heads, numbered as in the model. A latent counts as one head that every
        rank has."""
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
        """Shape of one layer's cache."""
        rows = (self.block_size, self.width)
        return (
            (self.num_blocks, *rows)
            if self.is_latent
            else (self.num_blocks, 2, len(self.heads), *rows)
        )

    @property
    def num_planes(self) -> int:
        """Planes of a block: one for keys and one for values, or a single one for a latent."""
        return 1 if self.is_latent else 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one plane of a block. The heads of a plane are contiguous."""
        return self.block_size * self.width * _ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer of this rank."""
        return self.num_planes * len(self.heads) * self.head_bytes

    def check_blocks(self, block_ids: Sequence[int]) -> None:
        """Refuse blocks that this rank does not have.

        Raises:
            ValueError: names one of them.
        """
        for block in (min(block_ids, default=0), max(block_ids, default=0)):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} of a KV cache that has {self.num_blocks} blocks")

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What must be equal on ranks that exchange blocks; their parallelism may differ."""
        same = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "block_size": self.block_size,
        }
        return {
            **same,
            "latent_width" if self.is_latent else "head_dim": self.width,
            "dtype": self.dtype,
        }
