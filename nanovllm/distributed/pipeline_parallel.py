"""Pipeline parallelism: each rank holds some of the layers; see `stage_link` for what it sends to
the next rank.

Built by notebooks/23_pipeline_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch import nn

from nanovllm.data.checks import check_pipeline_parallel
from nanovllm.distributed.groups import get_pp_group


def layer_range(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage: an equal number for each, in order. Remaining layers go one by one
    to the stages from the last but one backwards, because the first stage also computes the
    embedding, and the last the output head.

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


class Elsewhere(nn.Module):
    """A placeholder for a module of another stage, without weights. With it, the other modules keep
    their names of the checkpoint (layer 17 is `layers.17` on every stage)."""

    weight: None = None


M = TypeVar("M", bound=nn.Module)


def if_here(here: bool, build: Callable[..., M], *arguments: object) -> M:
    """The module `build(*arguments)`, or a placeholder if another stage has it."""
    return build(*arguments) if here else cast(M, Elsewhere())


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """True if a tensor of the checkpoint belongs to a module of another stage."""
    module = model
    for part in name.split("."):
        children = dict(module.named_children())
        if part not in children:  # the tensor itself
            return False
        module = children[part]
        if isinstance(module, Elsewhere):
            return True
    return False
