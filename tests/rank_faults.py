"""Ranks that go wrong: `RANK` runs in the place of `RemoteExecutor.program`, and does the same but
for what RANK_FAULT says.

"1 construct raise" is an exception on rank 1 while it loads, "0 launch exit" the end of rank 0 in
its fifth step, "1 launch hang 60" a thread that waits for ever after 60 steps, "0 launch burn" a
fifth step that takes long, "1 launch skip" a fifth step that rank 1 leaves out, "1 launch barrier"
one in which it calls a collective that the others do not, "1 wave skip" an engine in lock-step that
starts no wave."""

from __future__ import annotations

import functools
import os
import pathlib
import threading
import time
from typing import Any

from nanovllm.assembly import engine as engine_assembly
from nanovllm.assembly import runner as runner_assembly
from nanovllm.core.schedule import ModelRunnerOutput
from nanovllm.distributed.groups import get_world_group
from nanovllm.executor.uniproc import Worker, WorkerSetup
from nanovllm.features.data_parallel.waves import Waves
from tests.supervision.silence import set_silence

EXIT_CODE = 7
BURN_SECONDS = 2.5
ROOT = pathlib.Path(__file__).parents[1]


class Fault:
    """What goes wrong, and where.

    Args:
        rank: the one that asks.
    """

    def __init__(self, rank: int | None) -> None:
        victim, self.place, self.how, *steps = os.environ["RANK_FAULT"].split()
        self.is_here = rank == int(victim)
        self.steps_before = int(steps[0]) if steps else 4
        if self.how == "burn":  # so that it takes long in comparison
            set_silence(1.0)

    def strike(self, place: str) -> bool:
        """Go wrong, if this is the place and the time. True if what was to be done must be left
        out."""
        if not self.is_here or place != self.place:
            return False
        if place == "launch":
            self.steps_before -= 1
            if self.steps_before != -1:
                return False
        if self.how == "exit":
            os._exit(EXIT_CODE)
        elif self.how == "hang":
            threading.Event().wait()
        elif self.how == "burn":
            end = time.thread_time() + BURN_SECONDS
            while time.thread_time() < end:
                pass
        elif self.how == "barrier":
            get_world_group().barrier()
        elif self.how != "skip":
            raise {"raise": RuntimeError, "refuse": ValueError}[self.how]("this rank has no luck")
        return self.how == "skip"


create_worker = runner_assembly.create_worker


@functools.wraps(create_worker)  # so that it is pickled under the same name
def create_faulty_worker(setup: WorkerSetup) -> Worker:
    """A worker in which something goes wrong."""
    fault = Fault(setup.rank)
    fault.strike("construct")
    if fault.strike("wave"):
        Waves.start = lambda waves, wave: None  # type: ignore[method-assign]
    worker = create_worker(setup)
    launch = worker.launch

    def launch_if_all_goes_well(*arguments: Any) -> Any:
        return ModelRunnerOutput if fault.strike("launch") else launch(*arguments)

    worker.launch = launch_if_all_goes_well  # type: ignore[method-assign]
    return worker


def install() -> None:
    """Let everything that this process starts as a rank or an engine be faulty."""
    runner_assembly.create_worker = create_faulty_worker
    engine_assembly.create_worker = create_faulty_worker


def environment(folder: pathlib.Path, fault: str) -> dict[str, str]:
    """Variables with which a server's ranks are faulty. Python looks for a module of this name when
    it starts."""
    folder.joinpath("sitecustomize.py").write_text(
        "import os, sys\n"
        # torchrun sets the latter
        "if 'nanovllm.executor.worker' in ' '.join(sys.orig_argv) or 'RANK' in os.environ:\n "
        "   from tests.rank_faults import install\n "
        "   install()\n"
    )
    return {"PYTHONPATH": f"{folder}:{ROOT}", "RANK_FAULT": fault}


# What runs as a rank, and as one of several engines.
RANK = (
    "from tests.rank_faults import install; install(); from nanovllm.executor.worker import main; "
    "main()"
)
DATA_RANK = (
    "from tests.rank_faults import install; install(); from nanovllm.engine.client import main; "
    "main()"
)
