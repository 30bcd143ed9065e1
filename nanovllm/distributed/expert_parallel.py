"""Expert parallelism: which rank holds which experts, and how tokens get there (dispatch) and back
(combine).

Built by notebooks/24_expert_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.distributed.expert_slots import slots_per_rank
from nanovllm.distributed.groups import GroupCoordinator, get_ep_group


@dataclass(frozen=True)
class ExpertPlacement:
    """Which expert is in which slot of which rank.

    An expert of the model is a *logical* expert; a slot of a rank holds a *physical* expert, whose
    number is `rank * num_slots + slot`. A logical expert with several physical ones has replicas.

    Args:
        num_experts: logical experts.
        slots: for each rank, the logical expert in each of its slots.

    Raises:
        ValueError: an expert has no slot, a rank holds it twice, or ranks have different numbers of
            slots.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if any(len(rank) != self.num_slots or len(set(rank)) != len(rank) for rank in self.slots):
            raise ValueError(
                "ranks must have equal numbers of slots, and a different expert in each"
            )
        if set().union(*self.slots) != set(range(self.num_experts)):
            raise ValueError(f"the slots must hold exactly the experts 0 to {self.num_experts - 1}")

    @classmethod
    def initial(cls, num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
        """Place the experts in order, then again from the first one on in the redundant slots.

        Raises:
            ValueError: the slots cannot be divided evenly, or are more than experts times ranks.
        """
        size = slots_per_rank(num_experts, num_ranks, num_redundant)
        total = num_ranks * size
        firsts = range(0, total, size)
        return cls(
            num_experts,
            tuple(tuple((first + slot) % num_experts for slot in range(size)) for first in firsts),
        )

    @property
    def num_slots(self) -> int:
        """Slots per rank."""
        return len(self.slots[0])

    @property
    def replicas(self) -> list[list[int]]:
        """The physical experts of each logical expert, in order."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, slots in enumerate(self.slots):
            for slot, expert in enumerate(slots):
                found[expert].append(rank * self.num_slots + slot)
        return found

    def rank_loads(self, loads: Sequence[int]) -> list[float]:
        """Tokens per rank if the experts get `loads` tokens each, divided evenly among replicas."""
        share = [load / len(replicas) for load, replicas in zip(loads, self.replicas, strict=True)]
        return [sum(share[expert] for expert in slots) for slots in self.slots]


class DispatchHandle(NamedTuple):
    """What `combine` needs to know about a `dispatch`.

    Attributes:
        tokens: for each row sent, the number of its token, `[sum(sent)]` int64.
        sent, received: rows to and from each rank.
        num_tokens: of this rank.
    """

    tokens: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int


class Dispatched(NamedTuple):
    """The rows that a rank has received for its experts.

    Attributes:
        rows: `[num_received, hidden_size]`.
        slots: the slots of this rank that each row visits, `[num_received, top_k]` int64; -1 for
            experts on other ranks.
        weights: of these experts, `[num_received, top_k]` float32.
        handle: for `combine`.
    """

    rows: Tensor
    slots: Tensor
    weights: Tensor
    handle: DispatchHandle


class ExpertDispatcher:
    """Sends each token to the ranks that hold its experts, and sums their results.

    The interface is DeepEP's (github.com/deepseek-ai/DeepEP), over any backend. As in its
    high-throughput mode, a token goes *once* to each rank that holds any of its experts, and the
    rank sums their results before it sends them back. Ranks may have different numbers of tokens,
    or none, but must make the same number of calls.

    Args:
        placement: see `place`.
        group: default: the expert parallel group.
    """

    def __init__(self, placement: ExpertPlacement, group: GroupCoordinator | None = None) -> None:
        self.group = group or get_ep_group()
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        """Use `placement` from the next dispatch on. All ranks must change it at the same step."""
        self.placement = placement
        replicas = placement.replicas
        self._num_replicas = torch.tensor([len(found) for found in replicas], device="cpu")
        most = len(placement.slots)
        self._replicas = torch.tensor(
            [found + [-1] * (most - len(found)) for found in replicas], device="cpu"
        )

    def physical(self, topk_ids: Tensor) -> Tensor:
        """Choose a replica for each expert of each token: tokens take turns, and ranks begin at
        different replicas.

        Args:
            topk_ids: `[num_tokens, top_k]` int64, logical experts.

        Returns: physical experts, of the same shape.
        """
        self._replicas, self._num_replicas = (
            t.to(topk_ids.device) for t in (self._replicas, self._num_replicas)
        )
        turn = torch.arange(len(topk_ids), device=topk_ids.device) + self.group.rank_in_group
        return self._replicas[topk_ids, turn[:, None] % self._num_replicas[topk_ids]]

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatched:
        """Exchange tokens: every rank of the group calls this, and gets the tokens for its experts.

        `physical` chooses a replica for each expert; replica p is in slot `p % num_slots` of rank
        `p // num_slots`. A token goes once to each rank that has any of its replicas. Rows are sent
        in the order of the target ranks, then of the tokens, and arrive in the order of the ranks
        that sent them. The ranks exchange the numbers of rows first, so that each knows how many it
        receives.

        Args:
            x: `[num_tokens, hidden_size]`, this rank's tokens; there may be none.
            topk_ids: `[num_tokens, top_k]` int64, logical experts.
            topk_weights: `[num_tokens, top_k]` float32.
        """
        size = self.placement.num_slots
        ranks = self.group.world_size
        physical = self.physical(topk_ids)
        target = physical // size
        goes = torch.zeros(len(x), ranks, dtype=torch.bool, device=x.device).scatter_(
            1, target, True
        )
        rank, tokens = goes.T.nonzero(as_tuple=True)  # by rank, then by token
        # A rank must know how many rows to receive: exchange the counts first.
        counts = goes.sum(0)
        sent = counts.tolist()
        received = self.group.all_to_all(counts, [1] * ranks, [1] * ranks).tolist()
        rows = self.group.all_to_all(x[tokens], sent, received)
        slots = torch.where(target[tokens] == rank[:, None], physical[tokens] % size, -1)
        # One message for both: a slot travels as the bits of an int32 in place of a float32.
        routing = torch.cat([slots.int().view(torch.float32), topk_weights[tokens].float()], dim=1)
        routing = self.group.all_to_all(routing, sent, received)
        slots, weights = routing.chunk(2, dim=1)
        handle = DispatchHandle(tokens, sent, received, len(x))
        return Dispatched(rows, slots.contiguous().view(torch.int32).long(), weights, handle)

    def combine(self, y: Tensor, handle: DispatchHandle) -> Tensor:
        """Send the results back and sum them.

        Args:
            y: `[num_received, hidden_size]`: for each row received, the weighted sum over this
                rank's experts.

        Returns: `[num_tokens, hidden_size]`: for each token of this rank, the sum over the ranks
            that it was sent to, zeros if there are none. It is added in float32, rank by rank in
            their order, and has the dtype of y.
        """
        back = self.group.all_to_all(y, handle.received, handle.sent)
        out = torch.zeros(handle.num_tokens, y.shape[1], dtype=torch.float32, device=y.device)
        # Rank by rank, each of which returns a token once: in a single call, the order of a GPU's
        # additions would be random.
        by_rank = zip(
            torch.split(handle.tokens, handle.sent), torch.split(back, handle.sent), strict=True
        )
        for tokens, rows in by_rank:
            out[tokens] += rows.float()
        return out.to(y.dtype)
