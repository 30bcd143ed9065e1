"""From logits to tokens, all requests of a step at once."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.request import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

# The nucleus of a peaked distribution is small: look for it among so many tokens before sorting all of them.
NUCLEUS_GUESS = 512


@dataclass
class SamplingRow:
    """One request that samples in this step.

    Attributes:
        token_ids: prompt and output so far, a view of the runner's buffer (int32).
        num_prompt_tokens: where the output begins.
        stop_ids: tokens that must not come before `min_tokens`: end of sequence and stop tokens.
    """

    params: SamplingParams
    token_ids: np.ndarray | Sequence[int]
    num_prompt_tokens: int
    stop_ids: Sequence[int] = ()

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the request's seed and on the index of the token in its output, and on
    nothing else: not on the batch, not on how often the request was preempted. (BLAKE2 as a counter-based
    generator, after Salmon et al. 2011.)"""
    digest = hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def apply_constraints(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Add logit biases and forbid early stops, in place. Only rows that ask for it cost anything."""
    for i, row in enumerate(rows):
        if row.params.logit_bias:
            ids = torch.tensor(list(row.params.logit_bias), device=logits.device)
            logits[i, ids] += torch.tensor(list(row.params.logit_bias.values()), device=logits.device)
        if row.stop_ids and row.num_output_tokens < row.params.min_tokens:
            logits[i, list(row.stop_ids)] = float("-inf")


def apply_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition penalty over prompt and output; presence and frequency penalty over the output. In place."""
    vocab_size = logits.shape[1]
    for i, row in enumerate(rows):
        params = row.params
        if not params.penalized:
            continue
        tokens = torch.as_tensor(row.token_ids, dtype=torch.int64, device=logits.device)
        if params.repetition_penalty != 1:
            seen = tokens.unique()
            scores = logits[i, seen]
            logits[i, seen] = torch.where(
                scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
            )
        counts = torch.bincount(tokens[row.num_prompt_tokens :], minlength=vocab_size)
        logits[i] -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def truncate(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set what top-k, top-p and min-p cut off to -inf, in place.

    Each of the three becomes a threshold on the logit: everything from the threshold up stays, ties included. So
    the outcome does not depend on the order in which equal logits happen to be sorted.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)

    need_k = [i for i, row in enumerate(rows) if 0 < row.params.top_k < logits.shape[1]]
    if need_k:
        ks = torch.tensor([rows[i].params.top_k for i in need_k], device=logits.device)
        part = logits[need_k]
        kth = part.topk(int(ks.max()), dim=1).values.gather(1, ks.unsqueeze(1) - 1)
        logits[need_k] = part.masked_fill(part < kth, float("-inf"))
    need_p = [i for i, row in enumerate(rows) if row.params.top_p < 1]
    if need_p:
        part = logits[need_p]
        threshold = nucleus_threshold(part, column([rows[i].params.top_p for i in need_p]))
        logits[need_p] = part.masked_fill(part < threshold.unsqueeze(1), float("-inf"))
    need_min = [i for i, row in enumerate(rows) if row.params.min_p > 0]
    if need_min:
        part = logits[need_min]
        least = part.amax(dim=1) + column([rows[i].params.min_p for i in need_min]).log()
        logits[need_min] = part.masked_fill(part < least.unsqueeze(1), float("-inf"))


def nucleus_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that still belongs to the nucleus: tokens are taken from the likeliest down until their
    probabilities reach `top_p`.

    Args:
        logits: `[num_rows, vocab_size]`, -inf where a token is out already.
        top_p: `[num_rows]`.

    Returns:
        `[num_rows]` thresholds.
    """
    total = logits.logsumexp(dim=1, keepdim=True)
    width = min(NUCLEUS_GUESS, logits.shape[1])
    while True:
        largest = logits.topk(width, dim=1).values
        mass_before = (largest - total).exp().cumsum(dim=1).roll(1, dims=1)
        mass_before[:, 0] = 0
        inside = mass_before < top_p.unsqueeze(1)
        if width == logits.shape[1] or not inside[:, -1].any():
            last = inside.sum(dim=1, keepdim=True) - 1
            return largest.gather(1, last).squeeze(1)
        width = logits.shape[1]


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the distribution function: the first token whose cumulative probability exceeds u.

    Args:
        logits: `[num_rows, vocab_size]`.
        uniforms: `[num_rows]` float64 in [0, 1).

    Returns:
        `[num_rows]` int64. A token of probability 0 is never drawn.
    """
    cumulative = logits.softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def gather_logprobs(logits: Tensor, chosen: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of chosen and likeliest tokens.

    Args:
        logits: `[num_rows, vocab_size]` before any of the sampling options.
        chosen: `[num_rows]` int64.
        counts: how many of the likeliest tokens each row wants.
    """
    logprobs = logits.float().log_softmax(dim=1)
    own = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = ((logprobs > own).sum(dim=1) + 1).tolist()
    top = logprobs.topk(max(1, *counts) if counts else 1, dim=1)
    ids, values = top.indices.tolist(), top.values.tolist()
    own_values, chosen_ids = own.squeeze(1).tolist(), chosen.tolist()
    return [
        TokenLogprobs([chosen_ids[i], *ids[i][:count]], [own_values[i], *values[i][:count]], ranks[i])
        for i, count in enumerate(counts)
    ]


class Sampler:
    """Chooses the next token of each row; holds no state, so every rank that sees the same logits agrees."""

    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Next token and, where asked for, log-probabilities.

        Args:
            logits: `[num_rows, vocab_size]`; may be changed.
            rows: one a row of logits.

        Returns:
            Token ids, and `TokenLogprobs` or None a row. Log-probabilities are those of the model itself, before
            temperature, penalties and truncation, as in vLLM.
        """
        wants = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[wants].clone() if wants else None
        logits = logits.float()
        apply_constraints(logits, rows)
        apply_penalties(logits, rows)
        tokens = logits.argmax(dim=1)
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            tokens[random] = self._sample_random(logits[random], [rows[i] for i in random])
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            counts = [rows[i].params.logprobs or 0 for i in wants]
            for i, entry in zip(wants, gather_logprobs(raw, tokens[wants], counts), strict=True):
                logprobs[i] = entry
        return tokens.tolist(), logprobs

    def _sample_random(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
        logits = logits / temperatures.clamp(min=1e-5).unsqueeze(1)
        truncate(logits, rows)
        uniforms = [uniform(row.params.seed or 0, row.num_output_tokens) for row in rows]
        return draw(logits, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
