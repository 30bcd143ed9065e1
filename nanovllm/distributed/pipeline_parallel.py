"""Pipeline parallelism: each rank holds some of the layers, and sends its hidden states to the next rank.

Built by notebooks/23_pipeline_parallel.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanovllm.distributed.groups import GroupCoordinator, get_pp_group
from nanovllm.distributed.life_signs import waiting_for_others


def check_pipeline_parallel(num_layers: int, stages: int) -> None:
    """Check that a model can be divided into so many stages, before anything is loaded.

    Raises:
        ValueError: it cannot; the message names the numbers that fit.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be divided among {stages} stages, each of which needs one; "
            f"pipeline_parallel_size may be 1 to {num_layers}"
        )


def layer_range(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage. Remaining layers go to the stages in the middle, from the last but one backwards, because the first
    stage also computes the embedding, and the last the output head.

    Raises:
        ValueError: there are more stages than layers.
    """
    check_pipeline_parallel(num_layers, stages)
    least, left_over = divmod(num_layers, stages)
    sizes = [least + (stages - 1 - left_over <= i < stages - 1) for i in range(stages)]
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def layers_here(num_layers: int, group: GroupCoordinator | None = None) -> range:
    """The layers of this rank's stage; all layers in a group of one."""
    group = group or get_pp_group()
    return layer_range(num_layers, group.world_size, group.rank_in_group)


# ---------------------------------------------------------------- modules of other stages

T = TypeVar("T", bound=nn.Module)


class Elsewhere(nn.Module):
    """A placeholder for a module of another stage, without weights. With it, the other modules keep their names of the checkpoint
    (layer 17 is `layers.17` on every stage)."""


def if_here(here: bool, build: Callable[..., T], *arguments: Any) -> T:
    """The module `build(*arguments)`, or a placeholder if another stage has it."""
    return build(*arguments) if here else cast(T, Elsewhere())


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """True if a tensor of the checkpoint belongs to a module of another stage."""
    module: object = model
    for part in name.split("."):
        module = getattr(module, part, None)
        if isinstance(module, Elsewhere):
            return True
    return False


# ---------------------------------------------------------------- from stage to stage


@dataclass
class IntermediateTensors:
    """What a stage sends to the next one: the residual stream, not added up yet.

    Attributes:
        hidden: `[num_tokens, hidden_size]`, what the stage's last layer adds to the stream.
        residual: `[num_tokens, hidden_size]`, the stream before that.
    """

    hidden: Tensor
    residual: Tensor

    @classmethod
    def zeros(
        cls, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> IntermediateTensors:
        """For steps in which no stage sends anything."""
        return cls(*torch.zeros(2, num_tokens, hidden_size, dtype=dtype, device=device))

    def __getitem__(self, rows: slice) -> IntermediateTensors:
        return IntermediateTensors(self.hidden[rows], self.residual[rows])

    def copy_(self, other: IntermediateTensors) -> IntermediateTensors:
        """Overwrite both tensors; returns itself."""
        self.hidden.copy_(other.hidden)
        self.residual.copy_(other.residual)
        return self

    def clone(self) -> IntermediateTensors:
        """A copy of both tensors."""
        return IntermediateTensors(self.hidden.clone(), self.residual.clone())

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return self.hidden.nbytes + self.residual.nbytes


class StageLink:
    """A rank's connection to the same rank of the stages before and after.

    It sends no shapes: the receiver has the same plan of the step, and therefore knows the number of tokens.

    Args:
        hidden_size, dtype, device: of the tensors.
        group: the ranks that share the model layer by layer; the pipeline group by default.
    """

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        group: GroupCoordinator | None = None,
    ) -> None:
        self.group = group or get_pp_group()
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        """Wait for the previous stage's tensors of this step; None on the first stage."""
        if self.group.is_first:
            return None
        received = torch.empty(2, num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        source, group = self.group.ranks[self.group.rank_in_group - 1], self.group.device_group
        with waiting_for_others(), self.group.transfers(source, self.group.rank).call("receive"):
            # Post both receives before waiting for the first: sender and receiver synchronise once instead of twice.
            for work in [dist.irecv(tensor, source, group=group) for tensor in received]:
                assert work is not None, "both ranks are of the group"
                work.wait()
        return IntermediateTensors(*received)

    def send(self, tensors: IntermediateTensors) -> None:
        """Start to send to the next stage, without waiting until it has finished the previous step.

        The caller must not write to the tensors any more. They are kept until they have been sent.
        """
        target = self.group.ranks[self.group.rank_in_group + 1]
        transfer = self.group.transfers(self.group.rank, target).call("send")
        for tensor in (tensors.hidden.contiguous(), tensors.residual.contiguous()):
            # At most as many steps as stages are in flight, so this send has arrived, and `wait` returns at once.
            # (gloo marks a send as completed only in `wait`.)
            if len(self._in_flight) >= 2 * self.group.world_size:
                with waiting_for_others(), transfer:
                    self._in_flight.popleft()[0].wait()
            self.group.calls["send"] += 1
            self.group.bytes_sent["send"] += tensor.nbytes
            with waiting_for_others(), transfer:  # NCCL connects two ranks when they first talk
                work = dist.isend(tensor, target, group=self.group.device_group)
            assert work is not None, "both ranks are of the group"
            self._in_flight.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything has arrived."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    def blank(self, num_tokens: int) -> IntermediateTensors | None:
        """A substitute for received tensors, for steps that a stage runs alone to measure or to record them."""
        if self.group.is_first:
            return None
        return IntermediateTensors.zeros(num_tokens, self.hidden_size, self.dtype, self.device)

    def blank_output(self, num_tokens: int) -> Tensor | IntermediateTensors:
        """A buffer for this stage's output: hidden states if it is the last one."""
        blank = IntermediateTensors.zeros(num_tokens, self.hidden_size, self.dtype, self.device)
        return blank.hidden if self.group.is_last else blank
