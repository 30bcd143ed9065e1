"""Hit rates of prefix caches: the engine's own manager on traces whose rates are known.

The numbers of the public files (Mooncake, FAST'25) were counted without this engine."""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.traces import read_workload
from nanovllm.simulate.workload import WorkloadRequest
from tests.simulate.engines import engine_of

BLOCK = 512
ENDLESS = 10**6


def whole(request: WorkloadRequest) -> WorkloadRequest:
    """The request with a prompt that ends one token after its last block. All of its blocks are
    full, then, and all may be found: the last token is always computed."""
    return WorkloadRequest(
        request_id=request.request_id,
        arrival=request.arrival,
        num_prompt_tokens=len(request.prefix_ids) * BLOCK + 1,
        num_output_tokens=1,
        prefix_ids=request.prefix_ids,
    )


def through_manager(requests: Iterable[WorkloadRequest], capacity: int) -> float:
    """The share of prompt blocks that the manager finds, one request after another."""
    manager = KVCacheManager(capacity, BLOCK)
    make = RequestMaker(BLOCK, BLOCK)
    num_hits = num_blocks = 0
    for source in requests:
        request = make(whole(source))
        found = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, request.num_tokens - 1, found) is not None
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request, len(found) * BLOCK)
        manager.free(request)
        num_hits += len(found)
        num_blocks += len(source.prefix_ids)
    return num_hits / num_blocks


def of_lru(prompts: Iterable[Sequence[int]], capacity: int, last_block_first: bool) -> float:
    """The same for a list of the most recently used blocks.

    Args:
        last_block_first: of a prompt, the last block is the first to be forgotten, as in the
            manager; otherwise the first block is.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_blocks = 0
    for names in prompts:
        is_prefix = True
        for name in names:
            is_prefix = is_prefix and name in cache
            num_hits += is_prefix
            cache[name] = None
            cache.move_to_end(name)
            if len(cache) > capacity:
                cache.popitem(last=False)
        if last_block_first:
            for name in reversed(names):
                cache.move_to_end(name)
        num_blocks += len(names)
    return num_hits / num_blocks


def tree_trace(folder: Path) -> Path:
    """A trace whose prompts are the paths of a tree: 2 x 3 x 5 leaves, nodes of 4, 3 and 2 blocks.
    Each leaf is asked for three times. 86 of its 810 blocks are new."""
    paths = [
        [(1, a, i) for i in range(4)]
        + [(2, a, b, i) for i in range(3)]
        + [(3, a, b, c, i) for i in range(2)]
        for a in range(2)
        for b in range(3)
        for c in range(5)
    ] * 3
    random.Random(0).shuffle(paths)
    names: dict[tuple[int, ...], int] = {}
    rows = [
        {
            "timestamp": 10_000 * i,
            "input_length": len(path) * BLOCK,
            "output_length": 1,
            "hash_ids": [names.setdefault(block, len(names)) for block in path],
        }
        for i, path in enumerate(paths)
    ]
    assert len(names) == 86
    file = folder / "tree.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_hit_rate_of_a_known_tree(tmp_path: Path) -> None:
    requests = list(read_workload(tree_trace(tmp_path)).requests)
    prompts = [request.prefix_ids for request in requests]
    expected = (810 - 86) / 810
    assert through_manager(requests, ENDLESS) == expected
    assert of_lru(prompts, ENDLESS, last_block_first=True) == expected
    for capacity in (9, 20, 30, 50, 70, 86):
        rate = through_manager(requests, capacity)
        assert rate == of_lru(prompts, capacity, last_block_first=True), capacity
        assert rate >= of_lru(prompts, capacity, last_block_first=False)
    assert through_manager(requests, 30) < expected


def test_the_hit_rate_of_a_known_tree_in_a_fleet(tmp_path: Path) -> None:
    workload = read_workload(tree_trace(tmp_path))
    engine = engine_of(num_blocks=1000, block_size=BLOCK, model_max_len=10**5)
    result = Fleet([engine]).run(workload)
    # A prompt's last token is always computed, so its last block is never found.
    num_found = 90 * 8 - (86 - 30)
    assert result.replicas[0].num_hit_tokens == num_found * BLOCK
    assert sum(request.num_cached_tokens for request in result.requests) == num_found * BLOCK


@pytest.mark.parametrize(
    ("name", "endless", "limited", "lru"),
    [("conversation", 36.64, 21.16, 21.12), ("synthetic", 63.96, 42.39, 42.35)],
)
def test_hit_rates_of_mooncakes_traces(
    name: str, endless: float, limited: float, lru: float
) -> None:
    folder = os.environ.get("NANOVLLM_TRACES")
    if folder is None:
        pytest.skip(
            "set NANOVLLM_TRACES to a folder with mooncake_conversation.jsonl.gz and "
            "mooncake_synthetic.jsonl.gz (kvcache-ai/Mooncake, FAST25-release/traces)"
        )
    requests = list(read_workload(Path(folder) / f"mooncake_{name}.jsonl.gz").requests)
    prompts = [request.prefix_ids for request in requests]

    def percent(rate: float) -> float:
        return round(rate * 100, 2)

    assert percent(through_manager(requests, ENDLESS)) == endless
    assert percent(through_manager(requests, 10_000)) == limited
    assert percent(of_lru(prompts, 10_000, last_block_first=True)) == limited
    assert percent(of_lru(prompts, 10_000, last_block_first=False)) == lru
