"""All-reduce and all-gather through memory that all ranks of a group map.

Over a socket each byte is copied into the kernel and out again, and two processes must be woken per
step. Here a rank writes its part where all ranks can read it, increments its counter, and waits for
the counters of the others.

Built by notebooks/21_process_groups.ipynb: edit it there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.distributed.shared_memory import Segment, SegmentHandle, load_shared_memory_library
from nanovllm.processes.standstill import CollectiveError

# In the order of SUMS in shared_memory.cpp.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.float16)
_OPERATIONS = ("all_reduce", "all_gather")
# Tensors are processed in parts of this size, a multiple of 64.
PART_BYTES = 1 << 17


def open_segment(handle: SegmentHandle | None, member: int, num_members: int) -> Segment:
    """Create the segment of a group, or map the one that the group's first rank has created.

    Raises:
        OSError: this rank cannot use shared memory.
    """
    load_shared_memory_library()
    return (
        Segment(handle, member)
        if handle
        else Segment.create(num_members, 2 * num_members * PART_BYTES)
    )


class SharedCollectives:
    """Collectives of a group in a segment that all its ranks have mapped.

    Args:
        segment: has a line for each rank, and room for two halves of `PART_BYTES` for each.
        ranks: the global ranks of the group, for messages.
        name: of the group, for messages.
        timeout: seconds to wait for a rank.
    """

    def __init__(self, segment: Segment, ranks: list[int], name: str, timeout: float) -> None:
        library = load_shared_memory_library()
        self.segment = segment
        self.ranks = ranks
        self.name = name
        self.timeout = timeout
        self._kinds = segment.data[: segment.payload].cast("Q")
        self._broken = ""
        self._collective = library.collective
        self._sums = {dtype: index for index, dtype in enumerate(_DTYPES[: library.num_sums()])}

    def can_sum(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of this dtype can be summed here; the same on all ranks, which
        have the same library."""
        return dtype in self._sums

    def all_reduce(self, x: Tensor) -> None:
        """Replace x, which is contiguous, by the sum over the group, in float32 for 16-bit numbers;
        all ranks get the same bits."""
        self._run("all_reduce", x, x, row=0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' tensors, which are contiguous, one after another along `dim`."""
        dim %= max(x.ndim, 1)
        out = x.new_empty(*x.shape[:dim], x.shape[dim] * len(self.ranks), *x.shape[dim + 1 :])
        self._run("all_gather", x, out, row=math.prod(x.shape[dim:]) * x.element_size())
        return out

    def _run(self, operation: str, x: Tensor, out: Tensor, row: int) -> None:
        if self._broken:
            raise CollectiveError(f"group {self.name} can no longer be used: {self._broken}")
        sum_index = self._sums.get(x.dtype, 0)
        kind = x.nbytes << 16 | sum_index << 8 | _OPERATIONS.index(operation)
        segment = self.segment
        done = 0
        published = False
        deadline = 0.0
        while True:
            done = self._collective(
                *(segment.address, segment.payload, PART_BYTES, segment.member, len(self.ranks)),
                *(
                    x.data_ptr(),
                    out.data_ptr(),
                    x.nbytes,
                    row,
                    sum_index,
                    kind,
                    max(done, 0),
                    published,
                ),
            )
            if done == x.nbytes:
                return
            published = True
            deadline = deadline or time.monotonic() + self.timeout
            if problem := self._problem(operation, done, deadline):
                self._broken = problem
                raise CollectiveError(problem)

    def _problem(self, operation: str, done: int, deadline: float) -> str:
        """Return why the collective cannot finish; empty while it can."""
        number = self.segment.count(self.segment.member)
        what = f"{operation} of group {self.name}, rank {self.ranks[self.segment.member]}"
        if done < 0:
            other = -1 - done
            kind = self._kinds[other * 8 + 2 + number % 2]
            theirs = f"{_OPERATIONS[kind & 255]} of {kind >> 16} bytes"
            return f"{what}: rank {self.ranks[other]} is in another collective, {theirs}"
        absent = [member for member in range(len(self.ranks)) if self.segment.ahead(member) < 0]
        if lost := self.lost(absent):
            return f"{what}: {'; '.join(lost)}"
        if absent and time.monotonic() >= deadline:
            names = ", ".join(f"rank {self.ranks[member]}" for member in absent)
            return f"{what}: {names} did not join within {self.timeout:g} s"
        return ""

    def lost(self, members: Sequence[int]) -> list[str]:
        """Name those of these members that have died or left, each with the reason."""
        return [
            f"rank {self.ranks[each]}: {why}"
            for each in members
            if (why := self.segment.why_lost(each))
        ]
