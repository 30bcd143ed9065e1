"""Log-probabilities of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.core.batch import Batch, RequestRows
from nanovllm.core.device_copies import upload
from nanovllm.core.sampling import start_logprobs
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.request import TokenLogprobs

# Tokens that are computed in one call: each needs a row of logits as long as the vocabulary.
LOGPROB_ROWS = 256


def start_prompt_logprobs(
    rows: RequestRows,
    schedule: SchedulerOutput,
    batch: Batch,
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
) -> Callable[[], dict[str, list[TokenLogprobs]]]:
    """Start to compute the log-probability of each prompt token of the step, given the tokens
    before it.

    Args:
        hidden: the step's hidden states, `[num_tokens, hidden_size]`.

    Returns:
        A function that waits for the log-probabilities, by request.
    """
    first = 0
    arrivals: dict[str, list[Callable[[], list[TokenLogprobs]]]] = {}
    is_wanted = any(params.prompt_logprobs is not None for params in rows.params.values())
    for scheduled, row in zip(schedule.requests, batch.rows, strict=True) if is_wanted else ():
        count = rows.params[scheduled.request_id].prompt_logprobs
        end = scheduled.start + scheduled.num_tokens
        # The hidden state at position p predicts position p + 1, which must be in the prompt.
        last = 0 if count is None else min(end, rows.num_prompt_tokens[row] - 1)
        if last > scheduled.start:
            targets = rows.token_ids[row, scheduled.start + 1 : last + 1]
            parts = arrivals[scheduled.request_id] = []
            for i in range(0, len(targets), LOGPROB_ROWS):
                part = upload(targets[i : i + LOGPROB_ROWS], torch.int64, hidden.device)
                logits = compute_logits(hidden[first + i : first + i + len(part)])
                parts.append(start_logprobs(logits, part, [count or 0] * len(part)))
        first += scheduled.num_tokens
    return lambda: {
        name: [entry for arrive in parts for entry in arrive()] for name, parts in arrivals.items()
    }
