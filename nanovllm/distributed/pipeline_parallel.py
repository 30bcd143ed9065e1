"""Pipeline parallelism: each rank holds some of the layers; see `stage_link` for what it sends to
the next rank.

Built by notebooks/23_pipeline_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from nanovllm.data.checks import check_pipeline_parallel
from nanovllm.distributed.groups import GroupCoordinator, get_pp_group

if TYPE_CHECKING:
    from nanovllm.models.llama import LlamaForCausalLM


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


class Elsewhere(nn.Module):
    """A placeholder for a module of another stage, without weights. With it, the other modules keep
    their names of the checkpoint (layer 17 is `layers.17` on every stage)."""


class StageInput(nn.Module):
    """In place of the embedding on all stages but the first: returns what the previous stage has
    sent.

    Attributes:
        hidden: `[at least num_tokens, hidden_size]`, made once (`StageForward.make_room`), and
            filled before each forward pass.
    """

    hidden: Tensor

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, hidden_size]`; only the number of tokens matters."""
        return self.hidden[: len(token_ids)]


class StageOutput(nn.Module):
    """In place of the final norm on all stages but the last: the residual stream, with the last
    layer's result added."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`; nothing is normalised."""
        residual.add_(x)
        return residual, residual


def keep_stage(model: LlamaForCausalLM, group: GroupCoordinator | None = None) -> None:
    """Keep this rank's stage of a whole model that has no memory yet, and replace the modules of
    other stages.

    Args:
        group: the stages; the pipeline-parallel group by default. In a group of one, nothing
            changes.

    Raises:
        ValueError: there are more stages than layers.
    """
    group = group or get_pp_group()
    if group.world_size == 1:
        return
    inner = model.model
    here = layer_range(len(inner.layers), group.world_size, group.rank_in_group)
    for number in range(len(inner.layers)):
        if number not in here:
            inner.layers[number] = Elsewhere()
            model.unused.append(f"model.layers.{number}")
    inner.layer_calls = [inner.layers[number] for number in here]
    has_tied_head = model.is_tied and group.is_last
    model.is_tied = False  # no stage has both
    if not group.is_first:
        inner.register_module("embed_tokens", StageInput())
    if has_tied_head:
        model.lm_head.parts = ("model.embed_tokens",)  # its name in the checkpoint
    elif not group.is_first:
        model.unused.append("model.embed_tokens")
    if not group.is_last:
        inner.register_module("norm", StageOutput())
        model.register_module("lm_head", Elsewhere())
        model.unused += ["model.norm", "lm_head"]


def stage_input(model: LlamaForCausalLM) -> StageInput:
    """The module that returns what a stage other than the first has received."""
    return cast(StageInput, model.model.embed_tokens)
