"""`generate` of transformers on the same shapes and the same stream."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

import torch
import transformers as library

from nanovllm.lab.bench.gpu.end_to_end import measured, model_folder, workloads
from nanovllm.lab.bench.gpu.plan import MODELS
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.parts import Setting, reason_of
from nanovllm.lab.bench.report import Row
from nanovllm.lab.bench.worker import generate_batch
from nanovllm.lab.bench.workloads import BenchRequest, shortened
from nanovllm.models.config import ModelConfig


def transformers(setting: Setting, shape: str) -> Iterator[Row]:
    """A model of this shape in transformers."""
    library.utils.logging.set_verbosity_error()
    stream, _ = workloads(setting)
    with tempfile.TemporaryDirectory() as work:
        folder = model_folder(setting, shape, work)
        config, model_config = library.AutoConfig.from_pretrained(folder), ModelConfig.from_pretrained(folder)
    with setting.device:
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # a random model would end its text at random

    def run(requests: Sequence[BenchRequest]) -> list[Timeline]:
        return [Timeline(0.0, line) for line in generate_batch(model, [vars(request) for request in requests])]

    label: Row = {"shape": shape, "engine": "transformers generate"}
    try:
        run(shortened(stream.requests(model_config.vocab_size)))
        yield measured(label, stream, model_config, run, setting)
    except Exception as error:  # that transformers cannot run is a result
        yield {"table": MODELS, **label, "workload": stream.name, "why not": reason_of(error)}
