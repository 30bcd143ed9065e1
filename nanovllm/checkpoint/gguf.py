"""Converts a GGUF file to a checkpoint in Hugging Face format, the only one that the engine reads.

What llama.cpp's converter did to the model is undone: it quantized and renamed the weights, and
reordered the rows of Llama's query and key projections.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import json
import math
import shutil
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from nanovllm.checkpoint.gguf_config import EMBEDDING, ROPE_FACTORS, read_config
from nanovllm.checkpoint.gguf_file import GgufFile, GgufTensor
from nanovllm.checkpoint.gguf_tokenizer import load_tokenizer
from nanovllm.checkpoint.weights import INDEX_FILE, WHOLE_FILE, save_tensors
from nanovllm.data.disk import full_disk

# name of a tensor in the file → in the checkpoint; those of layers without "blk.N."
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# The same for tensors with a matrix per expert, whose names have no ".weight" in the checkpoint.
# There, the first two are one tensor.
_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_FUSED = "gate_up_proj"
# Types of numbers that are stored as they are; all others become bfloat16.
_KEPT = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
# Numbers that are dequantized in one call, and bytes of a file of weights: what is in memory is a
# few times as much.
_CHUNK = 1 << 24
_SHARD_BYTES = 2 << 30
# Tokenizer and other small files.
_OTHER_BYTES = 50_000_000

# name in the checkpoint → the tensors of the file that it consists of, one on top of the other
Sources = dict[str, tuple[GgufTensor, ...]]


def convert(source: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the GGUF file `source` into the existing `folder` as a checkpoint: configuration,
    weights and tokenizer.

    Args:
        dtype: of all weights. By default, float32, float16 and bfloat16 stay what they are, and
            quantized weights, dequantized in float32, are rounded to bfloat16, to the nearest.

    Raises:
        ValueError: the file is damaged, or holds an architecture, a tokenizer or a type of numbers
            that is not supported; the message names both.
        OSError: the folder cannot be written, or the disk is full.
    """
    file = GgufFile(source)
    if (kind := file.get("general.type", str, "model")) != "model":
        raise file.error(f"it is of the type {kind!r}, and no model")
    tokenizer = load_tokenizer(file)
    embedding = file.tensors.get(EMBEDDING)
    config = read_config(file, dtype or _dtype_of((embedding,) if embedding else ()))
    sources = _match_tensors(file, config)
    needed = sum(_num_bytes(parts, dtype) for parts in sources.values()) + _OTHER_BYTES
    if shutil.disk_usage(folder).free < needed:
        raise full_disk(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    _write_weights(file, config, sources, folder, dtype)


def _match_tensors(file: GgufFile, config: PretrainedConfig) -> Sources:
    """The tensors of the file by their names in the checkpoint.

    Raises:
        ModelFileError: a tensor is missing, unknown, of another shape, or of a type that cannot be
            dequantized.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    targets = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del targets["lm_head.weight"]
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in targets.items():
        parts = _parts(name)
        expected |= dict.fromkeys(parts, shape if len(parts) == 1 else _half(shape))
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        standard = _standard_name(name)
        if standard is None or standard not in expected:
            raise file.error(f"the tensor {name[:100]!r} is not supported in this architecture")
        if tensor.shape != expected[standard]:
            raise file.error(
                f"the tensor {name!r} has shape {tensor.shape}, and should have "
                f"{expected[standard]}"
            )
        file.check_type(name)
        found[standard] = tensor
    if missing := [name for name in expected if name not in found]:
        raise file.error(f"the tensor for {missing[0]} is missing")
    return {name: tuple(found[part] for part in _parts(name)) for name in targets}


def _parts(name: str) -> tuple[str, ...]:
    """The names of the matrices that a tensor of the checkpoint consists of."""
    stem, fused, _ = name.rpartition(_FUSED)
    return (f"{stem}gate_proj", f"{stem}up_proj") if fused else (name,)


def _half(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one of two matrices that are on top of each other."""
    return (*shape[:-2], shape[-2] // 2, shape[-1])


def _standard_name(name: str) -> str | None:
    """The name in the checkpoint of a tensor of the file: "blk.3.attn_q.weight" is
    "model.layers.3.self_attn.q_proj.weight". None if there is none."""
    prefix = ""
    if name.startswith("blk."):
        _, layer, name = name.split(".", 2) if name.count(".") >= 2 else ("", "", name)
        prefix = f"model.layers.{layer}."
    stem, _, suffix = name.rpartition(".")
    if stem in _EXPERT_NAMES:
        return f"{prefix}{_EXPERT_NAMES[stem]}" if suffix == "weight" else None
    return f"{prefix}{_NAMES[stem]}.{suffix}" if stem in _NAMES else None


def _dtype_of(parts: tuple[GgufTensor, ...]) -> torch.dtype:
    """The dtype that holds all numbers of some tensors; quantized ones count as bfloat16."""
    dtypes = [_KEPT.get(part.kind, torch.bfloat16) for part in parts]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.bfloat16


def _num_bytes(parts: tuple[GgufTensor, ...], dtype: torch.dtype | None) -> int:
    """Size of a tensor in the checkpoint."""
    return (dtype or _dtype_of(parts)).itemsize * sum(math.prod(part.shape) for part in parts)


def _dequantize(file: GgufFile, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor."""
    num_rows = math.prod(tensor.shape[:-1])
    result = torch.empty((num_rows, tensor.shape[-1]), dtype=dtype)
    step = max(1, _CHUNK // tensor.shape[-1])
    for start in range(0, num_rows, step):
        result[start : start + step] = torch.from_numpy(
            file.dequantize(tensor, start, start + step)
        )
    return result.reshape(tensor.shape)


def _write_weights(
    file: GgufFile,
    config: PretrainedConfig,
    sources: Sources,
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    """Write the tensors, in several files if they are large."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, parts in sources.items():
        num_bytes = _num_bytes(parts, dtype)
        if shards[-1] and size + num_bytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    heads: dict[str, int] = {}
    if config.model_type in ("llama", "mixtral"):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        tensors: dict[str, Tensor] = {}
        for name in names:
            parts = sources[name]
            wanted = dtype or _dtype_of(parts)
            found = [_dequantize(file, part, wanted) for part in parts]
            tensors[name] = found[0] if len(found) == 1 else torch.cat(found, dim=-2)
            if num_heads := heads.get(name.split(".")[-2]):
                tensors[name] = _undo_permutation(tensors[name], num_heads)
        file_name = (
            WHOLE_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        save_tensors(tensors, folder / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _undo_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """Put the rows of each head into their order in Hugging Face's format: the first channels of
    all pairs, then the second ones. llama.cpp's has the two of a pair side by side."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()
