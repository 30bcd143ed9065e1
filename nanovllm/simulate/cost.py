"""Interface of a model of step times.

Built by notebooks/51_what_if.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """Work of one step.

    Attributes:
        num_decodes: requests that compute a single token.
        decode_context: tokens that these requests attend to, the new ones included; their sum.
        prefills: of each other request, the first token that it computes, and how many.
        num_samples: requests for which the step samples.
    """

    num_decodes: int
    decode_context: int
    prefills: Sequence[tuple[int, int]]
    num_samples: int


class StepCost(Protocol):
    """Predicts the time of a step, in whole picoseconds.

    The time of a step without prefills is an affine function of its context, so that the time of
    many such steps can be added up in one expression:

        step(StepWork(n, context, (), n)) == base + per_token * context
                                             with base, per_token = decode(n)
    """

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context of a step in which `num_decodes` requests
        compute a token each."""

    def head(self, work: StepWork) -> int:
        """Return by how much the slowest stage of a pipeline takes longer than each other one, as a
        part of the step's time. It usually is the last one, which has the model's head."""
        return 0

    def after_idle(self, idle: int) -> int:
        """Return by how much the first step is longer after the engine has been idle for `idle`."""
        return 0
