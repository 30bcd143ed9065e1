"""Processes for a benchmark, a lecture or a test: a function on every rank of a grid, in real processes with the groups made."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
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

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_CPU_AFFINITY")


class RankFailed(RuntimeError):
    """A rank raised an error, died, or did not end in time; the message says which rank and why."""


def python_environment() -> dict[str, str]:
    """Environment variables under which another Python finds this package, even in a checkout without installation, and
    chooses its number of threads itself."""
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
    threads: int = 1,
    device: str = "cpu",
    timeout: float = 600.0,
    collective_timeout: float = 120.0,
    disable_custom_all_reduce: bool = False,
) -> list[Any]:
    """Run `function(*arguments)` on each rank of the grid, in processes of their own; returns the results by rank.

    Args:
        function: of a module, because it is pickled by its name; arguments and results are pickled too.
        threads: of torch, in each process.
        device: "cpu", or "cuda" for a GPU per rank.
        timeout: seconds after which all ranks are killed.
        collective_timeout, disable_custom_all_reduce: of the groups, see `initialize_groups`.

    Raises:
        RankFailed: a rank failed; all others have been killed.
    """
    context = multiprocessing.get_context("spawn")
    settings = {"grid": grid, "timeout": collective_timeout, "disable_custom_all_reduce": disable_custom_all_reduce}
    with tempfile.TemporaryDirectory(prefix="nanovllm-ranks-") as folder:
        settings["init_method"] = f"file://{pathlib.Path(folder) / 'rendezvous'}"
        answers, processes = [], []
        try:
            for rank in range(grid.world_size):
                ours, theirs = context.Pipe(duplex=False)
                work = (rank, settings, threads, device, function, arguments, theirs)
                processes.append(context.Process(target=_run_rank, args=work, name=f"rank {rank}"))
                processes[-1].start()
                theirs.close()
                answers.append(ours)
            return _collect(answers, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(answers: list[Connection], timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    pending, deadline = dict(zip(answers, range(len(answers)), strict=True)), time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank {min(pending.values())} has not ended after {timeout:g} s")
        errors = []
        for answer in ready:
            assert isinstance(answer, Connection)
            rank = pending.pop(answer)
            try:
                error, found[rank] = answer.recv()
            except EOFError:
                error = "it died"
            if error:
                errors.append(f"rank {rank} failed: {error}")
        if errors:
            raise RankFailed("\n".join(errors))
    return [found[rank] for rank in range(len(answers))]


def _run_rank(
    rank: int,
    settings: dict[str, Any],
    threads: int,
    device: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    answer: Connection,
) -> None:
    """The main function of each process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends all ranks
    import torch

    from nanovllm.distributed.groups import destroy_groups, initialize_groups

    torch.set_num_threads(threads)
    try:
        own_device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        initialize_groups(rank=rank, local_rank=rank, device=own_device, **settings)
        result = function(*arguments)
        destroy_groups()
    except BaseException:
        answer.send((traceback.format_exc(), None))
    else:
        answer.send(("", result))
