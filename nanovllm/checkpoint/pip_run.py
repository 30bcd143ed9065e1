"""Runs pip: its report goes into a file, and on a terminal a bar shows what pip downloads.

`make` runs this module before the package's requirements are installed, so it imports rich and the
standard library only: `python -m nanovllm.checkpoint.pip_run REPORT install ...`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_STAGE = re.compile(
    r"\s*(Collecting|Downloading|Building wheel for|Installing(?= collected))"
    r" ([^\s(-]+(?:-[^\s(-]+)?)"
)
_TAIL_LINES = 25


def run_pip(pip: Sequence[str], arguments: Sequence[str], report: Path) -> None:
    """Run pip, and append its report to a file.

    Args:
        pip: the words that start pip.
        arguments: with `--progress-bar raw`, which pip has had since 24.1, a terminal shows a bar
            for each download.

    Raises:
        OSError: pip cannot be started, or it has failed and the end of its report is on standard
            error.
    """
    command = [*pip, *arguments, "--no-input"]
    lines = []
    with (
        report.open("a", encoding="utf-8") as file,
        Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        ) as bars,
        Popen(
            command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        bar = bars.add_task("pip starts", total=None, size="")
        for line in process.stdout:
            if progress := re.match(r"Progress (\d+) of (\d+)", line):
                done, total = map(int, progress.groups())
                bars.update(
                    bar,
                    completed=done,
                    total=total,
                    size=f"{done / 1e6:.0f} of {total / 1e6:.0f} MB",
                    refresh=True,
                )
                continue
            file.write(line)
            lines.append(line)
            if found := _STAGE.match(line):
                what = f"{line.count(',') + 1} packages" if found[2] == "collected" else found[2]
                bars.reset(bar, total=None, size="", description=f"{found[1]} {what}")
    if process.returncode:
        print(*lines[-_TAIL_LINES:], sep="", file=sys.stderr)
        raise ChildProcessError(f"pip failed with exit code {process.returncode}")


if __name__ == "__main__":
    _report, *_arguments = sys.argv[1:]
    try:
        run_pip(
            [sys.executable, "-m", "pip"], [*_arguments, "--progress-bar", "raw"], Path(_report)
        )
    except ChildProcessError as error:
        sys.exit(f"{error}; its full report is {_report}")
