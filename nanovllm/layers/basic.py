"""The layers that every model consists of (linear product, embedding, norm), and where a checkpoint's tensors go.

Built by notebooks/10_first_tokens.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm import ops


class Layer(nn.Module):
    """A layer with a weight, and perhaps a bias."""

    def place(self, kind: str, part: int = 0) -> Place:
        """Where a tensor of the checkpoint belongs.

        Args:
            kind: "weight" or "bias".
            part: which of the matrices that are stacked in this layer it is.

        Raises:
            AttributeError: this layer has no such parameter.
        """
        return Place.whole(self.get_parameter(kind))


class Linear(Layer):
    """y = x Wᵀ + b over packed tokens, `[num_tokens, in_features]` to `[num_tokens, out_features]`."""

    packable = True  # the weight may be rearranged, since nothing but the product uses it

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
    """x / rms(x) * weight (Zhang and Sennrich 2019); with a residual, the sum of both is normalised."""

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
        shape: of the checkpoint's whole tensor; `()` if `source` ends where the tensor ends.
        padding: view of memory beside `target` that no checkpoint fills and that must be zeros; or None.
    """

    target: Tensor
    source: tuple[slice, ...]
    shape: tuple[int, ...] = ()
    padding: Tensor | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return self.shape or tuple(part.stop for part in self.source)

    @classmethod
    def whole(cls, parameter: Tensor) -> Place:
        """All of the tensor fills all of the parameter."""
        return cls(parameter, tuple(slice(0, size) for size in parameter.shape))
