"""AWQ: 4 bits with zero points, and words that hold outputs.

| tensor | shape |
| --- | --- |
| `qweight` | `[inputs, outputs / 8]`, words of 8 outputs |
| `scales` | `[groups, outputs]` |
| `qzeros` | `[groups, outputs / 8]`, words of 8 outputs |
"""

from __future__ import annotations

from torch import Tensor

from nanovllm.layers.basic import Place
from nanovllm.layers.quantization.storage import Reader, StoredMatrix, place
from nanovllm.ops.reference_quantized import pack, unpack

# A word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7 in this order, which AWQ's GPU kernels unpack
# fastest; hence output j is number:
NUMBERS = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQMatrix(StoredMatrix):
    """See the module's docstring."""

    def needed(self) -> dict[str, Place]:
        return {
            "qweight": place(Reader(self._read_values), self.inputs, self.output_words),
            "scales": place(self.scales("scales", transposed=True), self.groups, self.outputs),
            "qzeros": place(Reader(self._read_zeros), self.groups, self.output_words),
        }

    def _read_values(self, words: Tensor) -> None:
        self.weight.values.copy_(pack(_by_output(words)[:, self.own].mT))

    def _read_zeros(self, words: Tensor) -> None:
        self.read_zeros(_by_output(words))


def _by_output(words: Tensor) -> Tensor:
    """The nibbles of words, `[rows, words]` to `[rows, 8 * words]`, in the order of the outputs."""
    octets: Tensor = unpack(words).unflatten(-1, (-1, 8))
    return octets[..., NUMBERS].flatten(-2)
