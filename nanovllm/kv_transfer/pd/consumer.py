"""Fetches KV from other engines: the fetches of this engine, and their stages.

Read in notebooks/31_pd_disaggregation.ipynb.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.core.request import Request
from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.pd.control import (
    Claim,
    Prefill,
    Prefilled,
    Producer,
    Ranks,
    Release,
    Released,
    Side,
    seal,
)
from nanovllm.kv_transfer.pd.plan import Move, TransferParams

logger = logging.getLogger(__name__)

# Seconds after which a consumer gives up a fetch whose transfer has not begun.
PREFILL_TIMEOUT = 120.0
# Additional seconds for a fetch whose transfer has begun.
TRANSFER_TIMEOUT = 30.0

# The states of a fetch: stage, event -> next stage.
NEXT_STAGE = {
    # The producer's ranks are known and, for a read, its blocks.
    ("asked", "ready"): "moving",
    ("asked", "error"): "over",
    # Reports of the ranks: all blocks were read; all pushes have arrived; the transfer has failed.
    ("moving", "read"): "confirming",
    ("moving", "pushed"): "over",
    ("moving", "broken"): "over",
    ("moving", "error"): "stopping",
    ("stopping", "error"): "stopping",
    ("stopping", "broken"): "over",
    ("confirming", "confirmed"): "over",  # the producer held the blocks until they were read
    ("confirming", "error"): "over",
}


@dataclass
class Fetch:
    """The transfer of a request's KV from another engine.

    Attributes:
        remote_id: the id of the request, or of the order, at the producer.
        local_block_ids, remote_block_ids: the blocks to fill, and the producer's blocks to read;
            the latter stay empty for pushes.
        order: what the producer is to compute; None if the producer had computed the KV before.
        deadline: end of the current stage, in seconds of the monotonic clock.
        error: why the KV cannot be used; empty without an error.
        is_given_up: this engine computes the prompt itself, even with the policy "fail".
    """

    request_id: str
    transfer_id: str
    producer: Producer
    remote_id: str
    local_block_ids: list[int]
    remote_block_ids: list[int]
    deadline: float = 0.0
    order: Prefill | None = None
    stage: str = "asked"
    error: str = ""
    is_given_up: bool = False

    @property
    def is_push(self) -> bool:
        """True if the producer pushes; False if this engine reads."""
        return self.order is not None and self.order.push is not None


class ConsumerSide(Side):
    """The requests whose KV this engine fetches from others.

    Attributes:
        fetches: the fetches that have not ended, by transfer id.
    """

    def __init__(self, config: EngineConfig, identity: dict[str, str | int], ranks: Ranks) -> None:
        super().__init__(config, identity, ranks)
        self._block_size = self.config.block_size
        extra = self.kv_transfer.extra
        self.prefill_timeout = float(extra("prefill_timeout", PREFILL_TIMEOUT))
        self.timeout = float(extra("timeout", TRANSFER_TIMEOUT))
        # This engine always computes the prompt's last token itself. To fetch only the block of
        # this token would save little.
        self.min_remote_tokens = extra("min_remote_tokens", self._block_size + 1)
        self._producers: dict[tuple[str, int], Producer] = {}
        self.fetches: dict[str, Fetch] = {}
        self._numbers = itertools.count()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens of the prompt to fetch, and True: the request waits for them.

        `missing` is the number of prompt tokens after the first `num_computed_tokens`.

            0                            without `do_remote_prefill` (see `TransferParams.of`)
            missing                      if another engine has the prompt, and
                                         missing >= `min_remote_tokens`
            0, after `_decline(request)` otherwise

        Another engine has the prompt if `is_prefill_first` and the remote block table has as many
        blocks as the prompt needs; or, with decode first, if there is a producer (`_others`)."""
        params = TransferParams.of(request)
        if not params.do_remote_prefill:
            return 0, True
        missing = request.num_prompt_tokens - num_computed_tokens
        is_known = bool(self._others(params))
        if params.is_prefill_first:
            is_known = len(params.remote_block_ids or ()) == -(
                -request.num_prompt_tokens // self._block_size
            )
        if is_known and missing >= self.min_remote_tokens:
            return missing, True
        self._decline(request)
        return 0, True

    def _others(self, params: TransferParams) -> list[tuple[str, int]]:
        """Return the addresses of the producers, without this engine's own."""
        return [address for address in params.prefill_addresses if address != self.address]

    def _decline(self, request: Request) -> None:
        """Release the KV that a producer may hold for this request."""
        params = TransferParams.of(request)
        if params.is_prefill_first:
            self._settle(request)
            self._claim(params, request).tell(Release(str(params.remote_request_id)))

    def _settle(self, request: Request) -> None:
        """Clear `do_remote_prefill`, so that the request is computed here if it is preempted and
        admitted again."""
        request.kv_transfer_params = (request.kv_transfer_params or {}) | {
            "do_remote_prefill": False
        }

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Request the KV from a producer, or claim the blocks of the one that has it."""
        params = TransferParams.of(request)
        self._settle(request)
        number = next(self._numbers)
        transfer_id = f"{self.kv_transfer.engine_id}-{request.request_id}-{number}"
        first = request.num_computed_tokens // self._block_size
        order = None
        if params.is_prefill_first:
            producer = self._claim(params, request)
        else:
            others = self._others(params)
            producer = self._producer(others[number % len(others)])
            prompt = request.token_ids[: request.num_prompt_tokens]
            push = params.kv_direction == "push"
            order = Prefill(
                transfer_id,
                prompt,
                request.num_computed_tokens,
                request.cache_salt,
                request.order[0],
            )
            order.push = list(block_ids) if push else None
            producer.tell(order)
        remote_id = params.remote_request_id or transfer_id
        remote_block_ids = (params.remote_block_ids or [])[first:]
        fetch = Fetch(
            request_id=request.request_id,
            transfer_id=transfer_id,
            producer=producer,
            remote_id=remote_id,
            local_block_ids=list(block_ids[first:]),
            remote_block_ids=remote_block_ids,
            deadline=time.monotonic() + self.prefill_timeout,
            order=order,
        )
        self.fetches[transfer_id] = fetch
        self._move_if_ready(fetch)

    def _claim(self, params: TransferParams, request: Request) -> Producer:
        """Tell a producer that this engine is about to read the blocks that it holds."""
        producer = self._producer((str(params.remote_host), int(params.remote_port or 0)))
        prompt = request.token_ids[: request.num_prompt_tokens]
        producer.tell(
            Claim(str(params.remote_request_id), seal(prompt, params.remote_block_ids or ()))
        )
        return producer

    def _producer(self, address: tuple[str, int]) -> Producer:
        if address not in self._producers or self._producers[address].error:
            self._producers = {key: one for key, one in self._producers.items() if not one.error}
            self._producers[address] = Producer(address, self.credentials, self.mailbox)
        return self._producers[address]

    def _happens(self, fetch: Fetch, event: str, error: str = "") -> None:
        """Move a fetch to its next stage (`NEXT_STAGE`)."""
        fetch.error = fetch.error or error
        fetch.stage = NEXT_STAGE[fetch.stage, event]
        now = time.monotonic()
        if fetch.stage == "moving":
            assert fetch.producer.ranks is not None, "it is ready"
            local = fetch.local_block_ids
            move = Move(
                fetch.transfer_id, fetch.producer.ranks, local, fetch.remote_block_ids[: len(local)]
            )
            (self.metadata.expects if fetch.is_push else self.metadata.reads).append(move)
            self._in_flight.add(fetch.transfer_id)
            fetch.deadline = now + self.prefill_timeout + self.timeout
        elif fetch.stage == "stopping":
            self.metadata.cancels.append(fetch.transfer_id)
            fetch.deadline = float("inf")
        elif fetch.stage == "confirming":
            fetch.producer.tell(Release(fetch.remote_id))
            fetch.deadline = now + self.prefill_timeout
        else:
            self._end(fetch)

    def _move_if_ready(self, fetch: Fetch) -> None:
        """Begin the transfer once the producer's ranks are known and, for a read, its blocks."""
        if (
            fetch.stage == "asked"
            and fetch.producer.ranks is not None
            and (fetch.is_push or fetch.remote_block_ids)
        ):
            self._happens(fetch, "ready")

    def hear_producer(
        self, producer: Producer, message: Ranks | Prefilled | Released | None
    ) -> None:
        """Act on a producer's message; None: the connection is lost."""
        if isinstance(message, list):
            producer.ranks = message
        for fetch in [f for f in self.fetches.values() if f.producer is producer]:
            if message is None:
                self._happens(fetch, "error", producer.error)
            elif isinstance(message, Prefilled) and message.transfer_id == fetch.transfer_id:
                self._prefilled(fetch, message)
            elif isinstance(message, Released) and (message.request_id, fetch.stage) == (
                fetch.remote_id,
                "confirming",
            ):
                error = "" if message.was_held else "the producer no longer reserved the blocks"
                self._happens(fetch, "error" if error else "confirmed", error)
            self._move_if_ready(fetch)

    def _prefilled(self, fetch: Fetch, message: Prefilled) -> None:
        assert fetch.order is not None, "only an order has this id"
        num_blocks = -(-len(fetch.order.token_ids) // self._block_size)
        error = message.error
        if not error and not fetch.is_push and len(message.block_ids) != num_blocks:
            error = (
                f"the producer sent {len(message.block_ids)} block ids, but {num_blocks} are needed"
            )
        if error:
            self._happens(fetch, "error", error)
        elif fetch.stage == "asked":
            fetch.remote_block_ids = message.block_ids[num_blocks - len(fetch.local_block_ids) :]

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `KVConnectorScheduler.update_connector_output`."""
        received = output.finished_sending & self.fetches.keys()
        self._in_flight -= received
        super().update_connector_output(KVConnectorOutput(output.finished_sending - received))
        for transfer_id in received:
            self._received(self.fetches[transfer_id], output.reasons.get(transfer_id, ""))

    def _received(self, fetch: Fetch, error: str) -> None:
        """Record that all ranks have ended a transfer."""
        error = fetch.error or error
        success = "pushed" if fetch.is_push else "read"
        self._happens(fetch, "broken" if error else success, error)

    def take_output(self) -> KVConnectorOutput:
        """See `KVConnectorScheduler.take_output`. First give up fetches after their deadline."""
        now = time.monotonic()
        for fetch in [f for f in self.fetches.values() if f.deadline < now]:
            self._happens(fetch, "error", f"no KV arrived for {self.prefill_timeout:g} seconds")
        return super().take_output()

    def _end(self, fetch: Fetch) -> None:
        """Tell the scheduler that a fetch is over."""
        del self.fetches[fetch.transfer_id]
        self._output.finished_recving.add(fetch.request_id)
        if fetch.error:
            # The producer can drop the order, or free the blocks.
            fetch.producer.tell(Release(fetch.remote_id))
            self._output.invalid_block_ids[fetch.request_id] = set(fetch.local_block_ids)
            if not fetch.is_given_up:
                self._output.reasons[fetch.request_id] = fetch.error
            logger.warning("the KV of %s did not arrive: %s", fetch.request_id, fetch.error)

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """Hold the blocks of a request whose fetch has not ended, and stop this fetch."""
        for fetch in self._fetches_of(request):
            self._happens(fetch, "error", "the request has ended")
            return True, None
        self._decline(request)
        return super().request_finished(request, block_ids)

    def _fetches_of(self, request: Request) -> list[Fetch]:
        return [fetch for fetch in self.fetches.values() if fetch.request_id == request.request_id]

    def give_up_youngest(self) -> None:
        """Stop the youngest fetch, so that this engine computes its prompt."""
        for fetch in reversed(self.fetches.values()):
            if fetch.stage != "stopping":
                fetch.is_given_up = True
                return self._happens(
                    fetch, "error", "it depends on an engine that may depend on this one"
                )

    def forget_requests(self) -> None:
        """Drop all fetches after a failed step. The ranks have stopped their transfers."""
        super().forget_requests()
        for fetch in self.fetches.values():
            fetch.producer.tell(Release(fetch.remote_id))
        self.fetches.clear()

    def close(self) -> None:
        """See `KVConnectorScheduler.close`."""
        for producer in self._producers.values():
            producer.close()
        super().close()
