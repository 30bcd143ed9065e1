"""Renders chat templates in a process of its own, which ends if a template takes too much time or memory.

A template is a program that comes with the model. Jinja's sandbox blocks access to files, but limits neither nested loops
nor the length of a string. A process can be limited and killed at any time; a thread cannot.
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

# CPU time, so that other load on the machine does not count. A chat of a megabyte takes milliseconds.
RENDER_SECONDS = 2.0
RENDER_BYTES = 256 << 20
OUT_OF_MEMORY = 12  # the process's exit code


class TemplateProcess:
    """The process that renders templates: started with the first chat, and again after a template has ended it.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, so that the first chat does not wait for its imports."""
        with self._lock:
            self._start()

    def forget(self) -> None:
        """After a fork, leave the process to the parent; otherwise both would read each other's answers."""
        self._lock = threading.Lock()  # a thread that does not exist after the fork may hold the old lock
        if self._process is not None:
            self._connection.close()
            self._process.returncode = 0  # the process is not a child of this one: nothing to wait for
            self._process = None

    def _start(self) -> None:
        if self._process is not None:
            return
        # The same module search path, but with the working directory last: it may contain a model's files.
        path = sorted(sys.path, key=lambda entry: os.path.abspath(entry) == os.getcwd())
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.DEVNULL,
                process_group=0,  # only the parent handles Ctrl-C in a terminal
            )

    def render(self, template: str, messages: list[Any], variables: dict[str, Any]) -> str:
        """Render a chat. The variables are those of the template and of transformers' `render_jinja_template`.

        Raises:
            ValueError: an error of the template, or a template that takes too much time or memory.
        """
        with self._lock:
            try:
                self._start()
                self._connection.send((template, messages, variables))
                text, error = self._connection.recv()
            except (EOFError, OSError):
                raise ValueError(self._stop()) from None
            except BaseException:  # Ctrl-C while it renders: the next chat would receive this answer
                self._stop()
                raise
        if error is not None:
            raise ValueError(error)
        return text

    def _stop(self) -> str:
        """End the process; returns the reason why it could not render."""
        if self._process is None:
            return "its process could not be started"
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)  # it may be ending by itself
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
    """Run the process until its parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    import psutil
    from transformers.utils.chat_template_utils import render_jinja_template

    limit = psutil.Process().memory_info().vms + RENDER_BYTES
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit it
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while True:
            template, messages, variables = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS)  # SIGPROF ends the process
            answer: tuple[str | None, str | None]
            try:
                # (texts, positions); the library's annotation is wrong.
                result: Any = render_jinja_template([messages], chat_template=template, **variables)
                answer = result[0][0], None
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except Exception as error:  # a template is a program and may raise anything
                answer = None, str(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)


if __name__ == "__main__":
    main()
