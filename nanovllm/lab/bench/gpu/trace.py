"""Splits the time of decode steps by kind of kernel and by gap, from a trace of torch's
profiler."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

# A GPU waits about a microsecond between two kernels of one graph. A longer wait is the host's
# doing.
HOST_GAP_MICROSECONDS = 5.0
# The categories of events on the GPU in a trace; and what a dry run on a CPU has instead.
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CPU_CATEGORIES = ("cpu_op",)

# The first pattern that matches names the kind. Kernels are nanovllm's, torch's, cuBLAS's, cuDNN's
# and CUTLASS's.
KINDS = {
    "attention": r"attention|attend|combine_kernel|write_kv|flash_fwd|fmha",
    "sampling": r"argmax|arg_max|softmax|topk|sort|multinomial|cumsum|sampl",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|::linear|::mm\b|::addmm",
}
OTHER = "other kernels"
HOST_GAP = "host gap %"


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER
    )


def split_steps(
    events: Sequence[dict[str, Any]], categories: tuple[str, ...] = GPU_CATEGORIES
) -> dict[str, Any]:
    """Split the time from the first kernel's start to the last one's end, in percent. Overlapping
    events count once, those of an earlier kind in `KINDS` first.

    Args:
        events: of Chrome's trace format.

    Raises:
        ValueError: the trace has no event of these categories.
    """
    found = [event for event in events if event.get("ph") == "X" and event.get("cat") in categories]
    if not found:
        raise ValueError(f"the trace has no {' or '.join(categories)}")
    kinds = [*KINDS, OTHER]
    by_name = Counter[str]()
    begins = np.array([float(event["ts"]) for event in found])
    ends = begins + [float(event["dur"]) for event in found]
    # Between two neighbouring edges nothing begins or ends: there is one kind of event, or a gap.
    edges = np.unique([begins, ends])
    kind_between = np.full(len(edges) - 1, len(kinds))
    for event, first, last in zip(found, *np.searchsorted(edges, [begins, ends]), strict=True):
        by_name[event["name"]] += event["dur"]
        covered = kind_between[first:last]
        np.minimum(covered, kinds.index(kind_of(event["name"])), out=covered)
    window = edges[-1] - edges[0]
    widths = np.diff(edges)
    *lengths, gaps = np.bincount(kind_between, widths, len(kinds) + 1)
    host = widths[(kind_between == len(kinds)) & (widths > HOST_GAP_MICROSECONDS)].sum()
    return {
        "ms": window / 1e3,
        **{f"{kind} %": 100 * length / window for kind, length in zip(kinds, lengths, strict=True)},
        "between kernels %": 100 * (gaps - host) / window,
        HOST_GAP: 100 * host / window,
        "busiest": by_name.most_common(1)[0][0][:60],
    }
