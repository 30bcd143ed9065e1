"""Quantized weights: every format is read as its description says, in every architecture and grid, and what cannot be is refused."""

from __future__ import annotations

import pathlib

import pytest

from nanovllm import LLM
from tests.oracle import greedy, make_checkpoint, reference_tokens
from tests.quantized import FORMATS, quantize_checkpoint

PROMPTS = [[5, 9, 100, 22, 7, 8, 200, 31, 44, 45, 46, 250, 251, 3, 17, 90, 4, 6, 11], [12], [66, 67, 68] * 7]
WEIGHT_ONLY = [kind for kind in FORMATS if kind != "w8a8"]
OTHERS = ["qwen2", "gemma2", "llama-mha-tied", "mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3-dense"]


@pytest.mark.parametrize(
    ("variant", "kind"), [*(("llama", kind) for kind in WEIGHT_ONLY), *zip(OTHERS, WEIGHT_ONLY * 2, strict=False)]
)
def test_tokens_are_those_of_the_dequantized_weights(variant: str, kind: str, tmp_path: pathlib.Path) -> None:
    quantized, plain = quantize_checkpoint(make_checkpoint(tmp_path / "original", variant), tmp_path, kind)
    llm = LLM(str(quantized), dtype="float32", num_kv_blocks=64)
    expected = [reference_tokens(str(plain), prompt, 10) for prompt in PROMPTS]
    assert greedy(llm, PROMPTS, 10) == expected
