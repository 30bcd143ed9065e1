"""What the machine is, what it can do, and what else went on while something was measured."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_CPU_AFFINITY")


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
    """Measure in a process of its own, so that torch's threads do not stay behind in the one that measures engines.
    Takes some seconds, of which most are torch's import."""
    command = [sys.executable, "-c", "from nanovllm.lab.bench import machine; machine.main()", dtype, str(num_threads)]
    process = subprocess.run(command, env=python_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return Limits(**json.loads(process.stdout))


def best(first: Limits, second: Limits) -> Limits:
    """The higher roofs of two measurements: on a shared machine the largest value is the nearest to the truth."""
    return Limits(
        max(first.bytes_per_second, second.bytes_per_second),
        max(first.flops_per_second, second.flops_per_second),
        second.dtype,
        second.bytes_per_number,
    )


def _measure(dtype_name: str, num_threads: int) -> Limits:
    import torch

    from nanovllm.runner.runner import choose_dtype

    torch.set_num_threads(num_threads)
    # The engines' workloads are measured on the CPU, and so are its roofs.
    dtype = choose_dtype(dtype_name, torch.device("cpu"))
    # 512 MiB do not fit into any cache; a product of two vectors does one multiplication a number.
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
    """Amount a second, of the fastest of several times."""
    work()
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return amount / fastest


def python_environment() -> dict[str, str]:
    """Environment variables under which another Python finds this very package, even in a checkout without
    installation, and chooses its threads itself."""
    found = {name: value for name, value in os.environ.items() if name not in _THREAD_VARIABLES}
    package_home = str(pathlib.Path(__file__).parents[3])
    paths = [package_home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


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
    """Who used the processor while a run lasted.

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
        pid: root of the processes that belong to the run; this process belongs to it, too.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start = time.perf_counter()
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
        guests = getattr(now, "guest", 0.0) + getattr(now, "guest_nice", 0.0)
        total = sum(now) - guests
        return total, total - waiting - steal, steal, self._own_seconds()

    def _own_seconds(self) -> float:
        """Processor time of all that belongs to the run."""
        own = 0.0
        for process in {psutil.Process(), *process_tree(self._pid)}:
            try:
                used = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            own += used.user + used.system
        return own


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
            self.peak_bytes = max(self.peak_bytes, sum(_resident(process) for process in tree))
            count += 1
            if self._stop.wait(self.INTERVAL_SECONDS):
                return


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def main() -> None:
    """Measure the limits in this process, and print them as JSON; arguments: dtype, number of threads."""
    print(json.dumps(vars(_measure(sys.argv[1], int(sys.argv[2])))))
