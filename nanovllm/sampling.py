"""From logits to tokens, all requests of a step at once.

Built by notebooks/16_sampling.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.request import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

# The nucleus of a peaked distribution is small: look for it among so many tokens before sorting all of them.
NUCLEUS_GUESS = 512
# Cumulative sums are slow, plain sums are not: a draw adds up blocks of so many tokens, then the tokens of one block.
DRAW_BLOCK = 256
# Temperatures and repetition penalties beyond these change nothing any more but would leave the range of float32.
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-5, 1e5


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


def apply_constraints(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Add logit biases and forbid early stops, in place. Only rows that ask for it cost anything."""
    for i, row in enumerate(rows):
        if row.params.logit_bias:
            ids = torch.tensor(list(row.params.logit_bias), device=logits.device)
            logits[i, ids] += torch.tensor(list(row.params.logit_bias.values()), device=logits.device)
        if row.num_output_tokens < row.params.min_tokens:
            forbidden = list(set(row.stop_ids))
            # A request that forbids every token has asked for the impossible: it gets tokens all the same.
            if 0 < len(forbidden) < logits.shape[1]:
                logits[i, forbidden] = float("-inf")


def moderate(factor: float) -> float:
    """A temperature or repetition penalty, kept to where float32 can multiply and divide logits by it."""
    return min(max(factor, SMALLEST_FACTOR), LARGEST_FACTOR)


def occurrences(
    logits: Tensor, texts: dict[int, np.ndarray | Sequence[int]], *options: Sequence[float]
) -> list[Tensor]:
    """Every token of some texts, one text after the other.

    Args:
        logits: `[num_rows, vocab_size]`.
        texts: tokens, by the row of logits that they belong to.
        options: numbers, one a text.

    Returns:
        The place of each token in the flattened logits; then each of the options, repeated for every token.
    """
    lengths = [len(text) for text in texts.values()]
    starts = np.array(list(texts)) * logits.shape[1]
    places = (np.concatenate(list(texts.values())) + starts.repeat(lengths)).astype(np.int64)
    repeated = [np.array(option, dtype=np.float32).repeat(lengths) for option in options]
    return [torch.from_numpy(array).to(logits.device) for array in (places, *repeated)]


def apply_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition penalty over prompt and output; presence and frequency penalty over the output. In place.

    Args:
        logits: `[num_rows, vocab_size]` float32.
        rows: one a row of logits. Only those with penalties cost anything.
    """
    asking = {i: row for i, row in enumerate(rows) if row.params.penalized}
    # A token that stands twice in a text is read twice, then written twice: the same value both times.
    seen = {i: row.token_ids for i, row in asking.items() if row.params.repetition_penalty != 1}
    if seen:
        factors = [moderate(rows[i].params.repetition_penalty) for i in seen]
        places, factor = occurrences(logits, seen, factors)
        scores = logits.take(places)
        logits.put_(places, torch.where(scores > 0, scores / factor, scores * factor))
    written = {
        i: row.token_ids[row.num_prompt_tokens :]
        for i, row in asking.items()
        if row.params.presence_penalty != 0 or row.params.frequency_penalty != 0
    }
    if written:
        presences = [rows[i].params.presence_penalty for i in written]
        frequencies = [rows[i].params.frequency_penalty for i in written]
        places, presence, frequency = occurrences(logits, written, presences, frequencies)
        scores = logits.take(places)
        # Count in the logits' own places, now that they are read: a table of counters would be as large as they are.
        logits.put_(places, torch.zeros_like(scores)).put_(places, torch.ones_like(scores), accumulate=True)
        logits.put_(places, scores - (presence + frequency * logits.take(places)))


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """The logit of a token that is `min_p` (`[num_rows]`, more than 0) times as likely as the likeliest."""
    return (logits.amax(dim=1) + min_p.log()).to(logits.dtype)


def nucleus_threshold(logits: Tensor, top_p: Tensor, width: int = NUCLEUS_GUESS) -> Tensor:
    """The smallest logit that still belongs to the nucleus: tokens are taken from the likeliest down until their
    probabilities reach `top_p`.

    Args:
        logits: `[num_rows, vocab_size]`, -inf where a token is out already.
        top_p: `[num_rows]` float64, more than 0.
        width: among how many of the likeliest tokens to look first. Rows whose nucleus is larger, and only
            they, are looked at again, eight times as wide.

    Returns:
        `[num_rows]` thresholds.
    """
    largest, ids = logits.topk(min(width, logits.shape[1]), dim=1)
    mass = logits.softmax(dim=1).gather(1, ids).cumsum(dim=1, dtype=torch.float64)
    # The token that makes the mass reach top_p still belongs to the nucleus.
    last = (mass < top_p.unsqueeze(1)).sum(dim=1)
    threshold = largest.gather(1, last.clamp(max=largest.shape[1] - 1).unsqueeze(1)).squeeze(1)
    wide = (last == largest.shape[1]).nonzero().squeeze(1)
    if len(wide) and largest.shape[1] < logits.shape[1]:
        threshold[wide] = nucleus_threshold(logits[wide], top_p[wide], width=8 * width)
    return threshold


def top_k_threshold(logits: Tensor, top_k: Tensor, width: int = NUCLEUS_GUESS) -> Tensor:
    """The k-th largest logit.

    Args:
        logits: `[num_rows, vocab_size]`.
        top_k: `[num_rows]`, at least 1; one larger than the vocabulary keeps everything.
        width: rows with a larger k are searched on their own, so that they do not slow down the others.

    Returns:
        `[num_rows]` thresholds.
    """
    last = top_k.clamp(max=logits.shape[1]).long() - 1
    largest = logits.topk(min(width, int(last.max()) + 1), dim=1).values
    threshold = largest.gather(1, last.clamp(max=largest.shape[1] - 1).unsqueeze(1)).squeeze(1)
    wide = (last >= largest.shape[1]).nonzero().squeeze(1)
    if len(wide):
        threshold[wide] = top_k_threshold(logits[wide], top_k[wide], width=logits.shape[1])
    return threshold


def truncate(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set what top-k, then top-p, then min-p cut off to -inf, in place. Only rows that ask for it cost anything.

    Each of the three becomes a threshold on the logit: everything from the threshold up stays, ties included. So
    the outcome does not depend on the order in which equal logits happen to be sorted.
    """
    for name, off, threshold_of in (
        ("top_k", 0, top_k_threshold),
        ("top_p", 1, nucleus_threshold),
        ("min_p", 0, min_p_threshold),
    ):
        asking = [i for i, row in enumerate(rows) if getattr(row.params, name) != off]
        if not asking:
            continue
        everyone = len(asking) == len(rows)  # then there is no need to copy rows out and back
        part = logits if everyone else logits[asking]
        values = [getattr(rows[i].params, name) for i in asking]
        threshold = threshold_of(part, torch.tensor(values, dtype=torch.float64, device=logits.device))
        outside = part < threshold.unsqueeze(1)
        if everyone:
            logits.masked_fill_(outside, float("-inf"))
        else:
            logits[asking] = part.masked_fill(outside, float("-inf"))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the request's seed and on the index of the token in its output, and on
    nothing else: not on the batch, not on how often the request was preempted. (BLAKE2 as a counter-based
    generator, after Salmon et al. 2011.)"""
    digest = hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def locate(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Put weights end to end and see where a dart hits: the first whose cumulative sum is greater than u of the total.

    Args:
        weights: `[num_rows, num_weights]`, none negative.
        uniforms: `[num_rows]` float64 in [0, 1).

    Returns:
        `[num_rows]` int64 indices, and `[num_rows]` float64 in [0, 1): how far into that weight the dart hits.
        A weight of 0 is never hit.
    """
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    # No comparison with a NaN is true. One broken row must not leave the vocabulary and stop the whole batch.
    index = index.clamp(max=weights.shape[1] - 1)
    width = weights.gather(1, index).double()
    within = (target - (cumulative.gather(1, index) - width)) / width
    return index.squeeze(1), within.squeeze(1).clamp(0, 1 - 2.0**-53)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the distribution function: first find the block of tokens that u hits, then the token in it.

    Args:
        logits: `[num_rows, vocab_size]`.
        uniforms: `[num_rows]` float64 in [0, 1).

    Returns:
        `[num_rows]` int64. A token of probability 0 is never drawn.
    """
    vocab_size = logits.shape[1]
    probabilities = logits.softmax(dim=1)
    if vocab_size % DRAW_BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, -vocab_size % DRAW_BLOCK))
    blocks = probabilities.unflatten(1, (-1, DRAW_BLOCK))
    block, within = locate(blocks.sum(dim=2), uniforms)
    token, _ = locate(blocks[torch.arange(len(blocks), device=logits.device), block], within)
    return (block * DRAW_BLOCK + token).clamp(max=vocab_size - 1)


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
    own_values, chosen_ids = own.squeeze(1).tolist(), chosen.tolist()
    entries = [TokenLogprobs([chosen_ids[i]], [own_values[i]], ranks[i]) for i in range(len(counts))]
    # Rows of one count at a time: which of several equal tokens topk returns depends on k, and must not depend on
    # what the neighbours want.
    for count in set(counts) - {0}:
        same = [i for i, other in enumerate(counts) if other == count]
        top = logprobs[same].topk(min(count, logprobs.shape[1]), dim=1)
        for i, ids, values in zip(same, top.indices.tolist(), top.values.tolist(), strict=True):
            entries[i].token_ids += ids
            entries[i].logprobs += values
    return entries


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
        raw = logits[wants] if wants else None  # a copy
        logits = logits.float()
        apply_constraints(logits, rows)
        apply_penalties(logits, rows)
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if len(random) == len(rows):
            tokens = self._sample_random(logits, rows)
        else:
            tokens = ops.argmax(logits)
            if random:
                tokens[random] = self._sample_random(logits[random], [rows[i] for i in random])
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            counts = [rows[i].params.logprobs or 0 for i in wants]
            for i, entry in zip(wants, gather_logprobs(raw, tokens[wants], counts), strict=True):
                logprobs[i] = entry
        return tokens.tolist(), logprobs

    def _sample_random(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Temperature, truncation and draw: `[num_rows]` int64."""
        temperatures = [moderate(row.params.temperature) for row in rows]
        logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        truncate(logits, rows)
        uniforms = [uniform(row.params.seed or 0, row.num_output_tokens) for row in rows]
        return draw(logits, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
