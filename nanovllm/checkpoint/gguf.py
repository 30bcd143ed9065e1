"""Converts a GGUF file of a Llama model to a checkpoint in Hugging Face format.

The engine reads one format only, so a GGUF file is converted once, when it is fetched. The `gguf` package reads the
container and dequantizes the weights. This module undoes what llama.cpp's converter did to a Llama checkpoint: it renamed
the tensors, reordered the rows of the query and key projections, and put configuration, vocabulary and chat template
into the file's metadata.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from torch import Tensor

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` into the existing `folder` as a bfloat16 checkpoint.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json. Weights are dequantized to float32 and rounded to bfloat16, to the nearest, once.

    Raises:
        ValueError: the file holds another architecture than Llama, or another tokenizer than a byte-level
            BPE with single digits (`tokenizer.ggml.pre` = "smollm").
    """
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(metadata, tied="output.weight" not in {tensor.name for tensor in reader.tensors})

    _write_json(folder / "config.json", config)
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special_ids)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tensors = {name: weight.to(torch.bfloat16) for name, weight in _float32_tensors(reader, config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it unreadable to other users


def model_config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The `config.json` of a `LlamaForCausalLM` from the GGUF metadata.

    Args:
        metadata: the GGUF file's keys (`llama.block_count`, ...) and values.
        tied: whether the output projection is the embedding matrix.
    """
    if metadata["general.architecture"] != "llama":
        raise ValueError(
            f"cannot convert a GGUF file of architecture {metadata['general.architecture']!r}: "
            "only 'llama' is supported"
        )
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden_size // num_heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest_decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest_decimal(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        # transformers called it `torch_dtype` until version 5 renamed it.
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Build a byte-level BPE from the tokens and merges of a GGUF file.

    GGUF names the pre-tokenizer but does not describe it. "smollm" is GPT-2's, after every digit has been split off:
    the model never saw two digits in one token, although the vocabulary would allow it.
    """
    model, pre_tokenizer = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if (model, pre_tokenizer) != ("gpt2", "smollm"):
        raise ValueError(
            f"cannot convert the GGUF tokenizer {model!r} with pre-tokenizer {pre_tokenizer!r}: "
            "only 'gpt2' with 'smollm' is supported"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    left_right = (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in left_right]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json` for `build_tokenizer`, including the chat template."""

    def token(key: str) -> str:
        return metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{key}_token_id"]]

    return {
        # The generic class takes tokenizer.json as it is; transformers' GPT2Tokenizer rebuilds the
        # pre-tokenizer and would glue the digits together again.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix", False),
        "clean_up_tokenization_spaces": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _float32_tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor under its Hugging Face name, dequantized to float32, rows in Hugging Face order."""
    import torch

    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _TOP_LEVEL_NAMES:
            yield _TOP_LEVEL_NAMES[tensor.name], torch.from_numpy(weight)
            continue
        _, layer, part, _ = tensor.name.split(".")  # "blk.7.attn_q.weight"
        if part in num_heads:
            weight = unpermute_rotary_rows(weight, num_heads[part])
        yield f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", torch.from_numpy(weight)


def unpermute_rotary_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp gives to the query and key projections of Llama.

    Rotary embedding turns pairs of dimensions. Hugging Face pairs dimension i with i + head_dim / 2, llama.cpp
    pairs neighbours (2i with 2i + 1), so its converter interleaves the two halves of each head's rows.

    Args:
        weight: [num_heads * head_dim, hidden_size], each head's rows in the order 0, half, 1, half + 1, ...
        num_heads: heads in this projection (query heads or key-value heads).

    Returns:
        The same shape, each head's rows in the order 0, 1, ..., head_dim - 1, contiguous.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _shortest_decimal(value: float) -> float:
    """A float32 as the shortest decimal with the same value: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
