"""Where the time of a decode step goes, read from a trace of torch's profiler."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Interval = tuple[float, float]

# A GPU waits about a microsecond between two kernels of one graph. A longer wait is the host's doing.
HOST_GAP_MICROSECONDS = 5.0
# What runs on the GPU, in a trace; and what a dry run on a CPU has instead.
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CPU_CATEGORIES = ("cpu_op",)

# The first that matches names the kind. Names are those of kernels: ours, torch's, cuBLAS's, cuDNN's and CUTLASS's.
KINDS = {
    "attention": r"attention|attend|combine_kernel|write_kv|flash_fwd|fmha",
    "sampling": r"argmax|arg_max|softmax|topk|sort|multinomial|cumsum|sampl",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|::linear|::mm\b|::addmm",
}
OTHER = "other kernels"


@dataclass
class StepSplit:
    """Shares of the time from the first kernel's start to the last one's end.

    Attributes:
        seconds: of all steps together.
        shares: by kind of kernel.
        launch_gaps: waits of at most `HOST_GAP_MICROSECONDS`.
        host_gaps: longer waits: the GPU has nothing to do until the host comes.
        busiest: the kernels that took most, and their shares.
    """

    seconds: float
    shares: dict[str, float] = field(default_factory=dict)
    launch_gaps: float = 0.0
    host_gaps: float = 0.0
    busiest: list[tuple[str, float]] = field(default_factory=list)


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def read_trace(path: pathlib.Path) -> list[dict[str, Any]]:
    """The events of a file in Chrome's trace format, as `profile.export_chrome_trace` writes it."""
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def split_steps(events: Sequence[dict[str, Any]], categories: tuple[str, ...] = GPU_CATEGORIES) -> StepSplit:
    """Split the time of a trace. Overlapping events count once, those of an earlier kind in `KINDS` first.

    Raises:
        ValueError: the trace has no event of these categories.
    """
    intervals: dict[str, list[Interval]] = {kind: [] for kind in (*KINDS, OTHER)}
    by_name: dict[str, float] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in categories:
            begin, duration = float(event["ts"]), float(event["dur"])
            intervals[kind_of(event["name"])].append((begin, begin + duration))
            by_name[event["name"]] = by_name.get(event["name"], 0.0) + duration
    busy: list[Interval] = []
    shares, covered = {}, 0.0
    for kind, found in intervals.items():
        busy = _union([*busy, *found])
        shares[kind] = _length(busy) - covered
        covered += shares[kind]
    if not busy:
        raise ValueError(f"the trace has no {' or '.join(categories)}")
    window = busy[-1][1] - busy[0][0]
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(busy)]
    busiest = sorted(by_name.items(), key=lambda item: -item[1])[:8]
    return StepSplit(
        window / 1e6,
        {kind: time / window for kind, time in shares.items()},
        sum(gap for gap in gaps if gap <= HOST_GAP_MICROSECONDS) / window,
        sum(gap for gap in gaps if gap > HOST_GAP_MICROSECONDS) / window,
        [(name[:120], time / window) for name, time in busiest],
    )


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same stretches of time, in order and without overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
