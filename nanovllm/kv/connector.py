"""The connector: the one place where KV enters an engine from elsewhere, and leaves it.

A connector has two halves, as in vLLM, whose names (KVConnectorBase_V1) the methods bear. One half
lives with the scheduler: it knows which tokens' KV can be had elsewhere, and which requests wait
for it; it touches no tensor. The other half lives on every
rank: it moves blocks, and knows a request only by its id. What the first tells the second travels
with the step (`SchedulerOutput.connector_metadata`), and what the second reports comes back with
the step's result (`ModelRunnerOutput.connector_output`).

`KVConnectorScheduler` and `KVConnectorWorker` are the bases of all connectors. As they are, they
move no KV: every method answers that there is nothing. An engine that shares no KV has a
`NoConnector` instead."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import Request
from nanovllm.data.schedule import SchedulerOutput
from nanovllm.distributed.activity import IDLE_SECONDS, waiting_for_others
from nanovllm.kv.manager import KVCacheManager
from nanovllm.ops.device import zeros

Tables = Mapping[str, list[int]]  # request id -> block table


class KVConnectorScheduler:
    """The half that lives with the scheduler; this one has nothing to offer.

    Args:
        config: the engine's settings.
        identity: what the KV is made of: engines share KV only if all of this is equal.
        ranks: what each rank's `get_handshake_metadata` returns: how other engines reach it.

    Attributes:
        sources: file descriptors on which something may come while the engine sleeps.
    """

    sources: Sequence[int] = ()

    def __init__(
        self, config: EngineConfig, identity: dict[str, str | int], ranks: Sequence[Any]
    ) -> None:
        self.config = config
        self.kv_transfer = cast(KVTransferConfig, config.kv_transfer)
        self.identity = identity
        self.ranks = list(ranks)
        self._output = KVConnectorOutput()  # for the scheduler
        self._in_flight: set[str] = (
            set()
        )  # transfers, by the ids under which the ranks report their ends

    @property
    def has_work(self) -> bool:
        """True if there is something to do even if no request runs."""
        return bool(self._in_flight) or self.has_news

    @property
    def has_news(self) -> bool:
        """True if the scheduler has something to act on at once, without which nothing more would
        happen."""
        return bool(self._output)

    @property
    def idle_seconds(self) -> float | None:
        """After how long the engine should look again even if nothing comes; None: it need not."""
        return None

    @property
    def information(self) -> dict[str, Any]:
        """What a client or router needs to know."""
        return {
            name: getattr(self.kv_transfer, name)
            for name in ("engine_id", "kv_connector", "kv_role")
        }

    # ---------------------------------------------------------- a request's KV comes from elsewhere

    def check_request(self, request: Request) -> None:
        """Check what came with a new request (`kv_transfer_params`).

        Raises:
            ValueError: it makes no sense; the message names the field.
        """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens' KV can be had for the request beyond the first `num_computed_tokens`,
        which are in this engine's cache already.

        Returns:
            The number, and, as in vLLM, whether they come between steps, while the request waits:
            here they always do. (In vLLM a connector may also load in the very step that first
            computes the request, layer by layer: it then blocks in `wait_for_layer_load`. Here no
            other request's tokens wait for a transfer.)
        """
        return 0, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request has its blocks, and waits: fetch what `get_num_new_matched_tokens` has
        offered.

        Args:
            block_ids: the request's whole table.
        """

    def decline(self, request: Request, reason: str) -> None:
        """The engine refuses a request. Another engine that holds KV for it need not hold it any
        longer; an engine that has asked for the request is told the reason."""

    # ---------------------------------------------------------------- every step

    def build_connector_meta(self, schedule: SchedulerOutput, tables: Tables) -> Any:
        """What the ranks have to do with this step, pickled on its way; None if nothing, and if no
        transfer is in flight.

        Args:
            tables: of all requests that have blocks.
        """
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take in what all ranks have reported."""
        self._output.add(output)
        self._in_flight -= output.finished_sending | output.finished_recving

    def take_output(self) -> KVConnectorOutput:
        """What has become final since the last call. Requests that `reasons` names have to fail."""
        output = self._output
        self._output = KVConnectorOutput()
        if output.reasons and self.kv_transfer.kv_load_failure_policy == "recompute":
            output.reasons.clear()
        return output

    # ---------------------------------------------------------------- a request's KV goes elsewhere

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ends.

        Args:
            block_ids: its table; empty if it has none, in which case there is nothing to hold.

        Returns:
            Whether its blocks must be held until `finished_sending` names it, and what its client
            should tell the engine that goes on with it.
        """
        return False, None

    def revoke(self, request_id: str) -> None:
        """No engine will fetch the KV of a request that has ended: stop holding its blocks, unless
        an engine has claimed them."""

    def is_sending(self, request: Request) -> bool:
        """True while a peer reads the blocks of a running request."""
        return False

    def choose_victim(
        self, request: Request, num_tokens: int, running: list[Request], manager: KVCacheManager
    ) -> Request | None:
        """The running request to preempt so that `request` can have blocks for `num_tokens` tokens;
        None: `request` has to wait.

        It is the last one whose blocks no peer reads. While transfers hold blocks, only if
        preempting all such requests behind `request` frees enough for it: else it keeps its own
        blocks and waits, and the requests behind it may run."""
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
        if self.is_sending(victim):  # a peer reads its blocks: they cannot be reused at once
            self._output.aborts.append(victim.request_id)
            return None
        return victim

    def forget_requests(self) -> None:
        """A step broke off, and all requests are lost; the ranks have stopped their transfers."""
        self._output = KVConnectorOutput()
        self._in_flight = set()

    def close(self) -> None:
        """End all connections."""


class KVConnectorWorker:
    """The half that lives on a rank; this one moves nothing.

    Args:
        layout: what the rank's caches look like; see `kv_transfer.layout`.
        kv_caches: the rank's caches, by the layer's number in the model. They never move.

    Attributes:
        metadata: what the scheduler's half has to say for the current step.
        notify: called, by any thread, when `get_finished` has something to report.
        model, backend: what computes on this rank, for connectors that compute, too.
    """

    metadata: Any = None
    model: Any = None
    backend: Any = None

    def __init__(self, config: EngineConfig, layout: Any, kv_caches: dict[int, Tensor]) -> None:
        self.config = config
        self.kv_transfer = cast(KVTransferConfig, config.kv_transfer)
        self.layout = layout
        self.kv_caches = kv_caches
        self.notify: Callable[[], None] = lambda: None

    @classmethod
    def empty_kv_cache(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A layer's cache, all zeros, in memory from which it can be transferred."""
        return zeros(tuple(shape), dtype, device)

    def get_handshake_metadata(self) -> Any:
        """How other engines' ranks reach this one; plain data."""
        return None

    # ---------------------------------------------------------------- around a forward pass

    def start_load_kv(self) -> None:
        """Before the forward pass, or in place of one: begin to fetch what the metadata name."""

    def save_kv_layer(self, layer: int, kv_cache: Tensor) -> None:
        """After attention of this layer: its keys and values of this step are written."""

    def save_kv_layers(self) -> None:
        """After a CUDA graph, which calls no Python code between its layers."""
        for layer, kv_cache in self.kv_caches.items():
            self.save_kv_layer(layer, kv_cache)

    def wait_for_save(self) -> None:
        """After the forward pass: what is saved may be overwritten by the next step."""

    def get_finished(self, wait_seconds: float = 0.0) -> KVConnectorOutput:
        """Transfers that have come to an end since the last call, and the blocks whose content did
        not come.

        Args:
            wait_seconds: there is nothing to compute: wait up to so long for something.
        """
        return KVConnectorOutput()

    @contextmanager
    def transfers(self, metadata: Any, is_idle: bool) -> Iterator[KVConnectorOutput]:
        """Around a forward pass: the one place that calls the methods above, except for
        `save_kv_layer` after each layer's attention.

        Args:
            metadata: what the scheduler's half has to say for this step.
            is_idle: there is no forward pass inside.

        Yields:
            What has come to an end; filled in when the block is left.
        """
        output = KVConnectorOutput()
        self.metadata = metadata
        try:
            self.start_load_kv()
            yield output
            self.wait_for_save()
            with waiting_for_others():
                output.add(self.get_finished(IDLE_SECONDS if is_idle else 0.0))
        finally:
            self.metadata = None

    def forget_requests(self) -> None:
        """A step broke off: stop all transfers. When this returns, none touches a block any
        more."""

    def close(self) -> None:
        """End all connections."""
