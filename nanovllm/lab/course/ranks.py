"""Real processes for a lecture or a test: `run_ranks(function, Grid(tensor=2))` runs a function on every rank of a grid."""

from __future__ import annotations

import copyreg
import multiprocessing
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch

from nanovllm.distributed.groups import Grid

# To cloudpickle, a function with the words `torch` and `ops` in it might mean torch.ops, which has no pickle of its own.
copyreg.pickle(type(torch.ops), lambda module: (getattr, (torch, "ops")))


class RankError(RuntimeError):
    """A rank failed; the message has its traceback."""


def run_ranks(
    function: Callable[..., Any],
    grid: Grid,
    *arguments: Any,
    timeout: float = 100.0,
    threads: int = 1,
    collective_timeout: float = 60.0,
    disable_custom_all_reduce: bool = False,
    return_failures: bool = False,
) -> list[Any]:
    """Run `function(*arguments)` in a process for each rank of the grid, with the groups made; wait for all.

    Args:
        function: also one that a notebook or a test defines: it is sent by value.
        timeout: seconds after which all are killed.
        threads: of torch, in each process.
        collective_timeout, disable_custom_all_reduce: of the groups, see `initialize_groups`.
        return_failures: put a `RankError` in the place of what a rank that failed would have returned.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        RankError: a rank raised, died, or did not end in time; all others are killed.
    """
    settings = {"grid": grid, "timeout": collective_timeout, "disable_custom_all_reduce": disable_custom_all_reduce}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="nanovllm-ranks-") as folder:
        settings["init_method"] = f"file://{pathlib.Path(folder) / 'rendezvous'}"
        work = _by_value(function, arguments, settings)
        pipes, processes = [], []
        try:
            for rank in range(grid.world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank, args=(rank, threads, work, theirs), name=f"rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, timeout, return_failures)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _by_value(function: Callable[..., Any], *others: Any) -> bytes:
    """Functions of the package are imported by the rank; all others are sent, with what they use of their module."""
    module = sys.modules.get(function.__module__)
    if module is None or module.__name__.partition(".")[0] in ("__main__", "nanovllm"):
        return cloudpickle.dumps((function, *others))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, *others))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _collect(pipes: list[Connection], timeout: float, return_failures: bool) -> list[Any]:
    results: dict[int, Any] = {}
    pending = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        failures = {} if ready else {r: f"rank {r} has not ended after {timeout:g} s" for r in pending.values()}
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                failed, results[rank] = cloudpickle.loads(pipe.recv_bytes())
                if failed:
                    failures[rank] = f"rank {rank} failed:\n{results[rank]}"
            except EOFError:
                failures[rank] = f"rank {rank} died"
        if failures and not return_failures:
            raise RankError("\n".join(failures.values()))
        results |= {rank: RankError(message) for rank, message in failures.items()}
        if not ready:
            break
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(rank: int, threads: int, work: bytes, pipe: Connection) -> None:
    """What each process does."""
    import torch

    from nanovllm.distributed.groups import destroy_groups, initialize_groups

    torch.set_num_threads(threads)
    try:
        function, arguments, settings = cloudpickle.loads(work)
        initialize_groups(rank=rank, local_rank=rank, **settings)
        answer = (False, function(*arguments))
        destroy_groups()
    except BaseException:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(cloudpickle.dumps(answer))
