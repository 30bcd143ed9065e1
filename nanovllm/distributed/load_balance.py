"""Expert-parallel load balancing (EPLB): busy experts get replicas, on ranks that are less busy.
`load_balancer` measures the loads and moves the experts.

Built by notebooks/24_expert_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanovllm.distributed.expert_parallel import ExpertPlacement


def count_replicas(loads: Sequence[int], num_slots: int, num_ranks: int) -> list[int]:
    """The number of replicas of each expert: one, and each remaining slot goes to the expert whose
    replicas are the busiest (the greedy rule of DeepSeek's EPLB, github.com/deepseek-ai/EPLB). Of
    equally busy ones, the first gets it.

    Args:
        loads: tokens of each logical expert, which its replicas share equally.
        num_slots: of all ranks together.
        num_ranks: the maximum number of replicas of an expert.
    """
    counts = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        open_ones = [expert for expert, count in enumerate(counts) if count < num_ranks]
        busiest = max(open_ones, key=lambda expert: loads[expert] / counts[expert])
        counts[busiest] += 1
    return counts


def pack_replicas(loads: Sequence[int], counts: Sequence[int], num_ranks: int) -> list[set[int]]:
    """Group the experts into one set per rank: the heaviest replicas first, each in the sets with
    the lowest load so far.

    All sets have the same size, and none has an expert twice. If that greedy choice leaves a
    replica without a set, the sets with the most free slots come first instead, which always
    succeeds (Gale and Ryser, 1957)."""
    size = sum(counts) // num_ranks
    order = sorted(range(len(loads)), key=lambda expert: -loads[expert] / counts[expert])
    packs: list[set[int]] = []
    for fill_evenly in (False, True):
        packs = [set() for _ in range(num_ranks)]
        total = [0.0] * num_ranks
        for expert in order:
            free = [rank for rank in range(num_ranks) if len(packs[rank]) < size]
            free.sort(key=lambda rank: (len(packs[rank]) if fill_evenly else 0, total[rank]))
            for rank in free[: counts[expert]]:
                packs[rank].add(expert)
                total[rank] += loads[expert] / counts[expert]
        if all(len(pack) == size for pack in packs):
            break
    return packs


def settle(packs: list[set[int]], old: ExpertPlacement) -> ExpertPlacement:
    """Assign each pack to the rank that already holds most of it, and keep experts that stay in
    their slots."""
    open_ranks = set(range(len(packs)))
    chosen = {}
    pairs = [
        (len(pack & set(slots)), i, rank)
        for i, pack in enumerate(packs)
        for rank, slots in enumerate(old.slots)
    ]
    for _, i, rank in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        if i not in chosen and rank in open_ranks:
            chosen[i] = rank
            open_ranks.remove(rank)
    slots: list[tuple[int, ...]] = [()] * len(packs)
    for i, rank in chosen.items():
        newcomers = iter(sorted(packs[i] - set(old.slots[rank])))
        slots[rank] = tuple(
            expert if expert in packs[i] else next(newcomers) for expert in old.slots[rank]
        )
    return ExpertPlacement(old.num_experts, tuple(slots))


def balance(loads: Sequence[int], old: ExpertPlacement) -> ExpertPlacement:
    """A placement for these loads: `old` itself if the greedy one does not lower the load of the
    busiest rank."""
    ranks = len(old.slots)
    counts = count_replicas(loads, ranks * old.num_slots, ranks)
    new = settle(pack_replicas(loads, counts, ranks), old)
    return new if max(new.rank_loads(loads)) < max(old.rank_loads(loads)) else old


class Move(NamedTuple):
    """An expert that one rank sends to another."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def plan_moves(old: ExpertPlacement, new: ExpertPlacement) -> list[Move]:
    """The moves from `old` to `new`: one for each slot whose expert changes, by target rank and
    then by slot.

    The source is a slot that holds the expert in `old`. If several ranks hold it, the one that has
    sent the fewest experts so far sends it, of equal ones the first. Every rank computes the same
    list."""
    moves = []
    sent = [0] * len(old.slots)
    replicas = old.replicas
    for target, slots in enumerate(new.slots):
        for slot, expert in enumerate(slots):
            if old.slots[target][slot] == expert:
                continue
            places = (divmod(physical, old.num_slots) for physical in replicas[expert])
            source, source_slot = min(places, key=lambda place: sent[place[0]])
            sent[source] += 1
            moves.append(Move(source, source_slot, target, slot))
    return moves
