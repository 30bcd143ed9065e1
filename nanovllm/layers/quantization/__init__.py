"""Replaces a model's matrices by quantized ones, and maps the checkpoint's tensors to them.

weight        one quantized matrix, which replaces a layer's weight
stored        the checkpoint's tensors, and the format of each matrix
storage       base class of the formats with integers
awq, gptq, compressed_tensors, fp8
              the tensors of each format

A layer's `Place` specifies where a matrix of the checkpoint belongs. The places of the tensors that
store the quantized matrix follow from it. See README.md for what is supported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.checkpoint.files import ModelFileError, UnsupportedModelError
from nanovllm.checkpoint.formats import SUPPORTED, MatrixFormat
from nanovllm.checkpoint.quantization import ONLINE, QuantizationConfig
from nanovllm.layers.basic import Layer, Packable, Place
from nanovllm.layers.quantization.awq import AWQMatrix
from nanovllm.layers.quantization.compressed_tensors import BytesMatrix, PackedMatrix
from nanovllm.layers.quantization.fp8 import fp8_places
from nanovllm.layers.quantization.gptq import GPTQMatrix
from nanovllm.layers.quantization.storage import Reader, StoredMatrix, dequantized_places, place
from nanovllm.layers.quantization.stored import StoredTensors
from nanovllm.layers.quantization.weight import W8A8, W8A16, QuantizedWeight, Scheme

if TYPE_CHECKING:
    from nanovllm.models.llama import LlamaForCausalLM

__all__ = ["W8A8", "W8A16", "QuantizedWeight", "Scheme", "quantize_layers"]

logger = logging.getLogger(__name__)

# The classes that read the formats with integers, by layout.
READERS: dict[str, type[StoredMatrix]] = {
    "awq": AWQMatrix,
    "gptq": GPTQMatrix,
    "pack-quantized": PackedMatrix,
    "int-quantized": BytesMatrix,
}
# Group sizes for weights that are quantized to 4 bits while they are loaded: the first that divides
# the number of inputs.
GROUP_SIZES = (64, 32)
# Names of the output head in a model, and of the matrix that a tied one shares.
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"

# The quantized matrices of a model, by the parameters that they replace.
Replacements = dict[nn.Parameter, QuantizedWeight]


def quantize_layers(
    model: LlamaForCausalLM, quantization: QuantizationConfig, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Replace the matrices of a model on the meta device by quantized ones.

    For a quantized checkpoint, `model.checkpoint_places` becomes a function that returns the places
    of the tensors that store the quantized matrices. For an unquantized checkpoint, which is
    quantized while it is loaded, it does not change.

    Args:
        tensors: the checkpoint's tensors: names, shapes and dtypes, and the numbers of `g_idx`.

    Raises:
        ValueError: the weights cannot be loaded with these settings; the message names settings
            that work.
    """
    replacements: Replacements = {}
    stored: StoredTensors | None = None
    if quantization.method in ONLINE:
        replacements = _online(model, quantization.method)
    elif quantization.rules:
        stored = StoredTensors(quantization, tensors, model.checkpoint_name)
        replacements = _as_stored(model, stored)
    four_bits = any(weight.scheme.bits == 4 for weight in replacements.values())
    if quantization.w4a8 and not four_bits:
        raise UnsupportedModelError(
            "quantization 'w4a8' is for 4-bit weights, and this checkpoint has none: do not set it"
        )
    if quantization.head:
        tied = [model.model.embed_tokens] if model.config.tie_word_embeddings else []
        for layer in (model.lm_head, *tied):
            for head in layer.parameters(recurse=False):
                replacements.setdefault(head, _empty(head, W8A8))
    _replace(model, replacements)
    model.tie_weights()
    if stored:
        model.checkpoint_places = partial(  # type: ignore[method-assign]
            _stored_places, model.checkpoint_places, stored
        )


def _empty(matrix: Tensor, scheme: Scheme) -> QuantizedWeight:
    return QuantizedWeight.empty(tuple(matrix.shape), scheme, matrix.device)


def _replace(model: nn.Module, replacements: Replacements) -> None:
    """Replace parameters, wherever the model uses them."""
    for module in list(model.modules()):
        for name, matrix in list(module.named_parameters(recurse=False)):
            if matrix not in replacements:
                continue
            delattr(module, name)
            setattr(module, name, replacements[matrix])
            if isinstance(module, Packable):  # the new weight packs itself
                module.packable = any(left.ndim > 1 for left in module.parameters(recurse=False))


def _online(model: nn.Module, method: str) -> Replacements:
    """Return the matrices of a model that is quantized while it is loaded."""
    return {
        matrix: _empty(matrix, _online_scheme(method, matrix.shape[-1]))
        for path, layer in model.named_modules()
        if isinstance(layer, Layer) and layer.matrices.packable and path != HEAD
        for matrix in layer.matrices.parameters(recurse=False)
        if matrix.ndim > 1
    }


def _online_scheme(method: str, inputs: int) -> Scheme:
    """Return the scheme of a matrix that is quantized while it is loaded."""
    if method == "w8a8":
        return W8A8
    group_size = next((size for size in GROUP_SIZES if inputs % size == 0), 0)
    return Scheme(4, group_size, quantizes_inputs=method == "w4a8")


def _as_stored(model: nn.Module, stored: StoredTensors) -> Replacements:
    """Return the matrices of a model that keep the integers of a checkpoint. The others are
    dequantized while they are loaded, which is logged."""
    found: Replacements = {}
    reasons: dict[nn.Parameter, tuple[str, list[str]]] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        for matrix, parts in _stacked(layer, _path_in_checkpoint(path, layer, stored)).items():
            scheme, reason = _common_scheme(stored, parts)
            if scheme and layer.matrices.packable:
                found[matrix] = _empty(matrix, scheme)
            elif scheme or reason:
                quantized = [part for part in parts if stored.format(part)]
                reasons[matrix] = reason or "not only products use its weights", quantized
    _log_dequantized([each for matrix, each in reasons.items() if matrix not in found])
    return found


def _path_in_checkpoint(path: str, layer: Layer, stored: StoredTensors) -> str:
    """Return a layer's path in the checkpoint, which has one matrix for embedding and head if they
    are tied."""
    has_own_matrix = path != HEAD or layer.parts or stored.has(HEAD)
    return path if has_own_matrix else EMBEDDING


def _stacked(layer: Layer, path: str) -> dict[nn.Parameter, dict[str, Place]]:
    """Return the places of the checkpoint's matrices that are stacked in each parameter of a
    layer."""
    found: dict[nn.Parameter, dict[str, Place]] = {}
    for name, matrix in layer.places(path):
        if name.endswith(".weight"):
            parameter = getattr(layer.matrices, layer.matrices.parameter_of(name))
            found.setdefault(parameter, {})[name.removesuffix(".weight")] = matrix
    return found


def _common_scheme(stored: StoredTensors, parts: dict[str, Place]) -> tuple[Scheme | None, str]:
    """Return the scheme of integers that all parts of a matrix are stored in; without one, why they
    are dequantized, or "" if they are not quantized.

    Args:
        parts: the places of the parts by the names of their layers.
    """
    forms = {layer: stored.format(layer) for layer in parts}
    if not any(forms.values()):
        return None, ""
    if any(form and _is_dequantized(form) for form in forms.values()):
        return (
            None,
            "products with FP8 weights are not supported, so each takes the memory of --dtype",
        )
    schemes = {
        stored.scheme(layer, form, parts[layer].shape[1]) if form else None
        for layer, form in forms.items()
    }
    scheme = schemes.pop()
    if schemes:
        return None, "stacked with matrices that are quantized differently"
    if scheme and scheme.reordered:
        return _check_orders(stored, parts, scheme)
    return scheme, ""


def _check_orders(
    stored: StoredTensors, parts: dict[str, Place], scheme: Scheme
) -> tuple[Scheme | None, str]:
    """As `_common_scheme`, for parts whose inputs are not in the order of their groups."""
    orders: dict[str, Tensor] = {}
    for layer, matrix in parts.items():
        if matrix.source[1] != slice(0, matrix.shape[1]):
            return None, "desc_act, and the inputs of a group are on several ranks"
        stack, _, _ = layer.rpartition(".")  # experts have orders of their own
        order = stored.orders[layer]
        if not orders.setdefault(stack, order).equal(order):
            return (None, "desc_act, and stacked with matrices of another order")
    return scheme, ""


def _is_dequantized(form: MatrixFormat) -> bool:
    return SUPPORTED[form.layout, form.bits].dequantized


def _log_dequantized(reasons: list[tuple[str, list[str]]]) -> None:
    """Log matrices that are dequantized while they are loaded, a line per reason.

    Args:
        reasons: why, and the names of the layers.
    """
    for reason in dict.fromkeys(reason for reason, _ in reasons):
        first, *others = [name for its, names in reasons if its == reason for name in names]
        which = f"{first} and {len(others)} more are" if others else f"{first} is"
        logger.warning("%s dequantized while loading: %s", which, reason)


def _stored_places(
    matrices: Callable[[], dict[str, list[Place]]], stored: StoredTensors
) -> dict[str, list[Place]]:
    """Return `checkpoint_places`, in which the place of a quantized matrix is replaced by those of
    the tensors that store it."""
    found: dict[str, list[Place]] = {}
    unquantized = matrices()
    for name, places in unquantized.items():
        layer = name.removesuffix(".weight")
        form = None if layer == name else stored.format(layer)
        if form is None:
            found[name] = places
            continue
        for matrix in places:
            for kind, piece in _pieces(form, layer, matrix, stored).items():
                found.setdefault(f"{layer}.{kind}", []).append(piece)
        bias = f"{layer}.bias"
        if bias in stored.shapes.keys() - unquantized.keys():  # some GPTQ checkpoints store zeros
            [size] = stored.shapes[bias]
            found[bias] = [place(Reader(partial(_refuse_bias, layer)), (slice(None), size))]
    return found


def _refuse_bias(layer: str, bias: Tensor) -> None:
    if bias.any():
        raise ModelFileError(f"{layer}.bias is not zero, and this architecture has no bias there")


def _pieces(
    form: MatrixFormat, layer: str, matrix: Place, stored: StoredTensors
) -> dict[str, Place]:
    """Return the places of the tensors that store a matrix, by the suffixes of their names."""
    if _is_dequantized(form):
        return fp8_places(layer, matrix, form, stored.shapes)
    target: nn.Module | Tensor = matrix.target
    scheme = stored.scheme(layer, form, matrix.shape[1])
    order = stored.orders.get(layer)
    reader = READERS[form.layout]
    if isinstance(target, QuantizedWeight) and target.scheme == scheme:
        return reader(layer, matrix, target, order).places(stored.shapes)
    return dequantized_places(reader, layer, matrix, scheme, order, stored.shapes)
