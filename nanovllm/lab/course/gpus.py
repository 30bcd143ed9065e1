"""Runs of the engine on simulated GPUs, for lectures: `run_on_gpus("llama-3.1-8b", [300, 20])`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from nanovllm import LLM, SamplingParams
from nanovllm.engine.client import EngineClient
from nanovllm.executor.virtual_clock import Timeline, read_timelines
from nanovllm.lab.course.fleet import EngineProcess
from nanovllm.trace.trace import Trace


@dataclass(frozen=True)
class GPURun:
    """A finished run of an engine on simulated GPUs.

    Attributes:
        timelines: by rank, as `draw_ranks` and `rank_totals` want them.
        trace: of the engine, in the GPUs' time.
        seconds: that the run took on this machine's clock.
    """

    timelines: dict[str, Timeline]
    trace: Trace
    seconds: float


def run_on_gpus(
    model: str,
    prompts: Sequence[int],
    *,
    max_tokens: int = 8,
    sleep: Mapping[str, Any] | None = None,
    **options: Any,
) -> GPURun:
    """Complete prompts with the real engine, whose ranks sleep for as long as GPUs would compute.

    Args:
        model: whose steps are predicted, by its name in `nanovllm.simulate.models`.
        prompts: the number of tokens of each. They arrive at the same time, and share no prefix.
        max_tokens: that each request samples.
        sleep: more fields of `SleepConfig`, such as {"machine": "L40S"}. One predicted second takes
            two seconds unless it has a `scale`.
        options: of the engine.

    Raises:
        ValueError: the model does not fit, or an invalid option.
    """
    with tempfile.TemporaryDirectory() as times:
        fields = {"model": model, "scale": 2.0, "timelines": times, **(sleep or {})}
        options = {"max_model_len": 4096, **options}
        # The course model lends its tokenizer.
        # A lecture shows no log of engines in processes of their own.
        with mock.patch.object(EngineClient, "program", EngineProcess.program):
            llm = LLM(
                "smollm2-135m",
                device="sleep",
                sleep_config=json.dumps(fields),
                trace=True,
                **options,
            )
        assert llm.trace is not None, "it was asked for"
        try:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            inputs = [
                {"prompt_token_ids": [500 + number] * length}
                for number, length in enumerate(prompts)
            ]
            begin = time.perf_counter()
            llm.generate(inputs, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
        finally:
            llm.engine.core.close()
        return GPURun(read_timelines(times), llm.trace, seconds)
