"""Speculative decoding in simulated engines: the real scheduler's feature, and drafts that are
accepted by chance."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.features.speculation.scheduling import Speculation
from nanovllm.simulate.drafts import DraftingRunner
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from tests.simulate.engines import AffineCost, request_of, workload_of


def engine_of(
    acceptance: Sequence[float], draft_time: int = 0, num_blocks: int = 200, seed: int = 0
) -> SimulatedEngine:
    """An engine that always makes as many drafts as there are acceptances."""
    number = len(acceptance)
    speculative = {
        "method": "eagle3",
        "num_speculative_tokens": number,
        "num_speculative_tokens_per_batch_size": [[1, 1000, number]],
    }
    config = EngineConfig(
        num_kv_blocks=num_blocks,
        block_size=4,
        speculative_config=json.dumps(speculative),
        async_scheduling=False,
    )
    resolved = resolve(config, model_max_len=4096, num_kv_blocks=num_blocks, num_host_blocks=0)
    scheduler = create_scheduler(resolved, create_manager(resolved))
    runner = DraftingRunner(acceptance, draft_time, seed)
    return SimulatedEngine(scheduler, AffineCost(), runner=runner)


def speculation_of(engine: SimulatedEngine) -> Speculation:
    (feature,) = [f for f in engine.scheduler.features if isinstance(f, Speculation)]
    return feature


# With `AffineCost`, a step takes 1000, 100 per computed token, and 1 per token of context.


def test_an_engine_is_busy_while_it_drafts() -> None:
    engine = engine_of([1.0, 1.0], draft_time=250)
    result = Fleet([engine]).run(workload_of(request_of(0, 50, prompt=10, output=9)))
    assert result.replicas[0].busy == result.duration - 50


def test_times_of_one_request() -> None:
    engine = engine_of([1.0, 1.0])
    result = Fleet([engine]).run(workload_of(request_of(0, 50, prompt=10, output=9)))
    (served,) = result.requests
    # The prompt; a token, after which two are drafted; then three tokens per step.
    assert served.first_token == 50 + 2010
    steps = [1100 + 11, 1300 + 14, 1300 + 17, 1100 + 18]
    assert served.last_token == served.first_token + sum(steps)
    assert (served.num_output_tokens, result.replicas[0].num_steps) == (9, 5)
    assert (result.gaps.count, result.gaps.total) == (8, sum(steps))
    assert result.gaps.buckets[0] == 4, "tokens of the same step"


def test_rejected_drafts_cost_their_rows_and_their_time() -> None:
    engine = engine_of([0.0], draft_time=30)
    (served,) = Fleet([engine]).run(workload_of(request_of(0, 0, 10, output=5))).requests
    # A draft is made in each step that leaves more than one token to sample.
    steps = [1100 + 11 + 30, 1200 + 13 + 30, 1200 + 14 + 30, 1100 + 14]
    assert served.first_token is not None
    assert served.last_token == served.first_token + sum(steps)


def test_acceptance_by_position_comes_out() -> None:
    acceptance = [0.8, 0.6, 0.4]
    engine = engine_of(acceptance, num_blocks=2000)
    requests = [request_of(i, 50_000 * i, prompt=10, output=300) for i in range(30)]
    result = Fleet([engine]).run(workload_of(*requests))
    stats = speculation_of(engine).stats
    assert stats.num_drafts > 2500
    for share, accepted in zip(acceptance, stats.num_accepted_tokens_per_pos, strict=True):
        assert accepted / stats.num_drafts == pytest.approx(share, abs=0.03)
    num_output = sum(each.num_output_tokens for each in result.requests)
    assert num_output == 30 * 300 == result.gaps.count + 30
    assert engine.scheduler.manager.pool.num_free == 2000


def test_a_request_that_drafts_decodes() -> None:
    engine = engine_of([1.0, 1.0])
    Fleet([engine]).run(workload_of(request_of(0, 50, prompt=10, output=9)))
    counters = engine.counters
    # See above: the prompt, a token, twice three of them, and a token.
    assert (counters.num_steps, counters.num_decodes) == (5, 4)
    assert (counters.num_prefill_tokens, counters.decode_context) == (10, 11 + 12 + 15 + 18)
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (4, 4)
    stats = speculation_of(engine).stats
    assert stats.num_draft_tokens == counters.num_draft_tokens


@pytest.mark.parametrize("seed", range(10))
def test_random_workloads_are_served(seed: int) -> None:
    rng = random.Random(seed)
    engine = engine_of([0.9, 0.5], num_blocks=rng.choice([30, 60]), seed=seed)
    requests = []
    at = 0
    for number in range(30):
        at += rng.randrange(5000)
        abort = at + rng.randrange(20_000) if rng.random() < 0.2 else None
        requests.append(request_of(number, at, rng.randint(1, 30), rng.randint(1, 40), abort=abort))
    result = Fleet([engine]).run(workload_of(*requests))
    served = {each.request_id: each for each in result.requests}
    assert len(served) == 30
    for source in requests:
        request = served[source.request_id]
        if source.abort is None:
            assert (request.outcome, request.num_output_tokens) == (
                "length",
                source.num_output_tokens,
            )
    engine.scheduler.check_invariants()
    assert engine.scheduler.manager.pool.num_free == engine.scheduler.manager.pool.num_blocks
