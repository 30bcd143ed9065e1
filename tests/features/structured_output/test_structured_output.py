"""Masks from grammars: against an oracle that knows neither the library nor the engine, and beside
everything else that an engine does."""

from __future__ import annotations

import copy
import functools
import json
import pathlib
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.core.sampling import SamplingRow
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import CompletionOutput
from nanovllm.features.structured_output.masks import StructuredOutputManager
from nanovllm.features.structured_output.running import StructuredOutput
from nanovllm.models.config import ModelConfig
from tests.examples import by_night, examples
from tests.oracle import make_tokenizer, reference_model, reference_tokens

EOS = 2
# The end of an output is not compared: there, only tokens may come after which the output can still
# be completed.
NUM_TOKENS, NUM_COMPARED = 64, 24
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 120,
    "attention_backend": "torch",
    "check_invariants": True,
}
# Each is a bounded language, so that every output ends. The random model writes something else for
# each prompt.
PATTERNS = [
    r"[a-z]{3}-[0-9]{2,9}!",
    r"(yes|no|[a-m]{2,20};)+",
    r'\{"[a-z]{1,9}": ([0-9]{1,12}|null)\}',
    r"([0-9]{3},){1,6}",
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": -99, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None, 1.5]}, "maxItems": 2},
        "box": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/box"}]},
    },
    "required": ["name", "size", "box"],
    "additionalProperties": False,
    "$defs": {
        "box": {
            "type": "object",
            "properties": {"w": {"type": "boolean"}},
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def llm(tiny_model: pathlib.Path) -> LLM:
    return LLM(str(tiny_model), **OPTIONS)


def prompts() -> list[list[int]]:
    """Lengths from 1 to 50; the last three begin alike."""
    draw = random.Random(3)
    shared = draw.choices(range(3, 320), k=33)
    return [draw.choices(range(3, 259), k=length) for length in (1, 9, 50)] + [
        [*shared, i] for i in (5, 6, 7)
    ]


def answers(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[CompletionOutput]:
    return [
        completion
        for output in llm.generate(prompts(), params, use_tqdm=False)
        for completion in output.outputs
    ]


# ---------------------------------------------------------------- the masks themselves


@pytest.fixture(scope="module")
def manager() -> StructuredOutputManager:
    """Of the course model, whose tokens are words."""
    folder = resolve_model("smollm2-135m")
    return StructuredOutputManager(EngineConfig(), ModelConfig.from_pretrained(folder), folder)


@functools.cache
def spelling() -> tuple[list[bytes], list[int]]:
    """The bytes of every token of the course model, and the ids of the special tokens."""
    from nanovllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(resolve_model("smollm2-135m"))
    return [tokenizer.token_bytes(token) for token in range(49152)], tokenizer.all_special_ids


def mask_of(
    manager: StructuredOutputManager, pattern: str, output: list[int], **params: Any
) -> np.ndarray:
    """Ids of the allowed tokens."""
    row = SamplingRow(
        SamplingParams(structured_outputs={"regex": pattern}, max_tokens=None, **params),
        [7, *output],
        1,
        [EOS],
    )
    manager.matchers.clear()
    logits = torch.zeros(1, 49152)
    assert manager.start([row])(logits) == {}
    return np.flatnonzero(logits[0].isfinite().numpy())


PIECES = st.sampled_from(
    [
        "a",
        "the ",
        "[a-f]",
        r"[0-9]{2}",
        "[0-9]{1,3}",
        "(x|yy|zzz)",
        "(on|once)?",
        "b*",
        "[ -~]{2,4}",
        "é",
        "\n",
    ]
)


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(PIECES, min_size=1, max_size=5).map("".join),
    st.integers(0, 1 << 32),
    st.integers(0, 6),
)
def test_masks_are_what_can_still_become_a_match(
    manager: StructuredOutputManager, pattern: str, seed: int, length: int
) -> None:
    """After each token, exactly those tokens are allowed with which the text can still become a
    match."""
    draw = random.Random(seed)  # hypothesis would note each of its thousands of numbers
    tokens, special = spelling()
    oracle = regex.compile(pattern.encode())
    output: list[int] = []
    text = b""
    for _ in range(length + 1):
        allowed = mask_of(manager, pattern, output)
        checked = {*allowed.tolist()[:2000], *draw.sample(range(49152), 1000)} - set(special)
        fitting = {
            token for token in checked if oracle.fullmatch(text + tokens[token], partial=True)
        }
        if (
            sum(
                oracle.fullmatch(text + bytes([byte]), partial=True) is not None
                for byte in range(256)
            )
            > 1
        ):
            assert fitting == checked & set(allowed.tolist())
        else:  # the text is forced for a while, and so is its usual tokenization
            assert checked & set(allowed.tolist()) <= fitting and len(allowed)
        assert set(allowed.tolist()) & set(special) == ({EOS} if oracle.fullmatch(text) else set())
        longer = [token for token in allowed.tolist() if token != EOS]
        if not longer:
            return
        output.append(draw.choice(longer))
        text += tokens[output[-1]]


def test_each_output_token_is_consumed_once(manager: StructuredOutputManager) -> None:
    """A matcher may be new, one token behind, several behind, or asked again after a preemption."""
    a, b = (spelling()[0].index(letter) for letter in (b"a", b"b"))
    params = SamplingParams(structured_outputs={"regex": "abab?"}, max_tokens=None)
    manager.matchers.clear()

    def allowed(*output: int) -> list[int]:
        row = SamplingRow(params, [7, *output], 1, [EOS])
        masks, errors = manager.masks({"r": row})
        assert not errors, "a token was consumed twice, or one was left out"
        assert masks.shape == (1, 49152 // 8), "one row, of a bit for each of the 49,152 tokens"
        assert manager.matchers["r"][1] == len(output), (
            "`matchers` notes how many output tokens the matcher has consumed"
        )
        return [token for token in (a, b, EOS) if masks[0, token // 8] >> token % 8 & 1]

    assert allowed() == [a]
    assert allowed(a) == [b] and allowed(a) == [b], "the same again, after a preemption"
    assert allowed(a, b, a) == [b, EOS], "two tokens at once"
    (other, _) = manager.masks({"s": SamplingRow(params, [7], 1, [EOS])})
    assert other[0, a // 8] >> a % 8 & 1, (
        "another request with the same grammar has a matcher of its own"
    )
    masks, errors = manager.masks({"r": SamplingRow(params, [7, a, b, a, a], 1, [EOS])})
    assert list(errors) == ["r"] and errors["r"].startswith("after 4 tokens"), (
        "aa is no beginning of a match"
    )
    assert (masks == 255).all(), "the row of a request that fails allows every token"


def test_an_end_is_forbidden_before_min_tokens_unless_nothing_else_is_left(
    manager: StructuredOutputManager,
) -> None:
    a = spelling()[0].index(b"a")
    assert EOS in mask_of(manager, "a*", [a])
    assert EOS in mask_of(manager, "a*", [a], min_tokens=1)
    assert EOS not in mask_of(manager, "a*", [a], min_tokens=2)
    assert EOS not in mask_of(manager, "a*", [a], ignore_eos=True)
    assert mask_of(manager, "a", [a], min_tokens=9, ignore_eos=True).tolist() == [EOS]


# ---------------------------------------------------------------- tokens against transformers


@functools.cache
def constrained_reference(folder: str, pattern: str, index: int, count: int) -> list[int]:
    """Greedy tokens by transformers, of those that can still become a match of the pattern."""
    oracle, backend = regex.compile(pattern), make_tokenizer()
    output: list[int] = []
    model = reference_model(folder)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([prompts()[index] + output])).logits[0, -1]
        text = backend.decode(output)
        fits = [
            token
            for token in range(3, 259)
            if oracle.fullmatch(text + backend.decode([token]), partial=True)
        ]
        fits += [EOS] if oracle.fullmatch(text) else []
        output.append(max(fits, key=lambda token: float(logits[token])))
        if output[-1] == EOS:
            break
    return output


def expected(folder: pathlib.Path) -> list[list[int]]:
    return [
        constrained_reference(str(folder), PATTERNS[i % 4], i, NUM_COMPARED) for i in range(5)
    ] + [reference_tokens(str(folder), prompts()[5], NUM_COMPARED)]


def mixture(**options: Any) -> list[SamplingParams]:
    """A grammar for each prompt but the last, which has none."""
    base = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, **options)
    wanted = [{"regex": PATTERNS[i % 4]} for i in range(5)]
    return [base.clone(structured_outputs=w) for w in wanted] + [base.clone(ignore_eos=True)]


# name -> engine options; "n" is a sampling parameter
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"async_scheduling": True},
    "chunks of 5": {"long_prefill_token_threshold": 5},
    "budget of 12, no prefix cache": {
        "max_num_batched_tokens": 12,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    },
    "recompute": {"num_kv_blocks": 9},
    "swap": {
        "num_kv_blocks": 9,
        "preemption_mode": "swap",
        "swap_space": 0.01,
        "async_scheduling": True,
    },
    "prefill first": {"batching_policy": "prefill_first", "enable_chunked_prefill": False},
    "n": {"n": 3},
    "one at a time": {"max_num_seqs": 1},
}


# At night also those that are parts of others.
BY_NIGHT = ["plain", "chunks of 5", "one at a time"]


@pytest.mark.parametrize(
    "name", [*(name for name in VARIANTS if name not in BY_NIGHT), *by_night(BY_NIGHT)]
)
def test_no_option_changes_a_token(name: str, tiny_model: pathlib.Path) -> None:
    options = dict(VARIANTS[name])
    n = options.pop("n", 1)
    llm = LLM(str(tiny_model), **OPTIONS | options)
    for _ in range(2):  # the second time with prefixes from the cache
        got = [completion.token_ids[:NUM_COMPARED] for completion in answers(llm, mixture(n=n))]
        assert got == [tokens for tokens in expected(tiny_model) for _ in range(n)]
    preempts = "num_kv_blocks" in options
    assert (llm.engine.core.stats.num_preemptions > 0) == preempts
    runner = llm.engine.core.runner
    (feature,) = (each for each in runner.features if isinstance(each, StructuredOutput))
    assert feature.manager.matchers.keys() <= runner.rows.row_of.keys(), (
        "a matcher is forgotten with its request"
    )


@pytest.mark.parametrize(
    "grid",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=str,
)
def test_a_divided_model_follows_grammars_too(
    grid: dict[str, int], tiny_model: pathlib.Path
) -> None:
    llm = LLM(str(tiny_model), **OPTIONS | grid)
    try:
        got = [completion.token_ids[:NUM_COMPARED] for completion in answers(llm, mixture())]
        assert got == expected(tiny_model)
    finally:
        llm.engine.core.close()


def test_logprobs_are_those_of_the_allowed_tokens(llm: LLM) -> None:
    """As in vLLM: those that a grammar excludes have a probability of 0, and the rest adds up to
    1."""
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=20, structured_outputs={"regex": "[0-9]x"}
    )
    for completion in answers(llm, params):
        (position,) = completion.logprobs or []
        finite = [entry.logprob for entry in position.values() if entry.logprob > float("-inf")]
        assert len(finite) == 10 and sum(map(np.exp, finite)) == pytest.approx(1)
        assert position[completion.token_ids[0]].rank == 1


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("temperature", [0, 1.5, *by_night([0.7, 100])])
def test_json_is_valid_whatever_the_seed_and_temperature(temperature: float, llm: LLM) -> None:
    options: dict[str, Any] = {
        "temperature": temperature,
        "n": 3,
        "max_tokens": None,
        "logit_bias": {EOS: 50},
    }
    for seed in range(examples(3)):
        params = SamplingParams(seed=seed, structured_outputs={"json": SCHEMA}, **options)
        for completion in answers(llm, params):
            if completion.finish_reason == "stop":
                jsonschema.validate(json.loads(completion.text), SCHEMA)
            else:
                assert completion.finish_reason == "length"


def test_every_kind(llm: LLM) -> None:
    kinds: dict[str, tuple[Any, str]] = {
        "choice": (["Paris", "Pa(is", 'the "end"'], r'Paris|Pa\(is|the "end"'),
        "regex": ("[a-c]{2}", "[a-c]{2}"),
        "grammar": (
            'start: "<" item ("," item)~1..2 ">"\nitem: /[0-9]{1,3}/',
            r"<[0-9]{1,3}(,[0-9]{1,3}){1,2}>",
        ),
        "json": (
            json.dumps({"enum": ["a", {"b": [1, 2]}]}),
            r'"a"|\{\s*"b"\s*:\s*\[\s*1\s*,\s*2\s*\]\s*\}',
        ),
    }
    for field, (value, pattern) in kinds.items():
        params = SamplingParams(
            temperature=2, seed=5, n=2, max_tokens=None, structured_outputs={field: value}
        )
        texts = [completion.text for completion in answers(llm, params)]
        assert all(regex.fullmatch(pattern, text) for text in texts), texts
        assert len(set(texts)) > 1, "it is the model that chooses"
    (brace,) = llm.get_tokenizer().encode("}")
    params = SamplingParams(
        temperature=0, logit_bias={brace: 100, EOS: 100}, structured_outputs={"json_object": True}
    )
    assert all(isinstance(json.loads(completion.text), dict) for completion in answers(llm, params))


def test_stops_do_not_end_a_form(llm: LLM) -> None:
    """Else the output would not match."""
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "ab{12}c"})
    b = llm.get_tokenizer().encode("b")[0]
    for stops in (
        {"stop": "bbb"},
        {"stop_token_ids": [b]},
        {"stop": ["c"], "stop_token_ids": [b, EOS]},
    ):
        whole = answers(llm, params.clone(**stops))[0]
        assert (whole.text, whole.finish_reason) == ("abbbbbbbbbbbbc", "stop"), stops
    ended = answers(llm, params.clone(min_tokens=20, ignore_eos=True))[0]
    assert (ended.text, ended.finish_reason, ended.token_ids[-1]) == ("abbbbbbbbbbbbc", "stop", EOS)
    assert answers(llm, params.clone(max_tokens=3))[0].finish_reason == "length"


# ---------------------------------------------------------------- what goes wrong


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(
    llm: LLM, tiny_model: pathlib.Path
) -> None:
    too_many = "start: " + " | ".join(f'"c{i}"' for i in range(5000))
    params = mixture()
    params[0] = params[0].clone(structured_outputs={"grammar": too_many})
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    failed = outputs[0].outputs[0]
    assert (failed.finish_reason, failed.text) == ("error", "c")
    error = outputs[0].error
    assert (
        error
        and error.place == "structured_outputs.grammar"
        and error.reason.startswith("after 1 tokens")
    )
    assert str(copy.deepcopy(error)) == str(error), "a result can be copied"
    assert [output.outputs[0].token_ids[:NUM_COMPARED] for output in outputs[1:]] == expected(
        tiny_model
    )[1:]
    assert llm.engine.core.stats.kv_cache_usage == 0


def test_a_model_without_an_end_is_told_so(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "endless"
    folder.mkdir()
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        if file.suffix == ".json" and file.name != "tokenizer.json":
            fields = json.loads(content)
            content = json.dumps(
                {key: value for key, value in fields.items() if not key.startswith("eos_token")}
            ).encode()
        (folder / file.name).write_bytes(content)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        LLM(str(folder), **OPTIONS).generate(
            [[5]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False
        )
