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

from nanovllm.data.config import EngineConfig
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.distributed import groups
from nanovllm.distributed.groups import GroupCoordinator
from nanovllm.distributed.stage_link import StageLink
from nanovllm.executor.base import Executor
from nanovllm.executor.uniproc import Worker
from nanovllm.models.config import ModelConfig
from nanovllm.runner.memory import num_blocks_that_fit
from nanovllm.runner.runner import ModelRunner
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
        super().__init__(link.hidden_size, link.dtype, link.device)
        self.wires = wires

    def receive(self, num_tokens: int) -> Tensor | None:
        if self.group.is_first:
            return None
        hidden = self.wires[self.group.rank_in_group - 1].popleft()
        assert len(hidden) == num_tokens
        return hidden

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
        self.runners: list[ModelRunner] = []
        for _ in self._in_turn():
            runner = ModelRunner(config, model_config, folder)
            if runner.link is not None:
                runner.link = Wire(runner.link, self.wires)
            self.runners.append(runner)
        self.runner = self.runners[-1]
        self.launch = self._launch  # type: ignore[method-assign]
        self.bytes_per_block = max(runner.bytes_per_block for _, runner in self._each())

    def _in_turn(self) -> Iterator[int]:
        for stage in range(self.stages):
            with as_stage(self.stages, stage):
                yield stage

    def _each(self) -> Iterator[tuple[int, ModelRunner]]:
        for stage in self._in_turn():
            yield stage, self.runners[stage]

    @property
    def num_blocks(self) -> int:  # type: ignore[override]
        return min(num_blocks_that_fit(runner) for _, runner in self._each())

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        for _, runner in self._each():
            runner.allocate(num_blocks, num_host_blocks)

    def _launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        waits = [runner.launch(schedule) for _, runner in self._each()]
        for wait in waits[:-1]:
            assert wait() == ModelRunnerOutput(), "only the last stage samples"
        return waits[-1]

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        if method == "describe":  # a worker's method, not a runner's
            return [Worker.describe(self) for _ in self._in_turn()]  # type: ignore[arg-type]
        return [getattr(runner, method)(*arguments) for _, runner in self._each()]

    def forget_requests(self) -> None:
        for _, runner in self._each():
            runner.forget_requests()
        for wire in self.wires:
            wire.clear()


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from here on keep all stages in this process."""
    set_executor(monkeypatch, StagedExecutor)
