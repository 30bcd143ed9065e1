"""From safetensors files to a model in memory, without holding any weight twice.

Built by notebooks/10_first_tokens.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

import json
import pathlib
from bisect import bisect_right
from collections.abc import Iterator

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.models.config import ModelConfig
from nanovllm.models.deepseek import DeepseekForCausalLM
from nanovllm.models.gemma2 import Gemma2ForCausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.mixtral import MixtralForCausalLM, Qwen3MoeForCausalLM


class CheckpointError(ValueError):
    """A checkpoint that lacks files or tensors, or has tensors of the wrong shape."""


def checkpoint_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint, by its index if it is sharded.

    Raises:
        CheckpointError: there are none, or a shard is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing)}, which its index names; download it again"
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} has no *.safetensors file; convert the checkpoint to safetensors first"
        )
    return files


def checkpoint_tensors(folder: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors one by one, memory-mapped: a tensor is read when it is copied.

    Raises:
        CheckpointError: a file is damaged; see also `checkpoint_files`.
    """
    for file in checkpoint_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (a safe_open handle is not a dictionary)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error


def load_weights(model: LlamaForCausalLM, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copy each tensor to its place, converting the dtype on the way.

    Raises:
        CheckpointError: a tensor has the wrong shape or no place, or some parameter was not filled completely.
    """
    # The same memory may have two names (tied weights), so what is filled is counted by address.
    unfilled = {
        parameter.data_ptr(): (name, parameter.numel()) for name, parameter in model.named_parameters()
    }
    filled = dict.fromkeys(unfilled, 0)
    starts = sorted(unfilled)
    for name, tensor in tensors:
        try:
            place = model.checkpoint_place(name)
        except KeyError as error:
            raise CheckpointError(
                f"{error.args[0]}; do config.json and the weights belong together?"
            ) from error
        if place is None:
            continue
        shape = place.shape or tuple(part.stop for part in place.source)
        if shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, the configuration says {list(shape)}"
            )
        place.target.copy_(tensor[place.source])  # of mapped memory nothing but this slice is read
        memories = [place.target]
        if place.padding is not None:
            memories.append(place.padding.zero_())
        for memory in memories:
            if memory.numel():
                owner = starts[bisect_right(starts, memory.data_ptr()) - 1]
                filled[owner] += memory.numel()
    missing = [name for start, (name, numel) in unfilled.items() if filled[start] != numel]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"the checkpoint does not fill {', '.join(missing[:5])}{more}")


def fill_dummy_weights(model: LlamaForCausalLM, seed: int) -> None:
    """Random weights of a plausible size, for measurements: norms are 1, the rest is normal with deviation 0.02.

    Ranks that share a layer draw the same numbers, so what each of them holds whole is the same on all.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


# Architectures whose layers differ from Llama's in more than what the configuration says.
MODEL_CLASSES: dict[str, type[LlamaForCausalLM]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
}


@torch.inference_mode()
def load_model(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> LlamaForCausalLM:
    """Build the model and fill it from the checkpoint in `folder`, or with random weights (`load_format="dummy"`).

    Args:
        max_positions: longest sequence to come; default: what the model was made for.

    Raises:
        CheckpointError: see `load_weights` and `checkpoint_files`.
    """
    with torch.device("meta"):
        model = MODEL_CLASSES.get(config.architecture, LlamaForCausalLM)(config, 1)
    # What `to_empty` does, without the half second that torch's own way from meta takes to import.
    model = model._apply(lambda tensor: torch.empty(tensor.shape, dtype=dtype, device=device))
    if config.tie_word_embeddings:
        model.tie_weights()  # each name was given memory of its own
    # Always float32: in bfloat16, neighbouring positions far out would share an angle.
    table = model.model.rotary_table(config, max_positions or config.max_position_embeddings)
    model.model.register_buffer("cos_sin", table.to(device), persistent=False)
    if load_format == "dummy":
        fill_dummy_weights(model, seed)
    else:
        load_weights(model, checkpoint_tensors(pathlib.Path(folder)))
    return model.eval()
