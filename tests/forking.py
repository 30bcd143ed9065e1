"""Programs of Python that tests start are forked from a process that has imported torch and other
libraries.

A new interpreter takes two seconds of a core to import them, and most tests need less than that.
`Popen` starts a program as `subprocess.Popen` does: it is a child of the process that asks, has the
files that it was given and no others, its own environment, folder, session, signals and random
numbers, the arguments that `ps` shows, and imports this package itself, from where its environment
says. It differs from a program that was really started in the libraries that are there already, in
the seed of hashes, and in `/proc/PID/environ`, which is the origin's.

The origin is the process that forks. It clones itself as a sibling, so that the process that asks
is the parent, and what it has cloned has an origin of its own for the programs that it starts in
turn, forked before it has threads."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pathlib
import pickle
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import psutil

LIBRARIES = (
    "fastapi fastapi.responses httpx huggingface_hub.constants jinja2 llguidance msgspec numpy "
    "prometheus_client psutil rich safetensors.torch tokenizers torch torch.distributed "
    "transformers transformers.utils.chat_template_utils uvicorn xxhash zmq"
)
# Environment variables that the interpreter and these libraries read once, hence a program with
# other ones is really started.
READ_ONCE = (
    "ATEN_ CUDA_ DNNL_ GOMP_ HF_ HOME KMP_ LANG LC_ LD_ MALLOC_ MKL_ NCCL_ OMP_ ONEDNN_ OPENBLAS_ "
    "PYTHON TORCH_ TRANSFORMERS_ XDG_"
)
READ_LATE = (
    "MALLOC_ARENA_MAX",
    "OMP_WAIT_POLICY",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # torchrun's
)
ROOT = pathlib.Path(__file__).parents[1]
CAUGHT = (signal.SIGINT, signal.SIGTERM)
MAX_BYTES, MAX_FILES = 150_000, 64  # of an order
HIGH = 400  # a program's own files have lower numbers
ORIGIN = "tests.forking"
M_ARENA_MAX = -8
ROOM = 6000  # bytes for the arguments that `ps` shows
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID, SYS_CLONE, PR_GET_TID_ADDRESS = (
    1 << 15,
    1 << 21,
    1 << 24,
    56,
    40,
)


class Origin:
    """The process that forks programs for this one.

    Args:
        channel: the number of a socket to it.
        environment: the variables that it has read.
    """

    def __init__(self, channel: int, environment: Mapping[str, str]) -> None:
        self.channel, self.environment, self.owner = (
            socket.socket(fileno=channel),
            read_once(environment),
            os.getpid(),
        )
        self.lock = threading.Lock()

    def fork(self, order: bytes, files: Sequence[int]) -> int:
        """Have it fork a program; returns the process id."""
        with self.lock:
            socket.send_fds(self.channel, [order], files)
            return int(self.channel.recv(20))


threads = {"OMP_NUM_THREADS": "1"}  # what programs must have in common with the origin
libraries = LIBRARIES.split()
is_on = sys.platform == "linux" and platform.machine() == "x86_64"
_origin: Origin | None = None


def start_origin() -> None:
    """Start this process's origin, if there is none yet. Where there can be none, programs are
    really started."""
    global _origin, is_on
    if not is_on or _origin is not None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | threads
    with theirs:
        code = f"from tests.forking import main; main({theirs.fileno()}, {libraries})"
        Started(
            [sys.executable, "-c", code, " " * ROOM],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    is_on = bool(ours.recv(1))
    _origin = Origin(ours.detach(), environment)


Started = subprocess.Popen


class Popen(Started):  # type: ignore[type-arg]
    """`subprocess.Popen`, but programs of Python are forked."""

    def _execute_child(self, *given: Any) -> None:
        command, executable, preexec, _, pass_fds, folder, environment, _, _, shell, *pipes = given[
            :16
        ]
        new_session, group = given[-2:]
        words = (
            [os.fsdecode(word) for word in command] if isinstance(command, (list, tuple)) else []
        )
        if words[1:2] == ["-Xfrozen_modules=off"]:  # how Jupyter starts a kernel, for its debugger
            del words[1]
        variables = os.environ if environment is None else environment
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
        if words[1:2] == ["-u"] and "TORCHELASTIC_RUN_ID" in variables:
            # How torchrun starts a rank.
            del words[1]
            variables["PYTHONUNBUFFERED"] = "1"
        ignored = [number for number in CAUGHT if signal.getsignal(number) is signal.SIG_IGN]
        where = os.path.abspath(folder or ".")
        order = pickle.dumps(
            (words, variables, where, [0, 1, 2, *pass_fds], ignored, new_session, group)
        )
        fits = os.path.isdir(where) and max(pass_fds, default=0) < HIGH and len(order) < MAX_BYTES
        if fits and is_program(words) and not (executable or preexec or shell):
            start_origin()
            if (
                is_on
                and _origin
                and _origin.owner == os.getpid()
                and read_once(variables) == _origin.environment
            ):
                ends = [
                    pipe if pipe >= 0 else number
                    for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))
                ]
                self.pid = _origin.fork(order, [*ends, *pass_fds])
                self._child_created = True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(*given)  # type: ignore[misc]


def children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    """The processes that a process has started, without origins."""
    found = []
    for child in process.children(recursive):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.cmdline()[:1] != [ORIGIN]:
                found.append(child)
    return found


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that are read once."""
    names, late = tuple(READ_ONCE.split()), READ_LATE
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(names) and not name.startswith(late)
    }


def is_program(words: Sequence[str]) -> bool:
    """Whether this is a program of Python, without options of the interpreter other than a safe
    path; and not ruff, which is started in less time than a large process is forked."""
    words = [word for number, word in enumerate(words) if (number, word) != (1, "-P")]
    return (
        len(words) > 1
        and words[1:3] != ["-m", "ruff"]
        and words[0] == sys.executable
        and (words[1] in ("-c", "-m") or words[1][:1] != "-")
    )


def main(descriptor: int, libraries: list[str]) -> None:
    """The origin, which ends when the process ends that gives it orders, and each program that is
    forked from it."""
    given = [
        os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    ]
    installed = [path for path in sys.path[1:] if path not in given]
    for library in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    gc.collect()
    gc.freeze()  # else the next collection writes to the pages of all objects
    address = ctypes.c_void_p()  # where the C library keeps the number of its thread
    ctypes.PyDLL(None).prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    if address.value and len(os.listdir("/proc/self/task")) == 1:
        keep_files([descriptor], [3])
        socket.socket(fileno=os.dup(3)).send(b"+")
        end(run(*wait_for_order(address.value), installed))


def clone(address: int) -> int:
    """`os.fork`, but the parent of the new process is that of this one."""
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(SYS_CLONE, *map(ctypes.c_long, (flags, 0, 0, address, 0)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def keep_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Close all files but these, which get these numbers; the three of the standard streams, if not
    among them, become empty."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]
    os.closerange(0, HIGH)
    os.closerange(2 * HIGH, 2 * HIGH + 1)  # of the program that this process was
    for _ in {0, 1, 2} - set(numbers):
        os.open(os.devnull, os.O_RDWR)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=number < HIGH)
    os.closerange(HIGH, 2 * HIGH)


def wait_for_order(address: int) -> tuple[list[str], dict[str, str], str]:
    """Clone this process for each order on its channel. Returns in a new process, with what it
    shall run."""
    global _origin
    for number in CAUGHT:
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=3)
    while True:
        order, files, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_FILES)
        if not order:
            os._exit(0)
        if clone(address):
            for file in files:
                os.close(file)
            continue
        words, environment, folder, numbers, ignored, new_session, group = pickle.loads(order)
        if new_session:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        ours, theirs = (
            end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        if os.fork() == 0:  # the origin of the new process
            channel.detach()
            keep_files([theirs], [3])
            show_arguments([ORIGIN])
            channel = socket.socket(fileno=3)
            continue
        os.chdir(folder)
        for number, handler in {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
        }.items():
            signal.signal(number, signal.SIG_IGN if number in ignored else handler)
        channel.send(str(os.getpid()).encode())
        channel.detach()
        keep_files([*files, ours], [*numbers, 2 * HIGH])
        _origin = Origin(2 * HIGH, environment)
        return words, environment, folder


def end(code: int) -> NoReturn:
    """End this process with this exit code as an interpreter does, but free no objects: that takes
    longer than the fork."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)


def run(words: list[str], environment: dict[str, str], folder: str, installed: list[str]) -> int:
    """Run the program in this process as a new interpreter would; returns its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if "MALLOC_ARENA_MAX" in environment:
        ctypes.PyDLL(None).mallopt(M_ARENA_MAX, int(environment["MALLOC_ARENA_MAX"]))
    sys.modules["numpy"].random.seed()
    sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = (
        environment.get("HF_HUB_OFFLINE") == "1"
    )  # type: ignore[attr-defined]
    show_arguments(words)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        open_stream(number, name, bool(environment.get("PYTHONUNBUFFERED")))
    given = [
        os.path.abspath(path)
        for path in environment.get("PYTHONPATH", "").split(os.pathsep)
        if path
    ]
    sys.path[:] = [*given, *(path for path in installed if path not in given)]
    importlib.invalidate_caches()
    sys.orig_argv = list(words)
    subprocess.Popen = Popen  # type: ignore[misc]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    is_safe = words[1] == "-P"
    kind, *arguments = words[1 + is_safe :]
    if not is_safe:
        sys.path.insert(
            0, {"-m": folder, "-c": ""}.get(kind, os.path.dirname(os.path.realpath(kind)))
        )
    sys.argv[:] = [kind, *(arguments[1:] if kind in ("-m", "-c") else arguments)]
    try:
        if kind == "-m":
            runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            exec(compile(arguments[0], "<string>", "exec"), vars(program))
        else:
            program.__file__ = kind
            exec(compile(pathlib.Path(kind).read_bytes(), kind, "exec"), vars(program))
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        return (ended.code or 0) & 0xFF
    return 0


def show_arguments(words: Sequence[str]) -> None:
    """Make them what `ps` shows of this process."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def open_stream(number: int, name: str, unbuffered: bool) -> None:
    """Make `sys.stdin`, `sys.stdout` or `sys.stderr` as a new interpreter does."""
    old, unbuffered = getattr(sys, name), unbuffered and number > 0
    raw = open(number, "wb" if number else "rb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115 -- it stays open
    by_line = (number == 2 or raw.isatty()) and not unbuffered
    new = io.TextIOWrapper(
        raw, old.encoding, old.errors, "\n", line_buffering=by_line, write_through=unbuffered
    )
    new.mode = "w" if number else "r"
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)
