"""Reads the experts of a config.json into one plain-data class for all supported architectures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanovllm.checkpoint.files import Fields, check_supported
from nanovllm.data.config import EngineConfig
from nanovllm.data.eplb_config import EPLBConfig

# The loader lists all experts of a model. DeepSeek-V3 has 14,848.
MOST_EXPERTS = 2**16


@dataclass(frozen=True)
class MoEConfig:
    """The experts of a model, how tokens are routed to them, and how they are divided among ranks.

    Attributes:
        num_experts: routed experts of a layer.
        top_k: number of experts that each token visits.
        intermediate_size: channels of one expert.
        sparse_layers: for each layer, whether it has experts instead of an ordinary MLP.
        num_shared_experts: further experts that every token visits; stored as one MLP of this many
            times the size.
        scoring: "softmax" or "sigmoid", which turns the router's logits into scores.
        renormalize: divide the chosen scores by their sum.
        scaling_factor: factor on the weights of the routed experts, after renormalization.
        num_groups, topk_group: experts are chosen within the best `topk_group` of `num_groups`
            groups.
        correction_bias: the router has a bias that affects the choice of experts, but not their
            weights (DeepSeek-V3).
        float32_router: the router multiplies in float32 whatever the model's dtype.
        enable_expert_parallel: every rank holds whole experts, instead of a slice of each. An
            engine setting.
        num_redundant_experts: slots for second copies of busy experts. An engine setting.
        shared_as_routed: place shared experts like routed ones. An engine setting.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    num_shared_experts: int = 0
    scoring: str = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    correction_bias: bool = False
    float32_router: bool = False
    enable_expert_parallel: bool = False
    num_redundant_experts: int = 0
    shared_as_routed: bool = False

    def __post_init__(self) -> None:
        if self.num_experts * sum(self.sparse_layers) > MOST_EXPERTS:
            raise ValueError(
                f"{self.num_experts} experts per layer are too many: {MOST_EXPERTS} in all is the "
                "most"
            )
        check_supported("scoring_func", self.scoring, ["softmax", "sigmoid"])
        if self.num_experts % self.num_groups or not 1 <= self.topk_group <= self.num_groups:
            found = (
                f"{self.num_experts} experts in n_group={self.num_groups} groups with "
                f"topk_group={self.topk_group}"
            )
            raise ValueError(f"{found}: groups must be equal, and topk_group at most their number")
        if self.shared_as_routed and not self.num_shared_experts:
            raise ValueError("shared_as_routed: this model has no shared experts; do not set it")
        allowed = self.num_experts // self.num_groups * self.topk_group
        if not 1 <= self.top_k <= allowed:
            raise ValueError(
                f"a token cannot use {self.top_k} of {allowed} experts (num_experts_per_tok)"
            )

    @property
    def num_routed(self) -> int:
        """Experts that are placed on ranks: the routed ones, and with `shared_as_routed` the shared
        ones."""
        return self.num_experts + (self.num_shared_experts if self.shared_as_routed else 0)

    def with_settings(self, config: EngineConfig) -> MoEConfig:
        """Add what the engine's settings say about the experts.

        Raises:
            ValueError: an unreadable `eplb_config`, or `shared_as_routed` for a model without
                shared experts.
        """
        if not config.enable_expert_parallel:
            return self
        moe = replace(self, enable_expert_parallel=True)
        if not config.enable_eplb:
            return moe
        eplb = EPLBConfig.from_json(config.eplb_config or "{}")
        return replace(
            moe,
            num_redundant_experts=eplb.num_redundant_experts,
            shared_as_routed=eplb.shared_as_routed,
        )

    @classmethod
    def from_dict(cls, raw: Fields) -> MoEConfig | None:
        """Read a parsed config.json; None for a model without experts. transformers 5 writes
        `num_local_experts` where the files of the hub have `num_experts` (Qwen3-MoE) or
        `n_routed_experts` (DeepSeek).

        Raises:
            ValueError: contradictory numbers, or a way of routing that is not supported.
        """
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        num_experts = next((raw[name] for name in names if raw.get(name)), None)
        if num_experts is None:
            return None
        first = raw.get("first_k_dense_replace", 0)
        every = raw.get("moe_layer_freq", 1)
        step = raw.get("decoder_sparse_step", 1)
        dense = raw.get("mlp_only_layers", ())
        method = raw.get("topk_method", "greedy")
        check_supported("topk_method", method, ["greedy", "group_limited_greedy", "noaux_tc"])
        grouped = method != "greedy"
        sparse_layers = tuple(
            layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
            for layer in range(raw["num_hidden_layers"])
        )
        return cls(
            num_experts,
            raw["num_experts_per_tok"],
            raw.get("moe_intermediate_size") or raw["intermediate_size"],
            sparse_layers,
            num_shared_experts=raw.get("n_shared_experts", 0),
            scoring=raw.get("scoring_func", "softmax"),
            renormalize=raw.get("norm_topk_prob", False),
            scaling_factor=raw.get("routed_scaling_factor", 1.0),
            num_groups=(grouped and raw.get("n_group")) or 1,
            topk_group=(grouped and raw.get("topk_group")) or 1,
            correction_bias=method == "noaux_tc",
            float32_router=raw["architectures"][0].startswith("Deepseek"),
        )
