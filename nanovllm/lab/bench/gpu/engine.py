"""The engine under measurement, by token ids: no tokenizer, no HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.core import EngineCore, create_core
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest


def start_engine(folder: str, **options: Any) -> EngineCore:
    """An engine, or several with `data_parallel_size`; options are fields of `EngineConfig`."""
    return create_core(EngineConfig(model=folder, **options))


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
