"""Loads a model from safetensors files, without holding any weight in memory twice.

Built by notebooks/10_first_tokens.ipynb: edit it there.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanovllm.checkpoint.headers import check_memory, dtype_of
from nanovllm.checkpoint.weights import (
    CheckpointError,
    has_own_head,
    open_tensors,
    standard_tensors,
    weight_files,
    with_embedding,
)
from nanovllm.data.parts import needed_for
from nanovllm.models.config import ModelConfig
from nanovllm.models.dummy import dummy_tensors
from nanovllm.models.llama import LlamaForCausalLM, rotary_table
from nanovllm.models.registry import model_class
from nanovllm.ops.device import weight_memory

logger = logging.getLogger(__name__)


def checkpoint_tensors(
    folder: pathlib.Path, only_shapes: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors one by one, memory-mapped: a tensor is read when it is copied. With
    `only_shapes`, yield meta tensors, by the files' headers. The names are standard ones, see
    `standard_tensors`.

    Raises:
        CheckpointError, PermissionError: see `open_tensors`.
        ModelFileError: see `weight_files`.
    """
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a safe_open handle is not a dictionary)
                if only_shapes:
                    tensor = torch.empty(tensors.get_slice(name).get_shape(), device="meta")
                else:
                    tensor = tensors.get_tensor(name)
                yield from standard_tensors(name, tensor)


def load_weights(model: LlamaForCausalLM, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the part of each tensor that `place.source` selects to `place.target`, and convert its
    dtype.

    Raises:
        CheckpointError: its message contains `NAME has shape [3]` if a tensor is of another shape
            than its place, `no place for 'NAME'` if the model has none, and `lacks NAME` (up to
            five names) if tensors are missing.
    """
    places = model.checkpoint_places()
    for name_in_file, tensor in tensors:
        name = model.checkpoint_name(name_in_file)
        if name is None:
            continue
        if name not in places:
            found = f"this {model.config.architecture} has no place for {name_in_file!r}"
            raise CheckpointError(f"{found}; do config.json and the weights belong together?")
        for place in places.pop(name):
            if place.shape != tuple(tensor.shape):
                shapes = f"{list(tensor.shape)}, the configuration says {list(place.shape)}"
                raise CheckpointError(f"{name_in_file} has shape {shapes}")
            place.target.copy_(tensor[place.source])  # reads only this slice of the mapped file
    if places:
        first = ", ".join(list(places)[:5])
        more = f" and {len(places) - 5} more" if len(places) > 5 else ""
        raise CheckpointError(f"the checkpoint lacks {first}{more}")


def stored_config(config: ModelConfig, folder: pathlib.Path) -> ModelConfig:
    """Return the configuration, without `tie_word_embeddings` if the folder contains an output head
    that differs from the embedding: as in transformers, this head is used."""
    if not config.tie_word_embeddings or not has_own_head(checkpoint_tensors(folder)):
        return config
    logger.warning(
        "tie_word_embeddings is true, but the output head in %s differs from the embedding, and is "
        "used",
        folder,
    )
    return replace(config, tie_word_embeddings=False)


def stored_tensors(
    config: ModelConfig, folder: pathlib.Path, only_shapes: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as `checkpoint_tensors` does. If embedding and output head are one matrix,
    the file may contain either."""
    tensors = checkpoint_tensors(folder, only_shapes)
    return with_embedding(tensors) if config.tie_word_embeddings else tensors


# What may exchange layers of a model that has no memory yet.
Transform = Callable[[LlamaForCausalLM], None]


def build_model(config: ModelConfig, transforms: Sequence[Transform] = ()) -> LlamaForCausalLM:
    """The model on torch's meta device, with shapes, but without memory, after the transforms have
    changed it, one after another."""
    with torch.device("meta"):
        model = model_class(config.architecture)(config, 1)
        for transform in transforms:
            transform(model)
    model.tie_weights()  # a transform may have exchanged the layers that were tied
    return model


def allocate_weights(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give the tensors of a model on the meta device memory, without values."""
    # As `to_empty`, but without the half second that torch needs for its imports there.
    take = weight_memory(device)
    model._apply(lambda tensor: take(tensor.shape, dtype_of(tensor, dtype)))


@torch.inference_mode()
def load_model(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    transforms: Sequence[Transform] = (),
) -> LlamaForCausalLM:
    """Build the model and fill it from the checkpoint in `folder`, or with random weights
    (`load_format="dummy"`).

    Args:
        max_positions: length of the longest sequence; default: the model's own maximum.
        transforms: see `build_model`.

    Raises:
        CheckpointError: see `load_weights` and `checkpoint_tensors`.
    """
    folder = pathlib.Path(folder)
    dummy = load_format == "dummy"
    if not dummy:
        config = stored_config(config, folder)
    model = build_model(config, transforms)
    if config.quantization is not None:  # lecture 41
        with needed_for("quantization"):
            from nanovllm.layers.quantization import quantize_layers
        quantize_layers(model, config.quantization, stored_tensors(config, folder))
    positions = max_positions or config.max_position_embeddings
    if not dummy:
        # A mismatch raises an error before memory is allocated.
        load_weights(model, stored_tensors(config, folder, only_shapes=True))
    check_memory(model, dtype, device, positions * config.head_dim)
    allocate_weights(model, dtype, device)
    model.tie_weights()  # `_apply` gave each name memory of its own
    # Always float32: in bfloat16, large neighbouring positions would share an angle.
    table = rotary_table(config, positions)
    model.model.register_buffer("cos_sin", table.to(device), persistent=False)
    load_weights(model, dummy_tensors(model, seed) if dummy else stored_tensors(config, folder))
    return model.eval()
