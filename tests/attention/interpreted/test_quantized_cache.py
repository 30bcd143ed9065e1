"""The Triton kernels over a KV cache in 8 bits, against plain torch: the same bytes are written,
and attention differs by rounding."""

from __future__ import annotations

import pytest
import torch

from nanovllm import LLM
from nanovllm.attention.base import kv_cache_shape
from nanovllm.attention.quantized import QuantizedBackend
from nanovllm.attention.torch import TorchBackend
from nanovllm.attention.triton import Hardware, TritonBackend
from nanovllm.attention.triton_quantized import QuantizedTritonBackend, write_kv_cache
from nanovllm.lab.cases import TOLERANCES, Problem, relative_error
from nanovllm.ops import quantized_cache
from nanovllm.ops.quantized_cache import LARGEST, SCALE_BYTES
from tests.examples import by_night
from tests.oracle import greedy, make_checkpoint
from tests.pairwise import covering_cases
from tests.stand_ins import set_hardware

KINDS = list(LARGEST)
DECODES = [(1, 127), (1, 0), (1, 300)]
MIXED = [(40, 0), (17, 48), (0, 5), (1, 290), (1, 0)]
SMALL = Hardware(8, 227 * 1024)

VALUES = {
    "kind": KINDS,
    "sequences": [DECODES, MIXED],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "head_dim": [64, 80, 128],
    "heads": [(4, 2), (9, 3), (4, 4)],
    "block_size": [1, 16, 24, 128],
    "options": [(), (24,), (0, 5.0)],
}
PAIRS = [
    ("kind", "dtype"),
    ("kind", "sequences"),
    ("kind", "block_size"),
    ("kind", "head_dim"),
    ("sequences", "options"),
]
# By day each value, and each kind with each sort of sequences; at night each pair.
BY_DAY = covering_cases(VALUES, [("kind", "sequences")])
CASES = [*BY_DAY, *by_night(covering_cases(VALUES, PAIRS))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case) -> None:
    dtype, head_dim, (num_heads, num_kv_heads) = case["dtype"], case["head_dim"], case["heads"]
    problem = Problem(1, case["sequences"], case["block_size"], dtype, padding_rows=2)
    shape = kv_cache_shape(
        problem.num_blocks, num_kv_heads, problem.block_size, head_dim + SCALE_BYTES
    )
    # NaN, and scales of NaN, wherever nothing is written.
    cache = torch.full(shape, -1, dtype=torch.int8).view(case["kind"])
    for (_, context_len), slots in zip(case["sequences"], problem.slots, strict=True):
        context = problem.draw(2, context_len, num_kv_heads, head_dim)
        quantized_cache.write_kv_cache(*context, cache, slots[:context_len])
    caches, outputs = [cache, cache.clone()], []
    q, k, v = (
        problem.draw(problem.num_rows, heads, head_dim)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    backends = (
        QuantizedTritonBackend(TritonBackend(SMALL), case["kind"]),
        QuantizedBackend(TorchBackend(), case["kind"]),
    )
    for backend, its in zip(backends, caches, strict=True):
        outputs.append(
            backend.forward(3 * q, k, v, its, problem.metadata, head_dim**-0.5, *case["options"])[
                : problem.num_tokens
            ]
        )
    assert torch.equal(*(its.view(torch.int8) for its in caches))
    assert relative_error(outputs[0], outputs[1]) < TOLERANCES[dtype]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_rounding(kind: torch.dtype) -> None:
    """Ties between neighbours, numbers below the normal ones, zeros, tiny and huge ones: the bytes
    of plain torch."""
    bits = torch.arange(0x7E, dtype=torch.uint8)
    grid = bits.view(torch.float8_e4m3fn).float() if kind != torch.int8 else torch.arange(127.0)
    halves = torch.cat([(grid[1:] + grid[:-1]) / 2, -grid, torch.zeros(4)])[:248].view(4, 1, 62)
    rows = torch.cat([torch.full((4, 1, 1), LARGEST[kind]), halves, torch.zeros(4, 1, 1)], dim=-1)
    x = torch.cat([rows, rows * 1e35, rows * 1e-30, rows * 1e-36, rows * 0])
    caches = [
        torch.zeros(kv_cache_shape(2, 1, 16, 68), dtype=torch.int8).view(kind) for _ in range(2)
    ]
    for write, cache in zip((write_kv_cache, quantized_cache.write_kv_cache), caches, strict=True):
        write(x, -x, cache, torch.arange(len(x)))
    assert torch.equal(*(cache.view(torch.int8) for cache in caches))


@pytest.mark.parametrize("kind", ["int8", *by_night(["fp8"])])
def test_tokens_of_plain_torch(kind: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_hardware(monkeypatch, Hardware(1, 227 * 1024))
    checkpoint, prompts = (
        str(make_checkpoint(tmp_path)),
        [[5, 17, 200], list(range(30, 49)), [*range(30, 46), 9]],
    )
    tokens = []
    for backend in ("triton", "torch"):
        llm = LLM(
            checkpoint,
            dtype="float32",
            attention_backend=backend,
            kv_cache_dtype=kind,
            num_kv_blocks=32,
        )
        tokens.append(greedy(llm, prompts, 3))
    assert tokens[0] == tokens[1]
