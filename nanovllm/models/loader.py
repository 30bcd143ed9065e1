"""Loads a model from safetensors files, without holding any weight in memory twice.

Built by notebooks/10_first_tokens.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import hashlib
import math
import pathlib
from collections.abc import Iterator

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.checkpoint.files import shard_names
from nanovllm.checkpoint.headers import CheckpointHeaders, check_memory
from nanovllm.data.parts import load
from nanovllm.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from nanovllm.models.llama import LlamaForCausalLM


class CheckpointError(ValueError):
    """A checkpoint that lacks files or tensors, or has tensors of the wrong shape."""


def checkpoint_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint, by its index if it is sharded.

    Raises:
        CheckpointError: there are none, or a shard is missing.
        ModelFileError: the index is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = shard_names(index)
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(f"{index}: the folder lacks {', '.join(missing)}; download the model again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file; convert the checkpoint to safetensors first")
    return files


def checkpoint_tensors(folder: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors one by one, memory-mapped: a tensor is read when it is copied.

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


def load_weights(model: LlamaForCausalLM, tensors: Iterator[tuple[str, Tensor | RandomTensor]]) -> None:
    """Copy each tensor to its place, and convert its dtype.

    Raises:
        CheckpointError: a tensor has the wrong shape or no place, or some parameter was not filled completely.
    """
    # The same memory may have two names (tied weights), so filled numbers are counted per storage.
    unfilled = {
        parameter.untyped_storage()._cdata: (name, parameter.numel()) for name, parameter in model.named_parameters()
    }
    filled = dict.fromkeys(unfilled, 0)
    for name, whole in tensors:
        for part_name, tensor in model.checkpoint_parts(name, whole):
            for memory in _fill(model, part_name, tensor, name):
                filled[memory.untyped_storage()._cdata] += memory.numel()
    missing = [name for storage, (name, numel) in unfilled.items() if filled[storage] != numel]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"the checkpoint does not fill {', '.join(missing[:5])}{more}")


def _fill(model: LlamaForCausalLM, name: str, tensor: Tensor | RandomTensor, name_in_file: str) -> list[Tensor]:
    """Copy a tensor to its place; returns the memory that this fills."""
    try:
        place = model.checkpoint_place(name)
    except KeyError as error:
        reason = f"{error.args[0]}; do config.json and the weights belong together?"
        raise CheckpointError(reason if name_in_file in reason else f"{name_in_file}: {reason}") from error
    if place is None:
        return []
    if place.whole_shape != tensor.shape:
        raise CheckpointError(
            f"{name_in_file} has shape {list(tensor.shape)}, the configuration says {list(place.whole_shape)}"
        )
    place.target.copy_(tensor[place.source])  # reads only this slice of the mapped file
    return [place.target] if place.padding is None else [place.target, place.padding.zero_()]


# Numbers that a random tensor draws at once: few enough for a CPU's cache, and enough to keep a GPU busy.
DRAWN_AT_ONCE = 2**20


class RandomTensor:
    """A checkpoint's tensor of random numbers (normal, deviation 0.02), drawn when a slice of it is read.

    Each block of rows has a seed of its own, derived from the tensor's name. So every grid of ranks has the same model,
    and a rank draws little more than its share of the rows; for a share of the columns, it draws all columns.

    Args:
        shape: of the whole tensor.
        seed, name: determine the numbers.
        dtype, device: of the slices.
    """

    def __init__(self, shape: tuple[int, ...], seed: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.seed, self.name, self.dtype, self.device = shape, seed, name, dtype, device
        self.block_rows = max(1, DRAWN_AT_ONCE // math.prod(shape[1:]))

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        rows, *others = (range(*axis.indices(size)) for axis, size in zip(where, self.shape, strict=True))
        part = torch.empty([len(rows), *map(len, others)], dtype=self.dtype, device=self.device)
        for first in range(rows.start - rows.start % self.block_rows, rows.stop, self.block_rows):
            begin, end = max(rows.start, first), min(rows.stop, first + self.block_rows)
            here = slice(begin - first, end - first), *where[1:]
            part[begin - rows.start : end - rows.start] = self._block(first)[here]
        return part

    def _block(self, first: int) -> Tensor:
        """The block of rows that begins with row `first`."""
        seed = hashlib.sha256(f"{self.seed} {self.name} {first}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(seed[:6], "little"))
        shape = min(self.block_rows, self.shape[0] - first), *self.shape[1:]
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, 0.02, generator=generator)


def dummy_tensors(model: LlamaForCausalLM, seed: int) -> Iterator[tuple[str, Tensor | RandomTensor]]:
    """Yield a checkpoint of random weights of a plausible size, for measurements: norms are 1, all others random."""
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    for name, shape in model.checkpoint_shapes():
        if "norm" in name:
            yield name, torch.ones(shape, dtype=dtype, device=device)
        else:
            yield name, RandomTensor(shape, seed, name, dtype, device)


def build_model(config: ModelConfig) -> LlamaForCausalLM:
    """The model, or this rank's part of it, on torch's meta device: with shapes, but without memory."""
    entry = SUPPORTED_ARCHITECTURES[config.architecture].get("class", "nanovllm.models.llama:LlamaForCausalLM")
    model_class = load(entry, f"architecture {config.architecture}")
    with torch.device("meta"):
        return model_class(config, 1)


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
        max_positions: length of the longest sequence; default: the model's own maximum.

    Raises:
        CheckpointError: see `load_weights` and `checkpoint_files`.
    """
    model = build_model(config)
    dummy, positions = load_format == "dummy", max_positions or config.max_position_embeddings
    if not dummy:
        # Only the shapes in the files' headers: a mismatch raises an error before memory is allocated.
        with CheckpointHeaders(checkpoint_files(pathlib.Path(folder))) as headers:
            load_weights(model, iter(headers))
    check_memory(model, dtype, device, positions * config.head_dim)
    # As `to_empty`, but without the half second that torch needs for its imports there.
    model = model._apply(lambda tensor: torch.empty(tensor.shape, dtype=dtype, device=device))
    if config.tie_word_embeddings:
        model.tie_weights()  # `_apply` gave each name memory of its own
    # Always float32: in bfloat16, large neighbouring positions would share an angle.
    table = model.model.rotary_table(config, positions)
    model.model.register_buffer("cos_sin", table.to(device), persistent=False)
    load_weights(model, dummy_tensors(model, seed) if dummy else checkpoint_tensors(pathlib.Path(folder)))
    return model.eval()
