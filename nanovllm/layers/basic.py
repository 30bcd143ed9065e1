"""The layers that every model consists of (linear product, embedding, norm), and where a
checkpoint's tensors go.

Built by notebooks/10_first_tokens.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Layer(Packable):
    """A layer with weights of its own: mostly one, and perhaps a bias."""

    # Names of the checkpoint's layers whose matrices are stacked in this one.
    parts: tuple[str, ...] = ()
    weight: nn.Parameter
    packable = False

    @property
    def matrices(self) -> Packable:
        """The module that has the layer's matrices: itself, or the experts of a mixture."""
        return self

    def place(self, kind: str, part: int = 0) -> Place:
        """Where a tensor of the checkpoint belongs.

        Args:
            kind: "weight" or "bias".
            part: which of the matrices that are stacked in this layer it is.

        Raises:
            AttributeError: this layer has no such parameter.
        """
        parameter = getattr(self, kind)
        return Place(
            parameter, tuple(slice(0, size) for size in parameter.shape), tuple(parameter.shape)
        )

    def places(self, path: str) -> Iterator[tuple[str, Place]]:
        """Yield the names of the checkpoint's tensors for this layer, whose own name is `path`, and
        where they belong."""
        parent = path.rpartition(".")[0]
        for part, name in enumerate([f"{parent}.{name}" for name in self.parts] or [path]):
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


class Linear(Layer):
    """y = x Wᵀ + b over packed tokens, `[num_tokens, in_features]` to
    `[num_tokens, out_features]`."""

    packable = True

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Embedding(Layer):
    """The matrix row of each token, `[num_tokens]` to `[num_tokens, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return ops.embedding(token_ids, self.weight)


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


@dataclass(frozen=True, eq=False)
class Place:
    """Where a checkpoint's tensor belongs.

    Attributes:
        target: view of the memory to be filled; empty if this rank keeps no part of the tensor.
        source: the part of the checkpoint's tensor that goes there, a slice for each axis.
        shape: of the checkpoint's whole tensor.
    """

    target: Tensor
    source: tuple[slice, ...]
    shape: tuple[int, ...]

    def part_of_wider(self, axis: int, index: int, count: int) -> Place:
        """The same memory, if the file has `count` such tensors as one, side by side along `axis`,
        and this is number `index`."""
        sizes = list(self.shape)
        parts = list(self.source)
        shift = index * sizes[axis]
        parts[axis] = slice(parts[axis].start + shift, parts[axis].stop + shift)
        sizes[axis] *= count
        return Place(self.target, tuple(parts), tuple(sizes))
