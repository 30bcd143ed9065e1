"""The runner's half of structured output: has masks computed while the model runs.

Built by notebooks/19_structured_output.ipynb: edit it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.core.runner_hooks import RunnerHooks
from nanovllm.core.sampling import SamplingRow
from nanovllm.core.schedule import SchedulerOutput

if TYPE_CHECKING:
    from nanovllm.features.structured_output.masks import StructuredOutputManager


class StructuredOutput(RunnerHooks):
    """Forbids what grammars do not allow.

    Args:
        create_manager: makes the manager, when the first request has a grammar.
    """

    def __init__(self, create_manager: Callable[[], StructuredOutputManager]) -> None:
        self._create_manager = create_manager
        self._apply: Callable[[Tensor], dict[str, str]] | None = None
        self._asking: set[str] = set()  # running requests with a grammar

    @functools.cached_property
    def manager(self) -> StructuredOutputManager:
        """Computes the masks."""
        return self._create_manager()

    def rows_ready(self, plan: SchedulerOutput, rows: list[SamplingRow]) -> None:
        """Start to compute masks, if a request has a grammar."""
        for scheduled in plan.requests:
            params = scheduled.sampling_params
            if params is not None and params.structured_outputs is not None:
                self._asking.add(scheduled.request_id)
        asks = bool(self._asking) and any(row.request_id in self._asking for row in rows)
        self._apply = self.manager.start(rows) if asks else None

    def logits_ready(self, logits: Tensor, rows: Sequence[SamplingRow]) -> dict[str, str]:
        """Apply the masks."""
        return {} if self._apply is None else self._apply(logits)

    def removed(self, request_id: str) -> None:
        """Drop a request's matcher."""
        self._asking.discard(request_id)
        if "manager" in vars(self):
            self.manager.matchers.pop(request_id, None)
