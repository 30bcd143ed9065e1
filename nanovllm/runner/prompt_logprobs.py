"""How likely a prompt is: log-probabilities of its tokens, for the part of it that a step computes.

Built by notebooks/17_model_runner.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.request import TokenLogprobs
from nanovllm.data.schedule import SchedulerOutput
from nanovllm.runner.batch import Batch, RequestRows
from nanovllm.runner.device_copies import upload
from nanovllm.runner.sampling import start_logprobs

# Rows of prompt log-probabilities that are computed at a time: a row of logits is as long as the vocabulary.
LOGPROB_ROWS = 256


def start_prompt_logprobs(
    model: Any, rows: RequestRows, schedule: SchedulerOutput, batch: Batch, hidden: Tensor
) -> Callable[[], dict[str, list[TokenLogprobs]]]:
    """Compute the log-probability of each prompt token of the step, given those before it.

    Args:
        hidden: the step's hidden states, `[num_tokens, hidden_size]`.

    Returns:
        A function that waits for them: by request.
    """
    first = 0
    arrivals: dict[str, list[Callable[[], list[TokenLogprobs]]]] = {}
    for scheduled, row in zip(schedule.requests, batch.rows, strict=True):
        count = rows.params[scheduled.request_id].prompt_logprobs
        # The hidden state at position p predicts position p + 1, which must still be of the prompt.
        last = min(scheduled.start + scheduled.num_tokens, int(rows.num_prompt_tokens[row]) - 1)
        if count is not None and last > scheduled.start:
            targets = rows.token_ids[row, scheduled.start + 1 : last + 1]
            parts = arrivals[scheduled.request_id] = []
            for i in range(0, len(targets), LOGPROB_ROWS):
                part = upload(targets[i : i + LOGPROB_ROWS], torch.int64, hidden.device)
                logits = model.compute_logits(hidden[first + i : first + i + len(part)])
                parts.append(start_logprobs(logits, part, [count] * len(part)))
        first += scheduled.num_tokens
    return lambda: {name: [entry for arrive in parts for entry in arrive()] for name, parts in arrivals.items()}
