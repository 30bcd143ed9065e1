"""Real processes for a lecture or a test: `run_ranks(function, Grid(tensor=2))` runs a function on every rank of a grid."""

from __future__ import annotations

import contextlib
import copyreg
import multiprocessing
import os
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

from nanovllm.distributed.groups import Grid, destroy_groups, initialize_groups

# One server process imports torch once; it forks a rank in milliseconds, where a new interpreter takes seconds.
PRELOADED = ["nanovllm.lab.course.ranks", "nanovllm.models.loader"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)

# cloudpickle takes the words `torch` and `ops` in a function for torch.ops, which has no pickle of its own.
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
    """Run `function(*arguments)` in one process per rank of the grid, with the groups initialized, and wait for all.

    Args:
        function: may be defined in a notebook or a test: it is sent by value.
        timeout: seconds after which all ranks are killed.
        threads: of torch, per process.
        collective_timeout, disable_custom_all_reduce: of the groups, see `initialize_groups`.
        return_failures: return a `RankError` as the result of a rank that failed, instead of raising it.

    Returns:
        The result of each rank, in the order of the ranks.

    Raises:
        RankError: a rank raised, died, or did not end in time; all others are killed.
    """
    settings = {"grid": grid, "timeout": collective_timeout, "disable_custom_all_reduce": disable_custom_all_reduce}
    with tempfile.TemporaryDirectory(prefix="nanovllm-ranks-") as folder, contextlib.ExitStack() as at_the_end:
        settings["init_method"] = f"file://{pathlib.Path(folder) / 'rendezvous'}"
        work, pipes = _by_value(function, arguments, settings), []
        for rank in range(grid.world_size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            # The server forked from an earlier environment, so the present one is sent.
            process = CONTEXT.Process(
                target=_run_rank, args=(rank, threads, work, dict(os.environ), theirs), name=f"rank {rank}", daemon=True
            )
            process.start()
            at_the_end.callback(process.join)
            at_the_end.callback(process.kill)  # callbacks run in reverse order
            theirs.close()
            pipes.append(ours)
        return _collect(pipes, timeout, return_failures)


def _by_value(function: Callable[..., Any], *others: Any) -> bytes:
    """Pickle a function: by name if it belongs to the package, else by value with what it uses of its module."""
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


def _run_rank(rank: int, threads: int, work: bytes, environment: dict[str, str], pipe: Connection) -> None:
    """The main function of a rank's process."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        function, arguments, settings = cloudpickle.loads(work)
        initialize_groups(rank=rank, local_rank=rank, **settings)
        answer = (False, function(*arguments))
        destroy_groups()
    except BaseException:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(cloudpickle.dumps(answer))
