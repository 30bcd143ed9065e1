"""Plans a fleet: everything that its settings leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nanovllm.assembly.flags import words_of
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.resolved_config import ResolvedConfig, resolve
from nanovllm.distributed.cost_model import Link
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.kv_transfer.stores.store import HostKeys
from nanovllm.router.policies import ROUTED_BLOCKS, Router, RouterState, Weights
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.disaggregated import (
    DecodeConnector,
    DisaggregatedFleet,
    PrefillConnector,
    TieredDecodeConnector,
    TieredPrefillConnector,
)
from nanovllm.simulate.engine import SimulatedEngine, create_engine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.lock_step import LockStepEngine, put_in_lock_step
from nanovllm.simulate.machines import GIB, find_machine
from nanovllm.simulate.measured import MeasuredCost, read_cost
from nanovllm.simulate.models import Layout, find_model
from nanovllm.simulate.outages import UnreliableFleet, parse_outages
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.results import ReplicaCounters
from nanovllm.simulate.roofline import Roofline, create_cost, kv_blocks
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.runner import SimulatedRunner
from nanovllm.simulate.settings import DEFAULT_MODEL, FleetConfig, parse_numbers
from nanovllm.simulate.tiers import TierConnector, Tiers
from nanovllm.simulate.workload import SECOND, Workload

# The connector with tiers of each kind of engine.
TIERED: dict[type[KVConnectorScheduler], type[TierConnector]] = {
    KVConnectorScheduler: TierConnector,
    PrefillConnector: TieredPrefillConnector,
    DecodeConnector: TieredDecodeConnector,
}


@dataclass(frozen=True)
class FleetPlan:
    """Describes the engines of a fleet.

    Attributes:
        price_per_hour: of the devices of an engine, in US dollars; 0: unknown.
        num_host_blocks, num_store_blocks: room for KV blocks in each engine's host memory, and in
            the store.
        in_lock_step: groups of engines share experts, and run their steps together.
    """

    config: FleetConfig
    resolved: ResolvedConfig
    cost: Roofline | MeasuredCost
    price_per_hour: float
    num_host_blocks: int = 0
    num_store_blocks: int = 0
    in_lock_step: bool = False

    @property
    def description(self) -> str:
        """Name model, machine, layout, engines and router in a line."""
        config = self.config
        given = self.resolved.given
        model = self.cost.model if isinstance(self.cost, MeasuredCost) else self.cost.model.name
        machine = config.machine if isinstance(self.cost, MeasuredCost) else self.cost.machine.name
        layout = [f"TP {given.tensor_parallel_size}", f"PP {given.pipeline_parallel_size}"]
        if config.data_parallel_size > 1:
            layout.append(f"DP {config.data_parallel_size}")
        if given.enable_expert_parallel:
            layout.append("EP")
        engines = f"engines: {config.replicas}"
        if config.prefill:
            engines = f"engines: {config.prefill} for prefill, {config.decode} for decode"
        blocks = f"{self.resolved.num_kv_blocks:,} KV blocks of {given.block_size} tokens"
        if self.num_host_blocks:
            blocks += f", and {self.num_host_blocks:,} in host memory"
        if self.num_store_blocks:
            blocks += f"; a store of {self.num_store_blocks:,} blocks"
        return (
            f"{model} on {machine}, {', '.join(layout)}; {engines}, each with "
            f"{blocks}; router: {config.routing_policy}"
        )

    def create_fleet(self, workload: Workload, fast: bool = True) -> Fleet:
        """Create engines, put those in lock-step that share experts, and create their routers.

        Args:
            fast: see `create_engine`.
        """
        config = self.config
        outages = parse_outages(config.failures, config.cold_start, config.num_engines)
        by_priority = self.resolved.given.scheduling_policy == "priority"
        group_size = config.data_parallel_size
        if not config.prefill:
            engines = self._create_engines(config.replicas, fast)
            router = self._create_router(engines, workload)
            if not outages:
                return Fleet(engines, router, by_priority, group_size)
            return UnreliableFleet(
                engines,
                router,
                outages,
                retries=config.retry_failed,
                by_priority=by_priority,
                group_size=group_size,
            )
        prefill = self._create_engines(config.prefill, fast, PrefillConnector)
        decode = self._create_engines(config.decode, fast, DecodeConnector)
        assert isinstance(self.cost, Roofline)
        layout = self.cost.layout
        link = self.cost.machine.between
        size = self.cost.model.kv_bytes_per_token(layout.tensor_parallel_size)
        return DisaggregatedFleet(
            prefill,
            decode,
            (self._create_router(prefill, workload), self._create_router(decode, workload)),
            outages,
            # Each device has its own link.
            bandwidth=link.bandwidth * layout.devices,
            latency=round(link.latency * SECOND),
            kv_bytes_per_token=size * layout.tensor_parallel_size,
            retries=config.retry_failed,
            by_priority=by_priority,
            group_size=group_size,
        )

    def create_tiers(self, fleet: Fleet) -> Tiers | None:
        """Connect the engines to host memory and the store; None if they have none."""
        if not self.num_host_blocks and not self.num_store_blocks:
            return None
        assert isinstance(self.cost, Roofline)
        layout = self.cost.layout
        host = self._host_link(self.cost)
        size = self.cost.model.kv_bytes_per_token(layout.tensor_parallel_size)
        return Tiers(
            fleet,
            # Each device has its own link.
            replace(host, bandwidth=host.bandwidth * layout.devices),
            Link(
                "store", self.config.kv_store_latency / 1000, self.config.kv_store_bandwidth * 1e9
            ),
            size * layout.tensor_parallel_size * self.resolved.given.block_size,
        )

    def _host_link(self, cost: Roofline) -> Link:
        """Return the link of a device to host memory."""
        host = cost.machine.host_link
        bandwidth = self.config.kv_offloading_bandwidth
        return replace(host, bandwidth=1e9 * bandwidth) if bandwidth else host

    @property
    def _copy_time(self) -> int:
        """The time to copy a block to or from host memory, in picoseconds: the sum over the stages
        of a pipeline. A measured machine has no link: copies are free."""
        if isinstance(self.cost, MeasuredCost):
            return 0
        size = self.cost.model.kv_bytes_per_token(self.cost.layout.tensor_parallel_size)
        block = size * self.resolved.given.block_size
        return round(block / self._host_link(self.cost).bandwidth * SECOND)

    @cached_property
    def _store(self) -> HostKeys | None:
        return HostKeys(self.num_store_blocks) if self.num_store_blocks else None

    def _create_connector(self, kind: type[KVConnectorScheduler]) -> KVConnectorScheduler | None:
        """Create the connector of an engine of this kind, with the tiers that there are."""
        config = self.resolved.given
        if self.num_host_blocks or self.num_store_blocks:
            return TIERED[kind](config, self.num_host_blocks, self._store)
        return kind(config, {}, ()) if kind is not KVConnectorScheduler else None

    def _create_engines(
        self, count: int, fast: bool, connector: type[KVConnectorScheduler] = KVConnectorScheduler
    ) -> list[SimulatedEngine]:
        engines = [
            create_engine(
                LockStepEngine if self.in_lock_step else SimulatedEngine,
                self.resolved,
                self.cost,
                connector=self._create_connector(connector),
                runner=self._create_runner(),
                copy_time=self._copy_time,
                fast=fast and not self.in_lock_step,
            )
            for _ in range(count)
        ]
        members = [engine for engine in engines if isinstance(engine, LockStepEngine)]
        put_in_lock_step(members, self.config.data_parallel_size, self.config.expert_imbalance)
        return engines

    def _create_runner(self) -> SimulatedRunner:
        """Create what takes the place of an engine's ranks. Those of prefill engines never draft,
        since their requests end with their first token."""
        if not self.config.acceptance:
            return SimulatedRunner()
        from nanovllm.simulate.drafts import DraftingRunner

        draft_time = round(self.config.draft_time * SECOND / 1000)
        return DraftingRunner(self.config.acceptance, draft_time)

    def _create_router(
        self, engines: Sequence[SimulatedEngine], workload: Workload
    ) -> PolicyRouter:
        config = self.config
        weights = parse_numbers(
            "--routing-weights", config.routing_weights, Weights._fields, "a number, such as kv:2"
        )
        state = RouterState(
            len(engines),
            self.resolved.num_kv_blocks,
            weights=Weights(**weights) if weights else None,
        )
        block_size = self.resolved.given.block_size
        maker = RequestMaker(block_size, workload.prefix_block_size)
        num_compared = ROUTED_BLOCKS * block_size
        router = PolicyRouter(
            Router(config.routing_policy, state),
            lambda source: maker.prompt_names(
                source.prefix_ids, min(source.num_prompt_tokens, num_compared)
            ),
            refresh=round(config.metrics_interval * SECOND),
        )
        router.watch(engines)
        return router

    def bottleneck(self, counters: ReplicaCounters) -> str:
        """Name the part of the mean step that takes most time, and what it spends this time on."""
        num_steps = counters.num_steps
        num_decodes = counters.num_decodes // num_steps
        # Prompt tokens, and drafts: these are computed like a prompt, next to what decodes.
        counts = counters.num_prefill_tokens // num_steps, counters.num_draft_tokens // num_steps
        work = StepWork(
            num_decodes=num_decodes,
            decode_context=counters.decode_context // num_steps,
            prefills=[(0, count) for count in counts if count],
            num_samples=num_decodes,
        )
        part = self.cost.bottleneck(work)
        return f"{part.name} ({part.bound})"


def plan_fleet(config: FleetConfig, engine: EngineConfig) -> FleetPlan:
    """Decide everything that the settings leave open.

    Raises:
        UsageError: an unknown machine or model, a layout that is impossible, or too little memory.
    """
    path = Path(config.machine)
    if path.is_file():
        return _measured_plan(config, engine, read_cost(path))
    machine = find_machine(config.machine)
    model = find_model(engine.model, kv_cache_dtype=engine.kv_cache_dtype)
    layout = Layout(
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        data_parallel_size=config.data_parallel_size,
        enable_expert_parallel=engine.enable_expert_parallel,
    )
    has_groups = config.data_parallel_size > 1
    # As `DataParallelCore` decides.
    in_lock_step = has_groups and layout.enable_expert_parallel and model.config.moe is not None
    if in_lock_step and (engine.async_scheduling or layout.pipeline_parallel_size > 1):
        raise UsageError(
            "--data-parallel-size with --enable-expert-parallel cannot be combined with "
            "--async-scheduling or --pipeline-parallel-size: lock-step is simulated without them"
        )
    if in_lock_step:
        engine = replace(engine, async_scheduling=False)
    cost = create_cost(model, machine, layout)
    utilization = engine.gpu_memory_utilization
    fitting = kv_blocks(model, machine, layout, engine.block_size, utilization)
    bytes_per_token = model.kv_bytes_per_token(layout.tensor_parallel_size)
    resolved = _resolve(
        engine,
        max_len=model.config.max_position_embeddings,
        fitting=fitting,
        bytes_per_token=bytes_per_token / layout.pipeline_parallel_size,
        on_gpu=not machine.name.startswith("laptop"),
    )
    price = config.price_per_hour
    if price is None:
        price = machine.price_per_hour or 0.0
    size = engine.block_size * model.kv_bytes_per_token(1)
    tiers = _tier_blocks(config, engine, bytes_per_token / layout.pipeline_parallel_size, size)
    return FleetPlan(config, resolved, cost, price * layout.devices, *tiers, in_lock_step)


def _measured_plan(config: FleetConfig, engine: EngineConfig, cost: MeasuredCost) -> FleetPlan:
    """Return engines like the one that was measured.

    Raises:
        UsageError: settings that the measurement says nothing about.
    """
    if engine.model not in (DEFAULT_MODEL, cost.model):
        raise UsageError(f"--machine {config.machine} was measured with {cost.model}: omit --model")
    if (
        engine.world_size > 1
        or config.prefill
        or config.data_parallel_size > 1
        or engine.kv_transfer
    ):
        raise UsageError(
            f"--machine {config.machine} describes one whole engine: omit --tensor-parallel-size, "
            "--pipeline-parallel-size, --data-parallel-size, --prefill, --decode and tiers of KV"
        )
    given = {word.partition("=")[0] for word in words_of(engine)}
    for flag in ("--kv-cache-dtype", "--gpu-memory-utilization", "--enable-expert-parallel"):
        if flag in given:
            raise UsageError(
                f"{flag} has no effect with --machine {config.machine}: omit it, or set it with "
                "--calibrate, which measures the engine"
            )
    resolved = _resolve(
        engine,
        max_len=cost.max_model_len,
        fitting=cost.num_kv_blocks * cost.block_size // engine.block_size,
        bytes_per_token=cost.kv_bytes_per_token,
        on_gpu=cost.on_gpu,
    )
    return FleetPlan(config, resolved, cost, config.price_per_hour or 0.0)


def _tier_blocks(
    config: FleetConfig, engine: EngineConfig, bytes_per_token: float, block_bytes: float
) -> tuple[int, int]:
    """Return how many blocks fit in an engine's host memory, and in the store.

    Args:
        bytes_per_token: KV of a token on one rank.
        block_bytes: KV of a block, each part counted once.

    Raises:
        UsageError: a tier without room for a block; or one that the engine cannot use.
    """
    host = int(engine.kv_offloading_size * GIB / engine.world_size / bytes_per_token)
    sizes = {
        "--kv-offloading-size": (engine.kv_offloading_size, host // engine.block_size),
        "--kv-store-size": (config.kv_store_size, int(config.kv_store_size * GIB / block_bytes)),
    }
    for flag, (size, num_blocks) in sizes.items():
        if size and not num_blocks:
            raise UsageError(
                f"{flag} {size} GiB has no room for a KV block of {block_bytes:,.0f} bytes: "
                "raise it"
            )
        if size and not engine.enable_prefix_caching:
            raise UsageError(f"{flag} needs --enable-prefix-caching: blocks have names by it")
    return sizes["--kv-offloading-size"][1], sizes["--kv-store-size"][1]


def _resolve(
    engine: EngineConfig, *, max_len: int, fitting: int, bytes_per_token: float, on_gpu: bool
) -> ResolvedConfig:
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
