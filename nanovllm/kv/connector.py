"""The connector: the one place where KV enters an engine from elsewhere, and leaves it.

A connector has two halves, as in vLLM, whose names (KVConnectorBase_V1) the methods bear. One half lives with the scheduler: it
knows which tokens' KV can be had elsewhere, and who waits for what; it touches no tensor. The other lives on every rank: it
moves blocks, and knows no request but by its id. What the first tells the second travels with the step's plan
(`SchedulerOutput.connector_metadata`), and what the second has to say comes back with the step's result
(`ModelRunnerOutput.connector_output`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.distributed.life_signs import waiting_for_others

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanovllm.data.config import EngineConfig
    from nanovllm.data.request import EngineRequest, Request
    from nanovllm.data.schedule import SchedulerOutput
    from nanovllm.kv_transfer.transport.layout import KVLayout


class OutputAggregator:
    """Makes of what the ranks say what all of them say: a transfer has ended when it has on every rank, and a block is invalid
    if it is on any."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._said: dict[tuple[str, str], int] = {}  # (what, request id) -> by how many ranks
        self._pending = KVConnectorOutput()  # what some have said of those

    def add(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput:
        """Take what the ranks say after a step; returns what is true of all of them now."""
        together, pending = KVConnectorOutput(), self._pending
        for output in outputs:
            if output is None:
                continue
            pending.add(output)
            for what in ("finished_sending", "finished_recving"):
                for request_id in getattr(output, what):
                    count = self._said[what, request_id] = self._said.get((what, request_id), 0) + 1
                    if count == self._num_ranks:
                        del self._said[what, request_id]
                        getattr(together, what).add(request_id)
        for request_id in together.finished_sending | together.finished_recving:
            if request_id in pending.invalid_block_ids:
                together.invalid_block_ids[request_id] = pending.invalid_block_ids.pop(request_id)
            if request_id in pending.reasons:
                together.reasons[request_id] = pending.reasons.pop(request_id)
        pending.finished_sending -= together.finished_sending
        pending.finished_recving -= together.finished_recving
        return together


class KVConnectorScheduler:
    """The half that lives with the scheduler. This one has nothing to offer; connectors say what they do differently.

    Args:
        config: the engine's settings.
        kv_transfer: the connector's.
        identity: what the KV is made of: only engines of which all of it is equal may share any.
        ranks: what each rank's `get_handshake_metadata` says: how others reach it.
    """

    def __init__(
        self, config: EngineConfig, kv_transfer: KVTransferConfig, identity: dict[str, str | int], ranks: Sequence[Any]
    ) -> None:
        self.config, self.kv_transfer, self.identity, self.ranks = config, kv_transfer, identity, list(ranks)
        self._output = KVConnectorOutput()

    # ---------------------------------------------------------------- a request's KV comes from elsewhere

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens' KV can be had for the request beyond the first `num_computed_tokens`, which are in this engine's
        cache already.

        Returns:
            The number, and, as in vLLM, whether they come between steps, while the request waits: here they always do. (In vLLM
            a connector may also load in the very step that first computes the request, layer by layer: it then blocks in
            `KVConnectorWorker.wait_for_layer_load`. Nobody else's tokens wait for a transfer here.)
        """
        return 0, True

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request has its blocks, and waits: fetch what `get_num_new_matched_tokens` has offered.

        Args:
            block_ids: the request's whole table.
        """

    def give_up(self, request: Request) -> None:
        """Stop fetching for a request: it computes what has not come. `finished_recving` names it when nothing is written any
        more."""
        raise NotImplementedError

    def decline(self, request: Request) -> None:
        """A request is refused, or does not want what an engine holds for it: that engine need not hold it any longer."""

    # ---------------------------------------------------------------- a request's KV goes elsewhere

    def is_ordered(self, request: Request) -> bool:
        """True if another engine has asked for this request, and waits for its KV."""
        return False

    def check_request(self, request: Request) -> None:
        """See whether what came with a new request (`kv_transfer_params`) makes sense.

        Raises:
            ValueError: it does not; the message names the field.
        """

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ends.

        Args:
            block_ids: its table; empty if it has none, in which case there is nothing to hold.

        Returns:
            Whether its blocks must be held until `finished_sending` names it, and what its client should tell the engine that
            goes on with it.
        """
        return False, None

    def revoke(self, request_id: str) -> None:
        """No engine will fetch the KV of a request that has ended: stop holding its blocks, unless an engine has claimed them."""

    def is_sending(self, request: Request) -> bool:
        """True while somebody else reads the blocks of a request that runs."""
        return False

    # ---------------------------------------------------------------- every step

    def build_connector_meta(self, schedule: SchedulerOutput) -> Any:
        """What the ranks have to do with this step, pickled on its way; None if nothing, now or still under way."""
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the ranks say, once all of them have said it."""
        self._output.add(output)

    def take_output(self) -> KVConnectorOutput:
        """What has become final since the last call: the scheduler acts on it."""
        output, self._output = self._output, KVConnectorOutput()
        return output

    def take_requests(self) -> list[EngineRequest]:
        """Requests that other engines ask for."""
        return []

    def take_aborts(self) -> list[str]:
        """Those of `take_requests` that nobody wants any more."""
        return []

    def refuse(self, request_id: str, reason: str) -> None:
        """One of `take_requests` cannot be had."""
        raise NotImplementedError

    def forget_requests(self) -> None:
        """A step broke off, and all requests are lost; the ranks have stopped what they were doing."""
        self._output = KVConnectorOutput()

    def abandon(self, transfer_ids: Collection[str]) -> None:
        """After `forget_requests`: the ranks could not stop these transfers. `finished_recving` names them when they have ended."""

    @property
    def has_work(self) -> bool:
        """True if there is something to do even if no request runs."""
        return bool(self._output)

    @property
    def has_news(self) -> bool:
        """True if the scheduler has something to act on at once: without steps, nothing more would come of it."""
        return self.has_work

    @property
    def sources(self) -> Sequence[int]:
        """File descriptors on which something may come while the engine sleeps."""
        return ()

    @property
    def idle_seconds(self) -> float | None:
        """After how long the engine should look again even if nothing comes; None: it need not."""
        return None

    @property
    def information(self) -> dict[str, Any]:
        """What a client or router needs to know."""
        return {
            "engine_id": self.kv_transfer.engine_id,
            "kv_connector": self.kv_transfer.kv_connector,
            "kv_role": self.kv_transfer.kv_role,
        }

    def close(self) -> None:
        """End all connections."""


class KVConnectorWorker:
    """The half that lives on a rank. This one moves nothing.

    Attributes:
        notify: called, by any thread, when `get_finished` has something to report.
    """

    def __init__(self, config: EngineConfig, kv_transfer: KVTransferConfig, layout: KVLayout) -> None:
        self.config, self.kv_transfer, self.layout = config, kv_transfer, layout
        self.kv_caches: dict[int, Tensor] = {}
        self.metadata: Any = None
        self.notify: Callable[[], None] = lambda: None

    @classmethod
    def empty_kv_cache(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A layer's cache, all zeros, in memory from which it can be transferred."""
        from nanovllm.ops.device import zeros

        return zeros(tuple(shape), dtype, device)

    def register_kv_caches(self, kv_caches: dict[int, Tensor]) -> None:
        """The rank's caches, by the layer's number in the model. They never move."""
        self.kv_caches = kv_caches

    def register_model(self, model: Any, backend: Any) -> None:
        """What computes on this rank, for connectors that compute, too."""

    def get_handshake_metadata(self) -> Any:
        """How other engines' ranks reach this one; plain data."""
        return None

    # ---------------------------------------------------------------- around a forward pass

    @contextmanager
    def around_all_layers(self) -> Iterator[None]:
        """Around a CUDA graph, in which no layer can say a word."""
        for layer in self.kv_caches:
            self.wait_for_layer_load(layer)
        yield
        for layer, kv_cache in self.kv_caches.items():
            self.save_kv_layer(layer, kv_cache)

    def bind_connector_metadata(self, metadata: Any) -> None:
        """What the scheduler's half has to say for this step."""
        self.metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self.metadata = None

    def start_load_kv(self) -> None:
        """Before the forward pass, or in place of one: begin to fetch what the metadata name."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Before attention of this layer: what this very step needs has to be there."""

    def save_kv_layer(self, layer: int, kv_cache: Tensor) -> None:
        """After attention of this layer: its keys and values of this step are written."""

    def wait_for_save(self) -> None:
        """After the forward pass: what is saved may be overwritten by the next step."""

    def get_finished(self, wait_seconds: float = 0.0) -> tuple[set[str], set[str]]:
        """Requests whose sending, and whose receiving, has come to an end since the last call.

        Args:
            wait_seconds: there is nothing to compute: wait up to so long for something.
        """
        return set(), set()

    def get_block_ids_with_load_errors(self) -> dict[str, set[int]]:
        """Of those that `get_finished` has just named, the blocks whose content did not come, by request."""
        return {}

    def get_reasons(self) -> dict[str, str]:
        """Why, by request id."""
        return {}

    def forget_requests(self) -> dict[str, list[int]]:
        """A step broke off: stop all transfers. When this returns, no peer writes any block, except for those that are returned,
        by the transfer's id: until `get_finished` names it."""
        return {}

    def close(self) -> None:
        """End all connections."""


@contextmanager
def transfers(connector: KVConnectorWorker, metadata: Any, is_idle: bool) -> Iterator[KVConnectorOutput]:
    """Around a rank's forward pass: the one place where a connector is called, but for its two words to each layer.

    Args:
        metadata: what the scheduler's half has to say for this step.
        is_idle: there is no forward pass inside.

    Yields:
        What has come to an end; filled in when the block is left.
    """
    output = KVConnectorOutput()
    connector.bind_connector_metadata(metadata)
    try:
        connector.start_load_kv()
        yield output
        connector.wait_for_save()
        with waiting_for_others():
            finished = connector.get_finished(IDLE_SECONDS if is_idle else 0.0)
        output.finished_sending, output.finished_recving = finished
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.reasons = connector.get_reasons()
    finally:
        connector.clear_connector_metadata()


# After how many seconds in which nothing moves an engine gives up a fetch, so that it can compute what another engine waits for.
# (Two engines may otherwise wait for each other: the pool of each is full of blocks that the other one is to fill.)
DEADLOCK_SECONDS = 3.0

# How long a rank without a batch waits for a transfer to end before it says that none has.
IDLE_SECONDS = 0.001
# How long an engine that only waits for transfers sleeps before it looks for their timeouts, and for the end of one if its
# ranks do not notify it.
PATIENT_SECONDS, IMPATIENT_SECONDS = 0.25, 0.01


def patience(num_idle_steps: int, is_notified: bool) -> float:
    """Seconds that an engine may sleep that has only waited for transfers in its last steps.

    Args:
        is_notified: the ranks notify the engine when a transfer has ended.
    """
    return PATIENT_SECONDS if is_notified else min(IDLE_SECONDS * num_idle_steps, IMPATIENT_SECONDS)
