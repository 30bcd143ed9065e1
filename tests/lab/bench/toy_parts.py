"""Parts of a made-up benchmark, for the runner of parts, and proofs. Imports no torch."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from nanovllm.lab.bench.parts import Setting, Skip
from nanovllm.lab.bench.report import Row

ROW = {"table": "t", "x": 1}


def crash(setting: Setting) -> Iterator[Row]:
    yield ROW
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse(setting: Setting) -> Iterator[Row]:
    yield ROW
    raise ValueError("no such GPU")


def succeed(setting: Setting, word: str) -> Iterator[Row]:
    assert word == "argument"
    yield ROW | {"before": len(setting.before)}


def skip(setting: Setting) -> Iterator[Row]:
    raise Skip("there is one GPU")
    yield ROW


def hang(setting: Setting) -> Iterator[Row]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield ROW | {"pid": child.pid}
    child.wait()


def proven(folder: pathlib.Path, share: str) -> list[Row]:
    from nanovllm.lab.bench.gpu import proofs

    proofs.FOLDER = folder
    return list(proofs.prove(Setting(), "test_x.py", share))
