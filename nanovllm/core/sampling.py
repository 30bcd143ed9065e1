"""Samples the next tokens from logits, for all requests of a step in one call.

Built by notebooks/16_sampling.ipynb: edit it there.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.core.device_copies import is_asynchronous, pick, start_copy, start_fetch, upload
from nanovllm.data.request import TokenLogprobs
from nanovllm.data.sampling_params import SamplingParams

# The nucleus of a peaked distribution is small, so it is searched among this many tokens first.
NUCLEUS_GUESS = 512
# Bits per digit, and rows per call, of the nucleus search that does not synchronise.
DIGIT_BITS = 11
SEARCH_ROWS = 64
# Probabilities are rounded to multiples of 1 / UNITS: a sum of integers does not depend on the
# order of additions.
UNITS = 2.0**52
# Cumulative sums are slow. A draw therefore sums blocks of this many tokens, and needs a cumulative
# sum only over the blocks and over the tokens of one block.
DRAW_BLOCK = 256
# Temperatures and repetition penalties beyond these would leave the range of float32.
SMALLEST_FACTOR = 1e-5
LARGEST_FACTOR = 1e5


@dataclass
class SamplingRow:
    """One token that this step samples.

    Attributes:
        history: the tokens before it. 0 stands for a last one that the host does not know yet.
        num_prompt_tokens: where the output begins.
        stop_ids: tokens that are forbidden before `min_tokens`: end of sequence and stop tokens.
        request_id: whose token it is.
        length: `[1]`, the number of tokens, if `history` is a view of the runner's buffer.
        num_unseen: the number of the last ones that follow this token.
    """

    params: SamplingParams
    history: np.ndarray | Sequence[int]
    num_prompt_tokens: int
    stop_ids: Sequence[int] = ()
    request_id: str = ""
    length: np.ndarray | None = None
    num_unseen: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens before this one, prompt and output."""
        length = len(self.history) if self.length is None else int(self.length[0])
        return length - self.num_unseen

    @property
    def token_ids(self) -> np.ndarray | Sequence[int]:
        """The tokens before this one."""
        return self.history[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @cached_property
    def takes_largest(self) -> bool:
        """True if the next token is always that of the model's largest logit."""
        return self.params.greedy and not self.params.changes_logits


def bad_word_ends(row: SamplingRow) -> set[int]:
    """Return the tokens that would complete a bad word: the last token of each bad word whose other
    tokens are at the end of the output."""
    words = row.params.bad_words_token_ids
    num_compared = min(max(len(word) for word in words) - 1, row.num_output_tokens)
    newest = [int(token) for token in row.token_ids[row.num_tokens - num_compared :]]
    ends = set()
    for *beginning, end in words:
        start = num_compared - len(beginning)
        if start >= 0 and newest[start:] == beginning:
            ends.add(end)
    return ends


def apply_constraints(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Add logit biases, and forbid early stops and bad words, in place. Rows without these options
    do not change."""
    vocab_size = logits.shape[1]
    biases: dict[int, float] = {}  # index in the flattened logits -> bias
    for i, row in enumerate(rows):
        params = row.params
        for token, bias in params.logit_bias.items() if params.logit_bias else ():
            biases[i * vocab_size + token] = bias
        forbidden = bad_word_ends(row) if params.bad_words_token_ids else set()
        if params.min_tokens and row.num_output_tokens < params.min_tokens:
            forbidden |= set(row.stop_ids)
        if forbidden:
            # Some checkpoints have an end-of-sequence id outside of the vocabulary, such as -1.
            known = [token for token in forbidden if 0 <= token < vocab_size]
            # If a request forbids every token, none is forbidden.
            if len(known) < vocab_size:
                biases |= dict.fromkeys((i * vocab_size + token for token in known), float("-inf"))
    if biases:
        added = upload(list(biases.values()), logits.dtype, logits.device)
        logits.put_(upload(list(biases), torch.int64, logits.device), added, accumulate=True)


def moderate(factor: float) -> float:
    """A temperature or repetition penalty, clamped so that float32 can multiply and divide logits
    by it."""
    return min(max(factor, SMALLEST_FACTOR), LARGEST_FACTOR)


def occurrences(
    logits: Tensor, texts: dict[int, np.ndarray | Sequence[int]], *options: Sequence[float]
) -> list[Tensor]:
    """Locate each token of several token sequences in the logits.

    Args:
        logits: `[num_rows, vocab_size]`.
        texts: row of logits → tokens.
        options: lists of numbers, one number per sequence.

    Returns:
        The index of each token in the flattened logits; then each list of options, repeated per
        token.
    """
    lengths = [len(text) for text in texts.values()]
    starts = np.array(list(texts)) * logits.shape[1]
    places = np.concatenate(list(texts.values())) + starts.repeat(lengths)
    repeated = (np.array(option, dtype=np.float32).repeat(lengths) for option in options)
    return [
        upload(places, torch.int64, logits.device),
        *(upload(r, torch.float32, logits.device) for r in repeated),
    ]


def apply_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply the repetition penalty to the tokens of prompt and output, then presence and frequency
    penalty to those of the output, in place.

    For a token with logit x, which the prompt or the output contains, and the output c times:

        x = x / r if x > 0 else x * r            r: repetition penalty, clamped by `moderate`
        x = x - presence - c * frequency         if c > 0

    Args:
        logits: `[num_rows, vocab_size]` float32, on the device. The host must not wait for the
            device, so it reads no number from there.
        rows: one per row of logits. Rows without penalties cost nothing.
    """
    # A token that occurs twice is read twice, then written twice with the same value.
    seen = {i: row.token_ids for i, row in enumerate(rows) if row.params.repetition_penalty != 1}
    if seen:
        factors = [moderate(rows[i].params.repetition_penalty) for i in seen]
        places, factor = occurrences(logits, seen, factors)
        scores = logits.take(places)
        logits.put_(places, torch.where(scores > 0, scores / factor, scores * factor))
    written = {
        i: row.token_ids[row.num_prompt_tokens :]
        for i, row in enumerate(rows)
        if row.params.presence_penalty != 0 or row.params.frequency_penalty != 0
    }
    if written:
        presences = [rows[i].params.presence_penalty for i in written]
        frequencies = [rows[i].params.frequency_penalty for i in written]
        places, presence, frequency = occurrences(logits, written, presences, frequencies)
        scores = logits.take(places)
        # Count in the logits' memory, after they were read: a separate table of counters would be
        # as large as the logits.
        logits.put_(places, torch.zeros_like(scores)).put_(
            places, torch.ones_like(scores), accumulate=True
        )
        logits.put_(places, scores - (presence + frequency * logits.take(places)))


def min_p_threshold(logits: Tensor, min_p: Sequence[float]) -> Tensor:
    """Return, per row, the logit of a token that is `min_p` (above 0) times as likely as the most
    likely token."""
    distance = upload(min_p, torch.float64, logits.device).log()
    return (logits.amax(dim=1) + distance).to(logits.dtype)


def nucleus_threshold(logits: Tensor, top_p: Sequence[float], width: int = NUCLEUS_GUESS) -> Tensor:
    """Return the smallest logit of the nucleus: the fewest most likely tokens whose probabilities
    sum to at least `top_p`.

    Args:
        logits: `[num_rows, vocab_size]` float32, -inf for excluded tokens.
        top_p: one number per row, more than 0.
        width: number of most likely tokens to search first, on a CPU. Rows whose nucleus is larger
            are searched again among eight times as many.

    Returns:
        `[num_rows]` thresholds.
    """
    target = upload(top_p, torch.float64, logits.device)
    if is_asynchronous(logits.device):
        # A check whether the guess was wide enough would synchronise with the device.
        parts = zip(logits.split(SEARCH_ROWS), target.split(SEARCH_ROWS), strict=True)
        return torch.cat([search_nucleus(*part) for part in parts])
    largest, ids = logits.topk(min(width, logits.shape[1]), dim=1)
    mass = logits.softmax(dim=1).gather(1, ids).cumsum(dim=1, dtype=torch.float64)
    # The token at which the mass reaches top_p still belongs to the nucleus.
    last = (mass < target.unsqueeze(1)).sum(dim=1)
    threshold = largest.gather(1, last.clamp(max=largest.shape[1] - 1).unsqueeze(1)).squeeze(1)
    wide = (last == largest.shape[1]).nonzero().squeeze(1).tolist()
    if wide and largest.shape[1] < logits.shape[1]:
        threshold[wide] = nucleus_threshold(logits[wide], [top_p[i] for i in wide], width=8 * width)
    return threshold


def search_nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Return the threshold of `nucleus_threshold`, found digit by digit, with the same operations
    for all inputs.

    Args:
        logits: `[num_rows, vocab_size]` float32.
        top_p: `[num_rows]` float64.
    """
    # Floating-point numbers, read as integers, have the same order; negative numbers have the
    # reverse order.
    bits = logits.view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() + 2**31
    mass = (logits.softmax(dim=1).double() * UNITS).round().long()
    wanted = (top_p * UNITS).round().long().clamp(min=1).unsqueeze(1)
    threshold = torch.zeros_like(wanted)
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        digit = keys >> shift & 2**DIGIT_BITS - 1
        held = mass.new_zeros(len(mass), 2**DIGIT_BITS).scatter_add_(1, digit, mass)
        from_here_up = held.flip(1).cumsum(dim=1).flip(1)
        # The largest digit such that it and all larger digits have enough mass. The mass of the
        # larger digits is settled.
        best = ((from_here_up >= wanted).sum(dim=1, keepdim=True) - 1).clamp(min=0)
        wanted = wanted - (from_here_up - held).gather(1, best)
        mass = mass * (digit == best)
        threshold = threshold << DIGIT_BITS | best
    # If rounding has made the sum of a whole row smaller than top_p, the threshold is -inf, and all
    # tokens remain.
    bits = (threshold.clamp(min=0x7FFFFF) - 2**31).int()
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(torch.float32).squeeze(1)


def top_k_threshold(logits: Tensor, top_k: Sequence[int], width: int = NUCLEUS_GUESS) -> Tensor:
    """Return the k-th largest logit of each row.

    Args:
        logits: `[num_rows, vocab_size]`.
        top_k: one number per row, at least 1; a number above the vocabulary size keeps everything.
        width: rows with a larger k are searched separately, so that they do not slow down the
            others.

    Returns:
        `[num_rows]` thresholds.
    """
    last = [min(k, logits.shape[1]) - 1 for k in top_k]
    reach = min(max(last) + 1, width)
    largest = logits.topk(reach, dim=1).values
    places = upload([min(place, reach - 1) for place in last], torch.int64, logits.device)
    threshold = largest.gather(1, places.unsqueeze(1)).squeeze(1)
    wide = [i for i, place in enumerate(last) if place >= width]
    if wide:
        again = top_k_threshold(pick(logits, wide), [top_k[i] for i in wide], width=logits.shape[1])
        threshold.index_copy_(0, upload(wide, torch.int64, logits.device), again)
    return threshold


def truncate(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set the logits that top-k, then top-p, then min-p exclude to -inf, in place. A row costs
    nothing if top_k is 0, top_p 1 and min_p 0.

    Each option excludes the logits below a threshold (`top_k_threshold`, `nucleus_threshold`,
    `min_p_threshold`), computed on the logits that the previous option has left. Logits equal to
    the threshold remain, so the result does not depend on the order in which equal logits are
    sorted. The host reads no number from the device.

    Args:
        logits: `[num_rows, vocab_size]` float32.
        rows: one per row of logits.
    """
    options = (
        ("top_k", 0, top_k_threshold),
        ("top_p", 1, nucleus_threshold),
        ("min_p", 0, min_p_threshold),
    )
    for name, off, threshold_of in options:
        asking = [i for i, row in enumerate(rows) if getattr(row.params, name) != off]
        if not asking:
            continue
        part = pick(logits, asking)
        threshold = threshold_of(part, [getattr(rows[i].params, name) for i in asking])
        part.masked_fill_(part < threshold.unsqueeze(1), float("-inf"))
        if part is not logits:
            logits.index_copy_(0, upload(asking, torch.int64, logits.device), part)


def uniform(seed: int, index: int, stream: int = 0) -> float:
    """Return a random number in [0, 1) that depends only on the request's seed, the token's index
    in the output, and its purpose (`stream`), but not on the batch or on preemptions. It uses
    BLAKE2 as a counter-based generator (Salmon et al. 2011)."""
    counter = (
        struct.pack("<qqq", seed, index, stream) if stream else struct.pack("<qq", seed, index)
    )
    digest = hashlib.blake2b(counter, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def locate(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Find, for each row, the first weight whose cumulative sum is greater than u times the total.

    Args:
        weights: `[num_rows, num_weights]`, none negative.
        uniforms: `[num_rows]` float64 in [0, 1).

    Returns:
        `[num_rows]` int64 indices, and `[num_rows]` float64 in [0, 1): the position of u within
        that weight. A weight of 0 is never chosen.
    """
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    # Comparisons with NaN are False. A row of NaN must not yield an index outside the
    # vocabulary, which would fail the whole batch.
    index = index.clamp(max=weights.shape[1] - 1)
    width = weights.gather(1, index).double()
    within = (target - (cumulative.gather(1, index) - width)) / width
    return index.squeeze(1), within.squeeze(1).clamp(0, 1 - 2.0**-53)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the distribution function: find the block of tokens that contains u, then
    the token in it.

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


def largest_except(
    logits: Tensor, others: Sequence[int], choose: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the token of the largest logit of each row, `[num_rows]` int64; for the rows `others`,
    in ascending order, the tokens that `choose` returns for their logits."""
    if len(others) == len(logits):
        return choose(logits)
    tokens = ops.argmax(logits)
    if others:
        places = upload(others, torch.int64, logits.device)
        tokens.index_copy_(0, places, choose(pick(logits, others)))
    return tokens


def start_logprobs(
    logits: Tensor, chosen: Tensor, counts: Sequence[int]
) -> Callable[[], list[TokenLogprobs]]:
    """Start to compute log-probabilities of the chosen and the most likely tokens.

    Args:
        logits: `[num_rows, vocab_size]` before any sampling option; -inf for forbidden tokens.
        chosen: `[num_rows]` int64.
        counts: number of most likely tokens per row.

    Returns:
        A function that waits for the log-probabilities.
    """
    logprobs = logits.float().log_softmax(dim=1)
    own = logprobs.gather(1, chosen.unsqueeze(1))
    num_likelier = (logprobs > own).sum(dim=1)
    # One topk per count: which of several equal tokens topk returns depends on k, and must not
    # depend on other rows.
    groups = {
        count: [i for i, other in enumerate(counts) if other == count]
        for count in set(counts) - {0}
    }
    size = logprobs.shape[1]
    tops = [pick(logprobs, same).topk(min(count, size)) for count, same in groups.items()]
    arrive = start_fetch(chosen, own, num_likelier, *(tensor for pair in tops for tensor in pair))

    def wait() -> list[TokenLogprobs]:
        ids, values, likelier, *top = arrive()
        rows = zip(ids, values, likelier, strict=True)
        entries = [
            TokenLogprobs([int(token)], [value], 1 + int(above)) for token, value, above in rows
        ]
        for same, top_values, top_ids in zip(groups.values(), top[::2], top[1::2], strict=True):
            width = len(top_ids) // len(same)
            for place, i in enumerate(same):
                start = place * width
                # Forbidden tokens come last. Exclude them, even if fewer tokens than requested
                # remain.
                end = start + width - top_values[start : start + width].count(float("-inf"))
                entries[i].token_ids += map(int, top_ids[start:end])
                entries[i].logprobs += top_values[start:end]
        return entries

    return wait


class Sampler:
    """Chooses the next token of each row. It has no state: in every process, the same logits give
    the same tokens."""

    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Choose the next tokens, and wait for them and their log-probabilities; see `start`."""
        return self.start(logits, rows)[1]()

    def start(
        self, logits: Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[Tensor, Callable[[], tuple[list[int], list[TokenLogprobs | None]]]]:
        """Choose the next tokens, without waiting for the device.

        Args:
            logits: `[num_rows, vocab_size]`; may be changed.
            rows: one per row of logits.

        Returns:
            The tokens, `[num_rows]` int64 on the device, which the next step can use; and a
            function that waits for token ids and, per row, `TokenLogprobs` if requested (else
            None). Log-probabilities are those of the model, before temperature, penalties and
            truncation, but among the tokens that no feature forbids, as in vLLM.
        """
        wants = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        # `index_select` copies: `choose` changes the logits.
        raw = logits.index_select(0, upload(wants, torch.int64, logits.device)) if wants else None
        tokens = self.choose(logits, rows)
        tokens_arrive = start_copy(tokens)
        logprobs_arrive = None
        if raw is not None:
            counts = [rows[i].params.logprobs or 0 for i in wants]
            logprobs_arrive = start_logprobs(raw, pick(tokens, wants), counts)

        def wait() -> tuple[list[int], list[TokenLogprobs | None]]:
            logprobs: list[TokenLogprobs | None] = [None] * len(rows)
            for i, entry in zip(wants, logprobs_arrive() if logprobs_arrive else [], strict=True):
                logprobs[i] = entry
            return tokens_arrive().tolist(), logprobs

        return tokens, wait

    def choose(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Return the next tokens, `[num_rows]` int64, on the logits' device, without waiting for
        it. Most greedy rows need only the largest of the model's logits: these are not copied."""
        others = [i for i, row in enumerate(rows) if not row.takes_largest]
        picked = [rows[i] for i in others]
        return largest_except(logits, others, lambda part: self._choose_by_options(part, picked))

    def _choose_by_options(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        logits = self._allowed(logits, rows)
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        drawn = [rows[i] for i in random]
        return largest_except(logits, random, lambda part: self._sample_random(part, drawn))

    def _allowed(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Return the logits in float32 after constraints and penalties; this may be the same
        tensor, changed in place."""
        logits = ops.widen(logits)
        apply_constraints(logits, rows)
        apply_penalties(logits, rows)
        return logits

    def _sample_random(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Apply temperature and truncation, and draw tokens, `[num_rows]` int64."""
        uniforms = [uniform(row.params.seed or 0, row.num_output_tokens) for row in rows]
        return draw(self._scaled(logits, rows), upload(uniforms, torch.float64, logits.device))

    def _scaled(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Return the logits of the distribution to draw from: a truncated copy, divided by the
        temperature."""
        temperatures = [moderate(row.params.temperature) for row in rows]
        logits = logits / upload(temperatures, torch.float32, logits.device).unsqueeze(1)
        truncate(logits, rows)
        return logits
