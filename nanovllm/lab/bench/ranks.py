"""Real processes for a measurement: a function of the package runs on every rank of a grid, with the groups made.

(`nanovllm.lab.course.ranks` does the same for lectures, whose functions have to be sent by value.)
"""

from __future__ import annotations

import multiprocessing
import pathlib
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from nanovllm.distributed.groups import Grid

#: Nothing that is measured takes so long.
LIMIT_SECONDS = 600.0


class RankFailed(RuntimeError):
    """A rank raised an error, died, or did not end in time; the message says which one and why."""


def run_ranks(
    function: Callable[..., Any],
    grid: Grid,
    *arguments: Any,
    threads: int = 1,
    device: str = "cpu",
    gloo_only: bool = False,
    timeout: float = LIMIT_SECONDS,
) -> list[Any]:
    """Run `function(*arguments)` on each rank of the grid, in processes of their own; what each returned, by rank.

    Args:
        function: of a module, since it is sent by its name; arguments and results are pickled.
        threads: of torch, in each process.
        device: "cpu", or "cuda" for a GPU a rank.
        gloo_only: sum by gloo, not in shared memory.

    Raises:
        RankFailed: one did; all others have been ended.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as folder:
        settings = {
            "grid": grid,
            "init_method": f"file://{pathlib.Path(folder) / 'rendezvous'}",
            "disable_custom_all_reduce": gloo_only,
            "timeout": min(timeout, 120.0),
        }
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


def run_alone(function: Callable[..., Any], *arguments: Any, threads: int = 1) -> Any:
    """The same in one process: what it computes with, and leaves behind, is gone afterwards."""
    return run_ranks(function, Grid(), *arguments, threads=threads)[0]


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
    """What each process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends all
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
