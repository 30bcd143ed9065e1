"""Reads config.json's values from the metadata of a GGUF file.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nanovllm.checkpoint.files import ConfigFile
from nanovllm.checkpoint.gguf_file import GgufFile, Value
from nanovllm.data.json import JsonObject

EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Family:
    """An architecture in Hugging Face format.

    Attributes:
        config_class: its configuration.
        model: its name in config.json.
        sizes: metadata field, after the architecture's name → integer of config.json; besides
            those in `_SIZES`.
        constants: values of config.json that the file does not have.
    """

    config_class: type[PretrainedConfig]
    model: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, bool] = field(default_factory=dict)


_FAMILIES = {
    "llama": _Family(LlamaConfig, "LlamaForCausalLM"),
    "qwen2": _Family(Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": _Family(Qwen3Config, "Qwen3ForCausalLM"),
    # llama.cpp always divides the weights of the chosen experts by their sum.
    "qwen3moe": _Family(
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        sizes={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        constants={"norm_topk_prob": True},
    ),
}
# The architecture "llama" with experts.
_MIXTRAL = _Family(
    MixtralConfig,
    "MixtralForCausalLM",
    sizes={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
)
# metadata field, after the architecture's name → integer of config.json
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Further fields of the groups that describe what a layer computes. Any other changes the model,
# unless its value is neutral.
_KNOWN = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
}
_GROUPS = (
    "attention.",
    "attn_",
    "embedding_scale",
    "expert",
    "final_logit_softcapping",
    "leading_dense_block_count",
    "logit_scale",
    "pooling_type",
    "residual_scale",
    "rope.",
    "use_parallel_residual",
)
# Values with which a model computes as if the field were not there, if these are not 0 and false.
# Gating function 1 is softmax.
_NEUTRAL: dict[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
}
# Of Llama 3.1 to 3.3; `factor` differs.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_config(file: GgufFile, dtype: torch.dtype) -> PretrainedConfig:
    """Return what config.json is to hold.

    Args:
        dtype: of the weights.

    Raises:
        ModelFileError: a value is missing or wrong, or the model computes something that this
            engine does not.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in _FAMILIES:
        raise file.error(
            f"its architecture {architecture!r} is not supported; supported are "
            f"{', '.join(_FAMILIES)}"
        )
    family = _FAMILIES[architecture]
    if architecture == "llama" and file.get("llama.expert_count", int, 0) > 0:
        family = _MIXTRAL
    sizes = {**_SIZES, **family.sizes}
    values: JsonObject = {
        name: file.get(f"{architecture}.{size}", int) for size, name in sizes.items()
    }
    _check_fields(file, architecture, sizes, values["max_position_embeddings"])
    heads: int = values["num_attention_heads"]
    if heads < 1:
        raise file.error(f"{architecture}.attention.head_count must be at least 1")
    head_dim = _head_dim(file, architecture, values["hidden_size"] // heads)
    values["num_key_value_heads"] = file.get(f"{architecture}.attention.head_count_kv", int, heads)
    values["rms_norm_eps"] = file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float)
    values["head_dim"] = head_dim
    values["vocab_size"] = _vocab_size(file)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values |= {**family.constants, **_special_ids(file)}
    values["rope_parameters"] = _rope(
        file, architecture, head_dim, values["max_position_embeddings"]
    )
    ConfigFile.check(values, f"cannot use the GGUF file '{file.path}'")
    if values["num_hidden_layers"] > len(file.tensors):
        raise file.error(f"it has fewer tensors than layers ({values['num_hidden_layers']})")
    try:
        return family.config_class(**values, architectures=[family.model], dtype=dtype)
    except Exception as error:  # several, from the library's own checks
        raise file.error(f"its sizes do not make a model: {error}") from error


def _check_fields(
    file: GgufFile, architecture: str, sizes: Mapping[str, str], context_length: int
) -> None:
    """Refuse fields that change what the model computes, and that nothing here reads."""
    for name, value in file.metadata.items():
        known_as = name.removeprefix(f"{architecture}.")
        is_known = known_as == name or known_as in _KNOWN or known_as in sizes
        if is_known or not known_as.startswith(_GROUPS):
            continue
        is_neutral = value in _NEUTRAL.get(known_as, (0,))
        if known_as == "attention.sliding_window" and isinstance(value, int):
            is_neutral = is_neutral or value >= context_length
        if not is_neutral:
            raise file.error(f"{name} is not supported")


def _head_dim(file: GgufFile, architecture: str, default: int) -> int:
    """Size of an attention head, which must be the same for keys, values and rotation."""
    key_length: int = file.get(f"{architecture}.attention.key_length", int, default)
    for size in ("attention.value_length", "rope.dimension_count"):
        length = file.get(f"{architecture}.{size}", int, key_length)
        if length != key_length:
            raise file.error(
                f"{architecture}.{size} is {length}, and heads have {key_length} channels: "
                "different sizes are not supported"
            )
    return key_length


def _vocab_size(file: GgufFile) -> int:
    """The rows of the embedding, of which the tokenizer may leave the last ones unused."""
    if (embedding := file.tensors.get(EMBEDDING)) is None:
        raise file.error(f"the tensor {EMBEDDING!r} is missing")
    rows = embedding.shape[0]
    num_tokens = len(file.get("tokenizer.ggml.tokens", list))
    if num_tokens > rows:
        raise file.error(f"it has {num_tokens} tokens, and its embedding only {rows} rows")
    return rows


def _special_ids(file: GgufFile) -> dict[str, int | list[int] | None]:
    """Ids of the special tokens. Several may end an output: of a document, a turn and a message."""
    ids = {
        key: file.get(name, int)
        for key in ("bos", "eos", "eot", "eom", "padding")
        if (name := f"tokenizer.ggml.{key}_token_id") in file.metadata
    }
    ends = list(dict.fromkeys(ids[key] for key in ("eos", "eot", "eom") if key in ids))
    return {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends if len(ends) > 1 else ids.get("eos"),
        "pad_token_id": ids.get("padding"),
    }


def _rope(
    file: GgufFile, architecture: str, head_dim: int, context_length: int
) -> dict[str, str | float]:
    """The rotary parameters, as config.json has them. As in llama.cpp, a factor without a type
    scales linearly, and 0 stands for 1."""
    prefix = f"{architecture}.rope."
    theta = float(file.get(f"{prefix}freq_base", float, 10000.0))
    rope: dict[str, str | float] = {"rope_theta": theta}
    kind = file.get(f"{prefix}scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise file.error(
            f"{prefix}scaling.type {kind!r} is not supported; supported are none, linear, yarn"
        )
    older = file.get(f"{prefix}scale_linear", float, 1.0)
    factor = file.get(f"{prefix}scaling.factor", float, older) or 1.0
    is_scaled = kind != "none" and factor != 1
    if ROPE_FACTORS in file.tensors:
        if is_scaled:
            raise file.error(f"it has both {ROPE_FACTORS} and {prefix}scaling.factor {factor}")
        return rope | _factors_rope(file, theta, head_dim)
    if not is_scaled:
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.get(
            f"{prefix}scaling.original_context_length", int, context_length
        )
        for name in ("beta_fast", "beta_slow"):
            if (beta := f"{prefix}scaling.yarn_{name}") in file.metadata:
                rope[name] = file.get(beta, float)
    return rope


def _factors_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, str | float]:
    """Recognize a rotary scaling by the factors that its wavelengths are multiplied with, one per
    pair of channels: the same for all (linear), or Llama 3's, from 1 to `factor`."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.shape != (head_dim // 2,):
        raise file.error(f"the tensor '{ROPE_FACTORS}' has shape {tensor.shape}")
    file.check_type(ROPE_FACTORS)
    found = file.dequantize(tensor, 0, 1)[0]
    factor = round(float(found.max()), 4)
    if factor >= 1 and np.allclose(found, factor, rtol=1e-3, atol=0):
        return {"rope_type": "linear", "factor": factor}
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(head_dim // 2) * 2 / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    # 0 up to `low` turns, 1 from `high` turns upwards.
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / max(factor, 1.0) + smooth)
    if not np.allclose(found, expected, rtol=1e-3, atol=0):
        raise file.error(f"the factors of '{ROPE_FACTORS}' are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
