"""Tokens on their way to experts on other ranks and back: the bytes that move, and the time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.distributed.expert_parallel import ExpertDispatcher, ExpertPlacement
from nanovllm.distributed.groups import Grid, get_ep_group
from nanovllm.lab.bench.metrics import alternate, slowest, timed
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal, paired
from nanovllm.lab.processes import run_ranks

SHUFFLE = "dispatch and combine"
BARE = "bare all-to-all"
COPY = "copy"


def routing(num_tokens: int, num_experts: int, top_k: int, rank: int) -> Tensor:
    """Random choices of a rank's tokens, `[num_tokens, top_k]` int64, all different for a token."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]


def rows_to(topk_ids: Tensor, placement: ExpertPlacement) -> list[int]:
    """The number of rows that a rank sends to each rank: every token goes once to each rank that
    has an expert of it."""
    home = {expert: rank for rank, slots in enumerate(placement.slots) for expert in slots}
    goals = [{home[expert] for expert in choices} for choices in topk_ids.tolist()]
    return [sum(rank in goal for goal in goals) for rank in range(len(placement.slots))]


def shuffle_bytes(sent: int, received: int, hidden: int, itemsize: int, top_k: int) -> int:
    """Bytes that rows need: sent ones are hidden states with their choices (a slot and a weight, 4
    bytes each), received ones go back as hidden states alone."""
    return sent * (hidden * itemsize + 8 * top_k) + received * hidden * itemsize


def shuffle(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, rounds: int
) -> dict[str, Any]:
    """On each rank: tokens go to experts and come back; and the same bytes by a bare all-to-all,
    and by a copy."""
    group = get_ep_group()
    placement = ExpertPlacement.initial(num_experts, group.world_size)
    dispatcher = ExpertDispatcher(placement)
    x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16)
    ids = [routing(num_tokens, num_experts, top_k, rank) for rank in range(group.world_size)]
    weights = torch.full((num_tokens, top_k), 1 / top_k)
    plans = [rows_to(choices, placement) for choices in ids]
    sent = plans[group.rank_in_group]
    received = [plan[group.rank_in_group] for plan in plans]
    there = x.new_ones(sum(sent), hidden)
    back = x.new_ones(sum(received), hidden)
    target = torch.empty_like(there), torch.empty_like(back)

    def whole() -> None:
        rows, _, _, handle = dispatcher.dispatch(x, ids[group.rank_in_group], weights)
        dispatcher.combine(rows, handle)

    def bare() -> None:
        group.all_to_all(there, sent, received)
        group.all_to_all(back, received, sent)

    def copy() -> None:
        target[0].copy_(there)
        target[1].copy_(back)

    group.bytes_sent.clear()
    whole()
    counted = group.bytes_sent["all_to_all"]
    works = {SHUFFLE: whole, BARE: bare, COPY: copy}

    def run(work: Callable[[], None]) -> float:
        group.all_reduce(torch.zeros(1))  # the ranks begin together
        return timed(work)

    times = alternate({way: partial(run, work) for way, work in works.items()}, rounds, warm_up=0)
    # Each rank is also told how many rows will come: 8 bytes for each rank.
    sizes = hidden, x.element_size(), top_k
    formula = 8 * group.world_size + shuffle_bytes(sum(sent), sum(received), *sizes)
    own = 8 + shuffle_bytes(sent[group.rank_in_group], received[group.rank_in_group], *sizes)
    return {"bytes": counted, "formula": formula, "to_others": formula - own, "seconds": times}


def experts(setting: Setting) -> Iterator[Row]:
    """Two ranks with half of the experts each."""
    num_experts, top_k, hidden = (4, 2, 32) if setting.dry_run else (32, 4, 1024)
    rounds = 2 if setting.dry_run else 20 * setting.repeats
    for num_tokens in (4,) if setting.dry_run else (16, 512):
        ranks = run_ranks(shuffle, Grid(data=2), num_tokens, num_experts, top_k, hidden, rounds)
        counted, formula, to_others = (
            sum(rank[name] for rank in ranks) for name in ("bytes", "formula", "to_others")
        )
        where = f"expert shuffle, {num_tokens} tokens per rank"
        yield goal(f"{where}: bytes moved", counted, near=formula)
        times = {
            way: slowest([rank["seconds"][way] for rank in ranks]) for way in ranks[0]["seconds"]
        }
        for way in (BARE, COPY):
            yield goal(
                f"{where}: time ÷ {way} of the same rows",
                paired(times[way], times[SHUFFLE])["median"],
                "×",
            )
        yield {
            "table": (
                f"Tokens of {hidden} bf16 values, sent to {top_k} of {num_experts} experts on 2 "
                "ranks and back, medians"
            ),
            "tokens per rank": num_tokens,
            "KB sent": counted / 1024,
            "KB sent to other ranks": to_others / 1024,
        } | {
            f"{way}, µs": [1e6 * seconds for seconds in times[way]] for way in (SHUFFLE, BARE, COPY)
        }
