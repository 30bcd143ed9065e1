"""Data parallelism: chooses the engine for a request, and makes engines that share experts step
together.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from nanovllm.core.kv_cache_manager import hash_block, hash_salt
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.distributed.groups import Grid


def engine_grid(config: EngineConfig) -> tuple[Grid, int]:
    """Return the grid of an engine's ranks, and the number of the engine's first rank in it.

    Engines in lock-step form one grid. Every other engine has its own grid.
    """
    data, rank = (
        (config.data_parallel_size, config.data_parallel_rank or 0)
        if config.in_lock_step
        else (1, 0)
    )
    grid = Grid(data, config.pipeline_parallel_size, config.tensor_parallel_size)
    return grid, rank * grid.pipeline * grid.tensor


def rank_config(config: EngineConfig, rank: int, address: str) -> EngineConfig:
    """Return the settings of one engine.

    Args:
        address: the address at which the ranks of all engines connect; "" if the engines do not
            share experts.
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
    """Decides when an engine in lock-step computes.

    A wave is a sequence of steps that all engines run together. It begins with the coordinator's
    command, and ends after the first step in which no engine has a request.

    Attributes:
        ended: the number of waves that have ended, which is the number of the current or next wave.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._ordered = 0  # waves whose start was commanded

    @property
    def running(self) -> bool:
        """True while every engine must run steps."""
        return self._ordered > self.ended

    def start(self, wave: int) -> None:
        """Handle the command to start this wave.

        A late command changes nothing. A command that arrives before this engine has seen the end
        of the previous wave takes effect when that wave ends."""
        self._ordered = max(self._ordered, wave + 1)

    def end(self, wave: int) -> None:
        """End this wave, because no engine had a request in one of its steps. Steps that were
        already in flight belong to the same wave, and end it again."""
        self.ended = max(self.ended, wave + 1)


# The most blocks of a prompt that are compared. More would cost time without changing the choice.
ROUTED_BLOCKS = 64
# Running requests that a waiting one counts for, as in vLLM: it shows that the engine is full.
WAITING_WEIGHT = 4
# An engine whose load exceeds the lowest load by more than this gets no request because of a cached
# prefix.
MAX_IMBALANCE = 8


def load_score(num_waiting: int, num_running: int) -> int:
    """Return an engine's load."""
    return WAITING_WEIGHT * num_waiting + num_running


class Router:
    """Chooses the engine for a request.

    It takes the engine that probably has the longest prefix of the prompt cached, unless this
    engine is too busy. Ties go to the least busy engine, then round robin.

    To estimate what an engine has cached, the router remembers the block hashes of the prompts that
    it has sent there (see `hash_block`). It remembers at most as many as the engine has blocks, and
    forgets the least recently used ones first.

    Args:
        num_ranks: number of engines.
        block_size: tokens per block.
        capacity: hashes to remember per engine; 0 ignores prefixes.
        max_imbalance: the most by which the chosen engine's load may exceed the lowest load.
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
        `_remember`; without names if `capacity` is 0).

        Take the engines with `load <= lowest load + max_imbalance`, and choose the first by

            1. the most leading blocks of the prompt (`_match`),
            2. the lowest load,
            3. round robin: `_turn`, the engines after it, then those before it.

        Set `_turn` to the engine after the chosen one.

        Args:
            loads: the load of each engine, with all requests sent to it so far; see `load_score`.
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
        """Return the hashes of the prompt's first full blocks. The last token does not count: it is
        always computed."""
        size = self.block_size
        tokens = request.prompt_token_ids
        count = min((len(tokens) - 1) // size, ROUTED_BLOCKS)
        blocks = (tokens[i * size : (i + 1) * size] for i in range(count))
        return list(accumulate(blocks, hash_block, initial=hash_salt(request.cache_salt)))[1:]

    def _match(self, rank: int, names: list[bytes]) -> int:
        """Return the number of leading blocks that were sent to an engine before."""
        sent = self._sent[rank]
        return next((i for i, name in enumerate(names) if name not in sent), len(names))

    def _remember(self, rank: int, names: list[bytes]) -> None:
        sent = self._sent[rank]
        for name in reversed(names):  # the last block first, so that it is evicted first
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.capacity:
            sent.popitem(last=False)

    def forget(self) -> None:
        """Forget all prompts, after the engines' caches were emptied."""
        self._sent = [OrderedDict() for _ in self._sent]
