"""KV transfer, the scheduler's half: updates requests and blocks when transfers begin and end.

KV from another engine or a store raises `num_computed_tokens`, like a prefix-cache hit. While it is
in flight, the request has blocks but computes nothing (`WAITING_FOR_REMOTE_KVS`). When it has
arrived, the request runs as if it had computed these tokens itself. If a peer needs the KV of a
finished request, the scheduler holds the request's blocks until the peer has read them.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.outputs import EngineStats, KVConnectorOutput
from nanovllm.data.request import EngineOutput
from nanovllm.kv_transfer.aggregator import OutputAggregator
from nanovllm.kv_transfer.connector import KV_TRANSFER, KVConnectorScheduler


class KVTransfer(SchedulerHooks):
    """Connects the scheduler to a KV connector.

    Attributes:
        num_queried_tokens, num_hit_tokens: tokens whose KV was to come from outside, and those
            whose KV has arrived.
        receiving: requests that wait for KV which is in flight.
    """

    def __init__(
        self, connector: KVConnectorScheduler, queues: Queues, manager: KVCacheManager
    ) -> None:
        self.connector = connector
        self.queues = queues
        self.manager = manager
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.receiving = queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
        self._together = OutputAggregator()

    # ---------------------------------------------------------------- KV from elsewhere

    def admit(self, request: Request, computed_blocks: Sequence[int]) -> str | None:
        """Have the connector load what it offers, into blocks for all of it; nothing if the hidden
        states of the whole prompt are needed, for its log-probabilities."""
        if request.sampling_params.prompt_logprobs is not None:
            return None
        known = request.num_computed_tokens
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request, known)
        if num_tokens == 0:
            return None
        table = self.manager.allocate_slots(request, known + num_tokens, computed_blocks)
        if table is None:
            return "kv blocks"
        self.queues.move(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
        request.num_external_tokens = num_tokens
        self.num_queried_tokens += num_tokens
        self.connector.update_state_after_alloc(request, table, num_tokens)
        return ""

    def keeps_blocks(self, request: Request) -> bool:
        """Whether a peer reads the blocks of a request that ends, or a transfer writes to them."""
        table = self.manager.tables.get(request.request_id, [])
        is_read, request.remote_kv = self.connector.request_finished(request, table)
        return is_read or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def choose_victim(
        self, request: Request, num_tokens: int, running: list[Request]
    ) -> Request | None:
        """See `KVConnectorScheduler.choose_victim`."""
        return self.connector.choose_victim(request, num_tokens, running, self.manager)

    def forget_requests(self) -> None:
        """Drop all requests after a failed step, and what some ranks have reported of them."""
        self.connector.forget_requests()
        self._together = OutputAggregator()

    # ---------------------------------------------------------------- every step

    def planned(self, plan: SchedulerOutput) -> None:
        """Tell the ranks what to load and to save."""
        metadata = self.connector.build_connector_meta(plan, self.manager.tables)
        if metadata is not None:
            plan.extras[KV_TRANSFER] = metadata
            plan.all_report = True

    def arrived(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take in what the ranks report."""
        if KV_TRANSFER in result.extras:
            reports = [extras[KV_TRANSFER] for extras in (result.extras, *result.others)]
            self.connector.update_connector_output(
                self._together.add(cast("list[KVConnectorOutput]", reports))
            )

    def sampled(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        result: ModelRunnerOutput,
        output: EngineOutput,
    ) -> None:
        """Tell the client of a request that has ended where its KV is."""
        if request.finish_reason is not None:
            output.kv_transfer_params = request.remote_kv

    def add_stats(self, stats: EngineStats) -> None:
        """Add the requests that wait for KV or hold it, and the tokens that were to come, and those
        that have arrived."""
        stats.num_receiving = len(self.receiving)
        stats.num_waiting += stats.num_receiving
        stats.num_held_requests = len(self.manager.held)
        stats.num_external_queried_tokens = self.num_queried_tokens
        stats.num_external_hit_tokens = self.num_hit_tokens

    # ---------------------------------------------------------------- when transfers end

    @property
    def holds_blocks(self) -> bool:
        """Whether a transfer fills the blocks of a waiting request, or reads those of an ended
        one."""
        return bool(self.receiving or self.manager.held)

    def take_over(self, request: Request, invalid_block_ids: set[int]) -> None:
        """Run a request with the KV that has arrived. `num_computed_tokens` rises, but never falls,
        to

            min(num_valid_tokens, num_computed_tokens + num_external_tokens, num_tokens - 1)

        `num_valid_tokens` is the size of the blocks in its table (`manager.tables`) before the
        first one in `invalid_block_ids`. The last token is always computed here, to get its logits.

        Add the increase to `num_hit_tokens`, cache the full blocks (`manager.cache_blocks(request,
        num_computed_tokens before)`), and move the request to RUNNING (`queues.move`)."""
        table = self.manager.tables[request.request_id]
        size = self.manager.block_size
        num_valid = next(
            (i for i, block_id in enumerate(table) if block_id in invalid_block_ids), len(table)
        )
        before = request.num_computed_tokens
        there = min(num_valid * size, before + request.num_external_tokens, request.num_tokens - 1)
        request.num_computed_tokens = max(before, there)
        self.num_hit_tokens += request.num_computed_tokens - before
        self.manager.cache_blocks(request, before)
        self.queues.move(request, RequestStatus.RUNNING)

    def update_from_transfers(
        self, ended: KVConnectorOutput, scheduler: Scheduler
    ) -> list[EngineOutput]:
        """Handle transfers that have ended: free held blocks, and run requests whose KV has
        arrived.

        Returns:
            The outputs of requests that fail because their KV did not arrive.
        """
        for name in sorted(ended.finished_sending | ended.finished_recving):
            if name in self.manager.held:
                self.manager.let_go(name)
            elif name in ended.finished_recving:
                invalid = ended.invalid_block_ids.get(name, set())
                self.take_over(self.queues.requests[name], invalid)
        failed = []
        for name in sorted(ended.reasons.keys() & self.queues.requests.keys()):
            scheduler.finish(self.queues.requests[name], "error")
            error = f"the KV from another engine or store did not arrive: {ended.reasons[name]}"
            failed.append(EngineOutput(name, finish_reason="error", error=error))
        return failed
