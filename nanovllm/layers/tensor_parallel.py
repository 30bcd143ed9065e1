"""Layers that are divided among ranks, which together compute the whole layer's result (Shoeybi et
al. 2019).

Built by notebooks/22_tensor_parallel.ipynb and 26: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from nanovllm import ops
from nanovllm.distributed.groups import GroupCoordinator, get_tp_group
from nanovllm.layers.basic import Embedding, Layer, Linear, LMHead, MergedLinear, Place, QKVLinear


@dataclass(frozen=True)
class Shard:
    """The rows of a matrix with `total` rows that belong to this rank: `size` rows, from
    `start`."""

    start: int
    size: int
    total: int

    @classmethod
    def of(cls, total: int, group: GroupCoordinator) -> Shard:
        """This rank's share. Every rank has ⌈total / world_size⌉ rows, in the order of the ranks,
        until no rows are left: the last ranks may have fewer, or none (then `start` is `total`).
        """
        most = -(-total // group.world_size)
        start = min(group.rank_in_group * most, total)
        return cls(start, min(most, total - start), total)

    @property
    def rows(self) -> slice:
        """The rows as a slice of the whole matrix."""
        return slice(self.start, self.start + self.size)

    def place(self, parameter: Tensor, first: int = 0) -> Place:
        """The place of these rows of a checkpoint's tensor: the rows of `parameter` from
        `first`."""
        others = parameter.shape[1:]
        source = (self.rows, *(slice(0, size) for size in others))
        return Place(parameter[first : first + self.size], source, (self.total, *others))


class ColumnParallelLinear(Linear):
    """Each rank computes some of the outputs, `[num_tokens, in_features]` to
    `[num_tokens, out_features / tp]`.

    "Column" refers to Megatron's y = xA: the columns of A are the rows of the weight, which is Aᵀ.

    Args:
        in_features, out_features: of the whole layer. Several numbers of outputs are several layers
            with the same input, as one product: a rank stacks its rows of each. A `Shard` says
            which rows these are.
        group: the ranks that share the layer; the tensor-parallel group by default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int | Shard],
        bias: bool = False,
        group: GroupCoordinator | None = None,
    ) -> None:
        group = group or get_tp_group()
        parts = [out_features] if isinstance(out_features, int) else out_features
        shards = [part if isinstance(part, Shard) else Shard.of(part, group) for part in parts]
        super().__init__(in_features, sum(shard.size for shard in shards), bias)
        self.shards = shards

    def place(self, kind: str, part: int = 0) -> Place:
        """The place of this rank's rows of a checkpoint's tensor, which is part number `part` of
        this layer."""
        first = sum(shard.size for shard in self.shards[:part])
        return self.shards[part].place(getattr(self, kind), first)


class RowParallelLinear(Linear):
    """Each rank has some of the inputs, `[num_tokens, in_features / tp]`, and the sum over the
    ranks is the layer's output, `[num_tokens, out_features]`, on all of them.

    Args:
        in_features, out_features: of the whole layer.
        reduce: False: return this rank's partial sum, and leave the rest to the caller.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        reduce: bool = True,
        group: GroupCoordinator | None = None,
    ) -> None:
        group = group or get_tp_group()
        shard = Shard.of(in_features, group)
        super().__init__(shard.size, out_features, bias)
        self.group = group
        self.shard = shard
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's columns of the whole input by its columns of the weight
        (`ops.linear`). The first rank alone adds the bias.

        Returns: with `reduce`, the sum over the ranks; without, this rank's partial sum.
        """
        # Only one rank adds the bias, so that the sum contains it once.
        partial_sum = ops.linear(x, self.weight, self.bias if self.group.is_first else None)
        return self.group.all_reduce(partial_sum) if self.reduce else partial_sum

    def place(self, kind: str, part: int = 0) -> Place:
        """The place of this rank's columns of the weight; every rank keeps the whole bias."""
        if kind == "bias":
            return super().place(kind)
        outputs = len(self.weight)
        return Place(self.weight, (slice(0, outputs), self.shard.rows), (outputs, self.shard.total))


class MergedColumnParallelLinear(ColumnParallelLinear):
    """The two input matrices of an MLP as one product."""

    parts = ("gate_proj", "up_proj")


def num_kv_heads_of_rank(num_kv_heads: int, tp: int) -> int:
    """The number of KV heads on each of `tp` ranks: an equal share, but at least one, which several
    ranks then replicate."""
    return max(1, num_kv_heads // tp)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product; a rank has whole query heads and their KV
    heads.

    Args:
        hidden_size: number of inputs.
        head_dim, num_heads, num_kv_heads: of the whole layer.

    Attributes:
        num_heads, num_kv_heads: of this rank.
    """

    parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
        group: GroupCoordinator | None = None,
    ) -> None:
        """Create this rank's rows, see `ColumnParallelLinear`: an equal share of the query heads,
        and a `Shard` of the keys and one of the values (the same rows).

        Query head h uses KV head `h * num_kv_heads // num_heads`. A rank has `num_kv_heads_of_rank`
        KV heads, from the one that its first query head uses. A head is `head_dim` rows. Sets
        `num_heads` and `num_kv_heads`."""
        group = group or get_tp_group()
        tp = group.world_size
        kept = num_kv_heads_of_rank(num_kv_heads, tp)
        first = group.rank_in_group * num_kv_heads // tp  # KV head of this rank's first query head
        kv = Shard(first * head_dim, kept * head_dim, num_kv_heads * head_dim)
        super().__init__(hidden_size, [num_heads * head_dim, kv, kv], bias, group)
        self.num_heads = num_heads // tp
        self.num_kv_heads = kept


class VocabParallelEmbedding(Embedding):
    """Each rank has the rows of some tokens, `[num_tokens]` to `[num_tokens, hidden_size]`. It uses
    zeros for the other tokens, and the ranks add up their results.

    A vocabulary that cannot be divided evenly is padded: the last ranks have rows, never read, for
    tokens that do not exist.

    Args:
        vocab_size, hidden_size, factor: of the whole layer, see `Embedding`.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: GroupCoordinator | None = None,
        factor: float | None = None,
    ) -> None:
        group = group or get_tp_group()
        super().__init__(-(-vocab_size // group.world_size), hidden_size, factor)
        self.group = group
        self.shard = Shard.of(vocab_size, group)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up this rank's tokens, use zeros for the others, and sum over the ranks
        (`group.all_reduce`).

        Row i of this rank's weight is token `shard.start + i`, and only the first `shard.size` rows
        are tokens. `Embedding.forward` looks up rows, of which every number must exist, so a token
        of another rank needs a row of this rank first, and zeros afterwards: written, not
        multiplied, since a row of padding may be NaN. A group of one looks up all tokens and calls
        no collective."""
        if self.group.world_size == 1:  # this rank has all tokens: nothing to mask
            return super().forward(token_ids)
        local = token_ids - self.shard.start
        elsewhere = (local < 0) | (local >= self.shard.size)
        x = super().forward(local.masked_fill(elsewhere, 0))
        return self.group.all_reduce(x.masked_fill(elsewhere[:, None], 0))

    def place(self, kind: str, part: int = 0) -> Place:
        """The place of the rows of this rank's tokens."""
        return self.shard.place(getattr(self, kind))


class ParallelLMHead(VocabParallelEmbedding):
    """Each rank scores the tokens of its embedding, then all ranks gather all scores:
    `[num_rows, hidden_size]` to `[num_rows, vocab_size]`."""

    packable = True

    def forward(self, x: Tensor) -> Tensor:
        # Without the padding's scores, which are at the end.
        return self.group.all_gather(ops.linear(x, self.weight))[:, : self.shard.total]


# How ranks share a plain `Linear`, by its name in the model. One with another name stays whole.
STYLES: dict[str, type[ColumnParallelLinear] | type[RowParallelLinear]] = {
    "o_proj": RowParallelLinear,
    "down_proj": RowParallelLinear,
}


def part_of(layer: Layer, name: str, group: GroupCoordinator) -> Layer | None:
    """This rank's part of a whole layer that the ranks of a group share; None for a layer that
    stays as it is.

    Args:
        name: of the layer in the module that has it.
    """
    part: Layer | None = None
    has_bias = isinstance(layer, Linear) and layer.bias is not None
    if isinstance(layer, QKVLinear):
        part = QKVParallelLinear(
            layer.in_features,
            layer.head_dim,
            layer.num_heads,
            layer.num_kv_heads,
            bias=has_bias,
            group=group,
        )
    elif isinstance(layer, MergedLinear):
        part = MergedColumnParallelLinear(layer.in_features, layer.sizes, has_bias, group)
    elif isinstance(layer, LMHead):
        part = ParallelLMHead(layer.vocab_size, layer.hidden_size, group)
    elif type(layer) is Embedding:
        part = VocabParallelEmbedding(layer.vocab_size, layer.hidden_size, group, layer.factor)
    elif type(layer) is Linear and name in STYLES:
        part = STYLES[name](layer.in_features, layer.out_features, has_bias, group=group)
    if part is not None:
        part.parts = layer.parts
        part.packable = layer.packable
    return part


def parallelize(model: nn.Module, group: GroupCoordinator | None = None) -> None:
    """Replace each layer of a whole model that ranks can share by this rank's part of it. The model
    must not have memory yet: the parts are new layers, without values.

    Args:
        group: the ranks; the tensor-parallel group by default. In a group of one, nothing changes.
    """
    group = group or get_tp_group()
    if group.world_size == 1:
        return
    for name, layer in list(model.named_children()):
        part = part_of(layer, name, group) if isinstance(layer, Layer) else None
        if part is None:
            parallelize(layer, group)
        else:
            model.register_module(name, part)


# Latent attention: what has outputs per head. The projections to a latent stay whole.
STYLES.update(
    q_proj=ColumnParallelLinear, q_b_proj=ColumnParallelLinear, kv_b_proj=ColumnParallelLinear
)
