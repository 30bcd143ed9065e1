"""The films in figures/: small traces of the real scheduler, without a model, with captions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.lab.viz.film import VIEWS, Beat, Film
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.trace.trace import Trace

_SYSTEM = "You are a poet . Write a line"


def _told(story: str) -> list[Beat]:
    """The beats of a story, which has a line for each: the step, what is in focus, and the words, which stand as long as they
    take to read."""
    beats = []
    for line in story.strip().splitlines():
        place, words = line.strip().split(": ", 1)
        step, _, focus = place.partition(" ")
        beats.append(Beat(int(step), words, focus or None, round(0.8 + len(words) / 45, 1)))
    return beats


def _beats(trace: Trace, story: str) -> list[Beat]:
    """The told beats, and between them a short look at each step, with the caption before it."""
    told, beats = _told(story), list[Beat]()
    for record in (record for record in trace if record.requests and record.step <= told[-1].step):
        here = [beat for beat in told if beat.step == record.step]
        beats += here or [Beat(record.step, beats[-1].words if beats else "")]
    return beats


def _worded(lines: Sequence[tuple[str, int, str, str]], num_blocks: int) -> tuple[Trace, dict[str, Any]]:
    """A simulation of requests that are given as words (name, arrival step, prompt, answer), and the settings of its film."""
    vocabulary: dict[str, int] = {}
    requests, words = [], {}
    for name, step, prompt, answer in lines:
        tokens = [vocabulary.setdefault(word, len(vocabulary)) for word in prompt.split()]
        requests.append(SimulatedRequest(step, tokens, len(answer.split()), request_id=name))
        words[name] = prompt.split() + answer.split()
    return simulate(requests, num_kv_blocks=num_blocks, block_size=4, check_invariants=True), {"words": words}


def block_tables() -> Film:
    """What a block table is: three requests in a pool of seven blocks."""
    trace, settings = _worded(
        [
            ("A", 0, f"{_SYSTEM} on cats", "Soft paws at noon , a tail that curls on warm stone"),
            ("B", 2, "2 + 2", "= 4"),
            ("C", 5, f"{_SYSTEM} on rain", "Grey drops fall slow"),
        ],
        7,
    )
    story = """
        0: A's prompt of 10 tokens needs 3 blocks of 4. It gets blocks 0, 1 and 2: this list is its block table.
        0: Each token is computed once. Its keys and values are kept in a cell of its block.
        1: Then A writes one token per step, into the next cell of its last block.
        2 B: B arrives. Its prompt fits into one block, and it gets block 3.
        3 A: A's last block is full: A takes block 4, since block 3 is B's. The table keeps them in order.
        5 C: C's prompt begins with the same words as A's: blocks 0 and 1 are shared, and not computed again.
        8: In its table a text is in order. In the pool its blocks can be anywhere, and can be shared.
    """
    return Film(trace, "Block tables: memory in blocks of four tokens", VIEWS["tables"], _beats(trace, story), settings)


def prefix_cache() -> Film:
    """A free block keeps its content until it is handed out again: found, shared, overwritten."""
    list_prompt = "List ten things that one can eat : bread , rice , corn , peas , figs , plums and"
    trace, settings = _worded(
        [
            ("A", 0, f"{_SYSTEM} on cats", "Soft"),
            ("B", 1, f"{_SYSTEM} on rain", "Grey drops ,"),
            ("C", 2, f"{_SYSTEM} on sun", "Warm stone"),
            ("D", 4, list_prompt, "nuts"),
            ("E", 5, f"{_SYSTEM} on snow", "Hush ,"),
        ],
        8,
    )
    story = """
        0: A arrives, and takes the first three free blocks: 0, 1 and 2.
        1 B: A is done. B's prompt begins like A's did: blocks 0 and 1 are found, and not computed again.
        2 C: C begins with the same words while B still runs: both hold blocks 0 and 1.
        4 D: B and C are done. D needs 5 blocks; in block 3 it overwrites what B left.
        5 E: E still finds blocks 0 and 1: blocks that were freed last are overwritten last.
        5: Only two tokens of E's prompt had to be computed. The others came from the cache.
    """
    title = "Prefix cache: a free block keeps its content"
    return Film(trace, title, VIEWS["tables"], _beats(trace, story), settings)


def pool() -> Film:
    """The pool over the life of eight requests."""
    lives = [(0, 30, 22), (1, 45, 6), (2, 20, 14), (4, 60, 5), (7, 35, 10), (10, 50, 8), (13, 22, 9), (16, 42, 7)]
    requests = [
        SimulatedRequest(step, prompt, output, request_id=name)
        for name, (step, prompt, output) in zip("ABCDEFGH", lives, strict=True)
    ]
    trace = simulate(requests, num_kv_blocks=28, block_size=8, check_invariants=True)
    story = """
        0: A arrives with a prompt of 30 tokens, and takes the first four blocks of 8 tokens.
        1: B arrives and takes the next blocks. Each request fills its blocks token by token.
        5 A: Each request writes one token per step. Only its last block is not full.
        7: B has ended. Its blocks are free, and keep their content until they are taken again (hatched).
        10 F: F needs 7 blocks, and they may be anywhere. It takes the blocks that have been free for longest.
        20: Nothing is set aside in advance: a request leaves at most a part of one block unused.
    """
    return Film(trace, "Paged memory: eight requests, one pool", ["pool", "queues"], _beats(trace, story))


def scheduler() -> Film:
    """A long prompt fills the gap beside two decodes; then the pool runs dry, and its owner is swapped out and back."""
    requests = [
        SimulatedRequest(0, 6, 11, request_id="A"),
        SimulatedRequest(0, 7, 9, request_id="B"),
        SimulatedRequest(2, 26, 5, request_id="C"),
    ]
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    trace = simulate(requests, num_kv_blocks=13, preemption_mode="swap", enable_prefix_caching=False, **options)
    story = """
        0: A and B arrive. Their prompts of 6 and 7 tokens fit into the budget of 16 tokens.
        1: A and B decode: one token each. Most of the budget is left.
        2 C: C arrives with a prompt of 26 tokens. It gets the 14 tokens that A and B leave over.
        3 C: C's last 12 prompt tokens. The pool is full now.
        4: All three decode, each into its last block.
        6 C: B needs one more block, and no block is free: C, which arrived last, is preempted.
        7: C's blocks are copied to host memory. C waits there until enough blocks are free.
        8 B: B samples its last token. Its blocks will be free in the next step.
        9 C: C is copied back, and goes on where it stopped: none of its tokens is computed again.
        10: A and C sample their last tokens.
    """
    return Film(trace, "The scheduler: which request gets which tokens?", VIEWS["scheduler"], _beats(trace, story))


def engine() -> Film:
    """Six requests: a long prompt, a prefix that is found again, a preemption, a client that disconnects."""
    system = list(range(12))
    requests = [
        SimulatedRequest(0, 7, 20, request_id="A"),
        SimulatedRequest(0, 9, 9, request_id="B"),
        SimulatedRequest(3, [*system, *range(20, 40)], 14, request_id="C"),
        SimulatedRequest(9, [*system, 50, 51], 12, request_id="D"),
        SimulatedRequest(15, 20, 30, request_id="E", abort_step=26),
        SimulatedRequest(18, 9, 9, request_id="F"),
    ]
    trace = simulate(requests, num_kv_blocks=20, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    story = """
        0: A and B arrive. Both prompts are computed in one step.
        3 C: C's prompt of 32 tokens is computed in chunks, beside the tokens of A and B.
        9 D: D arrives. 12 of its 14 prompt tokens are found in the prefix cache: only 2 are computed.
        15 E: E arrives, and waits: too few blocks are free.
        18 D: The pool is full. D, the running request that arrived last, is preempted and loses its blocks.
        19 D: C has ended. D is admitted again: 16 of its 23 tokens are still found, 7 are computed again.
        26 E: E's client disconnects: E is aborted, and its blocks are free at once.
        29: F samples its last token.
    """
    return Film(trace, "Six requests, step by step", VIEWS["timeline"], _beats(trace, story), width=720)


def _batch_trace() -> Trace:
    """Two requests decode, and a third has computed half of its prompt. Others have come and gone, so that block tables have
    gaps."""
    requests = [
        SimulatedRequest(0, 5, 3, request_id="X"),
        SimulatedRequest(0, 9, 14, request_id="A"),
        SimulatedRequest(2, 6, 3, request_id="Y"),
        SimulatedRequest(4, 5, 8, request_id="B"),
        SimulatedRequest(7, 20, 6, request_id="C"),
    ]
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4}
    return simulate(requests, num_kv_blocks=18, enable_prefix_caching=False, **options)


def attention() -> Film:
    """The pages that a decode reads, and those that a chunk of a prompt reads and writes."""
    story = """
        7: Each request writes the keys of its new tokens (solid), then reads its older pages (pale).
        7 C: C's first 10 prompt tokens are written to three pages. C has no older tokens to read.
        8 A: A decodes: one token is written, and its one query reads the 15 keys before it, in 4 pages.
        8 C: C's next 10 tokens: each page that is read serves all ten queries.
        9 C: C has computed its prompt. Now each step reads all its pages for one query.
        10: Each decode reads one key more than the decode before.
    """
    return Film(_batch_trace(), "Attention reads pages, wherever they are", ["attention", "pool"], _told(story))


def batch() -> Film:
    """How a schedule becomes positions and slots."""
    story = """
        8: The schedule: one token for A, one for B, ten for C. They are packed one after another.
        8 C: Position: C has 10 tokens in the cache, so its new tokens are at positions 10 to 19.
        8 C: Slot: the block table says which block a position is in; slot = block × 4 + position % 4.
        8 A: A's token is at position 15: the last slot of the fourth block in A's table.
        9: The next step: three tokens, in the same buffers. Each request is one row now.
        12: B has ended. Nothing is moved: the batch is packed anew in each step.
    """
    return Film(_batch_trace(), "A schedule becomes tensors", ["batch", "attention"], _told(story))


_FILMS: list[Callable[[], Film]] = [block_tables, prefix_cache, pool, scheduler, engine, attention, batch]
FILMS = {f"{make.__name__}.gif": make for make in _FILMS}
