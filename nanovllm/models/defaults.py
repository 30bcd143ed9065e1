"""Default values of the keys of config.json, for every supported architecture.

Each default equals the default of the architecture's configuration class in `transformers`, which
tests/models/test_config_defaults.py checks. A key that the class lacks is not in the architecture's
table. A default of None means that the key is optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from nanovllm.data.json import JsonObject


class Defaults(TypedDict, total=False):
    """Keys of config.json with a default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    hidden_act: str
    hidden_activation: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: JsonObject | None
    tie_word_embeddings: bool
    attention_bias: bool
    use_bidirectional_attention: bool | None
    mlp_bias: bool
    use_sliding_window: bool
    sliding_window: int | None
    max_window_layers: int
    layer_types: list[str] | None
    query_pre_attn_scalar: int
    attn_logit_softcapping: float
    final_logit_softcapping: float
    num_local_experts: int
    num_experts: int
    n_routed_experts: int
    num_experts_per_tok: int | None
    moe_intermediate_size: int
    decoder_sparse_step: int
    mlp_only_layers: list[int] | None
    norm_topk_prob: bool
    first_k_dense_replace: int
    n_shared_experts: int
    n_group: int | None
    topk_group: int | None
    topk_method: str
    routed_scaling_factor: float
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool


_LLAMA: Defaults = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

_MISTRAL: Defaults = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}

_QWEN2: Defaults = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

_QWEN3: Defaults = {**_QWEN2, "head_dim": 128, "attention_bias": False}

_MIXTRAL: Defaults = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}

_QWEN3_MOE: Defaults = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}

_GEMMA2: Defaults = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
}

_DEEPSEEK_V2: Defaults = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_group": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "v_head_dim": 128,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
}

_DEEPSEEK_V3: Defaults = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

DEFAULTS: dict[str, Defaults] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Gemma2ForCausalLM": _GEMMA2,
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
}

# Three names of one number: transformers 5 writes `num_local_experts` where files of the hub have
# one of the others.
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def with_defaults(raw: Mapping[str, object], architecture: str) -> dict[str, object]:
    """Return the values of a config.json, and the defaults of its missing keys. A value of null
    stays null, as in transformers."""
    defaults: dict[str, object] = dict(DEFAULTS[architecture])
    if any(raw.get(name) is not None for name in NUM_EXPERTS):
        defaults = {name: value for name, value in defaults.items() if name not in NUM_EXPERTS}
    return {**defaults, **raw}
