"""Connects this process to the other ranks of the grid, and the collectives of a group of several
ranks.

Built by notebooks/21_process_groups.ipynb: edit it there.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.distributed.groups import (
    KINDS,
    Grid,
    GroupCoordinator,
    T,
    get_world_group,
    own_groups,
)
from nanovllm.distributed.shared_collectives import SharedCollectives, open_segment
from nanovllm.distributed.shared_memory import Segment, SegmentHandle
from nanovllm.processes.activity import waiting_for_others
from nanovllm.processes.standstill import CallCounter, CollectiveError

logger = logging.getLogger(__name__)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a row of bytes. Backends move bytes of dtypes that they cannot compute
    with."""
    return tensor.view(-1).view(torch.uint8)


class ProcessGroupCoordinator(GroupCoordinator):
    """A group of several ranks, each in a process of its own.

    Every rank of the group must call the same collectives in the same order, with tensors of the
    same shape.

    Args:
        device_group: torch's group for tensors on the device (NCCL or gloo).
        cpu_group: torch's group for tensors and objects in host memory (gloo).
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        device_group: dist.ProcessGroup,
        cpu_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(name, ranks, rank)
        self.device_group = device_group
        self.cpu_group = cpu_group
        self._counter = CallCounter(name, ranks)

    @contextmanager
    def _collective(self, name: str, *tensors: Tensor) -> Iterator[None]:
        """Count a call. An error names the collective and the ranks that are gone."""
        self.calls[name] += 1
        self.bytes_sent[name] += sum(tensor.nbytes for tensor in tensors)
        try:
            with waiting_for_others(), self._counter.call(name):
                yield
        except RuntimeError as error:
            lost = "; ".join(self.shared.lost(range(self.world_size))) if self.shared else ""
            where = f"{name} of group {self.name} (ranks {self.ranks}), rank {self.rank}"
            raise CollectiveError(f"{where}: {lost or error}") from error

    def _sum(self, x: Tensor) -> None:
        """Replace a contiguous tensor by its sum over the group."""
        if self.shared and x.is_cpu and self.shared.can_sum(x.dtype):
            self.shared.all_reduce(x)
        else:
            dist.all_reduce(x, group=self.device_group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `GroupCoordinator`."""
        with self._collective("all_reduce", x):
            data = x.contiguous()
            self._sum(data)
        return x if data is x else x.copy_(data)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """See `GroupCoordinator`."""
        with self._collective("all_gather", x):
            own = x.contiguous()
            if self.shared and x.is_cpu:
                return self.shared.all_gather(own, dim)
            parts = x.new_empty(self.world_size, *x.shape)
            dist.all_gather(
                [_as_bytes(part) for part in parts], _as_bytes(own), group=self.device_group
            )
            return torch.cat(list(parts), dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's equal part along `dim` of the sum over the group, contiguous; x stays
        as it is.

        gloo has no reduce-scatter of its own: within `_collective`, every rank sums a contiguous
        copy of x (`_sum`), and keeps its part.

        Raises:
            ValueError: x cannot be divided equally ("3 rows cannot be scattered equally over 2
                ranks"). This call is refused before it is counted.
        """
        if x.shape[dim] % self.world_size:
            raise ValueError(
                f"{x.shape[dim]} rows cannot be scattered equally over {self.world_size} ranks"
            )
        with self._collective("reduce_scatter", x):
            total = x.clone(memory_format=torch.contiguous_format)
            self._sum(total)
            return total.chunk(self.world_size, dim=dim)[self.rank_in_group].contiguous()

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Exchange rows, see `GroupCoordinator`: within `_collective`, one `dist.all_to_all_single`
        in `device_group`.

        Backends do not know every dtype, so it moves bytes: `_as_bytes` of the contiguous x and of
        the new tensor, as matrices with a row's bytes as columns."""
        with self._collective("all_to_all", x):
            out = x.new_empty(sum(receive_counts), *x.shape[1:])
            row = math.prod(x.shape[1:]) * x.element_size()
            rows = _as_bytes(x.contiguous()).view(-1, row)
            out_rows = _as_bytes(out).view(-1, row)
            dist.all_to_all_single(
                out_rows, rows, receive_counts, send_counts, group=self.device_group
            )
            return out

    def all_gather_object(self, value: T) -> list[T]:
        """See `GroupCoordinator`."""
        values = [value] * self.world_size
        with self._collective("all_gather_object"):
            dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def barrier(self) -> None:
        """See `GroupCoordinator`."""
        with self._collective("barrier"):
            dist.monitored_barrier(group=self.cpu_group, wait_all_ranks=True)

    def share_memory(self, timeout: float = 300.0) -> None:
        """Have all-reduce and all-gather of CPU tensors use shared memory, if every rank can.

        Every rank of the group calls this. If one of them cannot (no compiler, another machine),
        none does.

        Args:
            timeout: seconds after which a collective fails that a rank has not joined.
        """

        def attempt(handle: SegmentHandle | None) -> Segment | str:
            try:
                return open_segment(handle, self.rank_in_group, self.world_size)
            except OSError as error:
                return f"rank {self.rank}: {error}"

        own = attempt(None) if self.is_first else ""
        handle = self.broadcast_object(own.handle if isinstance(own, Segment) else None)
        if handle is not None and not self.is_first:
            own = attempt(handle)
        problems = self.all_gather_object(own if isinstance(own, str) else "")
        if isinstance(own, Segment) and not any(problems):
            self.shared = SharedCollectives(own, self.ranks, self.name, timeout)
        elif self.is_first:
            reasons = "; ".join(filter(None, problems))
            logger.info(
                "group %s uses gloo instead of shared memory for sums: %s", self.name, reasons
            )
        self.calls.clear()  # do not count the calls above


def initialize_groups(
    grid: Grid,
    rank: int,
    init_method: str = "env://",
    device: torch.device | str = "cpu",
    timeout: float = 300.0,
    disable_custom_all_reduce: bool = False,
) -> None:
    """Join the other ranks of the grid. Every rank calls this; it returns when all have.

    Args:
        rank: of this process, in the grid.
        init_method: where the ranks meet: a `tcp://` address, `env://` (torchrun), or `file://`:
            then all are on this machine, and gloo and NCCL listen on the loopback interface only,
            unless `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name another.
        device: this rank computes on it.
        timeout: seconds after which a collective fails that a rank has not joined.
        disable_custom_all_reduce: use gloo instead of shared memory for all-reduce.
    """
    device = torch.device(device)
    limit = timedelta(seconds=timeout)
    backends = ["gloo", "nccl"] if device.type == "cuda" else ["gloo"]
    if grid.world_size > 1:
        if init_method.startswith("file://"):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(
                    f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"
                )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backends[-1], init_method, limit, grid.world_size, rank)
    for kind in KINDS:
        groups = grid.groups(kind)
        ranks = next(ranks for ranks in groups if rank in ranks)
        if len(ranks) == 1:
            own_groups[kind] = GroupCoordinator(kind, ranks, rank)
            continue
        # Every rank takes part in making every group, and gets its own.
        own = [dist.new_subgroups_by_enumeration(groups, limit, backend)[0] for backend in backends]
        group = own_groups[kind] = ProcessGroupCoordinator(kind, ranks, rank, own[-1], own[0])
        if device.type == "cpu" and not disable_custom_all_reduce:
            group.share_memory(timeout)


def destroy_groups() -> None:
    """Leave all groups: from now on, each group of this process has one rank."""
    for group in own_groups.values():
        if group.shared:
            group.shared.segment.close()
    if get_world_group().world_size > 1:
        dist.destroy_process_group()
    own_groups.update({name: GroupCoordinator(name) for name in KINDS})
