"""Data parallelism: which engine gets a request, and how engines that share experts step
together.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.distributed.groups import Grid
from nanovllm.kv.manager import hash_block, hash_salt


def engine_grid(config: EngineConfig) -> tuple[Grid, int]:
    """The grid of an engine's ranks, and the number of the engine's first rank in it.

    Engines in lock-step form one grid. Every other engine has a grid of its own.
    """
    data, rank = (
        (config.data_parallel_size, config.data_parallel_rank or 0)
        if config.in_lock_step
        else (1, 0)
    )
    grid = Grid(data, config.pipeline_parallel_size, config.tensor_parallel_size)
    return grid, rank * grid.pipeline * grid.tensor


def rank_config(config: EngineConfig, rank: int, address: str) -> EngineConfig:
    """The settings of one of the engines.

    Args:
        address: where the ranks of all engines meet; "" if they do not share experts.
    """
    trace = trace_path(config.trace, rank) if config.trace is not None else None
    return dataclasses.replace(
        config, data_parallel_rank=rank, data_parallel_address=address, trace=trace
    )


def trace_path(path: str, rank: int) -> str:
    """Name the trace file of one engine: run.jsonl.gz -> run.dp0.jsonl.gz."""
    whole = pathlib.Path(path)
    name, _, ending = whole.name.partition(".")
    return str(whole.with_name(f"{name}.dp{rank}" + (f".{ending}" if ending else "")))


class Waves:
    """When an engine in lock-step computes. A wave is a sequence of steps that all engines make
    together. It begins when the coordinator orders it, and ends after the first step in which no
    engine has a request.

    Attributes:
        ended: the number of waves that have ended; also the number of the wave that runs or comes
            next.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._ordered = 0  # waves that have been ordered

    @property
    def running(self) -> bool:
        """True while every engine must make steps."""
        return self._ordered > self.ended

    def start(self, wave: int) -> None:
        """Take in an order to start this wave. A late order changes nothing. An early one (this
        engine has not seen the end of the previous wave yet) takes effect at the end of the
        previous wave."""
        self._ordered = max(self._ordered, wave + 1)

    def end(self, wave: int) -> None:
        """End this wave: in one of its steps, no engine had a request. Steps that were already in
        flight belong to it, too, and report its end again."""
        self.ended = max(self.ended, wave + 1)


# Blocks of a prompt that the router compares. More would cost time without changing the choice.
ROUTED_BLOCKS = 64
# A waiting request weighs as much as this many running ones, as in vLLM: it shows that an engine is
# full.
WAITING_WEIGHT = 4
# An engine whose load is at most this much above the lowest load may get a request because of its
# prefix.
MAX_IMBALANCE = 8


def load_score(num_waiting: int, num_running: int) -> int:
    """An engine's load."""
    return WAITING_WEIGHT * num_waiting + num_running


class Router:
    """Chooses the engine for a request: among engines that are not too busy, the one that probably
    has the longest prefix of the prompt cached; then the least busy one; then engines take turns.

    To guess what an engine has cached, the router remembers the hashes of the blocks that it has
    sent there (see `hash_block`), at most as many as the engine has blocks, and forgets the least
    recently used ones first.

    Args:
        num_ranks: number of engines.
        block_size: tokens per block.
        capacity: hashes to remember per engine; 0 turns the guessing off.
        max_imbalance: how far the load of the chosen engine may be above the lowest load.
    """

    def __init__(
        self, num_ranks: int, block_size: int, capacity: int, max_imbalance: int = MAX_IMBALANCE
    ) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.max_imbalance = max_imbalance
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._turn = 0

    def choose(self, request: EngineRequest, loads: Sequence[int]) -> int:
        """Choose the engine for a request, and remember its prompt as cached there (`_names`,
        `_remember`; none with capacity 0).

        Engines whose load is more than `max_imbalance` above the lowest are left out. Of the
        others, the one with the most leading blocks of the prompt (`_match`) gets it, of several
        the one with the lowest load, and of equal ones the first in turn: `_turn`, then the engines
        after it, then those from 0 on. The next turn begins after the chosen one.

        Args:
            loads: of each engine, including everything that has been sent to it; see `load_score`.
        """
        names = self._names(request) if self.capacity else []
        least = min(loads)
        size = len(loads)
        rank = min(
            (rank for rank in range(size) if loads[rank] - least <= self.max_imbalance),
            key=lambda rank: (-self._match(rank, names), loads[rank], (rank - self._turn) % size),
        )
        self._turn = (rank + 1) % size
        self._remember(rank, names)
        return rank

    def _names(self, request: EngineRequest) -> list[bytes]:
        """Hashes of the prompt's first full blocks, without the last token, which is always
        computed."""
        size = self.block_size
        tokens = request.prompt_token_ids
        count = min((len(tokens) - 1) // size, ROUTED_BLOCKS)
        blocks = (tokens[i * size : (i + 1) * size] for i in range(count))
        return list(accumulate(blocks, hash_block, initial=hash_salt(request.cache_salt)))[1:]

    def _match(self, rank: int, names: list[bytes]) -> int:
        """The number of leading blocks that were sent to an engine."""
        sent = self._sent[rank]
        return next((i for i, name in enumerate(names) if name not in sent), len(names))

    def _remember(self, rank: int, names: list[bytes]) -> None:
        sent = self._sent[rank]
        for name in reversed(names):  # as in the pool, the end of a prompt is evicted first
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.capacity:
            sent.popitem(last=False)

    def forget(self) -> None:
        """Forget everything: the engines' caches are empty."""
        self._sent = [OrderedDict() for _ in self._sent]
