"""pip's report: a file has all of it, a terminal a bar, and the reader sees what went wrong."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from nanovllm.checkpoint.pip_run import run_pip

# Stands in for pip. Its words are pip's.
REPORTS = """
import sys
import termios
print("Collecting torch==2.13.0")
print("  Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (181 MB)")
for done in range(0, 182_000_000, 26_000_000):
    print("Progress", done, "of", 182_000_000)
print("WARNING: a mirror is ignored", file=sys.stderr)
print("Installing collected packages: mpmath, torch")
sys.exit("ERROR: No space left on device" if "full" in sys.argv else 0)
"""
RUN = (
    "import sys, pathlib; from nanovllm.checkpoint.pip_run import run_pip; run_pip({pip!r}, [], "
    "pathlib.Path({report!r}))"
)


@pytest.fixture
def pip(tmp_path: Path) -> list[str]:
    (tmp_path / "pip.py").write_text(REPORTS)
    return [sys.executable, str(tmp_path / "pip.py")]


def test_without_a_terminal_the_report_is_in_the_file_alone(
    pip: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_pip(pip, ["install"], tmp_path / "report")
    assert capfd.readouterr() == ("", "")
    report = (tmp_path / "report").read_text()
    assert (
        "Collecting torch" in report
        and "a mirror is ignored" in report
        and "Progress" not in report
    )


def test_a_failure_is_shown(
    pip: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ChildProcessError, match="exit code 1"):
        run_pip(pip, ["full"], tmp_path / "report")
    printed = capfd.readouterr()
    assert "No space left on device" in printed.err and printed.out == ""
    assert "No space left on device" in (tmp_path / "report").read_text()


def test_a_terminal_shows_what_is_downloaded(pip: list[str], tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    command = [sys.executable, "-c", RUN.format(pip=pip, report=str(tmp_path / "report"))]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = bytearray()
        try:
            while data := os.read(master, 4096):
                shown += data
        except OSError:  # how Linux says that the terminal's other side is closed
            pass
    os.close(master)
    assert process.returncode == 0
    text = shown.decode()
    assert re.search(r"Downloading torch-2\.13\.0.* of 182 MB", text)
    assert "Installing 2 packages" in text and "mirror" not in text
