"""The machine: its name, its limits, and the load on it during a measurement."""

import contextlib
import functools
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil

from nanovllm.lab.bench.metrics import timed
from nanovllm.lab.processes import run_ranks


@dataclass
class Limits:
    """The roofs.

    Attributes:
        bytes_per_second: read from memory, with all threads.
        flops_per_second: of a matrix product, with all threads.
        dtype: that of the product; "auto" resolved as the engine does.
        bytes_per_number: of the dtype.
    """

    bytes_per_second: float
    flops_per_second: float
    dtype: str
    bytes_per_number: int


def measure_limits(dtype: str, num_threads: int) -> Limits:
    """Measure in a process of its own, so that torch's threads do not stay in the process that
    measures engines. Takes some seconds, most of them for the import of torch."""
    from nanovllm.distributed.groups import Grid

    return run_ranks(_measure, Grid(), dtype, threads=num_threads)[0]


def best(first: Limits, second: Limits) -> Limits:
    """The higher roofs of two measurements: on a shared machine the largest value is the nearest to
    the truth."""
    names = ("bytes_per_second", "flops_per_second")
    return replace(
        second, **{name: max(getattr(first, name), getattr(second, name)) for name in names}
    )


def _measure(dtype_name: str) -> Limits:
    import torch

    from nanovllm.ops.device import choose_dtype

    # The engines' workloads are measured on the CPU, and so are its roofs.
    dtype = choose_dtype(dtype_name, torch.device("cpu"))
    # 512 MiB do not fit into any cache; a product of two vectors does one multiplication per
    # number.
    numbers = torch.ones(2**27)
    matrix = numbers.view(-1, 4096)
    reads = (
        functools.partial(torch.dot, numbers, numbers),
        functools.partial(torch.mv, matrix, numbers[:4096]),
    )
    bandwidth = max(_rate(read, numbers.nbytes) for read in reads)
    squares = [torch.ones(size, size, dtype=dtype) for size in (1024, 2048)]
    products = [functools.partial(torch.nn.functional.linear, square, square) for square in squares]
    peak = max(
        _rate(product, 2 * len(square) ** 3)
        for product, square in zip(products, squares, strict=True)
    )
    return Limits(bandwidth, peak, str(dtype).removeprefix("torch."), dtype.itemsize)


def _rate(work: Callable[[], object], amount: float, repeats: int = 7) -> float:
    """Amount per second, in the fastest of several runs."""
    work()
    return amount / min(timed(work) for _ in range(repeats))


def cpu_model() -> str:
    """The processor's name."""
    cpus = pathlib.Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    if found := re.search(r"^model name\s*: (.+)", cpus, re.MULTILINE):
        return found[1].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@dataclass
class Noise:
    """The use of the processor during a run.

    Attributes:
        steal: share of the machine's CPU time taken by the hypervisor, as /proc/stat counts it; 0
            where nothing does.
        others: share used by processes that do not belong to the run.
        cores: cores that the run itself kept busy, on average.
    """

    steal: float
    others: float
    cores: float


class _CoreSeconds(NamedTuple):
    """Time of all cores so far, in seconds: in all, busy, taken by other guests of the host, and
    used by this run."""

    total: float
    busy: float
    steal: float
    own: float


class NoiseMeter:
    """Measures noise between its making and `read`.

    Args:
        pid: root of the processes that belong to the run, beside this one; None: all that descend
            from this one. Those that have ended count if they have been waited for.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._start = time.perf_counter()
        self._before = self._times()

    def read(self) -> Noise:
        """The noise so far."""
        now = self._times()
        before = self._before
        own = now.own - before.own
        total = now.total - before.total
        cores = own / (time.perf_counter() - self._start)
        if total <= 0:  # the counters tick in hundredths of a second
            return Noise(0.0, 0.0, cores)
        others = max(0.0, now.busy - before.busy - own)
        return Noise((now.steal - before.steal) / total, others / total, cores)

    def _times(self) -> _CoreSeconds:
        now = psutil.cpu_times()._asdict()  # not all systems have all of them
        steal = now.get("steal", 0.0)
        waiting = now["idle"] + now.get("iowait", 0.0)
        # Guests' time is counted in user and nice already.
        total = sum(now.values()) - now.get("guest", 0.0) - now.get("guest_nice", 0.0)
        # A process's own time, and that of the children that it has waited for: the server that
        # forks the ranks of `run_ranks` has waited for them.
        own = sum(os.times()[:4])
        for process in process_tree(self._pid):
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    own += sum(process.cpu_times()[:4])
        return _CoreSeconds(total, busy=total - waiting - steal, steal=steal, own=own)


def peak_memory(pid: int) -> int:
    """The most resident memory in bytes that a process has had so far, and with it each of its
    descendants; where the system does not say so, what they have now. Pages that several processes
    share are counted in each of them, as `ps` does."""
    found = 0
    for process in process_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            status = pathlib.Path(f"/proc/{process.pid}/status")
            peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
            found += 1024 * int(peak[1]) if peak else process.memory_info().rss
    return found
