"""The animations of memory in figures/: small stories, played by the real scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.lab.viz.animation.animate import render
from nanovllm.lab.viz.animation.memory import tables_scene
from nanovllm.lab.viz.animation.pool import pool_scene
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.trace.trace import Trace

_SYSTEM = "You are a poet . Write a line"


def _told(lines: Sequence[tuple[str, int, str, str]], num_blocks: int) -> tuple[Trace, dict[str, list[str]]]:
    """A simulation of requests that are given as words: name, arrival step, prompt, answer."""
    vocabulary: dict[str, int] = {}
    requests, words = [], {}
    for name, step, prompt, answer in lines:
        tokens = [vocabulary.setdefault(word, len(vocabulary)) for word in prompt.split()]
        requests.append(SimulatedRequest(step, tokens, len(answer.split()), request_id=name))
        words[name] = prompt.split() + answer.split()
    return simulate(requests, num_kv_blocks=num_blocks, block_size=4, check_invariants=True), words


def block_tables() -> bytes:
    """What a block table is: three requests in a pool of seven blocks."""
    trace, words = _told(
        [
            ("A", 0, f"{_SYSTEM} on cats", "Soft paws at noon , a tail that curls on warm stone"),
            ("B", 2, "2 + 2", "= 4"),
            ("C", 5, f"{_SYSTEM} on rain", "Grey drops fall slow"),
        ],
        7,
    )
    retold = {
        (
            0,
            "admitted",
        ): "A's prompt of 10 tokens needs 3 blocks of 4. It gets 0, 1 and 2: this list is its block table.",
        (0, "prefill"): "Each token is computed once; what comes of it, its keys and values, is kept in a cell.",
        (1, "decode"): "Then A writes one token a step, into the next cell of its last block.",
        (2, "admitted"): "B comes. Its prompt fits into one block: it gets block 3.",
        (3, "grown"): "A's last block is full: it takes block 4, since 3 is B's. The table keeps them in order.",
        (8, "decode"): "In its table a text is in order; in the pool its blocks lie anywhere, and can be shared.",
    }
    title = "Block tables: memory in blocks of four tokens"
    steps = list(range(9))
    return render(lambda: tables_scene(trace, steps, title=title, words=words, retold=retold))


def prefix_cache() -> bytes:
    """A free block keeps its content until it is handed out again: found, shared, overwritten."""
    list_prompt = "List ten things that one can eat : bread , rice , corn , peas , figs , plums and"
    trace, words = _told(
        [
            ("A", 0, f"{_SYSTEM} on cats", "Soft"),
            ("B", 1, f"{_SYSTEM} on rain", "Grey drops ,"),
            ("C", 2, f"{_SYSTEM} on sun", "Warm stone"),
            ("D", 4, list_prompt, "nuts"),
            ("E", 5, f"{_SYSTEM} on snow", "Hush ,"),
        ],
        8,
    )
    retold = {
        (0, "admitted"): "A comes, and takes the blocks that are next in line: 0, 1 and 2.",
        (1, "hit"): "B's prompt begins like A's did: blocks 0 and 1 are found, and not computed again.",
        (4, "freed, still found"): "B and C are done. Their blocks go to the end of the line, a text's beginning last.",
        (4, "overwritten"): "D needs 5 blocks and gets the next in line. In block 3 it overwrites what B had left.",
        (5, "hit"): "E still finds blocks 0 and 1: what was given up last is overwritten last.",
        (5, "prefill"): "Only two tokens of E's prompt had to be computed. The rest came from the cache.",
    }
    title = "Prefix cache: what is in a free block can be used again"
    steps = list(range(6))
    return render(lambda: tables_scene(trace, steps, title=title, words=words, show_order=True, retold=retold))


def pool() -> bytes:
    """The pool over the life of eight requests."""
    lives = [  # arrival step, prompt, answer
        (0, 30, 22), (1, 45, 6), (2, 20, 14), (4, 60, 5), (7, 35, 10), (10, 50, 8), (13, 22, 9), (16, 42, 7),
    ]  # fmt: skip
    requests = [
        SimulatedRequest(step, prompt, output, request_id=name)
        for name, (step, prompt, output) in zip("ABCDEFGH", lives, strict=True)
    ]
    trace = simulate(requests, num_kv_blocks=28, block_size=8, check_invariants=True)
    steps = list(range(21))
    retold = {
        (5, "decode"): "Each request writes one token a step. Only its last block is not full.",
        (
            10,
            "overwritten",
        ): "F needs 7 blocks, and they may lie anywhere. What was in them, unused for longest, is lost.",
        (20, "decode"): "Nothing is set aside in advance: a request leaves at most a part of one block unused.",
    }
    title = "Paged memory: eight requests, one pool"
    return render(lambda: pool_scene(trace, steps, title=title, retold=retold))


FIGURES = {"block_tables.gif": block_tables, "prefix_cache.gif": prefix_cache, "pool.gif": pool}
