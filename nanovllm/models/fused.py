"""On a CPU, all layers of a decoder in one call: the operators of `DecoderLayer.forward` in their
order, hence with the same bits, without Python's ten calls per layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nanovllm.attention.base import AttentionMetadata, Rotary, get_forward_context
from nanovllm.models.llama import MLP, DecoderLayer, LlamaForCausalLM, SelfAttention
from nanovllm.ops.native import call, kernel_of

if TYPE_CHECKING:
    from nanovllm.layers.quantization import QuantizedWeight
    from nanovllm.models.eagle import EagleLayer, EagleModel

#: What the C++ code computes. A layer with a module of another file, such as a lecture, a model
# with experts or a rank's part of a layer, runs as it is.
FILES = ("models.llama", "models.eagle", "layers.basic", "layers.quantization.weight")
MODULES = {f"nanovllm.{name}" for name in FILES}
#: A layer's modules, in the order of `Layer` in ops/cpu_layers.cpp. A model may lack biases, and
# norms of queries and keys.
NORMS = ["input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"]
MATRICES = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


def fuse_layers(model: LlamaForCausalLM | EagleModel) -> None:
    """Let the layers of a model with packed weights run in one call, if this machine and these
    layers can. Otherwise, and where a module has a hook of PyTorch, they run one by one."""
    if not isinstance(model, LlamaForCausalLM):  # a model that drafts
        model.fused = _fuse([model.midlayer])
        return
    calls = model.model.layer_calls
    layers = [call for call in calls if isinstance(call, DecoderLayer)]
    fused = _fuse(layers) if len(layers) == len(calls) else None
    if fused is not None:
        model.model.layer_calls = [fused]


def _fuse(layers: Sequence[DecoderLayer | EagleLayer]) -> FusedLayers | None:
    return FusedLayers(layers) if all(map(_fits, layers)) else None


def _fits(layer: nn.Module) -> bool:
    if (
        not {
            name
            for m in layer.modules()
            for name in (type(m).__module__, type(m).forward.__module__)
        }
        <= MODULES
    ):
        return False
    return all(_weight(layer, name)[1] for name in MATRICES)


def _weight(layer: nn.Module, name: str) -> tuple[int, int]:
    """The addresses of the function that multiplies by a module's weight (null: `linear_packed`)
    and of what this function reads, null unless the weight is packed for compiled operators."""
    weight = layer.get_submodule(name).weight
    if isinstance(weight, Tensor):
        return 0, weight.data_ptr() * (weight.ndim == 4)
    return cast("QuantizedWeight", weight).compiled()


class FusedLayers:
    """In the place of layers: `(x, residual, rotary)` to what the last of them returns."""

    def __init__(self, layers: Sequence[DecoderLayer | EagleLayer]) -> None:
        self.layers = layers
        attentions = [cast(SelfAttention, layer.self_attn) for layer in layers]
        self.attention = attentions[0]
        rows = []
        modules = [module for layer in layers for module in layer.modules()]
        self.hooks = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        for layer, attention in zip(layers, attentions, strict=True):
            found = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
            row = [found.get(f"{name}.weight", 0) for name in NORMS]
            # A draft head's first norms are outside of its layer.
            row[0] *= isinstance(layer, DecoderLayer)
            for name in MATRICES:
                row += [*_weight(layer, name), found.get(f"{name}.bias", 0)]
            # The addresses of the cache and of its functions are known when there is one.
            rows.append([*row, 0, 0, 0, attention.options["sliding_window"]])
        self.addresses = torch.tensor(rows)
        self.numbers = [attention.layer for attention in attentions]
        # Whose addresses these are.
        self.functions: tuple[int, int] | None = None
        self.caches: list[Tensor] = []

    def split(self, numbers: Sequence[int]) -> list[FusedLayers]:
        """Return calls for parts of the layers, which begin at the layers with these numbers."""
        cuts = [i for i, number in enumerate(self.numbers) if i == 0 or number in numbers]
        return [FusedLayers(self.layers[a:b]) for a, b in pairwise([*cuts, len(self.numbers)])]

    def __call__(self, x: Tensor, residual: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        context = get_forward_context()
        batch = context.metadata
        backend = context.backend
        functions = backend.compiled_functions(x.dtype)
        if functions is None or any(self.hooks):
            for layer in self.layers:
                x, residual = layer(x, residual, rotary)
            return x, residual
        caches = [context.kv_caches[number] for number in self.numbers]
        if functions != self.functions or not all(map(is_, caches, self.caches)):
            self.functions = functions
            self.caches = caches
            self.addresses[:, -4:-1] = torch.tensor(
                [[*functions, cache.data_ptr()] for cache in caches]
            )
        return self._run(x, residual, rotary, batch, caches[0])

    def _run(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: Rotary,
        batch: AttentionMetadata,
        kv_cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Call the C++ function, whose arguments are in the order of `decoder_layers` in
        ops/cpu_layers.cpp."""
        attention = self.attention
        x = x.clone()  # a pipeline's buffer, perhaps
        tables = batch.block_tables
        lengths = batch.seq_lens
        tensors = (
            x,
            residual,
            self.addresses,
            *rotary,
            batch.slot_mapping,
            tables,
            lengths,
            batch.query_start_loc,
        )
        heads = attention.qkv_proj.num_heads, attention.qkv_proj.num_kv_heads, attention.head_dim
        width = cast(MLP, self.layers[0].mlp).down_proj.in_features
        num_blocks, _, _, block_size, _ = kv_cache.shape
        cache_sizes = (
            block_size,
            num_blocks,
            kv_cache.stride(0),
            tables.shape[1],
            tables.stride(0),
        )
        sizes = (
            len(self.caches),
            *x.shape,
            residual.shape[1],
            *heads,
            width,
            len(rotary.cos_sin),
            len(lengths),
            *cache_sizes,
        )
        factors = (
            self.layers[0].post_attention_layernorm.eps,
            attention.scale,
            attention.options.get("soft_cap", 0.0),
        )
        kernel = kernel_of("decoder_layers", x.dtype)
        if kernel is None or not call(kernel, tensors, *sizes, *factors):
            raise IndexError(
                "positions, slot_mapping, block_tables and seq_lens do not agree with the cache or "
                "each other"
            )
        return x.flatten()[: residual.numel()].view_as(residual), residual
