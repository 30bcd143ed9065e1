"""The layers that every model consists of (linear product, embedding, norm), and where a
checkpoint's tensors go.

Built by notebooks/10_first_tokens.ipynb and 24: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm import ops


class Packable(nn.Module):
    """A module with matrices that this machine may multiply faster if they are rearranged.

    Attributes:
        packable: they may be rearranged, since nothing but a product uses them.
    """

    packable = True
    __call__: Callable[..., Tensor]

    def pack(self) -> None:
        """Rearrange the matrices; see `ops.pack_weight`."""
        raise NotImplementedError

    def parameter_of(self, name: str) -> str:
        """Return the name of the parameter that has a matrix of the checkpoint."""
        return "weight"


class Layer(Packable):
    """A layer with weights of its own: mostly one, and perhaps a bias."""

    # Names of the checkpoint's layers whose matrices are stacked in this one.
    parts: tuple[str, ...] = ()
    weight: nn.Parameter
    packable = False

    def place(self, kind: str, part: int = 0) -> Place:
        """Where a tensor of the checkpoint belongs.

        Args:
            kind: "weight" or "bias".
            part: which of the matrices that are stacked in this layer it is.

        Raises:
            AttributeError: this layer has no such parameter.
        """
        return Place.whole(getattr(self, kind))

    def places(self, path: str) -> Iterator[tuple[str, Place]]:
        """Yield the names of the checkpoint's tensors for this layer, whose own name is `path`, and
        where they belong."""
        parent, dot, _ = path.rpartition(".")
        for part, name in enumerate([f"{parent}{dot}{name}" for name in self.parts] or [path]):
            # A weight is a parameter, or a module that holds several (lecture 41).
            for kind, _ in [*self.named_parameters(recurse=False), *self.named_children()]:
                yield f"{name}.{kind}", self.place(kind, part)

    @torch.inference_mode()
    def pack(self) -> None:
        """Rearrange the weight, where it is, so that this machine multiplies fastest; see
        `ops.pack_weight`."""
        packed = ops.pack_weight(self.weight)
        self.weight = nn.Parameter(
            self.weight.view(packed.shape).copy_(packed), requires_grad=False
        )

    @property
    def matrices(self) -> Packable:
        """The module that has the layer's matrices: itself, or the experts of a mixture."""
        return self


class Linear(Layer):
    """y = x Wᵀ + b over packed tokens, `[num_tokens, in_features]` to
    `[num_tokens, out_features]`."""

    packable = True

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Embedding(Layer):
    """The matrix row of each token, `[num_tokens]` to `[num_tokens, hidden_size]`.

    Args:
        factor: multiplies each row, in the rows' dtype (Gemma 2); None for no factor.
    """

    def __init__(self, vocab_size: int, hidden_size: int, factor: float | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.factor = factor
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = ops.embedding(token_ids, self.weight)
        if self.factor is None:
            return rows
        # Rounded to the model's dtype, as in training.
        return rows * torch.tensor(self.factor, dtype=rows.dtype, device="cpu")


class LMHead(Embedding):
    """The score of each token of the vocabulary, `[num_rows, hidden_size]` to
    `[num_rows, vocab_size]`: a product with the matrix of an embedding."""

    packable = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight)


class RMSNorm(Layer):
    """x / rms(x) * weight (Zhang and Sennrich 2019); with a residual, the sum of both is
    normalised."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum): one pass over memory where two operations would take three."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class MergedLinear(Linear):
    """The two input matrices of an MLP as one product.

    Args:
        sizes: outputs of each matrix; their rows are stacked in this order.
    """

    parts: tuple[str, ...] = ("gate_proj", "up_proj")

    def __init__(self, in_features: int, sizes: Sequence[int], bias: bool = False) -> None:
        super().__init__(in_features, sum(sizes), bias)
        self.sizes = tuple(sizes)

    def place(self, kind: str, part: int = 0) -> Place:
        """The place of one of the stacked matrices: its rows."""
        first = sum(self.sizes[:part])
        return Place.whole(getattr(self, kind)[first : first + self.sizes[part]])


class QKVLinear(MergedLinear):
    """Query, key and value projections as one product: `head_dim` outputs per head."""

    parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False
    ) -> None:
        sizes = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
        super().__init__(hidden_size, sizes, bias)
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads


@dataclass(frozen=True, eq=False)
class Place:
    """Where a checkpoint's tensor belongs.

    Attributes:
        target: view of the memory to be filled.
        source: the part of the checkpoint's tensor that goes there, a slice for each axis.
        shape: of the checkpoint's whole tensor.
    """

    target: Tensor
    source: tuple[slice, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, target: Tensor) -> Place:
        """The place of a tensor that is loaded as a whole."""
        shape = tuple(target.shape)
        return cls(target, tuple(slice(0, size) for size in shape), shape)

    def part_of_wider(self, axis: int, index: int, count: int) -> Place:
        """The same memory, if the file has `count` such tensors as one, side by side along `axis`,
        and this is number `index`."""
        sizes = list(self.shape)
        parts = list(self.source)
        shift = index * sizes[axis]
        parts[axis] = slice(parts[axis].start + shift, parts[axis].stop + shift)
        sizes[axis] *= count
        return Place(self.target, tuple(parts), tuple(sizes))
