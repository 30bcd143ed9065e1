"""GGUF files for tests, written with the `gguf` package."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nanovllm.checkpoint.gguf import convert
from tests.oracle import randomize

Kind = gguf.GGMLQuantizationType
HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS = 256, 512, 2, 4, 2
# Qwen 3's heads are not a part of the hidden size.
HEAD_DIM = {"llama": 64, "qwen2": 64, "qwen3": 32}
TEXTS = [
    "Hello world, it's 12345 o'clock: don't   worry!",
    "\n\n  def f(x):\n\treturn x**2  # 1000000\r\n",
    "naïve café — e\u0301 日本語 😀 \u00a0 Ω",
    " leading, THEY'LL trailing  ",
    "",
]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def add_byte_level(
    writer: gguf.GGUFWriter, split: str, merges: list[str], unmerged: tuple[str, ...] = ()
) -> None:
    """Add a byte-level BPE with two special tokens, and tokens that no merge makes."""
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|start|>", "<|end|>", *ALPHABET, *merged, *unmerged]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([control, control, *([normal] * (len(tokens) - 2))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
    }
    add[type(value)](name, value)


def random_blocks(rng: np.random.Generator, shape: tuple[int, int], kind: Kind) -> np.ndarray:
    """A random matrix in any type. The library cannot quantize to some, whose blocks are random
    bytes; of Q4_K and Q6_K with small scales, of others with any finite ones."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.quantize(np.zeros((1, block), np.float32), kind)
    except NotImplementedError:
        data = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    else:
        return gguf.quants.quantize(rng.normal(0, 0.1, shape).astype(np.float32), kind)
    if kind == Kind.Q4_K:
        data[..., 0:2] = np.array([3e-4], np.float16).view(np.uint8)
        data[..., 2:4] = np.array([2e-3], np.float16).view(np.uint8)
    elif kind == Kind.Q6_K:
        data[..., -2:] = np.array([5e-5], np.float16).view(np.uint8)
    with np.errstate(all="ignore"):
        numbers = gguf.quants.dequantize(data.reshape(shape[0], -1), kind)
    data[~np.isfinite(numbers).reshape(*data.shape[:2], block).all(-1)] = 0
    return data.reshape(shape[0], -1)


def write_model(
    path: Path,
    family: str = "llama",
    kind: Kind | tuple[Kind, ...] = Kind.F32,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tied: bool = False,
    layers: int = LAYERS,
    rows_missing: int = 0,
) -> Path:
    """Write a small random model. `fields` and `tensors` are added. Of several kinds, each matrix
    has the next one. `rows_missing` rows of the embedding are left out."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, family)
    head_dim = HEAD_DIM[family]
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, value in (fields or {}).items():
        add_field(writer, name, value)
    add_byte_level(writer, "smollm", ["1 2"])
    vocab = len(ALPHABET) + 3 - rows_missing
    matrices = {"token_embd": (vocab, HIDDEN)} | ({} if tied else {"output": (vocab, HIDDEN)})
    vectors = {"output_norm": HIDDEN}
    for i in range(layers):
        sizes = {"q": HEADS * head_dim, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim}
        for part, size in sizes.items():
            matrices[f"blk.{i}.attn_{part}"] = (size, HIDDEN)
            if family == "qwen2":
                bias = rng.normal(0, 0.3, size).astype(np.float32)
                writer.add_tensor(f"blk.{i}.attn_{part}.bias", bias)
            if family == "qwen3" and part in "qk":
                vectors[f"blk.{i}.attn_{part}_norm"] = head_dim
        matrices[f"blk.{i}.attn_output"] = (HIDDEN, HEADS * head_dim)
        matrices[f"blk.{i}.ffn_gate"] = (WIDE, HIDDEN)
        matrices[f"blk.{i}.ffn_up"] = (WIDE, HIDDEN)
        matrices[f"blk.{i}.ffn_down"] = (HIDDEN, WIDE)
        vectors |= {f"blk.{i}.attn_norm": HIDDEN, f"blk.{i}.ffn_norm": HIDDEN}
    kinds = itertools.cycle(kind if isinstance(kind, tuple) else (kind,))
    for (name, shape), wanted in zip(matrices.items(), kinds, strict=False):
        # Rows of Qwen 3's output projection are shorter than a block of 256.
        block, _ = gguf.GGML_QUANT_SIZES[wanted]
        used = wanted if shape[1] % block == 0 else Kind.Q8_0
        data = random_blocks(rng, shape, used)
        if used in (Kind.F32, Kind.F16):
            writer.add_tensor(f"{name}.weight", data)
        else:
            writer.add_tensor(f"{name}.weight", data.view(np.uint8), raw_dtype=used)
    for name, size in vectors.items():
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, size).astype(np.float32))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(path: Path) -> Path:
    """The folder that a file is converted to, in this process."""
    folder = path.with_suffix("")
    folder.mkdir()
    convert(path, folder)
    return folder


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """A random model in float32, whose text depends on all of the prompt."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    randomize(model)
    return model.eval()


def continuations(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The greedy continuations of prompts by a model of transformers."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(num_tokens):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    assert len(set(found[0])) > 4, "a text that says little"
    return found


def as_llama_cpp(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of llama.cpp's query and key projections of Llama: the two channels of a pair are
    neighbours."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_sizes(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Add what any architecture has."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_transformers_model(path: Path, model: PreTrainedModel, fields: dict[str, Any]) -> Path:
    """Write a model of transformers as llama.cpp's converter does, in float32. `fields` are added
    after the architecture's name."""
    config = model.config
    arch = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    add_sizes(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in fields.items():
        add_field(writer, f"{arch}.{name}", value)
    add_byte_level(writer, "smollm", ["1 2"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        parts = {name: data}
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = np.split(data, 2, axis=1)
            parts = {f"{stem}gate_proj": gate, f"{stem}up_proj": up}
        for part, numbers in parts.items():
            found = names.get_name(part.removesuffix(".weight").removesuffix(".bias"))
            assert found is not None, part
            if arch == "llama" and (num_heads := heads.get(found.split(".")[-1])):
                numbers = as_llama_cpp(numbers, num_heads)
            suffix = ".bias" if part.endswith(".bias") else ".weight"
            writer.add_tensor(f"{found}{suffix}", np.ascontiguousarray(numbers))
    finish(writer)
    return path
