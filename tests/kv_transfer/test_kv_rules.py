"""KV outside of the pool, rule by rule: a store's slots, how much of a prompt is kept, and keys at
another position."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from torch import Tensor

from nanovllm.core.request import Request
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.kv_transfer.blend.rotation import rotate_keys
from nanovllm.kv_transfer.stores.offloading import OffloadingScheduler
from nanovllm.kv_transfer.stores.store import HostKeys, HostStore

# ------------------------------------------------------------------------------------ HostStore.put


def put(store: HostStore, keys: str, content: str = "") -> None:
    """Entries of one byte, whose content is their key if nothing else is said."""
    names = [key.encode() for key in keys]
    store.put(names, [memoryview(bytearray(content.encode() or name)) for name in names])


def content(store: HostStore, key: str) -> bytes | None:
    buffer = bytearray(1)
    return bytes(buffer) if store.get([key.encode()], [memoryview(buffer)])[0] else None


def order(store: HostStore) -> str:
    return b"".join(store.slots).decode()


def test_an_entry_that_is_there_is_used_and_not_written_again() -> None:
    store = HostStore(3, 1)
    put(store, "ab")
    assert order(store) == "ba", (
        "least recently used first: the first key of a call counts as used last"
    )
    put(store, "b", "x")
    assert order(store) == "ab", "b was used"
    assert [content(store, key) for key in "ab"] == [b"a", b"b"], (
        "the same key always means the same bytes"
    )
    assert store.stats.stored == len(store.slots) == 2, "two slots hold entries"


def test_the_least_recently_used_entry_gives_way() -> None:
    lower = HostStore(9, 1)
    store = HostStore(2, 1, lower=lower)
    put(store, "ab")
    put(store, "c")
    assert order(store) == "ac" and order(lower) == "b", "b was the least recently used"
    assert content(store, "c") == b"c" and content(lower, "b") == b"b"
    put(store, "def")
    assert order(store) == "ed", "of a chain that is too long, its beginning stays"
    assert store.stats.stored == 6 and store.stats.evicted == 4


def test_an_entry_in_use_does_not_give_way() -> None:
    store = HostStore(2, 1)
    put(store, "ab")
    store.is_in_use = lambda key: True
    put(store, "cd")
    assert order(store) == "ba" and store.stats.stored == 2, (
        "there is no room, and that is no error"
    )
    store.is_in_use = lambda key: key == b"b"
    put(store, "c")
    assert order(store) == "bc", "b is in use, so a gave way"


def test_keys_take_no_memory_before_they_are_there() -> None:
    keys = HostKeys(10**15)
    put(keys, "abc")
    assert order(keys) == "cba" and keys.num_slots == 10**15


def test_keys_have_the_order_of_a_store_with_bytes() -> None:
    rng = random.Random(0)
    store = HostStore(3, 1)
    keys = HostKeys(3)
    in_use = set[bytes]()
    store.is_in_use = keys.is_in_use = in_use.__contains__
    for _ in range(500):
        chosen = "".join(rng.sample("abcdefg", rng.randint(1, 4)))
        if rng.random() < 0.3:
            for each in (store, keys):
                each.evict([key.encode() for key in chosen])
        elif rng.random() < 0.3:
            in_use.symmetric_difference_update(key.encode() for key in chosen[:2])
        else:
            for each in (store, keys):
                put(each, chosen)
        assert order(store) == order(keys)


# --------------------------------------------------- OffloadingScheduler.get_num_new_matched_tokens


class Kept:
    """A store with the beginning of every chain; it counts how often it is asked."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, list[int]()

    def contains(self, keys: list[bytes]) -> int:
        self.asked.append(len(keys))
        return min(self.count, len(keys))


def scheduler(
    num_kept: int, is_shared: bool = False, is_consumer: bool = True
) -> tuple[OffloadingScheduler, Kept]:
    found, store = object.__new__(OffloadingScheduler), Kept(num_kept)
    found.config = SimpleNamespace(block_size=4)  # type: ignore[assignment]
    found.kv_transfer = SimpleNamespace(is_consumer=is_consumer)  # type: ignore[assignment]
    found.host, found._is_shared, found._saved = store, is_shared, {}  # type: ignore[assignment]
    found._key = lambda block_hash: block_hash  # type: ignore[assignment]
    return found, store


def request(num_tokens: int) -> Request:
    made = Request(EngineRequest("a", list(range(num_tokens)), SamplingParams(max_tokens=8)))
    made.block_hashes = [bytes([i]) for i in range(num_tokens // 4)]
    return made


def test_tokens_of_kept_blocks_come_from_the_store() -> None:
    assert scheduler(2)[0].get_num_new_matched_tokens(request(13), 0) == (8, True), (
        "2 blocks of 4 tokens"
    )
    assert scheduler(2)[0].get_num_new_matched_tokens(request(13), 4) == (4, True), (
        "without those computed already"
    )
    assert scheduler(2)[0].get_num_new_matched_tokens(request(13), 12) == (0, True), (
        "0, not -4: all of it is computed"
    )
    assert scheduler(9)[0].get_num_new_matched_tokens(request(13), 0) == (12, True)
    assert scheduler(9)[0].get_num_new_matched_tokens(request(12), 0) == (8, True), (
        "the last token has to be computed, and with it the rest of its block"
    )
    assert scheduler(9, is_consumer=False)[0].get_num_new_matched_tokens(request(13), 0) == (
        0,
        True,
    ), "an engine that only saves loads nothing"


def test_what_is_kept_is_noted_even_if_it_is_not_loaded() -> None:
    for is_consumer in (True, False):
        found, _ = scheduler(2, is_consumer=is_consumer)
        one = request(8)
        found.get_num_new_matched_tokens(one, 0)
        assert found._saved == {"a": (one, 2)}, (
            "both blocks are kept, so they need not be saved again"
        )


def test_a_shared_store_is_asked_once_and_host_memory_each_time() -> None:
    for is_shared in (True, False):
        found, store = scheduler(1, is_shared)
        one = request(13)
        assert found.get_num_new_matched_tokens(one, 0) == (4, True)
        store.count = 3
        assert found.get_num_new_matched_tokens(one, 0) == ((4 if is_shared else 12), True)
        assert store.asked == [3] * (1 if is_shared else 2), (
            "questions, each about all three full blocks"
        )


# -------------------------------------------------------------------------------------- rotate_keys


def rotated(keys: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """What RoPE does to keys that have not been rotated yet."""
    cos, sin = cos_sin[positions].to(keys.dtype).unsqueeze(1).chunk(2, dim=-1)
    first, second = keys.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def table(dtype: torch.dtype) -> Tensor:
    angles = torch.arange(100, dtype=torch.float64)[:, None] * torch.tensor(
        [1.0, 0.3, 0.01], dtype=torch.float64
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def test_keys_are_those_of_the_other_position() -> None:
    # 5 tokens, 4 heads.
    keys, cos_sin = (torch.randn(2, 5, 4, 6, dtype=torch.float64), table(torch.float64))
    here, there = torch.tensor([7, 8, 9, 10, 11]), torch.tensor([50, 51, 52, 2, 11])
    old = rotated(keys, here, cos_sin)
    before = old.clone()
    moved = rotate_keys(old, here, there, cos_sin)
    torch.testing.assert_close(moved, rotated(keys, there, cos_sin), rtol=0, atol=1e-12)
    assert torch.equal(old, before), "the result is a new tensor"


def test_a_rounded_table_makes_keys_no_longer_and_no_shorter() -> None:
    keys, cos_sin = torch.randn(5, 4, 6, dtype=torch.float64), table(torch.bfloat16)
    here, there = torch.arange(5), torch.arange(50, 55)
    back = rotate_keys(rotate_keys(keys, here, there, cos_sin), there, here, cos_sin)
    assert torch.allclose(back, keys, rtol=0, atol=1e-12), (
        "there and back again gives the same keys, although cos² + sin² in this table is not 1"
    )


def test_keys_in_16_bits_are_rounded_once() -> None:
    keys, cos_sin = torch.randn(50, 4, 6).to(torch.bfloat16), table(torch.float32)
    here, there = torch.arange(50), torch.arange(50, 100)
    moved = rotate_keys(keys, here, there, cos_sin)
    assert moved.dtype == torch.bfloat16
    wide = rotate_keys(keys.float(), here, there, cos_sin)
    assert torch.equal(moved, wide.to(torch.bfloat16)), "compute in 32 bits, and round the result"
