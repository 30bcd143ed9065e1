"""Several engines beside one another: which of them gets a request, and how they keep in step if they share experts.

Built by notebooks/25_data_parallel.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections import OrderedDict
from collections.abc import Sequence

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.distributed.groups import Grid
from nanovllm.kv.manager import hash_block


def engine_grid(config: EngineConfig) -> tuple[Grid, int]:
    """The grid that an engine's ranks belong to, and the number of the first of them.

    Engines in lock-step are one grid. All others have one each: they never talk to one another.
    """
    ranks = Grid(1, config.pipeline_parallel_size, config.tensor_parallel_size)
    if not config.in_lock_step:
        return ranks, 0
    assert config.data_parallel_rank is not None
    first = config.data_parallel_rank * ranks.world_size
    return dataclasses.replace(ranks, data=config.data_parallel_size), first


def rank_config(config: EngineConfig, rank: int, address: str) -> EngineConfig:
    """The settings of one of the engines.

    Args:
        address: where the ranks of all engines find one another; "" if they need not.
    """
    trace = trace_path(config.trace, rank) if config.trace is not None else None
    return dataclasses.replace(config, data_parallel_rank=rank, data_parallel_address=address, trace=trace)


def trace_path(path: str, rank: int) -> str:
    """run.jsonl.gz -> run.dp0.jsonl.gz: every engine writes its own file."""
    whole = pathlib.Path(path)
    name, _, ending = whole.name.partition(".")
    return str(whole.with_name(f"{name}.dp{rank}" + (f".{ending}" if ending else "")))


class Waves:
    """When an engine in lock-step computes. A wave is a row of steps that all engines make together: it begins when the
    coordinator orders it, and ends after the first step in which nobody had a request.

    Attributes:
        ended: waves that have ended; also the number of the one that runs, or comes next.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._ordered = 0  # waves that have been ordered

    @property
    def running(self) -> bool:
        """True while every engine has to make one step after another."""
        return self._ordered > self.ended

    def start(self, wave: int) -> None:
        """An order to start this wave has come. Late, it changes nothing; early (the others have seen the end of the one
        before, and this engine has not yet), it counts as soon as that is over."""
        self._ordered = max(self._ordered, wave + 1)

    def end(self, wave: int) -> None:
        """In a step of this wave nobody had a request: it is over. Steps that were launched before that was known belong to
        it, too, and say so once more."""
        self.ended = max(self.ended, wave + 1)


# Blocks of a prompt that the router looks at: more would cost time, and prompts that agree so far are alike.
ROUTED_BLOCKS = 64
# A waiting request weighs as much as so many running ones, as in vLLM: it tells that a rank is full.
WAITING_WEIGHT = 4
# What a rank may have more than the least busy one and still get a request for the sake of its prefix.
MAX_IMBALANCE = 8


def load_score(num_waiting: int, num_running: int) -> int:
    """How busy an engine is."""
    return WAITING_WEIGHT * num_waiting + num_running


class Router:
    """Chooses the engine for a request: the one that most likely has the longest part of its prompt cached, unless that is
    too busy; else the least busy one; else they take turns.

    It remembers the names of the blocks that it has sent to each engine (see `hash_block`), least recently used
    first, and no more of them than the engine has blocks: this is a guess at what is cached there, made without asking.

    Args:
        num_ranks: engines.
        block_size: tokens a block.
        capacity: names to remember for each engine; 0 switches the guessing off.
        max_imbalance: by how much the load of an engine may be above the least one for it to be chosen.
    """

    def __init__(self, num_ranks: int, block_size: int, capacity: int, max_imbalance: int = MAX_IMBALANCE) -> None:
        self.block_size, self.capacity, self.max_imbalance = block_size, capacity, max_imbalance
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._turn = 0

    def choose(self, request: EngineRequest, loads: Sequence[int]) -> int:
        """The engine that gets the request; from now on its prompt counts as cached there.

        Args:
            loads: how busy each engine is, see `load_score`, with all that has been sent to it.
        """
        names = self._names(request) if self.capacity else []
        least, size = min(loads), len(loads)
        rank = min(
            (rank for rank in range(size) if loads[rank] - least <= self.max_imbalance),
            key=lambda rank: (-self._match(rank, names), loads[rank], (rank - self._turn) % size),
        )
        self._turn = (rank + 1) % size
        self._remember(rank, names)
        return rank

    def forget(self) -> None:
        """Nothing is cached anywhere any more."""
        for sent in self._sent:
            sent.clear()

    def _names(self, request: EngineRequest) -> list[bytes]:
        """Of the prompt's first full blocks; without the last token, which is never taken from a cache."""
        size, tokens = self.block_size, request.prompt_token_ids
        count = min((len(tokens) - 1) // size, ROUTED_BLOCKS)
        name = hashlib.sha256((request.cache_salt or "").encode()).digest()
        names = []
        for i in range(count):
            name = hash_block(name, tokens[i * size : (i + 1) * size])
            names.append(name)
        return names

    def _match(self, rank: int, names: list[bytes]) -> int:
        """How many of the blocks, from the first on, were sent there."""
        sent = self._sent[rank]
        return next((i for i, name in enumerate(names) if name not in sent), len(names))

    def _remember(self, rank: int, names: list[bytes]) -> None:
        sent = self._sent[rank]
        for name in reversed(names):  # as in the pool, the end of a prompt goes first
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.capacity:
            sent.popitem(last=False)
