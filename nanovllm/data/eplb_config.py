"""When the experts of a model are balanced over the ranks: plain data, under vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EPLBConfig:
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

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    shared_as_routed: bool = False

    def __post_init__(self) -> None:
        if self.window_size < 1 or self.step_interval < 1 or self.num_redundant_experts < 0:
            raise ValueError(
                "window_size and step_interval must be at least 1, and num_redundant_experts at "
                "least 0"
            )

    @classmethod
    def from_json(cls, text: str) -> EPLBConfig:
        """Parse the value of the command line.

        Raises:
            ValueError: not a JSON object, or an unknown key or value.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(
                f"--eplb-config takes a JSON object with keys of {names}; got {text}: {error}"
            ) from None
