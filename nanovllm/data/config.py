"""The engine's settings: plain data. Every field is a command-line flag and a keyword of
`LLM(...)`, under vLLM's name."""

import json
import os
import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from nanovllm.data.checks import Amount, Count, Positive, check_fields
from nanovllm.data.flags import Flags, Tokens, token_count
from nanovllm.data.parts import load
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.structured_outputs import StructuredOutputsConfig
from nanovllm.data.trace_settings import TraceSettings

if TYPE_CHECKING:
    from nanovllm.data.kv_transfer_config import KVTransferConfig
    from nanovllm.data.speculative_config import SpeculativeConfig

COURSE_MODEL = "smollm2-135m"
DEFAULT_TOKEN_BUDGET = 2048
# What vLLM's users write for the longest context for which there is memory, which is what None
# means here.
LONGEST = ("auto", "-1", -1)
QUANTIZATION_ALIASES: dict[str, Literal["awq", "gptq"]] = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
}


def context_length(text: str) -> int | None:
    """The value of `--max-model-len`: see `token_count`; None for "auto" and "-1".

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    return None if text in LONGEST else token_count(text)


@dataclass(frozen=True)
class Settlement:
    """What `EngineConfig.settle` was called with, and which values it has filled in.

    Attributes:
        given_max_model_len, given_async_scheduling: as the user gave them.
        max_model_len, async_scheduling: as they were filled in.
    """

    model_max_len: int
    num_kv_blocks: int
    on_gpu: bool
    given_max_model_len: int | None
    given_async_scheduling: bool | None
    max_model_len: int
    async_scheduling: bool


@dataclass
class EngineConfig(Flags):
    """Settings of one engine. `None` and "auto" are filled in when the engine starts.

    Each attribute that is described here is a command-line flag, and the description is its help.

    Attributes:
        model: course model, local folder in Hugging Face format, or hub id
        tokenizer: folder or hub id of the tokenizer, if it is not the model's
        served_model_name: one or more names of the model in the API, the first of which answers and
            metrics show (default: as given by --model)
        revision: branch, tag or commit of a hub model (not of a tokenizer that --tokenizer names)
        dtype: data type of weights and KV cache (auto: bfloat16 if the hardware supports it, else
            float32)
        device: where to run (auto: a GPU if there is one)
        quantization: quantization of the weights (auto: as in the checkpoint). w8a8, w4a8, w4a16
            (bits of weights and of activations): quantize an unquantized checkpoint during loading,
            by rounding to nearest; w4a8 also serves a checkpoint of 4-bit weights with 8-bit
            activations
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
        gpu_memory_utilization: fraction of the GPU's memory that the engine may use
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
            CPU)
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # vLLM's names with "marlin" ask for a kernel, which is chosen here without being asked.
    quantization: Literal[
        "auto",
        "gptq",
        "gptq_marlin",
        "awq",
        "awq_marlin",
        "compressed-tensors",
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
    swap_space: Amount = 1.0
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Tokens = None
    long_prefill_token_threshold: Count = 0
    max_step_ms: Amount | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    batching_policy: Literal["chunked", "prefill_first", "static"] = "chunked"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    # The names in `attention.base.BACKENDS`, a module that this one cannot import: it imports
    # torch.
    attention_backend: Literal["auto", "torch", "cpu", "triton"] = "auto"
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
    # No flags, either: so that `dataclasses.replace` keeps the engine's name, and that `settle` was
    # called.
    kv_engine_id: str = field(default="", compare=False)
    settlement: Settlement | None = None
    kv_role: Literal[
        "none", "kv_producer", "kv_consumer", "kv_both", "producer", "consumer", "both"
    ] = "none"
    kv_connector: str | None = None
    kv_transfer_config: str | None = None
    kv_offloading_size: Amount = 0.0
    distributed_executor_backend: Literal["auto", "uni", "mp", "external_launcher", "ray"] = "auto"
    disable_custom_all_reduce: bool = False
    max_num_waiting: Count = 4096
    disable_log_stats: bool = False
    trace: str | None = None
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(self, name, json.dumps(value))
            elif isinstance(value, os.PathLike):
                setattr(self, name, os.fspath(value))
        if self.max_model_len in LONGEST:
            self.max_model_len = None
        check_fields(self)
        if self.quantization in QUANTIZATION_ALIASES:
            self.quantization = QUANTIZATION_ALIASES[self.quantization]
        if self.served_model_name == []:
            raise ValueError(
                "served_model_name must have one name or more, or be None for the name of the model"
            )
        self._restore_given()
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
        self._check_combinations()
        # `settle` derives these two anew once the engine knows its model and its memory.
        self.token_budget = self.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        self.max_request_tokens = self.max_model_len or 0
        # What the connector receives; None if the engine shares no KV.
        self.kv_transfer: KVTransferConfig | None = None
        if (
            {self.kv_role, self.kv_connector} - {None, "none"}
            or self.kv_transfer_config
            or self.kv_offloading_size
        ):
            self.kv_engine_id = self.kv_engine_id or uuid.uuid4().hex
            self.kv_transfer = load(
                "nanovllm.data.kv_transfer_config:KVTransferConfig.of", "KV transfer"
            )(self)
        self.structured_outputs = StructuredOutputsConfig.of(self.structured_outputs_config)
        self.speculative: SpeculativeConfig | None = None
        if self.speculative_config:
            self.speculative = load(
                "nanovllm.data.speculative_config:SpeculativeConfig.of", "speculative_config"
            )(self)

        if (past := self.settlement) is not None:  # this is a copy of a settled one
            self.settle(past.model_max_len, past.num_kv_blocks, past.on_gpu)

    def _restore_given(self) -> None:
        """Undo what `settle` has filled in, unless it was changed since."""
        if (past := self.settlement) is not None:
            if self.max_model_len == past.max_model_len:
                self.max_model_len = past.given_max_model_len
            if self.async_scheduling == past.async_scheduling:
                self.async_scheduling = past.given_async_scheduling

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
                else "kv_cache_memory or gpu_memory_utilization"
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

    def settle(self, model_max_len: int, num_kv_blocks: int, on_gpu: bool = False) -> None:
        """Fill in what depends on the model, on the device and on the size of the pool:
        `max_model_len`, `async_scheduling`, `token_budget` and `max_request_tokens`, the maximum
        tokens that one request may ever have. See `check_limits` for what must hold.

        A copy made by `dataclasses.replace` is settled in the same way, from what the user gave and
        what was replaced."""
        self._restore_given()
        given = self.max_model_len
        given_async = self.async_scheduling
        if self.async_scheduling is None:
            self.async_scheduling = on_gpu and self.pipeline_parallel_size == 1
        self.max_model_len = self.max_model_len or model_max_len
        self.max_request_tokens = min(self.max_model_len, num_kv_blocks * self.block_size)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens is None:
            self.token_budget = max(DEFAULT_TOKEN_BUDGET, self.max_request_tokens)
        self.settlement = Settlement(
            model_max_len=model_max_len,
            num_kv_blocks=num_kv_blocks,
            on_gpu=on_gpu,
            given_max_model_len=given,
            given_async_scheduling=given_async,
            max_model_len=self.max_model_len,
            async_scheduling=self.async_scheduling,
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

    def trace_settings(self, num_blocks: int) -> TraceSettings:
        """Return what the header of a trace says of the engine whose steps it has."""
        return TraceSettings(
            block_size=self.block_size,
            num_blocks=num_blocks,
            token_budget=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            batching_policy=self.batching_policy,
            enable_prefix_caching=self.enable_prefix_caching,
        )

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
    def max_num_samples(self) -> int:
        """Tokens that a step samples, at most: one for each request, and one more for each
        draft."""
        drafts = self.speculative.num_speculative_tokens or 0 if self.speculative is not None else 0
        return min(self.token_budget, self.max_num_seqs * (1 + drafts))

    @property
    def max_decodes(self) -> int:
        """Rows of a step that a CUDA graph computes, at most: one of each request, or up to 256 if
        there are drafts."""
        return min(self.token_budget, max(self.max_num_seqs, min(self.max_num_samples, 256)))

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
