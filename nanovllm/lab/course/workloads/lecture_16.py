"""Second part of lecture 16: find the nucleus in fewer logits.

The nucleus of a row is the fewest most likely tokens whose probabilities sum to at least top_p.
Counted are the probabilities that `largest` sorts. The lecture guesses 512 tokens, and eight times
as many where that is too few: far too many for a row whose nucleus has three. How few are enough,
and what does the smallest probability found so far say about those that you have not seen?
"""

from collections.abc import Callable, Sequence

from torch import Tensor


def nucleus(largest: Callable[[Sequence[int], int], Tensor], top_p: Sequence[float]) -> list[float]:
    """Return, for each row, the smallest probability of its nucleus.

    Args:
        largest: counts; `largest(rows, width)` returns the `width` largest probabilities of each of
            these rows, in falling order, `[len(rows), width]`. They sum to 1 over the vocabulary.
    """
    found = [0.0] * len(top_p)
    rows = list(range(len(top_p)))
    width = 512
    while rows:
        falling = largest(rows, width)
        wide = []
        for row, values in zip(rows, falling, strict=True):
            last = int((values.cumsum(0) < top_p[row]).sum())
            if last == len(values):
                wide.append(row)
            else:
                found[row] = float(values[last])
        rows = wide
        width *= 8
    return found
