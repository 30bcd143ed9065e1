"""All stages of a pipeline in this process, one after another in each step, with queues in place of
the lines between them. Results are still fetched as late as in a real one, so scheduler and engine
see no difference."""

from __future__ import annotations

import contextlib
import pathlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from nanovllm.assembly.runner import create_worker
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.distributed import groups
from nanovllm.distributed.groups import GroupCoordinator
from nanovllm.distributed.stage_link import StageLink
from nanovllm.executor.base import Executor
from nanovllm.executor.uniproc import Worker, WorkerFunction, WorkerSetup
from nanovllm.features.pipeline.stage import StageForward
from nanovllm.models.config import ModelConfig
from tests.stand_ins import set_executor


@contextlib.contextmanager
def as_stage(stages: int, stage: int) -> Iterator[GroupCoordinator]:
    """For so long, this process is one stage of several; it cannot talk to the others."""
    before = groups.own_groups["pp"]
    groups.own_groups["pp"] = GroupCoordinator("pp", list(range(stages)), stage)
    try:
        yield groups.own_groups["pp"]
    finally:
        groups.own_groups["pp"] = before


class Wire(StageLink):
    """A line within this process."""

    def __init__(self, link: StageLink, wires: list[deque[Tensor]]) -> None:
        super().__init__(link.dtype, link.device)
        self.wires = wires

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(self.wires[self.group.rank_in_group - 1].popleft())

    def send(self, hidden: Tensor) -> None:
        self.wires[self.group.rank_in_group].append(hidden.clone())


class StagedExecutor(Executor):
    """Runs each step through all stages as soon as it is launched."""

    on_gpu = False

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
    ) -> None:
        self.stages = config.pipeline_parallel_size
        self.wires: list[deque[Tensor]] = [deque() for _ in range(self.stages)]
        self.workers: list[Worker] = []
        for _ in self._in_turn():
            worker = create_worker(WorkerSetup(config, model_config, folder, create_worker))
            if isinstance(forward := worker.runner.forward, StageForward):
                forward.link = Wire(forward.link, self.wires)
            self.workers.append(worker)
        self.runner = self.workers[-1].runner
        self.launch = self._launch  # type: ignore[method-assign]
        self._take_memory()

    def _in_turn(self) -> Iterator[int]:
        for stage in range(self.stages):
            with as_stage(self.stages, stage):
                yield stage

    def _each(self) -> Iterator[Worker]:
        for stage in self._in_turn():
            yield self.workers[stage]

    def _launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        waits = [worker.launch(plan) for worker in self._each()]
        for wait in waits[:-1]:
            assert wait() == ModelRunnerOutput(), "only the last stage samples"
        return waits[-1]

    def collective_rpc(self, method: str | WorkerFunction, *arguments: Any) -> list[Any]:
        return [worker.call(method, *arguments) for worker in self._each()]

    def forget_requests(self) -> None:
        super().forget_requests()
        for wire in self.wires:
            wire.clear()


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from here on keep all stages in this process."""
    set_executor(monkeypatch, StagedExecutor)
