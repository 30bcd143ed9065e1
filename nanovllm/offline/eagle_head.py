"""The EAGLE-3 head in the form in which it is trained: whole sequences, dense attention, and
gradients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import rotary_table


class DraftHead:
    """The EAGLE-3 head for training: batches of whole sequences, and dense attention.

    Args:
        config: the target's.
        draft_vocab_size: tokens that it can guess.
        max_positions: longest sequence plus the number of steps.

    Attributes:
        weights: by the names of public checkpoints.
    """

    def __init__(
        self, config: ModelConfig, draft_vocab_size: int, max_positions: int, device: torch.device
    ) -> None:
        hidden = config.hidden_size
        mlp = config.intermediate_size
        width = config.head_dim
        q = config.num_heads * width
        kv = config.num_kv_heads * width
        self.kv_heads = config.num_kv_heads
        self.head_dim = width
        self.eps = config.rms_norm_eps
        shapes = {
            "fc": (hidden, 3 * hidden),
            "input_layernorm": (hidden,),
            "hidden_norm": (hidden,),
            "self_attn.q_proj": (q, 2 * hidden),
            "self_attn.k_proj": (kv, 2 * hidden),
            "self_attn.v_proj": (kv, 2 * hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
            "norm": (hidden,),
            "lm_head": (draft_vocab_size, hidden),
        }
        self.weights: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            # These begin near zero.
            size = shape[-1] ** -0.5 * (0.1 if name.endswith(("o_proj", "down_proj")) else 1)
            weight = (
                torch.ones(shape) if len(shape) == 1 else torch.empty(shape).uniform_(-size, size)
            )
            full = name if name in ("fc", "norm", "lm_head") else f"midlayer.{name}"
            self.weights[f"{full}.weight"] = weight.to(device).requires_grad_()
        self.cos_sin = rotary_table(config, max_positions).to(device)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A product with a matrix."""
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm, in float32."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def step(self, embedded: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One draft step at all positions.

        Args:
            embedded: `[batch, length, hidden_size]`, the tokens that follow.
            hidden: `[batch, length, hidden_size]`: at first of the target, through `fc`; then what
                the step before returned.
            cache: keys and values of the steps before, to which it adds its own.

        Returns: the next step's `hidden`; the logits are `lm_head` of its `norm`.
        """
        x = torch.cat(
            [
                self.norm("midlayer.input_layernorm", embedded),
                self.norm("midlayer.hidden_norm", hidden),
            ],
            -1,
        )
        x = hidden + self.linear("midlayer.self_attn.o_proj", self.attend(x, cache))
        y = self.norm("midlayer.post_attention_layernorm", x)
        gate, up = (self.linear(f"midlayer.mlp.{name}_proj", y) for name in ("gate", "up"))
        return x + self.linear("midlayer.mlp.down_proj", F.silu(gate) * up)

    def attend(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of step number `len(cache)`: over the first step's keys up to the own position,
        and over the own keys of each step since. So a draft sees the verified tokens and the drafts
        before it, and none of another position."""
        length = x.shape[1]
        step = len(cache)
        projected = (self.linear(f"midlayer.self_attn.{name}_proj", x) for name in "qkv")
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)
        cos, sin = self.cos_sin[step : step + length].chunk(2, -1)
        halves = (each.chunk(2, -1) for each in (q, k))
        q, k = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(v.dtype) for a, b in halves
        )
        cache.append((k, v))
        # The query heads that share a KV head are more rows of one product: [batch, kv_heads, group
        # * length, ...].
        q = q.unflatten(1, (self.kv_heads, -1)) * self.head_dim**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        first = (
            (q.flatten(2, 3) @ cache[0][0].mT)
            .unflatten(2, q.shape[2:4])
            .masked_fill(later, -math.inf)
        )
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in cache[1:]]
        weights = torch.cat([first, *own], -1).softmax(-1).to(v.dtype)
        averages = weights[..., :length].flatten(2, 3) @ cache[0][1]
        out: Tensor = averages.unflatten(2, q.shape[2:4])
        for i, (_, v) in enumerate(cache[1:]):
            out = out + weights[..., length + i, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).flatten(2)
