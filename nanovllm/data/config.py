"""The settings that a user gives an engine: plain data. Every field is a command-line flag and a
keyword of `LLM(...)`, under vLLM's name."""

import json
import os
import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from nanovllm.data.checks import (
    Amount,
    Count,
    Gibibytes,
    Keywords,
    Positive,
    check_fields,
    set_fields,
)
from nanovllm.data.parts import needed_for
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.structured_outputs import StructuredOutputsConfig

if TYPE_CHECKING:
    from nanovllm.data.kv_transfer_config import KVTransferConfig
    from nanovllm.data.sleep_config import SleepConfig
    from nanovllm.data.speculative_config import SpeculativeConfig

COURSE_MODEL = "smollm2-135m"
# What vLLM's users write for the longest context for which there is memory, which is what None
# means here.
LONGEST = ("auto", "-1", -1)
# Settings that are given as JSON, by the names of what is parsed from them. `__post_init__` reads
# each of them, so that a mistake shows there.
PARSED = ("kv_transfer", "structured_outputs", "speculative", "sleep")
QUANTIZATION_ALIASES: dict[str, Literal["awq", "gptq"]] = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
}


def token_count(text: str) -> int:
    """ "8k" -> 8000, "8K" -> 8192, as in vLLM: small letters count in thousands, capitals in 1024s.

    Raises:
        ValueError: not a number; the message shows what one looks like.
    """
    match = re.fullmatch(r"(\d+|\d+\.\d+(?=\D))([kmgt]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"must be a number of tokens: 8192, 8k (8000) or 8K (8192), got {text!r}")
    number, unit = match.groups()
    return round(
        float(number) * (1000.0 if unit.islower() else 1024.0) ** " kmgt".index(unit.lower() or " ")
    )


def context_length(text: str) -> int | None:
    """The value of `--max-model-len`: see `token_count`; None for "auto" and "-1".

    Raises:
        ValueError: something else.
    """
    return None if text in LONGEST else token_count(text)


def _as_flag(value: object) -> object:
    """Return a keyword's value in the form of a flag's: JSON for a dictionary, text for a path."""
    if isinstance(value, dict):
        return json.dumps(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True)
class EngineConfig(Keywords):
    """Settings of one engine, as the user gave them. `None` and "auto" leave a decision to the
    engine; see `resolve`. The settings never change: `dataclasses.replace` makes other ones.

    Each attribute that is described here is a command-line flag, and the description is its help.

    Attributes:
        model: course model, local folder in Hugging Face format, GGUF file, or hub id
        tokenizer: folder or hub id of the tokenizer, if it is not the model's
        served_model_name: one or more names of the model in the API, the first of which answers and
            metrics show (default: as given by --model)
        revision: branch, tag or commit of a hub model (not of a tokenizer that --tokenizer names)
        dtype: data type of weights and KV cache (auto: bfloat16 if the hardware supports it, else
            float32)
        device: where to run (auto: a GPU if there is one). sleep: on simulated GPUs, which sleep as
            long as each step is predicted to take; tokens are arbitrary words
        sleep_config: the simulated GPUs of --device sleep, as JSON: {"machine": "H100", "model":
            "llama-3.1-70b", "scale": 10, "stragglers": {"1": 1.5}, "kv_latency_us": 2.7,
            "kv_gb_per_s": 50, "timelines": "FOLDER"}
        quantization: quantization of the weights (auto: as in the checkpoint). w8a8, w4a8, w4a16
            (bits of weights and of activations): quantize an unquantized checkpoint during loading,
            by rounding to nearest; w4a8 also serves a checkpoint of 4-bit weights with 8-bit
            activations. fp8: only names the checkpoint's format, whose weights are dequantized
        quantize_head: also quantize the output head to 8 bits, and the embedding if it is the same
            matrix
        kv_cache_dtype: data type of keys and values (auto: that of the weights). int8, fp8 (e4m3):
            8 bits, with a scale per token and head, which nearly doubles the tokens that fit in
            memory
        load_format: format of the weights. dummy: random weights, to measure speed without a
            checkpoint
        generation_config: default sampling parameters. auto: from the model's
            generation_config.json; vllm: vLLM's defaults
        seed: seed of requests that set none, and of dummy weights
        max_model_len: maximum number of prompt plus output tokens, such as 8192 or 8k (default,
            auto or -1: the model's, or what the KV pool has room for if that is less)
        block_size: tokens per KV block
        num_kv_blocks: number of KV blocks in the pool, regardless of free memory
        kv_cache_memory: size of the KV pool, such as 512MiB, 4GB or a number of bytes
        gpu_memory_utilization: fraction of the GPU's memory that the engine may use; on a CPU, only
            kv_cache_memory and num_kv_blocks set the size of the KV pool
        swap_space: GiB of host memory for swapped requests (with --preemption-mode swap)
        max_num_seqs: maximum number of running requests
        max_num_batched_tokens: token budget per step (default: 2048; without chunked prefill at
            least the longest request)
        long_prefill_token_threshold: maximum prompt tokens per request and step (0: the whole
            budget)
        max_step_ms: maximum duration, in milliseconds, of a step that contains decoding requests;
            limits the prompt tokens in that step (0: no limit; default: 200 for `nanovllm serve`,
            no limit elsewhere)
        enable_prefix_caching: reuse KV blocks of equal prefixes
        enable_chunked_prefill: split long prompts over several steps, in the same batch as running
            requests
        batching_policy: chunked: prefill and decode share a step; prefill_first, static: the
            classic policies
        scheduling_policy: order of requests
        preemption_mode: recompute the KV of a preempted request, or swap it to host memory
        attention_backend: implementation of attention (auto: triton on a GPU, compiled loops on a
            CPU; triton_simple: the small kernel of lecture 15)
        async_scheduling: prepare the next step while the GPU computes the current one (default: on
            a GPU; on a CPU it would only add delay)
        enforce_eager: call every operator of a step from Python, instead of replaying a CUDA graph
            (GPU) or running all layers in one call (CPU)
        speculative_config: speculative decoding, as JSON: {"method": "ngram",
            "num_speculative_tokens": 3, "prompt_lookup_max": 5}; other methods are draft_model,
            eagle and eagle3, with "model"
        structured_outputs_config: structured outputs, as JSON: {"disable_any_whitespace": false};
            true: JSON without white space between its parts
        tensor_parallel_size: number of ranks that share each layer's weights
        pipeline_parallel_size: number of stages that share the layers
        data_parallel_size: number of engines that share the requests, each with its own scheduler
            and memory
        enable_expert_parallel: place complete experts on each rank instead of a slice of every
            expert (for models with experts)
        enable_eplb: with --enable-expert-parallel, move and replicate experts between ranks to
            balance their load
        eplb_config: settings of --enable-eplb, as JSON: {"window_size": 1000, "step_interval":
            3000, "num_redundant_experts": 0, "log_balancedness": false}
        kv_role: KV transfer with other engines: produce KV, consume it, or both
        kv_connector: KV connector: local, nixl, offloading, pool, blend (default with --kv-role:
            local)
        kv_transfer_config: KV role, connector and more, as JSON: {"kv_connector": "local",
            "kv_role": "kv_both", "kv_ip": "127.0.0.1", "kv_port": 0, "kv_load_failure_policy":
            "recompute", "kv_connector_extra_config": {}, "engine_id": "..."}
        kv_offloading_size: GiB of host memory, over all ranks, for KV blocks evicted from the pool
            (0: none)
        distributed_executor_backend: where the ranks run: in this process (uni), in processes on
            this machine (mp), under torchrun (external_launcher), or as Ray actors (auto: uni for
            one rank, external_launcher under torchrun, else mp)
        disable_custom_all_reduce: on a CPU, sum over ranks with gloo instead of shared memory
        max_num_waiting: maximum number of waiting requests; beyond it the server answers 429
        disable_log_stats: disable the line of statistics that the server logs every 10 seconds
            while it is busy
        trace: write a record of every step to this file, as JSON lines, with the token ids of all
            outputs (.gz: compressed)
        check_invariants: check the engine's bookkeeping after every step (slow; for tests)

    Raises:
        ValueError: a value that is not allowed, alone or with another; the message names the fix.
    """

    model: str = COURSE_MODEL
    tokenizer: str | None = None
    served_model_name: str | Sequence[str] | None = None
    revision: str | None = None
    # As in torch, "half" is another name of float16, and "float" of float32.
    dtype: Literal["auto", "bfloat16", "half", "float16", "float", "float32", "float64"] = "auto"
    device: Literal["auto", "cpu", "cuda", "sleep"] = "auto"
    sleep_config: str | None = None
    # vLLM's names with "marlin" ask for a kernel, which is chosen here without being asked.
    quantization: Literal[
        "auto",
        "gptq",
        "gptq_marlin",
        "awq",
        "awq_marlin",
        "compressed-tensors",
        "fp8",
        "w8a8",
        "w4a8",
        "w4a16",
    ] = "auto"
    quantize_head: bool = False
    # vLLM appends how many numbers share a scale, which is always a token's of one head here.
    kv_cache_dtype: Literal[
        "auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3", "fp8_per_token_head"
    ] = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    generation_config: Literal["auto", "vllm"] = "auto"
    seed: int = 0
    max_model_len: Annotated[Positive | None, context_length] = None
    block_size: Positive = 16
    num_kv_blocks: Positive | None = None
    kv_cache_memory: str | int | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    swap_space: Gibibytes = 1.0
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Annotated[Positive | None, token_count] = None
    long_prefill_token_threshold: Count = 0
    max_step_ms: Amount | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    batching_policy: Literal["chunked", "prefill_first", "static"] = "chunked"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    # The names in `attention.backends.BACKENDS`, a module that this one cannot import: it imports
    # torch.
    attention_backend: Literal["auto", "torch", "cpu", "triton", "triton_simple"] = "auto"
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    speculative_config: str | None = None
    structured_outputs_config: str | None = None
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    data_parallel_size: Positive = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: str | None = None
    # No flags. Each engine of a data-parallel group gets its number, and where the ranks of all
    # engines meet.
    data_parallel_rank: int | None = None
    data_parallel_address: str = ""
    # No flag, either: so that `dataclasses.replace` keeps the engine's name.
    kv_engine_id: str = field(default="", compare=False)
    kv_role: Literal[
        "none", "kv_producer", "kv_consumer", "kv_both", "producer", "consumer", "both"
    ] = "none"
    kv_connector: str | None = None
    kv_transfer_config: str | None = None
    kv_offloading_size: Gibibytes = 0.0
    distributed_executor_backend: Literal["auto", "uni", "mp", "external_launcher", "ray"] = "auto"
    disable_custom_all_reduce: bool = False
    max_num_waiting: Count = 4096
    disable_log_stats: bool = False
    trace: str | None = None
    check_invariants: bool = False

    def __post_init__(self) -> None:
        set_fields(self, **{name: _as_flag(value) for name, value in vars(self).items()})
        if self.max_model_len in LONGEST:
            set_fields(self, max_model_len=None)
        check_fields(self)
        if self.quantization in QUANTIZATION_ALIASES:
            set_fields(self, quantization=QUANTIZATION_ALIASES[self.quantization])
        if self.served_model_name == []:
            raise ValueError(
                "served_model_name must have one name or more, or be None for the name of the model"
            )
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
        self._check_combinations()
        if self._shares_kv and not self.kv_engine_id:
            set_fields(self, kv_engine_id=uuid.uuid4().hex)
        for name in PARSED:
            getattr(self, name)

    def _check_combinations(self) -> None:
        backend = self.distributed_executor_backend
        budget = self.max_num_batched_tokens
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ValueError(
                "preemption_mode 'swap' needs host memory: raise swap_space above 0, or use "
                "'recompute'"
            )
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ValueError(
                "async_scheduling needs pipeline_parallel_size 1: a pipeline has several steps in "
                "flight"
            )
        if backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"distributed_executor_backend 'uni' is one rank, not {self.world_size}: use 'mp'"
            )
        if self.sleep_config is not None and self.device != "sleep":
            raise ValueError("sleep_config does nothing without device 'sleep'")
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError(
                "enable_eplb moves whole experts between ranks: it needs enable_expert_parallel"
            )
        if self.eplb_config is not None and not self.enable_eplb:
            raise ValueError("eplb_config does nothing without enable_eplb")
        if self.data_parallel_size > 1 and backend in ("external_launcher", "ray"):
            raise ValueError(
                "data_parallel_size above 1 cannot be combined with distributed_executor_backend "
                f"{backend!r}: do not set it, or start several engines and divide the requests"
            )
        if budget is not None and budget < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token per step"
            )

    def check_limits(self, model_max_len: int, num_kv_blocks: int | None) -> None:
        """Check the longest request against the model and, once its size is known, the pool.
        Without `max_model_len`, the pool needs room for a prompt of one token and as many output
        tokens as a request gets by default.

        Raises:
            ValueError: one request would not fit; the message has the numbers, and names the
                setting that mends it.
        """
        given = self.max_model_len
        budget = self.max_num_batched_tokens
        longest = given or min(model_max_len, 1 + (SamplingParams.max_tokens or 0))
        if longest > model_max_len:
            raise ValueError(
                f"max_model_len ({longest}) exceeds the {model_max_len} positions of the model: "
                "lower it"
            )
        room = (num_kv_blocks or sys.maxsize) * self.block_size
        if longest > room:
            needs = (
                f"one request of {longest} tokens needs {-(-longest // self.block_size)} KV blocks"
            )
            mend = (
                "num_kv_blocks"
                if self.num_kv_blocks
                else "kv_cache_memory or, on a GPU, gpu_memory_utilization"
            )
            mend += f", or lower max_model_len to {room}" if given else ""
            raise ValueError(
                f"{needs}, and the pool has {num_kv_blocks} ({room} tokens): raise {mend}"
            )
        longest = min(given or model_max_len, room)
        is_whole = not self.enable_chunked_prefill and (given or num_kv_blocks)
        if is_whole and budget is not None and budget < longest:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least the longest request "
                f"({longest} tokens): raise it, or enable chunked prefill"
            )

    def count_host_blocks(self, bytes_per_block: int) -> int:
        """The number of KV blocks in host memory.

        Raises:
            ValueError: requests are to be swapped, and `swap_space` has no room for a block.
        """
        num_host_blocks = (
            int(self.swap_space * 2**30) // bytes_per_block if self.preemption_mode == "swap" else 0
        )
        if num_host_blocks == 0 and self.preemption_mode == "swap":
            raise ValueError(
                f"swap_space ({self.swap_space} GiB) is smaller than one KV block of "
                f"{bytes_per_block} bytes: raise it, or use preemption_mode 'recompute'"
            )
        return num_host_blocks

    @cached_property
    def kv_transfer(self) -> "KVTransferConfig | None":
        """Settings for the KV connector; None if the engine shares no KV."""
        if not self._shares_kv:
            return None
        with needed_for("KV transfer"):
            from nanovllm.data.kv_transfer_config import KVTransferConfig
        return KVTransferConfig.of(self)

    @property
    def _shares_kv(self) -> bool:
        return (
            self.kv_role != "none"
            or self.kv_connector not in (None, "none")
            or bool(self.kv_transfer_config)
            or self.kv_offloading_size > 0
        )

    @cached_property
    def structured_outputs(self) -> StructuredOutputsConfig:
        """The parsed `structured_outputs_config`."""
        return StructuredOutputsConfig.of(self.structured_outputs_config)

    @cached_property
    def speculative(self) -> "SpeculativeConfig | None":
        """The parsed `speculative_config`; None: no drafts."""
        if not self.speculative_config:
            return None
        with needed_for("speculative_config"):
            from nanovllm.data.speculative_config import SpeculativeConfig
        return SpeculativeConfig.of(self)

    @cached_property
    def sleep(self) -> "SleepConfig | None":
        """The parsed `sleep_config`; None: the device computes."""
        if self.device != "sleep":
            return None
        with needed_for("device 'sleep'"):
            from nanovllm.data.sleep_config import SleepConfig
        return SleepConfig.of(self)

    @property
    def may_use_gpu(self) -> bool:
        """False if the device is no GPU, whatever this machine has."""
        return self.device in ("auto", "cuda")

    @property
    def model_names(self) -> list[str]:
        """The names under which clients may ask for the model. Answers and metrics show the
        first."""
        names = self.served_model_name or self.model
        return [names] if isinstance(names, str) else list(names)

    @property
    def world_size(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_divided(self) -> bool:
        """True for the settings of several engines, False for those of one of them, or of the only
        one."""
        return self.data_parallel_size > 1 and self.data_parallel_rank is None

    @property
    def in_lock_step(self) -> bool:
        """True if this engine makes all its steps together with others, with which it shares
        experts."""
        return self.data_parallel_address != ""


def parse_bytes(size: str | int, name: str) -> int:
    """ "512MiB" -> 536870912. GB counts in thousands, GiB and a bare G in 1024s; a bare number is
    in bytes.

    Raises:
        ValueError: not a size; the message shows what one looks like.
    """
    match = re.fullmatch(
        r"(\d{1,20}(?:\.\d+)?(?:e\d)?) *([kmgt]?)(i?b)?", str(size).strip().lower()
    )
    number, prefix, suffix = match.groups() if match else ("0", "", "")
    value = int(float(number) * (1000 if suffix == "b" else 1024) ** " kmgt".index(prefix or " "))
    if value == 0:
        raise ValueError(
            f"{name} must be a size above 0 such as 512MiB, 4GB or 1073741824, got {size!r}"
        )
    return value
