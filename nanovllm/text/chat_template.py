"""Renders chat templates in a process of its own, which ends if a template takes too much time or memory.

A template is a program that comes with the model. Jinja's sandbox keeps it away from files, and bounds neither nested loops nor
the length of a string. A process can be bounded, and killed, whatever it is doing; a thread cannot.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

# CPU time, so that a loaded machine does not count. A chat of a megabyte takes milliseconds.
RENDER_SECONDS = 2.0
RENDER_BYTES = 256 << 20
OUT_OF_MEMORY = 12  # the process's exit code


class TemplateProcess:
    """The process that renders: started with the first chat, and again after one that has ended it. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, so that the first chat does not wait for its imports."""
        with self._lock:
            self._start()

    def forget(self) -> None:
        """Leave the process to the parent: after a fork, each would read the other's answers."""
        self._lock = threading.Lock()  # a thread that the fork has not copied may hold the old one
        if self._process is not None:
            self._connection.close()
            self._process.returncode = 0  # it is no child of ours, and nothing has to wait for it
            self._process = None

    def _start(self) -> None:
        if self._process is not None:
            return
        # Modules are found where we find them, and those beside the model being served last.
        path = sorted(sys.path, key=lambda entry: os.path.abspath(entry) == os.getcwd())
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the parent to see
            )

    def render(self, template: str, messages: list[Any], variables: dict[str, Any]) -> str:
        """A chat as text. The variables are the template's and those of transformers' `render_jinja_template`.

        Raises:
            ValueError: what the template objects to, or that it takes too much time or memory.
        """
        with self._lock:
            try:
                self._start()
                self._connection.send((template, messages, variables))
                text, error = self._connection.recv()
            except (EOFError, OSError):
                raise ValueError(self._stop()) from None
            except BaseException:  # Ctrl-C while it renders: the answer would be taken for the next chat's
                self._stop()
                raise
        if error is not None:
            raise ValueError(error)
        return text

    def _stop(self) -> str:
        """End the process; returns why it could not render."""
        if self._process is None:
            return "its process could not be started"
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)  # it may be about to end by itself
        self._process.kill()
        code, self._process = self._process.wait(), None
        reasons = {
            -signal.SIGPROF: f"it takes more than {RENDER_SECONDS:g} seconds of CPU time",
            OUT_OF_MEMORY: f"it takes more than {RENDER_BYTES >> 20} MiB of memory",
        }
        return reasons.get(code, f"its process has ended with exit code {code}")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()


PROCESS = TemplateProcess()
atexit.register(PROCESS.close)
os.register_at_fork(after_in_child=PROCESS.forget)


def main() -> None:
    """The process from beginning to end, which is that of the connection to its parent."""
    connection = Connection(int(sys.argv[1]))
    import psutil
    from transformers.utils.chat_template_utils import render_jinja_template

    limit = psutil.Process().memory_info().vms + RENDER_BYTES
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit it
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        while True:
            template, messages, variables = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS)  # SIGPROF ends the process
            answer: tuple[str | None, str | None]
            try:
                # One text per chat, and positions that we did not ask for; the library's annotation says otherwise.
                result: Any = render_jinja_template([messages], chat_template=template, **variables)
                answer = result[0][0], None
            except MemoryError:
                raise
            except Exception as error:  # a template is a program: what it raises is up to the model's files
                answer = None, str(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)
    except (EOFError, OSError):
        pass  # the parent has ended
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
