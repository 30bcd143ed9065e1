"""Sends hidden states from stage to stage of a pipeline.

Built by notebooks/23_pipeline_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.distributed.groups import get_pp_group
from nanovllm.processes.activity import waiting_for_others
from nanovllm.processes.standstill import CallCounter


class StageLink:
    """A rank's connection to the same rank of the stages before and after.

    It sends no shapes: the receiver has the same plan of the step, and therefore knows the number
    of tokens.

    Args:
        dtype, device: of the tensors.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = device
        group = self.group = get_pp_group()
        rank = group.rank
        number = group.rank_in_group
        ranks = group.ranks
        self._connections = group.device_group
        self._previous = ranks[number - 1]
        self._next = ranks[(number + 1) % len(ranks)]
        self._received = CallCounter(
            f"{group.name} from rank {self._previous} to rank {rank}", (self._previous, rank)
        )
        self._sent = CallCounter(
            f"{group.name} from rank {rank} to rank {self._next}", (rank, self._next)
        )
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, hidden: Tensor) -> None:
        """Wait for the previous stage's hidden states of this step, and write them to `hidden`,
        `[num_tokens, hidden_size]`."""
        with waiting_for_others(), self._received.call("receive"):
            dist.recv(hidden, self._previous, group=self._connections)

    def send(self, hidden: Tensor) -> None:
        """Start to send to the next stage, without waiting until it has finished the previous step.

        The caller must not write to the tensor any more. It is kept until it has been sent.
        """
        # At most as many steps as stages are in flight, so this send has arrived, and `wait`
        # returns at once. (gloo marks a send as completed only in `wait`.)
        with waiting_for_others(), self._sent.call("send"):
            if len(self._in_flight) >= self.group.world_size:
                self._in_flight.popleft()[0].wait()
            # NCCL connects two ranks when they first talk.
            work = dist.isend(hidden, self._next, group=self._connections)
            assert work is not None, "this rank belongs to the group"
        self.group.calls["send"] += 1
        self.group.bytes_sent["send"] += hidden.nbytes
        self._in_flight.append((work, hidden))

    def flush(self) -> None:
        """Wait until everything has arrived."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
