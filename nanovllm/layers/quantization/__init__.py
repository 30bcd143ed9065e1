"""Replaces a model's matrices by quantized ones, and maps the checkpoint's tensors to them.

weight        one quantized matrix, which replaces a layer's weight
storage       base class of the checkpoint formats
awq, gptq, compressed_tensors
              the tensors of each format

A layer's `Place` specifies where a matrix of the checkpoint belongs. The places of the tensors that
store the quantized matrix follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from nanovllm.checkpoint.files import ModelFileError, UnsupportedModelError
from nanovllm.checkpoint.quantization import ONLINE, QuantizationConfig
from nanovllm.layers.basic import Layer, Packable, Place
from nanovllm.layers.quantization.awq import AWQMatrix
from nanovllm.layers.quantization.compressed_tensors import BytesMatrix, PackedMatrix
from nanovllm.layers.quantization.gptq import GPTQMatrix
from nanovllm.layers.quantization.storage import Reader, Shapes, StoredMatrix, place
from nanovllm.layers.quantization.weight import W8A8, W8A16, QuantizedWeight, Scheme

if TYPE_CHECKING:
    from nanovllm.models.llama import LlamaForCausalLM

__all__ = ["W8A8", "W8A16", "QuantizedWeight", "Scheme", "quantize_layers"]

# The classes that read the checkpoints of each method. A layer is read by the first class whose
# marker is among its tensors.
FORMATS: dict[str, tuple[type[StoredMatrix], ...]] = {
    "awq": (AWQMatrix,),
    "gptq": (GPTQMatrix,),
    "compressed-tensors": (PackedMatrix, BytesMatrix),
}
# Group sizes for weights that are quantized to 4 bits while they are loaded: the first that divides
# the number of inputs.
GROUP_SIZES = (64, 32)


def quantize_layers(
    model: LlamaForCausalLM, quantization: QuantizationConfig, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Replace the matrices of a model on the meta device by quantized ones.

    For a quantized checkpoint, `model.checkpoint_places` becomes a function that returns the places
    of the tensors that store the quantized matrices. For an unquantized checkpoint, which is
    quantized while it is loaded, it does not change.

    Args:
        tensors: the checkpoint's tensors; only their names and shapes are read.

    Raises:
        ValueError: the weights cannot be loaded with these settings; the message names settings
            that work.
    """
    stored: dict[str, tuple[int, ...]] = {}
    if quantization.method in FORMATS:
        found = {model.checkpoint_name(name): tuple(tensor.shape) for name, tensor in tensors}
        stored = {name: shape for name, shape in found.items() if name is not None}
    for path, layer in list(model.named_modules()):
        if isinstance(layer, Layer) and layer.matrices.packable:
            _replace_matrices(layer.matrices, _common_scheme(quantization, stored, path, layer))
    weights = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
    if quantization.w4a8 and not any(weight.scheme.bits == 4 for weight in weights):
        raise UnsupportedModelError(
            "quantization 'w4a8' is for 4-bit weights, and this checkpoint has none: do not set it"
        )
    if quantization.head:
        tied = [model.model.embed_tokens] if model.config.tie_word_embeddings else []
        for matrix in (model.lm_head, *tied):
            _replace_matrices(matrix, W8A8)
    model.tie_weights()
    if stored:
        model.checkpoint_places = partial(  # type: ignore[method-assign]
            _stored_places, model.checkpoint_places, quantization, stored
        )


def _common_scheme(
    quantization: QuantizationConfig, stored: Shapes, path: str, layer: Layer
) -> Scheme | None:
    """Return the common scheme of the checkpoint's matrices that are stacked in a layer.

    Raises:
        UnsupportedModelError: their schemes differ.
    """
    schemes = {
        name: _scheme(quantization, stored, name, found.shape)
        for name, found in layer.places(path)
        if name.endswith(".weight")
    }
    first, scheme = next(iter(schemes.items()))
    if others := [name for name, its in schemes.items() if its != scheme]:
        raise UnsupportedModelError(
            f"{first} and {others[0]}, which this engine stores as one matrix, are quantized "
            "differently: quantize both in the same way"
        )
    return scheme


def _replace_matrices(layer: Packable, scheme: Scheme | None) -> None:
    if scheme is None:
        return
    for name, matrix in list(layer.named_parameters(recurse=False)):
        if matrix.ndim > 1:
            delattr(layer, name)
            setattr(layer, name, QuantizedWeight.empty(tuple(matrix.shape), scheme, matrix.device))
            layer.packable = False  # the weight packs itself


def _format(quantization: QuantizationConfig, stored: Shapes, layer: str) -> type[StoredMatrix]:
    """Return the class that reads a quantized layer."""
    return next(each for each in FORMATS[quantization.method] if f"{layer}.{each.marker}" in stored)


def _scheme(
    quantization: QuantizationConfig, stored: Shapes, name: str, shape: tuple[int, ...]
) -> Scheme | None:
    """Return a checkpoint matrix's scheme, from the names and shapes of its tensors; None if it is
    not quantized."""
    layer = name.removesuffix(".weight")
    inputs = shape[-1]
    if quantization.method in ONLINE:
        is_head = layer in ("lm_head", "model.embed_tokens")  # a tied one may have either name
        return None if is_head else _online_scheme(quantization.method, inputs)
    for each in FORMATS.get(quantization.method, ()):
        if f"{layer}.{each.marker}" in stored:
            return each.scheme(layer, inputs, stored, quantization)
    return None


def _online_scheme(method: str, inputs: int) -> Scheme:
    """Return the scheme of a matrix that is quantized while it is loaded."""
    if method == "w8a8":
        return W8A8
    group_size = next((size for size in GROUP_SIZES if inputs % size == 0), 0)
    return Scheme(4, group_size, quantizes_inputs=method == "w4a8")


def _stored_places(
    matrices: Callable[[], dict[str, list[Place]]], quantization: QuantizationConfig, stored: Shapes
) -> dict[str, list[Place]]:
    """Return `checkpoint_places`, in which the place of a quantized matrix is replaced by those of
    the tensors that store it."""
    found: dict[str, list[Place]] = {}
    whole = matrices()
    for name, places in whole.items():
        is_matrix = name.endswith(".weight")
        scheme = _scheme(quantization, stored, name, places[0].shape) if is_matrix else None
        if scheme is None:
            found[name] = places
            continue
        layer = name.removesuffix(".weight")
        form = _format(quantization, stored, layer)
        for matrix in places:
            for kind, piece in _pieces(form, layer, matrix, scheme, stored).items():
                found.setdefault(f"{layer}.{kind}", []).append(piece)
        if f"{layer}.bias" in stored.keys() - whole.keys():  # some GPTQ checkpoints store zeros
            [size] = stored[f"{layer}.bias"]
            bias = Reader(partial(_refuse_bias, layer))
            found[f"{layer}.bias"] = [place(bias, (slice(None), size))]
    return found


def _refuse_bias(layer: str, bias: Tensor) -> None:
    if bias.any():
        raise ModelFileError(f"{layer}.bias is not zero, and this architecture has no bias there")


def _pieces(
    form: type[StoredMatrix], layer: str, matrix: Place, scheme: Scheme, stored: Shapes
) -> dict[str, Place]:
    """Return the places of the tensors that store a matrix, by the suffixes of their names."""
    target: nn.Module | Tensor = matrix.target
    if isinstance(target, QuantizedWeight):
        return form(layer, matrix, target).places(stored)
    assert isinstance(target, Tensor)
    # A matrix with other uses than products is dequantized when all of its tensors are loaded.
    weight = QuantizedWeight.empty(tuple(target.shape), scheme, target.device)
    weight.dtype = target.dtype
    pieces = form(layer, matrix, weight).places(stored)
    missing = set(pieces)

    def read(kind: str, tensor: Tensor) -> None:
        pieces[kind].target.copy_(tensor)
        missing.discard(kind)
        if not missing:
            target.copy_(weight.dequantize())

    return {
        kind: replace(piece, target=cast(Tensor, Reader(partial(read, kind))))
        for kind, piece in pieces.items()
    }
