"""Measured step times as a cost: interpolation between sizes, by hand."""

from __future__ import annotations

import msgspec
import pytest

from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.measured import MeasuredCost, num_pairs
from nanovllm.simulate.workload import SECOND

COST = MeasuredCost(
    model="by hand",
    machine="none",
    on_gpu=False,
    num_kv_blocks=10,
    block_size=16,
    kv_bytes_per_token=1.0,
    max_model_len=256,
    knots=[1, 3, 5],
    row_seconds=[0.010, 0.020, 0.024],
    per_sample=0.0,
    per_context=0.0,
    per_pair=0.0,
)


@pytest.mark.parametrize(
    ("num_tokens", "milliseconds"),
    [(1, 10), (2, 15), (3, 20), (4, 22), (5, 24), (6, 26), (105, 224)],
)
def test_between_and_beyond_the_knots(num_tokens: int, milliseconds: float) -> None:
    for work in (StepWork(num_tokens, 77, (), num_tokens), StepWork(0, 0, [(0, num_tokens)], 0)):
        assert COST.step(work) == pytest.approx(milliseconds * SECOND / 1000)


def test_two_knots_are_a_line() -> None:
    line = msgspec.structs.replace(COST, knots=[1, 11], row_seconds=[0.01, 0.02])
    assert line.decode(6)[0] == pytest.approx(0.015 * SECOND)
    assert line.decode(21)[0] == pytest.approx(0.03 * SECOND)


def test_each_price_is_paid_for_what_it_is_the_price_of() -> None:
    prices = {"per_sample": 1.0, "per_context": 0.25, "per_pair": 0.5, "per_prompt": 4.0}
    work = StepWork(2, 40, [(3, 2), (0, 1)], 3)
    counts = {"per_sample": 3, "per_context": 40, "per_pair": num_pairs(work), "per_prompt": 2}
    assert num_pairs(work) == (4 + 5) + 1
    for name, price in prices.items():
        cost = msgspec.structs.replace(COST, **{name: price})
        assert cost.step(work) - COST.step(work) == pytest.approx(counts[name] * price * SECOND)


def test_a_step_of_decodes_is_affine_in_its_context() -> None:
    cost = msgspec.structs.replace(COST, per_sample=0.001, per_context=0.0003)
    base, per_token = cost.decode(4)
    for context in (4, 1000, 10**6):
        assert cost.step(StepWork(4, context, (), 4)) == base + per_token * context
