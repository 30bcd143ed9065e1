"""Stands in for llama-cpp-python: sequences of a context with their tokens, and a model that adds
up what it has seen.

It refuses batches that llama.cpp would misread: a token that does not follow what its sequence
holds, or too many of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

VOCABULARY = 40


def next_token(tokens: list[int]) -> int:
    """What the model says after these tokens."""
    return sum((i + 1) * token for i, token in enumerate(tokens)) % VOCABULARY


class Context:
    """Attributes: `sequences`, the tokens of each; `sizes`, the number of tokens of each batch."""

    def __init__(self, params: Any) -> None:
        self.params, self.sizes, self.next = params, list[int](), dict[int, int]()
        self.sequences: list[list[int]] = [[] for _ in range(params.n_seq_max)]


def llama_context_default_params() -> Any:
    return SimpleNamespace(
        n_ctx=512, n_batch=2048, n_ubatch=512, n_seq_max=1, n_threads=4, n_threads_batch=4
    )


def llama_model_default_params() -> Any:
    return SimpleNamespace()


def llama_model_load_from_file(path: bytes, params: Any) -> str:
    return path.decode()


def llama_init_from_model(model: str, params: Any) -> Context:
    return Context(params)


def llama_sampler_init_greedy() -> str:
    return "greedy"


def llama_batch_init(num_tokens: int, embedding: int, num_sequences: int) -> Any:
    rows = {name: [0] * num_tokens for name in ("token", "pos", "n_seq_id", "logits")}
    return SimpleNamespace(
        **rows, seq_id=[[0] * num_sequences for _ in range(num_tokens)], n_tokens=0
    )


def llama_get_memory(context: Context) -> Context:
    return context


def llama_memory_seq_rm(context: Context, sequence: int, first: int, end: int) -> bool:
    del context.sequences[sequence][first : None if end < 0 else end]
    return True


def llama_decode(context: Context, batch: Any) -> int:
    context.sizes.append(batch.n_tokens)
    if not 0 < batch.n_tokens <= context.params.n_batch:
        return 1
    for i in range(batch.n_tokens):
        tokens = context.sequences[batch.seq_id[i][0]]
        if batch.pos[i] != len(tokens) or batch.n_seq_id[i] != 1:
            return -1
        tokens.append(batch.token[i])
        context.next[i] = next_token(tokens) if batch.logits[i] else -1
    return 0


def llama_sampler_sample(sampler: str, context: Context, place: int) -> int:
    if context.next[place] < 0:
        raise AssertionError("no logits were asked for here")
    return context.next[place]
