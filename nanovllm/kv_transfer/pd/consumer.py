"""The side of an engine that takes KV from others: what it has asked for, and how far that has come.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import Request
from nanovllm.kv_transfer.pd.control import (
    Cancel,
    Claim,
    Introduction,
    Prefill,
    Prefilled,
    Producer,
    Release,
    Released,
    seal,
)
from nanovllm.kv_transfer.pd.plan import Books, Move, TransferParams

logger = logging.getLogger(__name__)

# Seconds after which a consumer gives up a fetch for which nothing has moved.
PREFILL_TIMEOUT = 120.0
# And how many more until it gives up one that moves without progress, or that was told to stop.
TRANSFER_TIMEOUT = 30.0

# The life of a fetch: stage, event -> next stage.
NEXT_STAGE = {
    ("asked", "ready"): "moving",  # the producer's ranks are known and, to read, its blocks
    ("asked", "error"): "over",
    ("moving", "read"): "confirming",  # the ranks report: all is read
    ("moving", "written"): "over",  # the ranks report: all is written, by a producer that held its blocks
    ("moving", "broken"): "over",  # the ranks report: they have stopped before the end
    ("moving", "error"): "stopping",
    ("stopping", "error"): "stopping",
    ("stopping", "broken"): "over",
    ("confirming", "confirmed"): "over",  # the producer has held the blocks to the end
    ("confirming", "refuted"): "over",
    ("confirming", "error"): "over",
    # The transfer does not end even when it is told to: a producer that was stopped may write to our memory when it goes on. So
    # its blocks are left to it, and the request goes on without them.
    ("moving", "late"): "left",
    ("stopping", "late"): "left",
}


@dataclass
class Fetch:
    """A request of this engine whose KV comes from another one.

    Attributes:
        remote_id: the producer's name for it.
        local_block_ids, remote_block_ids: what is to be filled, and from what; the latter is known only for reads.
        order: what the producer was asked to compute; None if it has computed already.
        deadline: for the current stage.
        error: why what comes is of no use any more.
        is_given_up: this engine computes it instead, whatever the policy says of failures.
    """

    request_id: str
    transfer_id: str
    producer: Producer
    remote_id: str
    local_block_ids: list[int]
    remote_block_ids: list[int]
    deadline: float
    order: Prefill | None = None
    stage: str = "asked"
    error: str = ""
    is_given_up: bool = False

    @property
    def is_push(self) -> bool:
        """The producer writes."""
        return self.order is not None and self.order.push is not None


class ConsumerSide:
    """The requests of this engine whose KV comes from another one.

    Args:
        books: shared with the engine's other side.
        own_address: where this engine itself can be asked, if it is a producer, too.

    Attributes:
        fetches: by transfer id.
    """

    def __init__(self, books: Books, own_address: tuple[str, int] | None) -> None:
        self.books, self.own_address, self._block_size = books, own_address, books.config.block_size
        self.prefill_timeout = float(books.kv_transfer.extra("prefill_timeout", PREFILL_TIMEOUT))
        self.timeout = float(books.kv_transfer.extra("timeout", TRANSFER_TIMEOUT))
        # The last block of a prompt is never taken from the cache whole: fetching it alone saves nothing.
        self.min_remote_tokens = books.kv_transfer.extra("min_remote_tokens", self._block_size + 1)
        self._producers: dict[tuple[str, int], Producer] = {}
        self.fetches: dict[str, Fetch] = {}
        self._numbers = itertools.count()

    def num_offered(self, request: Request, num_computed_tokens: int) -> int:
        """All the rest of the prompt, if another engine has it or can be asked for it."""
        params = TransferParams.of(request)
        if params is None or not params.do_remote_prefill:
            return 0
        missing = request.num_prompt_tokens - num_computed_tokens
        is_known = bool(self._others(params))
        if params.is_prefill_first:
            is_known = len(params.remote_block_ids or ()) == -(-request.num_prompt_tokens // self._block_size)
        if is_known and missing >= self.min_remote_tokens:
            return missing
        self._decline(request)
        return 0

    def _others(self, params: TransferParams) -> list[tuple[str, int]]:
        """The producers that can be asked; not this engine itself."""
        return [address for address in params.prefill_addresses if address != self.own_address]

    def _decline(self, request: Request) -> None:
        """If a producer holds KV for this request, it need not any longer."""
        params = TransferParams.of(request)
        if params is not None and params.do_remote_prefill and params.is_prefill_first:
            self._settle(request)
            self._claim(params, request).tell(Release(str(params.remote_request_id)))

    def _settle(self, request: Request) -> None:
        """What has been tried once is not tried again, should the request lose its blocks."""
        request.kv_transfer_params = (request.kv_transfer_params or {}) | {"do_remote_prefill": False}

    def ask(self, request: Request, block_ids: Sequence[int]) -> None:
        """Ask the producer."""
        params = TransferParams.of(request)
        assert params is not None, "nothing was offered"
        self._settle(request)
        number = next(self._numbers)
        transfer_id = f"{self.books.introduction.engine_id}-{request.request_id}-{number}"
        first, order = request.num_computed_tokens // self._block_size, None
        if params.is_prefill_first:
            producer = self._claim(params, request)
        else:
            others = self._others(params)
            producer = self._producer(others[number % len(others)])
            order = Prefill(
                transfer_id,
                request.token_ids[: request.num_prompt_tokens],
                request.num_computed_tokens,
                request.cache_salt,
                request.order[0],
                list(block_ids) if params.kv_direction == "push" else None,
            )
            producer.tell(order)
        fetch = self.fetches[transfer_id] = Fetch(
            request.request_id,
            transfer_id,
            producer,
            params.remote_request_id or transfer_id,
            list(block_ids[first:]),
            (params.remote_block_ids or [])[first:],
            time.monotonic() + self.prefill_timeout,
            order,
        )
        if producer.introduction is not None:
            self._introduced(fetch)

    def _claim(self, params: TransferParams, request: Request) -> Producer:
        """Tell a producer that this engine is about to read the blocks that it holds."""
        producer = self._producer((str(params.remote_host), int(params.remote_port or 0)))
        prompt = request.token_ids[: request.num_prompt_tokens]
        producer.tell(Claim(str(params.remote_request_id), seal(prompt, params.remote_block_ids or ())))
        return producer

    def _producer(self, address: tuple[str, int]) -> Producer:
        known, books = self._producers.get(address), self.books
        if known is None or known.error:
            self._producers = {key: one for key, one in self._producers.items() if not one.error}
            known = Producer(*address, books.identity, books.introduction, lambda *mail: books.mailbox.put(mail))
            self._producers[address] = known
        return known

    def _happens(self, fetch: Fetch, event: str, error: str = "") -> None:
        """Take a fetch to its next stage."""
        fetch.error = fetch.error or error
        before, fetch.stage = fetch.stage, NEXT_STAGE[fetch.stage, event]
        if fetch.stage == before:
            return
        metadata, now = self.books.metadata, time.monotonic()
        if fetch.stage == "moving":
            assert fetch.producer.introduction is not None
            ranks, local = fetch.producer.introduction.ranks, fetch.local_block_ids
            move = Move(fetch.transfer_id, ranks, local, fetch.remote_block_ids[: len(local)])
            (metadata.expects if fetch.is_push else metadata.reads).append(move)
            self.books.in_flight.add(fetch.transfer_id)
            fetch.deadline = now + self.prefill_timeout + self.timeout
        elif fetch.stage == "stopping":
            metadata.cancels.append(fetch.transfer_id)
            fetch.deadline = min(fetch.deadline, now + self.timeout)
        elif fetch.stage == "confirming":
            fetch.producer.tell(Release(fetch.remote_id))
            fetch.deadline = now + self.prefill_timeout
        else:
            if event in ("error", "broken", "late"):
                self._renounce(fetch)
            self._end(fetch)

    def _renounce(self, fetch: Fetch) -> None:
        """The producer need neither compute nor hold anything for this fetch any longer."""
        fetch.producer.tell(Release(fetch.remote_id) if fetch.order is None else Cancel(fetch.transfer_id))

    def _end(self, fetch: Fetch) -> None:
        """Tell the scheduler that a fetch is over, or left."""
        request_id, output = fetch.request_id, self.books.output
        if fetch.stage == "left":
            fetch.error, fetch.deadline = fetch.error or "the transfer does not come to an end", float("inf")
            self.books.metadata.cancels.append(fetch.transfer_id)
            output.abandoned[request_id] = fetch.transfer_id
        else:
            del self.fetches[fetch.transfer_id]
            output.finished_recving.add(request_id)
        if fetch.error:
            output.invalid_block_ids[request_id] = set(fetch.local_block_ids)
            if not fetch.is_given_up:
                output.reasons[request_id] = fetch.error
            logger.warning("the KV of %s did not come: %s", request_id, fetch.error)

    def _introduced(self, fetch: Fetch) -> None:
        """The producer's ranks are known. An order whose KV will be read has to wait for the producer's blocks, too."""
        if fetch.order is None or fetch.is_push:
            self._happens(fetch, "ready")

    def hear(self, producer: Producer, message: Introduction | Prefilled | Released | None) -> None:
        """Act on a producer's message; None: the connection is lost."""
        for fetch in [f for f in self.fetches.values() if f.producer is producer and f.stage != "left"]:
            if message is None:
                self._happens(fetch, "error", producer.error)
            elif isinstance(message, Introduction):
                if fetch.stage == "asked":
                    self._introduced(fetch)
            elif isinstance(message, Prefilled):
                if fetch.transfer_id == message.transfer_id:
                    self._prefilled(fetch, message)
            elif fetch.remote_id == message.request_id and fetch.stage == "confirming":
                if message.was_held:
                    self._happens(fetch, "confirmed")
                else:
                    self._happens(fetch, "refuted", "the producer did not hold the blocks for so long")

    def _prefilled(self, fetch: Fetch, message: Prefilled) -> None:
        assert fetch.order is not None, "only an order has this id"
        num_blocks = -(-len(fetch.order.token_ids) // self._block_size)
        error = message.error
        if not error and not fetch.is_push and len(message.block_ids) != num_blocks:
            error = f"the producer names {len(message.block_ids)} blocks for {num_blocks}"
        if error:
            self._happens(fetch, "error", error)
        elif fetch.stage == "asked" and not fetch.is_push:
            fetch.remote_block_ids = message.block_ids[num_blocks - len(fetch.local_block_ids) :]
            self._happens(fetch, "ready")

    def received(self, output: KVConnectorOutput) -> None:
        """Act on transfers that all ranks have reported as ended."""
        for transfer_id in output.finished_recving:
            fetch = self.fetches.get(transfer_id)
            if fetch is None or fetch.stage == "left":
                self.fetches.pop(transfer_id, None)
                self.books.output.finished_recving.add(transfer_id)  # the name under which its blocks are held
                continue
            incomplete = "some blocks did not come" if transfer_id in output.invalid_block_ids else ""
            if error := fetch.error or output.reasons.get(transfer_id, "") or incomplete:
                self._happens(fetch, "broken", error)
            else:
                self._happens(fetch, "written" if fetch.is_push else "read")

    def stop(self, request: Request) -> bool:
        """A request ends. Returns whether its KV was in flight: its blocks must then be held until that has ended."""
        for fetch in list(self.fetches.values()):
            if fetch.request_id == request.request_id and fetch.stage != "left":
                self._happens(fetch, "error", "the request has ended")
                return True
        self._decline(request)
        return False

    def give_up_youngest(self) -> None:
        """Have this engine compute the prompt whose KV it has asked for last."""
        for fetch in reversed(self.fetches.values()):
            if fetch.stage in ("asked", "moving", "confirming"):
                fetch.is_given_up = True
                return self._happens(fetch, "error", "it waits for an engine that may wait for this one")

    def look_at_clock(self) -> None:
        """Give up fetches that have been in one stage for too long."""
        now = time.monotonic()
        for fetch in [f for f in self.fetches.values() if f.deadline < now]:
            if fetch.stage in ("moving", "stopping"):
                self._happens(fetch, "late")
            else:
                self._happens(fetch, "error", f"nothing came for {self.prefill_timeout:g} seconds")

    def forget(self) -> None:
        """A step broke off, and the ranks have stopped all transfers."""
        for fetch in self.fetches.values():
            self._renounce(fetch)
        self.fetches.clear()

    def close(self) -> None:
        """End all connections."""
        for producer in self._producers.values():
            producer.close()
