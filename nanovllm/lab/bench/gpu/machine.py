"""The time of work on a GPU, and the two ceilings that results are compared with."""

import contextlib
import importlib.metadata
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator

import torch

from nanovllm.lab.bench.metrics import timed
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row

_SMI_FIELDS = (
    "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,clocks.sm,"
    "power.limit,temperature.gpu"
)
# More than the L2 cache of any GPU there is.
_FLUSH_BYTES = 2**28
_WARM_UP = 3


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """The median time of some work, each time with a cold L2 cache.

    On a GPU the work is queued while the GPU still overwrites its cache, which takes at least as
    long as queueing: the events before and after the work then measure the GPU's time alone, not
    Python's. On a CPU (a dry run) it is the host's clock."""
    if device.type == "cpu":
        work()
        return timed(work)
    for _ in range(_WARM_UP):
        work()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    queueing = max(timed(work) for _ in range(_WARM_UP))
    torch.cuda.synchronize()
    flushing = _gpu_seconds([_between_events(lambda: [flush.fill_(1) for _ in range(4)])]) / 4
    rounds = max(1, round(2 * queueing / flushing))
    pairs = []
    for _ in range(repeats):
        for _ in range(rounds):
            flush.fill_(0)
        pairs.append(_between_events(work))
    return _gpu_seconds(pairs)


def _between_events(work: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    return start, end


def _gpu_seconds(pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """The median time between two events."""
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1000


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a copy within the device's memory, counting read and written ones."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device)


def matrix_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOPs per second of a product of two square matrices of random numbers (zeros would be
    faster)."""
    first, second = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: first @ second, device)


def machine(setting: Setting) -> Iterator[Row]:
    """Facts about the machine, and the ceilings of this run."""
    device = setting.device
    for name, value in _facts(device):
        yield {"table": "The machine", "what": name, "value": value}
    sizes = (2**24, 256) if setting.dry_run else (2**32, 8192)
    if device.type == "cuda":  # two buffers, and half of the memory left over
        sizes = (min(sizes[0], torch.cuda.mem_get_info()[0] // 4), sizes[1])
    ceilings = {
        "bytes_per_second": (
            "GB/s of copying (read and written)",
            1e9,
            copy_bandwidth(device, sizes[0]),
        ),
        "flops_per_second": (
            "TFLOP/s in bfloat16",
            1e12,
            matrix_peak(device, torch.bfloat16, sizes[1]),
        ),
    }
    for limit, (unit, factor, rate) in ceilings.items():
        yield {
            "table": "Measured ceilings",
            "limit": limit,
            "value": rate,
            "that is": rate / factor,
            "unit": unit,
        }


def _facts(device: torch.device) -> Iterator[tuple[str, str]]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield "compute capability", f"{properties.major}.{properties.minor}"
        yield "multiprocessors", str(properties.multi_processor_count)
        yield "CUDA of torch", str(torch.version.cuda)
        if smi := shutil.which("nvidia-smi"):
            command = [smi, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader", "--id=0"]
            values = (
                subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")
            )
            yield from zip(_SMI_FIELDS.split(","), values, strict=False)
    for name in ("triton", "transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
