"""One step ahead: the next step is launched before the results of the running one are known, and no
token changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.oracle import make_checkpoint

PROMPTS = [
    {"prompt_token_ids": [3 + (7 * i + j) % 300 for j in range(length)]}
    for i, length in enumerate((5, 40, 18))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


def engine(checkpoint: str, overlap: bool = True, **options: Any) -> LLM:
    return LLM(
        checkpoint,
        dtype="float32",
        device="cpu",
        num_kv_blocks=64,
        async_scheduling=overlap,
        check_invariants=True,
        **options,
    )


def watch(llm: LLM) -> list[str]:
    """Notes when steps are launched, and when their results are asked for."""
    events: list[str] = []
    launch = llm.engine.core.runner.launch

    def watched(plan: Any) -> Any:
        number = sum(event.startswith("launch") for event in events)
        events.append(f"launch {number}")
        wait = launch(plan)

        def waited() -> Any:
            events.append(f"wait {number}")
            return wait()

        return waited

    llm.engine.core.runner.launch = watched  # type: ignore[method-assign]
    return events


def test_a_step_is_launched_before_the_last_one_is_waited_for(checkpoint: str) -> None:
    llm = engine(checkpoint)
    events = watch(llm)
    llm.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    # The number of tokens is known from the start, so nothing is launched in vain.
    assert events == [
        "launch 0",
        "launch 1",
        "wait 0",
        "launch 2",
        "wait 1",
        "launch 3",
        "wait 2",
        "wait 3",
    ]


def test_without_it_each_step_is_waited_for(checkpoint: str) -> None:
    llm = engine(checkpoint, overlap=False)
    events = watch(llm)
    llm.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False
    )
    assert events == ["launch 0", "wait 0", "launch 1", "wait 1"]


def test_penalties_wait_for_the_tokens_they_count(checkpoint: str) -> None:
    llm = engine(checkpoint)
    events = watch(llm)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, repetition_penalty=1.3)
    llm.generate(PROMPTS, params, use_tqdm=False)
    assert events == ["launch 0", "wait 0", "launch 1", "wait 1", "launch 2", "wait 2"]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 5, "top_p": 0.9, "top_k": 40},
        {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0, "min_tokens": 9, "stop_token_ids": list(range(3, 200))},
        {"temperature": 0, "stop_token_ids": list(range(0, 320, 3))},
        {"temperature": 1.0, "seed": 1, "stop": ["a", "e", "0"]},
        {"temperature": 1.0, "seed": 2, "n": 3, "logit_bias": {40: 5.0}},
        {
            "temperature": 1.0,
            "seed": 3,
            "bad_words": ["a", "bc"],
            "bad_words_token_ids": [[t, t + 1] for t in range(9, 300)],
        },
    ],
    ids=str,
)
def test_it_changes_no_token(checkpoint: str, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=20, **options)
    results = []
    for overlap in (False, True):
        llm = engine(checkpoint, overlap, max_num_seqs=4, max_num_batched_tokens=24)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        results.append([(output.prompt_logprobs, output.outputs) for output in outputs])
        stats = llm.engine.core.stats
        assert stats.num_running == stats.num_waiting == 0 and stats.kv_cache_usage == 0
    assert results[0] == results[1]


def test_an_abort_leaves_nothing_under_way(checkpoint: str) -> None:
    llm = engine(checkpoint, trace=True)
    events = watch(llm)
    llm.engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    assert llm.engine.step() == []  # the news come a step later
    assert len(llm.engine.step()) == 1
    llm.engine.abort_request("a")
    assert events == ["launch 0", "launch 1", "wait 0", "wait 1"] and not llm.engine.has_unfinished
    steps = list(llm.trace or [])
    assert [step.step for step in steps] == [0, 1, 2] and steps[2].finished == {"a": "abort"}


def test_an_aborted_id_is_free_although_its_last_step_is_in_flight(checkpoint: str) -> None:
    """The second request of that id gets its own tokens only."""
    llm = engine(checkpoint)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0].token_ids
    for name in "ab":
        llm.engine.add_request(name, PROMPTS[0], params)
    llm.engine.step()
    with pytest.raises(ValueError, match="in use"):
        llm.engine.add_request("a", PROMPTS[1], params)
    llm.engine.abort_request("a")
    llm.engine.add_request("a", PROMPTS[1], params)
    found: list[int] = []
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            if output.request_id == "a":
                found += output.outputs[0].token_ids
    assert found == expected


def test_steps_of_a_trace_follow_one_another(checkpoint: str) -> None:
    """Although a step is launched before the last one has ended, it begins where that one ends."""
    llm = engine(checkpoint, trace=True)
    llm.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False
    )
    steps = list(llm.trace or [])
    assert len(steps) == 6 and all(step.duration > 0 for step in steps)
    for before, after in pairwise(steps):
        assert after.start >= before.start + before.duration - 1e-9


def test_an_end_is_told_although_no_step_follows(checkpoint: str) -> None:
    llm = engine(checkpoint, trace=True)
    for name, count in (("a", 3), ("b", 50)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        llm.engine.add_request(name, PROMPTS[0], params)
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort_request("b")
    llm.engine.step()  # takes what is under way: the last token of a
    assert not llm.engine.has_unfinished
    ends = {
        request_id: reason
        for step in llm.trace or []
        for request_id, reason in step.finished.items()
    }
    assert ends == {"a": "length", "b": "abort"}


def test_an_abort_that_breaks_off_leaves_a_sound_engine(checkpoint: str) -> None:
    llm = engine(checkpoint)
    launch = llm.engine.core.runner.launch

    def breaks(plan: Any) -> Any:
        launch(plan)

        def wait() -> Any:
            raise KeyboardInterrupt

        return wait

    llm.engine.core.runner.launch = breaks  # type: ignore[method-assign]
    llm.engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=50))
    llm.engine.step()
    with pytest.raises(KeyboardInterrupt):
        llm.engine.abort_request("a")
    llm.engine.core.runner.launch = launch  # type: ignore[method-assign]
    llm.engine.add_request(
        "a", PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
    tokens = []
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            tokens += output.outputs[0].token_ids
    fresh = engine(checkpoint).generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False
    )
    assert tokens == fresh[0].outputs[0].token_ids
