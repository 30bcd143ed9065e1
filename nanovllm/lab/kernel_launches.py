"""The launches of the engine's Triton kernels on a target GPU, recorded without the GPU.

The engine's own code runs on tensors without memory (torch's device "meta") and is told the
target's hardware. So the recorded specialisations are those that the target would run, and there is
no second list of signatures."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nanovllm.attention.base import AttentionMetadata, Rotary, kv_cache_shape
from nanovllm.attention.latent import latent_cache_shape
from nanovllm.attention.triton import Hardware, TritonBackend
from nanovllm.attention.triton_latent import TritonLatentBackend
from nanovllm.attention.triton_quantized import QuantizedTritonBackend
from nanovllm.attention.triton_simple import SimpleTritonBackend
from nanovllm.lab.kernel_compiler import TARGETS, Launch, Target, record_launches, specialise
from nanovllm.ops import triton as ops
from nanovllm.ops import triton_quantized as quantized
from nanovllm.ops.quantized_cache import LARGEST

GROUPS = (1, 3, 4, 7, 8)  # query heads per KV head
BLOCK_SIZES = (16, 32, 64, 128, 256)
VARIANTS = ((0, 0.0), (4096, 0.0), (0, 50.0), (4096, 50.0))  # (sliding window, soft cap)
NUM_KV_HEADS = 8
# Latent attention as in DeepSeek-V2-Lite, and in V2 and V3 on four ranks and on one; rope and rank,
# also such as fill no power of two.
LATENT_HEADS = (16, 32, 128)
LATENT_SIZES = ((64, 512), (48, 384))
# Rows of SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B.
HIDDEN_SIZES = (576, 2048, 4096, 8192)
INTERMEDIATE_SIZES = (1536, 8192, 14336, 28672)
# Of SmolLM2-135M, and one that is no multiple of 16 (GPT-2): Triton specialises sizes.
VOCAB_SIZES = (49152, 50257)
# (experts per rank, hidden size, intermediate size) of Mixtral-8x7B, Qwen3-30B-A3B, and DeepSeek-V3
# on 8 ranks.
EXPERTS = ((8, 4096, 14336), (128, 2048, 768), (32, 7168, 2048))
ROWS_PER_EXPERT = (4, 100, 1000)  # one for each height of a tile


class Batch(NamedTuple):
    """The host's knowledge of a step, which decides how kernels are launched."""

    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int


DECODES = tuple(
    Batch(num_seqs, num_seqs, 1, 131072) for num_seqs in (64, 1, 8, 16, 32, 128, 256, 512)
)
# Queries for each height of a tile, of one sequence or several, with long contexts and short ones.
PREFILLS = (
    Batch(1, 8, 8, 131072),
    Batch(64, 2112, 2048, 131072),
    Batch(1, 4, 4, 2000),
    Batch(1, 65536, 65536, 131072),
    Batch(1, 2048, 2048, 2048),
    Batch(17, 85, 8, 200),
)
FEW_BATCHES = (DECODES[0], *PREFILLS[:2])


class Case(NamedTuple):
    """A model's attention, and the batches to launch it for."""

    head_dim: int
    dtype: str
    group: int = 4
    block_size: int = 16
    sliding_window: int = 0
    soft_cap: float = 0.0
    batches: tuple[Batch, ...] = FEW_BATCHES
    kv_dtype: torch.dtype | None = None  # of a quantized cache


def cases(dtypes: Sequence[str], head_dims: Sequence[int]) -> Iterator[Case]:
    """Yield a selection in which each size occurs.

    It has float16 once, since bfloat16 takes the same resources.
    """
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        case = Case(head_dim, dtype)
        if (dtype, head_dim) == ("bfloat16", 128):
            yield case._replace(batches=DECODES + PREFILLS)
            yield from (case._replace(group=group) for group in GROUPS)
            yield from (case._replace(block_size=size) for size in BLOCK_SIZES)
            yield from (
                case._replace(sliding_window=window, soft_cap=cap) for window, cap in VARIANTS
            )
        elif dtype != "float16" or head_dim == 128 or "bfloat16" not in dtypes:
            yield case
        if dtype == "bfloat16":
            yield from (
                case._replace(kv_dtype=dtype, batches=(*FEW_BATCHES, PREFILLS[3]))
                for dtype in LARGEST
            )


def launch_attention(case: Case, target: Target) -> None:
    """Run the Triton backend as a model would on the target."""
    backend = TritonBackend(_hardware(target))
    if case.kv_dtype is not None:
        backend = QuantizedTritonBackend(backend, case.kv_dtype)
    dtype = getattr(torch, case.dtype)
    num_heads = case.group * NUM_KV_HEADS
    with torch.device("meta"):
        # Over 2^31 bytes, as on a real GPU: on AMD, Triton addresses smaller tensors differently.
        num_blocks = 2**32 // (NUM_KV_HEADS * case.block_size * case.head_dim)
        width = case.head_dim + backend.scale_bytes
        shape = kv_cache_shape(num_blocks, NUM_KV_HEADS, case.block_size, width)
        kv_cache = torch.empty(shape, dtype=case.kv_dtype or dtype)
        cos_sin = torch.empty(131072, case.head_dim, dtype=torch.float32)
        for batch in case.batches:
            heads = torch.empty(
                batch.num_tokens, num_heads + 2 * NUM_KV_HEADS, case.head_dim, dtype=dtype
            )
            q, k, v = heads.split([num_heads, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            rotary = Rotary(torch.empty(batch.num_tokens, dtype=torch.int64), cos_sin)
            metadata = _metadata(batch, case.block_size)
            rotation = {"rotary": rotary} if backend.fuses_rotary else {}
            backend.forward(
                q,
                k,
                v,
                kv_cache,
                metadata=metadata,
                scale=0.1,
                sliding_window=case.sliding_window,
                soft_cap=case.soft_cap,
                **rotation,
            )


def launch_simple_attention(dtype_name: str, head_dims: Sequence[int]) -> None:
    """Run the smallest backend."""
    dtype = getattr(torch, dtype_name)
    num_heads = 4 * NUM_KV_HEADS
    batch = DECODES[0]
    with torch.device("meta"):
        for head_dim in head_dims:
            heads = torch.empty(
                batch.num_tokens, num_heads + 2 * NUM_KV_HEADS, head_dim, dtype=dtype
            )
            q, k, v = heads.split([num_heads, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            num_blocks = 2**32 // (NUM_KV_HEADS * 16 * head_dim)
            kv_cache = torch.empty(
                kv_cache_shape(num_blocks, NUM_KV_HEADS, 16, head_dim), dtype=dtype
            )
            SimpleTritonBackend().forward(
                q, k, v, kv_cache, metadata=_metadata(batch, 16), scale=0.1
            )


def launch_latent_attention(dtype_name: str, target: Target) -> None:
    """Run the Triton backend of latent attention on batches of decodes (torch computes prompts)."""
    backend = TritonLatentBackend(_hardware(target))
    dtype = getattr(torch, dtype_name)
    # Every number of splits once; the number of heads, the sizes and other dtypes change other
    # things.
    every = (
        [(LATENT_HEADS[0], batch, LATENT_SIZES[0]) for batch in DECODES]
        if dtype_name == "bfloat16"
        else []
    )
    with torch.device("meta"):
        for num_heads, batch, (rope, rank) in [
            *every,
            *itertools.product(LATENT_HEADS, DECODES[:2], LATENT_SIZES),
        ]:
            kv_cache = torch.empty(
                latent_cache_shape(2**32 // (16 * rank), 16, rank + rope), dtype=dtype
            )
            q = torch.empty(batch.num_seqs, num_heads, 128 + rope, dtype=dtype)
            up = torch.empty(num_heads, 128 + 128, rank, dtype=dtype)
            latent = torch.empty(batch.num_seqs, rank + rope, dtype=dtype)
            backend.forward(q, latent, up, kv_cache, metadata=_metadata(batch, 16), scale=0.1)


def _hardware(target: Target) -> Hardware:
    generation = target.arch // 10 if isinstance(target.arch, int) else 9
    return Hardware(target.num_processors, target.shared_memory, target.warp_size, generation)


def _metadata(batch: Batch, block_size: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.empty(batch.num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.empty(batch.num_seqs, dtype=torch.int32),
        block_tables=torch.empty(
            batch.num_seqs, -(-batch.max_seq_len // block_size), dtype=torch.int32
        ),
        slot_mapping=torch.empty(batch.num_tokens, dtype=torch.int64),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )


def launch_operators(dtype_name: str, head_dims: Sequence[int]) -> None:
    """Run the small operators, the grouped matrix product, and the products with quantized
    weights."""
    dtype = getattr(torch, dtype_name)
    with torch.device("meta"):
        for hidden in HIDDEN_SIZES:
            x = torch.empty(64, hidden, dtype=dtype)
            ops.rms_norm(x, x[0], 1e-5)
            ops.add_rms_norm(x, torch.empty_like(x), x[0], 1e-5)
        for size in INTERMEDIATE_SIZES:
            ops.silu_and_mul(torch.empty(64, 2 * size, dtype=dtype))
            quantized.quantize_rows(torch.empty(64, size, dtype=dtype))
        for vocab_size in VOCAB_SIZES:
            ops.argmax(torch.empty(64, vocab_size, dtype=dtype))
        # Each tile, with few programs and with many.
        for tokens, outputs in itertools.product((1, 64, 1000), (1024, 65536)):
            x = torch.empty(tokens, 4096, dtype=dtype)
            scales = torch.empty(outputs, 32, dtype=dtype)
            values = torch.empty(outputs, 4096, dtype=torch.int8)
            [nibbles] = quantized.pack_nibbles(torch.empty(outputs, 512, dtype=torch.int32))
            for zeros in (None, values[:, :32].contiguous()):
                quantized.linear_w4a16(x, nibbles, scales, zeros)
            quantized.linear_w8a16(x, values, scales)
            quantized.linear_w8a8(x, values, torch.empty(outputs, 1))
        for (num_experts, hidden, size), rows in itertools.product(EXPERTS, ROWS_PER_EXPERT):
            counts = torch.empty(num_experts, dtype=torch.int64)
            for inputs, outputs in ((hidden, 2 * size), (size, hidden)):
                x = torch.empty(num_experts * rows, inputs, dtype=dtype)
                ops.grouped_linear(
                    x, torch.empty(num_experts, outputs, inputs, dtype=dtype), counts
                )
        for head_dim in head_dims:
            heads = torch.empty(64, 6 * NUM_KV_HEADS, head_dim, dtype=dtype)
            q, k, _ = heads.split([4 * NUM_KV_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            ops.rms_norm(q, heads[0, 0], 1e-6)
            cos_sin = torch.empty(131072, head_dim, dtype=torch.float32)
            ops.apply_rope(q, k, torch.empty(64, dtype=torch.int64), cos_sin)


def engine_launches(target: str, dtypes: Sequence[str], head_dims: Sequence[int]) -> list[Launch]:
    """Return the launches that the engine can make on a target, each specialisation once."""
    gpu = TARGETS[target]

    def run() -> None:
        for case in cases(dtypes, head_dims):
            launch_attention(case, gpu)
        for dtype in dtypes:
            launch_simple_attention(dtype, head_dims)
            launch_latent_attention(dtype, gpu)
            launch_operators(dtype, head_dims)

    distinct: dict[tuple[str, str], Launch] = {}
    for launch in record_launches(run):
        source, options = specialise(launch, gpu)
        distinct.setdefault((source.hash(), options.hash()), launch)
    return list(distinct.values())
