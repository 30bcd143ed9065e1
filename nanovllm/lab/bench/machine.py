"""The machine: its name, its limits, and the load on it during a measurement."""

from __future__ import annotations

import functools
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil

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
    """Measure in a process of its own, so that torch's threads do not stay in the process that measures engines. Takes some
    seconds, most of them for the import of torch."""
    from nanovllm.distributed.groups import Grid

    return run_ranks(_measure, Grid(), dtype, threads=num_threads)[0]


def best(first: Limits, second: Limits) -> Limits:
    """The higher roofs of two measurements: on a shared machine the largest value is the nearest to the truth."""
    names = ("bytes_per_second", "flops_per_second")
    return replace(second, **{name: max(getattr(first, name), getattr(second, name)) for name in names})


def _measure(dtype_name: str) -> Limits:
    import torch

    from nanovllm.ops.device import choose_dtype

    # The engines' workloads are measured on the CPU, and so are its roofs.
    dtype = choose_dtype(dtype_name, torch.device("cpu"))
    # 512 MiB do not fit into any cache; a product of two vectors does one multiplication per number.
    numbers = torch.ones(2**27)
    matrix = numbers.view(-1, 4096)
    bandwidth = max(
        _rate(lambda: torch.dot(numbers, numbers), numbers.nbytes),
        _rate(lambda: matrix @ numbers[:4096], numbers.nbytes),
    )
    peak = 0.0
    for size in (1024, 2048):
        square = torch.ones(size, size, dtype=dtype)
        product = functools.partial(torch.nn.functional.linear, square, square)
        peak = max(peak, _rate(product, 2 * size**3))
    return Limits(bandwidth, peak, str(dtype).removeprefix("torch."), dtype.itemsize)


def _rate(work: Callable[[], object], amount: float, repeats: int = 7) -> float:
    """Amount per second, in the fastest of several runs."""
    work()
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return amount / fastest


def cpu_model() -> str:
    """The processor's name."""
    if sys.platform == "linux":
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
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
        steal: share of the machine's CPU time taken by the hypervisor, as /proc/stat counts it; 0 where nothing does.
        others: share used by processes that do not belong to the run.
        cores: cores that the run itself kept busy, on average.
    """

    steal: float
    others: float
    cores: float


class NoiseMeter:
    """Measures noise between its making and `read`.

    Args:
        pid: root of the running processes that belong to the run, beside this one; None if they are children that come and
            go, and that have been waited for when the meter is read.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid, self._start = pid, time.perf_counter()
        self._before = self._times()

    def read(self) -> Noise:
        """The noise so far."""
        total, busy, steal, own = (after - before for before, after in zip(self._before, self._times(), strict=True))
        cores = own / (time.perf_counter() - self._start)
        if total <= 0:  # the counters tick in hundredths of a second
            return Noise(0.0, 0.0, cores)
        return Noise(steal / total, max(0.0, busy - own) / total, cores)

    def _times(self) -> tuple[float, float, float, float]:
        now = psutil.cpu_times()
        steal, waiting = getattr(now, "steal", 0.0), now.idle + getattr(now, "iowait", 0.0)
        # Guests' time is counted in user and nice already.
        total = sum(now) - getattr(now, "guest", 0.0) - getattr(now, "guest_nice", 0.0)
        own = sum(os.times()[:4])
        if self._pid is not None:
            own = sum(
                _of_process(p, lambda p: sum(p.cpu_times()[:2])) for p in {psutil.Process(), *process_tree(self._pid)}
            )
        return total, total - waiting - steal, steal, own


class MemoryMeter:
    """Watches the resident memory of a process and its descendants, and keeps the high-water mark.

    Pages that several processes share are counted in each of them, as `ps` does.
    """

    INTERVAL_SECONDS = 0.1
    # Listing descendants reads all of /proc, so it is done less often.
    INTERVALS_A_LISTING = 10

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        count, tree = 0, process_tree(self._pid)
        while True:
            if count % self.INTERVALS_A_LISTING == 0:
                tree = process_tree(self._pid)
            self.peak_bytes = max(self.peak_bytes, sum(_of_process(p, lambda p: p.memory_info().rss) for p in tree))
            count += 1
            if self._stop.wait(self.INTERVAL_SECONDS):
                return


def _of_process(process: psutil.Process, measure: Callable[[psutil.Process], Any]) -> Any:
    """A measurement of a process; 0 if it has ended."""
    try:
        return measure(process)
    except psutil.NoSuchProcess:
        return 0
