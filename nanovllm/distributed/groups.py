"""The grid of ranks, its groups, and the collectives of a group.

Built by notebooks/21_process_groups.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.data.parts import load
from nanovllm.distributed.life_signs import waiting_for_others
from nanovllm.distributed.standstill import CallCounter, CollectiveError

if TYPE_CHECKING:
    from nanovllm.distributed.shared_collectives import SharedCollectives

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    """The number of ranks in each direction: data, pipeline, tensor. The tensor rank changes fastest."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.pipeline, self.tensor) < 1:
            raise ValueError(f"a grid has at least one rank in each direction, not {self}")

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.data * self.pipeline * self.tensor

    def groups(self, kind: str) -> list[list[int]]:
        """The ranks of each group of a kind: "world", "tp", "pp", "dp", or "ep" (all of one pipeline stage)."""
        ranks = torch.arange(self.world_size).view(self.data, self.pipeline, self.tensor)
        rows = {
            "world": ranks.reshape(1, -1),
            "tp": ranks.reshape(-1, self.tensor),
            "pp": ranks.transpose(1, 2).reshape(-1, self.pipeline),
            "dp": ranks.permute(1, 2, 0).reshape(-1, self.data),
            "ep": ranks.transpose(0, 1).reshape(self.pipeline, -1),
        }
        return rows[kind].tolist()


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a row of bytes. Backends move bytes of dtypes that they cannot compute with."""
    return tensor.view(-1).view(torch.uint8)


class GroupCoordinator:
    """A group of ranks that compute together, as one of them sees it. A group of one is a real group: its collectives return their
    arguments and cost nothing.

    Every rank of the group must call the same collectives in the same order, with tensors of the same shape.

    Args:
        name: "tp", "pp", ...
        ranks: the global ranks of the group.
        rank: the global rank of this process.
        local_rank: its number on this machine, which is that of its device.
        device_group: torch's group for tensors on the device (NCCL or gloo); None in a group of one.
        cpu_group: torch's group for tensors and objects in host memory (gloo); None in a group of one.

    Attributes:
        shared: all-reduce and all-gather in memory that all ranks share; None if they share none.
        calls, bytes_sent: for each collective, the number of calls and the bytes of this rank's tensors.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        local_rank: int = 0,
        device_group: dist.ProcessGroup | None = None,
        cpu_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.name, self.ranks, self.rank, self.local_rank = name, ranks, rank, local_rank
        self.device_group, self.cpu_group = device_group, cpu_group
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(rank)
        self.shared: SharedCollectives | None = None
        self.calls: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self._counter = CallCounter(name, ranks)
        self._transfers: dict[tuple[int, int], CallCounter] = {}

    @property
    def is_first(self) -> bool:
        """True for the first rank of the group (the first stage of a pipeline)."""
        return self.rank_in_group == 0

    @property
    def is_last(self) -> bool:
        """True for the last rank of the group."""
        return self.rank_in_group == self.world_size - 1

    def __repr__(self) -> str:
        return f"<group {self.name} of ranks {self.ranks}: rank {self.rank} is {self.rank_in_group}>"

    def transfers(self, sender: int, receiver: int) -> CallCounter:
        """Counts the messages from one rank of the group to another, given by their global ranks."""
        if (sender, receiver) not in self._transfers:
            name = f"{self.name} from rank {sender} to rank {receiver}"
            self._transfers[sender, receiver] = CallCounter(name, (sender, receiver))
        return self._transfers[sender, receiver]

    @contextmanager
    def _collective(self, name: str, *tensors: Tensor, counter: CallCounter | None = None) -> Iterator[None]:
        """Count a call. An error names the collective and the ranks that are gone."""
        self.calls[name] += 1
        self.bytes_sent[name] += sum(tensor.nbytes for tensor in tensors)
        try:
            with waiting_for_others(), (counter or self._counter).call(name):
                yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            lost = "; ".join(self.shared.lost()) if self.shared else ""
            where = f"{name} of group {self.name} (ranks {self.ranks}), rank {self.rank}"
            raise CollectiveError(f"{where}: {lost or error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the group. All ranks get the same bits."""
        if self.world_size == 1:
            return x
        with self._collective("all_reduce", x):
            if self.shared and x.is_cpu and self.shared.can_sum(x.dtype):
                self.shared.all_reduce(x)
            else:
                data = x.contiguous()
                dist.all_reduce(data, group=self.device_group)
                if data is not x:
                    x.copy_(data)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the tensors of all ranks, which have the same shape, along `dim`."""
        if self.world_size == 1:
            return x
        with self._collective("all_gather", x):
            if self.shared and x.is_cpu:
                return self.shared.all_gather(x, dim)
            parts = x.new_empty(self.world_size, *x.shape)
            own = x.contiguous()
            dist.all_gather([_as_bytes(part) for part in parts], _as_bytes(own), group=self.device_group)
            return torch.cat(list(parts), dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Sum x over the group; each rank gets its equal part of the sum along `dim`."""
        if self.world_size == 1:
            return x
        if x.shape[dim] % self.world_size:
            raise ValueError(f"{x.shape[dim]} rows cannot be scattered equally over {self.world_size} ranks")
        with self._collective("reduce_scatter", x):
            if x.is_cpu:  # gloo has no reduce-scatter of its own: sum everything on every rank
                total = x.clone(memory_format=torch.contiguous_format)
                if self.shared and self.shared.can_sum(x.dtype):
                    self.shared.all_reduce(total)
                else:
                    dist.all_reduce(total, group=self.device_group)
                return total.chunk(self.world_size, dim=dim)[self.rank_in_group].contiguous()
            parts = [part.contiguous() for part in x.chunk(self.world_size, dim=dim)]
            out = torch.empty_like(parts[0])
            dist.reduce_scatter(out, parts, group=self.device_group)
            return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Replace x by the tensor of the rank with the number `source` in the group."""
        if self.world_size == 1:
            return x
        with self._collective("broadcast", x):
            data = x.contiguous()
            dist.broadcast(_as_bytes(data), self.ranks[source], group=self.device_group)
            if data is not x:
                x.copy_(data)
        return x

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Exchange rows: the first `send_counts[0]` rows of x go to the first rank of the group, and so on.

        Returns:
            The rows for this rank, `[sum(receive_counts), ...]`, by sender.
        """
        if len(send_counts) != self.world_size or sum(send_counts) != len(x):
            raise ValueError(f"send_counts {send_counts} do not divide {len(x)} rows over {self.world_size} ranks")
        if self.world_size == 1:
            return x
        with self._collective("all_to_all", x):
            out = x.new_empty(sum(receive_counts), *x.shape[1:])
            row = math.prod(x.shape[1:]) * x.element_size()
            rows, out_rows = _as_bytes(x.contiguous()).view(-1, row), _as_bytes(out).view(-1, row)
            dist.all_to_all_single(out_rows, rows, receive_counts, send_counts, group=self.device_group)
            return out

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Send any picklable value of one rank to every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self._collective("broadcast_object"):
            dist.broadcast_object_list(box, self.ranks[source], group=self.cpu_group)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the group."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        with self._collective("all_gather_object"):
            dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def barrier(self) -> None:
        """Wait until every rank of the group is here. On a timeout, the first rank's error names the missing ranks."""
        if self.world_size > 1:
            with self._collective("barrier"):
                dist.monitored_barrier(group=self.cpu_group, wait_all_ranks=True)

    def send_tensors(self, tensors: dict[str, Tensor], target: int | None = None) -> None:
        """Send named tensors of any shapes and dtypes, by default to the next rank of the group."""
        target = self._other(target, 1)
        layout = [(name, t.shape, t.dtype, t.is_cpu) for name, t in tensors.items()]
        with self._collective("send", *tensors.values(), counter=self.transfers(self.rank, target)):
            dist.send_object_list([layout], target, group=self.cpu_group)
            self._wait_for_all(dist.isend, [t.contiguous() for t in tensors.values()], target)

    def _other(self, number: int | None, step: int) -> int:
        """The global rank of a number in the group, or of the neighbour."""
        number = (self.rank_in_group + step) % self.world_size if number is None else number
        if self.ranks[number] == self.rank:
            raise ValueError(f"rank {self.rank} is the only one of group {self.name} it could talk to")
        return self.ranks[number]

    def _wait_for_all(self, move: Callable[..., Any], tensors: list[Tensor], other: int) -> None:
        """Start to send or to receive all tensors before waiting for the first one."""
        works = [
            move(_as_bytes(t), other, group=self.cpu_group if t.is_cpu else self.device_group)
            for t in tensors
            if t.numel()
        ]
        for work in works:
            work.wait()

    def receive_tensors(self, device: torch.device | str, source: int | None = None) -> dict[str, Tensor]:
        """The tensors that `send_tensors` of the rank before this one (or of `source`) sends. Tensors that were not in host memory
        arrive on `device`."""
        source = self._other(source, -1)
        with self._collective("receive", counter=self.transfers(source, self.rank)):
            box: list[Any] = [None]
            dist.recv_object_list(box, source, group=self.cpu_group)
            tensors = {
                name: torch.empty(shape, dtype=dtype, device="cpu" if is_cpu else device)
                for name, shape, dtype, is_cpu in box[0]
            }
            self._wait_for_all(dist.irecv, list(tensors.values()), source)
        return tensors

    def share_memory(self, timeout: float = 300.0, part_bytes: int = 1 << 17) -> None:
        """Have all-reduce and all-gather of CPU tensors use shared memory, if every rank can.

        Every rank of the group calls this. If one of them cannot (no compiler, another machine), none does.

        Args:
            timeout: seconds after which a collective fails that a rank has not joined.
            part_bytes: tensors are processed in parts of this size; a multiple of 64.
        """
        if self.world_size == 1:
            return
        open_segment = load("nanovllm.distributed.shared_collectives:open_segment", "several processes")

        def attempt(handle: Any) -> tuple[Any, str]:
            try:
                return open_segment(handle, self.rank_in_group, self.world_size, part_bytes), ""
            except OSError as error:
                return None, str(error)

        segment, problem = attempt(None) if self.is_first else (None, "")
        handle = self.broadcast_object(segment and segment.handle)
        if handle and not self.is_first:
            segment, problem = attempt(handle)
        problems = self.all_gather_object(problem)
        if segment and not any(problems):
            segment.wait_until_joined(timeout)
            shared_collectives = load("nanovllm.distributed.shared_collectives:SharedCollectives", "several processes")
            self.shared = shared_collectives(segment, self.ranks, self.name, timeout, part_bytes)
        elif self.is_first:
            reasons = "; ".join(f"rank {r}: {p}" for r, p in zip(self.ranks, problems, strict=True) if p)
            logger.info("group %s sums with gloo, not in shared memory: %s", self.name, reasons)
        self.calls.clear()  # do not count the calls above


def _alone(name: str) -> GroupCoordinator:
    return GroupCoordinator(name, [0], 0)


KINDS = ("world", "tp", "pp", "dp", "ep")
_groups: dict[str, GroupCoordinator] = {name: _alone(name) for name in KINDS}


def initialize_groups(
    grid: Grid,
    rank: int,
    local_rank: int = 0,
    init_method: str = "env://",
    device: torch.device | str = "cpu",
    timeout: float = 300.0,
    disable_custom_all_reduce: bool = False,
) -> None:
    """Join the other ranks of the grid. Every rank calls this; it returns when all have.

    Args:
        rank, local_rank: of this process, in the grid and on this machine.
        init_method: where the ranks meet: a `file://` or `tcp://` address, or `env://` (torchrun). If only this machine can reach
            it, gloo listens on the loopback interface only, unless `GLOO_SOCKET_IFNAME` names another.
        device: this rank computes on it.
        timeout: seconds after which a collective fails that a rank has not joined.
        disable_custom_all_reduce: use gloo instead of shared memory for all-reduce.

    Raises:
        RuntimeError: the groups were made before.
        ValueError: the rank is not in the grid.
    """
    if _groups["world"].world_size > 1:
        raise RuntimeError("the groups of this process exist already; destroy_groups() first")
    if not 0 <= rank < grid.world_size:
        raise ValueError(f"rank {rank} is not in a grid of {grid.world_size} ranks: {grid}")
    device = torch.device(device)
    if grid.world_size > 1:
        if _is_local(init_method) and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=grid.world_size, timeout=limit)
    for kind in KINDS:
        _groups[kind] = _make_group(grid, kind, rank, local_rank, device, timeout)
    if device.type == "cpu" and not disable_custom_all_reduce:
        for group in _groups.values():
            group.share_memory(timeout)


def _make_group(
    grid: Grid, kind: str, rank: int, local_rank: int, device: torch.device, timeout: float
) -> GroupCoordinator:
    """This rank's group of a kind. Every rank must take part in making every group, not only its own."""
    own, limit = GroupCoordinator(kind, [rank], rank, local_rank), timedelta(seconds=timeout)
    for ranks in grid.groups(kind):
        if len(ranks) == 1:
            continue
        device_group = cpu_group = dist.new_group(ranks, backend="gloo", timeout=limit)
        if device.type == "cuda":
            device_group = dist.new_group(ranks, backend="nccl", timeout=limit)
        if rank in ranks:
            own = GroupCoordinator(kind, ranks, rank, local_rank, device_group, cpu_group)
    return own


def _is_local(init_method: str) -> bool:
    """Whether only processes of this machine can meet at an address."""
    if init_method.startswith("env://"):
        host = os.environ.get("MASTER_ADDR", "")
    else:
        url = urlsplit(init_method)
        host = "localhost" if url.scheme == "file" else url.hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def destroy_groups() -> None:
    """Leave all groups: from now on, each group of this process has one rank."""
    for group in _groups.values():
        if group.shared:
            group.shared.segment.close()
    if _groups["world"].world_size > 1:
        dist.destroy_process_group()
    _groups.update({name: _alone(name) for name in KINDS})


def get_world_group() -> GroupCoordinator:
    """All ranks."""
    return _groups["world"]


def get_tp_group() -> GroupCoordinator:
    """The ranks that share each layer (tensor parallelism)."""
    return _groups["tp"]


def get_pp_group() -> GroupCoordinator:
    """The ranks that share the model layer by layer (pipeline parallelism)."""
    return _groups["pp"]


def get_dp_group() -> GroupCoordinator:
    """The ranks that hold the same weights for other requests (data parallelism)."""
    return _groups["dp"]


def get_ep_group() -> GroupCoordinator:
    """The ranks that share the experts of a layer (expert parallelism): all of a pipeline stage."""
    return _groups["ep"]
