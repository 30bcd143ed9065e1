"""One quantized matrix of a layer: integers and scales instead of a weight.

Layers use it like a tensor: they pass it to `ops.linear`, and slice it to a rank's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.layers.basic import Packable
from nanovllm.ops import embedding, linear, pack_weight, quantized
from nanovllm.ops.reference_quantized import round_to_nearest


@dataclass(frozen=True)
class Scheme:
    """The quantization scheme of one matrix.

    Attributes:
        bits: bits per weight.
        group_size: consecutive inputs that share a scale; 0: all inputs share one.
        has_zeros: each group has a zero point.
        quantizes_inputs: inputs are quantized, too, to multiply integers (W8A8, W4A8).
        reordered: the matrix has its inputs in another order, so that those of a group are
            neighbours (GPTQ's desc_act).
    """

    bits: int
    group_size: int = 0
    has_zeros: bool = False
    quantizes_inputs: bool = False
    reordered: bool = False

    @property
    def kind(self) -> str:
        """The name of the matrix product."""
        return f"w{self.bits}a{8 if self.quantizes_inputs else 16}"

    def groups(self, inputs: int) -> int:
        """Return the number of scales per row of a matrix with `inputs` columns."""
        return inputs // (self.group_size or inputs)


W8A16 = Scheme(8)
W8A8 = Scheme(8, quantizes_inputs=True)


class QuantizedWeight(Packable):
    """A matrix, or one matrix per expert, as integers and scales. A slice of its first axis is a
    view, as with a tensor.

    Attributes:
        values, scales, zeros: 4- or 8-bit integers, scales and zero points; see `ops.quantized`.
        order: `[inputs]` int32, or one row per expert: column i of `values` is for input order[i];
            None if the columns are in the order of the inputs.
        shape: the shape of the dequantized matrix.
        dtype: the data type of the model's activations.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        scheme: Scheme,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.scheme = scheme
        self.dtype = torch.get_default_dtype()
        self.values, self.scales = (
            nn.Parameter(tensor, requires_grad=False) for tensor in (values, scales)
        )
        self.zeros = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.order = None if order is None else nn.Parameter(order, requires_grad=False)
        self.addresses: Tensor | None = None  # see `compiled`
        self._keep_dtypes()

    @classmethod
    def empty(cls, shape: tuple[int, ...], scheme: Scheme, device: torch.device) -> QuantizedWeight:
        """Create a quantized matrix without values."""
        *outer, inputs = shape
        width, kind = (inputs // 8, torch.int32) if scheme.bits == 4 else (inputs, torch.int8)
        groups = scheme.groups(inputs)
        zeros = (
            torch.empty(*outer, groups, dtype=torch.uint8, device=device)
            if scheme.has_zeros
            else None
        )
        order = (
            torch.empty(*outer[:-1], inputs, dtype=torch.int32, device=device)
            if scheme.reordered
            else None
        )
        values = torch.empty(*outer, width, dtype=kind, device=device)
        scales = torch.empty(*outer, groups, device=device)
        return cls(shape, scheme, values, scales, zeros, order)

    @property
    def ndim(self) -> int:
        """Number of axes of the matrix."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> QuantizedWeight:
        outer = [] if isinstance(index, int) else [len(range(*index.indices(len(self))))]
        part = QuantizedWeight(
            shape=(*outer, *self.shape[1:]),
            scheme=self.scheme,
            values=self.values[index],
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
            order=self.order if self.order is None or self.ndim == 2 else self.order[index],
        )
        part.dtype = self.dtype
        return part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        self.dtype = fn(torch.empty(0)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._keep_dtypes()  # `_apply` makes new parameters, and visits a tied weight twice
        return self

    def _keep_dtypes(self) -> None:
        """Mark the tensors that keep their own data type; see `load_model`."""
        for tensor in (
            self.values,
            self.zeros,
            self.order,
            self.scales if self.scheme.quantizes_inputs else None,
        ):
            if tensor is not None:
                tensor.kept_dtype = tensor.dtype  # type: ignore[attr-defined]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `ops.linear`."""
        if self.values.is_floating_point():  # dequantized
            return linear(x, self.values, bias)
        if self.order is not None:
            x = x.index_select(-1, self.order)
        zeros = [self.zeros] if self.scheme.bits == 4 else []
        product: Callable[..., Tensor] = getattr(quantized, f"linear_{self.scheme.kind}")
        return product(x, self.values, self.scales, *zeros, bias)

    def compiled(self) -> tuple[int, int]:
        """See `ops.quantized.compiled`; this keeps the addresses that the function reads, and gives
        their own."""
        if self.values.is_floating_point():
            return 0, self.values.data_ptr() * (self.values.ndim == 4)
        if self.order is not None:  # the function takes inputs as they are
            return 0, 0
        if self.addresses is None:  # there may be several callers
            self.function, self.addresses = quantized.compiled(
                self.scheme.kind, self.dtype, *self.parameters()
            )
        return self.function, self.addresses.data_ptr()

    def rows(self, token_ids: Tensor) -> Tensor:
        """See `ops.embedding`."""
        if self.values.is_floating_point():  # dequantized
            return embedding(token_ids, self.values)
        found = quantized.rows(token_ids, self.values, self.scales, self.zeros, self.dtype)
        return self._by_input(found)

    def dequantize(self) -> Tensor:
        """Return the matrix in the model's data type, its columns in the order of the inputs."""
        matrix = quantized.dequantize(self.values, self.scales, self.zeros, self.dtype)
        return self._by_input(matrix)

    def _by_input(self, matrix: Tensor) -> Tensor:
        """Return a matrix with its columns in the order of the inputs."""
        if self.order is None:
            return matrix
        columns = self.order.argsort(-1).unsqueeze(-2)
        return matrix.take_along_dim(columns, dim=-1)

    def fill_order(self, order: Tensor) -> None:
        """Set the order of the inputs, unless this is an empty part of a matrix."""
        if self.order is not None and len(self):
            self.order.copy_(order)

    def copy_(self, weight: Tensor) -> None:
        """Quantize a matrix into this one: round each weight to the nearest value of its grid."""
        if not weight.is_meta:
            groups = self.scales.shape[-1]
            dtype = self.scales.dtype
            values, scales, _ = round_to_nearest(weight, self.scheme.bits, groups, dtype=dtype)
            self.values.copy_(values)
            self.scales.copy_(scales)

    @torch.inference_mode()
    def pack(self) -> None:
        """Convert the matrix to the layout of its kernel; see `Layer.pack`. On a CPU without a
        kernel, dequantize it once, instead of in each step: it then has the memory use and the
        speed of an unquantized matrix."""
        numbers = {name: tensor for name, tensor in self.named_parameters() if name != "order"}
        flat = [tensor.flatten(0, -2) for tensor in numbers.values()]
        # The packed layouts have groups of 16 outputs of one expert.
        values = flat[0]
        fits = self.shape[-2] % 16 == 0
        if fits and self.scheme.bits == 4:
            flat = quantized.pack_nibbles(*flat)
        elif fits and self.scheme.quantizes_inputs:
            flat[0] = quantized.pack_values(values)
        if flat[0] is values and values.device.type == "cpu" and not self.scheme.quantizes_inputs:
            matrix = self.dequantize().flatten(0, -2)
            flat[0] = pack_weight(matrix) if fits else matrix
            self.order = None
        for (name, place), packed in zip(numbers.items(), flat, strict=True):
            packed = packed if self.ndim == 2 else packed.unflatten(0, (len(self), -1))
            same_size = (place.dtype, place.numel()) == (packed.dtype, packed.numel())
            if same_size and place.data_ptr() != packed.data_ptr():
                packed = place.view(packed.shape).copy_(packed)
            setattr(self, name, nn.Parameter(packed, requires_grad=False))
        self.addresses = None
