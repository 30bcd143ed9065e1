"""Prefill on one engine, decode on another (DistServe, Zhong et al. 2024; Splitwise, Patel et al. 2024): the connector.

A request's KV is computed by a *producer* and taken over by a *consumer*. Two orders:

    prefill first   the producer computes the prompt and one token; its answer (`kv_transfer_params`) says where the KV is, and
                    the router gives that to a consumer, which reads the blocks (pull).
    decode first    the consumer looks at its own cache, and asks a producer for what is missing: the producer then says where
                    it is (pull), or writes it into the consumer's blocks, layer by layer while it computes (push).

A producer's blocks are held until the consumer has read them: for so long they are leased, and a lease ends in any case, with its
reader or with its time. What was read under a lease that had ended is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.parts import load
from nanovllm.data.request import Request
from nanovllm.distributed.activity import waiting_for_others
from nanovllm.kv.connector import KVConnectorScheduler, KVConnectorWorker
from nanovllm.kv_transfer.pd.consumer import PREFILL_TIMEOUT, TRANSFER_TIMEOUT, ConsumerSide
from nanovllm.kv_transfer.pd.control import Consumer, Introduction
from nanovllm.kv_transfer.pd.plan import Books, TransferMetadata, TransferParams
from nanovllm.kv_transfer.pd.producer import ProducerSide
from nanovllm.kv_transfer.transport.handshake import secret

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanovllm.data.config import EngineConfig
    from nanovllm.data.schedule import SchedulerOutput
    from nanovllm.kv_transfer.layout import KVLayout
    from nanovllm.kv_transfer.transport.base import Transport

logger = logging.getLogger(__name__)

# How long the ranks wait, when a step has broken off, for peers that are writing to their blocks.
STOP_SECONDS = 5.0
# After how many seconds in which nothing moves an engine gives up a fetch, so that it can compute what another engine waits for.
# (Two engines may otherwise wait for each other: the pool of each is full of blocks that the other one is to fill.)
DEADLOCK_SECONDS = 3.0


class DisaggregatedScheduler(KVConnectorScheduler):
    """The half that lives with the scheduler: a consumer and, if its role says so, a producer.

    Attributes:
        consumer, producer: its two sides. A consumer's producer side has no address, and so gets no orders; the front end refuses
            requests that an engine of this role cannot fetch.
    """

    def __init__(self, config: EngineConfig, identity: dict[str, str | int], ranks: Sequence[Any]) -> None:
        super().__init__(config, identity, ranks)
        kv_transfer = self.kv_transfer
        self.identity = {"kv_connector": kv_transfer.kv_connector, **identity}
        kv_transfer.check_extra("lease_seconds", "min_remote_tokens", "prefill_timeout", "timeout")
        self.books = Books(config, kv_transfer, self.identity, Introduction(kv_transfer.engine_id, self.ranks))
        self.producer = ProducerSide(self.books)
        self.consumer = ConsumerSide(self.books, self.producer.address)
        self._stuck_since = float("inf")

    def check_request(self, request: Request) -> None:
        """See `KVConnectorScheduler.check_request`."""
        if request.kv_transfer_params is not None:
            TransferParams.check(request.kv_transfer_params, self.kv_transfer.kv_role)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """All the rest of the prompt, if another engine has it or can be asked for it."""
        return self.consumer.num_offered(request, num_computed_tokens), True

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Ask for it."""
        self.consumer.ask(request, block_ids)

    def decline(self, request: Request, reason: str) -> None:
        """See `KVConnectorScheduler.decline`. A request of the same id that is being fetched goes on."""
        if request.request_id in self.producer.orders:
            self.producer.refuse(request.request_id, reason)
        elif all(fetch.request_id != request.request_id for fetch in self.consumer.fetches.values()):
            self.consumer.stop(request)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of a prompt that another engine wants; stop what comes for a request that ends."""
        if self.consumer.stop(request):
            return True, None
        return self.producer.finished(request, block_ids)

    def revoke(self, request_id: str) -> None:
        """See `KVConnectorScheduler.revoke`."""
        self.producer.leases.revoke(request_id)

    def is_sending(self, request: Request) -> bool:
        """See `KVConnectorScheduler.is_sending`."""
        return self.producer.is_sending(request.request_id)

    # ---------------------------------------------------------------- every step

    def build_connector_meta(
        self, schedule: SchedulerOutput, tables: Mapping[str, list[int]]
    ) -> TransferMetadata | None:
        """What there is to begin; and as long as a transfer is in flight, the question whether it has ended."""
        self.producer.note(schedule, tables)
        self._resolve_deadlock(schedule.empty)
        metadata, self.books.metadata = self.books.metadata, TransferMetadata()
        return metadata if self.books.in_flight or not metadata.is_empty else None

    def _resolve_deadlock(self, is_stuck: bool) -> None:
        """Give up the youngest fetch if for some seconds nothing could be computed and nothing has come, while other engines wait
        for their orders. The request has its blocks already, so it can run to its end."""
        now = time.monotonic()
        if not is_stuck or not self.consumer.fetches or not self.producer.orders:
            self._stuck_since = float("inf")
        elif now - self._stuck_since > DEADLOCK_SECONDS:
            self._stuck_since = float("inf")
            self.consumer.give_up_youngest()
        else:
            self._stuck_since = min(self._stuck_since, now)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `KVConnectorScheduler.update_connector_output`."""
        self.books.in_flight -= output.finished_recving | output.finished_sending
        self.consumer.received(output)
        self.books.output.finished_sending |= output.finished_sending

    def take_output(self) -> KVConnectorOutput:
        """See `KVConnectorScheduler.take_output`. On the way, all mail is read."""
        for sender, message in self.books.mailbox.take():
            side: Any = self.producer if isinstance(sender, Consumer) else self.consumer
            side.hear(sender, message)
        self.consumer.look_at_clock()
        self.books.output.finished_sending |= self.producer.leases.take_ended()
        aborts = self._output.aborts
        self._output, self.books.output = self.books.output, KVConnectorOutput()
        output = super().take_output()
        if output:
            self._stuck_since = float("inf")
        self.producer.pushed(output.finished_sending)
        output.requests, self.producer.requests = self.producer.requests, []
        output.aborts, self.producer.aborts = self.producer.aborts + aborts, []
        return output

    @property
    def has_work(self) -> bool:
        """See `KVConnectorScheduler.has_work`."""
        return bool(self.books.in_flight) or self.has_news

    @property
    def has_news(self) -> bool:
        """See `KVConnectorScheduler.has_news`."""
        has_mail = not self.books.mailbox.is_empty
        return bool(
            self._output or self.books.output or has_mail or self.producer.aborts or self.producer.leases.has_ended
        )

    @property
    def sources(self) -> Sequence[int]:
        """See `KVConnectorScheduler.sources`."""
        return [self.books.mailbox.fileno()]

    @property
    def idle_seconds(self) -> float | None:
        """Until the next lease ends."""
        end = self.producer.leases.next_end
        return max(0.0, end - time.monotonic()) if end < float("inf") else None

    @property
    def information(self) -> dict[str, Any]:
        """With host and port where consumers can ask, if this engine is a producer."""
        host, port = self.producer.address or (None, None)
        return super().information | {"kv_host": host, "kv_port": port, "block_size": self.config.block_size}

    def forget_requests(self, open_transfers: Collection[str] = ()) -> None:
        """See `KVConnectorScheduler.forget_requests`."""
        super().forget_requests()
        self.consumer.forget()
        self.producer.forget()
        self.books.metadata, self.books.output = TransferMetadata(), KVConnectorOutput()
        self.books.in_flight = set(open_transfers)

    def close(self) -> None:
        """See `KVConnectorScheduler.close`."""
        self.consumer.close()
        self.producer.close()
        self.books.mailbox.close()


class DisaggregatedWorker(KVConnectorWorker):
    """Moves blocks over a transport.

    Attributes:
        transport_class: "module:class" of the transport.
    """

    transport_class = "nanovllm.kv_transfer.transport.local:LocalTransport"
    metadata: TransferMetadata | None

    def __init__(self, config: EngineConfig, layout: KVLayout, kv_caches: dict[int, Tensor]) -> None:
        super().__init__(config, layout, kv_caches)
        self._receiving: set[str] = set()  # transfers
        timeout = float(self.kv_transfer.extra("timeout", TRANSFER_TIMEOUT))
        self.transport = self._transport_class()(layout, kv_caches, self.kv_transfer.kv_ip, secret(), timeout=timeout)
        self.transport.transfers.on_ended = lambda: self.notify()

    @classmethod
    def _transport_class(cls) -> type[Transport]:
        return load(cls.transport_class, "this kv_connector")

    @classmethod
    def empty_kv_cache(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `KVConnectorWorker.empty_kv_cache`."""
        return cls._transport_class().empty_cache(shape, dtype, device)

    def get_handshake_metadata(self) -> dict[str, Any]:
        """The transport's address."""
        return self.transport.address

    def start_load_kv(self) -> None:
        """Begin reads, expect writes and cancel: what does not depend on this step."""
        assert self.metadata is not None
        if self.metadata.reads or self.metadata.expects:
            self._wait_for_device()
        for move in self.metadata.reads:
            self._receiving.add(move.transfer_id)
            self.transport.read(move.transfer_id, move.peers, move.local_block_ids, move.remote_block_ids)
        for move in self.metadata.expects:
            self._receiving.add(move.transfer_id)
            # The producer may have other requests to compute first.
            patience = float(self.kv_transfer.extra("prefill_timeout", PREFILL_TIMEOUT))
            self.transport.expect(move.transfer_id, move.peers, move.local_block_ids, patience)
        for transfer_id in self.metadata.cancels:
            self.transport.cancel(transfer_id)

    def _wait_for_device(self) -> None:
        """Wait for the GPU before a transfer fills blocks. They may have been those of a request that has ended while the GPU still
        computes it once more, for nothing: what that step writes must not come after what the transfer writes."""
        device = next(iter(self.kv_caches.values())).device
        if device.type == "cuda":
            import torch

            torch.cuda.current_stream(device).synchronize()

    def save_kv_layer(self, layer: int, kv_cache: Tensor) -> None:
        """Begin to push what this layer has just written. The blocks stay the request's until all is over."""
        if self.metadata is not None:
            for move in self.metadata.pushes:
                self.transport.write(move.transfer_id, move.peers, layer, move.local_block_ids, move.remote_block_ids)

    def wait_for_save(self) -> None:
        """End pushes that are complete. Nothing has to be waited for: a pushed request holds its blocks, and does not write again
        what is pushed of them."""
        assert self.metadata is not None
        for move in self.metadata.pushes:
            if move.is_last:
                self.transport.finish_writes(move.transfer_id, move.peers)

    def get_finished(self, wait_seconds: float = 0.0) -> KVConnectorOutput:
        """See `KVConnectorWorker.get_finished`. The scheduler's half knows which request each transfer is for."""
        output = KVConnectorOutput()
        for ended in self.transport.poll(wait_seconds):
            transfer_id = ended.transfer_id
            if transfer_id not in self._receiving:
                output.finished_sending.add(transfer_id)
                if ended.error:
                    logger.warning("pushing %s failed: %s", transfer_id, ended.error)
                continue
            self._receiving.remove(transfer_id)
            output.finished_recving.add(transfer_id)
            if ended.error or ended.invalid_block_ids:
                output.invalid_block_ids[transfer_id] = set(ended.invalid_block_ids)
                output.reasons[transfer_id] = ended.error
        return output

    def forget_requests(self) -> dict[str, list[int]]:
        """See `KVConnectorWorker.forget_requests`. A peer that was stopped in mid-write is waited for up to `STOP_SECONDS`."""
        self.transport.cancel_all("a step broke off")
        deadline = time.monotonic() + STOP_SECONDS
        with waiting_for_others():
            while self.transport.transfers.num_open and time.monotonic() < deadline:
                self.transport.poll(0.1)
        self.transport.poll()
        open_blocks = self.transport.transfers.open_blocks
        self._receiving &= open_blocks.keys()
        return open_blocks

    def close(self) -> None:
        """See `KVConnectorWorker.close`."""
        self.transport.close()


class NixlWorker(DisaggregatedWorker):
    """Moves blocks over NIXL."""

    transport_class = "nanovllm.kv_transfer.transport.nixl:NixlTransport"
