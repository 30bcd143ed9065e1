"""The formats of quantized matrices in checkpoints, and the table of what this engine reads.

Error messages and the table in layers/quantization/README.md follow from `SUPPORTED`."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.checkpoint.files import UnsupportedModelError

FILE = "config.json: quantization_config"


@dataclass(frozen=True)
class MatrixFormat:
    """How a checkpoint stores a matrix.

    Attributes:
        layout: which tensors store it: a key of `SUPPORTED`.
        bits: bits per weight.
        scales: what shares a scale: a "group" of inputs of one output, a "row" (all inputs of one
            output), a "block" of outputs and inputs, or the "tensor".
        group_size: inputs per group; 0 unless `scales` is "group".
        block: outputs and inputs per block; zeros unless `scales` is "block".
        has_zeros: each scale has a zero point.
        any_order: a group may consist of inputs that are not neighbours.
        quantizes_inputs: inputs are quantized, too, to multiply integers (W8A8, W4A8).
    """

    layout: str
    bits: int
    scales: str
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    has_zeros: bool = False
    any_order: bool = False
    quantizes_inputs: bool = False


@dataclass(frozen=True)
class Support:
    """The matrices of a layout that this engine reads, for one number of bits per weight.

    Attributes:
        scales: see `MatrixFormat`.
        zeros: values that `MatrixFormat.has_zeros` may have.
        any_order: groups of inputs that are not neighbours are supported.
        quantizes_inputs: so are inputs that are quantized to 8 bits.
        dequantized: matrices are dequantized while they are loaded.
    """

    scales: tuple[str, ...]
    zeros: tuple[bool, ...] = (False,)
    any_order: bool = False
    quantizes_inputs: bool = False
    dequantized: bool = False


GROUPS = ("group", "row")
# (layout, bits) -> what is supported
SUPPORTED: dict[tuple[str, int], Support] = {
    ("gptq", 4): Support(scales=GROUPS, any_order=True),
    ("gptq", 8): Support(scales=GROUPS, any_order=True),
    ("awq", 4): Support(scales=GROUPS, zeros=(True,)),
    ("pack-quantized", 4): Support(scales=GROUPS, zeros=(False, True), quantizes_inputs=True),
    ("pack-quantized", 8): Support(scales=GROUPS),
    ("int-quantized", 4): Support(scales=GROUPS, quantizes_inputs=True),
    ("int-quantized", 8): Support(scales=("row",), quantizes_inputs=True),
    ("float-quantized", 8): Support(scales=("row", "tensor", "block"), dequantized=True),
    ("fp8", 8): Support(scales=("tensor", "block"), dequantized=True),
}


def check_format(found: MatrixFormat) -> None:
    """Raise an UnsupportedModelError, which names what is supported, unless `SUPPORTED` has the
    format."""
    layout = found.layout
    bits = [number for name, number in SUPPORTED if name == layout]
    if found.bits not in bits:
        _refuse(f"{layout} with {found.bits} bits", f"quantize to {_or(bits)}")
    support = SUPPORTED[layout, found.bits]
    what = f"{layout} with {found.bits} bits"
    if found.scales not in support.scales:
        _refuse(f"{what} and a scale per {found.scales}", f"use a scale per {_or(support.scales)}")
    if found.scales == "group" and (found.group_size <= 0 or found.group_size % 8):
        _refuse(
            f"group_size {found.group_size}",
            "use a multiple of 8, such as 32, 64 or 128, or -1 for whole rows",
        )
    if found.has_zeros not in support.zeros:
        kind, cure = ("asymmetric", "symmetric") if found.has_zeros else ("symmetric", "asymmetric")
        _refuse(f"{kind} {what}", f"quantize with {cure} weights, or to compressed-tensors")
    if found.any_order and not support.any_order:
        _refuse(f"{what} and actorder: group", "use actorder: weight, which keeps groups together")
    if found.quantizes_inputs and not support.quantizes_inputs:
        _refuse(f"{what} and quantized inputs", "use int-quantized, or quantize only weights")


def _refuse(what: str, cure: str) -> None:
    raise UnsupportedModelError(f"{FILE}: {what} is not supported; {cure}")


def _or(values: list[int] | tuple[str, ...]) -> str:
    return " or ".join(map(str, values))
