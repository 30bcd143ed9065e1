"""Synthetic workloads: rates, burstiness, lengths, shared prefixes, sessions, and seeds."""

import hashlib
import statistics
from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.requests import SimulatedRequest
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.workload import SECOND, WorkloadRequest
from tests.simulate.engines import AffineCost, config_of, engine_of


def create(block_size: int = 16, **settings: float) -> list[WorkloadRequest]:
    return list(create_workload(SyntheticWorkload(**settings), block_size).requests)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, float("inf")])
def test_times_between_arrivals_have_the_mean_and_the_spread_of_the_gamma_distribution(
    burstiness: float,
) -> None:
    requests = create(request_rate=10.0, burstiness=burstiness, num_prompts=20_000)
    gaps = [(b.arrival - a.arrival) / SECOND for a, b in pairwise(requests)]
    assert requests[-1].arrival == 2000 * SECOND  # as in vLLM, the rate is exact
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=1e-3)
    spread = statistics.pstdev(gaps) / statistics.mean(gaps)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.04, abs=1e-6)


def test_a_large_burstiness_means_equal_times() -> None:
    times = [
        [request.arrival for request in create(burstiness=burstiness, num_prompts=50)]
        for burstiness in (1e31, 1e100, 1e308, float("inf"))
    ]
    assert times == [times[-1]] * 4


def test_lengths_are_uniform_in_their_range() -> None:
    requests = create(
        num_prompts=5000, random_input_len=100, random_output_len=10, random_range_ratio=0.5
    )
    assert {request.num_prompt_tokens for request in requests} == set(range(50, 151))
    assert {request.num_output_tokens for request in requests} == set(range(5, 16))
    assert all(request.prefix_ids == () for request in requests)


def test_bursts_arrive_together_at_the_same_mean_rate() -> None:
    requests = create(num_prompts=1000, request_rate=10.0, burst_size=8)
    arrivals = [request.arrival for request in requests]
    assert all(len(set(arrivals[i : i + 8])) == 1 for i in range(0, 1000, 8))
    assert arrivals[-1] == 100 * SECOND


def test_all_at_once() -> None:
    assert {request.arrival for request in create(request_rate=float("inf"))} == {0}


def test_requests_share_the_full_blocks_of_their_prefix() -> None:
    requests = create(
        num_prompts=200, random_prefix_len=40, num_prefixes=3, random_input_len=20, block_size=16
    )
    beginnings = {tuple(request.prefix_ids[:2]) for request in requests}
    assert len(beginnings) == 3
    # Of 40 + 20 + 128 tokens.
    assert all(len(request.prefix_ids) == 12 for request in requests)
    own = [number for request in requests for number in request.prefix_ids[2:]]
    assert len(own) == len(set(own))


def test_blocks_of_many_long_prefixes_are_not_those_of_a_session() -> None:
    requests = create(
        num_prompts=50,
        random_prefix_len=10**4,
        num_prefixes=10**9,
        random_input_len=8,
        block_size=1,
    )
    largest = max(request.prefix_ids[10**4 - 1] for request in requests)
    assert largest > 2**40
    assert min(request.prefix_ids[10**4] for request in requests) > largest


def test_a_turn_begins_with_the_one_before_and_its_answer() -> None:
    requests = create(
        num_prompts=300, num_turns=3, random_input_len=20, random_output_len=30, turn_interval=2.0
    )
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    sessions: dict[str, list[WorkloadRequest]] = {}
    for request in requests:
        sessions.setdefault(request.request_id.split("-")[0], []).append(request)
    assert len(sessions) == 100
    for turns in sessions.values():
        assert [turn.num_prompt_tokens for turn in turns] == [20, 70, 120]
        for before, turn in pairwise(turns):
            assert list(turn.prefix_ids[: len(before.prefix_ids)]) == list(before.prefix_ids)
            assert len(before.prefix_ids) == -(-(before.num_prompt_tokens + 30) // 16)
    pauses = [b.arrival - a.arrival for turns in sessions.values() for a, b in pairwise(turns)]
    assert statistics.mean(pauses) / SECOND == pytest.approx(2.0, rel=0.2)


def test_a_turn_finds_the_blocks_of_the_answer_before() -> None:
    settings = SyntheticWorkload(
        num_prompts=4, num_turns=4, random_input_len=20, random_output_len=30, turn_interval=1e4
    )
    served = Fleet([engine_of()]).run(create_workload(settings, 16)).requests
    assert [each.num_prompt_tokens for each in served] == [20, 70, 120, 170]
    # An answer's last token is never computed, so 49, 99 and 149 tokens are in full blocks.
    assert [each.num_cached_tokens for each in served] == [0, 48, 96, 144]


def test_prompts_with_a_shared_prefix_decode_many_steps_at_once() -> None:
    """Their outputs belong to no other prompt, so nothing can happen to the blocks of these."""
    settings = SyntheticWorkload(
        num_prompts=20, random_input_len=20, random_output_len=300, random_prefix_len=64
    )
    calls = Counter[bool]()

    class Counted(SimulatedEngine):
        def finish(self) -> list[SimulatedRequest]:
            calls[self.group is not None] += 1
            return super().finish()

    def serve(fast: bool) -> FleetResult:
        engine = create_engine(Counted, config_of(500), AffineCost(), fast=fast)
        return Fleet([engine]).run(create_workload(settings, 16))

    at_once, one_by_one = serve(fast=True), serve(fast=False)
    assert at_once.requests == one_by_one.requests
    assert at_once.replicas[0].num_hit_tokens >= 64
    assert 3 * calls[True] < calls[False] == one_by_one.replicas[0].num_steps


def test_a_seed_gives_the_same_requests_with_every_version_of_python() -> None:
    settings = {
        "num_prompts": 500,
        "burstiness": 0.5,
        "random_range_ratio": 0.3,
        "num_turns": 2,
        "num_prefixes": 4,
        "random_prefix_len": 64,
    }
    requests = create(seed=3, **settings)
    assert requests == create(seed=3, **settings)
    assert requests != create(seed=4, **settings)
    digest = hashlib.sha256(msgspec.json.encode(requests)).hexdigest()
    assert digest[:16] == "02d871530f67dc62"


def test_the_same_lengths_arrive_at_every_rate() -> None:
    slow = create(request_rate=1.0, random_range_ratio=0.9)
    fast = create(request_rate=9.0, random_range_ratio=0.9, burstiness=3.0)
    assert [r.num_prompt_tokens for r in slow] == [r.num_prompt_tokens for r in fast]


@pytest.mark.parametrize(
    "setting",
    [
        {"request_rate": 0.0},
        {"request_rate": float("nan")},
        {"burstiness": -1.0},
        {"num_prompts": 0},
        {"random_range_ratio": 1.0},
        {"random_input_len": 10**12},
        {"turn_interval": 1e300},
    ],
)
def test_a_setting_out_of_its_range_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(setting))} must be "):
        SyntheticWorkload(**setting)
