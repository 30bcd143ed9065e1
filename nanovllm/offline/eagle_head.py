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
        generator: draws the initial weights, on the CPU.

    Attributes:
        weights: by the names of public checkpoints.
        scale: `[3 * hidden_size]`, factors that give all inputs of `fc` the same size. The saved
            `fc` includes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        draft_vocab_size: int,
        max_positions: int,
        scale: Tensor,
        generator: torch.Generator,
    ) -> None:
        device = scale.device
        self.scale = scale
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
                torch.ones(shape)
                if len(shape) == 1
                else torch.empty(shape).uniform_(-size, size, generator=generator)
            )
            full = name if name in ("fc", "norm", "lm_head") else f"midlayer.{name}"
            self.weights[f"{full}.weight"] = weight.to(device).requires_grad_()
        self.cos_sin = rotary_table(config, max_positions).to(device)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Multiply by a weight matrix, `[..., in]` to `[..., out]`."""
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply an RMSNorm in float32."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def combine(self, aux: Tensor) -> Tensor:
        """Return the first step's `hidden`, from the target's residual streams,
        `[..., 3 * hidden_size]`."""
        return self.linear("fc", aux * self.scale)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[num_rows, draft_vocab_size]`, from what `step` returns."""
        return self.linear("lm_head", self.norm("norm", hidden))

    def step(self, embedded: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run one draft step at all positions.

        Args:
            embedded: `[batch, length, hidden_size]`, the tokens that follow.
            hidden: `[batch, length, hidden_size]`: at first what `combine` returns; then what the
                step before returned.
            cache: keys and values of the steps before, to which it adds its own.

        Returns: the next step's `hidden`, from which `compute_logits` gets the logits.
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
        """Compute the attention of step number `len(cache)`: over the first step's keys up to the
        own position, and over the own keys of each step since. A draft therefore sees the verified
        tokens and the drafts before it, and none of another position.

        Args:
            x: `[batch, length, 2 * hidden_size]`.
            cache: see `step`; keys and values are `[batch, num_kv_heads, length, head_dim]`.

        Returns: `[batch, length, num_heads * head_dim]`.
        """
        q, k, v = self.project(x, step=len(cache))
        cache.append((k, v))
        (first_k, first_v), *later = cache
        length = x.shape[1]
        # Query heads that share a KV head: [batch, num_kv_heads, group, length, head_dim].
        q = q.unflatten(1, (self.kv_heads, -1)) * self.head_dim**-0.5
        group_and_length = q.shape[2:4]
        scores = (q.flatten(2, 3) @ first_k.mT).unflatten(2, group_and_length)
        is_later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        own_scores = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in later]
        weights = torch.cat([scores.masked_fill(is_later, -math.inf), *own_scores], -1)
        weights = weights.softmax(-1).to(v.dtype)
        out: Tensor = weights[..., :length].flatten(2, 3) @ first_v
        out = out.unflatten(2, group_and_length)
        for i, (_, v) in enumerate(later):
            out = out + weights[..., length + i, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).flatten(2)

    def project(self, x: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `[batch, heads, length, head_dim]`. Queries and keys are
        rotated: a step later, each sequence begins a position later."""
        length = x.shape[1]
        cos, sin = self.cos_sin[step : step + length].chunk(2, -1)
        q, k, v = (
            self.linear(f"midlayer.self_attn.{name}_proj", x)
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)
            for name in ("q", "k", "v")
        )
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def tensors(self, quantize: str) -> dict[str, Tensor]:
        """Return the weights to save: in bfloat16, or with `quantize` "int8" most matrices in 8
        bits, with a scale per row."""
        found: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            tensor = (weight.detach() * (self.scale if name == "fc.weight" else 1)).cpu()
            # The columns of `fc` differ too much in size to share a scale.
            if quantize == "int8" and tensor.ndim == 2 and name != "fc.weight":
                scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                found[name] = (tensor / scale).round().to(torch.int8)
                found[f"{name}_scale"] = scale
            else:
                found[name] = tensor.to(torch.bfloat16)
        return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by their positions' angles (RoPE).

    Args:
        x: `[..., length, head_dim]`.
        cos, sin: `[length, head_dim / 2]`.
    """
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
