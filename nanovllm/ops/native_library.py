"""Compiles C++ sources on first use, caches the library, and loads it with ctypes.

The sources are plain C++ with a C interface, so that any compiler builds them in seconds, without
torch's headers or Python's.

Environment: `CXX` names the compiler, `CXXFLAGS` is added to its flags, the result is kept under
`NANOVLLM_HOME` (~/.cache/nanovllm). With `NANOVLLM_NATIVE=0`, nothing is compiled or loaded."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from tqdm import tqdm

from nanovllm.data.disk import HOME_REMEDY, full_disk, is_full

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """A library cannot be compiled or loaded here; the message says why."""


def find_compiler() -> str:
    """The path of a C++ compiler.

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildError("no C++ compiler found (set CXX)")


def load_library(
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    flags: Sequence[str] = (),
    what: str = "a library",
) -> ctypes.CDLL:
    """Load the library of some sources; compile it first unless the cache has it for these flags,
    compiler and CPU.

    Args:
        headers: files that the sources include; if one changes, the library is compiled again.
        flags: for the compiler; `CXXFLAGS` follows them.
        what: the library's name in the log.

    Raises:
        BuildError: it cannot be compiled or loaded; the message says why.
    """
    if os.environ.get("NANOVLLM_NATIVE") == "0":
        raise BuildError("NANOVLLM_NATIVE=0")
    compiler = find_compiler()
    flags = [*flags, *os.environ.get("CXXFLAGS", "").split()]
    # The compiler's macros name its version and, with -march=native, the instructions of this CPU.
    parts = [_run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]), " ".join(flags)]
    parts += [path.read_text() for path in (*sources, *headers)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    home = Path(os.environ.get("NANOVLLM_HOME") or Path.home() / ".cache" / "nanovllm")
    target = home / "native" / f"{key}.so"
    try:
        if not target.exists():
            logger.info("compiling %s, once, into %s", what, target)
            _compile(compiler, flags, sources, target, what)
    except OSError as error:
        raise BuildError(f"{target.parent}: {error.strerror or error}; {HOME_REMEDY}") from error
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(str(error)) from error


def _compile(
    compiler: str, flags: Sequence[str], sources: Sequence[Path], target: Path, what: str
) -> None:
    """Compile the sources, at the same time, into `target`, which appears complete or not at all. A
    terminal shows a bar."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=target.parent) as folder,
        tqdm(
            desc=f"  Compiling {what}",
            total=len(sources),
            leave=False,
            dynamic_ncols=True,
            disable=None,
        ) as bar,
        ThreadPool(len(sources)) as threads,
    ):
        commands = [[compiler, *flags, "-c", str(source.resolve())] for source in sources]
        for _ in threads.imap_unordered(lambda command: _run(command, folder), commands):
            bar.update()
        _run(
            [compiler, "-shared", *(f"{source.stem}.o" for source in sources), "-o", "library.so"],
            folder,
        )
        os.replace(Path(folder) / "library.so", target)


def _run(command: list[str], folder: str | None = None) -> str:
    """Run a compiler, in a folder that also gets its temporary files, and return what it prints.

    Raises:
        BuildError: it failed.
        OSError: the disk is full.
    """
    # In English: the message is searched for the reason.
    variables = os.environ | {"LC_ALL": "C"} | ({} if folder is None else {"TMPDIR": folder})
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
    except subprocess.CalledProcessError as error:
        if folder is not None and is_full(error.stderr):
            raise full_disk(folder) from error
        raise BuildError(f"{' '.join(command)} failed: {error.stderr.strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
