"""Runs the proofs in tests/gpu and reports each test."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from nanovllm.lab.bench.parts import Setting, Skip
from nanovllm.lab.bench.report import Row

FOLDER = pathlib.Path(__file__).parents[4] / "tests" / "gpu"
TITLE = "Right or wrong: kernels against float64, tokens in float32"
_OUTCOME = re.compile(r"^\S*?(\w+)\.py::(.+) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?\s*(?:\[.*\])?$")
_REASON = re.compile(r"^(?:FAILED|ERROR) \S*?\.py::(.+?) - (.*)$")


def prove(setting: Setting, file: str, share: str = "0/1") -> Iterator[Row]:
    """Run a file of proofs.

    Args:
        share: "i/n": every n-th test from the i-th on; other parts run the rest.
    """
    if not (FOLDER / file).is_file():
        raise Skip(f"the proofs are in tests/gpu of a checkout, and there is no {FOLDER / file}")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--confcutdir", str(FOLDER), "-p", "no:cacheprovider"]
    command += ["-v", "--tb=line", "-rfE", "--share", share, str(FOLDER / file)]
    passed: dict[str, bool] = {}
    # A width at which pytest abbreviates no reason.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": "400"}, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if found := _OUTCOME.match(line):
                name, outcome, reason = found[2], found[3], found[4]
                if outcome in ("PASSED", "SKIPPED"):
                    yield row(name, True if outcome == "PASSED" else None, reason or "")
                else:
                    passed[name] = False
            elif (found := _REASON.match(line)) and passed.pop(found[1], None) is False:
                yield row(found[1], False, found[2][:300])
        for name in passed:
            yield row(name, False, "")
    if process.returncode not in (0, 1, 5):  # 1: a test failed, 5: this share has none
        raise RuntimeError(f"pytest ended with exit code {process.returncode}")


def row(name: str, passed: bool | None, why: str) -> Row:
    """The outcome of a test; `passed` is None if it was skipped."""
    return {"table": TITLE, "proof": name, "passed": passed, "why": why}
