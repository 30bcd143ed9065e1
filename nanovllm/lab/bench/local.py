"""Engines in this process, asked by token ids without tokenizer and HTTP; and models to run without
a download: shapes of well-known ones, and tiny ones with random weights."""

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, cast

import tokenizers
import torch
from safetensors.torch import save_file

from nanovllm.assembly.core import create_core
from nanovllm.assembly.engine import Engine
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import build_model

#: Values of config.json, by the model's name.
SHAPES = json.loads(pathlib.Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
TINY: dict[str, Any] = SHAPES.pop("tiny")


def write_config(folder: pathlib.Path, shape: dict[str, Any]) -> pathlib.Path:
    """Make a folder that `load_format="dummy"` can load; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    return folder


def write_checkpoint(folder: pathlib.Path, shape: dict[str, Any], seed: int = 0) -> pathlib.Path:
    """The same with a tokenizer of bytes and with weights, which are large enough that the output
    depends on the whole prompt: with weights of the usual size a random model repeats nearly the
    same token, and would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, [place, *_] in build_model(ModelConfig.from_dict(shape)).checkpoint_places().items():
        numbers = torch.randn(place.shape, generator=generator)
        # Routers and their biases as well: all experts get tokens, and some get many.
        tensors[name] = (
            1 + 0.2 * numbers if "norm" in name else numbers * (1.0 if "embed" in name else 0.25)
        )
    write_config(folder, shape | {"torch_dtype": "float32"})
    save_file(tensors, folder / "model.safetensors")
    vocabulary = {
        character: i
        for i, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def start_engine(model: str, **options: Any) -> Engine:
    """An engine, or several with `data_parallel_size`; options are fields of `EngineConfig`."""
    # With several engines, callers use only the members that `DataParallelCore` has, too.
    return cast(Engine, create_core(EngineConfig(model=model, **options)))


def add_requests(core: Engine, requests: Sequence[BenchRequest]) -> None:
    """Queue requests, greedy and without an end of text, under their numbers."""
    for index, request in enumerate(requests):
        params = SamplingParams(
            temperature=0, max_tokens=request.max_tokens, ignore_eos=True, seed=0
        )
        core.add_request(EngineRequest(str(index), request.prompt_token_ids, params))


def run_requests(
    core: Engine, requests: Sequence[BenchRequest]
) -> tuple[list[list[int]], list[Timeline]]:
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
