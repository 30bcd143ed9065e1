"""What KV is made of: engines may share it only if all of this is equal."""

from __future__ import annotations

import hashlib
import pathlib

from nanovllm.config import EngineConfig
from nanovllm.models.config import ModelConfig

# Of each file of weights, so many pieces of so many bytes are looked at: reading all of a large model would take minutes. Two
# fine-tunings of one model differ in nearly every piece.
PIECES, PIECE_BYTES = 32, 64 * 1024


def weights_digest(folder: pathlib.Path) -> str:
    """A digest of a checkpoint's configuration and of samples of its weights, spread evenly over each file."""
    digest = hashlib.sha256()
    weights = [path for kind in ("*.safetensors", "*.gguf") for path in sorted(folder.glob(kind))]
    for path in [folder / "config.json", *weights]:
        if not path.exists():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(PIECES):
                file.seek(i * max(0, size - PIECE_BYTES) // max(1, PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
                if size <= PIECE_BYTES:
                    break
    return digest.hexdigest()[:32]


def kv_identity(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
) -> dict[str, str | int]:
    """By name, what has to be equal; the names are what a refused peer reads.

    Args:
        folder: the checkpoint.
    """
    from nanovllm.device import choose_device, choose_dtype

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
