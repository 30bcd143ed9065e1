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

from nanovllm.layers.basic import Place
from nanovllm.layers.quantization.storage import Reader, StoredMatrix, place
from nanovllm.ops.reference_quantized import pack, unpack


class PackedMatrix(StoredMatrix):
    """The first table of the module's docstring."""

    def needed(self) -> dict[str, Place]:
        found = {
            "weight_packed": place(Reader(self.read_words), self.outputs, self.words),
            "weight_scale": place(self.scales("weight_scale"), self.outputs, self.groups),
        }
        if self.weight.zeros is not None:
            zeros = Reader(self._read_zeros)
            found["weight_zero_point"] = place(zeros, self.output_words, self.groups)
        return found

    def optional(self) -> dict[str, Place]:
        return {"weight_shape": place(Reader(self._check_shape), (slice(None), 2))}

    def _read_zeros(self, words: Tensor) -> None:
        self.read_zeros(unpack(words.mT))

    def _check_shape(self, shape: Tensor) -> None:
        sizes = torch.tensor([self.outputs[1], self.inputs[1]], device="cpu")
        self.expect("weight_shape", shape, [sizes], "the configuration says otherwise")


class BytesMatrix(StoredMatrix):
    """The second table of the module's docstring."""

    def inputs_per_word(self, bits: int) -> int:
        """See the base class; 4 bits are packed into words while they are loaded."""
        return 8 if bits == 4 else 1

    def needed(self) -> dict[str, Place]:
        values = Reader(self._read_4_bits) if self.bits == 4 else self.weight.values
        return {
            "weight": place(values, self.outputs, self.inputs),
            "weight_scale": place(self.scales("weight_scale"), self.outputs, self.groups),
        }

    def _read_4_bits(self, values: Tensor) -> None:
        self.weight.values.copy_(pack(values + 8))
