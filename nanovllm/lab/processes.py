"""Processes for a benchmark, a lecture or a test: a function on every rank of a grid, in real
processes with the groups made."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pathlib
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.distributed.groups import Grid

# One server process imports torch once; it forks a rank in milliseconds, where a new interpreter
# takes seconds.
PRELOADED = ["nanovllm.lab.processes", "nanovllm.models.loader"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOMP_CPU_AFFINITY",
)


class RankError(RuntimeError):
    """A rank raised an error, died, or did not end in time; the message says which rank and why."""


def python_environment() -> dict[str, str]:
    """Environment variables under which another Python finds this package, even in a checkout
    without installation, and chooses its number of threads itself."""
    found = {name: value for name, value in os.environ.items() if name not in _THREAD_VARIABLES}
    package_home = str(pathlib.Path(__file__).parents[2])
    paths = [package_home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    function: Callable[..., Any],
    grid: Grid,
    *arguments: Any,
    timeout: float = 600.0,
    threads: int = 1,
    device: str = "cpu",
    return_failures: bool = False,
    collective_timeout: float = 120.0,
    disable_custom_all_reduce: bool = False,
) -> list[Any]:
    """Run `function(*arguments)` in one process per rank of the grid, with the groups initialized,
    and wait for all.

    Args:
        function: of a module, because it is pickled by its name; arguments and results are pickled
            too.
        timeout: seconds after which all ranks are killed.
        threads: of torch, per process.
        device: "cpu", or "cuda" for a GPU per rank.
        return_failures: return a `RankError` as the result of a rank that failed, instead of
            raising it.
        collective_timeout, disable_custom_all_reduce: of the groups, see `initialize_groups`.

    Returns:
        The result of each rank, in the order of the ranks.

    Raises:
        RankError: a rank failed; all others are killed.
    """
    settings: dict[str, Any] = {
        "grid": grid,
        "timeout": collective_timeout,
        "disable_custom_all_reduce": disable_custom_all_reduce,
    }
    work = functools.partial(function, *arguments)
    with (
        tempfile.TemporaryDirectory(prefix="nanovllm-ranks-") as folder,
        contextlib.ExitStack() as at_the_end,
    ):
        settings["init_method"] = f"file://{pathlib.Path(folder) / 'rendezvous'}"
        pipes = []
        for rank in range(grid.world_size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            settings |= {"rank": rank, "device": f"cuda:{rank}" if device == "cuda" else device}
            # The server forked from an earlier environment, so the present one is sent.
            sent = (settings, threads, work, dict(os.environ), theirs)
            process = CONTEXT.Process(target=_run_rank, args=sent, name=f"rank {rank}", daemon=True)
            process.start()
            at_the_end.callback(process.join)
            at_the_end.callback(process.kill)  # callbacks run in reverse order
            theirs.close()
            pipes.append(ours)
        return _collect(pipes, timeout, return_failures)


def _collect(pipes: list[Connection], timeout: float, return_failures: bool) -> list[Any]:
    results: dict[int, Any] = {}
    pending = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        failures = (
            {}
            if ready
            else {r: f"rank {r} has not ended after {timeout:g} s" for r in pending.values()}
        )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                error, results[rank] = pickle.loads(pipe.recv_bytes())
                if error:
                    failures[rank] = f"rank {rank} failed:\n{error}"
            except EOFError:
                failures[rank] = f"rank {rank} died"
        if failures and not return_failures:
            raise RankError("\n".join(failures.values()))
        results |= {rank: RankError(message) for rank, message in failures.items()}
        if not ready:
            break
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    settings: dict[str, Any],
    threads: int,
    work: Callable[[], Any],
    environment: dict[str, str],
    answer: Connection,
) -> None:
    """The main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends all ranks
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from nanovllm.distributed.process_groups import destroy_groups, initialize_groups

    torch.set_num_threads(threads)
    try:
        initialize_groups(**settings)
        message = pickle.dumps(("", work()))
        destroy_groups()
    except BaseException:
        message = pickle.dumps((traceback.format_exc(), None))
    answer.send_bytes(message)
