"""Who computes with whom: the grid of ranks, its groups, and what the ranks of a group say to one another.

Built by notebooks/21_process_groups.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.distributed.life_signs import waiting_for_others
from nanovllm.distributed.shared_collectives import CollectiveError, SharedCollectives
from nanovllm.distributed.shared_memory import Segment, load_shared_memory_library
from nanovllm.distributed.standstill import CallCounter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    """How many ranks there are in each direction: data, pipeline, tensor. The last one changes fastest."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.pipeline, self.tensor) < 1:
            raise ValueError(f"a grid has at least one rank in each direction, not {self}")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
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


_HEADER_BYTES = 1024  # of the first message of send_tensors: mostly all that has to be said, in one message


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a row of bytes: what is only moved may have any dtype."""
    return tensor.view(-1).view(torch.uint8)


class GroupCoordinator:
    """Some ranks that compute together, as one of them sees it. A group of one is a real group: its collectives return
    what they are given and cost nothing.

    Every rank of the group has to call the same collectives in the same order, with tensors of the same shape.

    Args:
        name: "tp", "pp", ...
        ranks: the global ranks of the group.
        rank: the global rank of this process.
        local_rank: its number on this machine, which is that of its device.
        device_group: torch's group for tensors on the device (NCCL or gloo); None in a group of one.
        cpu_group: torch's group for tensors and objects in host memory (gloo); None in a group of one.

    Attributes:
        shared: sums and gathers in memory that all ranks share; None if they do not share any.
        calls, bytes_sent: how often each collective was called, and the bytes of the tensors that were handed to it.
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
        """Counts what a rank of the group sends to another one, given by their global ranks."""
        if (sender, receiver) not in self._transfers:
            name = f"{self.name} from rank {sender} to rank {receiver}"
            self._transfers[sender, receiver] = CallCounter(name, (sender, receiver))
        return self._transfers[sender, receiver]

    @contextmanager
    def _collective(self, name: str, *tensors: Tensor, counter: CallCounter | None = None) -> Iterator[None]:
        """Count a call, and say in an error's message where it happened and who is not there any more."""
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
        """The sum over the group, on every rank; written into x. All ranks get the same bits."""
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
        """The ranks' tensors, which all have the same shape, one after another along `dim`."""
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
        """The sum over the group, of which each rank gets its equal part along `dim`."""
        if self.world_size == 1:
            return x
        if x.shape[dim] % self.world_size:
            raise ValueError(f"{x.shape[dim]} rows cannot be scattered equally over {self.world_size} ranks")
        with self._collective("reduce_scatter", x):
            if x.is_cpu:  # gloo has no algorithm of its own for it, and also sums everything everywhere
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
        """The tensor of the rank that has the number `source` in the group; written into x."""
        if self.world_size == 1:
            return x
        with self._collective("broadcast", x):
            data = x.contiguous()
            dist.broadcast(_as_bytes(data), self.ranks[source], group=self.device_group)
            if data is not x:
                x.copy_(data)
        return x

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Rows for everybody: the first `send_counts[0]` rows of x go to the first rank of the group, and so on.

        Returns:
            What the others had for this rank, `[sum(receive_counts), ...]`, by sender.
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
        """Any picklable value of one rank, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self._collective("broadcast_object"):
            dist.broadcast_object_list(box, self.ranks[source], group=self.cpu_group)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of the group."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        with self._collective("all_gather_object"):
            dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def barrier(self) -> None:
        """Wait until every rank of the group has come here. The first rank's error names those that have not."""
        if self.world_size > 1:
            with self._collective("barrier"):
                dist.monitored_barrier(group=self.cpu_group, wait_all_ranks=True)

    def send_tensors(self, tensors: dict[str, Tensor], target: int | None = None) -> None:
        """Send named tensors of any shapes and dtypes, to the next rank of the group unless told otherwise."""
        target = self._other(target, 1)
        layout = [(name, list(t.shape), str(t.dtype)[6:], t.is_cpu) for name, t in tensors.items()]
        header = json.dumps(layout).encode()
        header = len(header).to_bytes(4, "little") + header
        with self._collective("send", *tensors.values(), counter=self.transfers(self.rank, target)):
            for part in (header[:_HEADER_BYTES].ljust(_HEADER_BYTES), header[_HEADER_BYTES:]):
                if part:
                    dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), target, group=self.cpu_group)
            data = [(_as_bytes(t.contiguous()), self._group_of(t)) for t in tensors.values() if t.numel()]
            works = [dist.isend(tensor, target, group=group) for tensor, group in data]
            for work in filter(None, works):
                work.wait()

    def _group_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self.cpu_group if tensor.is_cpu else self.device_group

    def _other(self, number: int | None, step: int) -> int:
        """The global rank of a number in the group, or of the neighbour."""
        number = (self.rank_in_group + step) % self.world_size if number is None else number
        if self.ranks[number] == self.rank:
            raise ValueError(f"rank {self.rank} is the only one of group {self.name} it could talk to")
        return self.ranks[number]

    def receive_tensors(self, device: torch.device | str, source: int | None = None) -> dict[str, Tensor]:
        """What `send_tensors` of the rank before this one (or of `source`) sends; tensors that were not in host memory
        arrive on `device`."""
        source = self._other(source, -1)
        with self._collective("receive", counter=self.transfers(source, self.rank)):
            first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
            dist.recv(first, source, group=self.cpu_group)
            size = int.from_bytes(first[:4].numpy().tobytes(), "little")
            header = first[4 : 4 + size]
            if size > len(header):
                rest = torch.empty(size - len(header), dtype=torch.uint8)
                dist.recv(rest, source, group=self.cpu_group)
                header = torch.cat((header, rest))
            tensors = {}
            for name, shape, dtype, is_cpu in json.loads(header.numpy().tobytes()):
                where = "cpu" if is_cpu else device
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=where)
            data = [(_as_bytes(t), self._group_of(t)) for t in tensors.values() if t.numel()]
            works = [dist.irecv(tensor, source, group=group) for tensor, group in data]
            for work in filter(None, works):
                work.wait()
        return tensors

    def share_memory(self, timeout: float = 300.0, part_bytes: int = 1 << 17) -> None:
        """Let all-reduce and all-gather of CPU tensors go through shared memory, if that works on every rank.

        Every rank of the group calls this. Where one of them cannot (no compiler, another machine), none does.

        Args:
            timeout: seconds after which a collective that somebody did not join fails.
            part_bytes: longer tensors go part by part; a multiple of 64.
        """
        if self.world_size == 1:
            return
        segment, problem = None, "" if load_shared_memory_library() else "its functions are not compiled"
        try:
            if self.is_first and not problem:
                segment = Segment.create(self.world_size, 2 * self.world_size * part_bytes)
        except OSError as error:
            problem = str(error)
        handle = self.broadcast_object(segment and segment.handle)
        try:
            if handle and not self.is_first and not problem:
                segment = Segment(handle, self.rank_in_group)
        except OSError as error:
            problem = str(error)
        problems = self.all_gather_object(problem)
        if segment and not any(problems):
            segment.wait_until_joined(timeout)
            self.shared = SharedCollectives(segment, self.ranks, self.name, timeout, part_bytes)
        elif self.is_first:
            reasons = "; ".join(f"rank {r}: {p}" for r, p in zip(self.ranks, problems, strict=True) if p)
            logger.info("group %s sums with gloo, not in shared memory: %s", self.name, reasons)
        self.calls.clear()  # what it took to agree is no part of the work


def _alone(name: str) -> GroupCoordinator:
    return GroupCoordinator(name, [0], 0)


KINDS = ("world", "tp", "pp", "dp", "ep")
_groups: dict[str, GroupCoordinator] = {name: _alone(name) for name in KINDS}
_grid = Grid()


def initialize_groups(
    grid: Grid,
    rank: int,
    local_rank: int = 0,
    init_method: str = "env://",
    device: torch.device | str = "cpu",
    timeout: float = 300.0,
    disable_custom_all_reduce: bool = False,
) -> None:
    """Join the other ranks of the grid; every one of them calls this, and returns when all have.

    Args:
        rank, local_rank: of this process, in the grid and on this machine.
        init_method: where the ranks find one another: a `file://` or `tcp://` address, or `env://` (torchrun). If it
            is one of this machine only, gloo listens on the loopback interface only, unless `GLOO_SOCKET_IFNAME` says
            otherwise.
        device: what this rank computes on.
        timeout: seconds after which a collective that somebody did not join fails.
        disable_custom_all_reduce: leave all-reduce to gloo where shared memory would do.

    Raises:
        RuntimeError: the groups were made before.
        ValueError: the rank is not in the grid.
    """
    global _grid
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
    _grid = grid
    for kind in KINDS:
        _groups[kind] = _make_group(grid, kind, rank, local_rank, device, timeout)
    if device.type == "cpu" and not disable_custom_all_reduce:
        for group in _groups.values():
            group.share_memory(timeout)


def _make_group(
    grid: Grid, kind: str, rank: int, local_rank: int, device: torch.device, timeout: float
) -> GroupCoordinator:
    """This rank's group of a kind. Every rank has to take part in making every group, its own or not."""
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
    """Leave all groups: from now on this process is alone."""
    global _grid
    for group in _groups.values():
        if group.shared:
            group.shared.segment.close()
    if _groups["world"].world_size > 1:
        dist.destroy_process_group()
    _grid = Grid()
    _groups.update({name: _alone(name) for name in KINDS})


def get_grid() -> Grid:
    """The grid of ranks that this process belongs to."""
    return _grid


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
