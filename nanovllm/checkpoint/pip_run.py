"""Runs pip: its report goes into a file, and on a terminal a bar shows what pip downloads.

`make` runs this module before the package's requirements are installed, so it imports tqdm and the standard library only:
`python -m nanovllm.checkpoint.pip_run REPORT install ...`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen

from tqdm import tqdm

_STAGE = re.compile(r"\s*(Collecting|Downloading|Building wheel for|Installing(?= collected)) ([^\s(-]+(?:-[^\s(-]+)?)")
_WORDS = "{desc} [{elapsed}]"
_TAIL_LINES = 25


def run_pip(pip: Sequence[str], arguments: Sequence[str], report: Path) -> None:
    """Run pip, and append its report to a file.

    Args:
        pip: the words that start pip.
        arguments: with `--progress-bar raw`, which pip has had since 24.1, a terminal shows a bar for each download.

    Raises:
        OSError: pip cannot be started, or it has failed and the end of its report is on standard error.
    """
    command, lines = [*pip, *arguments, "--no-input"], []
    with (
        report.open("a", encoding="utf-8") as file,
        tqdm(desc="  pip starts", bar_format=_WORDS, unit="B", unit_scale=True, leave=False, disable=None) as bar,
        _ticking(bar),
        Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if progress := re.match(r"Progress (\d+) of (\d+)", line):
                bar.bar_format = None
                bar.n, bar.total = map(int, progress.groups())
            else:
                file.write(line)
                lines.append(line)
                if found := _STAGE.match(line):
                    what = f"{line.count(',') + 1} packages" if found[2] == "collected" else found[2]
                    bar.reset()
                    bar.bar_format, bar.desc = _WORDS, f"  {found[1]} {what}"
            bar.refresh()
    if process.returncode:
        print(*lines[-_TAIL_LINES:], sep="", file=sys.stderr)
        raise ChildProcessError(f"pip has failed with exit code {process.returncode}")


@contextlib.contextmanager
def _ticking(bar: tqdm) -> Iterator[None]:
    """Show the time that passes while pip has nothing to report: it unpacks for a minute or more."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.5):
            bar.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    _report, *_arguments = sys.argv[1:]
    try:
        run_pip([sys.executable, "-m", "pip"], [*_arguments, "--progress-bar", "raw"], Path(_report))
    except ChildProcessError as error:
        sys.exit(f"{error}; its whole report is {_report}")
