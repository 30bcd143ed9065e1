"""Trains an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) for a model, on text that the model
writes itself.

The head guesses the token after next, from the target's hidden states at a position and from the
token that follows there. Its own output takes the place of the hidden states for the next guess,
and so on. Training runs these steps as drafting does, for all positions of a batch at once: the
paper's training-time test."""

from __future__ import annotations

import json
import math
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.assembly.flags import words_of
from nanovllm.checkpoint.files import UnsupportedModelError, read_json
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.checkpoint.weights import save_tensors
from nanovllm.data.json import JsonObject
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import default_aux_layers
from nanovllm.models.loader import load_model
from nanovllm.offline.eagle_data import load_samples
from nanovllm.offline.eagle_trainer import Trainer
from nanovllm.ops.device import choose_device, choose_dtype

if TYPE_CHECKING:
    from nanovllm.offline.eagle_command import TrainingRecipe


def head_config(folder: Path, config: ModelConfig, draft_vocab_size: int) -> JsonObject:
    """The head's config.json, which vLLM reads, too."""
    raw = read_json(folder / "config.json")
    kept = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rms_norm_eps",
        "max_position_embeddings",
        "vocab_size",
    )
    return {name: raw[name] for name in kept if name in raw} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(default_aux_layers(config.num_layers)),
    }


def train_eagle(name_or_folder: str, out: str | Path, recipe: TrainingRecipe) -> Path:
    """Train a head, and write it to a folder. If the folder has what an earlier run has left, go on
    with it.

    Returns: the folder.

    Raises:
        ValueError: a model or a folder that does not fit; the message says what would.
    """
    begin = time.monotonic()
    limit = 60 * (recipe.time_limit or math.inf)
    folder = resolve_model(name_or_folder).resolve()
    out = Path(out).expanduser()
    config = ModelConfig.from_pretrained(folder)
    device = choose_device(recipe.device)
    if config.kv_lora_rank or config.num_layers < 7 or config.quantization is not None:
        kind = "an unquantized model with ordinary attention and at least 7 layers"
        raise UnsupportedModelError(
            f"a head can be trained for {kind}; it then serves the quantized model, too"
        )
    # Apart from the head, which is all of the safetensors files in its folder.
    work = out / "training"
    work.mkdir(parents=True, exist_ok=True)
    samples = load_samples(str(folder), work, recipe, device.type, begin + 0.4 * limit)
    target = load_model(folder, config, choose_dtype("auto", device), device, recipe.sample_length)
    trainer = Trainer(target, samples, recipe, device)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load_checkpoint(checkpoint)
    trainer.train(begin + 0.93 * limit, checkpoint)
    raw = head_config(folder, config, len(trainer.draft_to_target))
    found = trainer.evaluate()
    command = " ".join(["nanovllm train-eagle", name_or_folder, *words_of(recipe)])
    raw["trained"] = {
        "command": command,
        "date": str(date.today()),
        "answer_tokens": len(samples.answers),
        "batches": trainer.done,
        "held_out": found,
    }
    metadata = {"format": "pt", "config": json.dumps(raw)}
    save_tensors(trainer.tensors(), out / "model.safetensors", metadata)
    (out / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    for name, values in found.items():
        print(f"{name}: " + ", ".join(f"{what} {numbers}" for what, numbers in values.items()))
    return out
