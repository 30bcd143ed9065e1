"""Renders chat templates in a process of its own, which ends if a template takes too much time or
memory.

A template is a program that comes with the model. Jinja's sandbox blocks access to files, but
limits neither nested loops nor the length of a string. A process can be limited and killed at any
time; a thread cannot."""

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from nanovllm.data.json import JsonObject
from nanovllm.processes.start import is_stopped, start_process

# CPU time, so that other load on the machine does not count. A chat of a megabyte takes
# milliseconds.
RENDER_SECONDS = 2.0
RENDER_BYTES = 256 << 20
# An exiting process gets this time before it is killed, so that its exit code is the true one.
END_SECONDS = 1.0
# After so long without an answer it is asked whether the process was stopped.
STOPPED_SECONDS = 1.0
OUT_OF_MEMORY = 12  # the process's exit code
# The folder from which this package is imported.
PACKAGE_FOLDER = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))


Answer = TypeVar("Answer")


class HelperProcessError(RuntimeError):
    """A helper process was ended twice by something else than the question that it was asked."""


class LimitedProcess(Generic[Answer]):
    """A process that answers questions: started with the first, and again after a question has
    ended it. Thread-safe.

    Attributes:
        program: a Python file that calls `answer_questions`.
        seconds, memory: CPU time and bytes of an answer.
    """

    program = __file__
    seconds = RENDER_SECONDS
    memory = RENDER_BYTES

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Start the process if it does not run, and return it. To be called early, so that the
        first question does not wait for its imports."""
        with self._lock:
            if self._running is None:
                # The same module search path, but with the working directory last, since it may
                # contain a model's files; unless this package is there, of which another copy may
                # be installed.
                untrusted = {os.getcwd()} - {PACKAGE_FOLDER}
                path = sorted(sys.path, key=lambda entry: os.path.abspath(entry) in untrusted)
                # Else the C library reserves 64 MiB of addresses for each thread that allocates,
                # after the limit is set, too.
                environment = {"PYTHONPATH": os.pathsep.join(path), "MALLOC_ARENA_MAX": "1"}
                self._running = start_process(["-P", self.program], environment)
            return self._running

    def ask(self, *question: object) -> Answer:
        """The answer to a question. A process that died for another reason is started again, once.

        Raises:
            ValueError: an error that the question has caused, or it takes too much time or memory.
            HelperProcessError: the second process died, too.
        """
        with self._lock:
            self._forget_if_dead()
            for is_last in (False, True):
                process, connection = self.start()
                try:
                    connection.send(question)
                    self._await_answer(process, connection)
                    reply: tuple[Answer, str] = connection.recv()
                    break
                except BaseException as failure:
                    # After Ctrl-C, too: the next question would receive this answer.
                    self._running = None
                    connection.close()
                    if not isinstance(failure, EOFError | OSError):
                        self._end(process, seconds=0.0)
                        raise
                    code = self._end(process, END_SECONDS)
                    if verdict := self._verdict(code):
                        raise ValueError(verdict) from None
                    if is_last:
                        raise HelperProcessError(
                            f"the helper process {os.path.basename(self.program)} exited with code "
                            f"{code}, and so did a new one: try again"
                        ) from None
        answer, error = reply
        if error:
            raise ValueError(error)
        return answer

    def _await_answer(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        """Return when an answer, or the end of the process, can be read. A stopped process is
        killed: it uses no CPU time, and would never reach its limit."""
        while not connection.poll(STOPPED_SECONDS):
            if is_stopped(process.pid):
                process.kill()

    def _forget_if_dead(self) -> None:
        """Drop a process that has died while no question was asked: no question is the reason."""
        if self._running is not None and self._running[0].poll() is not None:
            self._running[1].close()
            self._running = None

    def _end(self, process: subprocess.Popen[bytes], seconds: float) -> int:
        """Give a process this time to exit, and kill it if it does not; returns its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        return process.wait()

    def _verdict(self, code: int) -> str:
        """The fault of a question that has ended its process with this code; "" if something else
        has ended the process."""
        memory = f"it needs more than {self.memory >> 20} MiB of memory"
        verdicts = {
            -signal.SIGPROF: f"it needs more than {self.seconds:g} seconds of CPU time",
            OUT_OF_MEMORY: memory,
            -signal.SIGABRT: memory,
            -signal.SIGSEGV: "it is nested too deeply",
        }
        return verdicts.get(code, "")


# Renders templates: it is asked with a template, messages, and the variables of the template and of
# `render_jinja_template`.
PROCESS = LimitedProcess[str]()
# A forked process starts a process of its own; otherwise both would read each other's answers. The
# lock is new, too: a thread that does not exist after the fork may hold the old one.
os.register_at_fork(after_in_child=PROCESS.__init__)  # type: ignore[misc]


def answer_questions(
    connection: Connection, answer: Callable[..., object], seconds: float, memory: int
) -> None:
    """Run the process until its parent closes the connection, or ends."""
    import psutil

    limit = psutil.Process().memory_info().vms + memory
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit it
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while True:
            encoded = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
            try:
                # A question with an object whose class is not known here is an error, too.
                result: tuple[object, str] = answer(*pickle.loads(encoded)), ""
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except Exception as failure:  # a template is a program and may raise anything
                result = "", str(failure) or repr(failure)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(result)


def main() -> None:
    """Render templates."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(template: str, messages: list[JsonObject], variables: JsonObject) -> object:
        # (texts, positions); the library's annotation is wrong.
        return render_jinja_template([messages], chat_template=template, **variables)[0][0]

    answer_questions(Connection(int(sys.argv[1])), render, RENDER_SECONDS, RENDER_BYTES)


if __name__ == "__main__":
    main()
