"""When the experts of a model are balanced over the ranks: plain data, under vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from nanovllm.data.checks import Count, Keywords, Positive


@dataclass(frozen=True)
class EPLBConfig(Keywords):
    """When to balance, and with how many slots; names and defaults match vLLM's
    `--eplb-config`.

    Attributes:
        window_size: steps whose loads count.
        step_interval: steps from one balancing to the next.
        num_redundant_experts: slots beyond one per expert, over all ranks.
        log_balancedness: log the mean over the maximum of the ranks' loads each time.
        shared_as_routed: place shared experts like routed ones that every token visits (not in
            vLLM).
    """

    window_size: Positive = 1000
    step_interval: Positive = 3000
    num_redundant_experts: Count = 0
    log_balancedness: bool = False
    shared_as_routed: bool = False

    @classmethod
    def from_json(cls, text: str) -> EPLBConfig:
        """Parse the value of the command line.

        Raises:
            ValueError: not a JSON object, or an unknown key or value.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(
                f"--eplb-config takes a JSON object with keys of {names}; got {text!r}: {error}"
            ) from None
