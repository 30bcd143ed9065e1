"""GPTQ: 4 or 8 bits without zero points, and words that hold inputs.

| tensor | shape |
| --- | --- |
| `qweight` | `[inputs * bits / 32, outputs]`, words of 8 or 4 inputs |
| `scales` | `[groups, outputs]` |
| `qzeros`, if stored | `[groups, outputs * bits / 32]`: the zero points of symmetric weights |
| `g_idx`, if stored | `[inputs]`: the group of each input; with desc_act, in any order |
"""

from __future__ import annotations

from torch import Tensor

from nanovllm.layers.basic import Place
from nanovllm.layers.quantization.storage import IGNORED, Reader, StoredMatrix, place

# Words of the zero points of symmetric weights, by the number of bits: version 1 stores them less
# 1. Labels lie, so both are read whatever the label says.
SYMMETRIC_ZEROS = {4: (0x77777777, 0x88888888 - 2**32), 8: (0x7F7F7F7F, 0x80808080 - 2**32)}


class GPTQMatrix(StoredMatrix):
    """See the module's docstring."""

    def needed(self) -> dict[str, Place]:
        return {
            "qweight": place(Reader(self._read_words), self.words, self.outputs),
            "scales": place(self.scales("scales", transposed=True), self.groups, self.outputs),
        }

    def optional(self) -> dict[str, Place]:
        width = -(-self.outputs[1] * self.bits // 32)
        return {
            "qzeros": place(Reader(self._check_zeros), self.groups, (slice(None), width)),
            "g_idx": place(IGNORED, self.inputs),  # `StoredTensors` has read it
        }

    def _read_words(self, words: Tensor) -> None:
        self.read_words(words.mT)

    def _check_zeros(self, words: Tensor) -> None:
        asymmetric = (
            f"a zero point is not {2**self.bits // 2}; store asymmetric weights as "
            "compressed-tensors"
        )
        self.expect("qzeros", words, SYMMETRIC_ZEROS[self.bits], asymmetric)
