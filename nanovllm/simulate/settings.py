"""Settings of a simulation, which are flags of `nanovllm simulate`. Imports nothing heavy."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from nanovllm.assembly.flags import DataclassInstance, flags_of, words_of
from nanovllm.data.checks import Keywords, Positive, did_you_mean
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.router.config import read_weights
from nanovllm.router.policies import Weights
from nanovllm.simulate.arrivals import SyntheticWorkload

# The engine's settings on which plans, or the times of steps, depend, in groups of the help.
ENGINE_GROUPS = {
    "model and layout": (
        "model",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "enable_expert_parallel",
        "enable_eplb",
        "eplb_config",
        "max_model_len",
    ),
    "KV cache of an engine": (
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "num_kv_blocks",
        "block_size",
        "enable_prefix_caching",
        "preemption_mode",
        "swap_space",
        "kv_offloading_size",
    ),
    "scheduler of an engine": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "max_step_ms",
        "enable_chunked_prefill",
        "batching_policy",
        "scheduling_policy",
        "async_scheduling",
    ),
}
ENGINE_FLAGS = tuple(itertools.chain(*ENGINE_GROUPS.values()))
FLEET_GROUPS = {
    "fleet": (
        "machine",
        "replicas",
        "prefill",
        "prefill_config",
        "decode",
        "decode_config",
        "data_parallel_size",
        "expert_imbalance",
    ),
    "workload from a file": ("workload", "speedup", "limit"),
    "KV beyond the device": (
        "kv_transfer_bandwidth",
        "kv_transfer_latency",
        "kv_offloading_bandwidth",
        "kv_store_size",
        "kv_store_bandwidth",
        "kv_store_latency",
    ),
    "router": ("routing_policy", "routing_weights", "metrics_interval"),
    "failures": ("failures", "cold_start", "retry_failed"),
    "speculative decoding": ("spec_acceptance", "draft_time"),
    "objectives and price": ("goodput", "slo_attainment", "price_per_hour"),
}
# Flags that have an effect only with another one.
NEEDED_FLAGS = {
    "--speedup": "--workload",
    "--limit": "--workload",
    "--cold-start": "--failures",
    "--no-retry-failed": "--failures",
    "--draft-time": "--spec-acceptance",
    "--kv-transfer-bandwidth": "--prefill",
    "--kv-transfer-latency": "--prefill",
    "--kv-store-bandwidth": "--kv-store-size",
    "--kv-store-latency": "--kv-store-size",
    "--prefill-config": "--prefill",
    "--decode-config": "--decode",
}
# Settings of engines that are the same for prefill and decode: what defines a KV block and its
# content, where such blocks are kept, and in which order requests run.
COMMON_SETTINGS = (
    "model",
    "kv_cache_dtype",
    "block_size",
    "kv_offloading_size",
    "scheduling_policy",
)
# Settings that --prefill-config and --decode-config may have.
ROLE_SETTINGS = (
    *("machine", "data_parallel_size", "expert_imbalance", "price_per_hour"),
    *("kv_transfer_bandwidth", "kv_transfer_latency"),
    *(name for name in ENGINE_FLAGS if name not in COMMON_SETTINGS),
)
DEFAULT_MODEL = "llama-3.1-8b"
# GB/s: `Links` computes with a whole number of bytes per second, which must be positive and finite.
Bandwidth = Annotated[float, Meta(ge=1e-6, le=1e6)]
# Times, sizes and prices: the clock's picoseconds, and numbers of blocks, are finite.
Amount = Annotated[float, Meta(ge=0, le=1e9)]
T = TypeVar("T", bound=DataclassInstance)


@dataclass(frozen=True)
class FleetConfig(Keywords):
    """Settings of a simulation, besides those of its engines and of a synthetic workload.

    Attributes:
        workload: file with requests, compressed or not: Mooncake JSON lines, Azure or BurstGPT CSV,
            a trace of `nanovllm serve --trace`, or a result of `vllm bench serve --save-detailed`
            (default: a synthetic workload). The settings in a trace are the defaults of all flags
            of engines. Values that the recorded engine had computed (the number of KV blocks, the
            longest request, --async-scheduling) are computed again if you give a flag from which
            they follow: --machine, --model, -tp, -pp and others
        speedup: with --workload, divide its times by this number
        limit: with --workload, number of rows to read
        replicas: number of engines
        prefill: with --decode, number of engines that only compute prompts, instead of --replicas
        decode: with --prefill, number of engines that fetch the KV of prompts, and generate outputs
        prefill_config: settings of the prefill engines that differ from those of the others, such
            as --prefill-config.machine H200 or, as JSON, {"tensor_parallel_size": 2, "machine":
            "H200"}: layout, machine, price, KV pool and scheduler
        decode_config: the same for the decode engines
        machine: machine of the engines, such as H100 or A100 (see --list); H100x4 has four devices
            per node; or the path of a TOML file that describes a machine, or that --calibrate has
            written
        routing_policy: how the router chooses an engine: random, round_robin, load (the least busy
            one), estimated (the one that was already sent the prompt's prefix; also called
            prefix_aware, as in nanovllm router), or precise (the one
            that has it cached)
        routing_weights: with the policy load, estimated or precise, weights of llm-d's scorers,
            such as prefix:3 kv:2 queue:2, for an engine's share of the prompt's blocks, its free KV
            memory, and its queue; the engine with the highest sum is chosen
        metrics_interval: seconds between two looks of the router at the loads of the engines (0: it
            always knows them)
        failures: engines that fail, and when in seconds, such as 0@60 3@120; at 0, they start late.
            The prefill engines have the first numbers, from 0
        cold_start: seconds from a failure until a replacement serves requests (default: there is
            none)
        retry_failed: send requests of a failed engine to another one, unless their client has a
            token
        data_parallel_size: number of engines that fail together; with --enable-expert-parallel and
            a model with experts, they share these, and run their steps together
        expert_imbalance: with --enable-expert-parallel, tokens of the busiest rank's experts,
            relative to the mean of all ranks (1: each rank's get the same number)
        spec_acceptance: speculative decoding: for each position, the share of all drafts that are
            accepted there, with all before them: 0.7,0.49,0.343 if each is accepted with a chance
            of 70 %
        draft_time: with --spec-acceptance, time in ms to draft a token for all requests (0: drafts
            cost nothing but their verification)
        kv_transfer_bandwidth: with --prefill and --decode, GB/s between a device and those of other
            engines, in one direction (default: the machine's; a file of --calibrate has none)
        kv_transfer_latency: ms until the first byte arrives there (default: the machine's; with a
            file of --calibrate 0)
        kv_offloading_bandwidth: with --kv-offloading-size, --kv-store-size or --preemption-mode
            swap, GB/s between a device and host memory, in one direction (default: the machine's;
            a file of --calibrate has none)
        kv_store_size: GiB of a store for KV blocks that all engines share, such as a disk or a
            server: behind host memory, or alone (0: there is none)
        kv_store_bandwidth: GB/s at which all engines together read from the store
        kv_store_latency: ms until the first byte from the store arrives
        goodput: times in ms that a request must keep to count in request_goodput, such as ttft:200
            tpot:50 e2el:9000
        slo_attainment: with --find-load, share of requests that must keep these times
        price_per_hour: US dollars per device and hour (default: the machine's)
    """

    workload: str | None = None
    speedup: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    limit: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    replicas: Annotated[int, Meta(ge=1, le=100_000)] = 1
    prefill: Annotated[int, Meta(ge=0, le=100_000)] = 0
    decode: Annotated[int, Meta(ge=0, le=100_000)] = 0
    prefill_config: str | None = None
    decode_config: str | None = None
    machine: str | dict[str, object] = "H100"
    routing_policy: Literal[
        "random", "round_robin", "load", "estimated", "prefix_aware", "precise"
    ] = "estimated"
    routing_weights: str | Sequence[str] | None = None
    metrics_interval: Amount = 0.0
    failures: str | Sequence[str] | None = None
    cold_start: Amount | None = None
    retry_failed: bool = True
    data_parallel_size: Positive = 1
    expert_imbalance: Annotated[float, Meta(ge=1, le=1e9)] = 1.0
    spec_acceptance: str | None = None
    draft_time: Amount = 0.0
    kv_transfer_bandwidth: Bandwidth | None = None
    kv_transfer_latency: Amount | None = None
    kv_offloading_bandwidth: Bandwidth | None = None
    kv_store_size: Amount = 0.0
    kv_store_bandwidth: Bandwidth = 10.0
    kv_store_latency: Amount = 1.0
    goodput: str | Sequence[str] | None = None
    slo_attainment: Annotated[float, Meta(gt=0, le=1)] = 0.9
    price_per_hour: Amount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("--prefill and --decode need each other: set both, or none")
        if self.prefill and self.replicas > 1:
            raise ValueError(
                "--replicas has no effect with --prefill and --decode, which count the engines: "
                "omit it"
            )
        check_needed({word.partition("=")[0] for word in words_of(self)}, NEEDED_FLAGS)
        if self.weights and self.routing_policy in ("random", "round_robin"):
            raise ValueError(
                "--routing-weights needs --routing-policy load, estimated or precise, got "
                f"{self.routing_policy}"
            )

    @property
    def weights(self) -> Weights | None:
        """`routing_weights` as numbers.

        Raises:
            UsageError: see `read_weights`.
        """
        return read_weights(self.routing_weights)

    @property
    def acceptance(self) -> list[float]:
        """`spec_acceptance` as numbers.

        Raises:
            UsageError: they are not shares, or increase.
        """
        words = self.spec_acceptance.split(",") if self.spec_acceptance else []
        try:
            shares = [float(word) for word in words]
        except ValueError:
            shares = [2.0]
        if shares != sorted(shares, reverse=True) or not all(0 <= share <= 1 for share in shares):
            raise UsageError(
                "--spec-acceptance must be numbers from 1 to 0 that do not increase, such as "
                f"0.8,0.6,0.4, got {self.spec_acceptance!r}"
            )
        return shares


def check_needed(given: Collection[str], needed_flags: Mapping[str, str]) -> None:
    """Check that flags which others need are set, too.

    Args:
        given: flags that are not at their defaults.
        needed_flags: by flag, the one without which it has no effect.

    Raises:
        UsageError: one of these is missing.
    """
    for flag, needed in needed_flags.items():
        if flag in given and needed not in given:
            raise UsageError(f"{flag} has no effect without {needed}: set it, too, or omit {flag}")


def flag_of(name: str) -> str:
    """Return the flag that sets a setting."""
    return f"--{name.replace('_', '-')}"


def name_of(flag: str) -> str:
    """Return the setting that a flag sets."""
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def parse_role(flag: str, text: str) -> dict[str, object]:
    """Read the settings of a role from JSON. Names may have dashes, as flags have.

    Raises:
        UsageError: no JSON object, or a setting that a role cannot have.
    """
    try:
        settings = msgspec.json.decode(text, type=dict[str, object])
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'{flag} must be JSON such as {{"tensor_parallel_size": 2}}, got {text!r}: {error}'
        ) from None
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    for name in settings:
        if name not in ROLE_SETTINGS and name in known_settings():
            raise UsageError(
                f"{flag} cannot have {name}, which is the same for all engines: set "
                f"{flag_of(name)} instead"
            )
        if name not in ROLE_SETTINGS:
            raise UsageError(f"{flag}: no setting {name!r}{did_you_mean(name, ROLE_SETTINGS)}")
    return settings


def known_settings() -> dict[str, type]:
    """Return the names of all settings, each with the class that has it."""
    found: dict[str, type] = dict.fromkeys(ENGINE_FLAGS, EngineConfig)
    for cls in (FleetConfig, SyntheticWorkload):
        found |= {field.name: cls for field in flags_of(cls)}
    return found


def create(cls: type[T], settings: Mapping[str, object]) -> T:
    """Create settings from those of a mapping that belong to the class.

    Raises:
        UsageError: a value that makes no sense, alone or with another.
    """
    names = {field.name for field in flags_of(cls)}
    try:
        return cls(**{name: value for name, value in settings.items() if name in names})
    except ValueError as error:
        raise UsageError(str(error)) from error
