"""Attention alone: how close decoding comes to the memory's bandwidth, and reading a prompt to the matrix peak."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nanovllm.attention.base import AttentionMetadata, kv_cache_shape
from nanovllm.lab.bench.gpu.setting import Row, Setting, Skip, reason_of
from nanovllm.lab.bench.gpu.timing import median_seconds
from nanovllm.ops.support import why_no_triton

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 8192, 32768)
# (new tokens, tokens before them)
PROMPTS = ((512, 0), (1024, 0), (2048, 0), (4096, 0), (8192, 0), (16384, 0), (512, 8192))
# Of a GPU's free memory; the rest is for queries, partial results and the cache that is flushed.
_MEMORY_SHARE = 0.8
# Compiling flex_attention takes this long, at worst.
_COMPILE_SECONDS = 25


def decode_bytes(num_seqs: int, context: int, itemsize: int = 2) -> int:
    """What a step of decoding has to move: every key and value once, the queries and the output."""
    keys_and_values = 2 * num_seqs * context * NUM_KV_HEADS * HEAD_DIM
    return (keys_and_values + 2 * num_seqs * NUM_HEADS * HEAD_DIM) * itemsize


def prefill_flops(query_len: int, context: int) -> int:
    """Two products of HEAD_DIM numbers for each query and each key that it sees, itself among them."""
    pairs = query_len * context + query_len * (query_len + 1) // 2
    return 4 * NUM_HEADS * HEAD_DIM * pairs


class Pool:
    """A paged cache of random numbers whose pages lie in random order."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        shape = kv_cache_shape(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.kv_cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.order = torch.randperm(num_blocks, dtype=torch.int32, device=device)

    def metadata(self, query_lens: Sequence[int], seq_len: int) -> AttentionMetadata:
        """Sequences of one length, each on pages of its own."""
        device, num_seqs = self.order.device, len(query_lens)
        width = -(-seq_len // BLOCK_SIZE)
        tables = self.order[: num_seqs * width].view(num_seqs, width)
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0, dtype=torch.int32)
        seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
        # Keys and values are there already: no slot is written.
        slots = torch.full((sum(query_lens),), -1, dtype=torch.int64, device=device)
        return AttentionMetadata(starts, seq_lens, tables, slots, max(query_lens), seq_len)


def _attention(q: Tensor, pool: Pool, metadata: AttentionMetadata) -> Callable[[], Tensor]:
    from nanovllm.attention.triton import paged_attention

    return functools.partial(paged_attention, q, pool.kv_cache, metadata, HEAD_DIM**-0.5)


def _queries(num_tokens: int, device: torch.device) -> Tensor:
    return torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device=device).to(torch.bfloat16)


def _refuse_without_triton(device: torch.device) -> None:
    if obstacle := why_no_triton(device, HEAD_DIM, torch.bfloat16):
        raise Skip(obstacle)


def decode(setting: Setting) -> Iterator[Row]:
    """One new token for each sequence of a batch."""
    device = setting.device
    _refuse_without_triton(device)
    batches, contexts = ((2,), (16,)) if setting.dry_run else (BATCHES, CONTEXTS)
    wanted = max(batches) * max(contexts) // BLOCK_SIZE
    block_bytes = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2
    fitting = wanted
    if device.type == "cuda":
        fitting = min(wanted, int(_MEMORY_SHARE * torch.cuda.mem_get_info()[0]) // block_bytes)
    pool = Pool(fitting, device)
    for num_seqs in batches:
        for context in contexts:
            row: Row = {"table": "decode", "batch": num_seqs, "context": context}
            if num_seqs * context > fitting * BLOCK_SIZE:
                yield row | {"reason": "does not fit into the memory"}
                continue
            work = _attention(_queries(num_seqs, device), pool, pool.metadata([1] * num_seqs, context))
            seconds = median_seconds(work, device)
            yield row | {"seconds": seconds, "num_bytes": decode_bytes(num_seqs, context)}


def prefill(setting: Setting) -> Iterator[Row]:
    """Prompts of one sequence, and beside them torch's own attention on keys and values that lie contiguously."""
    device = setting.device
    _refuse_without_triton(device)
    prompts = ((16, 0), (8, 16)) if setting.dry_run else PROMPTS
    longest = max(query_len + context for query_len, context in prompts)
    pool = Pool(-(-longest // BLOCK_SIZE), device)
    for query_len, context in prompts:
        seq_len = query_len + context
        row: Row = {"table": "prefill", "query_len": query_len, "context": context}
        row["flops"] = prefill_flops(query_len, context)
        metadata = pool.metadata([query_len], seq_len)
        seconds = median_seconds(_attention(_queries(query_len, device), pool, metadata), device)
        yield row | {"implementation": "nanovllm", "seconds": seconds}
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            if name != "cuDNN" or context == 0:  # which aligns its causal mask at the first key
                yield row | _other(
                    f"SDPA {name}", device, functools.partial(_sdpa, query_len, context, device, backend)
                )
    # Last, because each length has to be compiled; the ones that count first.
    for query_len, context in sorted(prompts, key=lambda p: (p != (8192, 0), p[1] == 0, -p[0])):
        row = {"table": "prefill", "query_len": query_len, "context": context}
        row["flops"] = prefill_flops(query_len, context)
        if setting.seconds_left < _COMPILE_SECONDS:
            yield row | {"implementation": "flex_attention", "reason": "no time left to compile it"}
            continue
        yield row | _other("flex_attention", device, functools.partial(_flex, query_len, context, device))


def _other(name: str, device: torch.device, prepare: Callable[[], Callable[[], object]]) -> Row:
    """The time of another implementation, or why it has none."""
    try:
        return {"implementation": name, "seconds": median_seconds(prepare(), device)}
    except Exception as error:  # not ours; that it cannot run is a result
        return {"implementation": name, "reason": reason_of(error)}


def _dense(query_len: int, context: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values: `[1, heads, tokens, HEAD_DIM]`, contiguous."""
    shapes = ((NUM_HEADS, query_len), (NUM_KV_HEADS, query_len + context), (NUM_KV_HEADS, query_len + context))
    q, k, v = (torch.randn(1, heads, tokens, HEAD_DIM, device=device).to(torch.bfloat16) for heads, tokens in shapes)
    return q, k, v


def _sdpa(query_len: int, context: int, device: torch.device, backend: SDPBackend) -> Callable[[], Tensor]:
    q, k, v = _dense(query_len, context, device)

    def work() -> Tensor:
        with sdpa_kernel(backend):
            if context == 0:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mask = causal_lower_right(query_len, query_len + context)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return work


def _flex(query_len: int, context: int, device: torch.device) -> Callable[[], Tensor]:
    q, k, v = _dense(query_len, context, device)

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + context >= key

    mask = create_block_mask(causal, None, None, query_len, query_len + context, device=device)
    torch.compiler.reset()  # after so many recompilations of one function torch would give up
    # Uncompiled it is as slow as it is correct, which is enough for a dry run.
    compiled = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)
