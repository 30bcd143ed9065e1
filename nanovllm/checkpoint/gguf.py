"""Converts a GGUF file of a Llama model to a checkpoint in Hugging Face format.

The engine reads one format only, so a GGUF file is converted once, when it is fetched. The `gguf` package reads the
container and dequantizes the weights, and transformers reads the configuration. This module undoes the rest of what
llama.cpp's converter did to a Llama checkpoint: it renamed the tensors, reordered the rows of the query and key
projections, and put vocabulary and chat template into the file's metadata.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` into the existing `folder` as a bfloat16 checkpoint.

    Writes configuration, weights and tokenizer. Weights are dequantized to float32 and rounded to bfloat16, to the nearest, once.

    Raises:
        ValueError: the file holds another architecture than Llama, or another tokenizer than a byte-level
            BPE with single digits (`tokenizer.ggml.pre` = "smollm").
    """
    reader = gguf.GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if (architecture := metadata["general.architecture"]) != "llama":
        raise ValueError(f"cannot convert a GGUF file of architecture {architecture!r}: only 'llama' is supported")
    load_tokenizer(metadata).save_pretrained(folder, save_jinja_files=False)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))  # 1e-05 instead of 9.99999974e-06
    config.save_pretrained(folder)
    special_ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**special_ids).save_pretrained(folder)
    tensors = {name: torch.from_numpy(weight).to(torch.bfloat16) for name, weight in _weights(reader, config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it unreadable to other users


def load_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE, with its chat template, from the metadata of a GGUF file.

    GGUF names the pre-tokenizer but does not describe it. "smollm" is GPT-2's, after every digit has been split off:
    the model never saw two digits in one token, although the vocabulary would allow it. transformers' own reader of GGUF
    tokenizers, and its GPT2Tokenizer, would glue the digits together again.
    """
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ValueError(
            f"cannot convert the GGUF tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r}: "
            "only 'gpt2' with 'smollm' is supported"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=metadata["tokenizer.chat_template"],
        **{f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for key, name in names.items()},
    )


def _weights(reader: gguf.GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each weight under its Hugging Face name, dequantized to float32, rows in Hugging Face order."""
    found = {tensor.name: tensor for tensor in reader.tensors}
    gguf_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    num_heads: dict[str, Any] = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.device("meta"):
        names = [name for name, _ in LlamaForCausalLM(config).named_parameters()]  # tied ones once
    for name in names:
        tensor = found[gguf_names.get_name(name, (".weight",)) or name]
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        projection = name.split(".")[-2]
        yield name, unpermute_rotary_rows(weight, num_heads[projection]) if projection in num_heads else weight


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
