"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, and experts in all
layers but the first.

Built by notebooks/26_latent_attention.ipynb: edit it there.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import AttentionBackend, Rotary, attend
from nanovllm.attention.latent import latent_cache_shape
from nanovllm.layers.basic import Linear, RMSNorm
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import AttentionLayer, rotary_table
from nanovllm.models.moe import MoEDecoderLayer, MoEForCausalLM

# The epsilon of the norms inside latent attention, which is the same in all configurations.
LATENT_EPS = 1e-6


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position for each pair of rotated channels, `[head_dim / 2]` float32, as YaRN
    stretches them (Peng et al. 2023, arXiv 2309.00071).

    A pair that turns more than `beta_fast` times within the original context keeps its frequency. A
    pair that turns less than `beta_slow` times is slowed by `factor`. Between those two pairs, the
    factor is interpolated linearly by number."""
    scaling = config.rope_scaling
    dim = config.head_dim
    frequencies: Tensor = config.rope_theta ** -(
        torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    )

    def pair_that_turns(times: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow") or 1)), dim - 1)
    slow = ((torch.arange(dim // 2, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    factor: float = scaling["factor"]
    return frequencies * (1 - slow) + frequencies / factor * slow


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's factor on queries and keys, which sharpens attention over longer contexts."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def latent_rotary_table(config: ModelConfig, max_positions: int) -> Tensor:
    """`rotary_table`, or YaRN's table if the checkpoint uses YaRN: `[max_positions, head_dim]`
    float32 on the CPU."""
    scaling = config.rope_scaling
    if scaling["rope_type"] != "yarn":
        return rotary_table(config, max_positions)
    scale = scaling.get("attention_factor")
    factor = scaling["factor"]
    if scale is None:
        # DeepSeek applies the part for all channels to the scores; the rotated channels get the
        # rest.
        mscale = scaling.get("mscale") or 0.0
        all_dim = scaling.get("mscale_all_dim") or 0.0
        both = mscale > 0 and all_dim > 0
        scale = (
            yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
            if both
            else yarn_mscale(factor, 1.0)
        )
    return rotary_table(config, max_positions, yarn_frequencies(config)) * scale


class LatentAttention(AttentionLayer):
    """Projections to queries and to one latent for all heads, rotary positions, and a call of the
    attention backend."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.rank = config.kv_lora_rank
        self.nope = config.qk_nope_head_dim
        self.interleaved = config.rope_interleave
        self.q_rank = config.q_lora_rank
        self.head_dim = config.qk_nope_head_dim + config.head_dim
        scaling = config.rope_scaling
        sharper = yarn_mscale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim") or 0.0)
        self.scale = self.head_dim**-0.5 * sharper**2
        hidden = config.hidden_size
        width = config.num_heads * self.head_dim
        bias = config.output_bias
        if config.q_lora_rank:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, width)
        else:
            self.q_proj = Linear(hidden, width)
        self.kv_a_proj_with_mqa = Linear(hidden, config.latent_width, bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS)
        # For each head, the matrix that makes its key and its value from a latent. Attention
        # multiplies with parts of it.
        self.head_rows = self.nope + config.v_head_dim
        self.kv_b_proj = Linear(self.rank, config.num_heads * self.head_rows)
        self.kv_b_proj.packable = False
        self.o_proj = Linear(config.num_heads * config.v_head_dim, hidden, bias)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.q_rank else self.q_proj(x)
        q = q.view(len(x), -1, self.head_dim)
        latent = self.kv_a_proj_with_mqa(x)
        q_rope = self._in_halves(q[:, :, self.nope :])
        k_rope = self._in_halves(latent[:, None, self.rank :])
        q_rope, k_rope = ops.apply_rope(q_rope, k_rope, rotary.positions, rotary.cos_sin)
        q[:, :, self.nope :] = q_rope
        latent[:, self.rank :] = k_rope[:, 0]
        latent[:, : self.rank] = self.kv_a_layernorm(latent[:, : self.rank])
        up = self.kv_b_proj.weight.view(-1, self.head_rows, self.rank)
        return self.o_proj(attend(q, latent, up, self.layer, self.scale).flatten(1))

    def cache_shape(
        self, num_blocks: int, block_size: int, backend: AttentionBackend
    ) -> tuple[int, ...]:
        """See the base class."""
        return latent_cache_shape(num_blocks, block_size, self.kv_a_proj_with_mqa.out_features)

    def _in_halves(self, x: Tensor) -> Tensor:
        """A copy with the first channels of all pairs before the second ones, as `ops.apply_rope`
        expects. q·k does not change, since both are put in the same order."""
        if not self.interleaved:
            return x.contiguous()
        pairs: Tensor = x.unflatten(-1, (-1, 2))
        return pairs.transpose(-1, -2).flatten(-2)


class DeepseekDecoderLayer(MoEDecoderLayer):
    """Latent attention and an MLP or experts, each on the normalised residual stream."""

    attention_class = LatentAttention


class DeepseekForCausalLM(MoEForCausalLM):
    """DeepSeek-V2 and V3, which differ only in how they route tokens to experts."""

    layer_class = DeepseekDecoderLayer
    rotary_table = staticmethod(latent_rotary_table)

    def checkpoint_name(self, name: str) -> str | None:
        """As `MoEForCausalLM.checkpoint_name`; None also for V3's multi-token prediction, which is
        stored as a layer after the last."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return (
            None
            if layer and int(layer[1]) >= self.config.num_layers
            else super().checkpoint_name(name)
        )
