"""compressed-tensors: weights in words ("pack-quantized"), or one per byte ("int-quantized").

| tensor | shape |
| --- | --- |
| `weight_packed` | `[outputs, inputs * bits / 32]`, words of 8 or 4 inputs |
| `weight_scale` | `[outputs, groups]` |
| `weight_zero_point`, if asymmetric | `[outputs / 8, groups]`, words of 8 outputs |
| `weight_shape`, if stored | `[2]`: outputs and inputs |

| tensor | shape |
| --- | --- |
| `weight` | `[outputs, inputs]` int8, also for 4 bits |
| `weight_scale` | `[outputs, groups]` |
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
from nanovllm.layers.quantization.weight import W8A8, W8A16, Scheme
from nanovllm.ops.reference_quantized import pack, unpack


class PackedMatrix(StoredMatrix):
    """The first table of the module's docstring."""

    marker = "weight_packed"

    @classmethod
    def scheme(cls, layer: str, inputs: int, stored: Shapes, config: QuantizationConfig) -> Scheme:
        bits = 8 if stored[f"{layer}.weight_packed"][1] * 4 == inputs else 4
        scales = stored.get(f"{layer}.weight_scale")
        return Scheme(
            bits=bits,
            group_size=inputs_per_group(
                layer, inputs, None if scales is None else scales[1], config
            ),
            has_zeros=f"{layer}.weight_zero_point" in stored,
            quantizes_inputs=bits == 4 and config.w4a8,
        )

    def needed(self) -> dict[str, Place]:
        values = Reader(self.read_bytes) if self.bits == 8 else self.weight.values
        return {
            "weight_packed": place(values, self.outputs, self.words),
            "weight_scale": place(self.weight.scales, self.outputs, self.groups),
        }

    def optional(self) -> dict[str, Place]:
        zeros = Reader(self._read_zeros)
        return {
            "weight_zero_point": place(zeros, self.output_words, self.groups),
            "weight_shape": place(Reader(self._check_shape), (slice(None), 2)),
        }

    def _read_zeros(self, words: Tensor) -> None:
        self.read_zeros(unpack(words.mT))

    def _check_shape(self, shape: Tensor) -> None:
        sizes = torch.tensor([self.outputs[1], self.inputs[1]], device="cpu")
        self.expect("weight_shape", shape, [sizes], "the configuration says otherwise")


class BytesMatrix(StoredMatrix):
    """The second table of the module's docstring."""

    marker = "weight_scale"

    @classmethod
    def scheme(cls, layer: str, inputs: int, stored: Shapes, config: QuantizationConfig) -> Scheme:
        if config.bits == 8:
            return W8A8 if config.quantizes_inputs else W8A16
        groups = stored[f"{layer}.weight_scale"][1]
        return Scheme(
            bits=config.bits,
            group_size=inputs_per_group(layer, inputs, groups, config),
            quantizes_inputs=config.w4a8 or config.quantizes_inputs,
        )

    def needed(self) -> dict[str, Place]:
        values = Reader(self._read_4_bits) if self.bits == 4 else self.weight.values
        return {
            "weight": place(values, self.outputs, self.inputs),
            "weight_scale": place(self.weight.scales, self.outputs, self.groups),
        }

    def _read_4_bits(self, values: Tensor) -> None:
        self.weight.values.copy_(pack(values + 8))
