"""Quantized weights: a `QuantizedWeight` in the place of a layer's matrix, and how a checkpoint's
tensors come into it.

Layers do not know of it: they hand their weight to `ops.linear`, slice it where a rank keeps a part
of it, and say by a `Place` where the checkpoint's matrix belongs. From this one place follow the
places of the tensors that store the quantized matrix: GPTQ's, AWQ's and compressed-tensors' are
converted to one form (ops/quantized.py) while they are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checkpoint.files import ModelFileError, UnsupportedModelError
from nanovllm.checkpoint.quantization import ONLINE, QuantizationConfig
from nanovllm.layers.basic import Layer, Place
from nanovllm.ops import linear, pack_weight, quantized
from nanovllm.ops.reference_quantized import pack, round_to_nearest, unpack

Shapes = Mapping[str, tuple[int, ...]]

# AWQ's words hold the outputs 0, 2, 4, 6, 1, 3, 5, 7 in this order, which its GPU kernels unpack
# fastest; hence output j is number:
AWQ_NUMBERS = (0, 4, 1, 5, 2, 6, 3, 7)
# Words of the zero points of symmetric GPTQ: version 1 stores them less 1. Labels lie, so both are
# read whatever the label says.
GPTQ_ZEROS = {4: (0x77777777, 0x88888888 - 2**32), 8: (0x7F7F7F7F, 0x80808080 - 2**32)}
# Inputs of a group if weights are quantized to 4 bits while they are loaded: the first that divides
# their number.
GROUP_SIZES = (64, 32)


@dataclass(frozen=True)
class Scheme:
    """How one matrix is quantized.

    Attributes:
        bits: of a weight.
        group_size: neighbouring inputs with one scale; 0: all inputs.
        has_zeros: each group has a zero point.
        quantizes_inputs: multiply integers by integers (W8A8, W4A8).
    """

    bits: int
    group_size: int = 0
    has_zeros: bool = False
    quantizes_inputs: bool = False

    @property
    def kind(self) -> str:
        """The name of the product."""
        return f"w{self.bits}a{8 if self.quantizes_inputs else 16}"

    def groups(self, inputs: int) -> int:
        """Scales per row of a matrix with so many inputs."""
        return inputs // (self.group_size or inputs)


W8A16 = Scheme(8)
W8A8 = Scheme(8, quantizes_inputs=True)


class QuantizedWeight(nn.Module):
    """A matrix, or one for each expert, as integers and scales. Slicing its first axis gives a
    view, as with a tensor.

    Attributes:
        values: nibbles or 8-bit integers; see `ops.quantized` for this and `scales` and `zeros`.
        shape: of the matrix that it stands for.
        dtype: of the model's activations.
    """

    packable = True

    def __init__(
        self,
        shape: tuple[int, ...],
        scheme: Scheme,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.scheme = scheme
        self.dtype = torch.get_default_dtype()
        self.values, self.scales = (
            nn.Parameter(tensor, requires_grad=False) for tensor in (values, scales)
        )
        self.zeros = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.addresses: Tensor | None = None  # see `compiled`
        self._keep_dtypes()

    @classmethod
    def empty(cls, shape: tuple[int, ...], scheme: Scheme, device: torch.device) -> QuantizedWeight:
        """One whose numbers are still to be filled in."""
        *outer, inputs = shape
        width, kind = (inputs // 8, torch.int32) if scheme.bits == 4 else (inputs, torch.int8)
        groups = scheme.groups(inputs)
        zeros = (
            torch.empty(*outer, groups, dtype=torch.uint8, device=device)
            if scheme.has_zeros
            else None
        )
        values = torch.empty(*outer, width, dtype=kind, device=device)
        return cls(shape, scheme, values, torch.empty(*outer, groups, device=device), zeros)

    @property
    def ndim(self) -> int:
        """Axes of the matrix."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> QuantizedWeight:
        sizes = (
            self.shape[1:]
            if isinstance(index, int)
            else (len(range(*index.indices(len(self)))), *self.shape[1:])
        )
        tensors = (
            tensor if tensor is None else tensor[index]
            for tensor in (self.values, self.scales, self.zeros)
        )
        part = QuantizedWeight(sizes, self.scheme, *tensors)  # type: ignore[arg-type]
        part.dtype = self.dtype
        return part

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedWeight:
        self.dtype = fn(torch.empty(0)).dtype
        super()._apply(fn, recurse)
        self._keep_dtypes()  # the parameters are new ones, and a tied weight is visited twice
        return self

    def _keep_dtypes(self) -> None:
        """Mark what does not take the model's dtype; see `load_model`."""
        for tensor in (
            self.values,
            self.zeros,
            self.scales if self.scheme.quantizes_inputs else None,
        ):
            if tensor is not None:
                tensor.kept_dtype = tensor.dtype  # type: ignore[attr-defined]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `ops.linear`."""
        if self.values.is_floating_point():  # dequantized
            return linear(x, self.values, bias)
        zeros = [self.zeros] if self.scheme.bits == 4 else []
        return getattr(quantized, f"linear_{self.scheme.kind}")(
            x, self.values, self.scales, *zeros, bias
        )

    def compiled(self) -> tuple[int, int]:
        """See `ops.quantized.compiled`; this keeps the addresses that the function reads, and gives
        their own."""
        if self.values.is_floating_point():
            return 0, self.values.data_ptr() * (self.values.ndim == 4)
        if self.addresses is None:  # there may be several callers
            self.function, self.addresses = quantized.compiled(
                self.scheme.kind, self.dtype, *self.parameters()
            )
        return self.function, self.addresses.data_ptr()

    def rows(self, token_ids: Tensor) -> Tensor:
        """See `ops.embedding`."""
        return quantized.rows(token_ids, self.values, self.scales, self.zeros, self.dtype)

    def dequantize(self) -> Tensor:
        """The matrix, of the model's dtype."""
        return quantized.dequantize(self.values, self.scales, self.zeros, self.dtype)

    def copy_(self, weight: Tensor) -> None:
        """Fill it from a matrix, each weight rounded to the nearest value of its grid."""
        if not weight.is_meta:
            groups = self.scales.shape[-1]
            dtype = self.scales.dtype
            values, scales, _ = round_to_nearest(weight, self.scheme.bits, groups, dtype=dtype)
            self.values.copy_(values)
            self.scales.copy_(scales)

    @torch.inference_mode()
    def pack(self) -> None:
        """See `Layer.pack`; a kernel may want another layout. On a CPU without a kernel the matrix
        is dequantized here once, not in each
        step: it takes the memory of an unquantized one, and multiplies as fast."""
        flat = [tensor.flatten(0, -2) for tensor in self.parameters()]
        # layouts have groups of 16 outputs, of one expert
        values = flat[0]
        fits = self.shape[-2] % 16 == 0
        if fits and self.scheme.bits == 4:
            flat = quantized.pack_nibbles(*flat)
        elif fits and self.scheme.quantizes_inputs:
            flat[0] = quantized.pack_values(values)
        if flat[0] is values and values.device.type == "cpu" and not self.scheme.quantizes_inputs:
            matrix = self.dequantize().flatten(0, -2)
            flat[0] = pack_weight(matrix) if fits else matrix
        for (name, _), packed in zip([*self.named_parameters()], flat, strict=True):
            packed = packed if self.ndim == 2 else packed.unflatten(0, (len(self), -1))
            place = getattr(self, name)
            if (place.dtype, place.numel()) == (
                packed.dtype,
                packed.numel(),
            ) and place.data_ptr() != packed.data_ptr():
                packed = place.view(packed.shape).copy_(packed)
            setattr(self, name, nn.Parameter(packed, requires_grad=False))
        self.addresses = None


def quantize_layers(
    model: Any, quantization: QuantizationConfig, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Replace the matrices of a model on the meta device by quantized ones. Its `checkpoint_places`
    become those of the tensors that store them, or stay as they are if an unquantized checkpoint is
    to be quantized while it is loaded.

    Args:
        tensors: the checkpoint's; their names and shapes are enough.

    Raises:
        ValueError: weights that cannot be loaded like this; the message says what would work.
    """
    stored: dict[str, tuple[int, ...]] = {}
    if quantization.method not in ("none", *ONLINE):
        found = {model.checkpoint_name(name): tuple(tensor.shape) for name, tensor in tensors}
        stored = {name: shape for name, shape in found.items() if name is not None}
    for path, layer in list(model.named_modules()):
        # Experts are matrices of one module, whose names their layer knows.
        owner = getattr(layer, "experts", layer)
        if not isinstance(layer, Layer) or not owner.packable:
            continue
        shapes = {
            name: place.shape for name, place in layer.places(path) if name.endswith(".weight")
        }
        schemes = {
            name: _scheme(quantization, stored, name, shape) for name, shape in shapes.items()
        }
        first, scheme = next(iter(schemes.items()))
        if other := [name for name, its in schemes.items() if its != scheme]:
            mistake = (
                f"{first} and {other[0]}, which this engine stores as one matrix, are quantized "
                "differently"
            )
            raise UnsupportedModelError(f"{mistake}: quantize both in the same way")
        _replace_matrices(owner, scheme)
    if quantization.w4a8 and not any(
        getattr(m, "scheme", W8A16).bits == 4 for m in model.modules()
    ):
        raise UnsupportedModelError(
            "quantization 'w4a8' is for 4-bit weights, and this checkpoint has none: do not set it"
        )
    if quantization.head:
        tied = [model.model.embed_tokens] if model.config.tie_word_embeddings else []
        for layer in (model.lm_head, *tied):
            _replace_matrices(layer, W8A8)
    model.tie_weights()
    if stored:
        model.checkpoint_places = partial(
            _stored_places, model.checkpoint_places, quantization, stored
        )


def _replace_matrices(layer: nn.Module, scheme: Scheme | None) -> None:
    for name, matrix in list(layer.named_parameters(recurse=False)):
        if scheme is not None and matrix.ndim > 1:
            delattr(layer, name)
            setattr(layer, name, QuantizedWeight.empty(tuple(matrix.shape), scheme, matrix.device))
            layer.packable = False  # type: ignore[assignment]  # the weight packs itself


def _scheme(
    quantization: QuantizationConfig, stored: Shapes, name: str, shape: tuple[int, ...]
) -> Scheme | None:
    """How a matrix of the checkpoint is quantized, by the names and shapes of the tensors; None if
    it is not."""
    inputs = shape[-1]
    layer = name.removesuffix(".weight")
    if quantization.method in ONLINE:
        group_size = next((size for size in GROUP_SIZES if inputs % size == 0), 0)
        scheme = (
            W8A8
            if quantization.method == "w8a8"
            else Scheme(4, group_size, False, quantization.method == "w4a8")
        )
        return None if layer == "lm_head" else scheme
    packed = stored.get(f"{layer}.weight_packed")
    awq = quantization.method == "awq"
    words = packed or stored.get(f"{layer}.qweight")
    scales = stored.get(f"{layer}.weight_scale")
    if words is None and scales is None:
        return None
    bits = (
        quantization.bits
        if words is None
        else 8
        if words[1 if packed else 0] * 4 == inputs and not awq
        else 4
    )
    if words is None and bits == 8:
        return W8A8 if quantization.quantizes_inputs else W8A16
    sizes = [size if size > 0 else inputs for size in quantization.group_sizes]
    by_input = stored.get(f"{layer}.scales")
    groups = scales[1] if scales else by_input[0] if by_input else max(inputs // sizes[0], 1)
    size = next((size for size in sizes if size * groups == inputs), None)
    if size is None:
        fit = [str(size) for size in (128, *GROUP_SIZES) if inputs % size == 0]
        mistake = (
            f"{layer} has {inputs} inputs, which is not a multiple of "
            f"{' or '.join(map(str, sizes))}"
        )
        raise UnsupportedModelError(
            f"{mistake}: quantize with group_size {' or '.join([*fit, '-1'])}"
        )
    has_zeros = f"{layer}.{'qzeros' if awq else 'weight_zero_point'}" in stored
    if size % 8:
        raise UnsupportedModelError(
            f"{layer}: a group of {size} ends within a word of 8 inputs; quantize with 32 or 64"
        )
    integers = bits == 4 and (
        quantization.w4a8 or (words is None and quantization.quantizes_inputs)
    )
    return Scheme(bits, 0 if groups == 1 else size, has_zeros, integers)


# ---------------------------------------------------------------- from a checkpoint's tensors


@dataclass(frozen=True, eq=False)
class Reader:
    """The target of a place whose tensor is not copied as it is, but read by a function."""

    read: Callable[[Tensor], object]

    def copy_(self, tensor: Tensor) -> None:
        """Read a tensor that has numbers."""
        if not tensor.is_meta:
            self.read(tensor)


Axis = tuple[slice, int]  # this rank's part of an axis, and the size of the whole axis


def _place(target: Any, *axes: Axis) -> Place:
    return Place(target, tuple(part for part, _ in axes), tuple(size for _, size in axes))


class _StoredMatrix:
    """The tensors that store one matrix in a checkpoint, and what of them this rank reads into a
    weight.

    Raises:
        UnsupportedModelError: the rank's inputs end within a group.
    """

    def __init__(self, layer: str, matrix: Place, weight: QuantizedWeight) -> None:
        (rows, columns), (outputs, inputs), scheme = matrix.source, matrix.shape, weight.scheme
        per_word = 32 // scheme.bits
        size = scheme.group_size
        first = columns.start
        end = columns.stop
        if first % (unit := size or per_word) or end % unit:
            fit = [
                str(n)
                for n in range(1, inputs // unit + 1)
                if inputs % n == 0 and inputs // n % unit == 0
            ]
            mistake = (
                f"{layer}: a rank would have {end - first} of {inputs} inputs, which splits a "
                f"group of {unit}"
            )
            raise UnsupportedModelError(
                f"{mistake}; for this layer, tensor_parallel_size may be {', '.join(fit)}"
            )
        self.layer = layer
        self.weight = weight
        self.bits = scheme.bits
        self.outputs = (rows, outputs)
        self.inputs = (columns, inputs)
        self.words = slice(first // per_word, end // per_word), inputs // per_word
        self.groups = (
            (slice(first // size, end // size) if size else slice(0, 1)),
            scheme.groups(inputs),
        )
        # Where outputs share a word: the words that have this rank's, and its own outputs in them.
        self.output_words = slice(rows.start // 8, -(-rows.stop // 8)), -(-outputs // 8)
        self.own = slice(rows.start % 8, rows.start % 8 + rows.stop - rows.start)
        self.group_of_input = torch.arange(first, end, device="cpu") // (size or inputs)

    def places(self, method: str, stored: Shapes) -> dict[str, Place]:
        """The places of the tensors, by the ends of their names: of those that there must be, and
        of others that the file has."""
        packed = f"{self.layer}.weight_packed" in stored
        formats = {
            "awq": self._awq,
            "gptq": self._gptq,
            "compressed-tensors": self._packed if packed else self._whole,
        }
        needed, optional = formats[method]()
        return needed | {
            kind: place for kind, place in optional.items() if f"{self.layer}.{kind}" in stored
        }

    def _whole(self) -> tuple[dict[str, Place], dict[str, Place]]:
        target = Reader(self._read_4_bits) if self.bits == 4 else self.weight.values
        values = _place(target, self.outputs, self.inputs)
        return {
            "weight": values,
            "weight_scale": _place(self.weight.scales, self.outputs, self.groups),
        }, {}

    def _packed(self) -> tuple[dict[str, Place], dict[str, Place]]:
        values = Reader(self._read_bytes) if self.bits == 8 else self.weight.values
        sizes = torch.tensor([self.outputs[1], self.inputs[1]], device="cpu")
        shape = Reader(
            lambda t: self._expect("weight_shape", t, [sizes], "the configuration says otherwise")
        )
        zeros = Reader(lambda t: self._read_zeros(unpack(t.mT)))
        return {
            "weight_packed": _place(values, self.outputs, self.words),
            "weight_scale": _place(self.weight.scales, self.outputs, self.groups),
        }, {
            "weight_zero_point": _place(zeros, self.output_words, self.groups),
            "weight_shape": _place(shape, (slice(None), 2)),
        }

    def _awq(self) -> tuple[dict[str, Place], dict[str, Place]]:
        def by_output(words: Tensor) -> Tensor:
            return unpack(words).unflatten(-1, (-1, 8))[..., AWQ_NUMBERS].flatten(-2)

        def read(words: Tensor) -> None:
            self.weight.values.copy_(pack(by_output(words)[:, self.own].mT))

        return {
            "qweight": _place(Reader(read), self.inputs, self.output_words),
            "scales": _place(self.weight.scales.mT, self.groups, self.outputs),
            "qzeros": _place(
                Reader(lambda t: self._read_zeros(by_output(t))), self.groups, self.output_words
            ),
        }, {}

    def _gptq(self) -> tuple[dict[str, Place], dict[str, Place]]:
        values = (
            Reader(lambda t: self._read_bytes(t.mT)) if self.bits == 8 else self.weight.values.mT
        )
        width = -(-self.outputs[1] * self.bits // 32)
        asymmetric = (
            f"a zero point is not {2**self.bits // 2}; store asymmetric weights as "
            "compressed-tensors"
        )
        order = (
            "its inputs are not in the order of their groups; quantize with desc_act: false or "
            "static_groups: true"
        )
        zeros = Reader(lambda t: self._expect("qzeros", t, GPTQ_ZEROS[self.bits], asymmetric))
        index = Reader(lambda t: self._expect("g_idx", t, [self.group_of_input], order))
        return {
            "qweight": _place(values, self.words, self.outputs),
            "scales": _place(self.weight.scales.mT, self.groups, self.outputs),
        }, {
            "qzeros": _place(zeros, self.groups, (slice(None), width)),
            "g_idx": _place(index, self.inputs),
        }

    def _expect(
        self, kind: str, tensor: Tensor, expected: Sequence[Tensor | int], otherwise: str
    ) -> None:
        """Check that a tensor equals one of those expected, or is full of one of these numbers."""
        if not any(bool((tensor == right).all()) for right in expected):
            raise ModelFileError(f"{self.layer}.{kind}: {otherwise}")

    def _read_4_bits(self, values: Tensor) -> None:
        self.weight.values.copy_(pack(values + 8))

    def _read_bytes(self, words: Tensor) -> None:
        self.weight.values.copy_(unpack(words, 8) - 128)

    def _read_zeros(self, zeros: Tensor) -> None:
        self.weight.zeros.copy_(zeros[:, self.own].mT)  # type: ignore[union-attr]


def _stored_places(
    matrices: Callable[[], dict[str, list[Place]]], quantization: QuantizationConfig, stored: Shapes
) -> dict[str, list[Place]]:
    """`checkpoint_places`, with the places of the tensors that store a quantized matrix instead of
    the matrix's."""
    found: dict[str, list[Place]] = {}
    whole = matrices()
    for name, places in whole.items():
        scheme = (
            _scheme(quantization, stored, name, places[0].shape)
            if name.endswith(".weight")
            else None
        )
        if scheme is None:
            found[name] = places
            continue
        layer = name.removesuffix(".weight")
        for place in places:
            for kind, piece in _pieces(layer, place, scheme, quantization.method, stored).items():
                found.setdefault(f"{layer}.{kind}", []).append(piece)
        if f"{layer}.bias" in stored.keys() - whole.keys():  # some writers of GPTQ store zeros
            [size] = stored[f"{layer}.bias"]
            found[f"{layer}.bias"] = [
                _place(Reader(partial(_refuse_bias, layer)), (slice(None), size))
            ]
    return found


def _refuse_bias(layer: str, bias: Tensor) -> None:
    if bias.any():
        raise ModelFileError(f"{layer}.bias is not zero, and this architecture has no bias there")


def _pieces(
    layer: str, matrix: Place, scheme: Scheme, method: str, stored: Shapes
) -> dict[str, Place]:
    """The places of the tensors that store a matrix, by the ends of their names."""
    target: Any = matrix.target
    if isinstance(target, QuantizedWeight):
        return _StoredMatrix(layer, matrix, target).places(method, stored)
    # A matrix that is used for more than products is dequantized, once all its tensors are there.
    weight = QuantizedWeight.empty(tuple(target.shape), scheme, target.device)
    weight.dtype = target.dtype
    pieces = _StoredMatrix(layer, matrix, weight).places(method, stored)
    missing = set(pieces)

    def read(kind: str, tensor: Tensor) -> None:
        pieces[kind].target.copy_(tensor)
        missing.discard(kind)
        if not missing:
            target.copy_(weight.dequantize())

    return {
        kind: replace(piece, target=Reader(partial(read, kind)))  # type: ignore[arg-type]
        for kind, piece in pieces.items()
    }
