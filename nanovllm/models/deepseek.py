"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, and experts in all
layers but the first.

Built by notebooks/26_latent_attention.ipynb: edit it there.
"""

from __future__ import annotations

import re

from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import AttentionBackend, Rotary, attend
from nanovllm.attention.latent import latent_cache_shape
from nanovllm.layers.basic import Linear, RMSNorm
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import AttentionLayer
from nanovllm.models.moe import MoEDecoderLayer, MoEForCausalLM
from nanovllm.models.yarn import yarn_mscale

# The epsilon of the norms inside latent attention, which is the same in all configurations.
LATENT_EPS = 1e-6


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

    def checkpoint_name(self, name: str) -> str | None:
        """As `MoEForCausalLM.checkpoint_name`; None also for V3's multi-token prediction, which is
        stored as a layer after the last."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return (
            None
            if layer and int(layer[1]) >= self.config.num_layers
            else super().checkpoint_name(name)
        )
