"""Ranks that go wrong: `python -m tests.rank_faults FD` runs as `nanovllm.worker`, but for what RANK_FAULT says:
"1 construct raise" is an exception on rank 1 while it loads, "0 launch exit" the end of rank 0 in its fifth step."""

from __future__ import annotations

import os
import sys
from typing import Any

from nanovllm import worker
from nanovllm.worker import Worker, WorkerSetup

EXIT_CODE = 7
STEPS_BEFORE = 4


def go_wrong(how: str) -> None:
    """Do what the last word says."""
    if how == "exit":
        os._exit(EXIT_CODE)
    raise {"raise": RuntimeError, "refuse": ValueError}[how]("this rank has no luck")


class FaultyWorker(Worker):
    """A worker in which something goes wrong."""

    def __init__(self, setup: WorkerSetup) -> None:
        rank, self.place, self.how = os.environ["RANK_FAULT"].split()
        self.is_faulty = setup.rank == int(rank)
        self.num_steps = 0
        if self.is_faulty and self.place == "construct":
            go_wrong(self.how)
        super().__init__(setup)

    def launch(self, *arguments: Any) -> Any:
        """A step, if all goes well."""
        self.num_steps += 1
        if self.is_faulty and self.place == "launch" and self.num_steps > STEPS_BEFORE:
            go_wrong(self.how)
        return super().launch(*arguments)


if __name__ == "__main__":
    worker.Worker = FaultyWorker  # type: ignore[misc]
    sys.exit(worker.main())
