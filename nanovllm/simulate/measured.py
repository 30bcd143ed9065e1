"""Step times that `calibrate` has measured, as a cost that simulations read from a file.

Built by notebooks/51_what_if.ipynb: edit it there.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from nanovllm.data.errors import UsageError
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.roofline import Part
from nanovllm.simulate.workload import SECOND

# Numbers in files: a damaged one is found when it is read.
Size = Annotated[int, Meta(ge=1, le=10**9)]
Number = Annotated[float, Meta(ge=0, le=1e9)]


class HeadCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By how much the last stage of a pipeline takes longer than each other one, in seconds:

        share * step                                   in a step that samples nothing
        share * step + fixed + per_sample * samples    otherwise

    The model's head is only read and computed for samples. A share of the whole step is more than
    the head: it is above 0 if stages have unequal numbers of layers, or slow each other down.
    """

    fixed: Number = 0.0
    per_sample: Number = 0.0
    share: Number = 0.0


class MeasuredCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StepCost`. Times are in seconds:

        step = rows(computed tokens) + per_sample * samples + per_context * context of decodes
               + per_pair * pairs of prompt tokens + per_prompt * prompts

    `rows` is piecewise linear. Pairs are a prompt's token and one that it attends to. The price of
    a prompt contains what the engine does when a request arrives.

    Attributes:
        model, machine, on_gpu: what was measured where.
        tensor_parallel_size, pipeline_parallel_size: layout of the measured engine.
        num_kv_blocks, block_size, kv_bytes_per_token, max_model_len: of the measured engine.
        knots, row_seconds: numbers of tokens, and `rows` there.
        head_cost: of a pipeline, what the last stage takes longer; None: there is one stage.
        pauses, idle_seconds: seconds without a request, and how much longer the next step takes.
        error: median of |measured / predicted - 1| over single steps that the fit did not see.
        low, high: interval that contains 90 % of measured / predicted over 16 such steps in a row.
        waited: share of the time in which the engine's threads waited for a processor.
    """

    model: str
    machine: str
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    on_gpu: bool
    num_kv_blocks: Size
    block_size: Size
    kv_bytes_per_token: Annotated[float, Meta(gt=0, le=1e9)]
    max_model_len: Size
    knots: Annotated[list[Size], Meta(min_length=2)]
    row_seconds: list[Number]
    per_sample: Number
    per_context: Number
    per_pair: Number
    per_prompt: Number = 0.0
    head_cost: HeadCost | None = None
    pauses: list[Number] = []
    idle_seconds: list[Number] = []
    error: Number = 0.0
    low: Number = 1.0
    high: Number = 1.0
    waited: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        for name, values in (("knots", self.row_seconds), ("pauses", self.idle_seconds)):
            points = getattr(self, name)
            if len(points) != len(values) or any(b <= a for a, b in pairwise(points)):
                raise ValueError(f"{name} must increase, and have a time each")

    def step(self, work: StepWork) -> int:
        """Return the time of a step, in picoseconds."""
        if not work.prefills and work.num_samples == work.num_decodes:
            base, per_token = self.decode(work.num_decodes)
            return base + per_token * work.decode_context
        return round(sum(part.seconds for part in self.parts(work)) * SECOND)

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context: see `StepCost`."""
        base = self._rows(num_decodes) + self.per_sample * num_decodes
        return round(base * SECOND), round(self.per_context * SECOND)

    def head(self, work: StepWork) -> int:
        """Return what the last stage takes longer: see `StepCost`."""
        step = self.step(work)
        cost = self.head_cost or HeadCost()
        seconds = cost.per_sample * work.num_samples + (cost.fixed if work.num_samples else 0.0)
        return min(step, round(cost.share * step + seconds * SECOND))

    def after_idle(self, idle: int) -> int:
        """Return by how much the first step is longer after a pause, in which caches have lost the
        weights: interpolated, and beyond the longest measured pause as after that one."""
        points = [(0.0, 0.0), *zip(self.pauses, self.idle_seconds, strict=True)]
        for (low, start), (high, end) in pairwise(points):
            if idle < high * SECOND:
                share = (idle / SECOND - low) / (high - low)
                return round((start + share * (end - start)) * SECOND)
        return round(points[-1][1] * SECOND)

    def parts(self, work: StepWork) -> list[Part]:
        """Return the parts of a step."""
        num_tokens = work.num_decodes + sum(count for _, count in work.prefills)
        return [
            Part("products", self._rows(num_tokens), "measured"),
            Part("sampling", self.per_sample * work.num_samples, "measured"),
            Part("attention", self.per_context * work.decode_context, "measured"),
            Part("prompt attention", self.per_pair * num_pairs(work), "measured"),
            Part("requests", self.per_prompt * len(work.prefills), "measured"),
        ]

    def _rows(self, num_tokens: int) -> float:
        """Interpolate; beyond the last knot, continue the last line."""
        knots = self.knots
        last = min(max(1, bisect_left(knots, num_tokens)), len(knots) - 1)
        slope = (self.row_seconds[last] - self.row_seconds[last - 1]) / (
            knots[last] - knots[last - 1]
        )
        return self.row_seconds[last] + slope * (num_tokens - knots[last])


def num_pairs(work: StepWork) -> int:
    """Return the pairs of a prompt's token and one that it attends to."""
    return sum(count * start + count * (count + 1) // 2 for start, count in work.prefills)


def read_cost(path: Path, content: bytes | None = None) -> MeasuredCost:
    """Read a file that `calibrate` has written.

    Args:
        content: of the file, if it was read before.

    Raises:
        UsageError: it is none, or a pipeline was measured before its stages were told apart.
    """
    try:
        cost = msgspec.json.decode(content or path.read_bytes(), type=MeasuredCost)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--machine {path}: no file of --calibrate: {error}") from error
    if cost.pipeline_parallel_size > 1 and cost.head_cost is None:
        raise UsageError(
            f"--machine {path} has no time of the last stage: measure the pipeline again with "
            "--calibrate"
        )
    return cost


def check_writable(flag: str, path: Path) -> None:
    """Check that a file can be written, before minutes are spent on what it is for.

    Args:
        flag: the one that names the file.

    Raises:
        UsageError: it cannot.
    """
    existed = os.path.exists(path)  # not `Path.exists`, which raises an error for a long name
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: name a file") from error
    if not existed:
        path.unlink()


def write_cost(cost: MeasuredCost, path: Path) -> None:
    """Write the file that `read_cost` reads."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(cost)) + b"\n")
    except OSError as error:
        raise UsageError(f"--calibrate {path}: {error.strerror}") from error
