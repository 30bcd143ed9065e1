"""Mooncake (Qin et al., FAST 2025): where requests should go, and what a shared cache is worth.

Prefill nodes alone, as in the paper's Figure 10: the first token is the only one. A node has eight
A800s, Llama 3 70B with tensor parallelism, and a cache of 3 M tokens. Times of steps are predicted
from the data sheet; nothing published is an input. Nodes do not copy each other's blocks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nanovllm.router.policies import Router, RouterState
from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.machines import find_machine
from nanovllm.simulate.models import Layout, find_model
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.roofline import Roofline
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.traces import read_workload
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest
from tests.simulate.engines import engine_of

BLOCK = 512
NODE_TOKENS = 3_000_000


@dataclasses.dataclass(frozen=True)
class Faster(StepCost):
    """A cost that is divided by a whole number: so many nodes as one."""

    cost: StepCost
    times: int

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""
        return self.cost.step(work) // self.times

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context."""
        base, per_token = self.cost.decode(num_decodes)
        return base // self.times, per_token // self.times


def node_cost() -> StepCost:
    """The cost of a node. An A800 is an A100 whose NVLink has 400 GB/s instead of 600."""
    a100 = find_machine("A100")
    a800 = replace(a100, name="A800", inside=dataclasses.replace(a100.inside, bandwidth=200e9))
    return Roofline(find_model("llama-3.1-70b"), a800, Layout(tensor_parallel_size=8))


def prefill(
    workload: Workload, policy: str, num_nodes: int, cost: StepCost, tokens: int = NODE_TOKENS
) -> FleetResult:
    """Serve the first tokens of a workload.

    Args:
        policy: of the router, which knows all blocks and loads at all times.
        tokens: in each node's cache.
    """
    engines = [
        engine_of(
            num_blocks=tokens // BLOCK,
            model_max_len=2**18,
            block_size=BLOCK,
            max_num_batched_tokens=8192,
        )
        for _ in range(num_nodes)
    ]
    for engine in engines:
        engine.cost = cost
    make = RequestMaker(BLOCK, BLOCK)

    def names(request: WorkloadRequest) -> Sequence[int]:
        return make.prompt_names(request.prefix_ids, request.num_prompt_tokens)

    router = PolicyRouter(
        Router(policy, RouterState(num_nodes), max_blocks=2**18 // BLOCK), engines, names
    )
    return Fleet(engines, router).run(first_tokens(workload))


def first_tokens(workload: Workload) -> Workload:
    """The workload with outputs of one token."""

    def requests() -> Iterator[WorkloadRequest]:
        for request in workload.requests:
            yield replace(request, num_output_tokens=1)

    return dataclasses.replace(workload, requests=requests())


def mooncake(name: str) -> Workload:
    """One of the traces of the paper; the test is skipped where they are not at hand."""
    folder = os.environ.get("NANOVLLM_TRACES")
    if folder is None:
        pytest.skip(
            "set NANOVLLM_TRACES to a folder with mooncake_conversation.jsonl.gz and "
            "mooncake_synthetic.jsonl.gz (kvcache-ai/Mooncake, FAST25-release/traces)"
        )
    return read_workload(Path(folder) / f"mooncake_{name}.jsonl.gz")


def sessions() -> Workload:
    """Generated conversations of two turns, with the rate and the mean prompt of Mooncake's trace:
    3.4 requests per second, and 8,192 or 16,384 tokens."""
    settings = SyntheticWorkload(
        request_rate=3.4,
        num_prompts=2000,
        num_turns=2,
        turn_interval=120.0,
        random_input_len=8192,
        random_range_ratio=0.9,
        random_output_len=1,
    )
    return create_workload(settings, BLOCK)


def mean_ttft(result: FleetResult) -> float:
    """Seconds."""
    total = sum((each.first_token or 0) - each.arrival for each in result.requests)
    return total / len(result.requests) / SECOND


def hit_rate(result: FleetResult) -> float:
    """The share of prompt tokens that were cached."""
    hits = sum(each.num_hit_tokens for each in result.replicas)
    return hits / sum(each.num_queried_tokens for each in result.replicas)


def busy(result: FleetResult) -> int:
    """The time that all nodes compute."""
    return sum(each.busy for each in result.replicas)


def test_routing_of_generated_conversations() -> None:
    """A second turn finds the first on the node that has it: with any other policy than the
    cache-aware one, with a chance of 1 in 8."""
    known = 0
    prompts = 0
    first: dict[str, int] = {}
    for request in sessions().requests:
        session = request.request_id.split("-")[0]
        known += first.get(session, 0) // BLOCK * BLOCK
        first[session] = request.num_prompt_tokens
        prompts += request.num_prompt_tokens
    cost = node_cost()
    aware, load, chance = (
        prefill(sessions(), policy, 8, cost) for policy in ("precise", "load", "random")
    )
    assert mean_ttft(aware) < 0.9 * mean_ttft(load) < 0.9 * 0.9 * mean_ttft(chance)
    # A turn may begin before the first one has been computed.
    assert 0.95 * known / prompts < hit_rate(aware) <= known / prompts
    for result in (load, chance):
        assert hit_rate(result) == pytest.approx(known / prompts / 8, rel=0.25)
    pooled = prefill(sessions(), "load", 1, Faster(cost, 8), 8 * NODE_TOKENS)
    assert hit_rate(pooled) == pytest.approx(hit_rate(aware), rel=0.03)


@pytest.mark.parametrize(
    ("policy", "shortest", "longest"),
    [("random", 12.0, 25.0), ("load", 4.2, 6.0), ("precise", 2.5, 4.1)],
)
def test_routing_of_conversations(policy: str, shortest: float, longest: float) -> None:
    """Figure 5: the conversation trace on 16 nodes, mean TTFT. We take half of the nodes for
    prefill, as the paper does elsewhere, and transfers take no time. The ranges keep the order.

                                       published    here
        random                         19.65 s      14.8 s
        load balancing                  5.27 s       4.6 s
        cache-aware, own blocks         3.58 s       3.0 s
        cache-aware, others' blocks     3.07 s       not modelled"""
    result = prefill(mooncake("conversation"), policy, 8, node_cost())
    assert shortest < mean_ttft(result) < longest


@pytest.mark.parametrize(
    ("name", "hits", "time"), [("conversation", 2.22, 0.76), ("synthetic", 2.36, 0.52)]
)
def test_a_cache_that_nodes_share(name: str, hits: float, time: float) -> None:
    """Figure 10: 10 nodes, each with its own cache or all with one of 30 M tokens. Hits and prefill
    time of the shared cache, relative to own ones:

                        published       here, by load    here, cache-aware
        conversation    2.22, 0.76      3.49, 0.71       1.04, 0.98
        synthetic       2.36, 0.52      3.63, 0.41       1.02, 0.95

    The paper does not say how it assigned requests to nodes with own caches. A router that looks at
    loads alone has fewer hits than the published ones, and a cache-aware one has more. With own
    hits as published, and prefill time linear in hits, the relative time is 0.76 and 0.47.

    The shared cache is that of an engine of ten times the speed, which finds what any node has
    computed and spends no time on transfers."""
    cost = node_cost()
    own = prefill(mooncake(name), "load", 10, cost)
    shared = prefill(mooncake(name), "load", 1, Faster(cost, 10), 10 * NODE_TOKENS)
    assert hit_rate(shared) > hits * hit_rate(own)
    shared_time = busy(shared) * 10 / busy(own)
    share = (hit_rate(shared) / hits - hit_rate(own)) / (hit_rate(shared) - hit_rate(own))
    own_time = 1 - (1 - shared_time) * share
    assert shared_time / own_time == pytest.approx(time, rel=0.12)
    if name == "synthetic":
        aware = prefill(mooncake(name), "precise", 10, cost)
        assert hit_rate(shared) < hits * hit_rate(aware)
