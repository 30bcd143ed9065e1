"""Rows of requests with tokens that the host does not know yet, or that may be wrong.

A *pending* token was sampled by a step whose result the host has not read: only the device knows
it. *Extra* tokens are guesses that follow the known tokens; a step computes them, and samples after
each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nanovllm.core.batch import RequestRows
from nanovllm.core.sampling import SamplingRow
from nanovllm.core.schedule import SchedulerOutput


class RowsAhead(RequestRows):
    """Request rows that have room for pending and extra tokens. They follow the known tokens of a
    row and do not count as known, so the next step's new tokens overwrite them."""

    def __init__(
        self, max_num_seqs: int, max_tokens: int, max_blocks: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(max_num_seqs, max_tokens, max_blocks, eos_token_ids)
        self._due_ids: list[str] = []
        self._sampling_rows: list[SamplingRow] = []  # for `_due_ids`

    def remove(self, request_id: str) -> None:
        """See `RequestRows`."""
        super().remove(request_id)
        self._due_ids = []
        self._sampling_rows = []

    def _unknown(self, plan: SchedulerOutput) -> list[Sequence[int]]:
        """Return the tokens of each share that are not known: a 0 for a pending token, and the
        extra tokens."""
        return [
            [0, *scheduled.extra_token_ids]
            if scheduled.last_is_pending
            else scheduled.extra_token_ids
            for scheduled in plan.requests
        ]

    @staticmethod
    def pending(plan: SchedulerOutput) -> np.ndarray:
        """Return the numbers, in the plan, of the requests whose last token is pending."""
        numbers = [i for i, scheduled in enumerate(plan.requests) if scheduled.last_is_pending]
        return np.array(numbers, dtype=np.int64)

    def sampling_rows(self, due_ids: list[str]) -> list[SamplingRow]:
        """Return the sampler's input for each token that a step samples. As long as no request
        comes or goes, steps get the same objects.

        Args:
            due_ids: each token's request. A request with n extra tokens is there n + 1 times: its
                last token has seen all of them, the one before all but the last, and so on.
        """
        if due_ids != self._due_ids:
            self._due_ids = due_ids
            num_later = Counter(due_ids)
            self._sampling_rows = []
            for request_id in due_ids:
                num_later[request_id] -= 1
                sampling_row = self.sampling[self.row_of[request_id]]
                if num_later[request_id]:
                    sampling_row = replace(sampling_row, num_unseen=num_later[request_id])
                self._sampling_rows.append(sampling_row)
        return list(self._sampling_rows)

    @staticmethod
    def due(
        plan: SchedulerOutput, caught_up: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions to sample, as two arrays: the number of the request in the plan,
        and the token's position in the batch.

        A request that has caught up samples after its last token, at `ends[i] - 1`; with n extra
        tokens, it samples n + 1 times, after each of its last n + 1 tokens."""
        due = np.flatnonzero(caught_up)
        if not any([scheduled.extra_token_ids for scheduled in plan.requests]):
            return due, ends[due] - 1
        num_extra = np.array([len(plan.requests[i].extra_token_ids) for i in due], dtype=np.int64)
        num_behind = np.concatenate([np.arange(n, -1, -1) for n in num_extra] or [num_extra])
        due = due.repeat(num_extra + 1)
        return due, ends[due] - 1 - num_behind
