"""Each sampling option against a slow float64 reference; draws against their distribution; bad
values refused."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nanovllm.core.sampling
from nanovllm import LLM
from nanovllm.core.sampling import (
    NUCLEUS_GUESS,
    Sampler,
    SamplingRow,
    draw,
    nucleus_threshold,
    search_nucleus,
    start_logprobs,
    top_k_threshold,
    truncate,
    uniform,
)
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.structured_outputs import StructuredOutputsParams
from tests.examples import examples
from tests.oracle import make_checkpoint
from tests.stand_ins import set_asynchronous, set_constants

VOCAB = 12
NAN, INF = math.nan, math.inf

# -------------------------------------------------- the reference: one request, one token at a time


def reference_logits(logits: Sequence[float], row: SamplingRow) -> list[float]:
    """Biases, min_tokens and penalties, as their definitions say."""
    scores = [float(x) for x in logits]
    tokens = [int(token) for token in row.token_ids]
    output = tokens[row.num_prompt_tokens :]
    params = row.params
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        for token in row.stop_ids:
            scores[token] = -INF
    for word in params.bad_words_token_ids:
        if [*([None] * len(word)), *output][len(output) + 1 :] == word[:-1]:
            scores[word[-1]] = -INF
    for token in range(len(scores)):
        if token in tokens:
            x = scores[token]
            scores[token] = (
                x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
            )
        if token in output:
            scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(
                token
            )
    return scores


def softmax(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(scores)) for x in scores]
    return [weight / sum(weights) for weight in weights]


class TooClose(Exception):
    """A token lies so close to a threshold that float32 may decide otherwise."""


def reference_distribution(logits: Sequence[float], row: SamplingRow) -> list[float]:
    """The probabilities of a random draw, in float64. Raises `TooClose`."""
    params = row.params
    scores = [x / params.temperature for x in reference_logits(logits, row)]
    if params.top_k:
        threshold = sorted(scores, reverse=True)[min(params.top_k, len(scores)) - 1]
        scores = [x if x >= threshold else -INF for x in scores]
    if params.top_p < 1:
        mass = 0.0
        for x in sorted(scores, reverse=True):
            if mass >= params.top_p:
                break
            threshold = x
            mass += softmax(scores)[scores.index(x)]
            if abs(mass - params.top_p) < 1e-6:
                raise TooClose
        scores = [x if x >= threshold else -INF for x in scores]
    if params.min_p:
        probabilities = softmax(scores)
        least = params.min_p * max(probabilities)
        if params.min_p < 1 and any(abs(p - least) < 1e-7 for p in probabilities):
            raise TooClose
        scores = [x if p >= least else -INF for x, p in zip(scores, probabilities, strict=True)]
    return softmax(scores)


# Multiples of powers of two, which float32 adds, multiplies and divides without rounding: ties stay
# ties.
LOGITS = st.lists(st.integers(-64, 64).map(lambda i: i / 8), min_size=VOCAB, max_size=VOCAB)
TOKENS = st.integers(0, VOCAB - 1)
POWERS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])
QUARTERS = st.integers(-8, 8).map(lambda i: i / 4)


@st.composite
def sampling_rows(draw_from: Any, greedy: bool | None = None) -> SamplingRow:
    choose = draw_from
    cold = choose(st.booleans()) if greedy is None else greedy
    params = SamplingParams(
        temperature=0 if cold else choose(POWERS),
        top_k=choose(st.sampled_from([-1, 0, 1, 2, 5, VOCAB, 1000])),
        top_p=choose(st.sampled_from([1.0, 1e-9, 0.3, 0.6, 0.9, 0.999])),
        min_p=choose(st.sampled_from([0.0, 0.01, 0.1, 0.4, 1.0])),
        repetition_penalty=choose(POWERS),
        presence_penalty=choose(QUARTERS),
        frequency_penalty=choose(QUARTERS),
        logit_bias=choose(st.none() | st.dictionaries(TOKENS, QUARTERS, max_size=3)),
        bad_words_token_ids=choose(st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=4)),
        min_tokens=choose(st.integers(0, 4)),
        max_tokens=8,
        seed=choose(st.integers(-(2**63), 2**63 - 1)),
        logprobs=choose(st.none() | st.integers(0, VOCAB)),
    )
    tokens = choose(st.lists(TOKENS, min_size=1, max_size=8))
    stop_ids = choose(st.lists(TOKENS, max_size=3))
    return SamplingRow(
        params, np.array(tokens, dtype=np.int32), choose(st.integers(1, len(tokens))), stop_ids
    )


def sample(logits: Sequence[Sequence[float]], rows: Sequence[SamplingRow]) -> list[int]:
    return Sampler().sample(torch.tensor(logits, dtype=torch.float32), rows)[0]


@settings(max_examples=examples(300))
@given(LOGITS, sampling_rows(greedy=True))
def test_greedy_takes_the_first_of_the_largest(logits: list[float], row: SamplingRow) -> None:
    scores = reference_logits(logits, row)
    assert sample([logits], [row]) == [scores.index(max(scores))]


@settings(max_examples=examples(300))
@given(
    LOGITS,
    sampling_rows(greedy=False),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8),
)
def test_every_option_against_the_reference(
    logits: list[float], row: SamplingRow, us: list[float]
) -> None:
    """The draw inverts the distribution function, so a chosen u tells which token the reference
    would draw."""
    try:
        probabilities = reference_distribution(logits, row)
    except TooClose:
        reject()
    cumulative = [0.0, *np.cumsum(probabilities).tolist()]
    us = [*us, 0.0, 1 - 2.0**-53]
    with pytest.MonkeyPatch.context() as patch:
        remaining = iter(us)
        patch.setattr(nanovllm.core.sampling, "uniform", lambda seed, index: next(remaining))
        tokens = sample([logits] * len(us), [row] * len(us))
    for u, token in zip(us, tokens, strict=True):
        assert probabilities[token] > 0, f"token {token} was cut off, or forbidden"
        assert cumulative[token] - 1e-6 <= u <= cumulative[token + 1] + 1e-6


def test_warpers_of_transformers_keep_the_same_tokens() -> None:
    """An outside oracle for order and meaning of the options, on logits without ties."""
    from transformers.generation import logits_process as hf

    torch.manual_seed(0)
    logits = torch.randn(64, 1000) * 4
    prompt = torch.randint(1000, (64, 30))
    params = SamplingParams(
        temperature=0.7, top_k=200, top_p=0.9, min_p=0.02, repetition_penalty=1.3
    )
    expected = logits
    for process in (
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(200),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.02),
    ):
        expected = process(prompt, expected)
    ours = logits.clone()
    rows = [SamplingRow(params, tokens.numpy(), 30) for tokens in prompt]
    nanovllm.core.sampling.apply_penalties(ours, rows)
    ours /= params.temperature
    truncate(ours, rows)
    assert torch.equal(ours.isinf(), expected.isinf())
    torch.testing.assert_close(ours.softmax(dim=1), expected.softmax(dim=1))


# ---------------------------------------------------------------- options, one at a time


def kept(logits: Sequence[float], **options: Any) -> list[int]:
    """Tokens that top-k, top-p and min-p leave."""
    part = torch.tensor([logits], dtype=torch.float32)
    truncate(part, [SamplingRow(SamplingParams(**options), [0], 1)])
    return part[0].isfinite().nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1, 3]),  # equal logits stay together
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 2**63 - 1}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1, 3]),
        ({"top_p": 5e-324}, [1, 3]),  # the smallest positive number there is
        ({"top_p": 0.4}, [1, 3]),
        ({"top_p": 0.8}, [0, 1, 3]),  # 1 and 3 have 0.78
        ({"min_p": 0.0}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [1, 3]),
        ({"min_p": 0.3}, [0, 1, 3]),  # e**-1 = 0.37, e**-2 = 0.14
        ({"min_p": 1e-300}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.01, "top_k": 4}, [0, 1, 2, 3]),
    ],
)
def test_truncation_by_hand(options: dict[str, Any], expected: list[int]) -> None:
    assert kept([2.0, 3.0, 1.0, 3.0, -4.0], **options) == expected, (
        f"tokens that {options} leaves of logits 2, 3, 1, 3, -4"
    )


@given(LOGITS, st.permutations(range(VOCAB)), sampling_rows(greedy=False))
def test_order_of_the_vocabulary_does_not_matter(
    logits: list[float], order: list[int], row: SamplingRow
) -> None:
    p = row.params
    options = {"top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p}
    shuffled = kept([logits[i] for i in order], **options)
    assert sorted(order[i] for i in shuffled) == kept(logits, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Tokens 0 and 1 were seen: 2 / 2 and -1 * 2.
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 3.0, -4.0]),
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 3.0, -4.0]),
        ({"presence_penalty": 1.5}, [2.0, -2.5, 3.0, -4.0]),  # only token 1 is in the output
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 3.0, -4.0]),  # twice
        (
            {"frequency_penalty": -0.5, "presence_penalty": 1.0, "repetition_penalty": 2.0},
            [1.0, -2.0, 3.0, -4.0],
        ),
        ({"logit_bias": {3: 10, 0: -0.5}}, [1.5, -1.0, 3.0, 6.0]),
        ({"min_tokens": 3}, [2.0, -1.0, -INF, -4.0]),
        ({"min_tokens": 3, "logit_bias": {2: 100}}, [2.0, -1.0, -INF, -4.0]),
        ({"min_tokens": 2}, [2.0, -1.0, 3.0, -4.0]),  # two tokens are out already
        ({"bad_words_token_ids": [[0]]}, [-INF, -1.0, 3.0, -4.0]),
        ({"bad_words_token_ids": [[1, 2], [1, 1, 3], [2, 0]]}, [2.0, -1.0, -INF, -INF]),
        # It would begin in the prompt.
        ({"bad_words_token_ids": [[0, 1, 1, 2]]}, [2.0, -1.0, 3.0, -4.0]),
        # Nothing would be left.
        ({"bad_words_token_ids": [[0], [1], [2], [3]]}, [2.0, -1.0, 3.0, -4.0]),
        # The same.
        ({"bad_words_token_ids": [[0], [1], [3]], "min_tokens": 3}, [2.0, -1.0, 3.0, -4.0]),
        ({"bad_words_token_ids": [[3], [7]], "logit_bias": {3: 100}}, [2.0, -1.0, 3.0, -INF]),
    ],
)
def test_formulas_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0, -4.0]] * 2)
    plain = SamplingRow(SamplingParams(), [0, 1, 1], 1, [2])
    rows = [SamplingRow(SamplingParams(**options), [0, 1, 1], 1, [2]), plain]
    nanovllm.core.sampling.apply_constraints(logits, rows)
    nanovllm.core.sampling.apply_penalties(logits, rows)
    texts = (
        f"{options}; the prompt is token 0, the output token 1 twice; and a row without options, "
        "which stays"
    )
    assert logits.tolist() == [expected, [2.0, -1.0, 3.0, -4.0]], texts


def test_a_stop_id_outside_of_the_vocabulary_concerns_nobody() -> None:
    logits = torch.zeros(3, 4)
    rows = [SamplingRow(SamplingParams(min_tokens=3), [0], 1, [-1, 2, 4, 2**40]) for _ in range(3)]
    nanovllm.core.sampling.apply_constraints(logits, rows)
    assert logits.tolist() == [[0.0, 0.0, -INF, 0.0]] * 3


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e-5])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    rows = [
        SamplingRow(SamplingParams(temperature=temperature, seed=seed), [0], 1)
        for seed in range(50)
    ]
    assert set(sample([[30.0, -50.0, 30.5, 29.0]] * 50, rows)) == {2}


@pytest.mark.parametrize("temperature", [1e5, 1e39, sys.float_info.max])
def test_a_very_high_temperature_is_uniform_and_keeps_out_what_is_forbidden(
    temperature: float,
) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2)
    rows = [SamplingRow(params.clone(seed=seed), [0], 1, [1]) for seed in range(300)]
    tokens = sample([[9.0, 9.0, -9.0, 0.0]] * 300, rows)
    assert 1 not in tokens and all(80 < tokens.count(token) < 120 for token in (0, 2, 3))


@pytest.mark.parametrize("penalty", [5e-324, 1e-50, 1e50, sys.float_info.max])
def test_an_extreme_repetition_penalty_stays_a_number(penalty: float) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=penalty, min_tokens=3)
    logits = torch.tensor([[0.0, 5.0, -5.0, 1.0]])
    row = SamplingRow(params, [0, 1, 2, 3], 3, [3])
    nanovllm.core.sampling.apply_constraints(logits, [row])
    nanovllm.core.sampling.apply_penalties(logits, [row])
    assert not logits.isnan().any() and logits[0, 3] == -INF
    assert int(logits.argmax()) == 1


PENALTIES = st.sampled_from([0.0, -2.0, -0.7, 0.1, 1.3, 2.0])


@st.composite
def penalized_rows(draw_from: Any) -> SamplingRow:
    factors = [1.0, 1.0, 0.3, 1.1, 2.0, 5e-324, 1e-50, 1e50, sys.float_info.max]
    params = SamplingParams(
        repetition_penalty=draw_from(st.sampled_from(factors)),
        presence_penalty=draw_from(PENALTIES),
        frequency_penalty=draw_from(PENALTIES),
    )
    prompt = draw_from(st.lists(TOKENS, min_size=1, max_size=6))
    output = draw_from(st.lists(TOKENS, max_size=6)) * draw_from(st.sampled_from([1, 1, 3, 100]))
    tokens = prompt + output
    as_array = draw_from(st.booleans())
    return SamplingRow(
        params, np.array(tokens, dtype=np.int32) if as_array else tokens, len(prompt)
    )


@settings(max_examples=examples(300))
@given(st.data(), st.lists(penalized_rows() | sampling_rows(), max_size=6), st.integers(0, 3))
def test_penalties_of_a_whole_batch_are_those_of_each_row(
    data: st.DataObject, rows: list[SamplingRow], padding: int
) -> None:
    """Whatever the neighbours ask for; and who asks for nothing keeps every bit, be it a NaN's."""
    row_of_logits = st.lists(
        st.floats(-60, 60, width=32) | st.sampled_from([0.0, -0.0, -INF]),
        min_size=VOCAB,
        max_size=VOCAB,
    )
    wide = torch.full((len(rows), VOCAB + padding), NAN)
    logits = wide[:, :VOCAB]  # not contiguous if there is padding
    for i, row in enumerate(rows):
        broken = not row.params.looks_back and data.draw(st.booleans())
        logits[i] = NAN if broken else torch.tensor(data.draw(row_of_logits))
    before = logits.clone()
    nanovllm.core.sampling.apply_penalties(logits, rows)
    for i, row in enumerate(rows):
        if not row.params.looks_back:
            assert torch.equal(logits[i].view(torch.int32), before[i].view(torch.int32))
            continue
        moderated = SamplingParams(
            repetition_penalty=min(max(row.params.repetition_penalty, 1e-5), 1e5),
            presence_penalty=row.params.presence_penalty,
            frequency_penalty=row.params.frequency_penalty,
        )
        plain = SamplingRow(moderated, row.token_ids, row.num_prompt_tokens)
        expected = torch.tensor(reference_logits(before[i].tolist(), plain))
        torch.testing.assert_close(logits[i], expected, rtol=1e-6, atol=1e-4)
        untouched = sorted(set(range(VOCAB)) - {int(token) for token in row.token_ids})
        assert torch.equal(logits[i, untouched], before[i, untouched])
    assert wide[:, VOCAB:].isnan().all()


def test_penalties_take_as_many_calls_for_64_rows_as_for_two() -> None:
    """A request with penalties must not delay the batch by a loop of its own."""

    class Calls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return function(*args, **(kwargs or {}))

    def calls(num_asking: int) -> int:
        params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
        asking = [SamplingRow(params, [0, 1, 1], 1)] * num_asking
        logits = torch.zeros(64, 8)
        with Calls() as mode:
            nanovllm.core.sampling.apply_penalties(
                logits, asking + [SamplingRow(SamplingParams(), [0, 1, 1], 1)] * (64 - num_asking)
            )
        return mode.count

    assert calls(0) == 0 < calls(2) == calls(64)


def test_forbidding_every_token_forbids_none() -> None:
    for options in ({"temperature": 0}, {}, {"top_p": 0.5, "top_k": 2, "min_p": 0.1}):
        row = SamplingRow(SamplingParams(min_tokens=5, seed=3, **options), [0], 1, [0, 1, 2, 0])
        assert sample([[-50.0, 50.0, -50.0]], [row]) == [1]


def test_broken_logits_stay_within_the_vocabulary_and_within_their_row() -> None:
    params = SamplingParams(top_k=2, top_p=0.9, min_p=0.1, logprobs=1, seed=0)
    logits = torch.tensor([[NAN] * 4, [0.0, 50.0, 0.0, 0.0], [-INF] * 4, [INF, INF, 0.0, 0.0]])
    tokens, _ = Sampler().sample(logits, [SamplingRow(params, [0], 1)] * 4)
    assert tokens[1] == 1 and all(0 <= token < 4 for token in tokens)


# ---------------------------------------------------------------- wide and narrow rows


def full_sort_threshold(logits: torch.Tensor, top_p: float) -> float:
    """The nucleus of one row, by sorting all of it."""
    mass, threshold = 0.0, INF
    probabilities, ids = logits.double().softmax(dim=0).sort(descending=True)
    for probability, token in zip(probabilities.tolist(), ids.tolist(), strict=True):
        if mass >= top_p:
            break
        threshold = float(logits[token])
        mass += probability
    return threshold


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_nucleus_guess_and_full_sort_agree(spread: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(12, 3 * NUCLEUS_GUESS) * spread
    top_p = torch.linspace(0.05, 0.995, 12, dtype=torch.float64).tolist()
    for row, p, ours in zip(logits, top_p, nucleus_threshold(logits, top_p).tolist(), strict=True):
        probabilities = row.double().softmax(dim=0)
        # At the boundary, float32 probabilities may count one token more or less; nowhere else.
        at_boundary = (
            min(abs(probabilities[kept].sum() - p) for kept in (row > ours, row >= ours)) < 1e-5
        )
        assert ours == full_sort_threshold(row, p) or at_boundary


@pytest.mark.parametrize("vocab_size", [1, 2, NUCLEUS_GUESS - 1, NUCLEUS_GUESS, NUCLEUS_GUESS + 1])
def test_thresholds_at_the_edges_of_the_guess(vocab_size: int) -> None:
    logits = torch.arange(vocab_size, dtype=torch.float32).flip(0)[None]
    flat = torch.zeros(1, vocab_size)
    for k in (1, vocab_size - 1, vocab_size, vocab_size + 1, 2**40):
        k = max(k, 1)
        expected = max(vocab_size - k, 0)
        assert top_k_threshold(logits, [k]).tolist() == [expected]
    almost = [1 - 1e-12]
    assert nucleus_threshold(flat, almost).tolist() == [0.0]
    assert nucleus_threshold(logits, almost).item() >= 0


def test_only_wide_rows_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request with a flat distribution, or a huge k, must not make the whole batch sort its
    vocabulary."""
    searched: dict[str, list[tuple[int, int]]] = {"top_k_threshold": [], "nucleus_threshold": []}
    for name in searched:
        original = getattr(nanovllm.core.sampling, name)

        def spy(logits, value, width=NUCLEUS_GUESS, name=name, original=original):  # type: ignore[no-untyped-def]
            searched[name].append((len(logits), min(width, logits.shape[1])))
            return original(logits, value, width)

        monkeypatch.setattr(nanovllm.core.sampling, name, spy)
    torch.manual_seed(0)
    logits = torch.randn(8, 4096) * 8
    logits[3] = 0.0
    everyone = [SamplingRow(SamplingParams(top_p=0.9), [0], 1) for _ in range(8)]
    truncate(logits.clone(), everyone)
    assert searched["nucleus_threshold"] == [(8, NUCLEUS_GUESS), (1, 4096)]
    ks = [5, 0, 5, 4000, 5, 5, 5, 5]
    truncate(logits.clone(), [SamplingRow(SamplingParams(top_k=k), [0], 1) for k in ks])
    assert searched["top_k_threshold"] == [(7, NUCLEUS_GUESS), (1, 4096)]


# ---------------------------------------------------------------- without a question to the device


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, -INF, 1.5]),
        min_size=1,
        max_size=40,
    ),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_both_searches_find_the_same_nucleus(logits: list[float], top_p: float) -> None:
    assume(max(logits) > -INF)
    part = torch.tensor([logits])
    mass = part[0].double().softmax(dim=0).sort(descending=True).values.cumsum(dim=0)
    assume((mass - top_p).abs().min() > 1e-6)
    by_guess = nucleus_threshold(part, [top_p])
    by_digits = search_nucleus(part, torch.tensor([top_p], dtype=torch.float64))
    assert by_guess.tolist() == by_digits.tolist()


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 1e6, 1e30])
def test_the_search_by_digits_in_a_large_vocabulary(spread: float) -> None:
    torch.manual_seed(2)
    logits = torch.randn(12, 20_000) * spread
    top_p = torch.linspace(0.05, 0.995, 12, dtype=torch.float64)
    ours = search_nucleus(logits, top_p)
    assert torch.isin(ours, logits).all()
    for row, p, threshold in zip(logits, top_p.tolist(), ours.tolist(), strict=True):
        probabilities = row.double().softmax(dim=0)
        assert (
            probabilities[row >= threshold].sum()
            > p - 1e-5
            > probabilities[row > threshold].sum() - 2e-5
        )


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1 - 2.0**-53])
def test_the_search_by_digits_at_its_ends(top_p: float) -> None:
    logits = torch.tensor([[-1.0, 2.0, -INF, 2.0, 1e-30, -3e38]])
    threshold = search_nucleus(logits, torch.tensor([top_p], dtype=torch.float64)).item()
    assert threshold == 2.0 if top_p < 0.5 else threshold <= -1.0


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(LOGITS, sampling_rows()), max_size=6))
def test_a_gpu_gets_the_tokens_that_a_cpu_gets(
    pairs: list[tuple[list[float], SamplingRow]],
) -> None:
    """What runs for an asynchronous device, run here: it must agree, unless float32 decides at a
    border."""
    try:
        for logits, row in pairs:
            if not row.params.greedy:
                reference_distribution(logits, row)
    except TooClose:
        reject()
    logits, rows = torch.tensor([x for x, _ in pairs]).view(-1, VOCAB), [row for _, row in pairs]
    expected = Sampler().sample(logits.clone(), rows)
    with pytest.MonkeyPatch.context() as patch:
        set_asynchronous(patch)
        set_constants(patch, nanovllm.core.sampling, SEARCH_ROWS=2)
        assert Sampler().sample(logits, rows) == expected


class NeverWaits(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU. The device is "meta": its tensors have no
    numbers, so that whoever asks for one gets an error from torch. This class finds copies that
    wait: those that do not say `non_blocking`, and those that torch makes by itself, of lists and
    of operands on the host."""

    def __init__(self, *on_device: torch.Tensor) -> None:
        super().__init__()
        self.known = list(on_device)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {id(tensor) for tensor in self.known}
        for tensor in operands:
            assert tensor.device.type == "cpu" or id(tensor) in known, (
                "a list or a tensor of the host went to the device by itself: use `upload` or "
                "`pick`"
            )
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.known += results
        if len({tensor.device.type for tensor in operands + results if tensor.ndim > 0}) > 1:
            assert function is torch.ops.aten._to_copy.default and kwargs.get("non_blocking"), (
                f"{function}"
            )
        return result


@pytest.mark.parametrize(
    "question",
    [
        lambda x: int(x.max()),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[[1, 0]],
        lambda x: x[0, torch.tensor([1, 2])],
        lambda x: x.index_fill_(0, torch.tensor([1]), 0.0),
        lambda x: x[0] + torch.tensor([1, 2, 3], device=x.device),
        lambda x: torch.tensor([1, 2]).to(x.device),
        lambda x: x[1].copy_(torch.tensor([1.0, 2.0, 3.0])),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
    ],
)
def test_questions_are_noticed(question: Any) -> None:
    x = torch.empty(2, 3, device="meta")
    with NeverWaits(x), pytest.raises((AssertionError, RuntimeError)):
        question(x)


ASKING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "wide top_k": {"top_k": 3000},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {1: 5.0, 7: -3.0}},
    "min_tokens": {"min_tokens": 9},
    "bad words": {"bad_words_token_ids": [[5], [4, 6], [1, 2, 3, 4]]},
    "logprobs": {"logprobs": 3},
    "more logprobs": {"temperature": 0, "logprobs": 5},
}


@pytest.mark.parametrize(
    "names",
    [*([name] for name in ASKING), list(ASKING)],
    ids=lambda names: names[0] * (len(names) == 1) or "mixed",
)
@pytest.mark.parametrize("with_others", [False, True])
def test_the_host_does_not_wait_for_the_device(names: list[str], with_others: bool) -> None:
    rows = [SamplingRow(SamplingParams(**ASKING[name]), [3, 4, 4], 1, [2]) for name in names]
    if with_others:
        rows += [SamplingRow(SamplingParams(temperature=t), [3, 4, 4], 1, [2]) for t in (0, 1)]
    logits = torch.empty(len(rows), 4096, dtype=torch.bfloat16, device="meta")
    with NeverWaits(logits):
        tokens, wait = Sampler().start(logits, rows)
    assert tokens.device.type == "meta" and tokens.dtype == torch.int64
    with pytest.raises(NotImplementedError, match="meta"):
        wait()  # asks for numbers, which this device does not have


# ---------------------------------------------------------------- randomness

# 0.999 quantiles of the chi-square distribution, by degrees of freedom.
CHI_SQUARE_999 = {3: 16.27, 5: 20.52, 7: 24.32, 19: 43.82, 99: 148.23}


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> float:
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("by", ["seed", "token index"])
def test_draws_follow_the_distribution(options: dict[str, Any], by: str) -> None:
    logits, count = [1.5, 0.0, -1.0, 2.0, 0.5, 1.0, -0.5, 0.25], 4000
    params = SamplingParams(**options)
    if by == "seed":
        rows = [SamplingRow(params.clone(seed=seed), [0], 1) for seed in range(count)]
    else:
        zeros = np.zeros(count + 1, dtype=np.int32)
        rows = [SamplingRow(params.clone(seed=7), zeros[: index + 1], 1) for index in range(count)]
    counts = np.bincount(sample([logits] * count, rows), minlength=8)
    probabilities = np.array(reference_distribution(logits, rows[0]))
    likely = probabilities > 0
    assert not counts[~likely].any()
    degrees = int(likely.sum()) - 1
    quantile = CHI_SQUARE_999.get(degrees, degrees + 5 * math.sqrt(2 * degrees))
    assert chi_square(counts[likely], probabilities[likely] * count) < quantile


@pytest.mark.parametrize(
    "numbers",
    [
        [uniform(seed, 0) for seed in range(10_000)],
        [uniform(42, index) for index in range(10_000)],
        [uniform(-(2**63) + seed, 2**40 + seed) for seed in range(10_000)],
    ],
    ids=["seeds", "indices", "both"],
)
def test_uniform_numbers(numbers: list[float]) -> None:
    assert all(0 <= u < 1 for u in numbers) and len(set(numbers)) == len(numbers)
    counts = np.bincount((np.array(numbers) * 100).astype(int), minlength=100)
    assert chi_square(counts, [100.0] * 100) < CHI_SQUARE_999[99]
    # Neighbours are unrelated: a counter goes in, no pattern comes out.
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04


def test_uniform_is_fixed_for_ever() -> None:
    """A stored answer must be reproducible with a later version."""
    assert uniform(0, 0) == uniform(0, 0) != uniform(0, 1) != uniform(1, 0)
    assert [round(uniform(seed, index), 12) for seed, index in FROZEN] == list(FROZEN.values())


FROZEN = {(0, 0): 0.056466399, (0, 1): 0.44008326622, (-1, 5): 0.931810758037}


@given(
    st.lists(st.floats(-30, 30, width=32) | st.just(-INF), min_size=2, max_size=40),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_never_takes_an_impossible_token(logits: list[float], u: float) -> None:
    assume(max(logits) > -INF)
    for x in (u, 0.0, 1 - 2.0**-53):
        token = int(draw(torch.tensor([logits]), torch.tensor([x], dtype=torch.float64)))
        assert logits[token] > -INF


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(LOGITS, sampling_rows()), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_neither_the_batch_nor_its_order_matters(
    pairs: list[tuple[list[float], SamplingRow]], shuffle: Any
) -> None:
    def outcome(chosen: list[tuple[list[float], SamplingRow]]) -> list[tuple[int, Any]]:
        logits = torch.tensor([logits for logits, _ in chosen])
        return list(zip(*Sampler().sample(logits, [row for _, row in chosen]), strict=True))

    alone = [outcome([pair])[0] for pair in pairs]
    assert outcome(pairs) == alone
    order = list(range(len(pairs)))
    shuffle.shuffle(order)
    assert outcome([pairs[i] for i in order]) == [alone[i] for i in order]


class WatchedSampler(Sampler):
    """Counts the rows whose logits are copied to float32."""

    def __init__(self) -> None:
        self.num_copied = 0

    def _allowed(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        self.num_copied += len(rows)
        return super()._allowed(logits, rows)


# What does not change a greedy row's logits: options for random rows, and those that are asked of
# the result.
UNCHANGED = st.builds(
    SamplingParams,
    temperature=st.just(0),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.5]),
    seed=st.none() | st.integers(0, 9),
    logprobs=st.none() | st.integers(0, 3),
    stop_token_ids=st.lists(TOKENS, max_size=2),
)
UNCHANGED_ROWS = st.builds(
    SamplingRow, UNCHANGED, st.just([0, 1, 1]), st.just(1), st.lists(TOKENS, max_size=2)
)


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(LOGITS, UNCHANGED_ROWS), max_size=6),
    st.lists(st.tuples(LOGITS, sampling_rows()), max_size=6),
    st.randoms(use_true_random=False),
)
def test_only_rows_whose_options_need_it_are_copied_to_float32(
    unchanged: list[tuple[list[float], SamplingRow]],
    others: list[tuple[list[float], SamplingRow]],
    shuffle: Any,
) -> None:
    pairs = unchanged + others
    assume(pairs)
    shuffle.shuffle(pairs)
    rows = [row for _, row in pairs]
    logits = torch.tensor([logits for logits, _ in pairs]).bfloat16()
    sampler = WatchedSampler()
    tokens, logprobs = sampler.sample(logits.clone(), rows)
    # The same rows, each with an option that changes nothing but must be looked at in float32.
    alike = [
        dataclasses.replace(row, params=row.params.clone(logit_bias={0: 0.0}))
        if row.takes_largest
        else row
        for row in rows
    ]
    assert (tokens, logprobs) == Sampler().sample(logits.float(), alike)
    assert sampler.num_copied == sum(not row.takes_largest for row in rows) <= len(others)


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 1},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {1: 9.0}},
        {"bad_words_token_ids": [[2]]},
        {"min_tokens": 3},
    ],
)
def test_each_option_that_changes_logits_is_seen(option: dict[str, Any]) -> None:
    row = SamplingRow(SamplingParams(**{"temperature": 0} | option), [0, 2, 2], 1, [2])
    assert not row.takes_largest
    if "temperature" not in option:
        # Token 2 has the largest logit, and the option stands against it.
        assert sample([[0.0, 1.0, 1.5]], [row]) == [1]


def test_a_batch_of_nobody() -> None:
    assert Sampler().sample(torch.zeros(0, 5), []) == ([], [])


# ---------------------------------------------------------------- log-probabilities


@settings(max_examples=examples(200))
@given(LOGITS, sampling_rows(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_logprobs_are_those_of_the_model(
    logits: list[float], row: SamplingRow, dtype: torch.dtype
) -> None:
    given_logits = torch.tensor([logits], dtype=dtype)
    expected = given_logits.double().log_softmax(dim=1)[0].tolist()
    [token], [entry] = Sampler().sample(given_logits, [row])
    if row.params.logprobs is None:
        assert entry is None
        return
    count = row.params.logprobs
    assert entry is not None and entry.token_ids[0] == token and len(entry.token_ids) == count + 1
    assert entry.logprobs == pytest.approx([expected[t] for t in entry.token_ids], abs=1e-5)
    assert entry.rank == 1 + sum(x > expected[token] + 1e-9 for x in expected)
    top = entry.token_ids[1:]
    assert len(set(top)) == count
    assert (
        sorted((expected[t] for t in top), reverse=True) == sorted(expected, reverse=True)[:count]
    )
    assert [expected[t] for t in top] == sorted((expected[t] for t in top), reverse=True)


def test_different_counts_in_one_batch_and_more_than_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 4)
    entries = start_logprobs(logits, torch.tensor([0, 2, 1, 0]), [0, 1, 2, 20])()
    assert [entry.token_ids for entry in entries] == [[0], [2, 2], [1, 2, 1], [0, 2, 1, 0]]
    assert [entry.rank for entry in entries] == [3, 1, 2, 3]
    [only] = start_logprobs(logits[:1], torch.tensor([1]), [0])()
    assert only.token_ids == [1] and only.logprobs == pytest.approx([-1.407606], abs=1e-5)


def test_forbidden_tokens_are_not_among_the_likeliest() -> None:
    forbidden = float("-inf")
    logits = torch.tensor(
        [[0.0, forbidden, 2.0, forbidden], [forbidden] * 3 + [1.0], [3.0, 2.0, 1.0, 0.0]]
    )
    entries = start_logprobs(logits, torch.tensor([0, 3, 1]), [3, 3, 3])()
    assert [entry.token_ids for entry in entries] == [[0, 2, 0], [3, 3], [1, 0, 1, 2]]
    assert [len(entry.logprobs) for entry in entries] == [3, 2, 4] and entries[1].logprobs == [0, 0]


# ---------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model")))


def test_alone_in_a_batch_and_preempted_gives_the_same_tokens(checkpoint: str) -> None:
    prompts = [[3 + (7 * i + j) % 300 for j in range(20 + i)] for i in range(8)]
    params = [
        SamplingParams(
            temperature=1.0 + i / 8,
            top_p=0.95,
            seed=i % 3,
            max_tokens=24,
            ignore_eos=True,
            logprobs=2,
        )
        for i in range(8)
    ]
    roomy = LLM(checkpoint, dtype="float64")
    alone = [
        roomy.generate([p], s, use_tqdm=False)[0].outputs[0]
        for p, s in zip(prompts, params, strict=True)
    ]
    assert len({tuple(o.token_ids) for o in alone}) == 8
    tight = LLM(checkpoint, dtype="float64", num_kv_blocks=12, check_invariants=True)
    for llm in (roomy, tight):
        together = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]
        assert [o.cumulative_logprob for o in together] == pytest.approx(
            [o.cumulative_logprob for o in alone], abs=1e-4
        )
    assert tight.engine.core.stats.num_preemptions > 0
    swapping = LLM(checkpoint, dtype="float64", num_kv_blocks=12, preemption_mode="swap")
    assert [o.outputs[0].token_ids for o in swapping.generate(prompts, params, use_tqdm=False)] == [
        o.token_ids for o in alone
    ]


def test_a_request_that_forbids_everything_does_not_stop_the_engine(checkpoint: str) -> None:
    llm = LLM(checkpoint, dtype="float32")
    everything = list(range(320))
    hostile = SamplingParams(
        min_tokens=4, max_tokens=8, stop_token_ids=everything, top_p=0.9, seed=1
    )
    calm = SamplingParams(max_tokens=8, seed=2, ignore_eos=True)
    alone = llm.generate([[5, 6, 7]], calm, use_tqdm=False)[0].outputs[0].token_ids
    first, second = llm.generate([[3, 4, 5], [5, 6, 7]], [hostile, calm], use_tqdm=False)
    assert first.outputs[0].finish_reason == "stop" and len(first.outputs[0].token_ids) == 4
    assert second.outputs[0].token_ids == alone


def test_min_tokens_and_stop_tokens_in_the_engine(checkpoint: str) -> None:
    llm = LLM(checkpoint, dtype="float32")
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = llm.generate([[5, 6, 7]], free, use_tqdm=False)[0].outputs[0].token_ids
    stop = tokens[1]
    early = llm.generate([[5, 6, 7]], free.clone(stop_token_ids=[stop]), use_tqdm=False)[0].outputs[
        0
    ]
    assert early.token_ids == tokens[: tokens.index(stop) + 1] and early.stop_reason == stop
    late = llm.generate(
        [[5, 6, 7]], free.clone(stop_token_ids=[stop], min_tokens=8), use_tqdm=False
    )[0].outputs[0]
    assert stop not in late.token_ids[:8] and len(late.token_ids) >= 8


# ---------------------------------------------------------------- SamplingParams

NOT_INTEGERS = [1.0, "1", True, False, NAN, INF, -INF, [1], b"1"]
NOT_NUMBERS = ["1", True, False, NAN, INF, -INF, None, [1.0], 1j, 10**400]
NOT_SWITCHES = [None, 0, 1, "no", [], 1.0]
BAD: dict[str, list[Any]] = {
    "n": [None, 0, -1, 129, 10**400, *NOT_INTEGERS],
    "temperature": [-0.1, -1, -5e-324, *NOT_NUMBERS],
    "top_k": [None, -2, 2**63, 10**400, -1.0, *NOT_INTEGERS],
    "top_p": [0, 0.0, -0.0, -0.1, 1.0001, 2, *NOT_NUMBERS],
    "min_p": [-0.1, 1.0001, 2, *NOT_NUMBERS],
    "repetition_penalty": [0, 0.0, -1.0, *NOT_NUMBERS],
    "presence_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "frequency_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "logit_bias": [
        5,
        "x",
        [1],
        [(1, 2.0)],
        {"1": 1.0},
        {True: 1.0},
        {1.0: 1.0},
        {None: 1.0},
        {-1: 1.0},
        {1: 100.5},
        {1: -101},
        *({1: bad} for bad in NOT_NUMBERS),
    ],
    "seed": [2**63, -(2**63) - 1, 10**400, *NOT_INTEGERS],
    "stop": [5, 1.5, True, b"x", {"a": 1}, "", [""], ["a", ""], ["a", 5], ["a", None], ["a"] * 17],
    "stop_token_ids": [5, "12", b"12", {1: 2}, [-1], [1.0], ["1"], [None], [True], [NAN]],
    "bad_words": [
        5,
        True,
        "word",
        b"word",
        {"a": 1},
        [""],
        ["a", ""],
        ["a", 5],
        [["a"]],
        ["a" * 257],
        ["a"] * 129,
    ],
    "bad_words_token_ids": [
        5,
        "12",
        [5],
        [[]],
        [[5], []],
        [[-1]],
        [["5"]],
        [[1.0]],
        [[True]],
        [[[5]]],
    ],
    "include_stop_str_in_output": NOT_SWITCHES,
    "ignore_eos": NOT_SWITCHES,
    "skip_special_tokens": NOT_SWITCHES,
    "max_tokens": [0, -1, *NOT_INTEGERS],
    "min_tokens": [None, -1, 17, *NOT_INTEGERS],
    "logprobs": [-1, 21, *NOT_INTEGERS],
    "prompt_logprobs": [-1, 21, *NOT_INTEGERS],
    "num_speculative_tokens": [-1, *NOT_INTEGERS],
    "structured_outputs": [
        5,
        "x",
        [],
        True,
        {},
        {"regex": None},
        {"json": {}, "regex": "a"},
        {"json_object": False},
    ],
}
GOOD: dict[str, list[Any]] = {
    "n": [1, 128],
    "temperature": [0, 0.0, 1e-300, 2, 1e300],
    "top_k": [-1, 0, 1, 2**63 - 1],
    "top_p": [5e-324, 1e-9, 0.5, 1, 1.0],
    "min_p": [0, 0.0, 1, 1.0],
    "repetition_penalty": [5e-324, 1, 1e300],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0, 2],
    "logit_bias": [None, {}, {0: -100, 5: 100.0}],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63)],
    "stop": [None, [], "a", ["a"] * 16, ("a", "b")],
    "stop_token_ids": [None, [], [0, 5], (1,), {3}],
    "bad_words": [None, [], ["a"], ("a", "b c"), ["\n"], ["a" * 256] * 128],
    "bad_words_token_ids": [None, [], [[5]], ([5, 6], (7,))],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "max_tokens": [None, 1, 10**400],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "num_speculative_tokens": [None, 0, 3],
    "structured_outputs": [
        None,
        {"json": {}},
        {"regex": "a"},
        StructuredOutputsParams(json_object=True),
    ],
}


def test_every_field_is_covered() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(BAD) == set(GOOD) == names


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_by_name(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=rf"^{name} must ") as refusal:
            SamplingParams(**{name: value})
        assert "got" in str(refusal.value) or name == "stop", "the message shows the value"
        with pytest.raises(ValueError, match=rf"^{name} must "):
            SamplingParams().clone(**{name: value})


@pytest.mark.parametrize("name", GOOD)
def test_good_values_are_taken(name: str) -> None:
    for value in GOOD[name]:
        params = SamplingParams(**{name: value})
        assert params.clone() == params
        row = SamplingRow(params, [1, 2, 3], 1, [4])
        assert 0 <= sample([[0.5] * 30], [row])[0] < 30


def test_names_are_normalised() -> None:
    params = SamplingParams(top_k=-1, stop="end", stop_token_ids=(3,), temperature=1)
    assert (params.top_k, params.stop, params.stop_token_ids) == (0, ["end"], [3])
    assert isinstance(params.temperature, float) and not params.greedy and not params.looks_back
    assert SamplingParams(temperature=0).greedy
    assert [
        SamplingParams(bad_words_token_ids=words).looks_back
        for words in ([[5], [6]], [[5], [6, 7]])
    ] == [False, True]
    assert all(
        SamplingParams(**{name: 1.5}).looks_back for name in BAD if name.endswith("_penalty")
    )
    assert SamplingParams(max_tokens=None, min_tokens=10**9).min_tokens == 10**9
    shared = ["a"]
    copy = SamplingParams(stop=shared).clone(n=2)
    shared.append("b")
    assert copy.stop == ["a"]
