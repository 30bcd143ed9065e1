"""Prefill and decode on separate engines: the real scheduler's plans, and links that transfers
share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from nanovllm.core.request import Request
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import ReplicaRouter
from nanovllm.simulate.links import Links, tell_engine, transfer_of
from nanovllm.simulate.outages import Outage, UnreliableFleet
from nanovllm.simulate.requests import SimulatedRequest
from nanovllm.simulate.tiers import TierConnector
from nanovllm.simulate.workload import WorkloadRequest


class PrefillConnector(KVConnectorScheduler):
    """Holds the blocks of each computed prompt until a decode engine has read them."""

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """See `KVConnectorScheduler.request_finished`."""
        super().request_finished(request, block_ids)
        return request.finish_reason == "length" and bool(block_ids), None


class DecodeConnector(KVConnectorScheduler):
    """Reads prompts from prefill engines, as `ConsumerSide` does with prefill first.

    Attributes:
        offered: requests whose prompt a prefill engine holds; shared by all decode engines.
        fetch: called to begin the transfer of some blocks for a request.
        release: called when a request does not need what is held for it.
    """

    offered: set[str]
    fetch: Callable[[str, Sequence[int]], None]
    release: Callable[[str], None]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See `ConsumerSide.get_num_new_matched_tokens`: at most one missing block is computed
        here. Tokens that no prefill engine holds may be in a tier."""
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        missing = request.num_prompt_tokens - num_computed_tokens
        if request.request_id in self.offered and missing > self.config.block_size:
            return missing, True
        self._decline(request)
        return found

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Begin to read the blocks that are missing here."""
        name = request.request_id
        if name not in self.offered:
            super().update_state_after_alloc(request, block_ids, num_external_tokens)
            return
        self.offered.remove(name)
        self._in_flight.add(name)
        self.fetch(name, block_ids[request.num_computed_tokens // self.config.block_size :])

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """Hold blocks that a transfer still fills; release a prompt that is not read."""
        super().request_finished(request, block_ids)
        self._decline(request)
        return request.request_id in self._in_flight, None

    def _decline(self, request: Request) -> None:
        if request.request_id in self.offered:
            self.release(request.request_id)


class TieredPrefillConnector(PrefillConnector, TierConnector):
    """A prefill engine's connector with tiers, like two in vLLM's `MultiConnector`."""


class TieredDecodeConnector(DecodeConnector, TierConnector):
    """A decode engine's connector with tiers. It reads what a prefill engine holds."""


class TwoRouters(NamedTuple):
    """The routers of the prefill engines, which come first, and of the decode engines."""

    prefill: ReplicaRouter
    decode: ReplicaRouter
    num_prefill: int

    @property
    def available(self) -> int:
        """The decode engines that may be chosen: without prefill engines, they compute prompts."""
        return self.decode.available

    def choose(self, request: WorkloadRequest, now: int) -> int:
        """Return the number of a prefill engine."""
        return self.prefill.choose(request, now)

    def set_load(self, replica: int, engine: SimulatedEngine, now: int) -> None:
        """The load of an engine may have changed."""
        if replica < self.num_prefill:
            self.prefill.set_load(replica, engine, now)
        else:
            self.decode.set_load(replica - self.num_prefill, engine, now)

    def set_available(self, replica: int, is_available: bool) -> None:
        """An engine has failed, or its replacement is ready."""
        if replica < self.num_prefill:
            self.prefill.set_available(replica, is_available)
        else:
            self.decode.set_available(replica - self.num_prefill, is_available)


class DisaggregatedFleet(UnreliableFleet):
    """Prefill engines, decode engines, and links between them.

    A prefill engine computes the prompt and one token, and holds the prompt's blocks. A decode
    engine then reads those that its own cache lacks, as whole blocks. It computes the prompt's last
    token again, and generates the output.

    If the prefill engine fails before the blocks have arrived, or if none is ready, the decode
    engine computes the prompt (`nanovllm router --kv-load-failure-policy recompute`). It learns of
    a failure when the transfer should have ended. If no decode engine is ready, requests fail.

    Args:
        prefill, decode: engines with a `PrefillConnector` or a `DecodeConnector`.
        routers: of these engines.
        outages, retries, groups: see `UnreliableFleet`. The prefill engines have the first
            numbers.
        bandwidths: bytes per second of a prefill engine's link, and of a decode engine's.
        latency: of each link; see `Links`.
        kv_bytes_per_token: KV of a token, in bytes, on all ranks of a decode engine.
        first_token: the stage whose first token the client gets: "decode", as with vLLM's and our
            router, or "prefill", as in DistServe, where the decode engine continues after it.
    """

    router: TwoRouters

    def __init__(
        self,
        prefill: Sequence[SimulatedEngine],
        decode: Sequence[SimulatedEngine],
        routers: tuple[ReplicaRouter, ReplicaRouter],
        outages: Sequence[Outage] = (),
        *,
        bandwidths: tuple[float, float],
        latency: int,
        kv_bytes_per_token: float,
        first_token: str = "decode",
        retries: bool = True,
        groups: Sequence[range] = (),
    ) -> None:
        num_prefill = len(prefill)
        super().__init__(
            [*prefill, *decode],
            TwoRouters(*routers, num_prefill),
            outages,
            retries=retries,
            groups=groups,
        )
        self.links = Links(self, lambda engine: bandwidths[engine >= num_prefill], latency)
        self.kv_bytes_per_token = kv_bytes_per_token
        self.num_extra = int(first_token == "prefill")
        # Requests that were sent to decode engines, as their prefill engines have left them.
        self._prefilled: dict[str, SimulatedRequest | None] = {}
        self._offered: set[str] = set()
        for replica, engine in enumerate(self.engines):
            connector = transfer_of(engine.scheduler).connector
            if isinstance(connector, DecodeConnector):
                connector.offered = self._offered
                connector.fetch = functools.partial(self._fetch, replica)
                connector.release = self._release

    # ---------------------------------------------------------------- the way of a request

    def _begin(self, source: WorkloadRequest) -> None:
        if self.router.prefill.available:
            request = self._make(msgspec.structs.replace(source, num_output_tokens=1))
            self._send(source, request, self.router.choose(source, self.now))
        else:
            self._decode(source, None)

    def _decode(self, source: WorkloadRequest, prefilled: SimulatedRequest | None) -> None:
        """Send a request to a decode engine."""
        name = source.request_id
        num_extra = self.num_extra if prefilled is not None else 0
        request = self._make(
            msgspec.structs.replace(
                source,
                num_prompt_tokens=source.num_prompt_tokens + num_extra,
                num_output_tokens=source.num_output_tokens - num_extra,
            )
        )
        if num_extra:
            request.first_token = request.last_token = self.now
        self._prefilled[name] = prefilled
        if prefilled is not None:
            self._offered.add(name)
        replica = self.router.decode.choose(source, self.now)
        self._send(source, request, self.router.num_prefill + replica)

    def _end(self, request: SimulatedRequest) -> None:
        name = request.request_id
        source = self._sources[name]
        if name in self._prefilled:
            if name in self._offered:  # rejected
                self._release(name)
            prefilled = self._prefilled.pop(name)
            request.num_prompt_tokens = source.num_prompt_tokens
            if prefilled is not None:
                request.num_cached_tokens = prefilled.num_cached_tokens
                request.scheduled = prefilled.scheduled
        elif request.finish_reason == "length":
            if not self.num_extra:  # the client gets no token from the prefill engine
                request.first_token = request.last_token = None
            is_served = source.num_output_tokens <= self.num_extra
            if source.abort is not None and source.abort <= self.now:
                request.finish_reason = "abort"
            elif not is_served and name in self._lost:
                request.finish_reason = "abort"  # the engine has lost its blocks
            elif not is_served and not self.router.available:
                request.finish_reason = "failed"
            elif not is_served:
                self._decode(source, request)
                return
            self._free(request)
        super()._end(request)

    def _stop(self, outage: Outage) -> None:
        super()._stop(outage)
        for name in sorted(self._offered):
            prefilled = self._prefilled[name]
            if prefilled is not None and prefilled.replica in self.groups[outage.replica]:
                self._release(name)

    # ---------------------------------------------------------------- transfers

    def _fetch(self, replica: int, request_id: str, block_ids: Sequence[int]) -> None:
        """Send blocks to a decode engine, which has just planned to read them."""
        prefilled = self._prefilled[request_id]
        assert prefilled is not None
        source = prefilled.replica
        begin = self.now
        block_size = self.engines[replica].scheduler.manager.block_size
        num_bytes = round(len(block_ids) * block_size * self.kv_bytes_per_token)

        def arrived() -> None:
            has_failed = any(
                each.replica in self.groups[source] and begin < each.begin <= self.now
                for each in self.outages
            )
            tell_engine(self, source, KVConnectorOutput(finished_sending={request_id}))
            ended = KVConnectorOutput(finished_recving={request_id})
            if has_failed:
                ended.invalid_block_ids[request_id] = set(block_ids)
            tell_engine(self, replica, ended)

        self.links.send(source, replica, num_bytes, arrived, request_id)

    def _release(self, request_id: str) -> None:
        """A decode engine does not need what is held for a request."""
        self._offered.remove(request_id)
        prefilled = self._prefilled[request_id]
        assert prefilled is not None
        self._free(prefilled)

    def _free(self, prefilled: SimulatedRequest) -> None:
        """Free a prompt's blocks in its prefill engine."""
        ended = KVConnectorOutput(finished_sending={prefilled.request_id})
        tell_engine(self, prefilled.replica, ended)
