"""Plans engines that are all the same: everything that their settings leave open."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from nanovllm.assembly.flags import words_of
from nanovllm.data.config import EngineConfig
from nanovllm.data.eplb_config import EPLBConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.resolved_config import ResolvedConfig, resolve
from nanovllm.distributed.cost_model import Link
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.kv_transfer.stores.store import HostKeys
from nanovllm.router.policies import ROUTED_BLOCKS, Router, RouterState
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.disaggregated import (
    DecodeConnector,
    PrefillConnector,
    TieredDecodeConnector,
    TieredPrefillConnector,
)
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.lock_step import LockStepEngine, put_in_lock_step
from nanovllm.simulate.machines import GIB, file_of, machine_of
from nanovllm.simulate.measured import MeasuredCost, read_cost
from nanovllm.simulate.models import Layout, ModelShape, find_model
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.results import ReplicaCounters
from nanovllm.simulate.roofline import Roofline, kv_blocks, longest_part
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.runner import SimulatedRunner
from nanovllm.simulate.settings import DEFAULT_MODEL, FleetConfig, create
from nanovllm.simulate.tiers import TierConnector
from nanovllm.simulate.workload import SECOND, Workload

# Bottlenecks other than the device, by the reason why the scheduler lets requests wait.
WAITS = {"kv blocks": "KV memory", "max_num_seqs": "max_num_seqs"}
# The connectors of engines of each role, without tiers and with them.
CONNECTORS: dict[str, tuple[type[KVConnectorScheduler] | None, type[TierConnector]]] = {
    "": (None, TierConnector),
    "prefill": (PrefillConnector, TieredPrefillConnector),
    "decode": (DecodeConnector, TieredDecodeConnector),
}
# A calibration measures no link.
NO_LINK = Link("unknown", latency=0.0, bandwidth=0.0)
# Settings that a calibration has measured already.
MEASURED_FLAGS = (
    "--kv-cache-dtype",
    "--gpu-memory-utilization",
    "--enable-expert-parallel",
    "--enable-eplb",
    "--expert-imbalance",
)


@dataclass(frozen=True)
class EnginePlan:
    """Describes engines that are all the same: those of a fleet, or those for prefill or decode.

    Attributes:
        config: the settings of the fleet, with the engines' own ones in place of the common ones.
        count: how many engines there are.
        layout: machine and layout in words.
        kv_bytes_per_token: KV of a token, in bytes, on all ranks of an engine.
        network, host_link: from a device to those of other engines, and to host memory.
        price_per_hour: of the devices of an engine, in US dollars; 0: unknown.
        num_host_blocks: room for KV blocks in an engine's host memory.
        in_lock_step: groups of engines share experts, and run their steps together.
        role: what they are for: "prefill" or "decode"; "": for both.
    """

    config: FleetConfig
    count: int
    resolved: ResolvedConfig
    cost: Roofline | MeasuredCost
    model_name: str
    layout: str
    kv_bytes_per_token: float
    network: Link
    host_link: Link
    price_per_hour: float
    num_host_blocks: int = 0
    in_lock_step: bool = False
    role: str = ""

    @property
    def memory(self) -> str:
        """The KV blocks of an engine in words."""
        words = f"{self.num_kv_blocks:,} KV blocks of {self.resolved.given.block_size} tokens"
        if self.num_host_blocks:
            words += f", and {self.num_host_blocks:,} in host memory"
        return words

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of an engine."""
        return self.resolved.num_kv_blocks

    @property
    def num_devices(self) -> int:
        """Devices of an engine."""
        return self.resolved.given.world_size

    @property
    def kv_link(self) -> Link:
        """The link of all devices of an engine to other engines: each device has its own."""
        return replace(self.network, bandwidth=self.network.bandwidth * self.num_devices)

    @property
    def _copy_time(self) -> int:
        """The time to copy a block to or from host memory, in picoseconds: the sum over the stages
        of a pipeline. Over a link that nothing is known of, copies are free."""
        if not self.host_link.bandwidth:
            return 0
        given = self.resolved.given
        block = self.kv_bytes_per_token / given.tensor_parallel_size * given.block_size
        return round(block / self.host_link.bandwidth * SECOND)

    def create_engines(self, store: HostKeys | None, fast: bool) -> list[SimulatedEngine]:
        """Create the engines, and put those in lock-step that share experts.

        Args:
            store: the KV blocks that all engines of the fleet share; None: there is none.
            fast: see `create_engine`.
        """
        engines = [
            create_engine(
                LockStepEngine if self.in_lock_step else SimulatedEngine,
                self.resolved,
                self.cost,
                connector=self._create_connector(store),
                runner=self._create_runner(),
                copy_time=self._copy_time,
                fast=fast and not self.in_lock_step,
            )
            for _ in range(self.count)
        ]
        members = [engine for engine in engines if isinstance(engine, LockStepEngine)]
        put_in_lock_step(members, self.config.data_parallel_size)
        return engines

    def _create_connector(self, store: HostKeys | None) -> KVConnectorScheduler | None:
        """Create the connector of an engine, with the tiers that there are."""
        config = self.resolved.given
        plain, tiered = CONNECTORS[self.role]
        if self.num_host_blocks or store is not None:
            return tiered(config, self.num_host_blocks, store)
        return None if plain is None else plain(config, {}, ())

    def _create_runner(self) -> SimulatedRunner:
        """Create what takes the place of an engine's ranks."""
        if not self.config.acceptance:
            return SimulatedRunner()
        from nanovllm.simulate.drafts import DraftingRunner

        draft_time = round(self.config.draft_time * SECOND / 1000)
        return DraftingRunner(self.config.acceptance, draft_time)

    def create_router(self, engines: Sequence[SimulatedEngine], workload: Workload) -> PolicyRouter:
        """Create the router of the engines."""
        config = self.config
        state = RouterState(len(engines), self.num_kv_blocks, weights=config.weights)
        block_size = self.resolved.given.block_size
        maker = RequestMaker(block_size, workload.prefix_block_size)
        num_compared = ROUTED_BLOCKS * block_size
        return PolicyRouter(
            Router(config.routing_policy, state),
            engines,
            lambda source: maker.prompt_names(
                source.prefix_ids, min(source.num_prompt_tokens, num_compared)
            ),
            refresh=round(config.metrics_interval * SECOND),
        )

    def bottleneck(self, counters: ReplicaCounters) -> str:
        """Name what requests wait for, if some wait in most steps and it is not a step's end; or
        else the part of the mean step that takes most time, and what it spends this time on.

        Args:
            counters: of an engine that has computed a step.
        """
        num_steps = counters.num_steps
        waits = Counter({name: counters.waits[reason] for reason, name in WAITS.items()})
        waits["KV memory"] += counters.waits["preemption"]
        ((name, num_waits),) = waits.most_common(1)
        if num_waits > num_steps / 2:
            return name
        num_decodes = counters.num_decodes // num_steps
        # Prompt tokens, and drafts: these are computed like a prompt, next to what decodes.
        counts = counters.num_prefill_tokens // num_steps, counters.num_draft_tokens // num_steps
        work = StepWork(
            num_decodes=num_decodes,
            decode_context=counters.decode_context // num_steps,
            prefills=[(0, count) for count in counts if count],
            num_samples=num_decodes,
        )
        part = longest_part(self.cost.parts(work))
        return f"{part.name} ({part.bound})"


def plan_engines(flag: str, count: int, config: FleetConfig, engine: EngineConfig) -> EnginePlan:
    """Decide everything that the settings of engines leave open.

    Args:
        flag: the one that counts the engines.

    Raises:
        UsageError: an unknown machine or model, a layout that is impossible, or too little memory.
    """
    group_size = config.data_parallel_size
    if count % group_size:
        raise UsageError(
            f"{flag} must be a multiple of --data-parallel-size {group_size}, got {count}"
        )
    file = file_of(config.machine)
    if file is not None and "model" in file:  # which machines do not have
        config = replace(config, machine=str(file.pop("file")))
        content = msgspec.json.encode(file)
        return _measured_plan(count, config, engine, read_cost(Path(str(config.machine)), content))
    machine = machine_of(file or config.machine)
    model = find_model(engine.model, kv_cache_dtype=engine.kv_cache_dtype)
    layout = _layout(config, engine, model)
    # As `DataParallelCore` decides.
    in_lock_step = model.config.moe is not None and layout.expert_ranks > 1 and group_size > 1
    if in_lock_step and (engine.async_scheduling or layout.pipeline_parallel_size > 1):
        raise UsageError(
            "--data-parallel-size with --enable-expert-parallel cannot be combined with "
            "--async-scheduling or --pipeline-parallel-size: lock-step is simulated without them"
        )
    if in_lock_step:
        engine = create(EngineConfig, vars(engine) | {"async_scheduling": False})
    tp = layout.tensor_parallel_size
    kv_bytes_per_token = model.kv_bytes_per_token(tp) * tp
    cost = Roofline(model, machine, layout)
    resolved = _resolve(
        engine,
        num_drafts=len(config.acceptance),
        max_len=model.config.max_position_embeddings,
        fitting=kv_blocks(model, machine, layout, engine),
        bytes_per_token=model.kv_bytes_per_token(tp) / layout.pipeline_parallel_size,
        on_gpu=machine.on_gpu,
    )
    given = config.price_per_hour
    price = given if given is not None else machine.price_per_hour or 0.0
    return EnginePlan(
        config=config,
        count=count,
        cost=cost,
        resolved=resolved,
        model_name=model.name,
        layout=f"{machine.name}, {layout}",
        kv_bytes_per_token=kv_bytes_per_token,
        network=_link(
            machine.network_link, config.kv_transfer_bandwidth, config.kv_transfer_latency
        ),
        host_link=_link(machine.host_link, config.kv_offloading_bandwidth),
        price_per_hour=price * layout.devices,
        num_host_blocks=_host_blocks(engine, kv_bytes_per_token),
        in_lock_step=in_lock_step,
    )


def _link(link: Link, bandwidth: float | None, latency: float | None = None) -> Link:
    """Return a link of a device, with the bandwidth in GB/s and the latency in ms of flags."""
    if bandwidth is not None:
        link = replace(link, bandwidth=1e9 * bandwidth)
    return link if latency is None else replace(link, latency=latency / 1000)


def _layout(config: FleetConfig, engine: EngineConfig, model: ModelShape) -> Layout:
    """Return how an engine divides the model.

    Raises:
        UsageError: settings of experts that do nothing, or are impossible, with this layout.
    """
    layout = Layout(
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        data_parallel_size=config.data_parallel_size,
        enable_expert_parallel=engine.enable_expert_parallel,
        num_redundant_experts=_num_redundant_experts(engine),
        expert_imbalance=config.expert_imbalance,
    )
    moe = model.config.moe
    if moe is None and engine.enable_eplb:
        raise UsageError(f"--enable-eplb has no effect: {model.name} has no experts; omit it")
    if config.expert_imbalance > 1 and (moe is None or layout.expert_ranks == 1):
        raise UsageError(
            "--expert-imbalance needs ranks that share experts: --enable-expert-parallel, a model "
            "with experts, and a --data-parallel-size or --tensor-parallel-size of 2 or more"
        )
    if moe is not None:
        num_slots = moe.num_experts + layout.num_redundant_experts
        # All tokens choose the busiest rank's experts, if it has enough of them.
        highest = min(float(layout.expert_ranks), num_slots / moe.top_k)
        if config.expert_imbalance > highest:
            raise UsageError(
                f"--expert-imbalance must be at most {highest:g} with {layout.expert_ranks} ranks: "
                "then the busiest one's experts get as many tokens as they can"
            )
    return layout


def _num_redundant_experts(engine: EngineConfig) -> int:
    if engine.eplb_config is None:
        return 0
    try:
        return EPLBConfig.from_json(engine.eplb_config).num_redundant_experts
    except ValueError as error:
        raise UsageError(str(error)) from error


def _with_drafts(engine: EngineConfig, num_drafts: int) -> EngineConfig:
    """Let a model draft.

    Raises:
        UsageError: engines draft without a model then.
    """
    if engine.pipeline_parallel_size > 1:
        raise UsageError(
            "--spec-acceptance cannot be combined with --pipeline-parallel-size: all layers must "
            "be on one stage"
        )
    if engine.batching_policy == "static":
        raise UsageError(
            "--spec-acceptance cannot be combined with --batching-policy static: choose chunked or "
            "prefill_first"
        )
    # Which model drafts does not matter. So far, engines with experts on several ranks have none.
    # Their plans do not depend on where experts are.
    drafts = {"method": "eagle3", "num_speculative_tokens": num_drafts}
    alone = {"enable_expert_parallel": False, "enable_eplb": False, "eplb_config": None}
    speculative = {"speculative_config": json.dumps(drafts)}
    return create(EngineConfig, vars(engine) | alone | speculative)


def _measured_plan(
    count: int, config: FleetConfig, engine: EngineConfig, cost: MeasuredCost
) -> EnginePlan:
    """Return engines like the one that was measured.

    Raises:
        UsageError: settings that the measurement says nothing about.
    """
    if engine.model not in (DEFAULT_MODEL, cost.model):
        raise UsageError(f"--machine {config.machine} was measured with {cost.model}: omit --model")
    given = {word.partition("=")[0] for word in (*words_of(engine), *words_of(config))}
    for flag in MEASURED_FLAGS:
        if flag in given:
            raise UsageError(
                f"{flag} has no effect with --machine {config.machine}: omit it, or set it with "
                "--calibrate, which measures the engine"
            )
    links = {
        "--kv-transfer-bandwidth": config.prefill > 0,
        "--kv-offloading-bandwidth": engine.kv_offloading_size > 0 or config.kv_store_size > 0,
    }
    for flag, is_needed in links.items():
        if is_needed and flag not in given:
            raise UsageError(
                f"--machine {config.machine} has no bandwidth of the links that move KV: set {flag}"
            )
    engine = _with_measured_layout(config, engine, cost)
    layout = Layout(
        cost.tensor_parallel_size, cost.pipeline_parallel_size, config.data_parallel_size
    )
    kv_bytes_per_token = cost.kv_bytes_per_token * engine.world_size
    resolved = _resolve(
        engine,
        num_drafts=len(config.acceptance),
        max_len=cost.max_model_len,
        fitting=cost.num_kv_blocks * cost.block_size // engine.block_size,
        bytes_per_token=cost.kv_bytes_per_token,
        on_gpu=cost.on_gpu,
    )
    return EnginePlan(
        config=config,
        count=count,
        resolved=resolved,
        cost=cost,
        model_name=cost.model,
        layout=f"{config.machine}, {layout}",
        kv_bytes_per_token=kv_bytes_per_token,
        network=_link(NO_LINK, config.kv_transfer_bandwidth, config.kv_transfer_latency),
        host_link=_link(NO_LINK, config.kv_offloading_bandwidth),
        price_per_hour=(config.price_per_hour or 0.0) * engine.world_size,
        num_host_blocks=_host_blocks(engine, kv_bytes_per_token),
    )


def _with_measured_layout(
    config: FleetConfig, engine: EngineConfig, cost: MeasuredCost
) -> EngineConfig:
    """Return the settings with the layout of the measured engine.

    Raises:
        UsageError: they have another one.
    """
    layouts = {
        "--tensor-parallel-size": (engine.tensor_parallel_size, cost.tensor_parallel_size),
        "--pipeline-parallel-size": (engine.pipeline_parallel_size, cost.pipeline_parallel_size),
    }
    for flag, (given, measured) in layouts.items():
        if given not in (1, measured):
            raise UsageError(
                f"--machine {config.machine} was measured with {flag} {measured}, not {given}: "
                "omit it, or measure this layout with --calibrate"
            )
    return create(
        EngineConfig,
        {
            **vars(engine),
            "tensor_parallel_size": cost.tensor_parallel_size,
            "pipeline_parallel_size": cost.pipeline_parallel_size,
        },
    )


def _host_blocks(engine: EngineConfig, kv_bytes_per_token: float) -> int:
    """Return how many blocks fit in an engine's host memory."""
    size = engine.kv_offloading_size
    block_bytes = kv_bytes_per_token * engine.block_size
    return blocks_in("--kv-offloading-size", size, block_bytes, engine) if size else 0


def blocks_in(flag: str, size: float, block_bytes: float, engine: EngineConfig) -> int:
    """Return how many blocks a tier of `size` GiB can hold.

    Raises:
        UsageError: none; or the engine cannot use them.
    """
    num_blocks = int(size * GIB / block_bytes)
    if not num_blocks:
        raise UsageError(
            f"{flag} {size} GiB has no room for a KV block of {block_bytes:,.0f} bytes: raise it"
        )
    if not engine.enable_prefix_caching:
        raise UsageError(f"{flag} needs --enable-prefix-caching: blocks have names by it")
    return num_blocks


def _resolve(
    engine: EngineConfig,
    *,
    num_drafts: int,
    max_len: int,
    fitting: int,
    bytes_per_token: float,
    on_gpu: bool,
) -> ResolvedConfig:
    """Return what decides the plans of an engine.

    Args:
        num_drafts: per step of a request that decodes.
        max_len: the longest context of the model.
        fitting: KV blocks for which a device has memory.
        bytes_per_token: KV of a token, in bytes, on one rank.

    Raises:
        UsageError: settings that are impossible.
    """
    if num_drafts:
        engine = _with_drafts(engine, num_drafts)
    num_blocks = engine.num_kv_blocks or fitting
    try:
        engine.check_limits(max_len, num_blocks)
        num_host_blocks = engine.count_host_blocks(int(bytes_per_token * engine.block_size))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return resolve(
        engine,
        model_max_len=max_len,
        num_kv_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        on_gpu=on_gpu,
    )
