"""Interface of a model of the times and the memory of a rank with a sleeping device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from nanovllm.data.config import EngineConfig


class RankTimes(NamedTuple):
    """The predicted times of a rank's share of a step, in picoseconds.

    Attributes:
        compute: its share of the stage's layers.
        communicate: the collectives with the other ranks of its stage.
        send: the hidden states' way to the next stage.
        parts: by name, the times that `compute` and `communicate` add up.
    """

    compute: int
    communicate: int
    send: int
    parts: dict[str, int]


class RankCost(Protocol):
    """Predicts the times of one rank.

    Attributes:
        bytes_per_block: device memory per KV block, on this rank.
    """

    @property
    def bytes_per_block(self) -> int: ...

    def step(self, shares: Sequence[tuple[int, int]], num_samples: int) -> RankTimes:
        """Return the times of a step.

        Args:
            shares: of each request, the first token that it computes, and how many.
            num_samples: tokens that the step samples.
        """

    def transfer(self, num_bytes: int) -> int:
        """Return the picoseconds that KV takes from another engine to this rank."""

    def num_blocks(self, config: EngineConfig) -> int:
        """Return the number of KV blocks for which weights and activations leave memory on each
        rank.

        Raises:
            UsageError: there is none; the message names the missing GB.
        """
