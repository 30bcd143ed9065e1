"""Pipeline parallelism: each rank holds some of the layers; see `stage_link` for what it sends to the next rank.

Built by notebooks/23_pipeline_parallel.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from nanovllm.data.checks import check_pipeline_parallel
from nanovllm.data.parts import load
from nanovllm.distributed.groups import get_pp_group


def layer_range(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage: an equal number for each, in order. Remaining layers go one by one to the stages from the last but one
    backwards, because the first stage also computes the embedding, and the last the output head.

    Raises:
        ValueError: there are more stages than layers.
    """
    check_pipeline_parallel(num_layers, stages)
    least, left_over = divmod(num_layers, stages)
    sizes = [least + (stages - 1 - left_over <= i < stages - 1) for i in range(stages)]
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def layers_here(num_layers: int) -> range:
    """The layers of this rank's stage; all layers in a group of one."""
    group = get_pp_group()
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


class SingleStage:
    """In place of a `StageLink`: a rank that has all layers, and neither receives nor sends anything.

    Args:
        hidden_size, dtype, device: of the tensors.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device

    def receive(self, num_tokens: int) -> Tensor | None:
        """Wait for the previous stage's hidden states of this step, `[num_tokens, hidden_size]`; None on the first stage."""
        return None

    def send(self, hidden: Tensor) -> None:
        """Start to send to the next stage, without waiting until it has finished the previous step.

        The caller must not write to the tensor any more. It is kept until it has been sent.
        """

    def flush(self) -> None:
        """Wait until everything has arrived."""

    def blank(self, num_tokens: int) -> Tensor | None:
        """A substitute for received hidden states, for steps that a stage runs alone to measure or to record them."""
        return None if get_pp_group().is_first else self.blank_output(num_tokens)

    def blank_output(self, num_tokens: int) -> Tensor:
        """A buffer for this stage's output."""
        return torch.zeros(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)


def stage_link(hidden_size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> SingleStage:
    """This rank's connection to the other stages of the pipeline group."""
    link = SingleStage
    if get_pp_group().world_size > 1:
        link = load("nanovllm.distributed.stage_link:StageLink", "pipeline_parallel_size")
    return link(hidden_size, dtype, device)
