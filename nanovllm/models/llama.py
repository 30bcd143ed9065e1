"""Llama and its relatives (Mistral, Qwen2, Qwen3; the base of Gemma 2): from packed tokens to
hidden states.

Built by notebooks/10_first_tokens.ipynb and 23: edit it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.attention.base import AttentionOptions, Rotary, attend
from nanovllm.distributed.groups import GroupCoordinator, get_pp_group
from nanovllm.distributed.pipeline_parallel import if_here, is_elsewhere, layers_here
from nanovllm.layers.basic import Layer, Packable, Place, RMSNorm
from nanovllm.layers.tensor_parallel import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from nanovllm.models.config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.models.fused import FusedLayers


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position for each pair of channels, `[head_dim / 2]` float32 (RoPE, Su et al.
    2021); on the CPU, also where torch's default device is the meta device.

    With `rope_type` "linear" in `config.rope_scaling`, all angles are divided by `factor`. With
    "llama3", a pair's turns within `original_max_position_embeddings` decide: above
    `high_freq_factor` the angle stays, below `low_freq_factor` it is divided by `factor`, and in
    between it is a mean of both, whose weights are linear in the turns."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    )
    frequencies: Tensor = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    factor: float = scaling.get("factor", 1.0)
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    if scaling["rope_type"] == "llama3":
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        length: int = scaling["original_max_position_embeddings"]
        turns = length * frequencies / (2 * math.pi)
        # 1: fast, as it is; 0: slow, divided
        keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / factor
    return frequencies


def rotary_table(
    config: ModelConfig, max_positions: int, frequencies: Tensor | None = None
) -> Tensor:
    """`[max_positions, head_dim]` float32 on the CPU: cosines in the first half, sines in the
    second. The angles per position are `rotary_frequencies` by default."""
    # On the CPU even if the model is built on the meta device, for whose `arange` torch imports
    # modules for a second.
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(
        positions, rotary_frequencies(config) if frequencies is None else frequencies
    )
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class SelfAttention(nn.Module):
    """Projections, rotary positions and a call of the attention backend, for the heads of this
    rank."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.options: AttentionOptions = {
            "sliding_window": config.layer_windows[layer] if config.layer_windows else 0
        }
        if config.attention_soft_cap:
            self.options["soft_cap"] = config.attention_soft_cap
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            config.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, config.output_bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        num_heads = self.qkv_proj.num_heads
        num_kv_heads = self.qkv_proj.num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        out = attend(q, k, v, self.layer, self.scale, rotary=rotary, **self.options)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        bias: bool,
        reduce: bool = True,
        group: GroupCoordinator | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [intermediate] * 2, bias, group)
        self.down_proj = RowParallelLinear(intermediate, hidden, bias, reduce, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    attention_class: type[nn.Module] = SelfAttention
    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_class(config, layer)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.build_mlp(config, layer)

    def build_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """The MLP of a layer; models with experts have other modules here."""
        return MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Embedding, layers and final norm. `family` names their classes.

    Attributes:
        fused: what runs in the place of all layers, where a CPU can (models/fused.py).
        aux_hidden_states: see `collect_hidden_states`.
    """

    __call__: Callable[..., Tensor]
    fused: Sequence[FusedLayers] = ()
    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(
        self, config: ModelConfig, max_positions: int, family: type[LlamaForCausalLM]
    ) -> None:
        nn.Module.__init__(self)
        self.stage = get_pp_group()
        self.here = layers_here(config.num_layers)
        # The last stage needs the embedding if the output head is the same matrix.
        embeds = self.stage.is_first or (self.stage.is_last and config.tie_word_embeddings)
        self.embed_tokens = if_here(
            embeds, family.embedding_class, config.vocab_size, config.hidden_size
        )
        self.layers = nn.ModuleList(
            if_here(layer in self.here, family.layer_class, config, layer)
            for layer in range(config.num_layers)
        )
        self.norm = if_here(
            self.stage.is_last,
            family.layer_class.norm_class,
            config.hidden_size,
            config.rms_norm_eps,
        )
        self.cos_sin: Tensor
        self.register_buffer(
            "cos_sin", family.rotary_table(config, max_positions), persistent=False
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, received: Tensor | None = None
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if received is None else received
        residual = torch.zeros_like(x)
        rotary = Rotary(positions, self.cos_sin)
        self.aux_hidden_states = list[Tensor]()
        layers = cast("Iterable[DecoderLayer]", self.layers)
        for layer in self.fused or islice(layers, self.here.start, self.here.stop):
            if (
                self.aux_hidden_state_layers
                and layer.self_attn.layer in self.aux_hidden_state_layers
            ):
                self.aux_hidden_states.append(x + residual)
            x, residual = layer(x, residual, rotary)
        if not self.stage.is_last:
            return residual.add_(x)
        return self.norm.add(x, residual)[0]

    def collect_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Let each `forward` keep the residual stream at the input of some layers: in
        `aux_hidden_states`, a `[num_tokens, hidden_size]` tensor per layer, in rising order. Layers
        that are fused, or will be, become one call for each part between them."""
        self.aux_hidden_state_layers = layers
        cuts = sorted({self.here.start, self.here.stop, *layers})
        self.fused = [
            type(self.fused[0])(cast("list[DecoderLayer]", list(self.layers[a:b])))
            for a, b in pairwise(cuts)
            if self.fused
        ]


class LlamaForCausalLM(nn.Module):
    """A decoder-only model over packed tokens.

    It knows neither requests nor blocks: the forward context supplies what attention needs beyond
    q, k and v.

    Args:
        config: the model's shape.
        max_positions: length of the rotary table: the longest sequence in tokens.
    """

    embedding_class: type[VocabParallelEmbedding] = VocabParallelEmbedding
    layer_class: type[DecoderLayer] = DecoderLayer
    rotary_table: Callable[[ModelConfig, int], Tensor] = staticmethod(rotary_table)

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.model = LlamaModel(config, max_positions, type(self))
        self.lm_head = if_here(
            self.model.stage.is_last, ParallelLMHead, config.vocab_size, config.hidden_size
        )
        self.tie_weights()

    def tie_weights(self) -> None:
        """Use the output head's matrix as embedding, if the checkpoint has one matrix for both and
        this stage has a head."""
        if self.config.tie_word_embeddings and self.model.stage.is_last:
            self.model.embed_tokens.weight = self.lm_head.weight

    def forward(
        self, input_ids: Tensor, positions: Tensor, received: Tensor | None = None
    ) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]` of packed tokens; before the last stage of a
        pipeline, the residual stream for the next stage.

        Args:
            input_ids, positions: `[num_tokens]` int64; positions count within each token's own
                sequence.
            received: the previous stage's output; None on the first stage.
        """
        return self.model(input_ids, positions, received)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` to `[num_rows, vocab_size]`, in the model's dtype. Pass only
        the rows that are needed."""
        return self.lm_head(hidden)

    def checkpoint_places(self) -> dict[str, list[Place]]:
        """Where each of the checkpoint's tensors belongs that this rank keeps, by name. A rank that
        holds no part of a tensor that its layers share has an empty place."""
        found: dict[str, list[Place]] = {}
        embedding = self.model.embed_tokens.weight
        for path, module in self.named_modules():
            is_tied = path == "lm_head" and module.weight is embedding
            if isinstance(module, Layer) and not is_tied:
                for name, place in module.places(path):
                    found.setdefault(name, []).append(place)
        return found

    def checkpoint_name(self, name: str) -> str | None:
        """The name in `checkpoint_places` of a tensor in the file; None for one that this rank does
        not need: rotary buffers, a tied output head, a tensor of another pipeline stage."""
        unused = name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.config.tie_word_embeddings
        )
        return None if unused or is_elsewhere(self, name) else name

    def pack_weights(self) -> None:
        """Rearrange the matrices so that this machine multiplies fastest. Afterwards nothing can be
        loaded, since a packed matrix has no rows to copy to."""
        for module in self.modules():
            if isinstance(module, Packable) and module.packable:
                module.pack()
        self.tie_weights()
