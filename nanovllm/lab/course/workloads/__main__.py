"""Counts what the engine does with a workload: with the reader's file, and without it."""

from __future__ import annotations

import json
import random
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nanovllm.assembly.scheduling import create_manager
from nanovllm.core.block_pool import BlockPool
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.resolved_config import ResolvedConfig
from nanovllm.lab.course.workloads import Names, UnfairError, workload_of
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.trace.trace import Trace

LONGEST = 1.4  # times the longest wait in the lecture's order


def count_10(mine: Names) -> tuple[int, int]:
    """Rows through a random model."""
    import torch

    from nanovllm.lab.bench.local import TINY, write_checkpoint
    from nanovllm.lab.course.greedy import GreedyLoop
    from nanovllm.models.config import ModelConfig
    from nanovllm.models.loader import load_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch), TINY)
        model = load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)
    for parameter in model.parameters():
        # Smaller weights: the model repeats itself, as trained ones do.
        parameter.data *= 0.5
    rows = 0

    def forward(tokens: list[int]) -> list[int]:
        nonlocal rows
        rows += len(tokens)
        return GreedyLoop(model, [tokens], 1).all_rows()

    def lecture(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(48):
            tokens.append(forward(tokens)[-1])
        return tokens[len(prompt) :]

    prompts = [[7 * n + i * i % 11 for i in range(12 + n)] for n in range(3)]
    expected = [lecture(prompt) for prompt in prompts]
    usual, rows = rows, 0
    found = [mine["generate"](forward, list(prompt), 48) for prompt in prompts]
    if found != expected:
        raise UnfairError("the tokens differ from those of greedy decoding")
    return rows, usual


def count_11(mine: Names) -> tuple[int, int]:
    """Prompt tokens that are computed, with a pool and with the reader's."""
    requests = []
    for turn in range(6):
        for chat in range(4):
            tokens = [1000 * (chat + 1) + i for i in range(24 * (turn + 1))]
            requests.append(SimulatedRequest(60 * turn + 6 * chat, tokens, 4))
        for document in range(3 * (turn > 0)):
            requests.append(SimulatedRequest(60 * turn + 30 + 8 * document, 320, 2))

    def run(pool: type[BlockPool]) -> int:
        def make(config: ResolvedConfig) -> KVCacheManager:
            manager = create_manager(config)
            manager.pool = pool(config.num_kv_blocks)
            return manager

        trace = simulate(
            requests, num_kv_blocks=128, block_size=8, make_manager=make, check_invariants=True
        )
        return sum(share.num_tokens for share in _prefills(trace))

    return run(mine["MyPool"]), run(BlockPool)


def count_12(mine: Names) -> tuple[int, int]:
    """Lookups of blocks, with a manager and with the reader's."""
    draw = random.Random(0)
    shared = list(range(64))
    requests = [
        SimulatedRequest(
            2 * n, [*shared[: draw.randrange(8, 64)], *range(100 * n + 100, 100 * n + 140)], 16
        )
        for n in range(16)
    ]

    def run(manager_class: type[KVCacheManager]) -> tuple[int, list[bytes]]:
        lookups = 0

        class CountingPool(BlockPool):
            def get_cached_block(self, block_hash: bytes) -> int | None:
                nonlocal lookups
                lookups += 1
                return super().get_cached_block(block_hash)

        def make(config: ResolvedConfig) -> KVCacheManager:
            manager = manager_class(config.num_kv_blocks, config.given.block_size, True, 0)
            manager.pool = CountingPool(config.num_kv_blocks)
            return manager

        trace = simulate(
            requests, num_kv_blocks=24, block_size=8, make_manager=make, check_invariants=True
        )
        return lookups, list(trace.lines())

    usual, plans = run(KVCacheManager)
    ours, found = run(mine["MyManager"])
    if found != plans:
        raise UnfairError("the plans differ from the lecture's")
    return ours, usual


def count_13(mine: Names) -> tuple[int, int]:
    """Steps to first tokens, with a scheduler and with the reader's."""
    draw = random.Random(0)
    requests = [
        SimulatedRequest(n, 200 if n % 6 == 0 else draw.randrange(10, 30), 4) for n in range(96)
    ]

    def run(scheduler: type[Scheduler]) -> list[int]:
        trace = simulate(
            requests,
            num_kv_blocks=256,
            block_size=8,
            max_num_batched_tokens=48,
            max_num_seqs=8,
            scheduler_class=scheduler,
            check_invariants=True,
        )
        arrived = {name: record.step for record in trace for name in record.arrived}
        first = dict[str, int]()
        for record in trace:
            for share in record.requests:
                if share.sampled:
                    first.setdefault(share.request_id, record.step + 1)
        return [first[name] - step for name, step in arrived.items()]

    usual = run(Scheduler)
    ours = run(mine["MyScheduler"])
    if max(ours) > LONGEST * max(usual):
        raise UnfairError(
            f"a request waits {max(ours)} steps, more than {LONGEST} times the lecture's longest, "
            f"{max(usual)}"
        )
    return sum(ours), sum(usual)


def count_14(mine: Names) -> tuple[int, int]:
    """Rows of KV gathered, by attention and by the reader's."""
    import torch

    from nanovllm.ops.attention import gather_kv, paged_attention

    torch.manual_seed(0)
    shared, private, size, heads = 12, 2, 8, 4
    cache = torch.randn(shared + 16 * private, 2, 2, size, 16)
    tables = torch.tensor(
        [
            [*range(shared), *range(shared + s * private, shared + (s + 1) * private)]
            for s in range(16)
        ],
        dtype=torch.int32,
    )
    lens = torch.tensor([size * (shared + private) - s % 5 for s in range(16)], dtype=torch.int32)
    rows = 0

    def gather(kv: Any, table: Any, seq_len: int, first: int = 0) -> Any:
        nonlocal rows
        rows += int(seq_len) - first
        return gather_kv(kv, table, seq_len, first)

    q = torch.randn(16, heads, 16)
    batch = (q, cache, tables, lens, torch.arange(17, dtype=torch.int32), 0.25)
    expected = paged_attention(*batch, gather=gather)
    usual, rows = rows, 0
    found = mine["attention"](*batch, gather)
    if found.shape != expected.shape or not torch.allclose(found, expected, atol=1e-5):
        raise UnfairError("the result differs from that of paged_attention")
    return rows, usual


def _prefills(trace: Trace) -> Iterable[Any]:
    return (share for record in trace for share in record.requests if share.kind == "prefill")


COUNTS: dict[int, Callable[[Names], tuple[int, int]]] = {
    10: count_10,
    11: count_11,
    12: count_12,
    13: count_13,
    14: count_14,
}


def main(arguments: Sequence[str]) -> int:
    """Write both counts; returns the exit status."""
    lecture = int(arguments[0])
    file = str(Path(arguments[1]).resolve())
    result = arguments[2]
    workload = workload_of(lecture)
    assert workload is not None
    try:
        if lecture in COUNTS:
            ours, usual = COUNTS[lecture](Names(runpy.run_path(file)))
        else:
            from nanovllm.lab.course.workloads.later import MEASURES  # slow to import

            usual = MEASURES[lecture](lambda: Names(runpy.run_path(str(workload.original))))
            ours = MEASURES[lecture](lambda: Names(runpy.run_path(file)))
    except UnfairError as error:
        print(error)
        return 2
    Path(result).write_text(json.dumps({"yours": ours, "lecture": usual}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
