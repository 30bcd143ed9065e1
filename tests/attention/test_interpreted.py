"""The tests in tests/attention/interpreted, each module in a process whose Triton interprets, and
which may crash."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODULES = sorted((ROOT / "tests" / "attention" / "interpreted").glob("test_*.py"))
TIMEOUT = 600  # seconds

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton on this platform"
)


def run_interpreted(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest in a process of its own, with the interpreter switched on."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )


def how_it_ended(returncode: int) -> str:
    return (
        f"killed by {signal.Signals(-returncode).name}"
        if returncode < 0
        else f"exit status {returncode}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "marked", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_in_the_interpreter(module: pathlib.Path, marked: str) -> None:
    result = run_interpreted("-m", marked, str(module.relative_to(ROOT)))
    nothing_marked = marked == "nightly" and result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert result.returncode == 0 or nothing_marked, (
        f"{how_it_ended(result.returncode)}\n{result.stdout[-6000:]}"
    )


def test_a_crash_is_seen(tmp_path: pathlib.Path) -> None:
    """What a kernel that reads beyond its tensors does to the process must not look like a
    success."""
    crash = tmp_path / "test_crash.py"
    crash.write_text("import ctypes\n\n\ndef test_crash():\n    ctypes.string_at(0)\n")
    result = run_interpreted(str(crash))
    assert how_it_ended(result.returncode) == "killed by SIGSEGV" and "test_crash" in result.stdout


def test_the_ordinary_run_leaves_them_out(request: pytest.FixtureRequest) -> None:
    from tests.attention.interpreted.conftest import collect_ignore_glob

    assert collect_ignore_glob == ["test_*.py"]
    assert not [item for item in request.session.items if "interpreted/" in item.nodeid]
