"""YaRN: rotary positions for contexts that are longer than in training (Peng et al. 2023, arXiv
2309.00071). Lecture 26 derives it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm.models.config import ModelConfig


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position for each pair of rotated channels, `[head_dim / 2]` float32 on the CPU.

    A pair that turns more than `beta_fast` times within the original context keeps its frequency. A
    pair that turns less than `beta_slow` times is slowed by `factor`. Between those two pairs, the
    factor is interpolated linearly by number. With `truncate: false`, the two are fractions."""
    scaling = config.rope_scaling
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    periods: Tensor = config.rope_theta**exponents

    def pair_that_turns(times: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    fast = pair_that_turns(scaling.get("beta_fast") or 32)
    slow = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        fast = math.floor(fast)
        slow = math.ceil(slow)
    first = max(fast, 0)
    last = min(slow, dim - 1)
    ramp = (torch.arange(dim // 2, device="cpu") - first) / max(last - first, 0.001)
    keep: Tensor = 1 - ramp.clamp(0, 1)
    factor: float = scaling["factor"]
    return 1.0 / periods * keep + 1.0 / (factor * periods) * (1 - keep)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on queries and keys, which sharpens attention over longer contexts."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_attention_factor(config: ModelConfig) -> float:
    """The factor on cosines and sines, and thus on rotated queries and keys."""
    scaling = config.rope_scaling
    given: float | None = scaling.get("attention_factor")
    if given is not None:
        return given
    factor = scaling["factor"]
    mscale = scaling.get("mscale") or 0.0
    all_dim = scaling.get("mscale_all_dim") or 0.0
    if mscale > 0 and all_dim > 0:
        # DeepSeek applies the part for all channels to the scores; the rotated ones get the rest.
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)
