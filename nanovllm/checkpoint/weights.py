"""Chooses the files of a checkpoint that contain its weights, and gives their tensors standard
names.

The same model can be stored in several ways: in one file or in shards, with different prefixes of
the tensors' names, with all experts of a layer in one tensor, with one matrix for embedding and
output head or with two. Each is read as `transformers` reads it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, split

from nanovllm.checkpoint.files import ModelFileError, shard_names
from nanovllm.data.disk import full_disk, is_full

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
# Start of the names of safetensors files without a model's weights → reason, for the error message
# if there is no other file.
_OTHER_FILES = {
    "adapter_": (
        "is a LoRA adapter: merge it into its base model with peft's merge_and_unload(), and save "
        "the result"
    ),
    "consolidated": (
        "is in Mistral's own format: download the checkpoint in the format of transformers"
    ),
    "optimizer": "contains the state of an optimizer: copy the model's weights into this folder",
    "scheduler": "contains the state of a scheduler: copy the model's weights into this folder",
    "training_": "contains the state of a training run: copy the model's weights into this folder",
}

EMBEDDING = "model.embed_tokens."
HEAD = "lm_head."
# Prefix of the text model in a vision-language model; and the start of names in a base model, which
# was saved without its head.
_TEXT_PART = re.compile(r"^(model\.)?language_model\.")
_BASE_MODEL_PARTS = ("embed_tokens.", "layers.", "norm.")
# Rows per comparison.
_ROWS = 4096


class CheckpointError(ValueError):
    """A checkpoint that lacks files or tensors, or has tensors of the wrong shape."""


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that contain a model's weights: `model.safetensors`; if it is
    missing, the shards that the index lists; if both are missing, the only file or the only set of
    shards.

    Raises:
        ModelFileError: there are no weights, a shard is missing, the index is damaged, or the
            choice is ambiguous.
    """
    if (folder / WHOLE_FILE).is_file():
        return [folder / WHOLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        return _existing(index, [folder / name for name in shard_names(index)])
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    weights = [name for name in found if not name.startswith(tuple(_OTHER_FILES))]
    if not weights:
        raise ModelFileError(_without_weights(folder, found))
    shards = [_SHARD.fullmatch(name) for name in weights]
    sets = {(shard["stem"], shard["count"]) if shard else None for shard in shards}
    if len(weights) > 1 and (len(sets) > 1 or None in sets):
        raise ModelFileError(
            f"{folder} has neither {WHOLE_FILE} nor {INDEX_FILE}, and the choice between its "
            f"{len(weights)} files ({', '.join(weights[:5])}) is ambiguous: name the model's "
            f"weights {WHOLE_FILE}"
        )
    if shards[0]:
        weights = _names_of_set(shards[0])
    return _existing(folder, [folder / name for name in weights])


def _names_of_set(shard: re.Match[str]) -> list[str]:
    """Return the names of all shards of a set."""
    count = int(shard["count"])
    width = len(shard["number"])
    return [
        f"{shard['stem']}-{i + 1:0{width}}-of-{shard['count']}.safetensors" for i in range(count)
    ]


def _existing(listed_by: Path, files: list[Path]) -> list[Path]:
    if missing := [file.name for file in files if not file.exists()]:
        raise ModelFileError(
            f"{listed_by}: the folder lacks {', '.join(missing[:5])}; download the model again"
        )
    return files


def _without_weights(folder: Path, found: list[str]) -> str:
    """Return the error message for a folder without a model's weights."""
    if not found:
        return f"{folder} has no *.safetensors file; convert the checkpoint to safetensors first"
    reason = next(reason for start, reason in _OTHER_FILES.items() if found[0].startswith(start))
    return f"{folder} has no {WHOLE_FILE}, and its {found[0]} {reason}"


def standard_name(name: str) -> str:
    """Return the name that a tensor has in a checkpoint of a causal language model:
    `model.layers.0…`, `lm_head…`."""
    name = _TEXT_PART.sub("", name)
    return f"model.{name}" if name.startswith(_BASE_MODEL_PARTS) else name


def standard_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of a file under its standard name. A tensor with the matrices of all experts
    of a layer, as transformers 5 has them in memory, is yielded as one view per expert and matrix.
    """
    name = standard_name(name)
    layer, found, matrices = name.partition(".experts.")
    if not found or tensor.ndim != 3 or matrices not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        path = f"{layer}.experts.{expert}"
        if matrices == "down_proj":
            yield f"{path}.down_proj.weight", matrix
            continue
        gate, up = matrix.chunk(2)
        yield f"{path}.gate_proj.weight", gate
        yield f"{path}.up_proj.weight", up


def has_own_head(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Return True if a checkpoint contains an output head that differs from its embedding. Each may
    be one matrix, or the tensors of a quantized one."""
    embedding: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.startswith(EMBEDDING):
            embedding[name.removeprefix(EMBEDDING)] = tensor
        elif name.startswith(HEAD):
            head[name.removeprefix(HEAD)] = tensor
    if not embedding or not head:
        return False
    return head.keys() != embedding.keys() or any(
        not _equal(embedding[kind], tensor) for kind, tensor in head.items()
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Compare two matrices part by part: most different matrices differ in their first rows."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    parts = zip(split(a, _ROWS), split(b, _ROWS), strict=True)
    return all(bool((x == y).all()) for x, y in parts)


def with_embedding(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint whose embedding and output head are one matrix. If it is
    stored only as the head, it is also yielded as the embedding."""
    head: list[tuple[str, Tensor]] = []
    has_embedding = False
    for name, tensor in tensors:
        has_embedding = has_embedding or name.startswith(EMBEDDING)
        if name.startswith(HEAD):
            head.append((name, tensor))
        yield name, tensor
    if not has_embedding:
        for name, tensor in head:
            yield name.replace(HEAD, EMBEDDING, 1), tensor


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[safe_open]:
    """Open a safetensors file, memory-mapped, for tensors on the CPU.

    Raises:
        CheckpointError: the file is damaged.
        PermissionError: this user may not read it.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except FileNotFoundError as error:
        if not file.exists():
            raise
        # safetensors says that a file is not there if it cannot open it, whatever the reason.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file)) from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error


def save_tensors(
    tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, which appears complete or not at all.

    Raises:
        OSError: the file cannot be written, or the disk is full; names the file. (safetensors' own
            error is none.)
    """
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        file.unlink(missing_ok=True)
        if is_full(str(error)):
            raise full_disk(file) from error
        raise OSError(errno.EIO, str(error), str(file)) from error
    file.chmod(0o644)  # safetensors makes it unreadable to other users
