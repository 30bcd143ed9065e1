"""What KV is made of: engines may share it only if all of this is equal."""

from __future__ import annotations

import pathlib

import xxhash

from nanovllm.data.config import EngineConfig
from nanovllm.models.config import ModelConfig

PIECE_BYTES = 2**24


def weights_digest(folder: pathlib.Path) -> str:
    """A digest of a checkpoint's configuration and of all its weights, which have just been read and lie in the page cache. (Samples
    would do for most pairs of models, and not for two of which one has another bias.) It finds mistakes, not forgers: xxHash is
    not cryptographic, but as fast as memory."""
    digest = xxhash.xxh3_128()
    weights = [path for kind in ("*.safetensors", "*.gguf") for path in sorted(folder.glob(kind))]
    for path in [folder / "config.json", *weights]:
        if path.exists():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
    return digest.hexdigest()


def kv_identity(config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> dict[str, str | int]:
    """By name, what has to be equal; the names are what a refused peer reads.

    Args:
        folder: the checkpoint.
    """
    from nanovllm.ops.device import choose_device, choose_dtype

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
