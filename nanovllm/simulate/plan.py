"""Plans a fleet: everything that its settings leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.distributed.cost_model import Link
from nanovllm.kv_transfer.stores.store import HostKeys
from nanovllm.simulate.disaggregated import DisaggregatedFleet
from nanovllm.simulate.engine_plan import EnginePlan, blocks_in, plan_engines
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.outages import UnreliableFleet, parse_outages
from nanovllm.simulate.roofline import Roofline
from nanovllm.simulate.settings import FleetConfig, create, parse_role
from nanovllm.simulate.tiers import Tiers
from nanovllm.simulate.workload import SECOND, Workload


@dataclass(frozen=True)
class FleetPlan:
    """Describes the engines of a fleet.

    Attributes:
        kinds: the engines for prefill and those for decode; or one kind for both.
        num_store_blocks: room for KV blocks in the store.
    """

    config: FleetConfig
    kinds: tuple[EnginePlan, ...]
    num_store_blocks: int = 0

    @property
    def description(self) -> str:
        """Name model, machines, layouts, engines and router in a line."""
        first = self.kinds[0]
        last = self.kinds[-1]
        engines = f"engines: {first.count}"
        if first is not last:
            engines = f"engines: {first.count} for prefill, {last.count} for decode"
        words = f"{first.model_name} on {first.layout}; {engines}, each with {first.memory}"
        if (first.layout, first.memory) != (last.layout, last.memory):
            words = f"{first.model_name}; " + "; ".join(
                f"engines for {role}: {each.count} on {each.layout}, each with {each.memory}"
                for role, each in (("prefill", first), ("decode", last))
            )
        if self.num_store_blocks:
            words += f"; a store of {self.num_store_blocks:,} blocks"
        return f"{words}; router: {self.config.routing_policy}"

    @property
    def block_size(self) -> int:
        """Tokens of a KV block, in all engines."""
        return self.kinds[0].resolved.given.block_size

    @property
    def engines(self) -> list[EnginePlan]:
        """The plan of each engine, by its number."""
        return [kind for kind in self.kinds for _ in range(kind.count)]

    @property
    def groups(self) -> list[range]:
        """For each engine, the engines of its group: `data_parallel_size` after one another."""
        found: list[range] = []
        for kind in self.kinds:
            size = kind.config.data_parallel_size
            for _ in range(kind.count // size):
                found += [range(len(found), len(found) + size)] * size
        return found

    def create_fleet(self, workload: Workload, fast: bool = True) -> Fleet:
        """Create engines and their routers.

        Args:
            fast: see `create_engine`.
        """
        config = self.config
        outages = parse_outages(config.failures, config.cold_start, len(self.engines))
        store = HostKeys(self.num_store_blocks) if self.num_store_blocks else None
        engines = [kind.create_engines(store, fast) for kind in self.kinds]
        routers = [
            kind.create_router(each, workload)
            for kind, each in zip(self.kinds, engines, strict=True)
        ]
        if len(self.kinds) == 1:
            if not outages:
                return Fleet(engines[0], routers[0], self.groups)
            return UnreliableFleet(
                engines[0], routers[0], outages, retries=config.retry_failed, groups=self.groups
            )
        prefill, decode = self.kinds
        links = prefill.kv_link, decode.kv_link
        return DisaggregatedFleet(
            engines[0],
            engines[1],
            (routers[0], routers[1]),
            outages,
            bandwidths=(links[0].bandwidth, links[1].bandwidth),
            latency=round(max(link.latency for link in links) * SECOND),
            kv_bytes_per_token=decode.kv_bytes_per_token,
            retries=config.retry_failed,
            groups=self.groups,
        )

    def create_tiers(self, fleet: Fleet) -> Tiers | None:
        """Connect the engines to host memory and the store; None if they have none."""
        engines = self.engines
        if not engines[0].num_host_blocks and not self.num_store_blocks:
            return None
        config = self.config
        return Tiers(
            fleet,
            # Each device has its own link.
            [
                replace(each.host_link, bandwidth=each.host_link.bandwidth * each.num_devices)
                for each in engines
            ],
            Link("store", config.kv_store_latency / 1000, config.kv_store_bandwidth * 1e9),
            [each.kv_bytes_per_token * self.block_size for each in engines],
        )


def plan_fleet(config: FleetConfig, engine: EngineConfig) -> FleetPlan:
    """Decide everything that the settings leave open.

    Raises:
        UsageError: an unknown machine or model, a layout that is impossible, or too little memory.
    """
    kinds: tuple[EnginePlan, ...]
    if config.prefill:
        kinds = (
            _plan_role("prefill", config.prefill, config.prefill_config, config, engine),
            _plan_role("decode", config.decode, config.decode_config, config, engine),
        )
    else:
        kinds = (plan_engines("--replicas", config.replicas, config, engine),)
    _check_kinds(config, kinds)
    return FleetPlan(config, kinds, _store_blocks(config, kinds) if config.kv_store_size else 0)


def _plan_role(
    role: str, count: int, text: str | None, config: FleetConfig, engine: EngineConfig
) -> EnginePlan:
    """Plan engines for prefill or decode, with what is different in their own settings. Those for
    prefill never draft: their requests end with their first token."""
    flag = f"--{role}"
    if role == "prefill":
        config = replace(config, spec_acceptance=None, draft_time=0.0)
    settings = {} if text is None else parse_role(f"{flag}-config", text)
    try:
        own_config = create(FleetConfig, vars(config) | settings)
        own_engine = create(EngineConfig, vars(engine) | settings)
        return replace(plan_engines(flag, count, own_config, own_engine), role=role)
    except UsageError as error:
        if str(error).startswith("--model "):  # the same for all engines
            raise
        place = f"{role} engines" if text is None else f"{flag}-config"
        raise UsageError(f"{place}: {error}") from error


def _check_kinds(config: FleetConfig, kinds: Sequence[EnginePlan]) -> None:
    """Check what depends on the engines of both kinds.

    Raises:
        UsageError: two models, or the bandwidth of a link that no engine uses.
    """
    # A machine that was measured with a model is one for that model alone.
    names = {each.model_name for each in kinds}
    if len(names) > 1:
        raise UsageError(
            f"--prefill and --decode engines have different models, {' and '.join(sorted(names))}: "
            "set --model, and machines for it"
        )
    engines = [each.resolved.given for each in kinds]
    uses_host = config.kv_store_size > 0 or any(
        each.kv_offloading_size > 0 or each.preemption_mode == "swap" for each in engines
    )
    if config.kv_offloading_bandwidth and not uses_host:
        raise UsageError(
            "--kv-offloading-bandwidth has no effect without --kv-offloading-size, "
            "--kv-store-size or --preemption-mode swap: set one of them, too, or omit it"
        )


def _store_blocks(config: FleetConfig, kinds: Sequence[EnginePlan]) -> int:
    """Return how many blocks fit in the store, which has each part of a block once.

    Raises:
        UsageError: prefill and decode ranks have different parts of a block, or engines have no
            prefix caching.
    """
    if len({(each.num_devices, each.kv_bytes_per_token) for each in kinds}) > 1:
        raise UsageError(
            "--kv-store-size needs prefill and decode engines with the same "
            "--tensor-parallel-size and --pipeline-parallel-size: their ranks share files"
        )
    cost = kinds[0].cost
    # A measurement does not tell which ranks have copies of the same heads.
    bytes_per_token = (
        cost.model.kv_bytes_per_token(1)
        if isinstance(cost, Roofline)
        else kinds[0].kv_bytes_per_token
    )
    engines = [each.resolved.given for each in kinds]
    block_bytes = engines[0].block_size * bytes_per_token
    return min(
        blocks_in("--kv-store-size", config.kv_store_size, block_bytes, each) for each in engines
    )
