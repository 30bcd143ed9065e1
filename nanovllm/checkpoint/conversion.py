"""Makes a model folder once, whatever interrupts it and however many processes ask for it.

The folder is made under another name and renamed when it is complete, so that a folder of its name
can be used. A child process makes it: libraries do most of the work, for a long time, and a process
can be killed whatever a library does."""

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from nanovllm.checkpoint.home import ModelNotFoundError

# Name, in the folder that a child works in, of the folder that it makes.
RESULT = "checkpoint"
# Time between two looks at the event that stops the work.
_POLL_SECONDS = 0.1


def make_folder(
    target: Path,
    is_made: Callable[[Path], bool],
    make: Callable[[Path], Path],
    stop: threading.Event,
    what: str,
) -> None:
    """Make the folder `target`, unless it is there.

    Args:
        is_made: whether a folder is what `make` would make now.
        make: makes the folder inside an empty one, and returns it.
        stop: ends a wait for another process.
        what: is made, for messages: "the course model".

    Raises:
        ModelNotFoundError: `stop` was set.
        OSError: the folder cannot be written.
    """
    if is_made(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock", stop, what):
        if is_made(target):  # another process has made it while this one waited
            return
        # Under the lock, these can only be left over from a process that was killed.
        for leftover in target.parent.glob(f".{glob.escape(target.name)}-*"):
            shutil.rmtree(leftover)
        # The next start removes files that cannot be removed because a killed process still writes.
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True
        ) as work:
            made = make(Path(work))
            if target.exists():  # made by an earlier version, of another file, or damaged
                target.rename(Path(work) / "replaced")
            made.rename(target)


@contextlib.contextmanager
def _locked(file: Path, stop: threading.Event, what: str) -> Iterator[None]:
    """Hold the lock of a file, which is removed afterwards. Another process may hold it for as long
    as a download takes.

    Raises:
        ModelNotFoundError: `stop` was set while this process waited.
    """
    lock = FileLock(file)
    while not lock.is_locked:
        _check(stop, what)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=_POLL_SECONDS)
    try:
        yield
    finally:
        # A process that waits for this lock notices that its file was removed.
        file.unlink(missing_ok=True)
        lock.release()


def _check(stop: threading.Event, what: str) -> None:
    """Raise ModelNotFoundError if `stop` is set."""
    if stop.is_set():
        raise ModelNotFoundError(f"{what} was not made: its caller was cancelled")


def make_in_child(
    command: tuple[str, ...], work: Path, stop: threading.Event, what: str, remedy: str = ""
) -> Path:
    """Run a child process that makes the folder `RESULT` in `work`, and ends with this call; return
    that folder.

    Args:
        command: of the child, which calls `run_as_child`.
        what: is made, for messages: "the course model".
        remedy: end of the message for a child that fails without giving a reason.

    Raises:
        ModelNotFoundError: it failed, or `stop` was set.
    """
    process = subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(work)},  # temporary files are removed with it
        stdin=subprocess.PIPE,  # closed when this process ends, however it ends
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # a terminal's Ctrl-C interrupts this process, which kills the group
    )
    with process:
        try:
            while process.poll() is None:
                _check(stop, what)
                stop.wait(_POLL_SECONDS)
        except BaseException:  # Ctrl-C or `stop`
            os.killpg(process.pid, signal.SIGKILL)
            _report_stop(what)
            raise
        assert process.stdout is not None
        message = process.stdout.read()
    if process.returncode != 0:
        failed = f"{what} could not be made: exit code {process.returncode} (see the message above)"
        raise ModelNotFoundError(message or failed + remedy)
    return work / RESULT


def _report_stop(what: str) -> None:
    """Print that the work was stopped. The child's progress bar may have hidden the cursor."""
    if sys.stderr.isatty():
        Console(stderr=True).show_cursor()
        print(file=sys.stderr)
    print(f"Stopped: nothing is kept of {what}, and the next start begins again", file=sys.stderr)


def run_as_child(make: Callable[[], object], explain: Callable[[Exception], str | None]) -> int:
    """Call `make` in this process, print the reason of a failure, and return the exit code.

    Args:
        explain: the message for an error that a user can fix; None for any other.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        make()
        # before the rename: after a power failure there is either no folder or a complete one
        os.sync()
    except Exception as error:
        if (message := explain(error)) is None:
            raise
        print(message, end="")
        return 1
    return 0


def _end_with_parent() -> None:
    """Kill this process and its helpers as soon as the parent has died."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
