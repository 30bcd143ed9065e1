"""Mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many MLPs, and
adds up their outputs.

Built by notebooks/24_expert_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.distributed.expert_parallel import ExpertDispatcher, ExpertPlacement
from nanovllm.distributed.groups import GroupCoordinator, get_ep_group, get_tp_group
from nanovllm.layers.basic import Layer, Packable, Place
from nanovllm.layers.tensor_parallel import MergedColumnParallelLinear, RowParallelLinear, Shard
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import MLP, DecoderLayer, LlamaForCausalLM
from nanovllm.models.moe_config import MoEConfig


def select_experts(
    logits: Tensor, config: MoEConfig, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts that each token visits, and their weights.

    Args:
        logits: `[num_tokens, num_experts]`, the router's.
        bias: `[num_experts]` float32, added for choosing only (DeepSeek-V3, arXiv 2412.19437,
            section 2.1.2).

    Returns: (weights `[num_tokens, top_k]` float32, experts `[num_tokens, top_k]` int64), the best
    first."""
    scores = logits.float().softmax(-1) if config.scoring == "softmax" else logits.float().sigmoid()
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        groups = choice.unflatten(1, (config.num_groups, -1))
        best = (
            groups.amax(-1) if bias is None else groups.topk(min(2, groups.shape[2])).values.sum(-1)
        )
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(
            1, best.topk(config.topk_group).indices, False
        )
        choice = groups.masked_fill(left_out[:, :, None], float("-inf")).flatten(1)
    experts = choice.topk(config.top_k).indices
    weights = scores.gather(1, experts)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.scaling_factor, experts


class Router(Layer):
    """Scores every expert for every token: one small product, replicated on every rank."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, hidden_size), requires_grad=False
        )
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.correction_bias:
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(config.num_experts), requires_grad=False
            )
            # Training changes it by less than bfloat16 can represent.
            self.e_score_correction_bias.kept_dtype = torch.float32  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[num_tokens, hidden_size]` to what `select_experts` returns."""
        dtype = torch.float32 if self.config.float32_router else x.dtype
        logits = ops.linear(x.to(dtype), self.weight.to(dtype))
        return select_experts(logits, self.config, self.e_score_correction_bias)


class Experts(Packable):
    """The MLPs of some experts: down(silu(gate(x)) * up(x)) each.

    Args:
        num_slots: number of experts that this rank holds.
        intermediate_size: of a whole expert; the ranks of `group` share each one, as they share an
            MLP.

    Attributes:
        w13: `[num_slots, 2 * intermediate_size, hidden_size]`, gate on up.
        w2: `[num_slots, hidden_size, intermediate_size]`, down.
    """

    def __init__(
        self, num_slots: int, hidden_size: int, intermediate_size: int, group: GroupCoordinator
    ) -> None:
        super().__init__()
        self.shard = Shard.of(intermediate_size, group)
        width = self.shard.size
        self.w13 = nn.Parameter(torch.empty(num_slots, 2 * width, hidden_size), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(num_slots, hidden_size, width), requires_grad=False)

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor, num_absent: int = 0) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        Args:
            x: `[num_tokens, hidden_size]`.
            slots: `[num_tokens, top_k]` int64; -1 for an expert on another rank.
            weights: `[num_tokens, top_k]` float32.
            num_absent: how many of the slots are -1; a host number, since shapes depend on it.

        Returns: `[num_tokens, hidden_size]`; with experts in slices, this rank's partial sum.
        """
        num_tokens, top_k = slots.shape
        flat = slots.flatten()
        # Pairs of token and expert, sorted by expert.
        order = flat.argsort(stable=True)[num_absent:]
        counts = torch.zeros(len(self.w13) + 1, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add_(0, flat + 1, torch.ones_like(flat))[1:]
        gated = ops.silu_and_mul(ops.grouped_linear(x[order // top_k], self.w13, counts))
        answers = ops.grouped_linear(gated, self.w2, counts) * weights.flatten()[order, None]
        # Not index_add_: on a GPU it adds in the order in which threads arrive, so results would
        # differ from run to run.
        pairs = answers.new_zeros(num_tokens * top_k, x.shape[1])
        pairs[order] = answers
        return pairs.view(num_tokens, top_k, x.shape[1]).sum(1).to(x.dtype)

    def place(self, slot: int, matrix: str) -> Place:
        """The place of the "gate", "up" or "down" matrix of the expert in a slot."""
        if matrix == "down":
            hidden = self.w2.shape[1]
            return Place(
                self.w2[slot], (slice(0, hidden), self.shard.rows), (hidden, self.shard.total)
            )
        return self.shard.place(self.w13[slot], self.shard.size if matrix == "up" else 0)

    def parameter_of(self, name: str) -> str:
        """See the base class."""
        return "w2" if name.endswith("down_proj.weight") else "w13"

    @torch.inference_mode()
    def pack(self) -> None:
        """Rearrange the matrices, where they are, so that this machine multiplies fastest, see
        `ops.pack_weight`."""
        for name, weight in list(self.named_parameters(recurse=False)):
            if weight.shape[1] % 16 == 0:
                packed = ops.pack_weight(weight.flatten(0, 1)).unflatten(0, (len(weight), -1))
                setattr(
                    self,
                    name,
                    nn.Parameter(weight.view(packed.shape).copy_(packed), requires_grad=False),
                )


def shared_mlp(hidden_size: int, intermediate_size: int, group: GroupCoordinator) -> MLP:
    """The experts that every token visits, as one MLP. The ranks of a group share it, and each
    returns its partial sum."""
    mlp = MLP(hidden_size, intermediate_size, bias=False)
    sizes = [intermediate_size, intermediate_size]
    first = MergedColumnParallelLinear(hidden_size, sizes, group=group)
    second = RowParallelLinear(intermediate_size, hidden_size, reduce=False, group=group)
    mlp.register_module("gate_up_proj", first)
    mlp.register_module("down_proj", second)
    return mlp


class MoE(Layer):
    """A router and its experts, in place of a layer's MLP.

    Without expert parallelism, the tensor-parallel ranks hold a slice of every expert, compute the
    same tokens and add up their results. With it, each rank of the expert-parallel group holds
    whole experts, and tokens are sent to their experts' ranks.

    Attributes:
        load: tokens that this rank sent to each expert since the last reset, `[num_experts]` int64.
        dispatcher: sends tokens to their experts; None without expert parallelism.
    """

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.tp = get_tp_group()
        ep = get_ep_group()
        self.gate = Router(config, hidden_size)
        self.load = torch.zeros(config.num_routed, dtype=torch.int64, device="cpu")
        self.dispatcher: ExpertDispatcher | None = None
        holders = self.tp
        num_slots = config.num_routed
        if config.enable_expert_parallel:
            placement = ExpertPlacement.initial(
                config.num_routed, ep.world_size, config.num_redundant_experts
            )
            self.dispatcher = ExpertDispatcher(placement, ep)
            num_slots = placement.num_slots
            holders = GroupCoordinator("whole", [ep.rank], ep.rank)  # each expert is whole
        self.experts = Experts(num_slots, hidden_size, config.intermediate_size, holders)
        shared = (
            0 if config.shared_as_routed else config.num_shared_experts * config.intermediate_size
        )
        self.shared_experts = shared_mlp(hidden_size, shared, holders) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden_size]`, on every tensor-parallel rank the same, to the same
        shape."""
        if self.dispatcher is not None:
            return self._over_ranks(x, self.dispatcher)
        weights, experts = self._route(x)
        out = self.experts(x, experts, weights)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return self.tp.all_reduce(out)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, experts) of each token; counts them in `load`."""
        weights, experts = self.gate(x)
        if self.config.shared_as_routed:  # every token visits them, with weight 1
            numbers = torch.arange(self.config.num_experts, self.config.num_routed, device=x.device)
            experts = torch.cat([experts, numbers.expand(len(x), -1)], dim=1)
            weights = F.pad(weights, (0, len(numbers)), value=1.0)
        if self.load.device != x.device:
            self.load = self.load.to(x.device)
        flat = experts.flatten()
        self.load.scatter_add_(0, flat, torch.ones_like(flat))
        return weights, experts

    def _over_ranks(self, x: Tensor, dispatcher: ExpertDispatcher) -> Tensor:
        """Each tensor-parallel rank routes its share of the tokens (all ranks have all tokens);
        then they gather the results."""
        share = -(-len(x) // self.tp.world_size)
        mine = x[self.tp.rank_in_group * share :][:share]
        weights, experts = self._route(mine)
        rows, slots, weights, handle = dispatcher.dispatch(mine, experts, weights)
        num_absent = int((slots < 0).sum())
        out = dispatcher.combine(self.experts(rows, slots, weights, num_absent), handle)
        if self.shared_experts is not None:
            out = out + self.shared_experts(mine)
        out = F.pad(out, (0, 0, 0, share - len(mine)))  # the last share may be shorter, or empty
        return self.tp.all_gather(out, dim=0)[: len(x)]

    @property
    def matrices(self) -> Packable:
        """See the base class."""
        return self.experts

    def expert_weights(self) -> list[Tensor]:
        """The tensors whose row i belongs to slot i of this rank, as bytes. These rows move with an
        expert."""
        return [
            parameter.data.flatten(1).view(torch.uint8) for parameter in self.experts.parameters()
        ]

    def place(self, matrix: str, expert: int = 0) -> Place:
        """The place of the "gate", "up" or "down" matrix of a logical expert; an empty one if the
        expert is on another rank."""
        if self.dispatcher is None:
            return self.experts.place(expert, matrix)
        slots = self.dispatcher.placement.slots[self.dispatcher.group.rank_in_group]
        if expert in slots:
            return self.experts.place(slots.index(expert), matrix)
        place = self.experts.place(0, matrix)
        return replace(place, target=place.target[:0], source=(slice(0, 0), *place.source[1:]))

    def places(self, path: str) -> Iterator[tuple[str, Place]]:
        """See `Layer.places`. Shared experts are stored as one wide MLP, of which each slot takes
        an expert's channels."""
        num_experts = self.config.num_experts
        num_shared = self.config.num_routed - self.config.num_experts
        for matrix, axis in (("gate", 0), ("up", 0), ("down", 1)):
            for expert in range(num_experts):
                yield f"{path}.experts.{expert}.{matrix}_proj.weight", self.place(matrix, expert)
            for i in range(num_shared):
                place = self.place(matrix, num_experts + i).part_of_wider(axis, i, num_shared)
                yield f"{path}.shared_experts.{matrix}_proj.weight", place


class MoEDecoderLayer(DecoderLayer):
    """Llama's layer, with a `MoE` as `mlp` in the layers that the configuration names."""

    def build_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        if config.moe is not None and config.moe.sparse_layers[layer]:
            return MoE(config.moe, config.hidden_size)
        return super().build_mlp(config, layer)


# Mixtral's names in a checkpoint -> those of all other models.
MIXTRAL_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


class MoEForCausalLM(LlamaForCausalLM):
    """A decoder-only model in which some layers have a `MoE` as `mlp`: Mixtral (Jiang et al. 2024,
    arXiv 2401.04088), Qwen3-MoE."""

    layer_class = MoEDecoderLayer

    def moe_layers(self) -> dict[str, MoE]:
        """The layers with experts on this rank, in order: path in the model → layer."""
        return {path: module for path, module in self.named_modules() if isinstance(module, MoE)}

    def checkpoint_name(self, name: str) -> str | None:
        for old, new in MIXTRAL_NAMES.items():
            name = name.replace(old, new)
        return super().checkpoint_name(name)
