"""Where the proofs run, and the tiny models that they run on."""

import torch

from nanovllm.lab.bench.local import TINY
from nanovllm.ops.support import is_interpreted

ON_GPU = torch.cuda.is_available() and not is_interpreted()
DRY_RUN = is_interpreted()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

TINY_MIXTRAL = TINY | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
TINY_DEEPSEEK = TINY | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 32,  # transformers takes it for the rotated channels
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
