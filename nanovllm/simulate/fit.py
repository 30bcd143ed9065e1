"""Fits costs to the times of steps: those of single steps, and of steps in a full pipeline. Only
its functions import numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.measured import HeadCost, MeasuredCost, num_pairs
from nanovllm.simulate.workload import SECOND

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Weight of a change of the price per token, in steps.
SMOOTHNESS = 0.1
# Weight of a change of the delay from octave to octave, in steps: an octave of which no step tells
# much is delayed as much as its neighbours, in relation to its time.
EVENNESS = 8.0


class Timed(NamedTuple):
    """A step, and its seconds: see `StepTimer`."""

    work: StepWork
    seconds: float


def fit(steps: Sequence[Timed]) -> tuple[list[int], list[float], list[float]]:
    """Fit the cost to steps, in relative errors: returns knots, seconds there, and the prices per
    sample, context, pair and prompt. No price is negative. Steps that something else has slowed
    down have less weight (Huber 1964)."""
    import numpy as np

    tokens = [work.num_decodes + sum(n for _, n in work.prefills) for work, _ in steps]
    knots = [1]
    most = max(2, *tokens)
    while knots[-1] < most:
        # 2, 3, 4, 6, 8, 12, ...: within an octave, a product can turn from reading to computing.
        last = knots[-1]
        is_power = last & (last - 1) == 0
        knots.append(min(max(last + 1, last * 3 // 2 if is_power else last * 4 // 3), most))
    spans = [
        [min(max(count - low, 0), high - low) for count in tokens] for low, high in pairwise(knots)
    ]
    works = [work for work, _ in steps]
    others = [
        [work.num_samples for work in works],
        [work.decode_context for work in works],
        [num_pairs(work) for work in works],
        [len(work.prefills) for work in works],
    ]
    times = np.array([seconds for _, seconds in steps])
    columns = np.array([[1] * len(steps), *spans, *others], dtype=float).T / times[:, None]
    scale = np.maximum(columns.max(axis=0), 1e-30)
    columns /= scale
    smooth = smoothness(knots, tokens, times, len(scale)) / scale
    weights = np.ones(len(steps))
    prices = np.zeros(len(scale))
    for _ in range(8):
        weighted = columns * weights[:, None]
        improve(prices, weighted.T @ columns + smooth.T @ smooth, weighted.sum(axis=0))
        errors = np.abs(columns @ prices - 1)
        weights = np.minimum(1, 2 * np.median(errors) / np.maximum(errors, 1e-12))
    base, *slopes = (prices / scale).tolist()
    lengths = [high - low for low, high in pairwise(knots)]
    rises = [slope * length for slope, length in zip(slopes, lengths, strict=False)]
    others_of_steps = (columns[:, len(knots) :] @ prices[len(knots) :]) * times
    rows = rows_of_mean_steps(
        knots, np.array(list(accumulate(rises, initial=base))), tokens, times, others_of_steps
    )
    return knots, rows.tolist(), slopes[len(rises) :]


def fit_head(cost: MeasuredCost, steps: Sequence[Timed]) -> HeadCost:
    """Fit how much longer the last stage of a pipeline takes than the others, so that a simulated
    pipeline that is full completes steps as often as the measured one did in the mean.

    Args:
        cost: predicts the time of a step that passes through all stages alone.
        steps: of a full pipeline; see `full_steps`.
    """
    import numpy as np

    stages = cost.pipeline_parallel_size
    alone = np.array([cost.step(work) / SECOND for work, _ in steps])
    times = np.array([seconds for _, seconds in steps])
    samples = np.array([work.num_samples for work, _ in steps], dtype=float)
    # A step that passes through a full pipeline adds the time of the slowest stage:
    #     alone / stages + (1 - 1 / stages) * head
    columns = np.array([samples > 0, samples, alone]).T * (stages - 1) / alone[:, None]
    scale = np.maximum(columns.max(axis=0), 1e-30)
    columns /= scale
    prices = np.zeros(len(scale))
    improve(prices, columns.T @ columns, columns.T @ (stages * times / alone - 1))
    return HeadCost(*(prices / scale).tolist())


def improve(
    prices: NDArray[np.float64], normal: NDArray[np.float64], goal: NDArray[np.float64]
) -> None:
    """Solve `normal @ prices == goal`, the normal equations of a fit, with no price below 0."""
    for _ in range(3000):
        # One price after the other.
        for i, row in enumerate(normal):
            prices[i] = max(0.0, prices[i] + (goal[i] - row @ prices) / max(row[i], 1e-30))


def smoothness(
    knots: list[int], tokens: list[int], times: NDArray[np.float64], num_prices: int
) -> NDArray[np.float64]:
    """Return rows that make the price per token the same on both sides of a knot, unless steps tell
    otherwise. Without them, sizes that were not measured can have any time between those of other
    sizes: the long prompts are explained as well if their first 50 tokens take all of the time.

    Args:
        tokens, times: of each step.
        num_prices: columns; the first is the time of any step, and then come those of the spans
            between two knots.
    """
    import numpy as np

    in_order = np.argsort(tokens)
    usual = np.interp(knots, np.array(tokens)[in_order], times[in_order])
    rows = np.zeros((len(knots) - 2, num_prices))
    for i, (low, high) in enumerate(pairwise(knots[:-1])):
        rows[i, i + 1] = -1
        rows[i, i + 2] = 1
        rows[i] *= SMOOTHNESS**0.5 * (high - low) / usual[i + 1]
    return rows


def rows_of_mean_steps(
    knots: list[int],
    rows: NDArray[np.float64],
    tokens: list[int],
    times: NDArray[np.float64],
    others: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Add to the seconds at the knots what makes steps of each size take as long in the mean as
    they did, the slow ones included. With a single factor for all, decode steps came out 4 to
    10 % too short: a delay of some milliseconds hardly moves the typical short step, but it does
    move the typical long one, which has several.

    Args:
        rows: seconds at the knots.
        tokens, times, others: of each step its tokens, its time, and how much of this depends on
            other things than its tokens.
    """
    import numpy as np

    # A delay per octave: between two of these, few steps would decide.
    octaves = [knot for knot in knots if knot & (knot - 1) == 0 or knot == knots[-1]]
    # A step counts as delayed by at most a thousand times its typical time, which may be 0.
    typical = np.maximum(rows @ shares(tokens, knots) + others, times / 1000)
    near = shares(tokens, octaves)
    counts = near.sum(axis=1)
    known = counts > 0
    usual = np.interp(octaves, np.array(octaves)[known], (near @ typical)[known] / counts[known])
    # A delay by the usual time of an octave adds these shares to the time of each step.
    added = usual[:, None] * near / typical
    changes = np.diff(np.eye(len(octaves)), axis=0)
    normal = added @ added.T + EVENNESS * changes.T @ changes
    delays = np.linalg.solve(normal, added @ (times / typical - 1))
    # More tokens take no less time.
    return np.maximum.accumulate(np.maximum(rows + np.interp(knots, octaves, delays * usual), 0))


def shares(tokens: list[int], knots: list[int]) -> NDArray[np.float64]:
    """Return how much each knot (rows) counts for each step (columns) in an interpolation."""
    import numpy as np

    return np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))])
