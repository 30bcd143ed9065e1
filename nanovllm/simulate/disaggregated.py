"""Prefill and decode on separate engines: the real scheduler's plans, and links that transfers
share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from nanovllm.core.request import Request
from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet, ReplicaRouter
from nanovllm.simulate.links import Links, report, transfer_of
from nanovllm.simulate.requests import RequestMaker, SimulatedRequest
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.workload import Workload, WorkloadRequest


class PrefillConnector(KVConnectorScheduler):
    """Holds the blocks of each computed prompt until a decode engine has read them."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, identity={}, ranks=())

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """See `KVConnectorScheduler.request_finished`."""
        return request.finish_reason == "length" and bool(block_ids), None


class DecodeConnector(KVConnectorScheduler):
    """Reads prompts from prefill engines, as `ConsumerSide` does with prefill first.

    Attributes:
        offered: requests whose prompt a prefill engine holds.
        fetch: called to begin the transfer of some blocks for a request.
        release: called when a request does not need what is held for it.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, identity={}, ranks=())
        self.offered: set[str] = set()
        self.fetch: Callable[[str, int], None] = lambda request_id, num_blocks: None
        self.release: Callable[[str], None] = lambda request_id: None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See `ConsumerSide.get_num_new_matched_tokens`: at most one missing block is computed
        here."""
        if request.request_id not in self.offered:
            return 0, True
        missing = request.num_prompt_tokens - num_computed_tokens
        if missing > self.config.block_size:
            return missing, True
        self._decline(request)
        return 0, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Begin to read the blocks that are missing here."""
        self.offered.remove(request.request_id)
        self._in_flight.add(request.request_id)
        first = request.num_computed_tokens // self.config.block_size
        self.fetch(request.request_id, len(block_ids) - first)

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """Hold blocks that a transfer still fills; release a prompt that is not read."""
        self._decline(request)
        return request.request_id in self._in_flight, None

    def _decline(self, request: Request) -> None:
        if request.request_id in self.offered:
            self.offered.remove(request.request_id)
            self.release(request.request_id)


class TwoRouters(NamedTuple):
    """The routers of the prefill engines, which come first, and of the decode engines."""

    prefill: ReplicaRouter
    decode: ReplicaRouter
    num_prefill: int

    def choose(self, request: WorkloadRequest, now: int) -> int:
        """Return the number of a prefill engine."""
        return self.prefill.choose(request, now)

    def set_load(self, replica: int, engine: SimulatedEngine, now: int) -> None:
        """The load of an engine may have changed."""
        if replica < self.num_prefill:
            self.prefill.set_load(replica, engine, now)
        else:
            self.decode.set_load(replica - self.num_prefill, engine, now)


class _Handed(NamedTuple):
    """A request as its prefill engine has left it."""

    source: WorkloadRequest
    prefill: SimulatedRequest


class DisaggregatedFleet(Fleet):
    """Prefill engines, decode engines, and links between them.

    A prefill engine computes the prompt and one token, and holds the prompt's blocks. A decode
    engine then reads those that its own cache lacks, as whole blocks. It computes the prompt's last
    token again, and generates the output.

    Args:
        prefill, decode: engines with a `PrefillConnector` or a `DecodeConnector`.
        routers: of these engines.
        bandwidth, latency: of each engine's link; see `Links`.
        kv_bytes_per_token: KV of a token, in bytes, on all ranks of an engine.
        first_token: the stage whose first token the client gets: "decode", as with vLLM's and our
            router, or "prefill", as in DistServe, where the decode engine continues after it.
    """

    def __init__(
        self,
        prefill: Sequence[SimulatedEngine],
        decode: Sequence[SimulatedEngine],
        routers: tuple[ReplicaRouter, ReplicaRouter],
        *,
        bandwidth: float,
        latency: int,
        kv_bytes_per_token: float,
        first_token: str = "decode",
    ) -> None:
        super().__init__([*prefill, *decode], TwoRouters(*routers, len(prefill)))
        self.links = Links(bandwidth, latency, self.at, lambda: self.now)
        self.num_prefill = len(prefill)
        self.kv_bytes_per_token = kv_bytes_per_token
        self.num_extra = int(first_token == "prefill")
        self._make: RequestMaker
        # Requests in each of the two stages.
        self._in_prefill: dict[str, WorkloadRequest] = {}
        self._in_decode: dict[str, _Handed] = {}
        for replica, engine in enumerate(self.engines):
            connector = transfer_of(engine).connector
            if isinstance(connector, DecodeConnector):
                connector.fetch = functools.partial(self._fetch, replica)
                connector.release = self._release

    def run(self, workload: Workload) -> FleetResult:
        """Serve all requests of a workload. A fleet runs once."""
        return dataclasses.replace(
            super().run(workload),
            num_transfers=self.links.num_transfers,
            num_transferred_bytes=self.links.num_bytes,
            transfer_time=self.links.time,
        )

    # ---------------------------------------------------------------- the way of a request

    def _arrive(self, source: WorkloadRequest, make: RequestMaker) -> None:
        self._make = make
        self._in_prefill[source.request_id] = source
        super()._arrive(msgspec.structs.replace(source, num_output_tokens=1), make)

    def _end(self, request: SimulatedRequest) -> None:
        name = request.request_id
        if (source := self._in_prefill.pop(name, None)) is None:
            handed = self._in_decode.pop(name)
            self._served.append(
                msgspec.structs.replace(
                    request.served(),
                    num_prompt_tokens=handed.source.num_prompt_tokens,
                    num_output_tokens=request.num_output_tokens + self.num_extra,
                    num_cached_tokens=handed.prefill.num_cached_tokens,
                )
            )
            return
        is_held = request.finish_reason == "length"
        is_gone = source.abort is not None and source.abort <= self.now
        if is_held and not is_gone and source.num_output_tokens > self.num_extra:
            self._hand_over(_Handed(source, request))
            return
        if is_held:
            self._release_from(request)
        if is_gone:
            request.finish_reason = "abort"
        super()._end(request)

    def _hand_over(self, handed: _Handed) -> None:
        """Send a request to a decode engine, after its prompt was computed."""
        source = handed.source
        name = source.request_id
        assert isinstance(self.router, TwoRouters)
        chosen = self.router.decode.choose(source, self.now)
        request = self._make(
            msgspec.structs.replace(
                source,
                num_prompt_tokens=source.num_prompt_tokens + self.num_extra,
                num_output_tokens=source.num_output_tokens - self.num_extra,
            )
        )
        replica = request.replica = self.num_prefill + chosen
        if self.num_extra:
            request.first_token = request.last_token = self.now
        engine = self.engines[replica]
        connector = transfer_of(engine).connector
        assert isinstance(connector, DecodeConnector)
        connector.offered.add(name)
        self._in_decode[name] = handed
        try:
            has_changed = engine.arrive(request, self.now)
        except ValueError:
            request.finish_reason = "rejected"
            connector.offered.discard(name)
            self._release(name)
            self._end(request)
            return
        if has_changed:
            self._await(replica)
        if source.abort is not None and source.abort > self.now:
            self.at(source.abort, lambda: self._abort(request))
        self.router.set_load(replica, engine, self.now)

    # ---------------------------------------------------------------- transfers

    def _fetch(self, replica: int, request_id: str, num_blocks: int) -> None:
        """Send blocks to a decode engine, which has just planned to read them."""
        prefill = self._in_decode[request_id].prefill.replica
        block_size = self.engines[replica].scheduler.manager.block_size
        num_bytes = round(num_blocks * block_size * self.kv_bytes_per_token)

        def arrived() -> None:
            report(self, prefill, KVConnectorOutput(finished_sending={request_id}))
            report(self, replica, KVConnectorOutput(finished_recving={request_id}))

        self.links.send(prefill, replica, num_bytes, arrived)

    def _release(self, request_id: str) -> None:
        self._release_from(self._in_decode[request_id].prefill)

    def _release_from(self, prefill: SimulatedRequest) -> None:
        """Free a prompt's blocks in its prefill engine."""
        ended = KVConnectorOutput(finished_sending={prefill.request_id})
        report(self, prefill.replica, ended)
