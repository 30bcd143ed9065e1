"""Connector for prefill on one engine and decode on another (DistServe, Zhong et al. 2024;
Splitwise, Patel et al. 2024).

A *producer* computes a request's KV, and a *consumer* continues with it. There are two protocols:

    prefill first   The producer computes the prompt and one token. Its answer
                    (`kv_transfer_params`) says where the KV is. The router passes the answer to a
                    consumer, which reads the blocks (pull).
    decode first    The consumer checks its own cache, and requests the missing KV from a
                    producer. The producer answers with the blocks, once it has computed them
                    (pull), or transfers each layer as soon as it has computed it (push).

A lease holds a producer's blocks until the consumer has read them. A lease always ends: with its
reader's connection, or at its deadline. The consumer discards what it has read if the lease had
ended before it released the blocks."""

import logging
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer import ConnectorInformation
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.connector import KVConnectorWorker, Tables
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.pd.consumer import TRANSFER_TIMEOUT, ConsumerSide
from nanovllm.kv_transfer.pd.control import FromConsumer
from nanovllm.kv_transfer.pd.plan import TransferMetadata, TransferParams
from nanovllm.kv_transfer.pd.producer import ProducerSide
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.handshake import secret
from nanovllm.kv_transfer.transport.local import LocalTransport
from nanovllm.kv_transfer.transport.nixl import NixlTransport
from nanovllm.processes.activity import waiting_for_others

logger = logging.getLogger(__name__)

# Seconds without progress after which an engine gives up a fetch, so that it can compute what
# another engine has ordered. Otherwise two engines may deadlock: the pool of each is full of blocks
# that wait for KV from the other.
DEADLOCK_SECONDS = 3.0


class DisaggregatedScheduler(ConsumerSide, ProducerSide):
    """The scheduler's half: a consumer and, depending on its role, a producer.

    The producer side of a pure consumer has no address, so it gets no orders. The front end rejects
    requests that do not fit the engine's role."""

    _stuck_since = float("inf")

    def check_request(self, request: Request) -> None:
        """See `KVConnectorScheduler.check_request`."""
        if request.kv_transfer_params is not None:
            TransferParams.check(request.kv_transfer_params, self.kv_transfer.kv_role)

    def decline(self, request: Request, reason: str) -> None:
        """See `KVConnectorScheduler.decline`. This does not affect a running fetch of another
        request with the same id."""
        if request.request_id in self.orders:
            super().decline(request, reason)
        elif not self._fetches_of(request):
            self._decline(request)

    def build_connector_meta(
        self, plan: SchedulerOutput, tables: Tables
    ) -> TransferMetadata | None:
        """Return the transfers to begin. While a transfer is in flight, this is never None, so that
        the ranks report when it has ended."""
        self.push(plan, tables)
        self._resolve_deadlock(plan.empty)
        metadata = self.metadata
        self.metadata = TransferMetadata()
        return metadata if self._in_flight or metadata != TransferMetadata() else None

    def _resolve_deadlock(self, is_stuck: bool) -> None:
        """Give up the youngest fetch after `DEADLOCK_SECONDS` in which the scheduler had nothing to
        compute and no transfer ended, while other engines wait for orders. The request of this
        fetch has its blocks, so it can always finish."""
        now = time.monotonic()
        self._stuck_since = (
            min(self._stuck_since, now)
            if is_stuck and self.fetches and self.orders
            else float("inf")
        )
        if now - self._stuck_since > DEADLOCK_SECONDS:
            self._stuck_since = float("inf")
            self.give_up_youngest()

    def take_output(self) -> KVConnectorOutput:
        """See `KVConnectorScheduler.take_output`. First handle all messages in the mailbox."""
        for mail in self.mailbox.take():
            if isinstance(mail, FromConsumer):
                self.hear_consumer(mail.sender, mail.message)
            else:
                self.hear_producer(mail.sender, mail.message)
        if output := super().take_output():
            self._stuck_since = float("inf")
        return output

    @property
    def has_news(self) -> bool:
        """See `KVConnectorScheduler.has_news`."""
        return (
            super().has_news
            or not self.mailbox.is_empty
            or self.leases.next_end <= time.monotonic()
        )

    @property
    def idle_seconds(self) -> float | None:
        """Seconds until the next lease ends; None if there is no lease."""
        end = self.leases.next_end
        return max(0.0, end - time.monotonic()) if end < float("inf") else None

    @property
    def information(self) -> ConnectorInformation:
        """See `KVConnectorScheduler.information`; with the host and port for consumers, if this
        engine is a producer."""
        host, port = self.address or (None, None)
        return {
            **super().information,
            "kv_host": host,
            "kv_port": port,
            "block_size": self.config.block_size,
        }


class DisaggregatedWorker(KVConnectorWorker):
    """Moves blocks over a transport.

    Attributes:
        transport_class: the transport that moves blocks.
    """

    transport_class: type[Transport] = LocalTransport
    metadata: TransferMetadata | None

    def __init__(
        self, config: EngineConfig, layout: KVLayout, kv_caches: dict[int, Tensor]
    ) -> None:
        super().__init__(config, layout, kv_caches)
        timeout = float(self.kv_transfer.extra("timeout", TRANSFER_TIMEOUT))
        self.transport = self.transport_class(
            layout, kv_caches, self.kv_transfer.kv_ip, secret(), timeout=timeout
        )
        self.transport.transfers.on_ended = lambda: self.notify()

    @classmethod
    def empty_kv_cache(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """See `KVConnectorWorker.empty_kv_cache`."""
        return cls.transport_class.empty_cache(shape, dtype, device)

    def get_handshake_metadata(self) -> msgspec.Raw:
        """Return the transport's address, encoded."""
        return self.transport.address

    def start_load_kv(self) -> None:
        """Begin reads, expect pushes and cancel transfers: all of this is independent of the step's
        forward pass."""
        assert self.metadata is not None
        # The blocks to fill may have been freed by a finished request that a step in flight still
        # computes. Wait for this step, so that it does not overwrite what the transfer writes.
        if self.metadata.reads or self.metadata.expects:
            wait = self.transport.mark()
            wait()
        for move in self.metadata.reads:
            self.transport.read(
                move.transfer_id, move.peers, move.local_block_ids, move.remote_block_ids
            )
        for move in self.metadata.expects:
            self.transport.expect(move.transfer_id, move.peers, move.local_block_ids)
        for transfer_id in self.metadata.cancels:
            self.transport.cancel(transfer_id)

    def save_kv_layer(self, layer: int, kv_cache: Tensor) -> None:
        """Begin to push the KV that this layer has just written. The step need not wait for the
        push: the request holds its blocks until all pushes have ended, and never rewrites pushed
        KV."""
        if self.metadata is not None:
            for move in self.metadata.pushes:
                self.transport.push(
                    move.transfer_id,
                    move.peers,
                    layer=layer,
                    local=move.local_block_ids,
                    remote=move.remote_block_ids,
                    is_last=move.is_last,
                )

    def get_finished(self, wait_seconds: float = 0.0) -> KVConnectorOutput:
        """See `KVConnectorWorker.get_finished`. The scheduler's half knows which transfers it
        receives, and for which requests."""
        ended = self.transport.poll(wait_seconds)
        reasons = {end.transfer_id: end.error for end in ended if end.error}
        for transfer_id, error in reasons.items():
            logger.warning("transfer %s failed: %s", transfer_id, error)
        return KVConnectorOutput({end.transfer_id for end in ended}, reasons=reasons)

    def forget_requests(self) -> None:
        """See `KVConnectorWorker.forget_requests`."""
        with waiting_for_others():
            self.transport.reset("a step broke off")
        if left := self.transport.transfers.of():
            raise RuntimeError(
                f"KV transfers cannot be stopped, and write to blocks of this rank: {left}"
            )
        self.transport.poll()

    def close(self) -> None:
        """See `KVConnectorWorker.close`."""
        self.transport.close()


class NixlWorker(DisaggregatedWorker):
    """Moves blocks over NIXL."""

    transport_class = NixlTransport
