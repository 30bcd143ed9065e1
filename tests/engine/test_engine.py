"""The engine from prompt to answer: the LLM API, aborts in every state, traces, settings."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.assembly.flags import add_flags, choices_of, flags_of, read_flags
from nanovllm.attention.backends import BACKENDS
from nanovllm.core.request import RequestStatus
from nanovllm.data.config import EngineConfig, parse_bytes, token_count
from nanovllm.data.outputs import OutputCollector, RequestOutput
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.ops.device import choose_dtype
from nanovllm.text.processor import OutputProcessor, RequestState
from nanovllm.trace.trace import Trace, TraceError
from tests.oracle import greedy, make_checkpoint, reference_model, reference_tokens
from tests.stand_ins import set_hub

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, skip_special_tokens=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> LLM:
    """One engine for tests that leave nothing behind."""
    return engine(checkpoint)


def engine(checkpoint: str, **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "max_model_len": 128,
        "num_kv_blocks": 64,
        "attention_backend": "torch",
    }
    return LLM(checkpoint, **(defaults | {"check_invariants": True, "trace": True} | options))


def prompt(length: int, first: int = 3) -> list[int]:
    return [3 + (first + 7 * i) % 300 for i in range(length)]


def ask(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    """Generate, and see that nothing is left behind."""
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    assert_nothing_left(llm)
    return outputs


def assert_nothing_left(llm: LLM) -> None:
    core = llm.engine.core
    assert not llm.engine.has_unfinished and not core.scheduler.queues.requests
    assert not llm.engine.output_processor.requests and not llm.engine.output_processor._owners
    assert core.manager.pool.num_free == core.manager.pool.num_blocks
    assert not core.manager.tables and not core.manager.host_tables


# ---------------------------------------------------------------- prompts and their order


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [9, 1, 5, 2, 7]
    params = [GREEDY.clone(max_tokens=count) for count in lengths]
    outputs = ask(llm, [prompt(10 + i, i) for i in range(5)], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.prompt_token_ids for o in outputs] == [prompt(10 + i, i) for i in range(5)]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_a_prompt_may_be_text_ids_or_a_dictionary(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    both = {"prompt": "the ids count", "prompt_token_ids": ids}
    for form in ("hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}, both):
        (output,) = ask(llm, form)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == ask(llm, ["hello"])[0].outputs[0].token_ids
    assert ask(llm, "hello")[0].prompt == "hello" and ask(llm, ids)[0].prompt is None
    assert ask(llm, []) == []


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("", "empty"),
        ([], "empty"),
        ([320], "vocabulary"),
        ([-1], "vocabulary"),
        ([3.0], "must be text, token ids"),
        ([True], "must be text, token ids"),
        ({"text": "hello"}, "prompt_token_ids"),
        ({"prompt": "", "cache_salt": "salt"}, "empty"),
        ({"prompt_token_ids": [], "prompt": "hello"}, "empty"),
        ({"prompt_token_ids": None, "prompt": "hello"}, "must be text, token ids"),
        ({"prompt_token_ids": 7}, "must be text, token ids"),
        (7, "must be text, token ids"),
        ([3] * 128, "context length is 128 tokens.*leaves no room"),
        ("half of a pair: \ud83d", "Unicode"),
    ],
)
def test_a_bad_prompt_leaves_nothing_behind(llm: LLM, bad: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        llm.generate([prompt(10), bad, prompt(5)], GREEDY, use_tqdm=False)
    assert_nothing_left(llm)


@pytest.mark.parametrize("changes", [{"stop_token_ids": [320]}, {"logit_bias": {5000: 1.0}}])
def test_token_ids_in_parameters_are_checked(llm: LLM, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        llm.generate(["hello"], GREEDY.clone(**changes), use_tqdm=False)
    assert_nothing_left(llm)


def test_lists_of_different_lengths_are_refused(llm: LLM) -> None:
    for options in (
        {"sampling_params": [GREEDY]},
        {"sampling_params": GREEDY, "priority": [1, 2, 3]},
    ):
        with pytest.raises(ValueError, match="one for all or one per prompt"):
            llm.generate(["a", "b"], use_tqdm=False, **options)
    assert_nothing_left(llm)


def test_chat_is_generate_through_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = "<user>hi\n<assistant>"
    (answer,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == llm.get_tokenizer().encode(text)
    both = llm.chat([chat, [{"role": "user", "content": "ho"}]], GREEDY, use_tqdm=False)
    assert len(both) == 2 and both[0].outputs[0].token_ids == answer.outputs[0].token_ids
    assert_nothing_left(llm)


def test_chat_hands_variables_to_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"chat_template": "{{ mood }}!", "use_tqdm": False}
    (answer,) = llm.chat(chat, GREEDY, chat_template_kwargs={"mood": "glad"}, **options)
    assert answer.prompt_token_ids == llm.get_tokenizer().encode("glad!")
    with pytest.raises(
        TypeError, match="multiple values for keyword argument 'add_generation_prompt'"
    ):
        llm.chat(chat, GREEDY, chat_template_kwargs={"add_generation_prompt": False}, **options)
    assert_nothing_left(llm)


def test_the_revision_is_that_of_the_model(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return checkpoint

    set_hub(monkeypatch, download)
    engine("some/model", revision="v1")
    engine("some/model", revision="v1", tokenizer="some/tokenizer")
    assert asked == [*[("some/model", "v1")] * 3, ("some/tokenizer", None)]


def test_cache_salt_isolates(checkpoint: str) -> None:
    llm = engine(checkpoint)
    salted = [
        {"prompt_token_ids": prompt(50), "cache_salt": salt}
        for salt in (None, "one", "two", "one", "two", None)
    ]
    outputs = [ask(llm, p)[0] for p in salted]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 0, 48, 48, 48]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    llm.reset_prefix_cache()
    assert ask(llm, salted[0])[0].num_cached_tokens == 0


def test_priority_decides_who_runs_first(checkpoint: str) -> None:
    for policy, levels, order in (
        ("priority", [1, 1, -1], [2, 0, 1]),
        ("fcfs", [0, 0, 0], [0, 1, 2]),
    ):
        llm = engine(checkpoint, scheduling_policy=policy, max_num_seqs=1)
        ask(llm, [prompt(5, i) for i in range(3)], priority=levels)
        assert [int(request_id) for step in llm.trace for request_id in step.admitted] == order
    with pytest.raises(
        ValueError, match="priority must be 0 without --scheduling-policy priority, got -1"
    ):
        ask(llm, [prompt(5, i) for i in range(3)], priority=[0, -1, 0])
    assert_nothing_left(llm)


# ---------------------------------------------------------------- sampling


def test_n_completions_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=10, ignore_eos=True, temperature=1.5)
    first, again = ask(llm, prompt(20), params)[0], ask(llm, prompt(20), params)[0]
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    tokens = [c.token_ids for c in first.outputs]
    assert len({tuple(t) for t in tokens}) == 4
    assert tokens == [c.token_ids for c in again.outputs]
    # A completion is what the same seed gives alone, whatever is beside it.
    assert ask(llm, prompt(20), params.clone(n=1, seed=13))[0].outputs[0].token_ids == tokens[2]


def test_n_sequences_share_the_blocks_of_the_prompt(checkpoint: str) -> None:
    llm = engine(checkpoint)
    ask(llm, prompt(65), GREEDY.clone(n=4, max_tokens=2))
    first = next(iter(llm.trace))
    assert list(first.admitted.values()) == [0, 64, 64, 64] and first.num_tokens == 65 + 3
    assert first.num_blocks - first.num_free_blocks == 4 + 4


def test_requests_without_a_seed_differ_and_a_run_repeats(checkpoint: str) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.5)
    runs = []
    for seed in (5, 5, 6):
        outputs = ask(engine(checkpoint, seed=seed), [prompt(9)] * 3, params)
        runs.append([tuple(o.outputs[0].token_ids) for o in outputs])
    assert len(set(runs[0])) == 3 and runs[0] == runs[1] != runs[2]


def test_largest_and_smallest_seeds(llm: LLM) -> None:
    for seed in (2**63 - 1, -(2**63), 0, -1):
        outputs = ask(
            llm,
            prompt(4),
            SamplingParams(n=3, seed=seed, max_tokens=6, ignore_eos=True, temperature=2.0),
        )
        assert len({tuple(c.token_ids) for c in outputs[0].outputs}) == 3


def test_default_parameters_come_from_the_checkpoint(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps(
            {
                "eos_token_id": [2, 9],
                "temperature": 0.25,
                "top_k": 7,
                "do_sample": True,
                "max_length": 20,
            }
        )
    )
    llm = engine(str(folder))
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 16)
    assert llm.engine.core.limits.eos_token_ids == [2, 9]
    assert len(ask(llm, prompt(5), None)[0].outputs[0].token_ids) <= 16
    own = engine(str(folder), generation_config="vllm")
    assert own.get_default_sampling_params() == SamplingParams()
    assert own.engine.core.limits.eos_token_ids == [2, 9], (
        "the ends of a text are no sampling parameters"
    )


def test_names_that_do_not_exist_are_answered_with_similar_ones(checkpoint: str) -> None:
    wrong: list[tuple[Callable[..., object], str, str]] = [
        (
            LLM,
            "temprature",
            (
                r"LLM\(\) has no argument 'temprature'; did you mean"
                r" SamplingParams\(temperature=...\)\?"
            ),
        ),
        (LLM, "top_p", r"did you mean SamplingParams\(top_p=...\)\?"),
        (LLM, "max_model_length", r"did you mean max_model_len\?"),
        (LLM, "kvcache_block_size", r"did you mean block_size\?"),
        (LLM, "num_kvcache_blocks", r"did you mean num_kv_blocks\?"),
        (LLM, "xyzzy", r"LLM\(\) has no argument 'xyzzy'$"),
        (
            SamplingParams,
            "temprature",
            r"SamplingParams\(\) has no argument 'temprature'; did you mean temperature\?",
        ),
        (EngineConfig, "blocksize", r"did you mean block_size\?"),
    ]
    for create, name, message in wrong:
        with pytest.raises(TypeError, match=message):
            create(**{name: 1})
    with pytest.raises(ValueError, match=r"'kv_rol'; did you mean kv_role\?"):
        EngineConfig(kv_transfer_config={"kv_rol": "both"})  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.5, stop=["x"])
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params.clone() == params


def test_the_package_lists_its_public_names() -> None:
    assert dir(nanovllm) == ["AsyncEngine", "EngineConfig", "LLM", "SamplingParams", "__version__"]


# ---------------------------------------------------------------- the end of a text


@pytest.fixture(scope="module")
def long_text(llm: LLM) -> list[int]:
    """Greedy tokens in which 20 is late and new: a place to stop at."""
    tokens = greedy(llm, [prompt(20)], 40)[0]
    assert len(set(tokens)) > 10
    return tokens


def late_token(tokens: list[int]) -> int:
    """Position, at least 4, of a token that comes there for the first time."""
    return next(i for i in range(4, len(tokens)) if tokens[i] not in tokens[:i])


def test_stop_token_ids(llm: LLM, long_text: list[int]) -> None:
    at = late_token(long_text)
    params = GREEDY.clone(max_tokens=40, stop_token_ids=[long_text[at]])
    out = ask(llm, prompt(20), params)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (
        long_text[: at + 1],
        "stop",
        long_text[at],
    )
    tokenizer = llm.get_tokenizer()
    assert out.text == tokenizer.decode(long_text[:at], skip_special_tokens=False)
    kept = ask(llm, prompt(20), params.clone(include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == tokenizer.decode(long_text[: at + 1], skip_special_tokens=False)


def test_min_tokens_passes_over_a_stop_token(llm: LLM, long_text: list[int]) -> None:
    at = late_token(long_text)
    params = GREEDY.clone(max_tokens=40, stop_token_ids=[long_text[at]], min_tokens=at + 3)
    out = ask(llm, prompt(20), params)[0].outputs[0]
    assert out.token_ids[:at] == long_text[:at] and len(out.token_ids) >= at + 3
    assert long_text[at] not in out.token_ids[: at + 2]


def test_eos_and_ignore_eos(tmp_path: pathlib.Path, long_text: list[int]) -> None:
    at = late_token(long_text)
    folder = make_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, long_text[at]]}))
    llm = engine(str(folder))
    params = GREEDY.clone(max_tokens=40, ignore_eos=False)
    out = ask(llm, prompt(20), params)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (
        long_text[: at + 1],
        "stop",
        None,
    )
    assert out.token_ids == reference_tokens(str(folder), prompt(20), 40, (2, long_text[at]))
    assert ask(llm, prompt(20), params.clone(ignore_eos=True))[0].outputs[0].token_ids == long_text


def test_stop_string_is_noticed_on_the_last_allowed_token(llm: LLM) -> None:
    text = ask(llm, prompt(20), GREEDY.clone(max_tokens=12))[0].outputs[0].text
    out = ask(llm, prompt(20), GREEDY.clone(max_tokens=12, stop=[text[-2:]]))[0].outputs[0]
    cut = text.index(text[-2:])
    assert (out.text, out.finish_reason, out.stop_reason) == (text[:cut], "stop", text[-2:])


def test_what_was_held_back_comes_when_the_length_runs_out(llm: LLM) -> None:
    text = ask(llm, prompt(20), GREEDY.clone(max_tokens=12))[0].outputs[0].text
    out = ask(llm, prompt(20), GREEDY.clone(max_tokens=12, stop=[text[-2:] + "never"]))[0].outputs[
        0
    ]
    assert (out.text, out.finish_reason) == (text, "length")


def test_max_tokens_none_goes_on_to_the_context_length(llm: LLM) -> None:
    out = ask(llm, prompt(100), GREEDY.clone(max_tokens=None))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (28, "length")


# ---------------------------------------------------------------- log-probabilities


@torch.inference_mode()
def true_logprobs(checkpoint: str, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1, vocabulary]: row i predicts token i + 1."""
    return reference_model(checkpoint)(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


LOGPROB_OPTIONS = [
    {},
    {"long_prefill_token_threshold": 7},
    {"num_kv_blocks": 12},
    {"num_kv_blocks": 12, "preemption_mode": "swap", "swap_space": 0.01},
    {"num_kv_blocks": 12, "max_num_batched_tokens": 9, "max_num_seqs": 8},
]


@pytest.mark.parametrize("options", LOGPROB_OPTIONS, ids=str)
def test_logprobs_of_prompt_and_output(checkpoint: str, options: dict[str, Any]) -> None:
    llm = engine(checkpoint, **options)
    params = GREEDY.clone(n=3, max_tokens=30, logprobs=2, prompt_logprobs=3)
    outputs = ask(llm, [prompt(40), prompt(33, 5)], params)
    if "num_kv_blocks" in options:
        assert llm.engine.core.stats.num_preemptions > 0
    for output in outputs:
        ids = output.prompt_token_ids
        assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
        for completion in output.outputs:
            assert len(completion.logprobs) == len(completion.token_ids) == 30
            want = true_logprobs(checkpoint, ids + completion.token_ids)
            told = output.prompt_logprobs[1:] + completion.logprobs
            for row, token, position in zip(
                want, ids[1:] + completion.token_ids, told, strict=True
            ):
                assert next(iter(position)) == token
                assert 2 <= len(position) <= 4
                assert (
                    max(abs(row[t].item() - entry.logprob) for t, entry in position.items()) < 1e-3
                )
            total = sum(
                p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)
            )
            assert completion.cumulative_logprob == pytest.approx(total)


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    output = ask(llm, prompt(5))[0]
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    zero = ask(llm, prompt(5), GREEDY.clone(logprobs=0))[0].outputs[0]
    assert all(
        list(position) == [token]
        for position, token in zip(zero.logprobs, zero.token_ids, strict=True)
    )


# ---------------------------------------------------------------- one step at a time


def test_pieces_join_to_the_whole(llm: LLM) -> None:
    want = ask(llm, prompt(20), GREEDY.clone(n=2, max_tokens=9, logprobs=1))[0]
    llm.engine.add_request("r", prompt(20), GREEDY.clone(n=2, max_tokens=9, logprobs=1))
    collector, pieces = OutputCollector(), 0
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            collector.add(output)
            pieces += 1
    got = collector.result()
    assert pieces == 18 and got.outputs == want.outputs and got.finished
    assert_nothing_left(llm)


def test_an_id_in_use_is_refused_and_disturbs_nobody(llm: LLM) -> None:
    want = [c.token_ids for c in ask(llm, prompt(20), GREEDY.clone(n=2))[0].outputs]
    llm.engine.add_request("new", prompt(20), GREEDY.clone(n=2))
    for request_id in ("new", "new-0", "new-1"):
        with pytest.raises(ValueError, match=f"'{request_id}"):
            llm.engine.add_request(request_id, prompt(7), GREEDY)
    collector = OutputCollector()
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            assert output.request_id == "new"
            collector.add(output)
    assert [c.token_ids for c in collector.result().outputs] == want
    assert_nothing_left(llm)


def test_generate_beside_a_request_of_somebody_else(llm: LLM) -> None:
    llm.engine.add_request("other", prompt(30), GREEDY)
    (output,) = ask(llm, prompt(20))
    assert output.outputs[0].token_ids == greedy(llm, [prompt(20)], 8)[0]


def test_output_processor_passes_over_what_is_gone(llm: LLM) -> None:
    processor = OutputProcessor(llm.get_tokenizer(), RequestState)
    text, requests = llm.engine.input_processor.process("r", "hello", GREEDY)
    state = processor.add("r", text, requests)
    assert processor.owner("r") is state is processor.requests["r"]
    assert (
        processor.remove("r") == ["r"]
        and processor.remove("r") == []
        and processor.owner("r") is None
    )


# ---------------------------------------------------------------- aborts and errors

STATES = {
    "waiting": {"max_num_seqs": 1},
    "mid-prefill": {"long_prefill_token_threshold": 8},
    "running": {},
    "swapped": {
        "num_kv_blocks": 7,
        "max_model_len": 112,
        "preemption_mode": "swap",
        "swap_space": 0.01,
    },
    "preempted": {"num_kv_blocks": 7, "max_model_len": 112},
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("n", [1, 2])
def test_abort_in_every_state(checkpoint: str, state: str, n: int) -> None:
    llm = engine(checkpoint, **STATES[state])
    params = GREEDY.clone(max_tokens=40)
    llm.engine.add_request("stays", prompt(30), params)
    llm.engine.add_request("goes", prompt(40, 9), params.clone(n=n))
    scheduler = llm.engine.core.scheduler

    def reached() -> bool:
        request = scheduler.queues.requests["goes" if n == 1 else "goes-1"]
        return {
            "waiting": request.status is RequestStatus.WAITING and request.num_preemptions == 0,
            "mid-prefill": 0 < request.num_computed_tokens < request.num_prompt_tokens,
            "running": request.status is RequestStatus.RUNNING and request.num_output_tokens > 3,
            "swapped": request.status is RequestStatus.SWAPPED,
            "preempted": request.status is RequestStatus.WAITING and request.num_preemptions > 0,
        }[state]

    tokens: list[int] = []
    while not reached():
        tokens += [
            t for o in llm.engine.step() if o.request_id == "stays" for t in o.outputs[0].token_ids
        ]
    llm.engine.abort_request("goes")
    llm.engine.abort_request("goes")  # a second time does nothing
    assert list(scheduler.queues.requests) == ["stays"]
    held = llm.engine.core.manager.tables
    assert set(held) <= {"stays"} and not llm.engine.core.manager.host_tables
    pool = llm.engine.core.manager.pool
    assert pool.num_blocks - pool.num_free == len(held.get("stays", []))
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            assert output.request_id == "stays"
            tokens += output.outputs[0].token_ids
    assert tokens == reference_tokens(checkpoint, prompt(30), 40)
    assert_nothing_left(llm)
    ends = {
        request_id: reason for step in llm.trace for request_id, reason in step.finished.items()
    }
    assert (
        ends["stays"] == "length" and [r for i, r in ends.items() if i != "stays"] == ["abort"] * n
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "async"])
def test_a_step_that_breaks_off_leaves_a_sound_engine(
    checkpoint: str, error: type[BaseException], where: str, overlap: bool
) -> None:
    """What the step was to write is never found in the prefix cache, and the runner has forgotten
    everybody."""
    llm = engine(checkpoint, async_scheduling=overlap)
    runner, calls = llm.engine.core.runner, []
    launch = runner.launch

    def breaks(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 1 and where == "before":
            raise error
        wait = launch(plan)

        def broken() -> Any:
            for cache in runner.kv_caches:
                cache.fill_(3.0)
            raise error

        return broken if len(calls) == 2 else wait

    runner.launch = breaks
    with pytest.raises(error):
        llm.generate([prompt(50), prompt(20, 9)], GREEDY, use_tqdm=False)
    assert_nothing_left(llm)
    runner.launch = launch
    outputs = ask(llm, [prompt(50), prompt(20, 9)])
    assert [o.num_cached_tokens for o in outputs] == [0, 0]
    assert [o.outputs[0].token_ids for o in outputs] == [
        reference_tokens(checkpoint, p, 8) for p in (prompt(50), prompt(20, 9))
    ]
    assert "error" in {reason for step in llm.trace for reason in step.finished.values()}


def test_stats_count(checkpoint: str) -> None:
    llm = engine(checkpoint, max_num_seqs=2)
    for i in range(3):
        llm.engine.add_request(str(i), prompt(20, i), GREEDY)
    llm.engine.step()
    stats = llm.engine.core.stats
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.num_steps) == (
        2,
        1,
        0,
        1,
    )
    assert stats.kv_cache_usage == 4 / 64 and stats.num_queried_tokens == 40
    for i in range(3):
        llm.engine.abort_request(str(i))
    assert_nothing_left(llm)
    assert llm.engine.core.stats.kv_cache_usage == 0 and llm.engine.core.step() == []


# ---------------------------------------------------------------- traces


@pytest.fixture(scope="module")
def lively(checkpoint: str) -> Trace:
    """Preemption by swap, prefix hits, a stop string."""
    llm = engine(checkpoint, num_kv_blocks=9, preemption_mode="swap", swap_space=0.01)
    ask(llm, [prompt(30, i % 3) for i in range(5)], GREEDY.clone(max_tokens=40))
    assert any(s.swap_out for s in llm.trace) and any(
        s.admitted and max(s.admitted.values()) for s in llm.trace
    )
    return llm.trace


def test_trace_round_trip(lively: Trace, tmp_path: pathlib.Path) -> None:
    lively.save(tmp_path / "trace.jsonl")
    loaded = Trace.load(tmp_path / "trace.jsonl")
    assert loaded.steps == lively.steps and loaded.settings == lively.settings
    assert loaded.settings.num_blocks == 9 and len(loaded) == len(list(lively))


def test_trace_file_is_written_step_by_step(checkpoint: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.jsonl"
    llm = engine(checkpoint, trace=str(path))
    ask(llm, prompt(20))
    assert len(Trace.load(path)) == 8 and len(llm.trace) == 0, (
        "what goes to a file is not kept in memory"
    )
    llm.engine.core.close()
    empty = tmp_path / "empty.jsonl"
    Trace(empty, TraceSettings(block_size=4)).close()
    assert len(Trace.load(empty)) == 0 and Trace.load(empty).settings == TraceSettings(block_size=4)


def test_a_trace_may_be_any_path(checkpoint: str, tmp_path: pathlib.Path) -> None:
    llm = engine(checkpoint, trace=tmp_path / "run.jsonl")
    ask(llm, prompt(20))
    assert len(Trace.load(tmp_path / "run.jsonl")) == 8


def test_ends_after_the_last_step_are_in_the_trace(checkpoint: str, tmp_path: pathlib.Path) -> None:
    """A stop string and an abort are noticed after a step, and no other step may ever come to tell
    of them."""
    path = tmp_path / "run.jsonl"
    llm = engine(checkpoint, trace=path)
    (answer,) = engine(checkpoint).generate(prompt(20), GREEDY, use_tqdm=False)
    ask(llm, [prompt(20)] * 2, GREEDY.clone(stop=answer.outputs[0].text[2]))
    *steps, end = Trace.load(path).steps
    assert end.finished == {"0": "stop", "1": "stop"} and not any(step.finished for step in steps)
    assert (end.requests, end.duration, end.step) == ([], 0.0, len(steps)) and end.start > steps[
        -1
    ].start
    assert (end.running, end.num_free_blocks) == ([], 64)
    llm.engine.add_request("never seen", prompt(20), GREEDY)
    llm.engine.abort_request("never seen")
    end = Trace.load(path).steps[-1]
    assert (end.arrived, end.finished) == ({"never seen": 20}, {"never seen": "abort"})
    ask(llm, prompt(20))
    records = Trace.load(path)
    assert [r.step for r in records if r.requests] == list(range(llm.engine.core.num_steps))
    records.to_perfetto(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert sum(e["name"].startswith("step ") for e in events) == llm.engine.core.num_steps


def test_closing_writes_the_ends_of_a_step_that_broke_off(
    checkpoint: str, tmp_path: pathlib.Path
) -> None:
    llm = engine(checkpoint, trace=tmp_path / "run.jsonl")

    def breaks(plan: Any) -> Any:
        raise RuntimeError

    llm.engine.core.runner.launch = breaks
    with pytest.raises(RuntimeError):
        ask(llm, prompt(20))
    llm.engine.core.close()
    (end,) = Trace.load(tmp_path / "run.jsonl").steps
    assert (end.arrived, end.finished) == ({"0": 20}, {"0": "error"})


def test_a_file_that_is_no_trace(lively: Trace, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    foreign = [
        b"",
        b"{}\n",
        b"[1]\n",
        b"7\n",
        b'"nanovllm_trace"\n',
        b"\xff\xfe\x00",
        b"step,start\n0,1\n",
    ]
    for content in foreign:
        path.write_bytes(content)
        with pytest.raises(TraceError, match="not a nanovllm trace"):
            Trace.load(path)
    path.write_text('{"nanovllm_trace": 99, "settings": {}}\n')
    with pytest.raises(TraceError, match="version 99"):
        Trace.load(path)
    lively.save(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:40])
    with pytest.raises(TraceError, match=r"line 4.*cut off"):
        Trace.load(path)
    path.write_bytes(lines[0] + b'\n{"step": "first"}\n')
    with pytest.raises(TraceError, match="line 2"):
        Trace.load(path)


def test_perfetto_export(lively: Trace, tmp_path: pathlib.Path) -> None:
    lively.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    by_kind = {kind: [e for e in events if e["ph"] == kind] for kind in "XiCM"}
    assert sum(map(len, by_kind.values())) == len(events)
    assert len(by_kind["X"]) == len(lively) + sum(len(s.requests) for s in lively)
    preemptions = [e for e in by_kind["i"] if e["name"].startswith("preempted")]
    assert len(preemptions) == sum(len(s.preempted) for s in lively) > 0
    assert len(by_kind["C"]) == 4 * len(lively)
    track_names = [e for e in by_kind["M"] if e["name"] == "thread_name"]
    assert {e["args"]["name"] for e in track_names} == {"engine", "0", "1", "2", "3", "4"}
    assert all(e["ts"] >= 0 and e["dur"] > 0 for e in by_kind["X"])
    names = {e["tid"]: e["args"]["name"] for e in track_names}
    decodes = [e for e in by_kind["X"] if e["name"].startswith("decode")]
    assert all(e["name"] == "decode 1" and names[e["tid"]] != "engine" for e in decodes) and decodes


# ---------------------------------------------------------------- settings

BAD_SETTINGS = [
    *[
        (name, value)
        for name in ("block_size", "max_num_seqs")
        for value in (0, -1, 1.5, True, "8", None)
    ],
    *[
        (name, value)
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks")
        for value in (0, -2, 2.0, True, "8")
    ],
    *[("max_num_waiting", value) for value in (-1, 0.5, "0")],
    *[("long_prefill_token_threshold", value) for value in (-1, None)],
    *[("gpu_memory_utilization", value) for value in (0, -0.1, 1.01, float("nan"), "0.9", True)],
    *[("max_step_ms", value) for value in (-1, -0.5, float("nan"), float("inf"), "200", True)],
    *[("swap_space", value) for value in (-1, float("nan"), float("inf"), "4", None)],
    *[
        ("kv_cache_memory", value)
        for value in ("", "4 GX", "-1GB", "0", "nan", "inf", "much", True)
    ],
    *[("seed", value) for value in (None, 1.0, "0", True)],
    *[
        (name, value)
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "check_invariants")
        for value in (0, 1, None, "no")
    ],
    *[
        (name, value)
        for name in (*choices_of(EngineConfig),)
        for value in ("nonsense", None, "", 1, choices_of(EngineConfig)[name][0].upper())
    ],
]


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_every_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"):
        EngineConfig(max_num_batched_tokens=8, max_num_seqs=9)
    with pytest.raises(ValueError, match=r"max_model_len \(300\).*256"):
        EngineConfig(max_model_len=300).check_limits(256, 100)
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=64, max_num_seqs=4)
    with pytest.raises(ValueError, match="longest request"):
        config.check_limits(256, 100)


@pytest.mark.parametrize(
    ("options", "blocks", "message"),
    [
        (
            {"max_model_len": 200},
            12,
            (
                "200 tokens needs 13 KV blocks, and the pool has 12 .192 tokens.: raise "
                "kv_cache_memory"
            ),
        ),
        (
            {"max_model_len": 200, "num_kv_blocks": 12},
            12,
            "raise num_kv_blocks, or lower max_model_len to 192",
        ),
        # A prompt of one token, and 16 by default.
        ({}, 1, "one request of 17 tokens needs 2 KV blocks"),
        ({"block_size": 4}, 4, "needs 5 KV blocks"),
    ],
)
def test_a_pool_too_small_for_one_request_is_refused(
    options: dict[str, Any], blocks: int, message: str
) -> None:
    config = EngineConfig(**options)
    with pytest.raises(ValueError, match=message):
        config.check_limits(256, blocks)
    config.check_limits(256, blocks + 1)
    config.check_limits(256, None)


def test_swapping_needs_swap_space(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="raise swap_space above 0"):
        EngineConfig(preemption_mode="swap", swap_space=0)
    with pytest.raises(ValueError, match=r"swap_space .* smaller than one KV block"):
        engine(checkpoint, preemption_mode="swap", swap_space=1e-9)
    assert EngineConfig(swap_space=0).swap_space == 0, "without swapping it is not needed"


def test_attention_backends_are_those_that_exist() -> None:
    assert choices_of(EngineConfig)["attention_backend"] == ("auto", *BACKENDS)
    message = "must be one of auto, torch, cpu, triton, triton_simple, got 'flash'"
    with pytest.raises(ValueError, match=message):
        EngineConfig(attention_backend="flash")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("float", torch.float32)])
def test_other_names_of_dtypes(name: Any, dtype: torch.dtype) -> None:
    assert choose_dtype(EngineConfig(dtype=name).dtype, torch.device("cpu")) is dtype


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        (" 25.6k ", 25600),
        ("1.001k", 1001),
        ("1m", 10**6),
        ("2M", 2**21),
    ],
)
def test_token_count(text: str, expected: int) -> None:
    assert token_count(text) == expected


@pytest.mark.parametrize("text", ["", "k", "8kB", "8.5", "8 k", "x"])
def test_what_is_no_token_count(text: str) -> None:
    with pytest.raises(ValueError, match="8K"):
        token_count(text)


@pytest.mark.parametrize("flag", ["--max-model-len", "--max-num-batched-tokens"])
def test_token_counts_on_the_command_line(flag: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(EngineConfig, parser)
    parsed = parser.parse_args([flag, "8K"])
    assert getattr(read_flags(EngineConfig, parsed), flag[2:].replace("-", "_")) == 8192


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        (1024, 1024),
        ("512MiB", 2**29),
        ("512mib", 2**29),
        (" 4 GB ", 4 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("2G", 2 * 2**30),
        ("7k", 7 * 1024),
        ("7kB", 7000),
        ("3B", 3),
        ("1TiB", 2**40),
        ("1e9", 10**9),
    ],
)
def test_parse_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text, "size") == expected


OTHER_VALUES: dict[str, Any] = {
    "eplb_config": '{"step_interval": 100}',
    "structured_outputs_config": '{"disable_any_whitespace": true}',
    "model": "some/model",
    "tokenizer": "some/tokenizer",
    "served_model_name": ["short", "long"],
    "revision": "main",
    "seed": -4,
    "max_model_len": 333,
    "block_size": 8,
    "num_kv_blocks": 77,
    "kv_cache_memory": "512MiB",
    "gpu_memory_utilization": 0.25,
    "swap_space": 2.5,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 4096,
    "long_prefill_token_threshold": 12,
    "max_num_waiting": 0,
    "trace": "trace.jsonl",
    "attention_backend": "torch",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "kv_connector": "local",
    "kv_offloading_size": 0.5,
    "max_step_ms": 75.5,
    "kv_transfer_config": '{"kv_connector": "local", "engine_id": "one"}',
    "sleep_config": '{"machine": "H100"}',
    "speculative_config": '{"method": "ngram"}',
}


# What makes sense only together with others.
COMPANIONS = {
    "enable_eplb": ["enable_expert_parallel"],
    "eplb_config": ["enable_expert_parallel", "enable_eplb"],
}


@pytest.mark.parametrize("field", flags_of(EngineConfig), ids=lambda field: field.name)
def test_every_field_is_a_flag(field: dataclasses.Field) -> None:
    parser = argparse.ArgumentParser()
    add_flags(EngineConfig, parser)
    flag = "--" + field.name.replace("_", "-")
    if field.type in (bool, bool | None):
        value = not field.default
        arguments = [flag if value else flag.replace("--", "--no-")]
    else:
        choices = choices_of(EngineConfig).get(field.name)
        value = choices[-1] if choices else OTHER_VALUES[field.name]
        arguments = [flag, *value] if isinstance(value, list) else [f"{flag}={value}"]
    assert value != field.default
    companions = COMPANIONS.get(field.name, [])
    arguments += ["--" + name.replace("_", "-") for name in companions]
    device = {"device": "sleep"} if field.name == "sleep_config" else {}
    arguments += [f"--{name}={word}" for name, word in device.items()]
    parsed = read_flags(EngineConfig, parser.parse_args(arguments))
    expected = EngineConfig(**{field.name: value}, **dict.fromkeys(companions, True), **device)
    assert parsed == expected
    assert read_flags(EngineConfig, parser.parse_args([])) == EngineConfig()
    assert flag in parser.format_help()
