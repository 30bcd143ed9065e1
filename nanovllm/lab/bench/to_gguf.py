"""Writes a checkpoint as a GGUF file, the only format that llama.cpp reads."""

import hashlib
import json
import pathlib
from dataclasses import replace

import gguf
import gguf.quants

from nanovllm.checkpoint.home import nanovllm_home
from nanovllm.data.errors import UsageError
from nanovllm.distributed.groups import Grid
from nanovllm.lab.processes import run_ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import rotary_frequencies
from nanovllm.models.loader import stored_config, stored_tensors
from nanovllm.text.tokenizer import Tokenizer

#: llama.cpp's names of architectures and data types.
ARCHITECTURES = dict(LlamaForCausalLM="LLAMA", Qwen2ForCausalLM="QWEN2", Qwen3ForCausalLM="QWEN3")
_TYPES = dict(bfloat16="BF16", float16="F16", float32="F32")
#: What it has for a scheme of `--quantization`: both store 32 weights of 8 or 4 bits with one
# scale, and round activations to 8 bits.
_SCHEMES = dict(w8a8="Q8_0", w4a16="Q4_0", w4a8="Q4_0")


def gguf_of(
    folder: pathlib.Path, dtype: str, quantization: str = "auto", quantize_head: bool = False
) -> pathlib.Path:
    """The checkpoint as a GGUF file in the cache folder, quantized as nanovllm would quantize it
    while it loads it; written if there is none of these weights.

    Raises:
        UsageError: an architecture that cannot be written.
    """
    config = ModelConfig.from_pretrained(folder)
    if config.architecture not in ARCHITECTURES or any(config.layer_windows):
        raise UsageError(
            f"llamacpp runs {', '.join(ARCHITECTURES)} in full attention, no {config.architecture}"
        )
    stamps = sorted((str(file), file.stat().st_mtime_ns) for file in folder.glob("*.safetensors"))
    plain = _TYPES[dtype]
    kinds = _SCHEMES.get(quantization, plain), "Q8_0" if quantize_head else plain
    digest = hashlib.sha256(f"{kinds} {stamps}".encode()).hexdigest()[:8]
    path = nanovllm_home() / "models" / f"{folder.name}-{digest}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # torch's threads end with the process.
        run_ranks(write_gguf, Grid(), folder, path.with_suffix(".part"), *kinds)
        path.with_suffix(".part").rename(path)
    return path


def write_gguf(folder: pathlib.Path, path: pathlib.Path, matrices: str, head: str) -> None:
    """Write the file. Its pre-tokenizer is llama.cpp's default one, since a benchmark sends token
    ids.

    Args:
        matrices: llama.cpp's name of the type of the layers' matrices.
        head: that of the embedding and the output head.
    """
    config = stored_config(ModelConfig.from_pretrained(folder), folder)
    arch = gguf.MODEL_ARCH[ARCHITECTURES[config.architecture]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_settings(writer, config)
    _add_tokens(writer, Tokenizer.from_pretrained(folder), config.vocab_size)
    if config.rope_scaling["rope_type"] != "default":
        plain = rotary_frequencies(replace(config, rope_scaling={"rope_type": "default"}))
        writer.add_tensor("rope_freqs.weight", (plain / rotary_frequencies(config)).numpy())
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    rotated = (
        {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        if arch == gguf.MODEL_ARCH.LLAMA
        else {}
    )
    for name, tensor in stored_tensors(config, folder):
        place = names.get_name(name, (".weight", ".bias")) or f"unknown: {name}"
        if num_heads := rotated.get(place.split(".")[-2]):
            # It rotates neighbouring channels, not halves of a head.
            tensor = tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if tensor.ndim == 1:
            writer.add_tensor(place, tensor.float().numpy())
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            kind = gguf.GGMLQuantizationType[
                head if place in ("token_embd.weight", "output.weight") else matrices
            ]
            numbers = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
            writer.add_tensor(place, numbers.view("uint8"), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the model's sizes, and the names of its tokenizer."""
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_heads,
        "head_count_kv": config.num_kv_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "default",
        "eos_token_id": (config.eos_token_ids or [0])[0],
    }
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)


def _add_tokens(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Add the vocabulary and the merges of a byte-level BPE."""
    tokens = {index: token for token, index in tokenizer.backend.get_vocab().items()}
    ids = range(vocab_size)
    special = tokenizer.all_special_ids
    writer.add_token_list([tokens.get(i, f"[unused {i}]") for i in ids])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in ids]
    )
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.backend.to_str())["model"]["merges"]]
    )
