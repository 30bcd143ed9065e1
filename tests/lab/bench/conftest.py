"""What the dry runs of benchmarks share."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest
import torch

from nanovllm.lab import processes as lab_processes
from nanovllm.lab.bench import __main__ as part_program
from nanovllm.lab.bench.machine import Limits
from nanovllm.lab.bench.parts import Runner
from tests import processes


class StartedOrForked(processes.StartedOrForked):
    """Programs are started, not forked, from a rank, which may not fork, and from a process in
    which libraries have threads, whose locks a fork would copy."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if (
            multiprocessing.current_process().daemon
            or psutil.Process().num_threads() > threading.active_count()
        ):
            return object.__new__(cls)
        return super().__new__(cls, *arguments, **options)


def run_forked(order: str, folder: pathlib.Path, environment: dict[str, str]) -> None:
    """The program of a part, and processes that it starts are forked too."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    (folder / "order").write_text(order)
    for descriptor, name in enumerate(("order", "rows", "log")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_RDWR), descriptor)
    sys.stdin, sys.stderr = os.fdopen(0), os.fdopen(2, "w", buffering=1)
    fork = multiprocessing.get_context("fork")
    processes.CONTEXT = lab_processes.CONTEXT = fork  # type: ignore[assignment]
    subprocess.Popen = StartedOrForked  # type: ignore[misc]
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment, misc]
    part_program.main()


def set_limits(patch: pytest.MonkeyPatch) -> None:
    """Take the machine's limits as known: to measure them takes seconds."""
    for module in ("nanovllm.lab.bench", "nanovllm.lab.bench.suite"):
        patch.setattr(f"{module}.measure_limits", lambda dtype, threads: Limits(1e9, 1e9, dtype, 4))


@pytest.fixture
def forked_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are forked from a process that has imported torch, instead of started; other tests
    start them."""

    def run(runner: Runner, order: str, seconds: float, folder: pathlib.Path) -> str:
        environment = (
            lab_processes.python_environment()
            | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            | runner.environment
        )
        process = processes.CONTEXT.Process(target=run_forked, args=(order, folder, environment))
        process.start()
        process.join(seconds)
        code = process.exitcode
        process.kill()
        return "" if code == 0 else f"exit code {code}: {(folder / 'log').read_text()}"

    monkeypatch.setattr(Runner, "_process", run)
