"""The engine's settings: plain data. Every field is a command-line flag and a keyword of `LLM(...)`, under vLLM's name."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from nanovllm.data.kv_transfer_config import KVTransferConfig

COURSE_MODEL = "smollm2-135m"
DEFAULT_TOKEN_BUDGET = 2048


def _option(default: Any, help: str, parse: Callable[[str], Any] | None = None, short: str = "") -> Any:
    return field(default=default, metadata={"help": help, "parse": parse, "short": short})


def _unnamed(default: Any) -> Any:
    """A field that is no flag: the engine itself fills it in."""
    return field(default=default, metadata={"unnamed": True})


def token_count(text: str) -> int:
    """ "8k" -> 8000, "8K" -> 8192, as vLLM reads them: small letters count in thousands, capitals in 1024s.

    Raises:
        argparse.ArgumentTypeError: not a number; the message shows what one looks like.
    """
    try:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])", text.strip(), re.IGNORECASE)
        if match is None:
            return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens such as 8192, 8k (8000) or 8K (8192), got {text!r}"
        ) from None
    number, unit = match.groups()
    base = 1000 if unit.islower() else 1024
    return round(float(number) * base ** ("kmgt".index(unit.lower()) + 1))


@dataclass
class EngineConfig:
    """Settings of one engine. `None` and "auto" are filled in when the engine starts.

    Raises:
        ValueError: a value that makes no sense, alone or with another; the message names the fix.
    """

    model: str = _option(COURSE_MODEL, "course model, local folder in Hugging Face format, or hub id")
    tokenizer: str | None = _option(None, "folder or hub id of the tokenizer, if it is not the model's")
    served_model_name: str | None = _option(None, "name of the model in the API (default: as given by --model)")
    revision: str | None = _option(
        None, "branch, tag or commit of a hub model (not of a tokenizer that --tokenizer names)"
    )
    # As in torch, "half" is another name of float16, and "float" of float32.
    dtype: Literal["auto", "bfloat16", "half", "float16", "float", "float32", "float64"] = _option(
        "auto", "data type of weights and KV cache (auto: bfloat16 where the hardware computes it, else float32)"
    )
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "where to run (auto: a GPU if there is one)")
    load_format: Literal["auto", "safetensors", "dummy"] = _option(
        "auto", "dummy: random weights, to measure speed without a checkpoint"
    )
    seed: int = _option(0, "seeds requests that bring no seed of their own, and dummy weights")
    max_model_len: int | None = _option(
        None, "longest prompt plus output, in tokens, as in 8192 or 8k (default: the model's)", token_count
    )
    block_size: int = _option(16, "tokens a KV block")
    num_kv_blocks: int | None = _option(None, "KV blocks in the pool, whatever memory there is")
    kv_cache_memory: str | None = _option(None, "size of the KV pool, as in 512MiB, 4GB or a number of bytes")
    gpu_memory_utilization: float = _option(0.9, "share of a GPU's memory that the engine may use")
    swap_space: float = _option(1.0, "GiB of host memory for swapped requests (with --preemption-mode swap)")
    max_num_seqs: int = _option(256, "most requests that run at the same time")
    max_num_batched_tokens: int | None = _option(
        None,
        "token budget of a step (default: 2048; without chunked prefill at least the longest request)",
        token_count,
    )
    long_prefill_token_threshold: int = _option(0, "most prompt tokens of one request a step (0: the whole budget)")
    enable_prefix_caching: bool = _option(True, "reuse KV blocks of equal prefixes")
    enable_chunked_prefill: bool = _option(True, "let a prompt be read in several steps, beside running requests")
    batching_policy: Literal["chunked", "prefill_first", "static"] = _option(
        "chunked", "chunked: prefill and decode share a step; prefill_first, static: the classic policies"
    )
    scheduling_policy: Literal["fcfs", "priority"] = _option("fcfs", "order of requests")
    preemption_mode: Literal["recompute", "swap"] = _option(
        "recompute", "what becomes of a request that loses its blocks"
    )
    # The names in `attention.base.BACKENDS`, which cannot be asked: importing it imports torch.
    attention_backend: Literal["auto", "torch", "cpu", "triton"] = _option(
        "auto", "who computes attention (auto: triton on a GPU, compiled loops on a CPU)"
    )
    async_scheduling: bool | None = _option(
        None, "prepare the next step while a GPU computes one (default: on a GPU; on a CPU it would only delay)"
    )
    enforce_eager: bool = _option(
        False, "on a GPU, launch every kernel of a decode step from Python instead of replaying a CUDA graph"
    )
    tensor_parallel_size: int = _option(1, "ranks that share each layer's weights", short="-tp")
    pipeline_parallel_size: int = _option(1, "stages that share the layers", short="-pp")
    data_parallel_size: int = _option(
        1, "engines beside one another, each with a scheduler and memory of its own; requests are divided", short="-dp"
    )
    enable_expert_parallel: bool = _option(
        False, "let every rank hold whole experts instead of a slice of each (of models that have any)"
    )
    enable_eplb: bool = _option(
        False, "with --enable-expert-parallel, move and copy experts between ranks as their load asks for"
    )
    eplb_config: str | None = _option(
        None,
        'when, as JSON: {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0, "log_balancedness": false}',
    )
    # Set in the settings of each of these engines: which one it is, and where the ranks of all find one another.
    data_parallel_rank: int | None = _unnamed(None)
    data_parallel_address: str = _unnamed("")
    kv_role: Literal["none", "kv_producer", "kv_consumer", "kv_both", "producer", "consumer", "both"] = _option(
        "none", "share KV with other engines: compute it for them, take it from them, or both"
    )
    kv_connector: str | None = _option(
        None, "how KV is shared: local, nixl, offloading, pool, blend (default with --kv-role: local)"
    )
    kv_transfer_config: str | None = _option(
        None,
        'both and more, as JSON: {"kv_connector": "local", "kv_role": "kv_both", "kv_ip": "127.0.0.1", "kv_port": 0, '
        '"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {}, "engine_id": "..."}',
    )
    kv_offloading_size: float = _option(
        0.0, "GiB of host memory, of all ranks together, for KV blocks that leave the pool (0: none)"
    )
    distributed_executor_backend: Literal["auto", "uni", "mp", "external_launcher", "ray"] = _option(
        "auto",
        "where the ranks run: in this process (uni), in processes of this machine (mp), under torchrun, or as Ray's actors "
        "(auto: uni for one rank, external_launcher under torchrun, else mp)",
    )
    disable_custom_all_reduce: bool = _option(
        False, "on a CPU, sum over ranks by gloo instead of through shared memory"
    )
    max_num_waiting: int = _option(4096, "waiting requests beyond which the server answers 429")
    trace: str | None = _option(
        None,
        "write a record of every step, with the token ids of all answers, to this file, as lines of JSON (.gz: compressed)",
    )
    check_invariants: bool = _option(False, "check the engine's bookkeeping after every step (slow; for tests)")

    def __post_init__(self) -> None:
        # Derived when the engine knows its model and its memory, see `settle`.
        self.token_budget = self.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        self.max_request_tokens = self.max_model_len or 0
        for name, allowed in self.choices().items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name in (
            "block_size",
            "max_num_seqs",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
        ):
            self._check(name, 1)
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks"):
            if getattr(self, name) is not None:
                self._check(name, 1)
        for name in ("long_prefill_token_threshold", "max_num_waiting"):
            self._check(name, 0)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if not (_is_number(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1):
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            )
        if not (_is_number(self.swap_space) and 0 <= self.swap_space < float("inf")):
            raise ValueError(f"swap_space must be 0 or more GiB, got {self.swap_space!r}")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ValueError("preemption_mode 'swap' needs host memory: raise swap_space above 0, or use 'recompute'")
        for f in dataclasses.fields(self):
            if isinstance(f.default, bool) and not isinstance(getattr(self, f.name), bool):
                raise ValueError(f"{f.name} must be True or False, got {getattr(self, f.name)!r}")
        if self.async_scheduling not in (None, True, False):
            raise ValueError(f"async_scheduling must be True, False or None, got {self.async_scheduling!r}")
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ValueError(
                "async_scheduling does not go with pipeline_parallel_size above 1, whose first stage cannot have a token "
                "before the last has sampled it; leave it out: a pipeline has several steps under way as it is"
            )
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"distributed_executor_backend 'uni' is one rank, and tensor_parallel_size x pipeline_parallel_size is "
                f"{self.world_size}: use 'mp'"
            )
        if isinstance(self.eplb_config, dict):
            self.eplb_config = json.dumps(self.eplb_config)
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError("enable_eplb moves whole experts between ranks: it needs enable_expert_parallel")
        if self.eplb_config is not None and not self.enable_eplb:
            raise ValueError("eplb_config does nothing without enable_eplb")
        if self.data_parallel_size > 1 and self.distributed_executor_backend in ("external_launcher", "ray"):
            raise ValueError(
                f"data_parallel_size above 1 does not go with distributed_executor_backend "
                f"{self.distributed_executor_backend!r}: leave it out, or start one engine for each and divide the requests"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )
        if not (_is_number(self.kv_offloading_size) and 0 <= self.kv_offloading_size < float("inf")):
            raise ValueError(f"kv_offloading_size must be 0 or more GiB, got {self.kv_offloading_size!r}")
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
        if isinstance(self.kv_transfer_config, dict):
            self.kv_transfer_config = json.dumps(self.kv_transfer_config)
        # What a connector is told; None if KV stays here.
        self.kv_transfer = self._kv_transfer()

    def _kv_transfer(self) -> KVTransferConfig | None:
        given = KVTransferConfig.values_from_json(self.kv_transfer_config or "{}")
        for name in ("kv_role", "kv_connector"):
            if getattr(self, name) not in (None, "none"):
                given[name] = getattr(self, name)
        if self.kv_offloading_size:
            given.setdefault("kv_connector", "offloading")
        if not given:
            return None
        kv_transfer = KVTransferConfig(**given)
        if self.data_parallel_rank:  # each engine is one of its own
            if "engine_id" in given:
                kv_transfer.engine_id += f"-{self.data_parallel_rank}"
            kv_transfer.kv_port += self.data_parallel_rank if kv_transfer.kv_port else 0
        return kv_transfer

    def settle(self, model_max_len: int, num_kv_blocks: int, on_gpu: bool = False) -> None:
        """Fill in what depends on the model, on the device and on the size of the pool: `max_model_len`,
        `async_scheduling`, `token_budget` and `max_request_tokens`, the most tokens that one request may ever have.

        Raises:
            ValueError: a limit that contradicts another.
        """
        if self.async_scheduling is None:
            self.async_scheduling = on_gpu and self.pipeline_parallel_size == 1
        if self.max_model_len is None:
            self.max_model_len = model_max_len
        elif self.max_model_len > model_max_len:
            raise ValueError(
                f"max_model_len ({self.max_model_len}) is over the {model_max_len} positions that the model was made for"
            )
        self.max_request_tokens = min(self.max_model_len, num_kv_blocks * self.block_size)
        if not self.enable_chunked_prefill:
            if self.max_num_batched_tokens is None:
                self.token_budget = max(DEFAULT_TOKEN_BUDGET, self.max_request_tokens)
            elif self.max_num_batched_tokens < self.max_request_tokens:
                raise ValueError(
                    f"without chunked prefill, max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least the "
                    f"longest request ({self.max_request_tokens} tokens): raise it, lower max_model_len, or turn "
                    f"enable_chunked_prefill on"
                )

    def _check(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    @property
    def world_size(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_divided(self) -> bool:
        """True for the settings of several engines, False for those of one of them, or of the only one."""
        return self.data_parallel_size > 1 and self.data_parallel_rank is None

    @property
    def in_lock_step(self) -> bool:
        """True if this engine makes all its steps together with others, with which it shares experts."""
        return self.data_parallel_address != ""

    @classmethod
    def flags(cls) -> list[dataclasses.Field[Any]]:
        """The fields that have a flag."""
        return [f for f in dataclasses.fields(cls) if "unnamed" not in f.metadata]

    @classmethod
    def choices(cls) -> dict[str, tuple[str, ...]]:
        """The allowed values of each field that has a closed list of them."""
        hints = typing.get_type_hints(cls)
        return {
            f.name: typing.get_args(hints[f.name])
            for f in dataclasses.fields(cls)
            if typing.get_origin(hints[f.name]) is Literal
        }

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Give the parser a flag for every field."""
        hints, choices = typing.get_type_hints(cls), cls.choices()
        group = parser.add_argument_group("engine")
        for f in cls.flags():
            flags, hint = ["--" + f.name.replace("_", "-")], hints[f.name]
            if f.metadata["short"]:
                flags.append(f.metadata["short"])
            options: dict[str, Any] = {"dest": f.name, "default": f.default, "help": f.metadata["help"]}
            is_switch = hint in (bool, bool | None)
            if f.default is not None and not is_switch:
                options["help"] += " (default: %(default)s)"
            if is_switch:
                options["action"] = argparse.BooleanOptionalAction
            elif f.name in choices:
                options["choices"] = choices[f.name]
            else:
                options["type"] = f.metadata["parse"] or _plain_type(hint)
                options["metavar"] = f.name.rsplit("_", 1)[-1].upper()
            group.add_argument(*flags, **options)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> EngineConfig:
        """Settings from a parsed command line."""
        return cls(**{f.name: getattr(arguments, f.name) for f in cls.flags()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain_type(hint: Any) -> type:
    """`int | None` -> int."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def parse_bytes(size: str | int, name: str) -> int:
    """ "512MiB" -> 536870912. GB counts in thousands, GiB and a bare G in 1024s; a bare number is in bytes.

    Raises:
        ValueError: not a size; the message shows what one looks like.
    """
    text = str(size)
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be a size such as 512MiB, 4GB or 1073741824, got {size!r}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0, got {size!r}")
    return int(value)
