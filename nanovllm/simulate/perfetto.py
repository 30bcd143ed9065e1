"""The steps and requests of a simulated fleet as Chrome trace events, which ui.perfetto.dev
opens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.disk import writing
from nanovllm.data.request import EngineOutput
from nanovllm.simulate.engine import SimulatedEngine, StepInFlight
from nanovllm.simulate.lock_step import LockStepEngine
from nanovllm.simulate.requests import SimulatedRequest
from nanovllm.simulate.workload import SECOND
from nanovllm.trace.perfetto import trace_events
from nanovllm.trace.record import StepRecord
from nanovllm.trace.recorder import StepRecorder
from nanovllm.trace.trace import Trace


class RecordedEngine(LockStepEngine):
    """An engine that records its steps in memory, like a real engine."""

    @cached_property
    def trace(self) -> Trace:
        """The records so far."""
        return Trace()

    @cached_property
    def _recorder(self) -> StepRecorder:
        return StepRecorder(self.trace, self.scheduler)

    @cached_property
    def _records(self) -> deque[StepRecord]:
        return deque()

    def arrive(self, request: SimulatedRequest, now: int) -> bool:
        """Queue a request."""
        self._recorder.arrived(request, now / SECOND)
        return super().arrive(request, now)

    def finish_alone(self) -> list[SimulatedRequest]:
        """Take the result that arrives at `end`."""
        ended = super().finish_alone()
        for request in ended:
            if request.finish_reason == "abort":
                self._recorder.ended(request.request_id, "abort")
        return ended

    def _launch(self, plan: SchedulerOutput, now: int) -> None:
        self._records.append(self._recorder.begin(plan, self.counters.num_steps, 0.0))
        super()._launch(plan, now)
        self._records[-1].start = self._in_flight[-1].start / SECOND

    def _take(self, step: StepInFlight) -> list[SimulatedRequest]:
        ended = super()._take(step)
        outputs = [
            EngineOutput(each.request_id, finish_reason=each.finish_reason) for each in ended
        ]
        self._recorder.finish(
            self._records.popleft(), (step.end - step.start) / SECOND, self.result, outputs
        )
        return ended


def write_events(path: Path, engines: Sequence[SimulatedEngine]) -> None:
    """Write the records of all engines, which are `RecordedEngine`s, each as a process."""
    encode = msgspec.json.encode
    with writing(path), open(path, "wb") as file:
        file.write(b'{"traceEvents": [\n')
        for number, engine in enumerate(engines, start=1):
            name = {"ph": "M", "pid": number, "name": "process_name"}
            file.write(encode(name | {"args": {"name": f"engine {number - 1}"}}))
            assert isinstance(engine, RecordedEngine)
            for event in trace_events(engine.trace):
                file.write(b",\n" + encode({"pid": number, **event}))
            file.write(b"\n" if number == len(engines) else b",\n")
        file.write(b"]}\n")
