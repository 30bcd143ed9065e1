"""Every feature on or off, alone and with every other one: no token changes, and the feature is
really in use."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from tests.oracle import make_checkpoint, reference_tokens
from tests.pairwise import covering_sets, possible_pairs

OUTPUT_LEN = 9
# Engine options by feature; "pool" is the KV pool in tokens, "n", "reverse" and "priorities" change
# how requests are made.
FEATURES: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "whole prompts": {"enable_chunked_prefill": False},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "budget of 12": {"max_num_batched_tokens": 12, "max_num_seqs": 8},
    "prefill first": {"batching_policy": "prefill_first"},
    "static": {"batching_policy": "static"},
    "recompute": {"pool": 128},
    "swap": {"pool": 128, "preemption_mode": "swap", "swap_space": 0.01},
    "blocks of 1": {"block_size": 1},
    "blocks of 4": {"block_size": 4},
    "blocks of 64": {"block_size": 64},
    "cpu backend": {"attention_backend": "cpu"},
    "priority": {"scheduling_policy": "priority", "priorities": True},
    "one at a time": {"max_num_seqs": 1},
    "steps as short as can be": {"max_step_ms": 0.001, "long_prefill_token_threshold": 20},
    "async scheduling": {"async_scheduling": True},
    "n-grams": {"drafts": {"method": "ngram", "prompt_lookup_min": 1}},
    "draft model": {"drafts": {"method": "draft_model"}},  # the model itself
    "n": {"n": 3},
    "reverse": {"reverse": True},
}
# What cannot be had together, and why.
IMPOSSIBLE = [
    {"whole prompts", "budget of 12"},  # refused: a whole prompt does not fit the budget
    {"blocks of 64", "recompute"},  # two blocks hold one request: nobody to preempt
    {"blocks of 64", "swap"},
    {"static", "n-grams"},  # refused
    {"static", "draft model"},
]


def prompts() -> list[list[int]]:
    """Lengths from 1 to 70, a shared beginning of 33 tokens, two equal prompts."""
    draw = random.Random(7)
    shared = [draw.randrange(3, 320) for _ in range(33)]
    alone = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 16, 70)]
    together = [shared + [draw.randrange(3, 320) for _ in range(length)] for length in (1, 12, 27)]
    return [*alone, *together, together[1], shared]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[list[int]]:
    return [reference_tokens(checkpoint, prompt, OUTPUT_LEN) for prompt in prompts()]


def run(
    checkpoint: str, features: tuple[str, ...], **sampling: Any
) -> tuple[LLM, list[list[list[int]]]]:
    """The engine with these features, and tokens by prompt and completion, of the second of two
    equal runs."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 120,
        "attention_backend": "torch",
        "block_size": 16,
    }
    for feature in features:
        options |= FEATURES[feature]
    n, reverse, priorities = (
        options.pop(name, default)
        for name, default in (("n", 1), ("reverse", False), ("priorities", False))
    )
    if drafts := options.pop("drafts", None):
        model = {"model": checkpoint} if drafts["method"] == "draft_model" else {}
        # Three drafts at any price.
        always = {
            "num_speculative_tokens": 3,
            "num_speculative_tokens_per_batch_size": [[1, 256, 3]],
        }
        options["speculative_config"] = drafts | model | always
    options["num_kv_blocks"] = options.pop("pool", 2048) // options["block_size"]
    llm = LLM(checkpoint, check_invariants=True, trace=True, **options)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, n=n, **sampling)
    batch = prompts()[::-1] if reverse else prompts()
    levels = [i * 7 % 3 for i in range(len(batch))] if priorities else None
    for _ in range(2):  # the second run meets what the first one left in the cache
        outputs = llm.generate(batch, params, use_tqdm=False, priority=levels)
    core = llm.engine.core
    assert core.manager.pool.num_free == core.manager.pool.num_blocks
    tokens = [[completion.token_ids for completion in output.outputs] for output in outputs]
    return llm, tokens[::-1] if reverse else tokens


def test_a_plan_that_breaks_an_invariant_is_not_run(checkpoint: str) -> None:
    """A request that has two shares of a step: the second needs the token that the first samples,
    and all is in order again when the step has ended."""
    llm = LLM(checkpoint, check_invariants=True, num_kv_blocks=64)

    def admit_then_continue(scheduler: Scheduler, plan: SchedulerOutput) -> None:
        scheduler.admit(plan)
        scheduler.continue_running(plan, scheduler.queues.running)

    llm.engine.core.scheduler.fill = admit_then_continue
    with pytest.raises(AssertionError, match="two shares of a step"):
        llm.generate("one two", use_tqdm=False)


@pytest.mark.parametrize("feature", FEATURES)
def test_alone(feature: str, checkpoint: str, expected: list[list[int]]) -> None:
    llm, tokens = run(checkpoint, (feature,))
    assert tokens == [[want] * FEATURES[feature].get("n", 1) for want in expected]
    steps, core = list(llm.trace or ()), llm.engine.core
    drafts = core.stats.spec_decoding
    used = {
        "n-grams": drafts.num_draft_tokens > 0,
        "draft model": drafts.num_draft_tokens == drafts.num_accepted_tokens > 0,
        "no prefix cache": core.stats.num_hit_tokens == 0,
        "chunks of 1": all(r.num_tokens == 1 for s in steps for r in s.requests),
        "chunks of 7": max(r.num_tokens for s in steps for r in s.requests) == 7,
        "budget of 12": max(s.num_tokens for s in steps) == 12,
        "recompute": any("recompute" in s.preempted.values() for s in steps),
        "swap": any("swap" in s.preempted.values() for s in steps)
        and any(s.resumed for s in steps),
        "cpu backend": core.runner.forward.backend.name == "cpu",
        "one at a time": max(len(s.requests) for s in steps) == 1,
        "prefill first": not any(mixed(s) for s in steps),
        "static": not any(mixed(s) for s in steps),
        "steps as short as can be": max((prefill_tokens(s) for s in steps if mixed(s)), default=0)
        == 32,
        "priority": list(steps[0].admitted) != sorted(steps[0].admitted),
    }
    assert used.get(feature, True)
    assert feature == "no prefix cache" or core.stats.num_hit_tokens > 0


def mixed(step: Any) -> bool:
    """Whether a step holds both prompts and decoding requests."""
    kinds = {request.start >= request.num_prompt_tokens for request in step.requests}
    return len(kinds) == 2


def prefill_tokens(step: Any) -> int:
    """Tokens of prompts in the step."""
    return sum(r.num_tokens for r in step.requests if r.start < r.num_prompt_tokens)


def fit(one: str, other: str) -> bool:
    return {one, other} not in IMPOSSIBLE and not FEATURES[one].keys() & FEATURES[other].keys()


PAIRS = [
    pytest.param(pair, marks=pytest.mark.nightly) for pair in possible_pairs(list(FEATURES), fit)
]


@pytest.mark.parametrize(
    "features", [*covering_sets(list(FEATURES), fit, 5), *PAIRS], ids=" + ".join
)
def test_together(features: tuple[str, ...], checkpoint: str, expected: list[list[int]]) -> None:
    """Every pair occurs in one of the sets; nightly, each is also tested alone."""
    copies = max(FEATURES[feature].get("n", 1) for feature in features)
    assert run(checkpoint, features)[1] == [[want] * copies for want in expected]


def test_impossible_budget_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        run(checkpoint, ("whole prompts", "budget of 12"))
