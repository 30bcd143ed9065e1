"""Mixtures of experts: routing against transformers', the shuffle against a dense sum, balancing by
its properties, and whole models on real ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nanovllm import LLM, ops
from nanovllm.checkpoint.files import Fields
from nanovllm.checkpoint.weights import CheckpointError
from nanovllm.data.config import EngineConfig
from nanovllm.data.eplb_config import EPLBConfig
from nanovllm.distributed import groups
from nanovllm.distributed.expert_parallel import ExpertDispatcher, ExpertPlacement
from nanovllm.distributed.groups import Grid, GroupCoordinator, get_dp_group, get_ep_group
from nanovllm.distributed.load_balance import (
    balance,
    count_replicas,
    pack_replicas,
    plan_moves,
    settle,
)
from nanovllm.distributed.load_balancer import LoadBalancer, move_experts
from nanovllm.distributed.pipeline_parallel import keep_stage
from nanovllm.executor.grid import check_grid
from nanovllm.lab.course.greedy import GreedyLoop
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.layers.tensor_parallel import parallelize
from nanovllm.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from nanovllm.models.loader import checkpoint_tensors, load_model
from nanovllm.models.moe import Experts, MoE, Router
from nanovllm.models.moe_config import MoEConfig
from tests.examples import examples
from tests.oracle import greedy, greedy_choices, make_checkpoint
from tests.pairwise import half_by_day

HIDDEN = 24


# ---------------------------------------------------------------- routing

V2: dict[str, Any] = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
}
V3: dict[str, Any] = {"n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 0}
ROUTERS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "mixtral": (MixtralTopKRouter, "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 8}),
    "qwen3": (
        Qwen3MoeTopKRouter,
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": False},
    ),
    "qwen3-normed": (
        Qwen3MoeTopKRouter,
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": True},
    ),
    "v2-greedy": (
        DeepseekV2TopkRouter,
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        V2 | {"topk_method": "greedy"},
    ),
    "v2-groups": (
        DeepseekV2TopkRouter,
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "v3": (
        DeepseekV3TopkRouter,
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        V3 | {"n_group": 4, "topk_group": 2},
    ),
    "v3-unnormed": (
        DeepseekV3TopkRouter,
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        V3 | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
}


def read_experts(raw: dict[str, Any]) -> MoEConfig | None:
    defaults = SUPPORTED_ARCHITECTURES[raw["architectures"][0]].routing
    return MoEConfig.from_dict(Fields(defaults | Fields(raw, "config.json"), "config.json"))


@pytest.mark.parametrize("name", ROUTERS)
@torch.inference_mode()
def test_router_chooses_as_transformers(name: str) -> None:
    their_class, config_class, architecture, changes = ROUTERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        hidden_size=HIDDEN, num_attention_heads=4, **changes
    )
    raw = config.to_dict() | {"architectures": [architecture]}
    theirs, moe = their_class(config), read_experts(raw)
    assert moe is not None and moe.sparse_layers == (True,) * raw["num_hidden_layers"]
    ours = Router(moe, HIDDEN)
    theirs.weight.data.normal_()
    ours.weight.copy_(theirs.weight)
    if ours.e_score_correction_bias is not None:  # large enough to change the choice
        theirs.e_score_correction_bias.normal_()
        ours.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(50, HIDDEN)
    weights, experts = ours(x)
    _, their_weights, their_experts = theirs(x)
    assert torch.equal(experts.sort(-1).values, their_experts.sort(-1).values)
    for mine, other in ((weights, experts), (their_weights, their_experts)):
        mine.copy_(mine.gather(1, other.argsort(-1)))  # by expert: neither promises an order
    torch.testing.assert_close(weights, their_weights)
    assert ours(x[:0])[1].shape == (0, moe.top_k)


@pytest.mark.parametrize("flag", ["norm_topk_prob", "topk_group", "bias"])
def test_what_the_routers_differ_in_matters(flag: str) -> None:
    """The comparison with transformers would pass without these if they changed nothing."""
    config = MoEConfig(
        16, 4, 8, (True,), scoring="sigmoid", num_groups=4, topk_group=2, correction_bias=True
    )
    changed = {
        "norm_topk_prob": dataclasses.replace(config, renormalize=False),
        "topk_group": dataclasses.replace(config, topk_group=4),
        "bias": dataclasses.replace(config, correction_bias=False),
    }[flag]
    torch.manual_seed(0)
    router = Router(config, HIDDEN)
    for parameter in router.parameters():
        parameter.data.normal_()
    other = Router(changed, HIDDEN)
    other.weight.data.copy_(router.weight)
    if other.e_score_correction_bias is not None:
        assert router.e_score_correction_bias is not None
        other.e_score_correction_bias.data.copy_(router.e_score_correction_bias)
    x = torch.randn(20, HIDDEN)
    a, b = router(x), other(x)
    assert not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]))


def test_the_correction_bias_stays_float32(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek-v3")
    model = load_model(folder, ModelConfig.from_pretrained(folder), torch.bfloat16)
    stored, biases = dict(checkpoint_tensors(folder)), 0
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            biases += 1
            assert torch.equal(parameter, stored[name]) and stored[name].dtype == torch.float32
        else:
            assert parameter.dtype == torch.bfloat16
    assert biases


def test_configurations_of_the_hub() -> None:
    """The hub's files call the number of experts otherwise than transformers 5."""
    qwen = read_experts(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        }
    )
    assert qwen == MoEConfig(128, 8, 768, (False, True, False, False))
    v3 = read_experts(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "num_hidden_layers": 5,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    )
    assert v3 == MoEConfig(
        256, 8, 2048, (False, False, False, True, True), 1, "sigmoid", True, 2.5, 8, 4, True, True
    )
    assert read_experts({"architectures": ["LlamaForCausalLM"]}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"topk_method": "lottery"},
            "topk_method 'lottery' is not supported; supported are greedy",
        ),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is not supported"),
        ({"n_group": 3, "topk_group": 1}, "16 experts in n_group=3 groups"),
        ({"n_group": 8, "topk_group": 1}, "a token cannot use 4 of 2 experts"),
        (
            {"n_routed_experts": 2**16, "num_hidden_layers": 1000},
            "65536 experts per layer are too many",
        ),
    ],
)
def test_unknown_routing_is_refused(changes: dict[str, Any], message: str) -> None:
    config = transformers.DeepseekV3Config(**V3).to_dict() | {
        "architectures": ["DeepseekV3ForCausalLM"]
    }
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(config | changes)


# ---------------------------------------------------------------- the experts' products


def dense(x: Tensor, w13: Tensor, w2: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The definition, in float64: every expert for every token, most of them with weight 0."""
    x, w13, w2 = x.double(), w13.double(), w2.double()
    gate, up = torch.einsum("th,eih->tei", x, w13).chunk(2, dim=-1)
    answers = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, w2)
    all_weights = torch.zeros(len(x), len(w13), dtype=torch.float64)
    present = experts >= 0
    all_weights.scatter_add_(1, experts.clamp(min=0), torch.where(present, weights, 0).double())
    return torch.einsum("te,teh->th", all_weights, answers)


@st.composite
def routings(
    draw: st.DrawFn, num_experts: int, most_tokens: int = 12, top_k: int = 3
) -> list[list[int]]:
    """The experts of some tokens: anything from all tokens to the same ones, to no tokens."""
    one = st.lists(st.integers(0, num_experts - 1), min_size=top_k, max_size=top_k, unique=True)
    if draw(st.booleans()):
        return [draw(one)] * draw(st.integers(0, most_tokens))
    return draw(st.lists(one, max_size=most_tokens))


@settings(max_examples=examples(60))
@given(routing=routings(7), absent=st.booleans(), seed=st.integers(0, 1000))
def test_experts_against_the_definition(routing: list[list[int]], absent: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(7, HIDDEN, 10, GroupCoordinator("one", [0], 0))
    for parameter in experts.parameters():
        parameter.normal_(generator=generator)
    slots = torch.tensor(routing, dtype=torch.int64).view(-1, 3)
    if absent:  # the even experts are elsewhere
        slots = torch.where(slots % 2 == 0, -1, slots)
    x, weights = (
        torch.randn(len(slots), HIDDEN, generator=generator),
        torch.rand(slots.shape, generator=generator),
    )
    out = experts(x, slots, weights, int((slots < 0).sum()))
    torch.testing.assert_close(
        out.double(), dense(x, experts.w13, experts.w2, slots, weights), atol=2e-3, rtol=2e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_linear_skips_empty_groups(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 64, dtype=dtype), torch.randn(5, 32, 64, dtype=dtype)
    out = ops.grouped_linear(x, weight, torch.tensor([0, 4, 0, 3, 0]))
    assert out.shape == (9, 32)
    assert torch.equal(out[:4], ops.linear(x[:4], weight[1])) and torch.equal(
        out[4:7], ops.linear(x[4:7], weight[3])
    )
    packed = ops.pack_weight(weight.flatten(0, 1)).unflatten(0, (5, -1))
    torch.testing.assert_close(
        ops.grouped_linear(x, packed, torch.tensor([0, 4, 0, 3, 0]))[:7], out[:7]
    )


@pytest.mark.parametrize("width", [32, 12])  # 24 rows of gate and up cannot be packed
def test_packed_experts_answer_the_same(width: int) -> None:
    torch.manual_seed(0)
    experts = Experts(4, 64, width, GroupCoordinator("one", [0], 0)).to(torch.bfloat16)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.2)
    slots = torch.tensor([[0, 3], [2, 0], [3, 2]])
    x, weights = torch.randn(3, 64).bfloat16(), torch.rand(3, 2)
    before = experts(x, slots, weights)
    experts.pack()
    torch.testing.assert_close(experts(x, slots, weights), before, atol=0.05, rtol=0.05)


# ----------------------------------------------------------- the shuffle, on ranks that are threads


class ThreadGroup(GroupCoordinator):
    """A rank among threads: hypothesis can have thousands of such groups, and of processes a
    few."""

    def __init__(self, rank: int, shared: Any) -> None:
        super().__init__("threads", list(range(shared.parties)), rank)
        self.meeting = shared

    def _exchange(self, value: Any) -> list[Any]:
        boxes = self.meeting.boxes
        boxes[self.rank] = value
        self.meeting.wait()
        everything = list(boxes)
        self.meeting.wait()
        return everything

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        assert sum(send_counts) == len(x) and len(send_counts) == self.world_size
        self.calls["all_to_all"] += 1
        self.bytes_sent["all_to_all"] += x.nbytes
        parts = [sent[self.rank] for sent in self._exchange(x.split(send_counts))]
        assert [len(part) for part in parts] == receive_counts
        return torch.cat(parts)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._exchange(x.clone())).sum(0))


def on_threads(num_ranks: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What `work` returns on each rank; a rank that fails frees the others."""
    shared: Any = threading.Barrier(num_ranks)
    shared.boxes = [None] * num_ranks
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(ThreadGroup(rank, shared))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            shared.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Any placement that a balancer could come to."""
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(3, 8))
    most = experts * (ranks - 1)
    redundant = draw(st.sampled_from([r for r in range(most + 1) if (experts + r) % ranks == 0]))
    placement = ExpertPlacement.initial(experts, ranks, redundant)
    loads = draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    return balance(loads, placement)


@settings(max_examples=examples(100))
@given(data=st.data(), placement=placements())
def test_shuffle_against_the_definition(data: st.DataObject, placement: ExpertPlacement) -> None:
    """Every rank with tokens of its own, any routing, ranks without tokens: what comes back is the
    dense sum, and no more rows have moved than pairs of a token and a rank that it needs."""
    ranks, num_experts = len(placement.slots), placement.num_experts
    routing = [data.draw(routings(num_experts, 6)) for _ in range(ranks)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    w13 = torch.randn(num_experts, 8, HIDDEN, generator=generator) / 4
    w2 = torch.randn(num_experts, HIDDEN, 4, generator=generator)
    ids = [torch.tensor(rows, dtype=torch.int64).view(-1, 3) for rows in routing]
    tokens = [torch.randn(len(rows), HIDDEN, generator=generator) for rows in routing]
    weights = [torch.rand(rows.shape, generator=generator) for rows in ids]

    def work(group: ThreadGroup) -> tuple[Tensor, int, int]:
        rank = group.rank
        experts = Experts(placement.num_slots, HIDDEN, 4, GroupCoordinator("one", [0], 0))
        experts.w13.copy_(w13[list(placement.slots[rank])])
        experts.w2.copy_(w2[list(placement.slots[rank])])
        dispatcher = ExpertDispatcher(placement, group)
        rows, slots, row_weights, handle = dispatcher.dispatch(
            tokens[rank], ids[rank], weights[rank]
        )
        assert (slots >= 0).any(-1).all(), "a row came that has nothing to do here"
        out = dispatcher.combine(experts(rows, slots, row_weights, int((slots < 0).sum())), handle)
        needed = dispatcher.physical(ids[rank]) // placement.num_slots
        return out, sum(len(set(row)) for row in needed.tolist()), group.bytes_sent["all_to_all"]

    results = on_threads(ranks, work)
    for rank, (out, _, _) in enumerate(results):
        expected = dense(tokens[rank], w13, w2, ids[rank], weights[rank])
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-4)
    # Each row: its channels there and back, and 4 bytes of slot and 4 of weight for each choice;
    # and the counts.
    pairs = sum(needed for _, needed, _ in results)
    assert (
        sum(sent for _, _, sent in results) == pairs * (2 * HIDDEN * 4 + 3 * 8) + ranks * ranks * 8
    )


@settings(max_examples=examples(60))
@given(placement=placements(), seed=st.integers(0, 1000))
def test_replicas_take_turns(placement: ExpertPlacement, seed: int) -> None:
    """An expert's tokens differ by one at most between its replicas, if consecutive tokens want
    it."""
    rank = seed % len(placement.slots)
    dispatcher = ExpertDispatcher(
        placement, GroupCoordinator("ep", list(range(len(placement.slots))), rank)
    )
    expert = seed % placement.num_experts
    chosen = dispatcher.physical(torch.full((13, 1), expert)).flatten().tolist()
    counts = Counter(chosen)
    assert set(counts) <= set(placement.replicas[expert])
    assert (
        max(counts.values()) - min(counts[replica] for replica in placement.replicas[expert]) <= 1
    )


# ---------------------------------------------------------------- placement and balancing


def test_initial_placement() -> None:
    assert ExpertPlacement.initial(8, 4).slots == ((0, 1), (2, 3), (4, 5), (6, 7))
    placement = ExpertPlacement.initial(6, 4, 2)
    assert placement.slots == ((0, 1), (2, 3), (4, 5), (0, 1))
    assert placement.replicas == [[0, 6], [1, 7], [2], [3], [4], [5]]
    assert placement.rank_loads([4, 2, 1, 1, 1, 1]) == [3, 2, 2, 3]
    with pytest.raises(ValueError, match=r"num_redundant_experts may be 2, 6, 10, ... up to 18"):
        ExpertPlacement.initial(6, 4, 1)
    with pytest.raises(
        ValueError,
        match=(
            r"each expert at most once on each; num_redundant_experts may be 0, 4, 8, ... up to 12"
        ),
    ):
        ExpertPlacement.initial(4, 4, 16)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (((0, 1), (2,)), "equal numbers of slots"),
        (((0, 0), (1, 2)), "a different expert in each"),
        (((0, 1), (0, 1)), "exactly the experts 0 to 2"),
        (((0, 1), (2, 3)), "exactly the experts 0 to 2"),
    ],
)
def test_impossible_placements(slots: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(3, slots)


@st.composite
def loads_and_slots(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(loads, number of ranks, redundant experts)."""
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 24))
    redundant = draw(
        st.sampled_from([r for r in range(experts * (ranks - 1) + 1) if (experts + r) % ranks == 0])
    )
    heavy = st.one_of(st.integers(0, 5), st.integers(0, 1000))
    return draw(st.lists(heavy, min_size=experts, max_size=experts)), ranks, redundant


@settings(max_examples=examples(300))
@given(loads_and_slots())
def test_balancing_properties(case: tuple[list[int], int, int]) -> None:
    loads, ranks, redundant = case
    old = ExpertPlacement.initial(len(loads), ranks, redundant)
    counts = count_replicas(loads, len(loads) + redundant, ranks)
    assert min(counts) >= 1 and max(counts) <= ranks and sum(counts) == len(loads) + redundant
    packs = pack_replicas(loads, counts, ranks)
    assert all(len(pack) == old.num_slots for pack in packs)
    assert Counter(expert for pack in packs for expert in pack) == dict(enumerate(counts))
    # The constructor checks that all experts are there, on each rank once.
    new = settle(packs, old)
    assert sorted(map(sorted, new.slots)) == sorted(map(sorted, packs))
    assert sum(new.rank_loads(loads)) == pytest.approx(sum(loads))
    best = balance(loads, old)
    assert max(best.rank_loads(loads)) <= max(old.rank_loads(loads))
    assert balance(loads, best) == best, "a second balancing of the same loads moves experts again"


def test_a_greedy_choice_that_would_lead_nowhere() -> None:
    """Heaviest first onto the emptiest ranks, expert 2 would come last, and find one rank with room
    for its two."""
    counts = [1, 1, 2, 2, 3]
    packs = pack_replicas([1, 1, 2, 6, 3], counts, num_ranks=3)
    assert [len(pack) for pack in packs] == [3, 3, 3]
    assert Counter(expert for pack in packs for expert in pack) == dict(enumerate(counts))


def test_skewed_load_becomes_even() -> None:
    """Loads as 1/rank (Zipf), 64 experts on 8 ranks: the busiest rank has several times the mean
    before, and nearly the mean with 16 more slots."""
    loads = [10000 // (1 + i) for i in range(64)]
    random.Random(0).shuffle(loads)
    mean = sum(loads) / 8
    old = ExpertPlacement.initial(64, 8)
    replicated = ExpertPlacement.initial(64, 8, 16)
    before = max(old.rank_loads(loads)) / mean
    packed = max(balance(loads, old).rank_loads(loads)) / mean
    after = max(balance(loads, replicated).rank_loads(loads)) / mean
    assert before > 1.8 and 1.5 < packed < before and after < 1.02


@settings(max_examples=examples(60))
@given(placement=placements(), seed=st.integers(0, 1000))
def test_moves_carry_the_right_experts(placement: ExpertPlacement, seed: int) -> None:
    """Weights that say which expert they are stand, after the move, where the new placement wants
    them."""
    draw = random.Random(seed)
    new = balance([draw.randrange(100) for _ in range(placement.num_experts)], placement)
    moves = plan_moves(placement, new)
    kept = sum(
        a == b
        for old, now in zip(placement.slots, new.slots, strict=True)
        for a, b in zip(old, now, strict=True)
    )
    assert len(moves) == len(new.slots) * new.num_slots - kept

    def work(group: ThreadGroup) -> tuple[list[int], int, int]:
        numbers = torch.tensor(placement.slots[group.rank], dtype=torch.float32)
        weights = [
            numbers[:, None, None].expand(-1, 3, 2).clone(),
            -numbers[:, None].expand(-1, 5).clone(),
        ]
        told = move_experts(weights, moves, group)
        slots = weights[0][:, 0, 0].tolist()
        assert all(
            (weights[0][i] == e).all() and (weights[1][i] == -e).all() for i, e in enumerate(slots)
        )
        return slots, told, group.bytes_sent["all_to_all"]

    results = on_threads(len(new.slots), work)
    assert [tuple(slots) for slots, _, _ in results] == [
        tuple(map(float, slots)) for slots in new.slots
    ]
    told = {told for _, told, _ in results}
    assert told == {len(moves) * (6 + 5) * 4} == {sum(sent for _, _, sent in results)}


class OneLayer:
    """What a balancer sees of a layer."""

    def __init__(self, placement: ExpertPlacement, group: GroupCoordinator) -> None:
        self.load = torch.zeros(placement.num_experts, dtype=torch.int64)
        self.dispatcher = ExpertDispatcher(placement, group)
        self.weights = torch.tensor(placement.slots[group.rank], dtype=torch.float32)[:, None]

    def expert_weights(self) -> list[Tensor]:
        return [self.weights]


def test_only_the_window_counts() -> None:
    """Window 2 of 5 steps: expert 0 is busy in the first three steps, expert 5 in the last two."""

    def work(group: ThreadGroup) -> tuple[Any, ...]:
        layer = OneLayer(ExpertPlacement.initial(6, 2, 2), group)
        balancer = LoadBalancer([layer], EPLBConfig(window_size=2, step_interval=5), group)
        moved = []
        for step in range(5):
            layer.load += torch.tensor([90, 1, 1, 1, 1, 1] if step < 3 else [1, 1, 1, 1, 1, 30])
            moved.append(balancer.after_step())
        slots = layer.weights[:, 0].int().tolist()
        return (
            moved,
            layer.dispatcher.placement,
            slots,
            balancer.balancedness,
            int(layer.load.sum()),
        )

    results = on_threads(2, work)
    for rank, (moved, placement, slots, (before, after), left) in enumerate(results):
        assert moved == [False] * 4 + [True] and left == 0
        assert len(placement.replicas[5]) == 2 and placement == results[0][1]
        assert tuple(slots) == placement.slots[rank]
        assert before < after > 0.95


def test_padding_of_dummy_steps_does_not_count() -> None:
    """Rank 1 has a request in the first step only; what its padding visits afterwards moves no
    expert."""

    def work(group: ThreadGroup) -> Any:
        layer = OneLayer(ExpertPlacement.initial(6, 2, 2), group)
        balancer = LoadBalancer([layer], EPLBConfig(window_size=5, step_interval=5), group)
        for step in range(5):
            is_dummy = group.rank_in_group == 1 and step > 0
            layer.load += torch.tensor([500, 0, 0, 0, 0, 0] if is_dummy else [1, 1, 1, 1, 1, 30])
            balancer.after_step(was_dummy=is_dummy)
        return layer.dispatcher.placement

    for placement in on_threads(2, work):
        assert len(placement.replicas[5]) == 2


def test_a_stage_without_experts_has_nothing_to_balance() -> None:
    balancer = LoadBalancer(
        [], EPLBConfig(window_size=1, step_interval=2), GroupCoordinator("ep", [0], 0)
    )
    assert not any(balancer.after_step() for _ in range(5))


def test_a_window_of_several_intervals() -> None:
    group = GroupCoordinator("ep", [0], 0)
    layer = OneLayer(ExpertPlacement.initial(4, 1), group)
    balancer = LoadBalancer([layer], EPLBConfig(window_size=6, step_interval=2), group)
    for step in range(10):
        layer.load += step
        assert not balancer.after_step()  # one rank: nothing to move
    assert torch.stack(list(balancer._past))[:, 0, 0].tolist() == [9, 13, 17]
    assert balancer.bytes_moved == 0 and balancer.balancedness == (1.0, 1.0)


def test_eplb_configuration() -> None:
    assert EPLBConfig.from_json('{"step_interval": 10, "log_balancedness": true}') == EPLBConfig(
        1000, 10, 0, True
    )
    assert EPLBConfig() == EPLBConfig(1000, 3000, 0, False)
    for text, message in (
        ("[1]", "takes a JSON object with keys of window_size"),
        ("{", "takes a JSON object"),
        (
            '{"interval": 3}',
            "keys of window_size, step_interval, num_redundant_experts, log_balancedness",
        ),
        ('{"step_interval": 0}', "step_interval must be an integer of at least 1"),
        ('{"num_redundant_experts": 1.5}', "num_redundant_experts must be an integer"),
        ('{"log_balancedness": 3}', "log_balancedness must be True or False"),
        ('{"a":' * 9**5, "takes a JSON object"),
    ):
        with pytest.raises(ValueError, match=message):
            EPLBConfig.from_json(text)


# ---------------------------------------------------------------- a layer on real ranks


def filled_layer(config: MoEConfig, dtype: torch.dtype = torch.float32) -> MoE:
    """A layer whose weights depend on their names only, so that every division of it is the same
    layer."""
    layer = MoE(config, HIDDEN).to(dtype)

    def random_matrix(seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4

    layer.gate.weight.copy_(random_matrix(1, config.num_experts, HIDDEN))
    width = config.intermediate_size
    for expert in range(config.num_experts + config.num_shared_experts):
        for i, matrix in enumerate(("gate", "up", "down")):
            shape = (HIDDEN, width) if matrix == "down" else (width, HIDDEN)
            whole = random_matrix(10 * expert + i + 2, *shape)
            if expert >= config.num_experts and layer.shared_experts is not None:
                linear = (
                    layer.shared_experts.down_proj
                    if matrix == "down"
                    else layer.shared_experts.gate_up_proj
                )
                place = linear.place("weight", 1 if matrix == "up" else 0)
            else:
                place = layer.place(matrix, expert)
            assert place.shape == shape
            place.target.copy_(whole[place.source])
    return layer


def run_layer(configs: list[MoEConfig], dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(99)).to(dtype)
    with torch.inference_mode():
        return [filled_layer(config, dtype)(x) for config in configs]


SHARED = MoEConfig(7, 2, 8, (True,), num_shared_experts=1, scaling_factor=1.5)
SHARED_VARIANTS = [
    SHARED,
    dataclasses.replace(SHARED, shared_as_routed=True),
    dataclasses.replace(SHARED, enable_expert_parallel=True, num_redundant_experts=1),
    dataclasses.replace(
        SHARED, enable_expert_parallel=True, shared_as_routed=True, num_redundant_experts=2
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shared_experts_however_they_are_placed(dtype: torch.dtype) -> None:
    """An MLP in slices, whole on every rank, or a routed expert with replicas: the answer is the
    same."""
    (expected,) = run_layer([SHARED], torch.float32)
    routed_only = run_layer([dataclasses.replace(SHARED, num_shared_experts=0)], torch.float32)[0]
    assert (expected - routed_only).abs().max() > 0.1, "the shared expert does nothing"
    for outputs in run_ranks(run_layer, Grid(tensor=2), SHARED_VARIANTS, dtype):
        for out in outputs:
            assert out.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_grids_that_do_not_fit_are_refused_before_loading() -> None:
    config = ModelConfig(
        "MixtralForCausalLM",
        320,
        64,
        48,
        1,
        num_heads=24,
        num_kv_heads=24,
        head_dim=16,
        max_position_embeddings=64,
    )
    parallel = MoEConfig(8, 2, 12, (True,), enable_expert_parallel=True)

    def check(moe: MoEConfig, tensor: int, data: int = 1) -> None:
        settings = EngineConfig(
            "a model", tensor_parallel_size=tensor, data_parallel_size=data, device="cpu"
        )
        check_grid(settings, dataclasses.replace(config, moe=moe))

    check(parallel, 8)
    check(dataclasses.replace(parallel, num_redundant_experts=4), 3, 2)
    with pytest.raises(ValueError, match="num_redundant_experts may be 4, 10, 16"):
        check(parallel, 3, 2)


def test_shared_as_routed_needs_shared_experts() -> None:
    with pytest.raises(
        ValueError, match=r"shared_as_routed: this model has no shared experts; do not set it"
    ):
        dataclasses.replace(SHARED, num_shared_experts=0, shared_as_routed=True)


# ---------------------------------------------------------------- whole models on real ranks

NUM_TOKENS = 16


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, 320) for _ in range(length)] for length in (3, 17, 40)]


def generate(
    folder: str, division: dict[str, Any], eplb: EPLBConfig | None = None
) -> dict[str, Any]:
    """What each rank does: its part of the model, and its data-parallel share of the prompts."""
    config = ModelConfig.from_pretrained(folder)
    assert config.moe is not None
    config.moe = dataclasses.replace(config.moe, **division)
    model = load_model(folder, config, torch.float32, transforms=[parallelize])
    layers = list(model.moe_layers().values())  # type: ignore[operator]
    dp = get_dp_group()
    loop = GreedyLoop(model, prompts()[dp.rank_in_group :: dp.world_size], NUM_TOKENS)
    balancer = LoadBalancer(layers, eplb) if eplb is not None else None
    moved = []
    for _ in range(NUM_TOKENS):
        loop.step()
        if balancer is not None:
            moved.append(balancer.after_step())
    return {
        "tokens": loop.outputs,
        "moved": moved,
        "weights": sum(weight.nbytes for layer in layers for weight in layer.expert_weights()),
        "slots": [
            layer.dispatcher.placement.slots if layer.dispatcher else None for layer in layers
        ],
        "held": [layer.experts.w13[:, 0, 0].tolist() for layer in layers],
        "load": [int(layer.load.sum()) for layer in layers],
        "calls": dict(get_ep_group().calls),
    }


def tokens_of(grid: Grid, results: list[dict[str, Any]]) -> list[list[int]]:
    """All ranks of a tensor-parallel group agree; the data-parallel ranks have the prompts in
    turns."""
    found: list[list[int]] = [[] for _ in prompts()]
    for rank, result in enumerate(results):
        found[rank // grid.tensor :: grid.data] = result["tokens"]
        assert result["tokens"] == results[rank // grid.tensor * grid.tensor]["tokens"]
    return found


EP: dict[str, Any] = {"enable_expert_parallel": True}
GRIDS: dict[str, tuple[Grid, dict[str, Any]]] = {
    "tp2": (Grid(tensor=2), {}),
    "tp2-ep": (Grid(tensor=2), EP),
    "tp4-ep": (Grid(tensor=4), EP),
    "dp2-tp2-ep": (Grid(data=2, tensor=2), EP),
    "dp4-ep": (Grid(data=4), EP | {"num_redundant_experts": 8}),  # the last rank has no prompt
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "grid_name"), half_by_day(["mixtral", "qwen3-moe"], list(GRIDS))
)
def test_every_grid_gives_the_same_tokens(
    variant: str, grid_name: str, tmp_path: pathlib.Path
) -> None:
    grid, division = GRIDS[grid_name]
    folder = str(make_checkpoint(tmp_path, variant))
    results = run_ranks(generate, grid, folder, division)
    found = tokens_of(grid, results)
    assert found == greedy_choices(folder, prompts(), found, NUM_TOKENS)
    whole = generate(folder, {})
    copies = (8 + division.get("num_redundant_experts", 0)) / 8
    assert sum(result["weights"] for result in results) == whole["weights"] * copies
    if division:  # a token is routed once, on one rank; dummy batches of idle ranks come on top
        idle = NUM_TOKENS * (grid.data > 3) * (2 if variant == "mixtral" else 3)
        assert [sum(loads) for loads in zip(*(r["load"] for r in results), strict=True)] == [
            load + idle for load in whole["load"]
        ]
        assert all(r["calls"]["all_to_all"] == 4 * len(r["load"]) * NUM_TOKENS for r in results)


@pytest.mark.parametrize("grid", [Grid(tensor=2), Grid(data=2, tensor=2)], ids=str)
def test_tokens_do_not_change_while_experts_move(grid: Grid, tmp_path: pathlib.Path) -> None:
    """Balanced every third step, for what the last three steps brought: experts move again and
    again."""
    folder = str(make_checkpoint(tmp_path, "mixtral"))
    eplb = EPLBConfig(window_size=3, step_interval=3, num_redundant_experts=4)
    results = run_ranks(generate, grid, folder, EP | {"num_redundant_experts": 4}, eplb)
    found = tokens_of(grid, results)
    assert found == greedy_choices(folder, prompts(), found, NUM_TOKENS)
    assert all(result["moved"] == results[0]["moved"] for result in results)
    assert sum(results[0]["moved"]) >= 3
    initial = ExpertPlacement.initial(8, grid.world_size, 4).slots
    first_numbers = generate(folder, {})["held"]
    for layer, slots in enumerate(results[0]["slots"]):
        assert slots != initial and all(result["slots"][layer] == slots for result in results)
        for rank, result in enumerate(results):
            # Each slot holds the weights of the expert it should.
            assert result["held"][layer] == [first_numbers[layer][expert] for expert in slots[rank]]


def test_a_checkpoint_with_other_experts(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    raw = json.loads((folder / "config.json").read_text())
    for experts, message in (
        (4, r"no place for .*experts\.\d\.\w+\.weight.*belong together"),
        (16, r"gate.weight has shape \[8, 64\]"),
    ):
        raw["num_local_experts"] = experts
        with pytest.raises(CheckpointError, match=message):
            load_model(folder, ModelConfig.from_dict(raw), torch.float32)


def test_a_checkpoint_with_more_shared_experts(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek-v2")
    config = ModelConfig.from_pretrained(folder)
    assert config.moe is not None and config.moe.num_shared_experts == 2
    config.moe = dataclasses.replace(config.moe, num_shared_experts=1, shared_as_routed=True)
    with pytest.raises(CheckpointError, match=r"mlp\.shared_experts\.\w+\.weight has shape"):
        load_model(folder, config, torch.float32)


# ---------------------------------------------------------------- random weights

DIVISIONS: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "kv heads repeated": ("llama-biased", 4, {"tp": 4}, {}),
    "tied, stages": ("llama-mha-tied", 2, {"pp": 2}, {}),
    "slices of experts": ("mixtral", 2, {"tp": 2}, {}),
    "whole experts": ("deepseek-v3", 2, {"tp": 2, "ep": 2}, EP | {"num_redundant_experts": 2}),
    "shared ones among them": (
        "deepseek-v2",
        2,
        {"tp": 2, "ep": 2},
        EP | {"num_redundant_experts": 4, "shared_as_routed": True},
    ),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_random_weights_are_the_same_on_every_grid(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank holds of a tensor is that part of what one rank alone would hold."""
    variant, num_ranks, division, experts = DIVISIONS[name]
    folder = str(make_checkpoint(tmp_path, variant))
    config = ModelConfig.from_pretrained(folder)
    alone = load_model(folder, config, torch.float32, load_format="dummy", seed=3)
    whole = {tensor: place.target for tensor, [place] in alone.checkpoint_places().items()}
    if config.moe is not None:
        config.moe = dataclasses.replace(config.moe, **experts)
    seen: set[str] = set()
    for rank in range(num_ranks):
        for group, size in division.items():
            monkeypatch.setitem(
                groups.own_groups, group, GroupCoordinator(group, list(range(size)), rank)
            )
        model = load_model(
            folder,
            config,
            torch.float32,
            load_format="dummy",
            seed=3,
            transforms=[parallelize, keep_stage],
        )
        for tensor, places in model.checkpoint_places().items():
            for place in places:
                if place.target.numel():
                    assert torch.equal(place.target, whole[tensor][place.source]), tensor
                    seen.add(tensor)
    assert seen == set(whole)
    matrices = torch.cat(
        [values.flatten() for tensor, values in whole.items() if "norm" not in tensor]
    )
    assert float(matrices.std()) == pytest.approx(0.02, rel=0.02) and matrices.abs().max() < 0.2
    assert len(matrices.unique()) > 0.99 * len(matrices), "numbers come again and again"


@pytest.mark.parametrize(
    "grid", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_random_weights_say_the_same_on_every_grid(
    grid: dict[str, int], tmp_path: pathlib.Path
) -> None:
    folder = str(make_checkpoint(tmp_path, "mixtral"))

    def tokens(seed: int, **division: int) -> list[list[int]]:
        options = {"dtype": "float32", "load_format": "dummy", "num_kv_blocks": 64}
        llm = LLM(folder, seed=seed, **options, **division)
        try:
            return greedy(llm, prompts(), NUM_TOKENS)
        finally:
            llm.engine.core.close()

    assert tokens(1, **grid) == tokens(1) != tokens(2)


MOVING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2": ("mixtral", {"tensor_parallel_size": 2}, {}),
    "dp2": ("mixtral", {"data_parallel_size": 2}, {}),
    # Two shared experts, in the checkpoint one MLP of twice the width, have slots and replicas as
    # all others have.
    "two-shared": ("deepseek-v2", {"tensor_parallel_size": 2}, {"shared_as_routed": True}),
}


@pytest.mark.parametrize(
    "case",
    ["dp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2", "two-shared"))],
)
def test_experts_move_while_the_engine_serves(
    case: str,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    variant, grid, more = MOVING[case]
    folder = str(make_checkpoint(tmp_path, variant))
    # Alone, the last one leaves an engine of two without a request: that makes dummy steps, and
    # balances with the other.
    batches = [[[5, 6, 7, 8, 9] * 3, [40, 41, 42] * 5, [100, 3, 200]], [[7, 90, 230, 11]]]
    caplog.set_level(logging.INFO, "nanovllm")
    eplb = {
        "window_size": 4,
        "step_interval": 5,
        "num_redundant_experts": 2,
        "log_balancedness": True,
    }
    llm = LLM(
        folder,
        dtype="float32",
        num_kv_blocks=64,
        block_size=4,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=eplb | more,
        **grid,
    )
    said: list[str] = []
    for batch in batches:
        found = greedy(llm, batch, 24)
        assert found == greedy_choices(folder, batch, found, 24)
        said.append(capfd.readouterr().err)
    llm.engine.core.close()
    said.append(capfd.readouterr().err)
    moved = [re.findall(r"balancedness of experts: .*; (\d+) bytes moved", text) for text in said]
    assert all(sum(int(count) > 0 for count in counts) >= 4 for counts in moved[: len(batches)])
    both = Counter(count for counts in moved for count in counts)
    assert all(number % 2 == 0 for number in both.values()), "each of two ranks says it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, "needs enable_expert_parallel"),
        ({"eplb_config": {"step_interval": 5}}, "does nothing without enable_eplb"),
        ({"enable_expert_parallel": True, "enable_eplb": True}, "LlamaForCausalLM has no experts"),
    ],
)
def test_balancing_where_there_is_nothing_to_balance(
    options: dict[str, Any], message: str, tiny_model: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_model), **options)
