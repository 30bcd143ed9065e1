"""Models to run without a download: shapes of well-known ones, and a tiny one with weights of its own."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

#: The values of config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": _ROPE | {"factor": 32.0},
    },
    "Llama-3.1-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": _ROPE | {"factor": 8.0},
    },
}
TINY: dict[str, Any] = _LLAMA | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def write_config(folder: pathlib.Path, shape: dict[str, Any]) -> pathlib.Path:
    """Make a folder that `load_format="dummy"` can load; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    return folder


def write_checkpoint(folder: pathlib.Path, shape: dict[str, Any], seed: int = 0) -> pathlib.Path:
    """The same with weights, which are large enough that the text depends on all of the prompt: with weights of the usual
    size, a random model says nearly the same token for ever, and no error would show."""
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    query, key_value = (shape[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    inner, vocabulary = shape["intermediate_size"], shape["vocab_size"]
    matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, deviation: float) -> torch.Tensor:
        return torch.randn(size, generator=generator) * deviation

    tensors = {
        "model.embed_tokens.weight": draw(vocabulary, hidden, deviation=1.0),
        "lm_head.weight": draw(vocabulary, hidden, deviation=0.25),
        "model.norm.weight": 1 + draw(hidden, deviation=0.2),
    }
    for layer in range(shape["num_hidden_layers"]):
        for name, size in matrices.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(*size, deviation=0.25)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + draw(hidden, deviation=0.2)
    write_config(folder, shape | {"torch_dtype": "float32"})
    save_file(tensors, folder / "model.safetensors")
    return folder
