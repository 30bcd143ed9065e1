"""The tensors that store a quantized matrix in a checkpoint: what the formats have in common.

From the place of a layer's matrix follow the places of the tensors that store it. These tensors are
converted to one form (ops/quantized.py) while they are copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from nanovllm.checkpoint.files import ModelFileError, UnsupportedModelError
from nanovllm.layers.basic import Place
from nanovllm.layers.quantization.weight import QuantizedWeight, Scheme
from nanovllm.ops.reference_quantized import pack, unpack

# Outputs that are unpacked at a time.
ROWS = 1024

Axis = tuple[slice, int]  # this rank's part of an axis, and the size of the whole axis


@dataclass(frozen=True, eq=False)
class Reader:
    """The target of a place whose tensor is not copied as it is, but read by a function."""

    read: Callable[[Tensor], object]

    def copy_(self, tensor: Tensor) -> None:
        """Read a tensor that has numbers."""
        if not tensor.is_meta:
            self.read(tensor)


IGNORED = Reader(lambda tensor: None)


def place(target: Tensor | Reader, *axes: Axis) -> Place:
    """The place of a tensor of which this rank reads a part; all that loading asks of a target is
    `copy_`."""
    parts = tuple(part for part, _ in axes)
    return Place(cast(Tensor, target), parts, tuple(size for _, size in axes))


def whole(size: int) -> Axis:
    """An axis that this rank reads as a whole."""
    return slice(0, size), size


def read_together(
    places: Mapping[str, Place], read: Callable[[Mapping[str, Tensor]], object]
) -> dict[str, Place]:
    """Return places that keep what this rank needs of several tensors, and read it once all of
    them are there. The tensors are memory-mapped, so to keep them costs no memory."""
    kept: dict[str, Tensor] = {}

    def keep(kind: str, tensor: Tensor) -> None:
        kept[kind] = tensor
        if kept.keys() == places.keys():
            read(kept)
            kept.clear()

    return {
        kind: replace(found, target=cast(Tensor, Reader(partial(keep, kind))))
        for kind, found in places.items()
    }


class StoredMatrix:
    """The tensors that store one matrix in a checkpoint, and the part of each that this rank reads
    into a weight. A format is a subclass.

    Args:
        layer: the layer's name in the checkpoint.
        matrix: the place of the matrix, were it not quantized.
        weight: what is filled.
        order: the inputs in the order of their groups; None if they are in this order in the file.

    Attributes:
        outputs, inputs: this rank's part of the matrix.
        words: the same of the inputs, where a word of 32 bits holds several.
        groups: the same of the groups of inputs with one scale.
        output_words: where a word holds 8 outputs, the words that hold this rank's.
        own: this rank's outputs within `output_words`.

    Raises:
        UnsupportedModelError: the rank's inputs end within a group.
    """

    def __init__(
        self, layer: str, matrix: Place, weight: QuantizedWeight, order: Tensor | None = None
    ) -> None:
        rows, columns = matrix.source
        outputs, inputs = matrix.shape
        scheme = weight.scheme
        per_word = self.inputs_per_word(scheme.bits)
        size = scheme.group_size
        _check_split(layer, columns, inputs, size or per_word)
        self.layer = layer
        self.weight = weight
        self.order = order
        self.bits = scheme.bits
        self.outputs = (rows, outputs)
        self.inputs = (columns, inputs)
        self.words = slice(columns.start // per_word, columns.stop // per_word), inputs // per_word
        own_groups = slice(columns.start // size, columns.stop // size) if size else slice(0, 1)
        self.groups = own_groups, scheme.groups(inputs)
        self.output_words = slice(rows.start // 8, -(-rows.stop // 8)), -(-outputs // 8)
        self.own = slice(rows.start % 8, rows.start % 8 + rows.stop - rows.start)

    def inputs_per_word(self, bits: int) -> int:
        """Return the inputs that a rank cannot divide."""
        return 32 // bits

    def needed(self) -> dict[str, Place]:
        """The places of the tensors that there must be, by the ends of their names."""
        raise NotImplementedError

    def optional(self) -> dict[str, Place]:
        """The places of tensors that the file may have."""
        return {}

    def places(self, stored: Collection[str]) -> dict[str, Place]:
        """The places of the tensors, by the ends of their names: of those that there must be, and
        of others that the file has.

        Args:
            stored: the names of the checkpoint's tensors.
        """
        optional = self.optional().items()
        return self.needed() | {
            kind: found for kind, found in optional if f"{self.layer}.{kind}" in stored
        }

    def expect(
        self, kind: str, tensor: Tensor, expected: Sequence[Tensor | int], otherwise: str
    ) -> None:
        """Check that a tensor equals one of those expected, or is full of one of these numbers."""
        if not any(bool((tensor == right).all()) for right in expected):
            raise ModelFileError(f"{self.layer}.{kind}: {otherwise}")

    def scales(self, kind: str, transposed: bool = False) -> Reader:
        """A reader of the scales, `[outputs, groups]` or transposed."""

        def read(scales: Tensor) -> None:
            check_scales(f"{self.layer}.{kind}", scales)
            self.weight.scales.copy_(scales.mT if transposed else scales)

        return Reader(read)

    def read_words(self, words: Tensor) -> None:
        """Fill the weight from words of neighbouring inputs, `[outputs, inputs * bits / 32]`."""
        if self.order is None and self.bits == 4:
            self.weight.values.copy_(words)
            return
        if self.order is not None:
            self.weight.fill_order(self.order)
        for values, rows in zip(self.weight.values.split(ROWS), words.split(ROWS), strict=True):
            numbers = unpack(rows, self.bits)
            numbers = numbers if self.order is None else numbers[:, self.order]
            values.copy_(pack(numbers) if self.bits == 4 else numbers - 128)

    def read_zeros(self, zeros: Tensor) -> None:
        """Fill the zero points, `[groups, outputs]`, among which may be other ranks' outputs."""
        assert self.weight.zeros is not None
        self.weight.zeros.copy_(zeros[:, self.own].mT)


def check_scales(name: str, scales: Tensor) -> None:
    """Raise a ModelFileError if a scale is infinite or not a number."""
    if not scales.float().isfinite().all():
        raise ModelFileError(f"{name}: a scale is infinite or not a number; download it again")


def group_size(layer: str, inputs: int, size: int) -> int:
    """Return the inputs of a matrix that share a scale; 0 for whole rows, also if a group is as
    large as a row.

    Args:
        size: inputs per group in the file; 0 for whole rows.

    Raises:
        UnsupportedModelError: the inputs cannot be divided into groups, or not into words of 8.
    """
    if inputs % (size or 8):
        fit = [str(n) for n in (128, 64, 32) if inputs % n == 0]
        raise UnsupportedModelError(
            f"{layer} has {inputs} inputs, which is not a multiple of {size or 8}: quantize with "
            f"group_size {' or '.join([*fit, '-1'])}"
        )
    return 0 if size == inputs else size


def _check_split(layer: str, columns: slice, inputs: int, unit: int) -> None:
    """Raise an error if a rank's inputs begin or end within a group, or within a word."""
    if columns.start % unit == 0 and columns.stop % unit == 0:
        return
    counts = range(1, inputs // unit + 1)
    fit = [str(n) for n in counts if inputs % n == 0 and inputs // n % unit == 0]
    raise UnsupportedModelError(
        f"{layer}: a rank would have {columns.stop - columns.start} of {inputs} inputs, which "
        f"splits a group of {unit}; for this layer, tensor_parallel_size may be {', '.join(fit)}"
    )


def dequantized_places(
    form: type[StoredMatrix],
    layer: str,
    matrix: Place,
    scheme: Scheme,
    order: Tensor | None,
    stored: Collection[str],
) -> dict[str, Place]:
    """Return the places of the tensors that store a matrix which is dequantized while it is loaded.

    Args:
        order: see `StoredMatrix`.
        stored: the names of the checkpoint's tensors.
    """
    rows, columns = matrix.source
    inputs = matrix.shape[1]
    # With all inputs, so that a rank's part may end within a group.
    source = Place(matrix.target, (rows, slice(0, inputs)), matrix.shape)

    def stored_in(device: torch.device) -> tuple[QuantizedWeight, dict[str, Place]]:
        weight = QuantizedWeight.empty((rows.stop - rows.start, inputs), scheme, device)
        return weight, form(layer, source, weight, order).places(stored)

    def read(tensors: Mapping[str, Tensor]) -> None:
        weight, pieces = stored_in(torch.device("cpu"))
        weight.dtype = matrix.target.dtype
        for kind, tensor in tensors.items():
            pieces[kind].target.copy_(tensor)
        matrix.target.copy_(weight.dequantize()[:, columns])

    _, pieces = stored_in(torch.device("meta"))
    return read_together(pieces, read)
