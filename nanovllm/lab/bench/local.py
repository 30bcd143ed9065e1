"""Engines in this process, asked by token ids without tokenizer and HTTP; and models to run without a download: shapes of
well-known ones, and tiny ones with random weights."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.core import EngineCore, create_core
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import build_model

# The values of config.json.
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
_ROPE = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True, "rope_scaling": _ROPE | {"factor": 32.0},
    },
    "Llama-3.1-8B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False, "rope_scaling": _ROPE | {"factor": 8.0},
    },
}  # fmt: skip
TINY = _LLAMA | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "hidden_size": 96, "intermediate_size": 128,
    "num_hidden_layers": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def write_config(folder: pathlib.Path, shape: dict[str, Any]) -> pathlib.Path:
    """Make a folder that `load_format="dummy"` can load; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    return folder


def write_checkpoint(folder: pathlib.Path, shape: dict[str, Any], seed: int = 0) -> pathlib.Path:
    """The same with weights, which are large enough that the output depends on the whole prompt: with weights of the usual
    size a random model repeats nearly the same token, and would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, [place, *_] in build_model(ModelConfig.from_dict(shape)).checkpoint_places().items():
        numbers = torch.randn(place.shape, generator=generator)
        # Routers and their biases as well: all experts get tokens, and some get many.
        tensors[name] = 1 + 0.2 * numbers if "norm" in name else numbers * (1.0 if "embed" in name else 0.25)
    write_config(folder, shape | {"torch_dtype": "float32"})
    save_file(tensors, folder / "model.safetensors")
    return folder


def start_engine(model: str, **options: Any) -> EngineCore:
    """An engine, or several with `data_parallel_size`; options are fields of `EngineConfig`."""
    return create_core(EngineConfig(model=model, **options))


def add_requests(core: EngineCore, requests: Sequence[BenchRequest]) -> None:
    """Queue requests, greedy and without an end of text, under their numbers."""
    for index, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True, seed=0)
        core.add_request(EngineRequest(str(index), request.prompt_token_ids, params))


def run_requests(core: EngineCore, requests: Sequence[BenchRequest]) -> tuple[list[list[int]], list[Timeline]]:
    """Run requests to their end; returns their tokens, and when they came."""
    start = time.perf_counter()
    tokens: list[list[int]] = [[] for _ in requests]
    timelines = [Timeline(start) for _ in requests]
    add_requests(core, requests)
    while core.has_unfinished:
        outputs = core.step()
        now = time.perf_counter()
        for output in outputs:
            if output.new_token_ids:
                index = int(output.request_id)
                tokens[index] += output.new_token_ids
                timelines[index].arrivals.append((now, len(output.new_token_ids)))
    return tokens, timelines
