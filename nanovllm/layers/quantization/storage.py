"""The tensors that store a quantized matrix in a checkpoint: what the formats have in common.

From the place of a layer's matrix follow the places of the tensors that store it. These tensors are
converted to one form (ops/quantized.py) while they are copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from nanovllm.checkpoint.files import ModelFileError, UnsupportedModelError
from nanovllm.checkpoint.quantization import QuantizationConfig
from nanovllm.layers.basic import Place
from nanovllm.layers.quantization.weight import QuantizedWeight, Scheme
from nanovllm.ops.reference_quantized import unpack

# The checkpoint's tensors: their shapes by their names.
Shapes = Mapping[str, tuple[int, ...]]

Axis = tuple[slice, int]  # this rank's part of an axis, and the size of the whole axis


@dataclass(frozen=True, eq=False)
class Reader:
    """The target of a place whose tensor is not copied as it is, but read by a function."""

    read: Callable[[Tensor], object]

    def copy_(self, tensor: Tensor) -> None:
        """Read a tensor that has numbers."""
        if not tensor.is_meta:
            self.read(tensor)


def place(target: Tensor | Reader, *axes: Axis) -> Place:
    """The place of a tensor of which this rank reads a part; all that loading asks of a target is
    `copy_`."""
    parts = tuple(part for part, _ in axes)
    return Place(cast(Tensor, target), parts, tuple(size for _, size in axes))


def inputs_per_group(
    layer: str, inputs: int, groups: int | None, config: QuantizationConfig
) -> int:
    """Inputs of a matrix that share a scale; 0 for all of them.

    Args:
        groups: the number of scales per output; None if the checkpoint has no scales.

    Raises:
        UnsupportedModelError: no size of the configuration divides the inputs, or a group ends
            within a word.
    """
    sizes = [size if size > 0 else inputs for size in config.group_sizes]
    if groups is None:
        groups = max(inputs // sizes[0], 1)
    size = next((size for size in sizes if size * groups == inputs), None)
    if size is None:
        fit = [str(size) for size in (128, 64, 32) if inputs % size == 0]
        raise UnsupportedModelError(
            f"{layer} has {inputs} inputs, which is not a multiple of "
            f"{' or '.join(map(str, sizes))}: quantize with group_size {' or '.join([*fit, '-1'])}"
        )
    if size % 8:
        raise UnsupportedModelError(
            f"{layer}: a group of {size} ends within a word of 8 inputs; quantize with 32 or 64"
        )
    return 0 if groups == 1 else size


class StoredMatrix:
    """The tensors that store one matrix in a checkpoint, and the part of each that this rank reads
    into a weight. A format is a subclass.

    Attributes:
        marker: end of the name of the tensor by which the format is recognised.
        outputs, inputs: this rank's part of the matrix.
        words: the same of the inputs, where a word of 32 bits holds several.
        groups: the same of the groups of inputs with one scale.
        output_words: where a word holds 8 outputs, the words that hold this rank's.
        own: this rank's outputs within `output_words`.

    Raises:
        UnsupportedModelError: the rank's inputs end within a group.
    """

    marker = ""

    def __init__(self, layer: str, matrix: Place, weight: QuantizedWeight) -> None:
        rows, columns = matrix.source
        outputs, inputs = matrix.shape
        scheme = weight.scheme
        per_word = 32 // scheme.bits
        size = scheme.group_size
        _check_split(layer, columns, inputs, size or per_word)
        self.layer = layer
        self.weight = weight
        self.bits = scheme.bits
        self.outputs = (rows, outputs)
        self.inputs = (columns, inputs)
        self.words = slice(columns.start // per_word, columns.stop // per_word), inputs // per_word
        own_groups = slice(columns.start // size, columns.stop // size) if size else slice(0, 1)
        self.groups = own_groups, scheme.groups(inputs)
        self.output_words = slice(rows.start // 8, -(-rows.stop // 8)), -(-outputs // 8)
        self.own = slice(rows.start % 8, rows.start % 8 + rows.stop - rows.start)

    @classmethod
    def scheme(cls, layer: str, inputs: int, stored: Shapes, config: QuantizationConfig) -> Scheme:
        """How a matrix with the tensor `marker` is quantized, by the shapes of its tensors."""
        raise NotImplementedError

    def needed(self) -> dict[str, Place]:
        """The places of the tensors that there must be, by the ends of their names."""
        raise NotImplementedError

    def optional(self) -> dict[str, Place]:
        """The places of tensors that the file may have."""
        return {}

    def places(self, stored: Shapes) -> dict[str, Place]:
        """The places of the tensors, by the ends of their names: of those that there must be, and
        of others that the file has."""
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

    def read_bytes(self, words: Tensor) -> None:
        """Fill the weight from words of four unsigned bytes, `[outputs, inputs / 4]`."""
        self.weight.values.copy_(unpack(words, 8) - 128)

    def read_zeros(self, zeros: Tensor) -> None:
        """Fill the zero points, `[groups, outputs]`, among which may be other ranks' outputs."""
        assert self.weight.zeros is not None
        self.weight.zeros.copy_(zeros[:, self.own].mT)


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
