"""The steps and requests of a simulated fleet as Chrome trace events, which ui.perfetto.dev
opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nanovllm.data.disk import writing
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.trace.perfetto import trace_events
from nanovllm.trace.recorder import StepRecorder
from nanovllm.trace.trace import Trace


def record_steps(engines: Sequence[SimulatedEngine]) -> list[Trace]:
    """Record the steps of engines, which make them one by one, in memory. Returns a trace per
    engine, which is still empty."""
    traces = [Trace() for _ in engines]
    for engine, trace in zip(engines, traces, strict=True):
        engine.recorder = StepRecorder(trace, engine.scheduler)
    return traces


def write_events(path: Path, traces: Sequence[Trace]) -> None:
    """Write the records of all engines, each as a process."""
    encode = msgspec.json.encode
    with writing(path), open(path, "wb") as file:
        file.write(b'{"traceEvents": [\n')
        for number, trace in enumerate(traces, start=1):
            name = {"ph": "M", "pid": number, "name": "process_name"}
            file.write(encode(name | {"args": {"name": f"engine {number - 1}"}}))
            for event in trace_events(trace):
                file.write(b",\n" + encode({"pid": number, **event}))
            file.write(b"\n" if number == len(traces) else b",\n")
        file.write(b"]}\n")
