"""Computes what determines a model's KV: engines may share KV only if all of it is equal."""

from __future__ import annotations

import hashlib
import pathlib

import xxhash

from nanovllm.data.config import EngineConfig
from nanovllm.models.config import ModelConfig
from nanovllm.ops.device import choose_device, choose_dtype


def weights_digest(folder: pathlib.Path) -> str:
    """A digest of a checkpoint's configuration and of all its weights, which have just been read and are in the page cache.

    It covers all bytes, since samples could not distinguish two models that differ in one bias. It finds mistakes, not forgeries:
    xxHash is not cryptographic, but as fast as memory.
    """
    digest = xxhash.xxh3_128()
    weights = [path for kind in ("*.safetensors", "*.gguf") for path in sorted(folder.glob(kind))]
    for path in [folder / "config.json", *weights]:
        if path.exists():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def kv_identity(config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> dict[str, str | int]:
    """What must be equal, under the names that an error message shows.

    Args:
        folder: the checkpoint.
    """
    weights = f"dummy, seed {config.seed}" if config.load_format == "dummy" else weights_digest(folder)
    latent = model_config.kv_lora_rank > 0
    return {
        "model": model_config.architecture,
        "vocab_size": model_config.vocab_size,
        "weights": weights,
        "dtype": str(choose_dtype(config.dtype, choose_device(config.device))).removeprefix("torch."),
        "block_size": config.block_size,
        "num_layers": model_config.num_layers,
        "num_kv_heads": 0 if latent else model_config.num_kv_heads,
        "width": model_config.latent_width if latent else model_config.head_dim,
    }
