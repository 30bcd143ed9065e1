"""KV transfer, the half of the engine's loop: what an engine does for those that share its KV."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from nanovllm.core.peers import Peers
from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.request import EngineOutput
from nanovllm.kv_transfer.connector import KV_TRANSFER
from nanovllm.processes.activity import IDLE_SECONDS, waiting_for_others

if TYPE_CHECKING:
    from nanovllm.core.engine import EngineCore
    from nanovllm.executor.base import Executor
    from nanovllm.kv_transfer.scheduling import KVTransfer

# Seconds that an engine sleeps while it only waits for KV transfers, before it checks their
# timeouts. Its ranks notify it when a transfer ends.
PATIENT_SECONDS = 0.25


class TransferPeers(Peers):
    """Connects the engine's loop to a KV connector.

    Args:
        transfer: the scheduler's half.
        executor: runs the ranks, whose halves of the connector move the KV.
    """

    def __init__(self, transfer: KVTransfer, executor: Executor) -> None:
        self.transfer = transfer
        self.connector = transfer.connector
        self.executor = executor

    # ---------------------------------------------------------------- work and rest

    def has_work(self, has_unfinished: bool) -> bool:
        """Whether there are requests or transfers."""
        return has_unfinished or self.connector.has_work

    @property
    def may_free_blocks(self) -> bool:  # type: ignore[override]
        """Whether a transfer is in flight, or has ended and was not handled yet."""
        return self.transfer.holds_blocks or self.connector.has_news

    @property
    def is_quiet(self) -> bool:  # type: ignore[override]
        """Whether no transfer has ended that the engine does not know of."""
        return not (self.executor.transfer_has_ended or self.connector.has_news)

    @property
    def sources(self) -> Sequence[object]:  # type: ignore[override]
        """See `KVConnectorScheduler`."""
        return self.connector.sources

    def idle_seconds(self, has_work: bool) -> float | None:
        """Return how long the engine may sleep: with transfers in flight, until it has to check
        their timeouts."""
        return PATIENT_SECONDS if has_work else self.connector.idle_seconds

    # ---------------------------------------------------------------- requests

    def check_request(self, request: Request) -> None:
        """See `KVConnectorScheduler`."""
        self.connector.check_request(request)

    def decline(self, request: Request, reason: str) -> None:
        """See `KVConnectorScheduler`."""
        self.connector.decline(request, reason)

    def revoke(self, request_id: str) -> None:
        """See `KVConnectorScheduler`."""
        self.connector.revoke(request_id)

    # ---------------------------------------------------------------- every step

    def take(self, engine: EngineCore) -> list[EngineOutput]:
        """Handle what the connector has received: requests of other engines, and the ends of
        transfers."""
        received = self.connector.take_output()
        for request in received.requests:
            with suppress(ValueError):  # the connector has told the other engine
                engine.add_request(request)
        for request_id in received.aborts:
            engine.abort_request(request_id)
        if received.finished_sending or received.finished_recving:
            engine.recorder.transfers_ended(received)
        failed = self.transfer.update_from_transfers(received, engine.scheduler)
        for output in failed:
            engine.recorder.ended(output.request_id, "error")
        return failed

    def must_run(self, plan: SchedulerOutput) -> bool:
        """Whether the ranks have something to load or to save."""
        return KV_TRANSFER in plan.extras

    def wait(self) -> None:
        """Wait for a moment, if a transfer may end."""
        if self.may_free_blocks:
            self.rest()  # the ranks have no transfer in flight
            with waiting_for_others():
                time.sleep(IDLE_SECONDS)

    def rest(self) -> None:
        """Drop notifications of the ranks: no transfer is in flight."""
        self.executor.forget_ends()

    # ---------------------------------------------------------------- the end

    def forget_requests(self) -> None:
        """See `KVTransfer`."""
        self.transfer.forget_requests()

    def close(self) -> None:
        """See `KVConnectorScheduler`."""
        self.connector.close()
