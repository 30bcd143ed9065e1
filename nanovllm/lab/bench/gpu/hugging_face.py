"""transformers on the same shapes and the same requests: `generate`, and its continuous batching."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers as library
from transformers import GenerationConfig

from nanovllm.lab.bench.gpu.end_to_end import MAX_MODEL_LEN, RunRequests, measured, model_folder, shortened, workloads
from nanovllm.lab.bench.gpu.setting import Row, Setting, reason_of
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest
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
    model.generation_config.eos_token_id = None  # it would end where a random model happens to say so
    for name, workload, make in (
        ("transformers generate", stream, _generate),
        ("transformers continuous batching", several, _continuous_batching),
    ):
        label: Row = {"shape": shape, "engine": name}
        try:
            run = make(model, setting)
            run(shortened(workload.requests(model_config.vocab_size)))
            yield label | measured(workload, model_config, run, setting)
        except Exception as error:  # not ours; that it cannot run is a result
            yield label | {"table": "end_to_end", "workload": workload.name, "reason": reason_of(error)}


def _generate(model: Any, setting: Setting) -> RunRequests:
    def run(requests: Sequence[BenchRequest]) -> list[Timeline]:
        (request,) = requests
        config = GenerationConfig(max_new_tokens=request.max_tokens, do_sample=False, pad_token_id=0)
        ids = torch.tensor([request.prompt_token_ids], device=setting.device)
        timeline = Timeline(time.perf_counter())
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        count = len(out[0].tolist()) - ids.shape[1]  # which waits for the GPU
        timeline.arrivals.append((time.perf_counter(), count))
        return [_whole(timeline, request)]

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
            start = time.perf_counter()
            timelines = {
                manager.add_request(r.prompt_token_ids, max_new_tokens=r.max_tokens): Timeline(start) for r in requests
            }
            unfinished = set(timelines)
            while unfinished:
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("the generation thread has ended")
                elif result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    unfinished.remove(result.request_id)
                    count = len(result.generated_tokens)
                    timelines[result.request_id].arrivals.append((time.perf_counter(), count))
            return list(map(_whole, timelines.values(), requests))
        finally:
            manager.stop(block=True, timeout=5)
            manager.destroy()

    return run


def _whole(timeline: Timeline, request: BenchRequest) -> Timeline:
    """The timeline, if the request got all its tokens.

    Raises:
        RuntimeError: it got fewer: then its time may not be compared.
    """
    if timeline.num_tokens != request.max_tokens:
        raise RuntimeError(f"{timeline.num_tokens} tokens came where {request.max_tokens} were asked for")
    return timeline
