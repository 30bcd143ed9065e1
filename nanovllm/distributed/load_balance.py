"""Expert-parallel load balancing (EPLB): busy experts get replicas, on ranks that are less busy.

Built by notebooks/24_expert_parallel.ipynb: edit it there.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nanovllm.distributed.expert_parallel import ExpertPlacement
from nanovllm.distributed.groups import GroupCoordinator, get_ep_group

if TYPE_CHECKING:
    from nanovllm.models.moe import MoE

logger = logging.getLogger(__name__)


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


def move_experts(weights: Sequence[Tensor], moves: list[Move], group: GroupCoordinator) -> int:
    """Move experts with one uneven all-to-all.

    Args:
        weights: tensors `[num_slots, ...]` of this rank; an expert is one row of each.

    Returns: bytes that all ranks have sent in total.
    """
    rank = group.rank_in_group
    leaving = sorted((move for move in moves if move.source == rank), key=lambda move: move.target)
    coming = sorted((move for move in moves if move.target == rank), key=lambda move: move.source)
    flat = [weight.flatten(1) for weight in weights]
    rows = torch.cat([part[[move.source_slot for move in leaving]] for part in flat], dim=1)
    ranks = range(group.world_size)
    sent = [sum(move.target == other for move in leaving) for other in ranks]
    received = group.all_to_all(
        rows, sent, [sum(move.source == other for move in coming) for other in ranks]
    )
    slots = [move.target_slot for move in coming]
    for part, new in zip(
        flat, torch.split(received, [part.shape[1] for part in flat], dim=1), strict=True
    ):
        part[slots] = new
    return len(moves) * rows.shape[1] * rows.element_size()


@dataclass(frozen=True)
class EPLBConfig:
    """When to balance, and with how many slots; names and defaults are those of vLLM's
    `--eplb-config`.

    Attributes:
        window_size: steps whose loads count.
        step_interval: steps from one balancing to the next.
        num_redundant_experts: slots beyond one per expert, over all ranks.
        log_balancedness: log the mean over the maximum of the ranks' loads each time.
        shared_as_routed: place shared experts like routed ones that every token visits (not in
            vLLM).
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    shared_as_routed: bool = False

    def __post_init__(self) -> None:
        if self.window_size < 1 or self.step_interval < 1 or self.num_redundant_experts < 0:
            raise ValueError(
                "window_size and step_interval must be at least 1, and num_redundant_experts at "
                "least 0"
            )

    @classmethod
    def from_json(cls, text: str) -> EPLBConfig:
        """Parse the value of the command line.

        Raises:
            ValueError: not a JSON object, or an unknown key or value.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(
                f"--eplb-config takes a JSON object with keys of {names}; got {text}: {error}"
            ) from None


class LoadBalancer:
    """Counts the tokens of each expert, and rearranges the experts from time to time.

    Every rank of the expert-parallel group has a balancer and calls `after_step` after every
    forward pass. All ranks therefore make the same decision, from the same numbers, between the
    same two steps.

    Args:
        layers: the layers with experts (see `models.moe.MoE`), in order.
        config: when to balance.
        group: default: the expert parallel group.

    Attributes:
        bytes_moved: of weights, over all ranks.
        balancedness: mean over maximum of the ranks' loads in the last window, before and after: 1
            is perfect.
    """

    def __init__(
        self, layers: Sequence[MoE], config: EPLBConfig, group: GroupCoordinator | None = None
    ) -> None:
        self.layers = layers
        self.config = config
        self.group = group or get_ep_group()
        self.step = self.bytes_moved = 0
        self.balancedness = (1.0, 1.0)
        # A window is a part of the interval, or several whole intervals.
        self._past: deque[Tensor] = deque(maxlen=max(1, config.window_size // config.step_interval))
        # Loads after the last step that counted.
        self._known = [torch.zeros_like(layer.load) for layer in layers]

    @torch.inference_mode()
    def after_step(self, was_dummy: bool = False) -> bool:
        """Count a step, and balance if it is time.

        Args:
            was_dummy: this rank had no request in the step, so its padding tokens do not count.

        Returns: whether experts have moved.
        """
        if not self.layers:  # no rank of this pipeline stage has experts
            return False
        for layer, known in zip(self.layers, self._known, strict=True):
            if was_dummy:
                layer.load.copy_(known)
            else:
                known.copy_(layer.load)
        self.step += 1
        phase = self.step % self.config.step_interval
        if phase == 0:
            return self.rebalance()
        if self.config.step_interval - phase == self.config.window_size:
            self._take_loads()
        return False

    # Weights and counters were created in inference mode, and can only be written there.
    @torch.inference_mode()
    def _take_loads(self) -> Tensor:
        """The counts since the last call, `[num_layers, num_experts]` int64."""
        counted = torch.stack([layer.load for layer in self.layers])
        for layer, known in zip(self.layers, self._known, strict=True):
            layer.load.zero_()
            known.zero_()
        return counted

    @torch.inference_mode()
    def rebalance(self) -> bool:
        """Balance every layer for the tokens of the window. Returns: whether experts have moved."""
        self._past.append(self.group.all_reduce(self._take_loads()))
        window = torch.stack(list(self._past)).sum(0).tolist()
        before = 0.0
        after = 0.0
        moved = 0
        for layer, loads in zip(self.layers, window, strict=True):
            assert layer.dispatcher is not None, "the ranks share its experts"
            old = layer.dispatcher.placement
            new = balance(loads, old)
            before += max(old.rank_loads(loads))
            after += max(new.rank_loads(loads))
            if new != old:
                moved += move_experts(layer.expert_weights(), plan_moves(old, new), self.group)
                layer.dispatcher.place(new)
        mean = sum(map(sum, window)) / self.group.world_size
        self.balancedness = (mean / before, mean / after) if before else (1.0, 1.0)
        self.bytes_moved += moved
        if self.config.log_balancedness:
            logger.info(
                "balancedness of experts: %.2f, now %.2f; %d bytes moved", *self.balancedness, moved
            )
        return moved > 0
