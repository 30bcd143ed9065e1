"""Base classes of KV connectors: the only way for KV to enter or leave an engine.

A connector has two halves, as in vLLM. The methods have the names of vLLM's KVConnectorBase_V1.

- `KVConnectorScheduler`, next to the scheduler, knows which KV other engines or stores have, and
  which requests wait for it. It has no tensors. The schedule carries its instructions to the ranks
  (`SchedulerOutput.extras[KV_TRANSFER]`).
- `KVConnectorWorker`, on every rank, moves blocks, and knows a request only by its id. The step's
  result carries its reports back (`ModelRunnerOutput.extras[KV_TRANSFER]`).

The base classes move no KV: each method says that there is nothing to move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer import ConnectorInformation, RemoteKV
from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.processes.activity import IDLE_SECONDS, waiting_for_others

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanovllm.attention.base import AttentionBackend
    from nanovllm.kv_transfer.layout import KVLayout
    from nanovllm.models.llama import LlamaForCausalLM

# The name under which the two halves exchange what they have to tell.
KV_TRANSFER = "kv_transfer"

Tables = Mapping[str, list[int]]  # request id -> block table


class KVConnectorScheduler:
    """The scheduler's half of a connector. This base class finds no KV elsewhere.

    Args:
        config: the engine's settings.
        identity: properties of the KV, such as its model and data type. Engines share KV only if
            all of them are equal.
        ranks: what each rank's `get_handshake_metadata` returns: how other engines reach it.

    Attributes:
        sources: file descriptors that become readable when a message arrives while the engine
            sleeps.
    """

    sources: Sequence[int] = ()

    def __init__(
        self, config: EngineConfig, identity: dict[str, str | int], ranks: Sequence[object]
    ) -> None:
        self.config = config
        self.kv_transfer = cast(KVTransferConfig, config.kv_transfer)
        self.identity = identity
        self._output = KVConnectorOutput()  # for the scheduler
        # Ids of the transfers in flight. The ranks report the end of a transfer by its id.
        self._in_flight: set[str] = set()

    @property
    def has_work(self) -> bool:
        """True if the engine must step even though no request runs."""
        return bool(self._in_flight) or self.has_news

    @property
    def has_news(self) -> bool:
        """True if there are reports that `take_output` has not returned yet."""
        return bool(self._output)

    @property
    def idle_seconds(self) -> float | None:
        """Seconds after which an idle engine must step even if no message arrives; None: no
        limit."""
        return None

    @property
    def information(self) -> ConnectorInformation:
        """Properties of this engine that clients and routers need."""
        return {
            "engine_id": self.kv_transfer.engine_id,
            "kv_connector": self.kv_transfer.kv_connector,
            "kv_role": self.kv_transfer.kv_role,
        }

    # ---------------------------------------------------------- a request's KV comes from elsewhere

    def check_request(self, request: Request) -> None:
        """Check the `kv_transfer_params` of a new request.

        Raises:
            ValueError: they are not valid; the message names the field.
        """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens' KV the connector can load after the first `num_computed_tokens`,
        which are in this engine's cache.

        Returns:
            The number, and, as in vLLM, whether it loads them between steps, while the request
            waits. Here it always does, so that no other request waits for a transfer. (In vLLM, a
            connector may also load layer by layer within a step, and block in
            `wait_for_layer_load`.)
        """
        return 0, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Begin to load the KV that `get_num_new_matched_tokens` has promised. The request has its
        blocks, and waits.

        Args:
            block_ids: the request's whole block table.
        """

    def decline(self, request: Request, reason: str) -> None:
        """Tell other engines that this engine rejects a request. The prefill engine frees the
        request's KV, and the engine that sent the request learns the reason."""

    # ---------------------------------------------------------------- every step

    def build_connector_meta(self, plan: SchedulerOutput, tables: Tables) -> object:
        """Return instructions for the ranks, which must be picklable; None if there are none and no
        transfer is in flight.

        Args:
            tables: the block tables of all requests that have blocks.
        """
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Add the reports of all ranks to the connector's state."""
        self._output.add(output)
        self._in_flight -= output.finished_sending | output.finished_recving

    def take_output(self) -> KVConnectorOutput:
        """Return the transfers that have ended since the last call. The scheduler fails the
        requests in `reasons`."""
        output = self._output
        self._output = KVConnectorOutput()
        if output.reasons and self.kv_transfer.kv_load_failure_policy == "recompute":
            output.reasons.clear()
        return output

    # ---------------------------------------------------------------- a request's KV goes elsewhere

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """Decide what happens to the blocks of a request that ends.

        Args:
            block_ids: its block table; empty if it has no blocks.

        Returns:
            Whether to hold its blocks until it is in `finished_sending`, and the
            `kv_transfer_params` for the engine that continues the request.
        """
        return False, None

    def revoke(self, request_id: str) -> None:
        """No engine will fetch the blocks of this finished request: free them, unless one has
        claimed them already."""

    def is_sending(self, request: Request) -> bool:
        """True while a peer reads the blocks of a running request."""
        return False

    def choose_victim(
        self, request: Request, num_tokens: int, running: list[Request], manager: KVCacheManager
    ) -> Request | None:
        """Return the running request to preempt so that `request` gets blocks for `num_tokens`
        tokens; None if `request` has to wait.

        Candidates are the running requests after `request` whose blocks no peer reads. The first
        case that applies:

        1. Transfers hold blocks, and preempting all candidates would not free enough: None.
           `request` keeps its blocks and waits, and the others may run.
        2. There are candidates: the last of them.
        3. A peer reads the blocks of the last running request: None. That request will be aborted.
        4. The last running request.
        """
        behind = running[running.index(request) + 1 :]
        victims = [r for r in behind if not self.is_sending(r)]
        pool = manager.pool
        tables = manager.tables
        # A table that belongs to no running request is being filled by a transfer.
        if manager.held or len(tables) > len(running):
            # A block that the victims share with another request, or that a peer still reads, stays
            # in use.
            holds = Counter(
                block_id for victim in victims for block_id in tables[victim.request_id]
            )
            num_freed = sum(pool.ref_counts[block_id] == count for block_id, count in holds.items())
            if (
                manager.blocks_for(num_tokens) - len(tables[request.request_id])
                > pool.num_free + num_freed
            ):
                return None
        victim = victims[-1] if victims else running[-1]
        if self.is_sending(victim):  # its blocks cannot be reused until the peer has read them
            self._output.aborts.append(victim.request_id)
            return None
        return victim

    def forget_requests(self) -> None:
        """Drop the state of all requests after a failed step. The ranks have stopped their
        transfers."""
        self._output = KVConnectorOutput()
        self._in_flight = set()

    def close(self) -> None:
        """End all connections."""


class KVConnectorWorker:
    """The half of a connector on a rank. This base class moves no KV.

    Args:
        layout: shape of the rank's caches; see `kv_transfer.layout`.
        kv_caches: the rank's caches, by the layer's number in the model. Their addresses never
            change.

    Attributes:
        metadata: the instructions of the scheduler's half for the current step.
        notify: called, by any thread, when `get_finished` has something to report.
        model, backend, token_budget: the rank's model and attention backend, and the most tokens
            of a step, for connectors that compute KV.
    """

    metadata: object = None
    model: LlamaForCausalLM
    backend: AttentionBackend
    token_budget: int

    def __init__(
        self, config: EngineConfig, layout: KVLayout, kv_caches: dict[int, Tensor]
    ) -> None:
        self.config = config
        self.kv_transfer = cast(KVTransferConfig, config.kv_transfer)
        self.layout = layout
        self.kv_caches = kv_caches
        self.notify: Callable[[], None] = lambda: None

    @classmethod
    def empty_kv_cache(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a layer's cache, all zeros, in memory that transfers can read and write."""
        # The scheduler's half needs no torch, which takes seconds to import.
        from nanovllm.ops.device import zeros

        return zeros(tuple(shape), dtype, device)

    def get_handshake_metadata(self) -> object:
        """Return how the ranks of other engines reach this rank, as plain data."""
        return None

    # ---------------------------------------------------------------- around a forward pass

    def start_load_kv(self) -> None:
        """Begin the loads that `metadata` names: before the forward pass, or in a step without
        one."""

    def save_kv_layer(self, layer: int, kv_cache: Tensor) -> None:
        """Begin to save a layer's KV of this step, once the layer's attention has written it; after
        a CUDA graph, which runs no Python code between layers, once all layers have."""

    def wait_for_save(self) -> None:
        """Wait until the next step may overwrite the KV that is being saved."""

    def get_finished(self, wait_seconds: float = 0.0) -> KVConnectorOutput:
        """Return the transfers that have ended since the last call, and the blocks that they could
        not load.

        Args:
            wait_seconds: maximum time to wait for the end of a transfer, in a step without a
                forward pass.
        """
        return KVConnectorOutput()

    # ---------------------------------------------------------------- a step

    def begin_step(self, metadata: object) -> None:
        """Begin a step, before its forward pass.

        Args:
            metadata: the instructions of the scheduler's half for this step.
        """
        self.metadata = metadata
        self.start_load_kv()

    def end_step(self, is_idle: bool) -> KVConnectorOutput:
        """End a step, after its forward pass, and after `save_kv_layer` was called for each layer.

        Args:
            is_idle: the step has no forward pass.

        Returns:
            The transfers that have ended.
        """
        self.wait_for_save()
        with waiting_for_others():
            output = self.get_finished(IDLE_SECONDS if is_idle else 0.0)
        self.metadata = None
        return output

    def forget_requests(self) -> None:
        """Stop all transfers after a failed step. After this call, no transfer reads or writes a
        block."""

    def close(self) -> None:
        """End all connections."""
