"""Expert-parallel load balancing (EPLB) while the engine runs: counts the tokens of each expert,
and moves experts to where `load_balance` puts them (lecture 24).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nanovllm.data.eplb_config import EPLBConfig
from nanovllm.distributed.groups import GroupCoordinator, get_ep_group
from nanovllm.distributed.load_balance import Move, balance, plan_moves

if TYPE_CHECKING:
    from nanovllm.models.moe import MoE, MoEForCausalLM

logger = logging.getLogger(__name__)


def create_balancer(model: nn.Module, settings: str) -> LoadBalancer:
    """Create the balancer that moves a model's experts between ranks by their load; see
    `LoadBalancer.after_step`.

    Args:
        settings: fields of `EPLBConfig`, as JSON.
    """
    layers = cast("MoEForCausalLM", model).moe_layers().values()
    return LoadBalancer(list(layers), EPLBConfig.from_json(settings))


class LoadBalancer:
    """Counts the tokens of each expert, and rearranges the experts from time to time.

    Every rank of the expert-parallel group has a balancer and calls `after_step` after every
    forward pass. All ranks therefore make the same decision, from the same numbers, between the
    same two steps.

    Args:
        layers: the layers with experts (see `models.moe.MoE`), in order.
        config: when to balance.
        group: default: the expert parallel group.

    Attributes:
        bytes_moved: of weights, over all ranks.
        balancedness: mean over maximum of the ranks' loads in the last window, before and after: 1
            is perfect.
    """

    def __init__(
        self, layers: Sequence[MoE], config: EPLBConfig, group: GroupCoordinator | None = None
    ) -> None:
        self.layers = layers
        self.config = config
        self.group = group or get_ep_group()
        self.step = self.bytes_moved = 0
        self.balancedness = (1.0, 1.0)
        # A window is a part of the interval, or several whole intervals.
        self._past: deque[Tensor] = deque(maxlen=max(1, config.window_size // config.step_interval))
        # Loads after the last step that counted.
        self._known = [torch.zeros_like(layer.load) for layer in layers]

    @torch.inference_mode()
    def after_step(self, was_dummy: bool = False) -> bool:
        """Count a step, and balance if it is time.

        Args:
            was_dummy: this rank had no request in the step, so its padding tokens do not count.

        Returns: whether experts have moved.
        """
        if not self.layers:  # no rank of this pipeline stage has experts
            return False
        for layer, known in zip(self.layers, self._known, strict=True):
            if was_dummy:
                layer.load.copy_(known)
            else:
                known.copy_(layer.load)
        self.step += 1
        phase = self.step % self.config.step_interval
        if phase == 0:
            return self.rebalance()
        if self.config.step_interval - phase == self.config.window_size:
            self._take_loads()
        return False

    # Weights and counters were created in inference mode, and can only be written there.
    @torch.inference_mode()
    def _take_loads(self) -> Tensor:
        """The counts since the last call, `[num_layers, num_experts]` int64."""
        counted = torch.stack([layer.load for layer in self.layers])
        for layer, known in zip(self.layers, self._known, strict=True):
            layer.load.zero_()
            known.zero_()
        return counted

    @torch.inference_mode()
    def rebalance(self) -> bool:
        """Balance every layer for the tokens of the window. Returns: whether experts have moved."""
        self._past.append(self.group.all_reduce(self._take_loads()))
        window = torch.stack(list(self._past)).sum(0).tolist()
        before = 0.0
        after = 0.0
        moved = 0
        for layer, loads in zip(self.layers, window, strict=True):
            assert layer.dispatcher is not None, "the ranks share its experts"
            old = layer.dispatcher.placement
            new = balance(loads, old)
            before += max(old.rank_loads(loads))
            after += max(new.rank_loads(loads))
            if new != old:
                moved += move_experts(layer.expert_weights(), plan_moves(old, new), self.group)
                layer.dispatcher.place(new)
        mean = sum(map(sum, window)) / self.group.world_size
        self.balancedness = (mean / before, mean / after) if before else (1.0, 1.0)
        self.bytes_moved += moved
        if self.config.log_balancedness:
            logger.info(
                "balancedness of experts: %.2f, now %.2f; %d bytes moved", *self.balancedness, moved
            )
        return moved > 0


def move_experts(weights: Sequence[Tensor], moves: list[Move], group: GroupCoordinator) -> int:
    """Move experts with one uneven all-to-all.

    Args:
        weights: tensors `[num_slots, ...]` of this rank; an expert is one row of each.

    Returns: bytes that all ranks have sent in total.
    """
    rank = group.rank_in_group
    leaving = sorted((move for move in moves if move.source == rank), key=lambda move: move.target)
    coming = sorted((move for move in moves if move.target == rank), key=lambda move: move.source)
    flat = [weight.flatten(1) for weight in weights]
    rows = torch.cat([part[[move.source_slot for move in leaving]] for part in flat], dim=1)
    ranks = range(group.world_size)
    sent = [sum(move.target == other for move in leaving) for other in ranks]
    received = group.all_to_all(
        rows, sent, [sum(move.source == other for move in coming) for other in ranks]
    )
    slots = [move.target_slot for move in coming]
    for part, new in zip(
        flat, torch.split(received, [part.shape[1] for part in flat], dim=1), strict=True
    ):
        part[slots] = new
    return len(moves) * rows.shape[1] * rows.element_size()
