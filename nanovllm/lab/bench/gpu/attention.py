"""Attention alone: how close decoding comes to the memory's bandwidth, and prefill to the matrix
peak."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nanovllm.attention.base import AttentionMetadata, kv_cache_shape
from nanovllm.lab.bench.gpu.machine import median_seconds
from nanovllm.lab.bench.gpu.plan import DECODE, LATENT, OURS, PREFILL, SIMPLE
from nanovllm.lab.bench.parts import Setting, Skip, reason_of
from nanovllm.lab.bench.report import Row
from nanovllm.ops.support import why_no_triton

NUM_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
BLOCK_SIZE = 16
BATCHES = (1, 8, 64, 256)
CONTEXTS = (1024, 8192, 32768)
# (new tokens, tokens before them)
PROMPTS = ((512, 0), (1024, 0), (2048, 0), (4096, 0), (8192, 0), (16384, 0), (512, 8192))
# Of DeepSeek-V2-Lite; V3 has the same, and 128 heads, which eight ranks share.
RANK = 512
ROPE = 64
LATENT_HEADS = (16, 128)
# Of a GPU's free memory; the rest is for queries, partial results and the cache that is flushed.
_MEMORY_SHARE = 0.8
FLEX = "flex_attention"
# Compiling flex_attention takes this long, at worst.
_COMPILE_SECONDS = 25


def decode_bytes(num_seqs: int, context: int, itemsize: int = 2) -> int:
    """Bytes that a decode step has to move: every key and value once, the queries and the
    output."""
    keys_and_values = 2 * num_seqs * context * NUM_KV_HEADS * HEAD_DIM
    return (keys_and_values + 2 * num_seqs * NUM_HEADS * HEAD_DIM) * itemsize


def latent_bytes(num_seqs: int, context: int, num_heads: int, itemsize: int = 2) -> int:
    """Bytes that a step of latent decode has to move: every row of the cache once, absorbed
    queries, averages of latents."""
    return num_seqs * (context * (RANK + ROPE) + num_heads * (2 * RANK + ROPE)) * itemsize


def prefill_flops(query_len: int, context: int) -> int:
    """Two products of HEAD_DIM numbers for each query and each key that it sees, itself among
    them."""
    pairs = query_len * context + query_len * (query_len + 1) // 2
    return 4 * NUM_HEADS * HEAD_DIM * pairs


class Pool:
    """A paged cache of random numbers whose pages are in random order; of keys and values, or of
    latents of a width."""

    def __init__(self, num_blocks: int, device: torch.device, latent_width: int = 0) -> None:
        heads = kv_cache_shape(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        shape = (num_blocks, BLOCK_SIZE, latent_width) if latent_width else heads
        self.kv_cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.order = torch.randperm(num_blocks, dtype=torch.int32, device=device)

    def metadata(self, query_lens: Sequence[int], seq_len: int) -> AttentionMetadata:
        """Sequences of one length, each on pages of its own."""
        device = self.order.device
        num_seqs = len(query_lens)
        width = -(-seq_len // BLOCK_SIZE)
        tables = self.order[: num_seqs * width].view(num_seqs, width)
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0, dtype=torch.int32)
        seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
        # Keys and values are there already: no slot is written.
        slots = torch.full((sum(query_lens),), -1, dtype=torch.int64, device=device)
        return AttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=tables,
            slot_mapping=slots,
            max_query_len=max(query_lens),
            max_seq_len=seq_len,
        )


def _attention(
    num_tokens: int, pool: Pool, metadata: AttentionMetadata, is_simple: bool = False
) -> Callable[[], Tensor]:
    from nanovllm.attention import triton, triton_simple

    attend = triton_simple.paged_attention if is_simple else triton.paged_attention
    q = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device=pool.order.device).to(torch.bfloat16)
    return functools.partial(attend, q, pool.kv_cache, metadata, HEAD_DIM**-0.5)


def _device_with_triton(setting: Setting, head_dim: int) -> torch.device:
    if obstacle := why_no_triton(setting.device, head_dim):
        raise Skip(obstacle)
    return setting.device


def speed(
    setting: Setting, seconds: float, num_bytes: int | None = None, flops: int | None = None
) -> Row:
    """The cells of a measurement, beside the machine's ceilings."""
    row: Row = {"ms": 1e3 * seconds}
    if num_bytes is not None:
        rate = num_bytes / seconds
        row |= {"GB/s": rate / 1e9, "% of copy": setting.percent_of("bytes_per_second", rate)}
    if flops is not None:
        rate = flops / seconds
        row |= {"TFLOP/s": rate / 1e12, "% of peak": setting.percent_of("flops_per_second", rate)}
    return row


def _fitting_blocks(wanted: int, block_bytes: int, device: torch.device) -> int:
    if device.type == "cpu":
        return wanted
    return min(wanted, int(_MEMORY_SHARE * torch.cuda.mem_get_info()[0]) // block_bytes)


def decode(setting: Setting) -> Iterator[Row]:
    """One new token for each sequence of a batch; by the smallest kernel, too, at 8k."""
    device = _device_with_triton(setting, HEAD_DIM)
    batches, contexts = ((2,), (16,)) if setting.dry_run else (BATCHES, CONTEXTS)
    block_bytes = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2
    pool = Pool(
        _fitting_blocks(max(batches) * max(contexts) // BLOCK_SIZE, block_bytes, device), device
    )
    shapes = [(DECODE, *shape) for shape in itertools.product(batches, contexts)]
    shapes += [(SIMPLE, num_seqs, contexts[len(contexts) // 2]) for num_seqs in batches]
    for table, num_seqs, context in shapes:
        row: Row = {"table": table, "sequences": num_seqs, "context": context}
        if num_seqs * context > len(pool.order) * BLOCK_SIZE:
            yield row | {"why not": "does not fit into the memory"}
            continue
        metadata = pool.metadata([1] * num_seqs, context)
        work = _attention(num_seqs, pool, metadata, is_simple=table == SIMPLE)
        yield row | speed(setting, median_seconds(work, device), decode_bytes(num_seqs, context))


def latent(setting: Setting) -> Iterator[Row]:
    """One new token for each sequence of a batch with latent attention: the kernel alone, on
    absorbed queries."""
    device = _device_with_triton(setting, ROPE)
    from nanovllm.attention.triton_latent import TritonLatentBackend

    batches, contexts = ((2,), (32,)) if setting.dry_run else (BATCHES, CONTEXTS)
    wanted = max(batches) * max(contexts) // BLOCK_SIZE
    width = RANK + ROPE
    pool = Pool(_fitting_blocks(wanted, BLOCK_SIZE * width * 2, device), device, width)
    for num_heads, num_seqs, context in itertools.product(LATENT_HEADS, batches, contexts):
        row: Row = {"table": LATENT, "heads": num_heads, "sequences": num_seqs, "context": context}
        if num_seqs * context > len(pool.order) * BLOCK_SIZE:
            yield row | {"why not": "does not fit into the memory"}
            continue
        q = torch.randn(num_seqs, num_heads, width, device=device).to(torch.bfloat16)
        metadata = pool.metadata([1] * num_seqs, context)
        arguments = (q, pool.kv_cache, metadata.block_tables, metadata.seq_lens, RANK, width**-0.5)
        seconds = median_seconds(
            functools.partial(TritonLatentBackend().decode, *arguments), device
        )
        # Two products for each head and row: as wide as the row for the score, and as the latent
        # for the average.
        flops = 2 * num_seqs * context * num_heads * (2 * RANK + ROPE)
        yield row | speed(setting, seconds, latent_bytes(num_seqs, context, num_heads), flops)


def prefill(setting: Setting) -> Iterator[Row]:
    """Prompts of one sequence, and beside them torch's own attention on contiguous keys and
    values."""
    device = _device_with_triton(setting, HEAD_DIM)
    prompts = ((16, 0), (8, 16)) if setting.dry_run else PROMPTS
    pool = Pool(
        -(-max(query_len + context for query_len, context in prompts) // BLOCK_SIZE), device
    )
    own: dict[tuple[int, int], float] = {}

    def measured(
        name: str, prompt: tuple[int, int], prepare: Callable[[], Callable[[], object]]
    ) -> Row:
        row: Row = {
            "table": PREFILL,
            "new tokens": prompt[0],
            "context before": prompt[1],
            "implementation": name,
        }
        if name == FLEX and setting.seconds_left < _COMPILE_SECONDS:
            return row | {"why not": "no time left to compile it"}
        try:
            seconds = median_seconds(prepare(), device)
        except Exception as error:  # an implementation of torch that cannot run this is a result
            if name == OURS:
                raise
            return row | {"why not": reason_of(error)}
        own.setdefault(prompt, seconds)
        return (
            row
            | speed(setting, seconds, flops=prefill_flops(*prompt))
            | {"÷ nanovllm": seconds / own[prompt]}
        )

    for prompt in prompts:
        query_len, context = prompt
        metadata = pool.metadata([query_len], query_len + context)
        yield measured(OURS, prompt, functools.partial(_attention, query_len, pool, metadata))
        for name, backend in (
            ("SDPA flash", SDPBackend.FLASH_ATTENTION),
            ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
        ):
            if name != "SDPA cuDNN" or context == 0:
                # This aligns its causal mask at the first key.
                yield measured(name, prompt, functools.partial(_sdpa, *prompt, device, backend))
    # Last, because each length has to be compiled; the one that has a goal first.
    for prompt in sorted(prompts, key=lambda p: (p != (8192, 0), p[1] == 0, -p[0])):
        yield measured(FLEX, prompt, functools.partial(_flex, *prompt, device))


def _dense(query_len: int, context: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values: `[1, heads, tokens, HEAD_DIM]`, contiguous."""
    shapes = (
        (NUM_HEADS, query_len),
        (NUM_KV_HEADS, query_len + context),
        (NUM_KV_HEADS, query_len + context),
    )
    q, k, v = (
        torch.randn(1, heads, tokens, HEAD_DIM, device=device).to(torch.bfloat16)
        for heads, tokens in shapes
    )
    return q, k, v


def _sdpa(
    query_len: int, context: int, device: torch.device, backend: SDPBackend
) -> Callable[[], Tensor]:
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
    # A dry run does without the compiler.
    compiled = (
        torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    )
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)
