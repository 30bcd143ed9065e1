"""What every part of the check is told, and what it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

#: One line of a part's answer: the table that it belongs to, under "table", and the columns.
Row = dict[str, Any]


class Skip(Exception):
    """A part does not apply to this machine; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Where and how long.

    Attributes:
        dry_run: on the CPU, with tiny sizes: the same code, and no measurement.
        seconds: what the part may take.
        started: when it began, by `time.perf_counter`.
    """

    dry_run: bool
    seconds: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def device(self) -> torch.device:
        """The GPU; in a dry run the CPU."""
        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def seconds_left(self) -> float:
        """Until the part is ended from outside."""
        return self.seconds - (time.perf_counter() - self.started)


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
