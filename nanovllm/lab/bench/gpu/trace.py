"""Splits the time of decode steps by kind of kernel and by gap, from a trace of torch's profiler."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

Interval = tuple[float, float]

# A GPU waits about a microsecond between two kernels of one graph. A longer wait is the host's doing.
HOST_GAP_MICROSECONDS = 5.0
# The categories of events on the GPU in a trace; and what a dry run on a CPU has instead.
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CPU_CATEGORIES = ("cpu_op",)

# The first pattern that matches names the kind. Kernels are nanovllm's, torch's, cuBLAS's, cuDNN's and CUTLASS's.
KINDS = {
    "attention": r"attention|attend|combine_kernel|write_kv|flash_fwd|fmha",
    "sampling": r"argmax|arg_max|softmax|topk|sort|multinomial|cumsum|sampl",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|::linear|::mm\b|::addmm",
}
OTHER = "other kernels"


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def split_steps(events: Sequence[dict[str, Any]], categories: tuple[str, ...] = GPU_CATEGORIES) -> dict[str, Any]:
    """Split the time from the first kernel's start to the last one's end, in percent. Overlapping events count once, those of
    an earlier kind in `KINDS` first.

    Args:
        events: of Chrome's trace format.

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
    if not by_name:
        raise ValueError(f"the trace has no {' or '.join(categories)}")
    busy: list[Interval] = []
    lengths: dict[str, float] = {}
    for kind, found in intervals.items():
        busy = _union([*busy, *found])
        lengths[kind] = sum(end - begin for begin, end in busy) - sum(lengths.values())
    window = busy[-1][1] - busy[0][0]
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(busy)]
    host = sum(gap for gap in gaps if gap > HOST_GAP_MICROSECONDS)
    return {
        "ms": window / 1e3,
        **{f"{kind} %": 100 * length / window for kind, length in lengths.items()},
        "between kernels %": 100 * (sum(gaps) - host) / window,
        "host gap %": 100 * host / window,
        "busiest": max(by_name, key=lambda name: by_name[name])[:60],
    }


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same stretches of time, in order and without overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
