"""KV beyond the device: in host memory, and in a store that all engines share. The engine's own
connector (`kv_transfer/stores/`) decides what is kept and loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.distributed.cost_model import Link
from nanovllm.kv_transfer.connector import KV_TRANSFER, Tables
from nanovllm.kv_transfer.stores.offloading import (
    OffloadingMetadata,
    OffloadingScheduler,
    RankStore,
    share_key,
)
from nanovllm.kv_transfer.stores.store import BYTE, HostKeys
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.links import Links, tell_engine, transfer_of
from nanovllm.simulate.outages import UnreliableFleet
from nanovllm.simulate.workload import SECOND

# The number of the store, as the source of a transfer.
_STORE = -1


class TierConnector(OffloadingScheduler):
    """The connector of an engine with host memory, a store or both, for blocks whose names are
    numbers.

    Args:
        num_host_blocks: blocks for which the engine has host memory.
        store: the keys in the store; engines share one. None: there is none.

    Attributes:
        load: called to begin to load a request's blocks: how many from host memory, and from the
            store.
    """

    def __init__(self, config: EngineConfig, num_host_blocks: int, store: HostKeys | None) -> None:
        self.store = store
        super().__init__(config, {}, [RankStore("", 1, num_host_blocks)])
        self.load: Callable[[str, int, int], None] = lambda request_id, num_host, num_store: None

    def _open_shared(self, entry_bytes: int) -> HostKeys | None:
        return self.store

    def _keys(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        names: Sequence[int] = block_hashes  # type: ignore[assignment]  # see `SimulatedRequest`
        return [name.to_bytes(12, "big", signed=True) for name in names]

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Begin to load blocks, from the tiers that have them now."""
        size = self.config.block_size
        first = request.num_computed_tokens // size
        count = num_external_tokens // size
        num_host = sum(
            key in self.host for key in self._keys(request.block_hashes[first : first + count])
        )
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        self.load(request.request_id, num_host, count - num_host)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Loads have ended, or transfers from prefill engines."""
        for request_id in output.finished_recving:
            self._loading.setdefault(request_id, {})
        super().update_connector_output(output)

    def build_connector_meta(
        self, plan: SchedulerOutput, tables: Tables
    ) -> OffloadingMetadata | None:
        """Move what leaves host memory to the store."""
        metadata = super().build_connector_meta(plan, tables)
        if metadata is not None:
            self._put(metadata.evict)
        return metadata

    def save(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step has filled blocks. Without host memory, they go to the store."""
        metadata = plan.extras.get(KV_TRANSFER)
        if isinstance(metadata, OffloadingMetadata) and not self.host.num_slots:
            self._put(list(metadata.saves)[::-1])

    def _put(self, keys: Sequence[bytes]) -> None:
        if self.store is not None:
            self.store.put([share_key("", key) for key in keys], [BYTE] * len(keys))

    def forget_host(self) -> None:
        """Lose what is in host memory."""
        is_in_use = self.host.is_in_use
        self.host = HostKeys(self.host.num_slots, self._below)
        self.host.is_in_use = is_in_use


class Tiers:
    """The links over which engines load blocks.

    The loads of an engine share its link to host memory. All engines share the store's link, after
    which blocks pass through host memory. Blocks are saved in the background, which takes no time
    here: a link's two directions are independent.

    Args:
        fleet: its engines have a `TierConnector` each.
        hosts: of each engine, the link from host memory to all of its devices. Loads have the
            highest of their latencies.
        store: from the store to all hosts.
        kv_bytes_per_block: of each engine, KV of a block, in bytes, on all of its ranks.
    """

    def __init__(
        self, fleet: Fleet, hosts: Sequence[Link], store: Link, kv_bytes_per_block: Sequence[float]
    ) -> None:
        self.fleet = fleet
        self.kv_bytes_per_block = kv_bytes_per_block
        self.num_host_blocks = 0
        self.num_store_blocks = 0
        latency = max(link.latency for link in hosts)
        self.host = Links(fleet, lambda replica: hosts[replica].bandwidth, round(latency * SECOND))
        self.store = Links(fleet, lambda replica: store.bandwidth, round(store.latency * SECOND))
        for replica, engine in enumerate(fleet.engines):
            connector = self._connector(replica)
            connector.load = functools.partial(self._load, replica)
            hooks = engine.scheduler.hooks
            hooks.arrived = (*hooks.arrived, connector.save)
        if isinstance(fleet, UnreliableFleet):
            fleet.restarted.append(lambda replica: self._connector(replica).forget_host())

    def _connector(self, replica: int) -> TierConnector:
        connector = transfer_of(self.fleet.engines[replica].scheduler).connector
        assert isinstance(connector, TierConnector)
        return connector

    def _load(self, replica: int, request_id: str, num_host: int, num_store: int) -> None:
        self.num_host_blocks += num_host
        self.num_store_blocks += num_store
        block_bytes = self.kv_bytes_per_block[replica]

        def load_from_host() -> None:
            num_bytes = round((num_host + num_store) * block_bytes)
            self.host.send(replica, replica, num_bytes, arrived, request_id)

        def arrived() -> None:
            tell_engine(self.fleet, replica, KVConnectorOutput(finished_recving={request_id}))

        if num_store:
            num_bytes = round(num_store * block_bytes)
            self.store.send(_STORE, replica, num_bytes, load_from_host, request_id)
        else:
            load_from_host()

    def summary(self, block_size: int, num_queried_tokens: int) -> dict[str, object]:
        """Return the share of tokens that each tier had, and how long it took to load them. Blocks
        from the store count as bytes and loads of the link to host memory, too."""
        found: dict[str, object] = {}
        tiers = {"host": (self.host, self.num_host_blocks)}
        if self._connector(0).store is not None:
            tiers["store"] = (self.store, self.num_store_blocks)
        for name, (links, num_blocks) in tiers.items():
            found[f"{name}_hit_rate"] = num_blocks * block_size / max(1, num_queried_tokens)
            found[f"num_{name}_loads"] = links.num_transfers
            found[f"num_{name}_loaded_bytes"] = links.num_bytes
            found[f"mean_{name}_load_ms"] = links.time / max(1, links.num_transfers) * 1000 / SECOND
        return found
