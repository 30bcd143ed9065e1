"""A token's value depends on the tokens before it, and not on batch, chunks, neighbours or
preemptions: to the last bit of its log-probability, in every dtype that the compiled CPU kernels
compute."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.ops import native
from tests.oracle import make_checkpoint
from tests.pairwise import in_turn

pytestmark = pytest.mark.skipif(
    not native.is_available(), reason="torch's products depend on the number of rows"
)

BLOCK, POOL = 16, 4096
# Engine options by what happens to requests; the pool is in tokens.
SCENARIOS: dict[str, dict[str, Any]] = {
    "in company": {},
    "one at a time": {"max_num_seqs": 1},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 50": {"long_prefill_token_threshold": 50},
    "a small budget": {"max_num_batched_tokens": 70},
    "no prefix cache": {"enable_prefix_caching": False},
    "recompute": {"pool": 1024, "max_num_batched_tokens": 300},
    "swap": {"pool": 1024, "preemption_mode": "swap", "swap_space": 0.01},
    "async scheduling": {"async_scheduling": True},
    "layer by layer": {"enforce_eager": True},
}


def prompts() -> list[list[int]]:
    """Prompts shorter and longer than a part of the attention kernel, some with a shared
    beginning."""
    draw = random.Random(3)
    shared = [draw.randrange(3, 320) for _ in range(290)]
    tails = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 30, 200)]
    return [[draw.randrange(3, 320) for _ in range(length)] for length in (3, 90, 270, 600)] + [
        shared + t for t in tails
    ]


def params(index: int) -> SamplingParams:
    """Greedy and seeded requests in turn."""
    return SamplingParams(
        temperature=index % 2, seed=index, max_tokens=24, ignore_eos=True, logprobs=2
    )


def generate(
    checkpoint: str, dtype: str, batches: list[list[int]], **options: Any
) -> tuple[LLM, dict[int, Any]]:
    """Each prompt's tokens and log-probabilities, by index, of an engine that gets these batches
    one after the other."""
    options = {"max_num_seqs": 8, "max_model_len": 900, "pool": POOL} | options
    num_blocks = options.pop("pool") // BLOCK
    llm = LLM(
        checkpoint, dtype=dtype, num_kv_blocks=num_blocks, block_size=BLOCK, trace=True, **options
    )
    every, values = prompts(), {}
    for batch in batches:
        outputs = llm.generate(
            [every[i] for i in batch], [params(i) for i in batch], use_tqdm=False
        )
        for index, output in zip(batch, outputs, strict=True):
            completion = output.outputs[0]
            chosen = [
                logprobs[token].logprob
                for logprobs, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
            values[index] = completion.token_ids, chosen
    return llm, values


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("long"), "llama-long"))


@pytest.fixture(scope="module")
def alone(request, checkpoint) -> tuple[str, dict[int, Any]]:
    """What each prompt yields in an engine that has computed nothing else."""
    values: dict[int, Any] = {}
    for index in range(len(prompts())):
        values |= generate(checkpoint, request.param, [[index]])[1]
    return request.param, values


# By day each scenario with one of the dtypes, in turn.
@pytest.mark.parametrize(
    ("scenario", "alone"), in_turn(SCENARIOS, ["bfloat16", "float32"]), indirect=["alone"]
)
def test_values_are_those_of_a_request_alone(
    scenario: str, checkpoint: str, alone: tuple[str, dict[int, Any]]
) -> None:
    dtype, expected = alone
    every = list(range(len(expected)))
    llm, values = generate(checkpoint, dtype, [every, every[::-1]], **SCENARIOS[scenario])
    assert {i: tokens for i, (tokens, _) in values.items()} == {
        i: tokens for i, (tokens, _) in expected.items()
    }
    assert values == expected
    steps = list(llm.trace or ())
    used = {
        "in company": max(len(step.requests) for step in steps) == len(every),
        "chunks of 1": all(request.num_tokens == 1 for step in steps for request in step.requests),
        "recompute": any("recompute" in step.preempted.values() for step in steps),
        "swap": any("swap" in step.preempted.values() for step in steps),
    }
    assert used.get(scenario, True)
    assert (llm.engine.core.stats.num_hit_tokens > 0) == (scenario != "no prefix cache")


def test_completions_of_one_request_are_those_of_requests_of_their_own(checkpoint: str) -> None:
    prompt = prompts()[3]
    llm = LLM(checkpoint, dtype="bfloat16", max_model_len=900, num_kv_blocks=POOL // BLOCK)
    several = llm.generate(
        [prompt], SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True), use_tqdm=False
    )[0]
    greedy = llm.generate(
        [prompt], SamplingParams(n=3, temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )[0]
    assert len({tuple(completion.token_ids) for completion in greedy.outputs}) == 1
    again = llm.generate(
        [prompt], SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True), use_tqdm=False
    )[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in several.outputs]
    assert len({tuple(completion.token_ids) for completion in several.outputs}) == 3
