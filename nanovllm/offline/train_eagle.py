"""Trains an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) for a model, on text that the model
writes itself.

The head guesses the token after next, from the target's hidden states at a position and from the
token that follows there. Its own output takes the place of the hidden states for the next guess,
and so on. Training runs these steps as drafting does, for all positions of a batch in one call: the
paper's training-time test.

| module | what it does |
| --- | --- |
| `eagle_samples` | lets the target write the samples |
| `eagle_targets` | computes the target's hidden states for them, and chooses the draft vocabulary |
| `eagle_head` | the head, with gradients |
| `eagle_drafts` | drafts at all positions of some samples |
| `eagle_trainer` | batches, loss, optimizer and checkpoints |
| `eagle_evaluation` | judges drafts for held-out samples |
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
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
from nanovllm.offline.eagle_drafts import SampleDrafter
from nanovllm.offline.eagle_evaluation import evaluate
from nanovllm.offline.eagle_samples import load_samples
from nanovllm.offline.eagle_trainer import Trainer, split_samples, untrained_drafter
from nanovllm.ops.device import choose_device, choose_dtype

if TYPE_CHECKING:
    from nanovllm.offline.eagle_command import TrainingRecipe

# Shares of the time limit after which the engine stops writing, and training ends.
WRITING_SHARE = 0.4
TRAINING_SHARE = 0.93


def train_eagle(name_or_folder: str, out: str | Path, recipe: TrainingRecipe) -> Path:
    """Train a head, and write it to a folder. If the folder contains the state of an earlier run,
    continue that run.

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
    check_model(config)
    # A folder of its own: the head is all of the safetensors files in `out`.
    work = out / "training"
    work.mkdir(parents=True, exist_ok=True)
    deadline = begin + WRITING_SHARE * limit
    samples = load_samples(str(folder), work, recipe, device.type, deadline)
    target = load_model(folder, config, choose_dtype("auto", device), device, recipe.sample_length)
    drafter = untrained_drafter(target, samples, recipe, device)
    training, held_out = split_samples(len(samples), recipe.seed)
    trainer = Trainer(drafter, training, recipe)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load_checkpoint(checkpoint)
    trainer.train(begin + TRAINING_SHARE * limit, checkpoint)
    found = evaluate(drafter, held_out, recipe.batch_size)
    raw = head_config(folder, config, len(drafter.data.output_head))
    raw["trained"] = {
        "command": " ".join(["nanovllm train-eagle", name_or_folder, *words_of(recipe)]),
        "date": str(date.today()),
        "answer_tokens": len(samples.answers),
        "batches": trainer.num_done,
        "held_out": found,
    }
    write_head(out, drafter, raw, recipe.quantize)
    for name, values in found.items():
        print(f"{name}: " + ", ".join(f"{what} {numbers}" for what, numbers in values.items()))
    return out


def check_model(config: ModelConfig) -> None:
    """Check that a head can be trained for a model.

    Raises:
        UnsupportedModelError: it cannot.
    """
    if config.kv_lora_rank or config.num_layers < 7 or config.quantization is not None:
        kind = "an unquantized model with ordinary attention and at least 7 layers"
        raise UnsupportedModelError(
            f"a head can be trained for {kind}; it then serves the quantized model, too"
        )


def head_config(folder: Path, config: ModelConfig, draft_vocab_size: int) -> JsonObject:
    """Return the head's config.json, which vLLM reads, too."""
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


def write_head(
    folder: Path, drafter: SampleDrafter, raw: Mapping[str, object], quantize: str
) -> None:
    """Write a head's checkpoint.

    Args:
        raw: its config.json, which the safetensors file contains, too.
        quantize: see `DraftHead.tensors`.
    """
    tensors = drafter.head.tensors(quantize) | drafter.data.vocabulary.tensors()
    metadata = {"format": "pt", "config": json.dumps(raw)}
    save_tensors(tensors, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
