"""KV blocks beyond the pool: the same tokens as without, wherever the blocks were, and whatever
became of them."""

from __future__ import annotations

import itertools
import pathlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.data.config import EngineConfig
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.stores import offloading_worker, sealed
from nanovllm.kv_transfer.stores.offloading import (
    OffloadingMetadata,
    OffloadingScheduler,
    block_key,
    share_key,
)
from nanovllm.kv_transfer.stores.offloading_worker import OffloadingWorker
from nanovllm.kv_transfer.stores.sealed import HEADER_BYTES
from nanovllm.kv_transfer.stores.store import HostStore, KVStore
from nanovllm.processes.activity import waiting_for_others
from tests.kv_engines import worker_connector
from tests.kv_servers import mooncake_master, on_own_loopback, redis_server
from tests.oracle import greedy, make_checkpoint
from tests.server_process import ServerProcess, wait_until
from tests.stand_ins import set_constants, set_failure

GIB = 1 << 30
BLOCK = 4  # tokens
# Bytes of a block of the tiny model: layers, K and V, heads, tokens, width, float32.
ENTRY = 3 * 2 * 2 * BLOCK * 16 * 4


@contextmanager
def engine(model: pathlib.Path, **options: Any) -> Iterator[LLM]:
    """An engine whose pool holds about three of the prompts below."""
    defaults = {
        "dtype": "float32",
        "attention_backend": "torch",
        "check_invariants": True,
        "max_num_seqs": 4,
    }
    llm = LLM(str(model), **(defaults | {"block_size": BLOCK, "num_kv_blocks": 60} | options))
    try:
        yield llm
        core = llm.engine.core
        assert core.manager.pool.num_free == core.manager.pool.num_blocks and not core.has_work
    finally:
        llm.engine.core.close()


def pool(path: pathlib.Path, **extra: Any) -> dict[str, Any]:
    """Options of an engine with a pool in a folder."""
    config = {
        "kv_connector": "pool",
        "kv_connector_extra_config": {"path": str(path), "gib": 1.0} | extra,
    }
    return {"kv_transfer_config": config}


def halves(llm: LLM) -> tuple[OffloadingScheduler, OffloadingWorker]:
    core = llm.engine.core
    assert isinstance(core.peers.connector, OffloadingScheduler)
    worker = worker_connector(core)
    assert isinstance(worker, OffloadingWorker)
    return core.peers.connector, worker


def flush(llm: LLM) -> None:
    """Until everything is written."""
    halves(llm)[1].writer.submit(int).result(60)


def hits(llm: LLM) -> int:
    return llm.engine.core.stats.num_external_hit_tokens


def whole(prompt: list[int]) -> int:
    """Tokens of a prompt that can come from elsewhere: whole blocks, and not the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def some_prompts(seed: int = 0, count: int = 16) -> list[list[int]]:
    """Questions about six documents of 16 blocks; three of them fit into the pool."""
    dice = random.Random(seed)
    documents = [[dice.randrange(3, 300) for _ in range(16 * BLOCK)] for _ in range(6)]
    return [
        dice.choice(documents) + [dice.randrange(3, 300) for _ in range(dice.randrange(1, 9))]
        for _ in range(count)
    ]


def answers(
    llm: LLM, prompts: Sequence[list[int]], between: Callable[[], Any] = int
) -> list[list[int]]:
    """Ask in batches of four."""
    found = []
    for start in range(0, len(prompts), 4):
        found += greedy(llm, list(prompts[start : start + 4]), 10)
        between()
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: pathlib.Path) -> list[list[int]]:
    """The tokens of an engine without any connector."""
    with engine(tiny_model) as llm:
        return answers(llm, some_prompts())


# By day those that others do not contain.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "swap": {"preemption_mode": "swap", "swap_space": 0.001, "num_kv_blocks": 24},
    "small pool": {"num_kv_blocks": 24},
    "small steps": {"max_num_batched_tokens": 23},
    "one step ahead": {"async_scheduling": True},
    "one step ahead, small pool": {
        "async_scheduling": True,
        "num_kv_blocks": 24,
        "max_num_batched_tokens": 31,
    },
    "prefill first": {"batching_policy": "prefill_first"},
    "whole prompts": {"enable_chunked_prefill": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


NIGHTLY = "small pool", "small steps", "one step ahead"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OPTIONS[name], id=name, marks=[pytest.mark.nightly] * (name in NIGHTLY))
        for name in OPTIONS
    ],
)
def test_host_memory(
    tiny_model: pathlib.Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    with engine(tiny_model, kv_offloading_size=1000 * ENTRY / GIB, **options) as llm:
        assert answers(llm, some_prompts()) == expected
        assert hits(llm) > 10 * BLOCK


@pytest.mark.parametrize("variant", ["deepseek-v2-dense", "qwen2-window"])
def test_other_caches(variant: str, tmp_path: pathlib.Path) -> None:
    """Latents instead of keys and values; and windows."""
    model = make_checkpoint(tmp_path, variant)
    with engine(model) as llm:
        expected = answers(llm, some_prompts())
    with engine(model, kv_offloading_size=1000 * ENTRY / GIB) as llm:
        assert answers(llm, some_prompts()) == expected
        assert hits(llm) > 10 * BLOCK


@pytest.mark.parametrize("num_slots", [1, 10, 40])
def test_little_host_memory(
    tiny_model: pathlib.Path,
    expected: list[list[int]],
    num_slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler's half knows at all times what lies in the host memory of the ranks, which it
    does not see."""
    set_constants(monkeypatch, offloading_worker, PIECE_BYTES=3 * ENTRY)
    with engine(tiny_model, kv_offloading_size=num_slots * ENTRY / GIB, num_kv_blocks=40) as llm:
        scheduler, worker = halves(llm)
        assert isinstance(worker.store, HostStore) and worker.store.num_slots == num_slots

        def compare() -> None:
            flush(llm)
            names = {share_key(worker.share, key) for key in scheduler.host.slots}  # type: ignore[union-attr]
            assert names == set(worker.store.slots) and len(names) <= num_slots  # type: ignore[attr-defined]

        assert answers(llm, some_prompts(), compare) == expected
        assert worker.store.stats.evicted > 0 and worker.store.stats.misses == 0


def test_host_memory_and_a_disk(
    tiny_model: pathlib.Path, expected: list[list[int]], tmp_path: pathlib.Path
) -> None:
    config = {
        "kv_connector": "offloading",
        "kv_connector_extra_config": {"disk_path": str(tmp_path)},
    }
    with engine(tiny_model, kv_offloading_size=40 * ENTRY / GIB, kv_transfer_config=config) as llm:
        assert answers(llm, some_prompts(), lambda: flush(llm)) == expected
        store = halves(llm)[1].store
        assert isinstance(store, HostStore)
        assert store.lower.stats.stored > 20 and store.lower.stats.hits > 20
        assert hits(llm) > 30 * BLOCK


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"]
)
def test_a_folder_outlives_its_engine(
    tiny_model: pathlib.Path,
    expected: list[list[int]],
    tmp_path: pathlib.Path,
    options: dict[str, Any],
) -> None:
    for round_number in range(2):
        with engine(tiny_model, **pool(tmp_path), **options) as llm:
            assert answers(llm, some_prompts()) == expected
            if round_number:
                # All but the last token, in whole blocks, of whatever was not in the pool itself.
                assert hits(llm) >= 6 * 16 * BLOCK


def test_two_engines_share_a_folder(
    tiny_model: pathlib.Path, expected: list[list[int]], tmp_path: pathlib.Path
) -> None:
    """They take turns; each finds what the other has computed a moment ago."""
    prompts = some_prompts()
    with engine(tiny_model, **pool(tmp_path)) as one, engine(tiny_model, **pool(tmp_path)) as other:
        for i, (prompt, tokens) in enumerate([*zip(prompts, expected, strict=True)] * 2):
            llm, before = (one, other)[i % 2], hits((one, other)[i % 2])
            assert greedy(llm, [prompt], 10) == [tokens]
            flush(llm)
            assert hits(llm) >= before
        assert min(hits(one), hits(other)) > 3 * 16 * BLOCK
        for llm in (one, other):  # and what stood in the answers can be continued by the other
            before = hits(llm)
            assert greedy(llm, [prompts[0] + expected[0][:4]], 6) == [expected[0][4:]]
            assert hits(llm) >= before


def test_only_equal_engines_share(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Other weights, another size of blocks, other types or shares of a rank: none finds what
    another has kept."""
    prompt = some_prompts()[0]
    others = [
        (tiny_model, {}),
        (make_checkpoint(tmp_path / "other", seed=1), {}),
        (tiny_model, {"block_size": 2 * BLOCK}),
        (tiny_model, {"dtype": "bfloat16"}),
        (tiny_model, {"kv_cache_dtype": "int8"}),
        (tiny_model, {"kv_cache_dtype": "fp8"}),
        (tiny_model, {"tensor_parallel_size": 2}),
        (tiny_model, {"pipeline_parallel_size": 2}),
    ]
    for model, options in others:
        with engine(model, **pool(tmp_path / "pool"), **options) as llm:
            greedy(llm, [prompt], 2)
            assert hits(llm) == 0, options
    with engine(tiny_model, **pool(tmp_path / "pool")) as llm:
        greedy(llm, [{"prompt_token_ids": prompt, "cache_salt": "another user"}], 2)  # type: ignore[list-item]
        assert hits(llm) == 0
        greedy(llm, [prompt], 2)
        assert hits(llm) == whole(prompt)


def test_a_block_is_named_by_all_that_it_is_made_of() -> None:
    identity: dict[str, str | int] = {"model": "a", "block_size": 16}
    names = {block_key(identity, b"x" * 32), block_key(identity, b"y" * 32)}
    names |= {
        block_key(identity | change, b"x" * 32)
        for change in ({"model": "b"}, {"block_size": 1}, {"more": 1})
    }
    assert len(names) == 5 and all(len(name) == 32 for name in names)
    assert block_key(dict(reversed(identity.items())), b"x" * 32) in names, (
        "the order does not matter"
    )


def test_the_beginning_is_what_is_kept(tiny_model: pathlib.Path) -> None:
    """Of a prompt that is too long for the store, all of which becomes full in one step."""
    prompt = some_prompts()[0]
    with engine(tiny_model, kv_offloading_size=10 * ENTRY / GIB) as llm:
        greedy(llm, [prompt], 1)
        flush(llm)
        scheduler, worker = halves(llm)
        keys = [block_key(scheduler.identity, name) for name in names_of(llm, prompt)]
        assert set(scheduler.host.slots) == set(keys[:10])  # type: ignore[union-attr]
        assert worker.store.contains([share_key(worker.share, key) for key in keys]) == 10
        assert worker.store.stats.stored == 10, "what would give way at once is not even written"


def test_what_is_being_loaded_does_not_give_way(tiny_model: pathlib.Path) -> None:
    prompts = some_prompts()
    hot, cold = prompts[0], [prompt for prompt in prompts if prompt[:8] != prompts[0][:8]]
    with engine(tiny_model, kv_offloading_size=20 * ENTRY / GIB, num_kv_blocks=100) as llm:
        worker, go_on = halves(llm)[1], threading.Event()
        greedy(llm, [hot], 1)
        llm.engine.core.reset_prefix_cache()
        worker.store, store = Slow(worker.store, go_on), worker.store
        llm.engine.add_request("hot", hot, SamplingParams(max_tokens=1))
        while not llm.engine.core.stats.num_receiving:
            llm.engine.step()
        llm.engine.add_request("cold", cold[0], SamplingParams(max_tokens=1))
        while not any(output.finished for output in llm.engine.step()):
            pass
        flush(llm)
        go_on.set()
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert hits(llm) == whole(hot)
        assert store.stats.stored == 20, "of the other one, only so much has found a place"


def test_a_rank_moves_bytes_to_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into other blocks than they came from, in another order, some of them lost."""
    set_constants(monkeypatch, offloading_worker, PIECE_BYTES=1)  # a block at a time, then several
    for num_layers in (1, 3):
        layout = KVLayout(
            4, 2, BLOCK, 5, "bfloat16", num_blocks=30, first_layer=1, end_layer=1 + num_layers
        )
        entry_bytes = layout.block_bytes * num_layers
        config = EngineConfig(kv_offloading_size=20 * entry_bytes / GIB, device="cpu")
        assert config.kv_transfer is not None
        before = {
            layer: torch.randn(layout.cache_shape).to(torch.bfloat16) for layer in layout.layers
        }
        worker = OffloadingWorker(
            config, layout, {layer: cache.clone() for layer, cache in before.items()}
        )
        keys = [bytes([i]) * 32 for i in range(12)]
        worker.metadata = OffloadingMetadata(saves={keys[i]: 2 * i for i in range(12)})
        worker.wait_for_save()
        for cache in worker.kv_caches.values():
            cache.fill_(-1)
        targets = [23, 1, 2, 29, 0, 7, 5, 6]
        loads = {"a": dict(zip(keys[::-1], targets, strict=False)), "b": {keys[0]: 17}}
        worker.writer.submit(int).result(60)
        assert isinstance(worker.store, HostStore)
        worker.store.evict([share_key(worker.share, keys[i]) for i in (10, 6)])
        worker.metadata = OffloadingMetadata(loads=loads)
        worker.start_load_kv()
        finished: set[str] = set()
        invalid: dict[str, set[int]] = {}
        while finished != {"a", "b"}:
            output = worker.get_finished(1.0)
            finished |= output.finished_recving
            invalid |= output.invalid_block_ids
        assert invalid == {"a": {1, 7}, "b": set()}
        expected = {layer: torch.full_like(cache, -1) for layer, cache in before.items()}
        for target, i in [(23, 11), (2, 9), (29, 8), (0, 7), (5, 5), (6, 4), (17, 0)]:
            for layer in layout.layers:
                expected[layer][target] = before[layer][2 * i]
        assert all(torch.equal(worker.kv_caches[layer], expected[layer]) for layer in layout.layers)
        worker.close()
        set_constants(monkeypatch, offloading_worker, PIECE_BYTES=5 * 3 * layout.block_bytes)


# ---------------------------------------------------------------- what is lost or damaged


def test_poisoned_blocks_are_computed(
    tiny_model: pathlib.Path, expected: list[list[int]], tmp_path: pathlib.Path
) -> None:
    with engine(tiny_model, **pool(tmp_path)) as llm:
        answers(llm, some_prompts())
    files = sorted(tmp_path.glob("[!.]*"))
    for file in random.Random(0).sample(files, len(files) // 3):
        content = bytearray(file.read_bytes())
        content[HEADER_BYTES + 5] ^= 64
        file.write_bytes(content)
    with engine(tiny_model, **pool(tmp_path)) as llm:
        assert answers(llm, some_prompts()) == expected
        assert 0 < hits(llm) < 24 * 16 * BLOCK
        assert halves(llm)[1].store.stats.damaged > 5
    with engine(tiny_model, **pool(tmp_path)) as llm:
        answers(llm, some_prompts())
        assert hits(llm) >= 6 * 16 * BLOCK, "what was damaged has been written anew"


class Moody(KVStore):
    """A store that loses what it likes, or fails, or takes its time."""

    def __init__(self, store: KVStore, mood: Callable[[str], bool]) -> None:
        super().__init__()
        self.store, self.mood = store, mood

    def contains(self, keys: Sequence[bytes]) -> int:
        return self.store.contains(keys)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        if self.mood("put"):
            self.store.put(keys, buffers)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        found = self.store.get(keys, buffers)
        for i, buffer in enumerate(buffers):
            if not self.mood("get"):
                found[i] = False
                buffer[:] = bytes(len(buffer))
        return found

    def evict(self, keys: Sequence[bytes]) -> None:
        self.store.evict(keys)

    def close(self) -> None:
        self.store.close()


class Slow(Moody):
    """A store that answers when it is told to."""

    def __init__(self, store: KVStore, go_on: threading.Event) -> None:
        super().__init__(store, lambda what: True)
        self.go_on = go_on

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        assert self.go_on.wait(60)
        return super().get(keys, buffers)


def test_a_lost_block_is_kept_again(tiny_model: pathlib.Path, expected: list[list[int]]) -> None:
    prompt = some_prompts()[0]
    with engine(tiny_model, kv_offloading_size=1000 * ENTRY / GIB) as llm:
        scheduler, worker = halves(llm)
        found = []
        for _ in range(3):
            before = hits(llm)
            assert greedy(llm, [prompt], 10) == expected[:1]
            found.append(hits(llm) - before)
            flush(llm)
            llm.engine.core.reset_prefix_cache()
            if len(found) == 1:
                key = block_key(scheduler.identity, names_of(llm, prompt)[5])
                worker.store.evict([share_key(worker.share, key)])
        assert found == [0, 5 * BLOCK, whole(prompt)]


@pytest.mark.parametrize("mood", ["loses", "fails"])
def test_a_store_that_loses_or_fails(
    tiny_model: pathlib.Path, expected: list[list[int]], mood: str, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(0)

    def act(what: str) -> bool:
        if dice.random() < 0.8:
            return True
        if mood == "fails":
            raise RuntimeError("out of order")
        return False

    with engine(tiny_model, kv_offloading_size=1000 * ENTRY / GIB) as llm:
        worker = halves(llm)[1]
        worker.store = Moody(worker.store, act)
        assert answers(llm, some_prompts()) == expected
        assert worker.store.store.stats.hits > 0
        assert (
            ("out of order" in caplog.text)
            == ("could not be loaded" in caplog.text)
            == (mood == "fails")
        )


def test_a_writer_that_cannot_keep_up(
    tiny_model: pathlib.Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would have to wait too long is not saved; the steps go on."""
    set_constants(monkeypatch, offloading_worker, BACKLOG_BYTES=20 * ENTRY)
    with engine(tiny_model, kv_offloading_size=1000 * ENTRY / GIB) as llm:
        worker, go_on = halves(llm)[1], threading.Event()
        first = worker.writer.submit(go_on.wait)
        assert answers(llm, some_prompts()[:4]) == expected[:4]
        assert len(worker._writes) == 20
        go_on.set()
        first.result(60)
        flush(llm)
        assert answers(llm, some_prompts()) == expected


def test_blocks_that_are_still_being_written_are_waited_for(
    tiny_model: pathlib.Path, expected: list[list[int]]
) -> None:
    prompt = some_prompts()[0]
    with engine(tiny_model, kv_offloading_size=1000 * ENTRY / GIB) as llm:
        core, go_on = llm.engine.core, threading.Event()
        halves(llm)[1].writer.submit(go_on.wait, 60)
        assert greedy(llm, [prompt], 10) == expected[:1]
        core.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        llm.engine.add_request("again", prompt, params)
        for _ in range(20):
            llm.engine.step()
        assert core.stats.num_receiving == 1
        go_on.set()
        outputs = []
        while llm.engine.has_unfinished:
            outputs += llm.engine.step()
        assert [t for o in outputs for t in o.outputs[0].token_ids] == expected[0]
        assert hits(llm) == whole(prompt)


def test_a_request_that_is_aborted_while_its_blocks_are_coming(
    tiny_model: pathlib.Path, expected: list[list[int]], tmp_path: pathlib.Path
) -> None:
    """Nobody else gets the blocks before the reader is done with them."""
    prompt = some_prompts()[0]
    with engine(tiny_model, **pool(tmp_path)) as llm:
        greedy(llm, [prompt], 10)
    with engine(tiny_model, **pool(tmp_path)) as llm:
        core, go_on = llm.engine.core, threading.Event()
        worker = halves(llm)[1]
        worker.store = Moody(worker.store, lambda what: go_on.wait(60))
        llm.engine.add_request("a", prompt, SamplingParams(max_tokens=10))
        while not core.stats.num_receiving:
            llm.engine.step()
        llm.engine.abort_request("a")
        assert core.manager.held and core.has_work and not core.has_unfinished
        core.step()
        assert core.manager.held
        go_on.set()
        while core.has_work:
            core.step()
        assert not core.manager.held
        assert greedy(llm, [prompt], 10) == expected[:1] and hits(llm) == whole(prompt)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.nightly)])
def test_random_lives(
    tiny_model: pathlib.Path, expected: list[list[int]], tmp_path: pathlib.Path, seed: int
) -> None:
    """Requests come and are aborted at random, with little room anywhere and a store that loses
    blocks, until enough of them have had tokens: on a busy machine more steps pass while a store is
    read, and more requests are aborted before their first token."""
    dice, prompts = random.Random(seed), some_prompts()
    config = {
        "kv_connector": "offloading",
        "kv_connector_extra_config": {"disk_path": str(tmp_path)},
    }
    sizes = {
        "num_kv_blocks": 30,
        "max_num_batched_tokens": 40,
        "kv_offloading_size": 25 * ENTRY / GIB,
    }
    ahead = bool(seed % 2)
    with engine(tiny_model, kv_transfer_config=config, async_scheduling=ahead, **sizes) as llm:
        worker = halves(llm)[1]
        worker.store = Moody(worker.store, lambda what: what == "put" or dice.random() < 0.97)
        asked: dict[str, int] = {}
        tokens: dict[str, list[int]] = {}
        for number in itertools.count():
            enough = len(tokens) > 50
            if not enough and dice.random() < 0.3 and len(asked) < 12:
                asked[str(number)] = i = dice.randrange(len(prompts))
                params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
                llm.engine.add_request(str(number), prompts[i], params)
            if asked and dice.random() < 0.05:
                request_id = dice.choice(list(asked))
                del asked[request_id]
                llm.engine.abort_request(request_id)
            for output in llm.engine.step():
                if output.request_id in asked:
                    tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
                    if output.finished:
                        i = asked.pop(output.request_id)
                        assert tokens[output.request_id] == expected[i]
            if enough and not asked and not llm.engine.core.has_work:
                break
        assert hits(llm) > 100


def test_a_step_that_breaks_off(tiny_model: pathlib.Path, expected: list[list[int]]) -> None:
    with engine(tiny_model, kv_offloading_size=1000 * ENTRY / GIB) as llm:
        prompts = some_prompts()
        assert answers(llm, prompts[:8]) == expected[:8]
        core = llm.engine.core
        count = itertools.count()

        def break_off(*_: Any) -> None:
            if next(count) == 3:
                raise RuntimeError("broken off")

        core.runner.model.register_forward_pre_hook(break_off)
        with pytest.raises(RuntimeError, match="broken off"):
            answers(llm, prompts[8:])
        assert answers(llm, prompts) == expected


def test_a_slow_store_is_no_hang(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread says that it may wait when it looks a prompt up, and when it waits for
    reads to end."""
    waits: list[bool] = []

    def contains(keys: Sequence[bytes]) -> int:
        waits.append(waiting_for_others().depth > 0)
        return 0

    with engine(tiny_model, **pool(tmp_path)) as llm:
        scheduler, worker = halves(llm)
        monkeypatch.setattr(scheduler._below.shared, "contains", contains)
        greedy(llm, [some_prompts()[0]], 1)
        monkeypatch.setattr(
            offloading_worker, "wait", lambda reads: waits.append(waiting_for_others().depth > 0)
        )
        worker.forget_requests()
        monkeypatch.undo()
    assert waits == [True, True]


def test_nobody_writes_to_blocks_once_all_is_forgotten(
    tiny_model: pathlib.Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step breaks off while blocks are coming: before they are given to others, the reader is
    done with them."""
    prompts = some_prompts()
    with engine(tiny_model, kv_offloading_size=1000 * ENTRY / GIB) as llm:
        assert answers(llm, prompts[:4]) == expected[:4]
        core, worker, go_on = llm.engine.core, halves(llm)[1], threading.Event()
        core.reset_prefix_cache()
        worker.store, forget = Slow(worker.store, go_on), worker.forget_requests

        def release_and_forget() -> None:
            threading.Timer(
                0.2, go_on.set
            ).start()  # without this, it would wait for the reader in vain
            forget()
            assert go_on.is_set() and not worker._reads

        monkeypatch.setattr(worker, "forget_requests", release_and_forget)
        llm.engine.add_request("coming", prompts[0], SamplingParams(max_tokens=5))
        llm.engine.add_request("new", some_prompts(1)[0], SamplingParams(max_tokens=5))
        with monkeypatch.context() as patch:
            set_failure(patch, core.runner.model, "forward", ZeroDivisionError())
            with pytest.raises(ZeroDivisionError):
                while True:
                    llm.engine.step()
        assert answers(llm, prompts[:8]) == expected[:8]


# ---------------------------------------------------------------- who takes and who gives


def test_a_prompt_whose_logits_are_wanted_takes_nothing(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    prompt = some_prompts()[0]
    with engine(tiny_model, **pool(tmp_path)) as llm:
        greedy(llm, [prompt], 2)
        flush(llm)
        llm.engine.core.reset_prefix_cache()
        (output,) = llm.generate(
            [prompt], SamplingParams(max_tokens=2, prompt_logprobs=1), use_tqdm=False
        )
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        assert hits(llm) == 0


def test_the_last_token_is_computed(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    prompt = some_prompts()[0][: 16 * BLOCK]
    with engine(tiny_model, **pool(tmp_path)) as llm:
        tokens = greedy(llm, [prompt], 2)
        flush(llm)
        llm.engine.core.reset_prefix_cache()
        assert greedy(llm, [prompt], 2) == tokens and hits(llm) == 15 * BLOCK


def test_roles(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    prompt, other = some_prompts()[0], some_prompts(1)[0]
    for role, asked, found in (
        ("kv_consumer", prompt, 0),  # keeps nothing
        ("kv_producer", prompt, 0),
        ("kv_producer", prompt, 0),  # takes nothing
        ("kv_consumer", prompt, whole(prompt)),
        ("kv_consumer", other, 0),
        ("kv_both", other, 0),
        ("kv_both", other, whole(other)),
    ):
        with engine(tiny_model, **pool(tmp_path), kv_role=role) as llm:
            greedy(llm, [asked], 2)
            assert hits(llm) == found, role


def test_what_is_in_use_stays_in_the_store(tiny_model: pathlib.Path) -> None:
    """A prompt that is found in the pool every time would be the first to be forgotten by a store
    that is never asked."""
    prompts = some_prompts()
    hot, cold = prompts[0], [prompt for prompt in prompts if prompt[:8] != prompts[0][:8]]
    with engine(tiny_model, kv_offloading_size=45 * ENTRY / GIB, num_kv_blocks=100) as llm:
        scheduler, _ = halves(llm)
        for prompt in cold[:8]:
            greedy(llm, [hot], 2)
            greedy(llm, [prompt], 2)
        keys = [block_key(scheduler.identity, name) for name in names_of(llm, hot)]
        assert all(key in scheduler.host for key in keys) and hits(llm) == 0


def names_of(llm: LLM, prompt: list[int]) -> list[bytes]:
    from nanovllm.core.request import Request
    from nanovllm.data.request import EngineRequest

    return llm.engine.core.manager.block_hashes(
        Request(EngineRequest("x", prompt, SamplingParams()))
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_connector": "offloading"}, "set it to at least one KV block"),
        ({"kv_offloading_size": 1e-9}, "set it to at least one KV block"),
        ({"kv_offloading_size": 1e6}, "at most the host memory that is available"),
        (
            {"kv_offloading_size": 0.001, "enable_prefix_caching": False},
            "enable enable_prefix_caching",
        ),
        ({"kv_connector": "pool"}, '{"path": "/a/folder"}'),
        ({"kv_connector": "pool", "kv_offloading_size": 1}, "set only one of them"),
        ({"store": "s3"}, "store must be folder, redis or mooncake, got 's3'"),
        (
            {"store": "redis", "path": "/x"},
            "'path' is unknown here; there are store, url, namespace",
        ),
        ({"store": "redis", "url": 1}, "url must be a str"),
        ({"path": "/dev/null/x"}, "name a folder that does not exist yet"),
        ({"path": "/tmp", "gib": 0}, "more than 0 GiB"),
        ({"store": "mooncake"}, "listen_on_all_interfaces"),
    ],
)
def test_settings_that_make_no_sense(
    tiny_model: pathlib.Path, options: dict[str, Any], message: str
) -> None:
    if not any(name.startswith("kv_") for name in options):
        config = {"kv_connector": "pool", "kv_connector_extra_config": options}
        options = {"kv_transfer_config": config}
    with pytest.raises(ValueError) as error, engine(tiny_model, **options):
        pass
    assert message in str(error.value)


def test_a_missing_block_is_no_failure(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = pool(tmp_path)
    options["kv_transfer_config"]["kv_load_failure_policy"] = "fail"
    with (
        pytest.raises(ValueError, match="use kv_load_failure_policy 'recompute'"),
        engine(tiny_model, **options),
    ):
        pass


# ---------------------------------------------------------------- servers


def test_redis(
    tiny_model: pathlib.Path,
    expected: list[list[int]],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the server goes and comes back."""
    set_constants(monkeypatch, sealed, RETRY_SECONDS=0.5)
    with redis_server(tmp_path) as server:
        options = pool(tmp_path, store="redis", url=f"redis://127.0.0.1:{server.ports[0]}")
        del options["kv_transfer_config"]["kv_connector_extra_config"]["path"]
        del options["kv_transfer_config"]["kv_connector_extra_config"]["gib"]
        with engine(tiny_model, **options) as llm:
            assert answers(llm, some_prompts()) == expected
        with engine(tiny_model, **options) as llm:
            assert answers(llm, some_prompts()) == expected and hits(llm) >= 6 * 16 * BLOCK
            server.kill()
            assert answers(llm, some_prompts()) == expected
            server.start()
            before = hits(llm)

            def finds() -> bool:
                assert answers(llm, some_prompts(), lambda: flush(llm)) == expected
                return hits(llm) > before

            wait_until(finds, 60, "the engine finds the server again")


def story_of_mooncake(model: str, folder: str) -> None:
    """Two engines, one after the other, and a third whose memory the blocks are in."""
    with mooncake_master(pathlib.Path(folder)) as server:
        extra = {
            "store": "mooncake",
            "master_server_address": f"127.0.0.1:{server.ports[0]}",
            "listen_on_all_interfaces": True,
        }
        config = {
            "kv_connector": "pool",
            "kv_connector_extra_config": extra | {"global_segment_size": 64 << 20},
        }
        with engine(pathlib.Path(model)) as llm:
            expected = answers(llm, some_prompts())
        with engine(pathlib.Path(model), kv_transfer_config=config) as first:
            assert answers(first, some_prompts()) == expected
            flush(first)
            with engine(pathlib.Path(model), kv_transfer_config=config) as second:
                assert (
                    answers(second, some_prompts()) == expected and hits(second) >= 6 * 16 * BLOCK
                )
            server.kill()
            assert answers(first, some_prompts()) == expected


@pytest.mark.nightly
def test_mooncake(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    on_own_loopback(
        "tests.kv_transfer.test_kv_offloading", "story_of_mooncake", str(tiny_model), str(tmp_path)
    )


def test_a_killed_server_leaves_its_pool_behind(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The whole way, from the command line to the metrics."""
    flags = ["--kv-connector", "pool", "--num-kv-blocks", "64"]
    flags += [
        "--kv-transfer-config",
        f'{{"kv_connector_extra_config": {{"path": "{tmp_path / "pool"}"}}}}',
    ]
    texts = []
    for _ in range(2):
        with ServerProcess(tiny_model, tmp_path, *flags) as server:
            texts.append(server.complete(prompt="x" * 100, max_tokens=8)["choices"][0]["text"])
            lines = server.get("/metrics").text.splitlines()
            (line,) = [line for line in lines if "external_prefix_cache_hits_total{" in line]
            wait_until(lambda: len(list((tmp_path / "pool").glob("[!.]*"))) >= 6)
            server.process.kill()
            server.engine.kill()
            server.process.wait(30)
    assert texts[0] == texts[1] and line.endswith(" 96.0")
