"""Mistakes that other small engines make, each as a test under the name of what goes wrong there."""

from __future__ import annotations

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.data.request import EngineRequest, Request
from nanovllm.kv.block_pool import BlockPool, InvariantError
from nanovllm.kv.manager import KVCacheManager
from nanovllm.runner.memory import num_blocks_that_fit
from nanovllm.runner.runner import ModelRunner
from tests.oracle import greedy, make_checkpoint, reference_tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


def engine(checkpoint: str, **options) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 128, "num_kv_blocks": 64, "check_invariants": True, "trace": True}
    return LLM(checkpoint, **(defaults | options))


def prompt(length: int, first: int = 3) -> list[int]:
    return [3 + (first + 7 * i) % 300 for i in range(length)]


def request(request_id: str, tokens: list[int]) -> Request:
    return Request(EngineRequest(request_id, tokens, SamplingParams(max_tokens=8)))


def test_memory_that_runs_out_in_mid_decode_preempts(checkpoint: str) -> None:
    llm = engine(checkpoint, num_kv_blocks=9)
    batch = [prompt(30, i) for i in range(4)]
    assert greedy(llm, batch, 40) == [reference_tokens(checkpoint, p, 40) for p in batch]
    assert llm.engine.core.stats.num_preemptions > 0


def test_prompt_that_can_never_fit_is_refused_and_others_go_on(checkpoint: str) -> None:
    llm = engine(checkpoint, num_kv_blocks=4, max_model_len=None)
    with pytest.raises(ValueError, match=r"64 tokens \(raise --kv-cache-memory\)"):
        llm.generate([prompt(10), prompt(100)], use_tqdm=False)
    assert not llm.engine.has_unfinished
    with pytest.raises(ValueError, match="context length of 128 tokens"):
        engine(checkpoint).generate([prompt(128)], use_tqdm=False)
    assert greedy(llm, [prompt(10)], 8) == [reference_tokens(checkpoint, prompt(10), 8)]


def test_request_that_grows_to_the_end_of_the_pool_ends_with_length(checkpoint: str) -> None:
    llm = engine(checkpoint, num_kv_blocks=4, max_model_len=None)
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    out = llm.generate([prompt(50)], params, use_tqdm=False)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (14, "length")


def test_long_prompt_does_not_stall_running_requests(checkpoint: str) -> None:
    llm = engine(checkpoint, max_num_batched_tokens=16, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.engine.add_request("decoding", prompt(5), params)
    llm.engine.step()
    llm.engine.add_request("long", prompt(100, 50), params)
    for _ in range(7):  # the long prompt takes seven steps, and in each of them the other one gets its token
        assert next(o.request_id for o in llm.engine.step() if o.outputs[0].token_ids) == "decoding"


def test_two_equal_prompts_in_one_step_are_stored_once(checkpoint: str) -> None:
    llm = engine(checkpoint)
    assert greedy(llm, [prompt(40), prompt(40)], 8) == [reference_tokens(checkpoint, prompt(40), 8)] * 2
    first = next(iter(llm.trace))
    assert list(first.admitted.values()) == [0, 32]
    assert first.requests[0].new_block_ids[:2] == first.requests[1].new_block_ids[:2]
    assert llm.engine.core.manager.pool.num_free == 64


def test_no_stale_hash_after_a_block_found_a_new_owner() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=4)
    old, new, again = request("old", prompt(8)), request("new", prompt(8, 99)), request("again", prompt(8))
    for r in (old, new):
        assert manager.allocate_slots(r, 8, manager.get_computed_blocks(r))
        r.num_computed_tokens = 8
        manager.cache_blocks(r, 0)
        manager.free(r)
    assert manager.get_computed_blocks(again) == []


def test_freed_duplicate_page_stays_intact_for_the_other_table() -> None:
    """Two tables with equal content in different blocks: freeing one must not take the other's hash or block."""
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
    """A preempted request finds its own blocks again, sampled tokens among them, and goes on where it was."""
    llm = engine(checkpoint, num_kv_blocks=9)
    batch = [prompt(40, i) for i in range(3)]
    assert greedy(llm, batch, 40) == [reference_tokens(checkpoint, p, 40) for p in batch]
    preempted = {request_id for step in llm.trace for request_id in step.preempted}
    hits = [step.admitted[r] for step in llm.trace for r in preempted if step.step > 0 and r in step.admitted]
    assert preempted and max(hits) > 0


@pytest.mark.parametrize("max_num_seqs", [1, 3, 17])
def test_any_max_num_seqs_serves_full_batches(checkpoint: str, max_num_seqs: int) -> None:
    llm = engine(checkpoint, max_num_seqs=max_num_seqs)
    batch = [prompt(4 + i, i) for i in range(20)]
    assert greedy(llm, batch, 6) == [reference_tokens(checkpoint, p, 6) for p in batch]
    assert max(len(step.requests) for step in llm.trace) == max_num_seqs


def test_kv_size_counts_only_what_is_free(checkpoint: str, monkeypatch) -> None:
    """The default pool follows available memory, not total memory."""
    runner: ModelRunner = engine(checkpoint).engine.core.runner
    runner.config.num_kv_blocks = None
    memory = type("Memory", (), {"available": 40 * runner.bytes_per_block, "total": 2**40})
    monkeypatch.setattr("nanovllm.runner.memory.psutil.virtual_memory", lambda: memory)
    assert num_blocks_that_fit(runner) == 10


@pytest.mark.parametrize("count", [1, 2, 7])
def test_exactly_max_tokens(checkpoint: str, count: int) -> None:
    out = engine(checkpoint).generate(
        [prompt(20)], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False
    )[0].outputs[0]  # fmt: skip
    assert (len(out.token_ids), out.finish_reason) == (count, "length")


def test_stop_string_never_leaks_and_ends_with_stop(checkpoint: str) -> None:
    llm = engine(checkpoint)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, skip_special_tokens=False)
    text = llm.generate([prompt(20)], params, use_tqdm=False)[0].outputs[0].text
    stop = text[9:12]  # three bytes are three tokens here
    assert text.index(stop) == 9
    out = llm.generate([prompt(20)], params.clone(stop=[stop]), use_tqdm=False)[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (text[:9], "stop", stop)
    assert not llm.engine.has_unfinished, "the engine must hear of a stop string"
    kept = llm.generate([prompt(20)], params.clone(stop=[stop], include_stop_str_in_output=True), use_tqdm=False)
    assert kept[0].outputs[0].text == text[:12]
