"""GPTQ: 4 or 8 bits without zero points, and words that hold inputs.

| tensor | shape |
| --- | --- |
| `qweight` | `[inputs * bits / 32, outputs]`, words of 8 or 4 inputs |
| `scales` | `[groups, outputs]` |
| `qzeros`, if stored | `[groups, outputs * bits / 32]`: the zero points of symmetric weights |
| `g_idx`, if stored | `[inputs]`: the group of each input, in their order |
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.checkpoint.quantization import QuantizationConfig
from nanovllm.layers.basic import Place
from nanovllm.layers.quantization.storage import (
    Reader,
    Shapes,
    StoredMatrix,
    inputs_per_group,
    place,
)
from nanovllm.layers.quantization.weight import Scheme

# Words of the zero points of symmetric weights, by the number of bits: version 1 stores them less
# 1. Labels lie, so both are read whatever the label says.
SYMMETRIC_ZEROS = {4: (0x77777777, 0x88888888 - 2**32), 8: (0x7F7F7F7F, 0x80808080 - 2**32)}


class GPTQMatrix(StoredMatrix):
    """See the module's docstring."""

    marker = "qweight"

    @classmethod
    def scheme(cls, layer: str, inputs: int, stored: Shapes, config: QuantizationConfig) -> Scheme:
        bits = 8 if stored[f"{layer}.qweight"][0] * 4 == inputs else 4
        scales = stored.get(f"{layer}.scales")
        size = inputs_per_group(layer, inputs, None if scales is None else scales[0], config)
        return Scheme(bits, size, quantizes_inputs=bits == 4 and config.w4a8)

    def needed(self) -> dict[str, Place]:
        values = Reader(self._read_bytes) if self.bits == 8 else self.weight.values.mT
        return {
            "qweight": place(values, self.words, self.outputs),
            "scales": place(self.weight.scales.mT, self.groups, self.outputs),
        }

    def optional(self) -> dict[str, Place]:
        width = -(-self.outputs[1] * self.bits // 32)
        return {
            "qzeros": place(Reader(self._check_zeros), self.groups, (slice(None), width)),
            "g_idx": place(Reader(self._check_order), self.inputs),
        }

    def _read_bytes(self, words: Tensor) -> None:
        self.read_bytes(words.mT)

    def _check_zeros(self, words: Tensor) -> None:
        asymmetric = (
            f"a zero point is not {2**self.bits // 2}; store asymmetric weights as "
            "compressed-tensors"
        )
        self.expect("qzeros", words, SYMMETRIC_ZEROS[self.bits], asymmetric)

    def _check_order(self, groups: Tensor) -> None:
        columns, inputs = self.inputs
        size = self.weight.scheme.group_size or inputs
        expected = torch.arange(columns.start, columns.stop, device="cpu") // size
        order = (
            "its inputs are not in the order of their groups; quantize with desc_act: false or "
            "static_groups: true"
        )
        self.expect("g_idx", groups, [expected], order)
