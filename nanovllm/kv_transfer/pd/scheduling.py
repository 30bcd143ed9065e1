"""The scheduler of an engine that shares KV with others: one queue more, and blocks that outlive their request.

KV that arrives from elsewhere is one more reason why `num_computed_tokens` is ahead. While it is on its way, the request has a
seat and blocks (`receiving`), and computes nothing; when it is there, the request runs, as if it had computed all of that
itself. And a request whose KV others want leaves its blocks behind when it ends, until they have read them.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import time
from collections import Counter

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import EngineOutput, Request, RequestStatus
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.kv import connector as base
from nanovllm.kv.connector import KVConnectorScheduler
from nanovllm.kv.manager import KVCacheManager
from nanovllm.scheduler.scheduler import Scheduler


class TransferScheduler(Scheduler):
    """A scheduler with a connector.

    Attributes:
        receiving: they hold blocks to which somebody else writes; nothing of that counts as computed yet.
        num_external_queried_tokens, num_external_hit_tokens: what the connector was asked for, and what it has brought.
    """

    def __init__(self, config: EngineConfig, manager: KVCacheManager, connector: KVConnectorScheduler) -> None:
        super().__init__(config, manager)
        self.connector = connector
        assert config.kv_transfer is not None
        self._fails = config.kv_transfer.kv_load_failure_policy == "fail"
        self.receiving: list[Request] = []
        self.num_external_queried_tokens = self.num_external_hit_tokens = 0
        self._news: list[EngineOutput] = []
        self._stuck_since = float("inf")
        self._given_up: set[str] = set()  # requests that compute what they were to fetch

    def add_request(self, request: Request) -> None:
        """See `Scheduler.add_request`. An id is in use also as long as its blocks are held."""
        if request.request_id in self.manager.held:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.connector.check_request(request)
        try:
            super().add_request(request)
        except ValueError:
            self.connector.decline(request)
            raise

    def abort_request(self, request_id: str) -> bool:
        """See `Scheduler.abort_request`. If the request has ended, its blocks are no longer held for an engine that has not claimed them."""
        self.connector.revoke(request_id)
        return Scheduler.abort_request(self, request_id)

    @property
    def waits_for_transfers(self) -> bool:  # type: ignore[override]
        """True if transfers hold blocks, which their end may free."""
        return bool(self.receiving or self.manager.held)

    @property
    def transfer_counts(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        """The last four numbers of `EngineStats`."""
        external = self.num_external_queried_tokens, self.num_external_hit_tokens
        return len(self.receiving), len(self.manager.held), *external

    # ---------------------------------------------------------------- KV comes

    @property
    def queues(self) -> dict[RequestStatus, list[Request]]:
        """Where a request stands, by its status."""
        return super().queues | {RequestStatus.RECEIVING: self.receiving}

    def _why_not(self, plan: SchedulerOutput) -> str:
        # Who receives has a seat already: it starts to run in the moment in which all is there.
        if len(self.running) + len(self.receiving) >= self.config.max_num_seqs:
            return "max_num_seqs"
        return Scheduler._why_not(self, plan)

    def _admit_waiting(self, request: Request, plan: SchedulerOutput) -> str:
        prefix = self.manager.get_computed_blocks(request)
        num_local = len(prefix) * self.manager.block_size
        wants_all_logits = request.sampling_params.prompt_logprobs is not None
        num_external = 0
        if not wants_all_logits:
            num_external, _ = self.connector.get_num_new_matched_tokens(request, num_local)
        if num_external == 0:
            return Scheduler._admit_waiting(self, request, plan)
        if self.manager.allocate_slots(request, num_local + num_external, prefix) is None:
            return "kv blocks"
        request.num_computed_tokens = num_local
        request.num_external_tokens = num_external
        self._move(request, RequestStatus.RECEIVING)
        self.connector.update_state_after_alloc(request, self.manager.tables[request.request_id], num_external)
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_local
        self.num_external_queried_tokens += num_external
        return ""

    def _arrived(self, request: Request, invalid: set[int], reason: str) -> None:
        """Nobody writes to the request's blocks any more. It goes on behind what is there; or it fails."""
        table, size = self.manager.tables[request.request_id], self.manager.block_size
        valid = next((i for i, block_id in enumerate(table) if block_id in invalid), len(table))
        self._move(request, RequestStatus.RUNNING)
        request.num_sent_tokens = 0
        if valid < len(table) and self._must_fail(request):
            return self._fail(request, reason)
        before = request.num_computed_tokens
        # The last token is never taken over: its logits are needed.
        there = min(valid * size, before + request.num_external_tokens, request.num_tokens - 1)
        request.num_computed_tokens = max(before, there)
        self.num_external_hit_tokens += request.num_computed_tokens - before
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
        self.manager.cache_blocks(request, before)

    def _leave_behind(self, request: Request, name: str, reason: str) -> None:
        """What may still be written to the request's blocks does not come to an end. It begins anew, with others; or it fails."""
        self.manager.held[name] = self.manager.tables.pop(request.request_id)
        request.num_computed_tokens = 0
        self._move(request, RequestStatus.WAITING)
        if self._must_fail(request):
            self._fail(request, reason)

    def _must_fail(self, request: Request) -> bool:
        was_given_up = request.request_id in self._given_up
        self._given_up.discard(request.request_id)
        return self._fails and not was_given_up

    def _fail(self, request: Request, reason: str) -> None:
        self._finish(request, "error")
        error = f"keys and values that were computed elsewhere did not come: {reason}"
        self._news.append(EngineOutput(request.request_id, finish_reason="error", error=error))

    def _schedule(self, request: Request, share: int, new_blocks: list[int], plan: SchedulerOutput) -> None:
        if request.num_sent_tokens == 0 and request.request_id not in plan.admitted:
            new_blocks = self.manager.tables[request.request_id]  # the runner has not heard of it yet
            if request.request_id not in plan.resumed:
                plan.admitted[request.request_id] = request.num_computed_tokens
        Scheduler._schedule(self, request, share, new_blocks, plan)

    # ---------------------------------------------------------------- KV goes

    def _give_up_blocks(self, request: Request) -> None:
        self._given_up.discard(request.request_id)
        table = self.manager.tables.get(request.request_id, [])
        is_held, request.kv_transfer_params = self.connector.request_finished(request, table)
        if is_held or request.status is RequestStatus.RECEIVING:
            self.manager.hold(request)
        else:
            self.manager.free(request)

    def _victim(self, request: Request, share: int) -> Request | None:
        """The last running request whose blocks no peer reads. While transfers hold blocks, only if preempting all such requests
        behind `request` frees enough for it: else it keeps its own blocks and waits, and the requests behind it may run."""
        behind = self.running[self.running.index(request) + 1 :]
        preemptible = [r for r in behind if not self.connector.is_sending(r)]
        if self.waits_for_transfers and not self._frees_enough(preemptible, request, share):
            return None
        return preemptible[-1] if preemptible else self.running[-1]

    def _frees_enough(self, victims: list[Request], request: Request, share: int) -> bool:
        """Whether `request` can compute `share` tokens once the victims are preempted. A block that they share with another
        request, or that a peer still reads, stays in use."""
        pool, tables = self.manager.pool, self.manager.tables
        holds = Counter(block_id for victim in victims for block_id in tables[victim.request_id])
        freed = sum(pool.ref_counts[block_id] == count for block_id, count in holds.items())
        num_blocks = self.manager.blocks_for(request.num_computed_tokens + share)
        return num_blocks - len(tables[request.request_id]) <= pool.num_free + freed

    def _preempt(self, victim: Request, plan: SchedulerOutput) -> None:
        # Whoever reads its blocks at this moment must not see those of somebody else. So it ends, and leaves them behind.
        if self.connector.is_sending(victim):
            self._finish(victim, "abort")
            self._news.append(EngineOutput(victim.request_id, finish_reason="abort"))
        else:
            Scheduler._preempt(self, victim, plan)

    # ---------------------------------------------------------------- every step

    def schedule(self) -> SchedulerOutput:
        """See `Scheduler.schedule`. A plan without requests may still have something to move."""
        plan = Scheduler.schedule(self)
        self._resolve_deadlock(plan)
        plan.connector_metadata = self.connector.build_connector_meta(plan)
        return plan

    def _resolve_deadlock(self, plan: SchedulerOutput) -> None:
        """Have the youngest receiving request compute its prompt itself if for some seconds nothing could be computed and nothing
        has come, while requests of other engines wait for blocks. It has its blocks already, so it can run to its end."""
        waits = plan.empty and self.receiving and any(map(self.connector.is_ordered, self.waiting))
        if not waits or self._steps_in_flight:
            self._stuck_since = float("inf")
        elif self._stuck_since == float("inf"):
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > base.DEADLOCK_SECONDS:
            self._stuck_since = float("inf")
            youngest = self.receiving[-1]
            self._given_up.add(youngest.request_id)
            self.connector.give_up(youngest)

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """See `Scheduler.update_from_output`."""
        if result.connector_output is not None:
            self.connector.update_connector_output(result.connector_output)
        return Scheduler.update_from_output(self, plan, result)

    def take_transfers(self) -> list[EngineOutput]:
        """Act on what has come to an end; returns the requests that have ended with it, or since the last call in a preemption."""
        output: KVConnectorOutput = self.connector.take_output()
        if output:
            self._stuck_since = float("inf")
        for request_id in output.finished_recving | output.finished_sending:
            if request_id in self.manager.held:
                self.manager.let_go(request_id)
            elif request_id in output.finished_recving:
                reason = output.reasons.get(request_id, "")
                invalid = output.invalid_block_ids.get(request_id, set())
                self._arrived(self.requests[request_id], invalid, reason)
        for request_id, name in output.abandoned.items():
            self._leave_behind(self.requests[request_id], name, output.reasons[request_id])
        news, self._news = self._news, []
        return news

    def check_invariants(self) -> None:
        """See `Scheduler.check_invariants`."""
        Scheduler.check_invariants(self)
        assert len(self.running) + len(self.receiving) <= self.config.max_num_seqs
        assert not self.manager.held.keys() & self.requests.keys(), "blocks are held of a request that lives"
