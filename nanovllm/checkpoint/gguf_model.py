"""Converts a user's GGUF file, once, to

    $NANOVLLM_HOME/models/gguf/NAME-PATH/

where NAME is the file's and PATH a hash of where it is. origin.json there names the file with its
size and time, so that another file in its place replaces the folder; and all files of the folder
with their sizes, so that a folder that lacks one is made again.

A child process converts it: `python -m nanovllm.checkpoint.gguf_model FILE WORK`. So this process
imports neither torch nor transformers."""

import hashlib
import json
import os
import sys
import threading
from pathlib import Path

from nanovllm.checkpoint.conversion import RESULT, make_folder, make_in_child, run_as_child
from nanovllm.checkpoint.files import ModelFileError, read_json
from nanovllm.checkpoint.home import ModelNotFoundError, nanovllm_home
from nanovllm.data.disk import HOME_REMEDY, is_full

# Raise it when the output of `convert` changes: folders in users' caches are then replaced.
_CONVERSION = 1
_CHILD = (sys.executable, "-m", "nanovllm.checkpoint.gguf_model")
_ORIGIN = "origin.json"
# With 13 characters of the hash, ".lock" and a dot, within the 255 bytes of a file's name.
_NAME_BYTES = 100


def convert_once(file: Path, stop: threading.Event | None = None) -> Path:
    """Convert a GGUF file, unless that is done, and return the folder of the checkpoint.

    May be interrupted at any moment and called by several processes simultaneously: one of them
    does the work, the others wait for it.

    Args:
        stop: see `resolve_model`.

    Raises:
        ModelNotFoundError: the file cannot be used, the folder cannot be written, the disk is full,
            or `stop` was set.
    """
    # A link keeps its own name: those in Hugging Face's cache lead to files named by hashes.
    file = Path(os.path.abspath(file))
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
    name = os.fsencode(file.stem)[:_NAME_BYTES].decode(errors="ignore")
    target = nanovllm_home() / "models" / "gguf" / f"{name}-{digest}"
    what = f"the checkpoint of '{file}'"
    stop = stop or threading.Event()
    try:
        origin = _origin(file)
        make_folder(
            target,
            is_made=lambda folder: _is_made(folder, origin),
            make=lambda work: make_in_child((*_CHILD, str(file), str(work)), work, stop, what),
            stop=stop,
            what=what,
        )
    except OSError as error:
        raise ModelNotFoundError(_not_written(file, error)) from error
    return target


def _origin(file: Path) -> dict[str, object]:
    """Return what a converted folder records of its source."""
    found = file.stat()
    return {
        "file": str(file),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "conversion": _CONVERSION,
    }


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file of a converted folder but origin.json."""
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.name != _ORIGIN}


def _is_made(folder: Path, origin: dict[str, object]) -> bool:
    """Whether a folder is complete and of this file."""
    if not (folder / _ORIGIN).is_file():
        return False
    try:
        found = read_json(folder / _ORIGIN)
    except ModelFileError:
        return False
    sizes: dict[str, int] = found.pop("files", {})
    return found == origin and bool(sizes) and sizes.items() <= _sizes(folder).items()


def _not_written(file: Path, error: Exception) -> str:
    """The message for a folder that cannot be written, or a file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    place = error.filename if isinstance(error, OSError) and error.filename else nanovllm_home()
    remedy = "" if str(place) == str(file) else f"; {HOME_REMEDY}"
    return f"'{file}' could not be converted: {place}: {reason}{remedy}"


def _main(file: Path, work: Path) -> int:
    """Convert the file in this process, print the reason of a failure, and return the exit code."""
    # Imported here, because every start with a GGUF file imports this module, and only the first
    # one converts it.
    from nanovllm.checkpoint.gguf import convert

    def make() -> None:
        print(f"Converting '{file}' to safetensors, once", file=sys.stderr)
        origin = _origin(file)
        folder = work / RESULT
        folder.mkdir()
        convert(file, folder)
        origin["files"] = _sizes(folder)
        (folder / _ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")

    def explain(error: Exception) -> str | None:
        # Libraries written in Rust raise errors of their own where Python would raise an OSError.
        if isinstance(error, OSError) or is_full(str(error)):
            return _not_written(file, error)
        return str(error) if isinstance(error, ValueError) else None

    return run_as_child(make, explain)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), Path(sys.argv[2])))
