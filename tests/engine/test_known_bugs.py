"""Mistakes that other small engines make, each as a test under the name of what goes wrong there.

Ten of them are reports that were open in September 2026. `REPORTS` names each by its repository and
number, with the tests that would fail here if nanovllm made the same mistake."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.core.block_pool import BlockPool, InvariantError
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request
from nanovllm.data.request import EngineRequest
from tests.features.cuda_graphs.test_cuda_graphs import record_graphs
from tests.oracle import greedy, make_checkpoint, reference_model, reference_tokens

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


def engine(checkpoint: str, **options) -> LLM:
    defaults = {
        "dtype": "float32",
        "max_model_len": 128,
        "num_kv_blocks": 64,
        "check_invariants": True,
        "trace": True,
    }
    return LLM(checkpoint, **(defaults | options))


def prompt(length: int, first: int = 3) -> list[int]:
    return [3 + (first + 7 * i) % 300 for i in range(length)]


def request(request_id: str, tokens: list[int]) -> Request:
    return Request(EngineRequest(request_id, tokens, SamplingParams(max_tokens=8)))


# Report -> the tests of the same mistake.
REPORTS = {
    # The engine ends with an AssertionError when a decoding request finds no free KV block.
    "GeeeekExplorer/nano-vllm#274": [
        "test_memory_that_runs_out_in_mid_decode_preempts",
        "test_request_that_grows_to_the_end_of_the_pool_ends_with_length",
        "test_prompt_that_fills_the_pool_gets_its_token",
    ],
    # A preempted request finds its own blocks in the prefix cache, and its prefill indexes past the
    # block table.
    "GeeeekExplorer/nano-vllm#211": ["test_prefix_hit_after_preemption_keeps_the_output"],
    # A share that was computed before the prefix hit was known ends behind the prompt.
    "GeeeekExplorer/nano-vllm#233": ["test_share_begins_behind_the_hit_and_ends_with_the_tokens"],
    # Tensor parallelism takes the second prefill of a preempted request for a decode; and a prompt
    # that is cached as a whole schedules no token.
    "GeeeekExplorer/nano-vllm#144": [
        "test_ranks_prefill_a_preempted_request_again",
        "test_fully_cached_prompt_computes_its_last_token",
    ],
    # The block table that a CUDA graph has recorded is narrower than that of a request.
    "GeeeekExplorer/nano-vllm#106": ["test_graphs_hold_the_longest_block_table"],
    # A block that was given to another request is still found under its old hash.
    "GeeeekExplorer/nano-vllm#163": ["test_no_stale_hash_after_a_block_found_a_new_owner"],
    # Two prompts with the same prefix in one step are stored twice.
    "GeeeekExplorer/nano-vllm#219": ["test_two_equal_prompts_in_one_step_are_stored_once"],
    # Qwen3 does not load if rope_scaling is the dictionary that newer versions of transformers
    # write.
    "GeeeekExplorer/nano-vllm#189": ["test_rope_scaling_in_any_spelling_loads"],
    # A page that the radix cache frees as a duplicate is still in the page table of a running
    # request.
    "sgl-project/mini-sglang#142": ["test_freed_duplicate_page_stays_intact_for_the_other_table"],
    # stop, presence_penalty and frequency_penalty are ignored.
    "sgl-project/mini-sglang#121": [
        "test_stop_string_never_leaks_and_ends_with_stop",
        "test_penalties_are_followed",
    ],
}


def test_every_report_has_its_tests() -> None:
    for report, tests in REPORTS.items():
        assert tests and all(name in globals() for name in tests), report
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(REPORTS) == 10 and re.search(
        r"\[Ten reports\]\(tests/engine/test_known_bugs.py\)", readme
    )


def test_memory_that_runs_out_in_mid_decode_preempts(checkpoint: str) -> None:
    llm = engine(checkpoint, num_kv_blocks=9)
    batch = [prompt(30, i) for i in range(4)]
    assert greedy(llm, batch, 40) == [reference_tokens(checkpoint, p, 40) for p in batch]
    assert llm.engine.core.stats.num_preemptions > 0


def test_prompt_that_can_never_fit_is_refused_and_others_go_on(checkpoint: str) -> None:
    llm = engine(checkpoint, num_kv_blocks=4, max_model_len=None)
    with pytest.raises(ValueError, match=r"is 64 tokens on this.*raise --kv-cache-memory"):
        llm.generate([prompt(10), prompt(100)], use_tqdm=False)
    assert not llm.engine.has_unfinished
    with pytest.raises(ValueError, match="context length is 128 tokens"):
        engine(checkpoint).generate([prompt(128)], use_tqdm=False)
    assert greedy(llm, [prompt(10)], 8) == [reference_tokens(checkpoint, prompt(10), 8)]


def test_request_that_grows_to_the_end_of_the_pool_ends_with_length(checkpoint: str) -> None:
    llm = engine(checkpoint, num_kv_blocks=4, max_model_len=None)
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    out = llm.generate([prompt(50)], params, use_tqdm=False)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (14, "length")


@pytest.mark.parametrize("length", [62, 63])
def test_prompt_that_fills_the_pool_gets_its_token(checkpoint: str, length: int) -> None:
    """A pool of 64 slots: the prompt leaves room for one or two tokens, alone and with others in
    the queue."""
    llm = engine(checkpoint, num_kv_blocks=4, max_model_len=None)
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    for count in (1, 3):
        for output in llm.generate([prompt(length)] * count, params, use_tqdm=False):
            [out] = output.outputs
            assert (len(out.token_ids), out.finish_reason) == (64 - length, "length")
            assert out.token_ids == reference_tokens(checkpoint, prompt(length), 64 - length)
    assert llm.engine.core.manager.pool.num_free == 4


def test_long_prompt_does_not_stall_running_requests(checkpoint: str) -> None:
    llm = engine(checkpoint, max_num_batched_tokens=16, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.engine.add_request("decoding", prompt(5), params)
    llm.engine.step()
    llm.engine.add_request("long", prompt(100, 50), params)
    for _ in range(7):
        # The long prompt takes seven steps, and in each of them the other one gets its token.
        assert next(o.request_id for o in llm.engine.step() if o.outputs[0].token_ids) == "decoding"


def test_two_equal_prompts_in_one_step_are_stored_once(checkpoint: str) -> None:
    llm = engine(checkpoint)
    assert (
        greedy(llm, [prompt(40), prompt(40)], 8)
        == [reference_tokens(checkpoint, prompt(40), 8)] * 2
    )
    first = next(iter(llm.trace))
    assert list(first.admitted.values()) == [0, 32]
    assert first.requests[0].new_block_ids[:2] == first.requests[1].new_block_ids[:2]
    assert llm.engine.core.manager.pool.num_free == 64


def test_no_stale_hash_after_a_block_found_a_new_owner() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=4)
    old, new, again = (
        request("old", prompt(8)),
        request("new", prompt(8, 99)),
        request("again", prompt(8)),
    )
    for r in (old, new):
        assert manager.allocate_slots(r, 8, manager.get_computed_blocks(r))
        r.num_computed_tokens = 8
        manager.cache_blocks(r, 0)
        manager.free(r)
    assert manager.get_computed_blocks(again) == []


def test_freed_duplicate_page_stays_intact_for_the_other_table() -> None:
    """Two tables with equal content in different blocks: freeing one must not take the other's hash
    or block."""
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one, two = request("one", prompt(9)), request("two", prompt(9))
    for r in (one, two):  # admitted before either had published
        assert manager.allocate_slots(r, 9)
    for r in (one, two):
        r.num_computed_tokens = 9
        manager.cache_blocks(r, 0)
    manager.free(two)
    manager.check_invariants([one])
    assert manager.get_computed_blocks(request("three", prompt(9))) == manager.tables["one"][:2]


def test_double_free_is_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(InvariantError, match="freed twice"):
        pool.free_blocks(blocks)


@pytest.mark.parametrize("length", [16, 17, 32, 48])
def test_fully_cached_prompt_computes_its_last_token(checkpoint: str, length: int) -> None:
    llm = engine(checkpoint)
    want = [reference_tokens(checkpoint, prompt(length), 8)]
    assert greedy(llm, [prompt(length)], 8) == want
    assert greedy(llm, [prompt(length)], 8) == want
    again = next(step for step in llm.trace if step.step > 0 and step.admitted)
    assert list(again.admitted.values()) == [(length - 1) // 16 * 16] and again.num_tokens >= 1


def test_prefix_hit_after_preemption_keeps_the_output(checkpoint: str) -> None:
    """A preempted request finds its own blocks again, sampled tokens among them, and goes on where
    it was."""
    llm = engine(checkpoint, num_kv_blocks=9)
    batch = [prompt(40, i) for i in range(3)]
    assert greedy(llm, batch, 40) == [reference_tokens(checkpoint, p, 40) for p in batch]
    preempted = {request_id for step in llm.trace for request_id in step.preempted}
    hits = [
        step.admitted[r]
        for step in llm.trace
        for r in preempted
        if step.step > 0 and r in step.admitted
    ]
    assert preempted and max(hits) > 0


def test_share_begins_behind_the_hit_and_ends_with_the_tokens(checkpoint: str) -> None:
    """Many requests with a common prefix in a small pool, so that some are preempted and find their
    blocks again."""
    llm = engine(checkpoint, num_kv_blocks=12, max_num_seqs=16, max_num_batched_tokens=40)
    batch = [prompt(32) + prompt(3 + i, 90 + i) for i in range(16)]
    assert greedy(llm, batch, 24) == [reference_tokens(checkpoint, p, 24) for p in batch]
    num_again = 0
    for step in llm.trace:
        for share in step.requests:
            hit = step.admitted.get(share.request_id)
            if hit is not None:
                assert share.start == hit
                num_again += hit > 0 and step.step > 0
            end = share.start + share.num_tokens
            assert end <= len(batch[int(share.request_id)]) + 24
    assert num_again > 16 and llm.engine.core.stats.num_preemptions > 0


def test_ranks_prefill_a_preempted_request_again(checkpoint: str) -> None:
    options = {"distributed_executor_backend": "mp", "attention_backend": "torch", "trace": False}
    llm = engine(checkpoint, num_kv_blocks=9, tensor_parallel_size=2, **options)
    batch = [prompt(30, i) for i in range(4)]
    assert greedy(llm, batch, 40) == [reference_tokens(checkpoint, p, 40) for p in batch]
    assert llm.engine.core.stats.num_preemptions > 0
    llm.engine.core.close()


@pytest.mark.parametrize("max_model_len", [64, 65, 79, 128])
def test_graphs_hold_the_longest_block_table(
    checkpoint: str, max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded graphs, on a stand-in for the GPU: a request that reaches the context length, beside
    short ones."""
    graphs = record_graphs(monkeypatch)
    llm = engine(checkpoint, max_model_len=max_model_len, max_num_seqs=3)
    long, short = prompt(max_model_len - 9), prompt(5, 50)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    tokens = [o.outputs[0].token_ids for o in llm.generate([long, short], params, use_tqdm=False)]
    assert tokens[0] == reference_tokens(checkpoint, long, 9)
    assert tokens[1] == reference_tokens(checkpoint, short, max_model_len - 5)
    assert sum(graph.num_replays for graph in graphs.made) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None, "rope_theta": 5000.0},
        {"rope_scaling": {"rope_theta": 5000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
    ],
    ids=str,
)
def test_rope_scaling_in_any_spelling_loads(
    tmp_path: pathlib.Path, changes: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen3")
    settings = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        settings.pop(name, None)
    (folder / "config.json").write_text(json.dumps(settings | changes))
    other = make_checkpoint(tmp_path / "other", "qwen3")
    want = reference_tokens(str(folder), prompt(20), 12)
    assert greedy(engine(str(folder)), [prompt(20)], 12) == [want]
    assert want != reference_tokens(str(other), prompt(20), 12), "the base must matter"


@pytest.mark.parametrize("max_num_seqs", [1, 3, 17])
def test_any_max_num_seqs_serves_full_batches(checkpoint: str, max_num_seqs: int) -> None:
    llm = engine(checkpoint, max_num_seqs=max_num_seqs)
    batch = [prompt(4 + i, i) for i in range(20)]
    assert greedy(llm, batch, 6) == [reference_tokens(checkpoint, p, 6) for p in batch]
    assert max(len(step.requests) for step in llm.trace) == max_num_seqs


@pytest.mark.parametrize("count", [1, 2, 7])
def test_exactly_max_tokens(checkpoint: str, count: int) -> None:
    out = (
        engine(checkpoint)
        .generate(
            [prompt(20)],
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
            use_tqdm=False,
        )[0]
        .outputs[0]
    )
    assert (len(out.token_ids), out.finish_reason) == (count, "length")


def test_stop_string_never_leaks_and_ends_with_stop(checkpoint: str) -> None:
    llm = engine(checkpoint)
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, skip_special_tokens=False
    )
    text = llm.generate([prompt(20)], params, use_tqdm=False)[0].outputs[0].text
    stop = text[9:12]  # three bytes are three tokens here
    assert text.index(stop) == 9
    out = llm.generate([prompt(20)], params.clone(stop=[stop]), use_tqdm=False)[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (text[:9], "stop", stop)
    assert not llm.engine.has_unfinished, "the engine must hear of a stop string"
    kept = llm.generate(
        [prompt(20)], params.clone(stop=[stop], include_stop_str_in_output=True), use_tqdm=False
    )
    assert kept[0].outputs[0].text == text[:12]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_are_followed(checkpoint: str, name: str) -> None:
    """Tokens are those that OpenAI's formula chooses from the logits of transformers."""
    bias = dict.fromkeys(range(60, 80), 60.0)
    expected: list[int] = []
    for _ in range(20):
        with torch.no_grad():
            logits = reference_model(checkpoint)(torch.tensor([prompt(20) + expected])).logits[
                0, -1
            ]
        for token, added in bias.items():
            logits[token] += added
        for token in set(expected):
            logits[token] -= 2.0 * (expected.count(token) if name == "frequency_penalty" else 1)
        expected.append(int(logits.argmax()))
    llm = engine(checkpoint)
    assert greedy(llm, [prompt(20)], 20, logit_bias=bias, **{name: 2.0}) == [expected]
    assert greedy(llm, [prompt(20)], 20, logit_bias=bias) != [expected], "the penalty must matter"
