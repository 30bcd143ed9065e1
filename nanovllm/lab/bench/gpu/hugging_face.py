"""transformers on the same shapes and the same requests: `generate`, and its continuous batching."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers as library
from transformers import GenerationConfig

from nanovllm.lab.bench.gpu.end_to_end import MAX_MODEL_LEN, RunRequests, measured, model_folder, workloads
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
    stream, _, several = workloads(setting)
    with tempfile.TemporaryDirectory() as work:
        folder = model_folder(setting, shape, work)
        config, model_config = library.AutoConfig.from_pretrained(folder), ModelConfig.from_pretrained(folder)
    with setting.device:
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # a random model would end its text at random
    for name, workload, make in (
        ("transformers generate", stream, _generate),
        ("transformers continuous batching", several, _continuous_batching),
    ):
        label: Row = {"shape": shape, "engine": name}
        try:
            run = make(model, setting)
            run(shortened(workload.requests(model_config.vocab_size)))
            yield measured(label, workload, model_config, run, setting)
        except Exception as error:  # that transformers cannot run is a result
            yield {"table": MODELS, **label, "workload": workload.name, "why not": reason_of(error)}


def _generate(model: Any, setting: Setting) -> RunRequests:
    def run(requests: Sequence[BenchRequest]) -> list[Timeline]:
        return [Timeline(0.0, line) for line in generate_batch(model, [vars(request) for request in requests])]

    return run


def _continuous_batching(model: Any, setting: Setting) -> RunRequests:
    from transformers import ContinuousBatchingConfig  # an older version lacks it, and can still generate

    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=MAX_MODEL_LEN)
    # By default it takes what memory there is.
    small: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 64} if setting.dry_run else {}
    batching = ContinuousBatchingConfig(**small)

    def run(requests: Sequence[BenchRequest]) -> list[Timeline]:
        manager = model.init_continuous_batching(config, batching)
        manager.warmup()
        manager.start()
        try:
            start, ended = time.perf_counter(), dict[str, Timeline]()
            by_id = {manager.add_request(r.prompt_token_ids, max_new_tokens=r.max_tokens): r for r in requests}
            while len(ended) < len(by_id):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("the generation thread has ended")
                elif result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    count, request = len(result.generated_tokens), by_id[result.request_id]
                    if count != request.max_tokens:  # then its time may not be compared
                        raise RuntimeError(f"{count} tokens came where {request.max_tokens} were asked for")
                    ended[result.request_id] = Timeline(start, [(time.perf_counter(), count)])
            return [ended[request_id] for request_id in by_id]
        finally:
            manager.stop(block=True, timeout=5)
            manager.destroy()

    return run
