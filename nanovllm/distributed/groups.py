"""The grid of ranks, and its groups, as every rank has them before `process_groups` connects it to
others: groups of one.

Built by notebooks/21_process_groups.ipynb: edit it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from nanovllm.distributed.shared_collectives import SharedCollectives

T = TypeVar("T")


@dataclass(frozen=True)
class Grid:
    """The number of ranks in each direction: data, pipeline, tensor. The tensor rank changes
    fastest."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.data * self.pipeline * self.tensor

    def groups(self, kind: str) -> list[list[int]]:
        """The ranks of each group of a kind.

        Rank `(d * pipeline + p) * tensor + t` has the numbers (d, p, t) in the grid. Each group is
        in ascending order, and the groups are in the order of their first ranks.

        Args:
            kind: "tp", "pp" or "dp": ranks that differ in t, p or d only; "ep": all ranks with the
                same p; "world": all ranks.
        """
        ranks = torch.arange(self.world_size).view(self.data, self.pipeline, self.tensor)
        rows = {
            "world": ranks.reshape(1, -1),
            "tp": ranks.reshape(-1, self.tensor),
            "pp": ranks.transpose(1, 2).reshape(-1, self.pipeline),
            "dp": ranks.permute(1, 2, 0).reshape(-1, self.data),
            "ep": ranks.transpose(0, 1).reshape(self.pipeline, -1),
        }
        return rows[kind].tolist()


class GroupCoordinator:
    """A group of ranks that compute together, as one of them sees it. This class is a group of one:
    its collectives return their arguments and cost nothing.
    `process_groups.ProcessGroupCoordinator` talks to other ranks.

    Args:
        name: "tp", "pp", ...
        ranks: the global ranks of the group.
        rank: the global rank of this process.

    Attributes:
        is_first, is_last: whether this rank is the first or the last one of the group (as a stage
            of a pipeline).
        device_group: carries tensors; None in a group of one.
        shared: all-reduce and all-gather in memory that all ranks share; None if they share none.
        calls, bytes_sent: for each collective, the number of calls and the bytes of this rank's
            tensors.
    """

    def __init__(self, name: str, ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        self.name = name
        self.ranks = list(ranks)
        self.rank = rank
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(rank)
        self.is_first = rank == ranks[0]
        self.is_last = rank == ranks[-1]
        self.device_group: ProcessGroup | None = None
        self.shared: SharedCollectives | None = None
        self.calls: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the group. All ranks get the same bits."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the tensors of all ranks, which have the same shape, along `dim`."""
        return x

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Sum x over the group; each rank gets its equal part of the sum along `dim`."""
        return x

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Exchange rows: the first `send_counts[0]` rows of x go to the first rank of the group,
        and so on.

        Returns:
            The rows for this rank, `[sum(receive_counts), ...]`, by sender.
        """
        return x

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Send any picklable value of one rank to every rank. It is a small one: every rank's value
        travels."""
        return self.all_gather_object(value)[source]

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, in the order of the group."""
        return [value]

    def barrier(self) -> None:
        """Wait until every rank of the group is here. On a timeout, the first rank's error names
        the missing ranks."""


KINDS = ("world", "tp", "pp", "dp", "ep")
# This rank's group of each kind; `initialize_groups` puts in those that talk to other ranks.
own_groups = {name: GroupCoordinator(name) for name in KINDS}


def get_world_group() -> GroupCoordinator:
    """All ranks."""
    return own_groups["world"]


def get_tp_group() -> GroupCoordinator:
    """The ranks that share each layer (tensor parallelism)."""
    return own_groups["tp"]


def get_pp_group() -> GroupCoordinator:
    """The ranks that share the model layer by layer (pipeline parallelism)."""
    return own_groups["pp"]


def get_dp_group() -> GroupCoordinator:
    """The ranks that hold the same weights for other requests (data parallelism)."""
    return own_groups["dp"]


def get_ep_group() -> GroupCoordinator:
    """The ranks that share the experts of a layer (expert parallelism): all of a pipeline stage."""
    return own_groups["ep"]
