"""How long the soak tests run, and whether memory grows with the number of requests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

import numpy as np
import psutil
import pytest

# The hour of the nightly form, or as many minutes as the environment says.
NIGHTLY_MINUTES = float(os.environ.get("NANOVLLM_SOAK_MINUTES", "60"))

# A test with the argument `minutes` runs twice: in the short form with 0, and in the nightly one.
short_and_nightly = pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(0.0, id="short"),
        pytest.param(
            NIGHTLY_MINUTES,
            id="nightly",
            marks=[pytest.mark.nightly, pytest.mark.timeout(NIGHTLY_MINUTES * 60 + 1800)],
        ),
    ],
)


def rounds(minutes: float, at_least: int) -> Iterator[int]:
    """Count rounds until the time is over, and at least so many."""
    deadline, count = time.monotonic() + 60 * minutes, 0
    while count < at_least or time.monotonic() < deadline:
        yield count
        count += 1


class MemorySamples:
    """The memory of some processes, sampled after every round of requests.

    Args:
        processes: by the names to print.
    """

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self.processes = processes
        self.rows: list[list[float]] = []  # requests so far, then MB per process

    def take(self, num_requests: int) -> None:
        """Sample, after so many requests since the start."""
        memory = [process.memory_info().rss / 2**20 for process in self.processes.values()]
        self.rows.append([num_requests, *memory])

    def slopes(self) -> dict[str, float]:
        """MB per 1,000 requests of each process: lines fitted over the second half, when caches are
        full."""
        half = np.array(self.rows[len(self.rows) // 2 :])
        lines = np.polyfit(half[:, 0] / 1000, half[:, 1:], 1)
        return dict(zip(self.processes, lines[0].tolist(), strict=True))

    def check(self, bound: float) -> None:
        """Print the samples and the lines; fail if one rises by more than `bound` MB per 1,000
        requests."""
        slopes = self.slopes()
        text = "\n".join(
            [
                *self._table(),
                *(f"{name}: {slope:+.2f} MB per 1,000 requests" for name, slope in slopes.items()),
            ]
        )
        print(text)
        assert max(slopes.values()) < bound, text

    def _table(self) -> Iterable[str]:
        yield "requests  " + "  ".join(self.processes) + " (MB)"
        for row in self.rows[:: -(-len(self.rows) // 60)]:  # up to 60 lines
            yield "  ".join(f"{value:.1f}" for value in row)
