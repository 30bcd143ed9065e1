"""Rotates keys to other positions.

Built by notebooks/32_kv_sharing.ipynb: edit it there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_keys(keys: Tensor, before: Tensor, after: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate keys to other positions: RoPE turns channel pair i by `position * frequency_i`, and
    rotations add up (Su et al. 2021).

    Channel pair i is channels i and i + head_dim / 2. Turned by an angle d, a pair (a, b) becomes
    (a cos d - b sin d, b cos d + a sin d). Here, d is the angle of `after` minus that of `before`;
    cos d and sin d follow from the cosines and sines of both.

    cos d and sin d are computed in float64 from the table's entries at `before` and `after`, and
    not looked up at their difference: the table's angles are rounded, by 1e-4 at position 2000, but
    the rotation that was made with an entry can be undone to the last digit. For that, cos d and
    sin d are divided by cos² + sin² of `before`, which is not quite 1 in a rounded table. The keys
    are turned in float32, or in their own dtype if that is wider.

    Args:
        keys: `[..., num_tokens, num_kv_heads, head_dim]`, rotated for the positions `before`.
        before, after: `[num_tokens]` int64.
        cos_sin: `[max_positions, head_dim]`, as in `Rotary`: of each position the cosines of all
            pairs, then their sines.

    Returns:
        A new tensor of the same shape and dtype.
    """
    cos, sin = cos_sin[before].double().unsqueeze(1).chunk(2, dim=-1)
    new_cos, new_sin = cos_sin[after].double().unsqueeze(1).chunk(2, dim=-1)
    length = cos.square() + sin.square()  # 1, except for rounding
    wide = torch.promote_types(keys.dtype, torch.float32)
    turn_cos = ((new_cos * cos + new_sin * sin) / length).to(wide)
    turn_sin = ((new_sin * cos - new_cos * sin) / length).to(wide)
    first, second = keys.to(wide).chunk(2, dim=-1)
    turned = torch.cat(
        (first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin), dim=-1
    )
    return turned.to(keys.dtype)
