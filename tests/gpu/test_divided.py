"""The greedy tokens of engines that are divided between two GPUs, which the division may not change
in float32."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm.lab.bench.local import TINY
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from tests.gpu.setting import DEVICE, DRY_RUN
from tests.gpu.test_tokens import tiny, tokens_of

_TENSOR, _DATA = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
_WHOLE = {"enable_expert_parallel": True}
# Every fifth step, experts move to where the last four steps would have needed them.
_MOVING: dict[str, Any] = _WHOLE | {
    "enable_eplb": True,
    "eplb_config": {
        "window_size": 4,
        "step_interval": 5,
        "num_redundant_experts": 2,
        "log_balancedness": True,
    },
}
DIVISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor parallel": ("llama", _TENSOR),
    "tensor parallel, eager": ("llama", _TENSOR | {"enforce_eager": True}),
    "pipeline parallel": ("llama", {"pipeline_parallel_size": 2}),
    "Mixtral, tensor parallel, whole experts": ("mixtral", _TENSOR | _WHOLE),
    "Mixtral, tensor parallel, experts that move": ("mixtral", _TENSOR | _MOVING),
    "Mixtral, data parallel, whole experts": ("mixtral", _DATA | _WHOLE),
    "Mixtral, data parallel, experts that move": ("mixtral", _DATA | _MOVING),
    "DeepSeek-V3, tensor parallel": ("deepseek", _TENSOR),
}
# Enough for a dry run to go through this code; other tests have the other divisions on a CPU.
_DRY = ["Mixtral, data parallel, experts that move"]


@functools.cache
def undivided(kind: str) -> tuple[list[BenchRequest], dict[str, Any], list[list[int]]]:
    count, lengths, outputs = (3, (3, 20), (9, 9)) if DRY_RUN else (8, (5, 150), (48, 48))
    requests = Workload("", "throughput", "", count, lengths, outputs).requests(TINY["vocab_size"])
    options = {
        "device": DEVICE.type,
        "max_num_seqs": count,
        "max_num_batched_tokens": 16 if DRY_RUN else 64,
    }
    return requests, options, tokens_of(tiny(kind), requests, **options)


@pytest.mark.parametrize("name", _DRY if DRY_RUN else DIVISIONS)
def test_two_ranks_sample_the_tokens_of_one(name: str) -> None:
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("it needs 2 GPUs")
    kind, division = DIVISIONS[name]
    requests, options, expected = undivided(kind)
    moves_experts = "enable_eplb" in division
    with log_of_ranks() if moves_experts else contextlib.nullcontext([""]) as said:
        assert tokens_of(tiny(kind), requests, **options, **division) == expected
    if moves_experts:
        moves = [int(count) for count in re.findall(r"now .*; (\d+) bytes moved", said[0])]
        assert any(moves) and len(moves) % 2 == 0, "experts have not moved on both ranks"


@contextlib.contextmanager
def log_of_ranks() -> Iterator[list[str]]:
    """Collects what the processes of the ranks log (one text, afterwards) and passes it on."""
    said: list[str] = []
    logger, own_error = logging.getLogger("nanovllm"), os.dup(2)
    level = logger.level
    with tempfile.TemporaryFile("w+") as file:
        logger.setLevel(logging.INFO)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(own_error, 2)
            os.close(own_error)
            logger.setLevel(level)
            file.seek(0)
            said.append(file.read())
            sys.stderr.write(said[0])
