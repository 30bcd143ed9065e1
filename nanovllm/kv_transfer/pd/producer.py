"""Computes KV for other engines: their orders, and the blocks that this engine holds for them.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.core.request import Request
from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.kv_transfer.pd.control import (
    Claim,
    Consumer,
    Leases,
    Prefill,
    Prefilled,
    Ranks,
    Released,
    Side,
    listen,
    seal,
)
from nanovllm.kv_transfer.pd.plan import Move, TransferParams

if TYPE_CHECKING:
    from nanovllm.core.schedule import ScheduledRequest, SchedulerOutput


@dataclass
class Order:
    """A prompt that this engine computes for another engine.

    Attributes:
        num_pushed: tokens whose KV the ranks have begun to push, in orders with `Prefill.push`.
    """

    consumer: Consumer
    message: Prefill
    num_pushed: int = 0


class ProducerSide(Side):
    """The requests whose KV this engine provides to others, ordered by a consumer or requested by a
    client (`do_remote_decode`).

    Attributes:
        orders: the consumers' orders by transfer id, which is also the id of the request here.
        leases: the blocks that this engine holds for readers.
    """

    def __init__(self, config: EngineConfig, identity: dict[str, str | int], ranks: Ranks) -> None:
        super().__init__(config, identity, ranks)
        self.leases = Leases()
        self.lease_seconds = float(self.kv_transfer.extra("lease_seconds", 60.0))
        self.orders: dict[str, Order] = {}
        if self.kv_transfer.is_producer:
            host = self.kv_transfer.kv_ip
            port = self.kv_transfer.kv_port
            self._listener = listen(host, port, self.credentials, self.mailbox, self.leases)
            self.address = self._listener.address

    def hear_consumer(self, consumer: Consumer, message: Prefill | Claim | Released | None) -> None:
        """Act on a consumer's message; None: the consumer is gone."""
        if message is None:
            self._output.aborts += [
                key for key, order in self.orders.items() if order.consumer is consumer
            ]
        elif isinstance(message, Released) and not message.was_held:
            # The consumer has cancelled an order, running or finished.
            self._output.aborts += {message.request_id} & self.orders.keys()
            self.leases.release(message.request_id, consumer.connection)
        elif isinstance(message, Prefill):
            if error := self._why_not(message):
                consumer.tell(Prefilled(message.transfer_id, error=error))
                return
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            request = EngineRequest(message.transfer_id, message.token_ids, params)
            request.priority = message.priority
            request.cache_salt = message.cache_salt
            self.orders[message.transfer_id] = Order(consumer, message)
            self._output.requests.append(request)

    def _why_not(self, message: Prefill) -> str:
        """Return why an order is not valid; "" if it is."""
        size = self.config.block_size
        tokens = message.token_ids
        vocab_size = int(self.identity["vocab_size"])
        if message.transfer_id in self.orders:
            return "this id is in use"
        if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
            return f"token ids must be from 0 to {vocab_size - 1}"
        if not 0 <= message.num_computed_tokens < len(tokens) or message.num_computed_tokens % size:
            return (
                "num_computed_tokens must be a multiple of block_size and smaller than the prompt"
            )
        if message.push is not None and len(message.push) != -(-len(tokens) // size):
            return f"{len(message.push)} blocks for {len(tokens)} tokens"
        return ""

    def revoke(self, request_id: str) -> None:
        """See `KVConnectorScheduler.revoke`."""
        self.leases.release(request_id)

    def decline(self, request: Request, reason: str) -> None:
        """Tell the consumer that ordered the request why this engine does not compute it."""
        order = self.orders.pop(request.request_id)
        order.consumer.tell(
            Prefilled(request.request_id, error=f"it rejected the prompt: {reason}")
        )

    def push(self, plan: SchedulerOutput, tables: Mapping[str, list[int]]) -> None:
        """Push the KV that a step computes for consumers."""
        for share in plan.requests:
            if (order := self.orders.get(share.request_id)) is not None:
                self._push(order, share, tables[share.request_id])

    def _push(self, order: Order, share: ScheduledRequest, table: list[int]) -> None:
        """Push the part of an order that is known after this step: tokens `start` up to `end`.

            start = max(message.num_computed_tokens, order.num_pushed)
            end   = min(end of this step's share, number of the order's tokens)

        Push nothing if `end <= start`; if the consumer reads (`message.push` is None); or if a part
        was pushed and the request id is no longer in `_in_flight`, since the ranks have then
        stopped.

        Otherwise set `num_pushed` to `end`, add the request id to `_in_flight`, and append a `Move`
        to `metadata.pushes`: to `consumer.ranks`, from the blocks of `table` that contain these
        tokens to the blocks at the same indices of `message.push`. `is_last` is True if `end` is
        the end of the order. Whole blocks are pushed, so the next step pushes a partly filled block
        again. The first push includes the tokens of a prefix-cache hit."""
        message = order.message
        size = self.config.block_size
        start = max(message.num_computed_tokens, order.num_pushed)
        end = min(share.start + share.num_tokens, len(message.token_ids))
        # An error has stopped the push.
        is_lost = order.num_pushed > 0 and share.request_id not in self._in_flight
        if message.push is None or end <= start or is_lost:
            return
        blocks = slice(start // size, -(-end // size))
        order.num_pushed = end
        self.metadata.pushes.append(
            Move(
                transfer_id=share.request_id,
                peers=order.consumer.ranks,
                local_block_ids=table[blocks],
                remote_block_ids=message.push[blocks],
                is_last=end == len(message.token_ids),
            )
        )
        self._in_flight.add(share.request_id)

    def is_sending(self, request: Request) -> bool:
        """See `KVConnectorScheduler.is_sending`."""
        return request.request_id in self.orders and request.request_id in self._in_flight

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """Hold the blocks of a prompt for the engine that will read them."""
        # A request that was preempted while its token was pending ends without blocks.
        is_complete = request.finish_reason in ("stop", "length") and bool(block_ids)
        blocks = list(block_ids[: -(-request.num_prompt_tokens // self.config.block_size)])
        if (order := self.orders.pop(request.request_id, None)) is not None:
            return self._order_finished(order, blocks, is_complete), None
        params = TransferParams.of(request)
        if not params.do_remote_decode or not is_complete:
            return False, None
        mark = seal(request.token_ids[: request.num_prompt_tokens], blocks)
        self.leases.grant(request.request_id, self.lease_seconds, mark)
        host, port = self.address or (None, None)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.kv_transfer.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": blocks,
            "remote_host": host,
            "remote_port": port,
            "remote_num_tokens": request.num_prompt_tokens,
            "tp_size": self.config.tensor_parallel_size,
        }

    def _order_finished(self, order: Order, blocks: list[int], is_complete: bool) -> bool:
        """Answer the consumer; returns whether to hold the blocks."""
        transfer_id = order.message.transfer_id
        consumer = order.consumer
        if not is_complete:
            consumer.tell(Prefilled(transfer_id, error="the producer has given it up"))
            if transfer_id in self._in_flight:
                self.metadata.cancels.append(transfer_id)
            return transfer_id in self._in_flight
        if order.message.push is None:
            self.leases.grant_to(transfer_id, consumer.connection)
            if consumer.connection.is_lost():  # its thread cannot have seen the new lease
                self.leases.drop(consumer.connection)
            consumer.tell(Prefilled(transfer_id, blocks))
        return True

    def take_output(self) -> KVConnectorOutput:
        """See `KVConnectorScheduler.take_output`."""
        # If the ranks report the end of a push while its request still runs, the push has failed:
        # the consumer cannot use the remaining KV.
        self._output.aborts += self._output.finished_sending & self.orders.keys()
        self._output.finished_sending |= self.leases.take_ended()
        return super().take_output()

    def forget_requests(self) -> None:
        """Drop all orders and leases after a failed step: the blocks' content is unknown."""
        super().forget_requests()
        for request_id, order in self.orders.items():
            order.consumer.tell(Prefilled(request_id, error="a step of the producer broke off"))
        self.orders.clear()
        self.leases.clear()

    def close(self) -> None:
        """See `KVConnectorScheduler.close`."""
        if self.address is not None:
            self._listener.close()
        super().close()
