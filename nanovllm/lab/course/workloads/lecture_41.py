"""Second part of lecture 41: round with a smaller error.

The lecture's scale of a group lets its largest weight just fit, so that one outlier makes the steps
coarse for all others. Counted are hundredths of the squared error of all weights.
"""

from torch import Tensor


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return integers from -8 to 7, `[rows, width]`, and scales, `[rows, width / group_size]`. A
    weight becomes integer times scale."""
    grouped = weight.unflatten(1, (-1, group_size))
    scales = grouped.abs().amax(-1) / 7.5
    values = (grouped / scales[..., None]).round().clamp(-8, 7)
    return values.flatten(1), scales
