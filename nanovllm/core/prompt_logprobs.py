"""Log-probabilities of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
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
    plan: SchedulerOutput,
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
    if plan.num_prefill_tokens == 0:
        return dict
    arrivals: dict[str, list[Callable[[], list[TokenLogprobs]]]] = {}
    starts = np.array([scheduled.start for scheduled in plan.requests])
    firsts = np.cumsum(batch.num_scheduled) - batch.num_scheduled
    # The hidden state at position p predicts position p + 1, which must be in the prompt.
    lasts = np.minimum(starts + batch.num_scheduled, rows.num_prompt_tokens[batch.rows] - 1)
    for place in np.flatnonzero(lasts > starts):
        request_id = plan.requests[place].request_id
        count = rows.sampling[int(batch.rows[place])].params.prompt_logprobs
        if count is None:
            continue
        targets = rows.token_ids[batch.rows[place], starts[place] + 1 : lasts[place] + 1]
        parts = arrivals[request_id] = []
        for i in range(0, len(targets), LOGPROB_ROWS):
            part = upload(targets[i : i + LOGPROB_ROWS], torch.int64, hidden.device)
            first = int(firsts[place]) + i
            logits = compute_logits(hidden[first : first + len(part)])
            parts.append(start_logprobs(logits, part, [count] * len(part)))
    return lambda: {
        name: [entry for arrive in parts for entry in arrive()] for name, parts in arrivals.items()
    }
