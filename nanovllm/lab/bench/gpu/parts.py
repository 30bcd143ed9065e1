"""The parts of the check: each in a process of its own, with a limit on its time, so that none can take others along."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanovllm.lab.bench.gpu.setting import Row
from nanovllm.lab.bench.machine import python_environment, usable_cores

#: A part is not started with less time than this.
_LEAST_SECONDS = 10.0
_MOST_AT_ONCE = 10


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        words: the command line of `python -m nanovllm.lab.bench.gpu`.
        seconds: when it is ended.
        timed: it measures, so it must have the machine to itself.
    """

    title: str
    words: tuple[str, ...]
    seconds: float
    timed: bool = True


@dataclass
class Outcome:
    """What became of a part; `reason` says why if `status` is not "done"."""

    title: str
    status: str
    seconds: float
    reason: str = ""
    rows: list[Row] = field(default_factory=list)


def plan(dry_run: bool) -> list[Part]:
    """All parts, in order: proofs first, then what the targets are about, then the comparisons."""
    # Compiling takes most of the time that the kernels' checks take; two more parts run beside them.
    shares = 1 if dry_run else max(1, min(_MOST_AT_ONCE, len(usable_cores())) - 2)
    small, large = "Llama-3.2-1B", "Llama-3.1-8B"
    return [
        Part("the machine", ("machine",), 60),
        *(Part(f"kernels {i + 1}/{shares}", ("kernels", f"{i}/{shares}"), 150, timed=False) for i in range(shares)),
        Part("compute-sanitizer", ("sanitizer",), 120, timed=False),
        Part("greedy tokens", ("tokens",), 120, timed=False),
        Part("decode attention", ("decode",), 60),
        Part("latent attention", ("latent",), 60),
        Part("prefill attention", ("prefill",), 90),
        Part("two GPUs, NCCL", ("nccl",), 180),
        Part(f"{small}, graphs", ("engine", small, "graphs"), 75),
        Part(f"{large}, graphs", ("engine", large, "graphs"), 110),
        Part(f"{small}, eager", ("engine", small, "eager"), 75),
        Part(f"{large}, eager", ("engine", large, "eager", "stream"), 45),
        Part(f"{small}, transformers", ("transformers", small), 75),
        Part(f"{large}, transformers", ("transformers", large), 75),
    ]


class Runner:
    """Runs parts.

    Args:
        deadline: when everything has to be over, by `time.perf_counter`.
        say: gets a line whenever a part has ended.
    """

    def __init__(self, dry_run: bool, deadline: float, say: Callable[[str], object]) -> None:
        self.dry_run, self.deadline, self.say = dry_run, deadline, say
        self._processes: set[subprocess.Popen[bytes]] = set()

    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """Run parts one after another, those that are not timed beside each other."""
        outcomes: list[Outcome] = []
        for timed, group in itertools.groupby(parts, lambda part: part.timed and not self.dry_run):
            workers = 1 if timed else min(_MOST_AT_ONCE, len(usable_cores()))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                futures = [pool.submit(self._run_one, part) for part in group]
                try:
                    outcomes += [future.result() for future in futures]
                except BaseException:
                    # Ctrl-C reaches this process alone: the others have sessions of their own.
                    self.deadline = 0.0
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in list(self._processes):
                        _kill(process)
                    raise
        return outcomes

    def _run_one(self, part: Part) -> Outcome:
        begin = time.perf_counter()
        seconds = min(part.seconds, self.deadline - begin)
        if seconds < _LEAST_SECONDS:
            return self._ended(Outcome(part.title, "failed", 0.0, "no time was left for it"))
        with tempfile.TemporaryDirectory() as folder:
            rows, log = pathlib.Path(folder, "rows"), pathlib.Path(folder, "log")
            reason = self._process(part, seconds, rows, log)
            outcome = Outcome(part.title, "done", time.perf_counter() - begin, rows=_read_rows(rows))
            if reason:
                lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
                outcome.status = "failed"
                outcome.reason = f"{reason}: {lines[-1][:300]}" if lines else reason
        for row in outcome.rows:
            if row["table"] == "skipped":
                outcome.status, outcome.reason = "skipped", row["reason"]
        return self._ended(outcome)

    def _command(self, part: Part, seconds: float) -> list[str]:
        command = [sys.executable, "-m", "nanovllm.lab.bench.gpu", *part.words, "--seconds", f"{seconds:.0f}"]
        return [*command, "--dry-run"] if self.dry_run else command

    def _process(self, part: Part, seconds: float, rows: pathlib.Path, log: pathlib.Path) -> str:
        """Run a part to its end; returns what went wrong, or nothing."""
        command = self._command(part, seconds)
        environment = python_environment() | {"HF_HUB_OFFLINE": "1"}
        if self.dry_run:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        else:  # the CPU is only a reference here, and its C++ kernels would have to be compiled first
            environment["NANOVLLM_NATIVE"] = "0"
        with rows.open("wb") as output, log.open("wb") as errors:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                cwd=rows.parent, start_new_session=True,
            )  # fmt: skip
        self._processes.add(process)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            _kill(process)
            self._processes.discard(process)
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}" if code else ""

    def _ended(self, outcome: Outcome) -> Outcome:
        reason = f" ({outcome.reason})" if outcome.reason else ""
        self.say(f"{outcome.title}: {outcome.status}{reason}, {outcome.seconds:.0f} s")
        return outcome


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_rows(path: pathlib.Path) -> list[Row]:
    """The rows that a part has written, without one that it was writing when it was ended."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
