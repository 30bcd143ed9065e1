"""Prefill on one engine, decode on another (DistServe, Zhong et al. 2024; Splitwise, Patel et al.
2024): the connector.

A request's KV is computed by a *producer* and taken over by a *consumer*. Two orders:

    prefill first   the producer computes the prompt and one token; its answer
                    (`kv_transfer_params`) says where the KV is, and the router gives that to a
                    consumer, which reads the blocks (pull).
    decode first    the consumer looks at its own cache, and asks a producer for what is missing:
                    the producer then says where it is (pull), or offers it layer by layer while it
                    computes (push), and the consumer reads each at once.

A producer's blocks are held until the consumer has read them: for so long they are leased, and a
lease ends in any case, with its reader or with its time. What was read under a lease that had ended
is thrown away."""

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.data.config import EngineConfig
from nanovllm.data.json import JsonObject
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import Request
from nanovllm.data.schedule import SchedulerOutput
from nanovllm.distributed.activity import waiting_for_others
from nanovllm.kv.connector import KVConnectorWorker, Tables
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.pd.consumer import TRANSFER_TIMEOUT, ConsumerSide
from nanovllm.kv_transfer.pd.control import FromConsumer
from nanovllm.kv_transfer.pd.plan import TransferMetadata, TransferParams
from nanovllm.kv_transfer.pd.producer import ProducerSide
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.handshake import secret
from nanovllm.kv_transfer.transport.local import LocalTransport
from nanovllm.kv_transfer.transport.nixl import NixlTransport

logger = logging.getLogger(__name__)

# After how many seconds in which nothing moves an engine gives up a fetch, so that it can compute
# what another engine waits for. (Two engines may otherwise wait for each other: the pool of each is
# full of blocks that the other one is to fill.)
DEADLOCK_SECONDS = 3.0


class DisaggregatedScheduler(ConsumerSide, ProducerSide):
    """The half that lives with the scheduler: a consumer and, if its role says so, a producer.

    A consumer's producer side has no address, and so gets no orders; the front end refuses requests
    that an engine of this role cannot fetch."""

    _stuck_since = float("inf")

    def check_request(self, request: Request) -> None:
        """See `KVConnectorScheduler.check_request`."""
        if request.kv_transfer_params is not None:
            TransferParams.check(request.kv_transfer_params, self.kv_transfer.kv_role)

    def decline(self, request: Request, reason: str) -> None:
        """See `KVConnectorScheduler.decline`. A request of the same id that is being fetched goes
        on."""
        if request.request_id in self.orders:
            super().decline(request, reason)
        elif not self._fetches_of(request):
            self._decline(request)

    def build_connector_meta(
        self, schedule: SchedulerOutput, tables: Tables
    ) -> TransferMetadata | None:
        """What there is to begin; and as long as a transfer is in flight, the question whether it
        has ended."""
        self.push(schedule, tables)
        self._resolve_deadlock(schedule.empty)
        metadata = self.metadata
        self.metadata = TransferMetadata()
        return metadata if self._in_flight or metadata != TransferMetadata() else None

    def _resolve_deadlock(self, is_stuck: bool) -> None:
        """Give up the youngest fetch if for some seconds nothing could be computed and nothing has
        come, while other engines wait for their orders. The request has its blocks already, so it
        can run to its end."""
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
        """See `KVConnectorScheduler.take_output`. On the way, all mail is read."""
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
        """Until the next lease ends."""
        end = self.leases.next_end
        return max(0.0, end - time.monotonic()) if end < float("inf") else None

    @property
    def information(self) -> JsonObject:
        """With host and port where consumers can ask, if this engine is a producer."""
        host, port = self.address or (None, None)
        return super().information | {
            "kv_host": host,
            "kv_port": port,
            "block_size": self.config.block_size,
        }


class DisaggregatedWorker(KVConnectorWorker):
    """Moves blocks over a transport.

    Attributes:
        transport_class: how blocks move.
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

    def get_handshake_metadata(self) -> JsonObject:
        """The transport's address."""
        return self.transport.address

    def start_load_kv(self) -> None:
        """Begin reads, expect pushes and cancel: what does not depend on this step."""
        assert self.metadata is not None
        # Blocks that a transfer fills may have been those of a request that has ended while the GPU
        # still computes it once more, for nothing: what that step writes must not come after what
        # the transfer writes.
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
        """Begin to push what this layer has just written. The blocks stay the request's until all
        is over, and it does not write again what is pushed of them: nothing has to be waited for.
        """
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
