"""FP8: floating-point numbers of 8 bits with a scale per tensor, row or block. They are dequantized
while they are loaded, and inputs are not quantized.

| tensor | shape |
| --- | --- |
| `weight` | `[outputs, inputs]` float8 |
| `weight_scale`, in blocks of quant_method fp8 `weight_scale_inv` | see below |
| `input_scale`, if stored | one number, which is not used |

| a scale per | shape |
| --- | --- |
| tensor | `[]`, `[1]` or `[1, 1]` |
| row | `[outputs, 1]` or `[outputs]` |
| block | `[outputs / block's outputs, inputs / block's inputs]`, rounded up |

The weight is `weight * scale`, in both kinds of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import Tensor

from nanovllm.checkpoint.formats import MatrixFormat
from nanovllm.layers.basic import Place
from nanovllm.layers.quantization.storage import IGNORED, check_scales, place, read_together, whole

# Outputs that are dequantized at a time, in float32.
ROWS = 1024


def scale_name(form: MatrixFormat) -> str:
    """Return the end of the name of the tensor with the scales."""
    in_blocks = form.layout == "fp8" and form.scales == "block"
    return "weight_scale_inv" if in_blocks else "weight_scale"


def fp8_places(
    layer: str, matrix: Place, form: MatrixFormat, stored: Mapping[str, tuple[int, ...]]
) -> dict[str, Place]:
    """Return the places of the tensors that store a matrix, by the ends of their names.

    Args:
        layer: the layer's name in the checkpoint.
        matrix: the place of the matrix, were it not quantized.
        stored: the shapes of the checkpoint's tensors by their names.
    """
    kind = scale_name(form)
    outputs, inputs = matrix.shape
    rows, columns = matrix.source
    shapes = {
        "row": (outputs, 1),
        "block": (-(-outputs // (form.block[0] or 1)), -(-inputs // (form.block[1] or 1))),
        "tensor": (),
    }
    shape = shapes[form.scales]
    found = stored.get(f"{layer}.{kind}", shape)
    if form.scales != "block" and prod(found) == prod(shape):
        shape = found
    sizes = {"row": (1, inputs), "block": form.block, "tensor": (outputs, inputs)}
    num_outputs, num_inputs = sizes[form.scales]

    def read(tensors: Mapping[str, Tensor]) -> None:
        scales = tensors[kind].float()
        check_scales(f"{layer}.{kind}", scales)
        scales = scales if form.scales == "block" else scales.view(-1, 1)
        own = scales[:, [column // num_inputs for column in range(columns.start, columns.stop)]]
        for start in range(rows.start, rows.stop, ROWS):
            here = range(start, min(start + ROWS, rows.stop))
            of_rows = [row // num_outputs for row in here]
            part = slice(here.start - rows.start, here.stop - rows.start)
            matrix.target[part].copy_(tensors["weight"][part].float() * own[of_rows])

    axes = [(rows, outputs), (columns, inputs)]
    pieces = {"weight": place(IGNORED, *axes), kind: place(IGNORED, *map(whole, shape))}
    places = read_together(pieces, read)
    if (name := f"{layer}.input_scale") in stored:
        places["input_scale"] = place(IGNORED, *map(whole, stored[name]))
    return places
