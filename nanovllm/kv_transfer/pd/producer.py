"""The side of an engine that computes KV for others: what they have ordered, and which blocks are held for whom.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.data.request import EngineRequest, Request
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.kv_transfer.pd.control import (
    Cancel,
    Consumer,
    ConsumerListener,
    Introduction,
    Mailbox,
    Prefill,
    Prefilled,
    seal,
)
from nanovllm.kv_transfer.pd.plan import Books, Move, TransferParams

if TYPE_CHECKING:
    from nanovllm.data.schedule import ScheduledRequest, SchedulerOutput


@dataclass
class Order:
    """A request of another engine, which this one computes for it."""

    consumer: Consumer
    message: Prefill
    table: list[int] = field(default_factory=list)
    num_pushed: int = -1  # tokens; -1: nothing has been pushed yet
    is_lost: bool = False  # pushing has failed

    @property
    def is_pushing(self) -> bool:
        """Its blocks are being read."""
        return self.num_pushed >= 0 and not self.is_lost


class ProducerSide:
    """The requests whose KV others want: they ask for it here, or their clients say so.

    Args:
        books: shared with the engine's other side.
        mailbox: gets pairs of a `Consumer` and what it says; None at its end.

    Attributes:
        orders: what other engines have ordered, by the transfer's id, which is the request's id here.
        requests, aborts: what the engine has to begin, and to end, for that.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_transfer: KVTransferConfig,
        identity: dict[str, str | int],
        introduction: Introduction,
        mailbox: Mailbox,
        books: Books,
    ) -> None:
        self.config, self.identity, self.books = config, identity, books
        self.lease_seconds = float(kv_transfer.extra("lease_seconds", 60.0))
        self._introduction = introduction
        self.orders: dict[str, Order] = {}
        self.requests: list[EngineRequest] = []
        self.aborts: list[str] = []
        self._listener = ConsumerListener(kv_transfer.kv_ip, kv_transfer.kv_port, identity, introduction, mailbox)
        self.leases, self.address = self._listener.leases, self._listener.address

    def hear(self, consumer: Consumer, message: Any) -> None:
        """Take in what a consumer says; None: it is gone."""
        if message is None:
            self.aborts += [key for key, order in self.orders.items() if order.consumer is consumer]
        elif isinstance(message, Cancel):
            if message.transfer_id in self.orders:
                self.aborts.append(message.transfer_id)
            else:
                self.leases.release(message.transfer_id, consumer.connection)
        elif isinstance(message, Prefill):
            if error := self._why_not(message):
                consumer.tell(Prefilled(message.transfer_id, error=error))
                return
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            request = EngineRequest(
                message.transfer_id,
                message.token_ids,
                params,
                arrival_time=time.time(),
                priority=message.priority,
                cache_salt=message.cache_salt,
            )
            self.orders[message.transfer_id] = Order(consumer, message)
            self.requests.append(request)

    def _why_not(self, message: Prefill) -> str:
        """What is wrong with what a consumer asks for; "" if nothing."""
        size, vocab_size, tokens = self.config.block_size, int(self.identity["vocab_size"]), message.token_ids
        if message.transfer_id in self.orders:
            return "this id is in use"
        if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
            return f"token ids must be from 0 to {vocab_size - 1}"
        if not 0 <= message.num_computed_tokens < len(tokens) or message.num_computed_tokens % size:
            return "num_computed_tokens must be a whole number of blocks, and less than the prompt"
        if message.push is not None and len(message.push) != -(-len(tokens) // size):
            return f"{len(message.push)} blocks for {len(tokens)} tokens"
        return ""

    def refuse(self, request_id: str, reason: str) -> None:
        """See `KVConnectorScheduler.refuse`."""
        self.orders.pop(request_id).consumer.tell(Prefilled(request_id, error=f"it refuses: {reason}"))

    def note(self, schedule: SchedulerOutput) -> None:
        """See what a step computes for other engines."""
        for share in schedule.requests:
            if (order := self.orders.get(share.request_id)) is not None:
                self._note_push(order, share)

    def is_sending(self, request: Request) -> bool:
        """Whether its blocks are being pushed."""
        order = self.orders.get(request.request_id)
        return order is not None and order.is_pushing

    def pushed(self, request_ids: set[str]) -> None:
        """Take in that these are not pushed any more. A request that is not done by then has failed in it: what else it computes
        is of no use to anybody."""
        for request_id in request_ids & self.orders.keys():
            self.orders[request_id].is_lost = True
            self.aborts.append(request_id)

    def _note_push(self, order: Order, share: ScheduledRequest) -> None:
        """Push what the step computes, and at first also what the producer had in its cache."""
        request_id, message, size = share.request_id, order.message, self.config.block_size
        if share.sampling_params is not None:
            order.table = []
        order.table += share.new_block_ids
        start = message.num_computed_tokens if order.num_pushed < 0 else order.num_pushed
        end = min(share.start + share.num_tokens, len(message.token_ids))
        if message.push is None or end <= start or order.is_lost:
            return
        blocks = range(start // size, -(-end // size))
        order.num_pushed = end
        move = Move(
            request_id,
            order.consumer.introduction.ranks,
            [order.table[i] for i in blocks],
            [message.push[i] for i in blocks],
            is_last=end == len(message.token_ids),
        )
        self.books.metadata.pushes.append(move)
        self.books.under_way.add(request_id)

    def finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ends: see `KVConnectorScheduler.request_finished`."""
        request_id = request.request_id
        # One that was preempted while its token was on its way ends without blocks.
        is_complete = request.finish_reason in ("stop", "length") and bool(block_ids)
        if (order := self.orders.pop(request_id, None)) is not None:
            return self._order_finished(order, request, block_ids, is_complete), None
        params = TransferParams.of(request)
        if params is None or not params.do_remote_decode or not is_complete:
            return False, None
        blocks, (host, port) = self._prompt_blocks(request, block_ids), self.address
        self.leases.grant(request_id, self.lease_seconds, seal(request.token_ids[: request.num_prompt_tokens], blocks))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._introduction.engine_id,
            "remote_request_id": request_id,
            "remote_block_ids": blocks,
            "remote_host": host,
            "remote_port": port,
            "remote_num_tokens": request.num_prompt_tokens,
            "tp_size": self.config.tensor_parallel_size,
        }

    def _prompt_blocks(self, request: Request, block_ids: Sequence[int]) -> list[int]:
        return list(block_ids[: -(-request.num_prompt_tokens // self.config.block_size)])

    def _order_finished(self, order: Order, request: Request, block_ids: Sequence[int], is_complete: bool) -> bool:
        """Answer the consumer; returns whether the blocks have to be held."""
        request_id = request.request_id
        if not is_complete:
            order.consumer.tell(Prefilled(request_id, error="the producer has given it up"))
            if order.is_pushing:
                self.books.metadata.cancels.append(request_id)
            return order.is_pushing
        if order.message.push is None:
            self.leases.grant_to(request_id, order.consumer.connection)
            if order.consumer.is_gone:  # before the lease was in the book
                self.leases.drop(order.consumer.connection)
            order.consumer.tell(Prefilled(request_id, self._prompt_blocks(request, block_ids)))
        return True

    def forget(self) -> None:
        """A step broke off: nothing that was ordered comes, and nobody reads any more."""
        for request_id, order in self.orders.items():
            order.consumer.tell(Prefilled(request_id, error="a step of the producer broke off"))
        self.orders.clear()
        self.leases.clear()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
