"""The side of an engine that takes KV from others: whom it has asked for what, and how far that has come.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import Request
from nanovllm.kv_transfer.pd.control import (
    Cancel,
    Claim,
    Introduction,
    Mailbox,
    Prefill,
    Prefilled,
    Producer,
    Release,
    Released,
    seal,
)
from nanovllm.kv_transfer.pd.plan import Books, Move, TransferParams

logger = logging.getLogger(__name__)

# Seconds after which a consumer gives up what has not come.
PREFILL_TIMEOUT = 120.0
# And after how many more, without progress or after it was told to stop, what is being moved.
TRANSFER_TIMEOUT = 30.0


@dataclass
class Fetch:
    """A request of this engine whose KV comes from another one.

    Attributes:
        remote_id: what the producer calls it.
        stage: "asked" (nothing touches our blocks), "moving" (our ranks are told), "confirming" (all is here, and the producer
            has to say that it was right to the end).
        error: why what comes is of no use any more.
    """

    request_id: str
    transfer_id: str
    producer: Producer
    remote_id: str
    local_block_ids: list[int]
    num_local_blocks: int
    remote_block_ids: list[int]
    is_push: bool
    deadline: float
    order: Prefill | None = None
    stage: str = "asked"
    error: str = ""


class ConsumerSide:
    """The requests of this engine whose KV comes from another one.

    Args:
        books: shared with the engine's other side.
        mailbox: gets pairs of a `Producer` and what it says; None at its end.
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
        self.prefill_timeout = float(kv_transfer.extra("prefill_timeout", PREFILL_TIMEOUT))
        self.timeout = float(kv_transfer.extra("timeout", TRANSFER_TIMEOUT))
        # The last block of a prompt is never taken from the cache whole: fetching it alone saves nothing.
        self.min_remote_tokens = kv_transfer.extra("min_remote_tokens", config.block_size + 1)
        self._introduction, self._mailbox = introduction, mailbox
        self._producers: dict[tuple[str, int], Producer] = {}
        self.own_address: tuple[str, int] | None = None  # where this engine can be asked, if it is a producer, too
        self.fetches: dict[str, Fetch] = {}  # by request id
        self._moving: dict[str, Fetch] = {}  # by transfer id, also those of which the request waits no longer
        self._numbers = itertools.count()

    def num_offered(self, request: Request, num_computed_tokens: int) -> int:
        """All the rest of the prompt, if another engine has it or can be asked for it."""
        params = TransferParams.of(request)
        if params is None or not params.do_remote_prefill:
            return 0
        missing = request.num_prompt_tokens - num_computed_tokens
        is_known = bool(self._others(params))
        if params.is_prefill_first:
            num_blocks = -(-request.num_prompt_tokens // self.config.block_size)
            is_known = len(params.remote_block_ids or ()) == num_blocks
        if is_known and missing >= self.min_remote_tokens:
            return missing
        self._decline(request)
        return 0

    def _others(self, params: TransferParams) -> list[tuple[str, int]]:
        """Whom one could ask: not oneself."""
        return [address for address in params.prefill_addresses if address != self.own_address]

    def _decline(self, request: Request) -> None:
        """If a producer holds KV for this request, it need not any longer."""
        params = TransferParams.of(request)
        if params is not None and params.do_remote_prefill and params.is_prefill_first:
            self._settle(request)
            producer = self._producer((str(params.remote_host), int(params.remote_port or 0)))
            self._claim(producer, params, request)
            producer.tell(Release(str(params.remote_request_id)))

    def _settle(self, request: Request) -> None:
        """What has been tried once is not tried again, should the request lose its blocks."""
        request.kv_transfer_params = (request.kv_transfer_params or {}) | {"do_remote_prefill": False}

    def _claim(self, producer: Producer, params: TransferParams, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        producer.tell(Claim(str(params.remote_request_id), seal(prompt, params.remote_block_ids or ())))

    def ask(self, request: Request, block_ids: Sequence[int]) -> None:
        """Ask the producer."""
        params = TransferParams.of(request)
        assert params is not None, "nothing was offered"
        self._settle(request)
        number = next(self._numbers)
        transfer_id = f"{self._introduction.engine_id}-{request.request_id}-{number}"
        if params.is_prefill_first:
            address = str(params.remote_host), int(params.remote_port or 0)
        else:
            others = self._others(params)
            address = others[number % len(others)]
        producer = self._producer(address)
        fetch = Fetch(
            request.request_id,
            transfer_id,
            producer,
            params.remote_request_id or transfer_id,
            list(block_ids),
            request.num_computed_tokens // self.config.block_size,
            list(params.remote_block_ids or ()),
            is_push=not params.is_prefill_first and params.kv_direction == "push",
            deadline=time.monotonic() + self.prefill_timeout,
        )
        self.fetches[request.request_id] = fetch
        if params.is_prefill_first:
            self._claim(producer, params, request)
        else:
            fetch.order = Prefill(
                transfer_id,
                request.token_ids[: request.num_prompt_tokens],
                request.num_computed_tokens,
                request.cache_salt,
                request.order[0],
                fetch.local_block_ids if fetch.is_push else None,
            )
            producer.tell(fetch.order)
        if producer.introduction is not None:
            self._introduced(fetch)

    def _producer(self, address: tuple[str, int]) -> Producer:
        known = self._producers.get(address)
        if known is None or known.error:
            self._producers = {key: one for key, one in self._producers.items() if not one.error}
            known = Producer(*address, self.identity, self._introduction, lambda *mail: self._mailbox.put(mail))
            self._producers[address] = known
        return known

    def _introduced(self, fetch: Fetch) -> None:
        """The producer's ranks are known now."""
        if fetch.order is None:
            self._begin(fetch, self.books.metadata.reads)
        elif fetch.is_push:
            self._begin(fetch, self.books.metadata.expects)

    def _begin(self, fetch: Fetch, moves: list[Move]) -> None:
        assert fetch.producer.introduction is not None
        first, fetch.stage = fetch.num_local_blocks, "moving"
        fetch.deadline = time.monotonic() + self.prefill_timeout + self.timeout
        self._moving[fetch.transfer_id] = fetch
        self.books.under_way.add(fetch.transfer_id)
        local = fetch.local_block_ids[first:]
        remote = fetch.remote_block_ids[first : first + len(local)]
        moves.append(Move(fetch.transfer_id, fetch.producer.introduction.ranks, local, remote))

    def hear(self, producer: Producer, message: Any) -> None:
        """Take in what a producer says; None: it is lost."""
        own = [fetch for fetch in self.fetches.values() if fetch.producer is producer]
        if message is None:
            for fetch in own:
                self._lose(fetch, producer.error)
        elif isinstance(message, Introduction):
            for fetch in own:
                if fetch.stage == "asked":
                    self._introduced(fetch)
        elif isinstance(message, Released):
            for fetch in own:
                if fetch.remote_id == message.request_id and fetch.stage == "confirming":
                    self._end(fetch, "" if message.was_held else "the producer did not hold the blocks for so long")
        else:
            for fetch in own:
                if fetch.transfer_id == message.transfer_id:
                    self._prefilled(fetch, message)

    def _prefilled(self, fetch: Fetch, message: Prefilled) -> None:
        blocks = -(-len(fetch.order.token_ids) // self.config.block_size) if fetch.order is not None else 0
        error = message.error
        if not error and not fetch.is_push and len(message.block_ids) != blocks:
            error = f"the producer names {len(message.block_ids)} blocks for {blocks}"
        if error:
            self._lose(fetch, error)
        elif fetch.stage == "asked" and not fetch.is_push:
            fetch.remote_block_ids = message.block_ids
            self._begin(fetch, self.books.metadata.reads)

    def _lose(self, fetch: Fetch, error: str) -> None:
        """What comes for a request, if anything still does, is of no use."""
        fetch.error = fetch.error or error
        if fetch.stage == "moving":
            self.books.metadata.cancels.append(fetch.transfer_id)  # its end is still to come
            fetch.deadline = min(fetch.deadline, time.monotonic() + self.timeout)
        else:
            self._renounce(fetch)
            self._end(fetch, fetch.error)

    def _renounce(self, fetch: Fetch) -> None:
        """The producer need neither compute nor hold anything for this any longer."""
        is_order = fetch.order is not None
        fetch.producer.tell(Cancel(fetch.transfer_id) if is_order else Release(fetch.remote_id))

    def _end(self, fetch: Fetch, error: str) -> None:
        """Nobody touches the request's blocks any more."""
        del self.fetches[fetch.request_id]
        self.books.output.finished_recving.add(fetch.request_id)
        if error:
            blocks = set(fetch.local_block_ids[fetch.num_local_blocks :])
            self.books.output.invalid_block_ids[fetch.request_id] = blocks
            self.books.output.reasons[fetch.request_id] = error
            logger.warning("the KV of %s did not come: %s", fetch.request_id, error)

    def received(self, output: KVConnectorOutput) -> None:
        """What the ranks say of the transfers that have come to an end."""
        for transfer_id in output.finished_recving:
            fetch = self._moving.pop(transfer_id, None)
            if fetch is None or self.fetches.get(fetch.request_id) is not fetch:
                self.books.output.finished_recving.add(transfer_id)  # under which the blocks are held
                continue
            incomplete = "some blocks did not come" if transfer_id in output.invalid_block_ids else ""
            error = fetch.error or output.reasons.get(transfer_id, "") or incomplete
            if error:
                self._renounce(fetch)
                self._end(fetch, error)
            elif fetch.is_push:
                self._end(fetch, "")
            else:
                fetch.producer.tell(Release(fetch.remote_id))
                fetch.stage, fetch.deadline = "confirming", time.monotonic() + self.prefill_timeout

    def stop(self, request: Request) -> bool:
        """A request ends. Returns whether its KV was on its way: its blocks must be held until that has ended."""
        fetch = self.fetches.get(request.request_id)
        if fetch is None:
            self._decline(request)
            return False
        self._lose(fetch, "the request has ended")
        return True

    def give_up(self, request: Request) -> None:
        """See `KVConnectorScheduler.give_up`."""
        if (fetch := self.fetches.get(request.request_id)) is not None:
            self._lose(fetch, "it waits for an engine that may wait for this one")

    def look_at_clock(self) -> None:
        """Give up those that have waited for too long."""
        now = time.monotonic()
        for fetch in [f for f in self.fetches.values() if f.deadline < now]:
            if fetch.stage == "moving":
                self._leave_behind(fetch)
            else:
                self._lose(fetch, f"nothing came for {self.prefill_timeout:g} seconds")

    def _leave_behind(self, fetch: Fetch) -> None:
        """A transfer does not end, not even when it is told to: a producer that has been stopped may still write to our memory
        when it goes on. So the blocks stay as they are until then, and the request goes on without them."""
        logger.warning("the KV of %s does not come to an end: its blocks are left to it", fetch.request_id)
        self.books.metadata.cancels.append(fetch.transfer_id)
        self._renounce(fetch)
        del self.fetches[fetch.request_id]
        self.books.output.abandoned[fetch.request_id] = fetch.transfer_id
        self.books.output.reasons[fetch.request_id] = fetch.error or "the transfer does not come to an end"

    def forget(self) -> None:
        """A step broke off, and the ranks have stopped all transfers."""
        for fetch in self.fetches.values():
            self._renounce(fetch)
        self.fetches.clear()
        self._moving.clear()

    def close(self) -> None:
        """End all connections."""
        for producer in self._producers.values():
            producer.close()
