"""Random lives of a scheduler whose requests' KV comes from elsewhere, late, in part, spoiled or
never, and goes elsewhere: every content that a step reads, and that others read, is checked, and
every invariant after every step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.kv_transfer.scheduling import KVTransfer
from tests.content_runner import ContentRunner
from tests.core.test_scheduler_machine import SETTINGS, SchedulerMachine
from tests.examples import examples


def update_from_transfers(scheduler: Scheduler, ended: KVConnectorOutput) -> list[EngineOutput]:
    """Tell a scheduler which transfers have ended."""
    kv_transfer = next(each for each in scheduler.features if isinstance(each, KVTransfer))
    return kv_transfer.update_from_transfers(ended, scheduler)


@dataclass
class Transfer:
    """KV on its way: which tokens' KV comes into which blocks; or what a reader has to find
    there."""

    request: Request
    table: list[int]
    positions: range
    content: list[bytes | None]


class ScriptedConnector(KVConnectorScheduler):
    """Offers what it is told to, and keeps a book of what the scheduler makes of it.

    Attributes:
        offers: by request id, of how many tokens the KV can be had.
        coming, going: transfers by request id.
        look: what stands in blocks.
    """

    def __init__(
        self, config: Any, look: Callable[[list[int], int], list[bytes | None]], block_size: int
    ) -> None:
        super().__init__(config, {}, ())
        self.look, self.block_size = look, block_size
        self.offers: dict[str, int] = {}
        self.wanted: set[str] = set()  # by others, when they are done
        self.coming: dict[str, Transfer] = {}
        self.going: dict[str, Transfer] = {}
        self.read_by_peers: set[str] = set()  # at any time

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        assert num_computed_tokens % self.block_size == 0
        return max(0, self.offers.get(request.request_id, 0) - num_computed_tokens), True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        start = request.num_computed_tokens
        assert start + num_external_tokens == self.offers.pop(request.request_id)
        assert len(block_ids) * self.block_size >= start + num_external_tokens
        positions = range(start, start + num_external_tokens)
        self.coming[request.request_id] = Transfer(request, list(block_ids), positions, [])

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, Any]:
        request_id = request.request_id
        is_complete = request.finish_reason in ("stop", "length") and bool(block_ids)
        if request_id in self.wanted and is_complete and request_id not in self.going:
            self.read(request, block_ids)
        is_held = request_id in self.going or request_id in self.coming
        return is_held, {"held": is_held} if is_complete else None

    def read(self, request: Request, block_ids: Sequence[int]) -> None:
        """Somebody reads from now on what is computed by now."""
        count = min(request.num_computed_tokens, request.num_tokens)
        table = list(block_ids)
        self.read_by_peers.add(request.request_id)
        self.going[request.request_id] = Transfer(
            request, table, range(count), self.look(table, count)
        )

    def is_sending(self, request: Request) -> bool:
        return request.request_id in self.going

    def come(self, request_id: str, invalid: set[int]) -> None:
        """The transfer into these blocks has ended."""
        del self.coming[request_id]
        self._output.finished_recving.add(request_id)
        if invalid:
            self._output.invalid_block_ids[request_id] = invalid
            self._output.reasons[request_id] = "spoiled"

    def go(self, request_id: str) -> Transfer:
        """The transfer out of these blocks has ended."""
        self._output.finished_sending.add(request_id)
        return self.going.pop(request_id)


class TransferMachine(SchedulerMachine):
    """The life of `SchedulerMachine`, and transfers."""

    def make_scheduler(self) -> Scheduler:
        self.config = dataclasses.replace(self.config, kv_role="kv_both")
        self.connector = ScriptedConnector(
            self.config, lambda *where: self.runner.look(*where), self.config.block_size
        )
        self.failed: set[str] = set()
        self.fails = False
        return create_scheduler(self.resolved, self.manager, self.connector)

    @initialize(fails=st.booleans())
    def choose_policy(self, fails: bool) -> None:
        self.fails = fails

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 25),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "x"]),
        copies=st.integers(1, 3),
        offered=st.sampled_from([0, 3, 99, 99, 99]),
        is_wanted=st.booleans(),
    )
    def add_with_transfers(
        self, prompt, max_tokens, priority, salt, copies, offered, is_wanted
    ) -> None:
        for i in range(copies):
            part, number = prompt[: max(1, len(prompt) - i)], self.count
            self.connector.offers[f"r{number}"] = min(offered, len(part))
            if is_wanted:
                self.connector.wanted.add(f"r{number}")
            self.add(part, max_tokens + i, priority, [], salt)

    @rule(seed=st.integers(0, 2**32), times=st.integers(1, 6))
    def live(self, seed: int, times: int) -> None:
        """Steps, and between them transfers that begin, go on and end, and clients that leave."""
        draw = random.Random(seed)
        for _ in range(times):
            self.step()
            self.scheduler.check_invariants()
            what = draw.choice(
                (self.write_some, self.come, self.come, self.push, self.go, self.leave)
            )
            what(draw)
            self.scheduler.check_invariants()

    def write_some(self, draw: random.Random) -> None:
        """A transfer writes while nobody knows how it will end; also if its request has ended."""
        if self.connector.coming:
            transfer = self.connector.coming[draw.choice(sorted(self.connector.coming))]
            event(
                "writes for one that "
                + ("has ended" if transfer.request.finish_reason else "waits")
            )
            self.write(
                transfer, set(transfer.table[transfer.positions.start // self.config.block_size :])
            )

    def come(self, draw: random.Random) -> None:
        if self.connector.coming:
            self.end_coming(draw.choice(sorted(self.connector.coming)), draw)

    def push(self, draw: random.Random) -> None:
        """Somebody reads what a running request has computed."""
        running = [
            r.request_id
            for r in self.scheduler.queues.running
            if r.request_id not in self.connector.going
        ]
        if running and draw.random() < 0.3:
            request_id = draw.choice(running)
            self.connector.read(
                self.scheduler.queues.requests[request_id], self.manager.tables[request_id]
            )

    def go(self, draw: random.Random) -> None:
        if self.connector.going:
            self.end_going(draw.choice(sorted(self.connector.going)))

    def leave(self, draw: random.Random) -> None:
        """The client of a request for which something comes."""
        if (
            self.scheduler.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
            and draw.random() < 0.3
        ):
            assert self.scheduler.abort_request(
                draw.choice(
                    self.scheduler.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
                ).request_id
            )

    def write(self, transfer: Transfer, spoiled: set[int]) -> None:
        salt = self.salts[transfer.request.request_id]
        self.runner.receive(
            transfer.table, transfer.positions, transfer.request.token_ids, salt, spoiled
        )

    def end_coming(self, request_id: str, draw: random.Random | None = None) -> None:
        transfer, size = self.connector.coming[request_id], self.config.block_size
        mine, invalid = transfer.table[transfer.positions.start // size :], set()
        if draw is not None and draw.random() < 0.4:
            invalid = set(draw.sample(mine, draw.randint(1, len(mine))))
        self.write(transfer, invalid)
        self.connector.come(request_id, invalid)
        if not transfer.request.finish_reason:
            event("arrives spoiled" if invalid else "arrives whole")

    def end_going(self, request_id: str) -> None:
        transfer = self.connector.go(request_id)
        found = self.runner.look(transfer.table, len(transfer.content))
        assert found == transfer.content, "the reader has seen somebody else's content"

    @rule(data=st.data())
    def use_an_id_again(self, data: st.DataObject) -> None:
        """An id can be had again when nobody reads or writes the blocks that its request has left
        behind."""
        if not (ended := sorted(self.sources.keys() - self.scheduler.queues.requests.keys())):
            return
        request_id = data.draw(st.sampled_from(ended))
        params = SamplingParams(max_tokens=3)
        source = EngineRequest(request_id, [0], params, cache_salt=self.salts[request_id])
        computed = {share.request_id for plan, _ in self.under_way for share in plan.requests}
        in_use = request_id in self.manager.held.keys() | computed
        try:
            self.scheduler.add_request(Request(source, self.count))
        except ValueError as error:
            assert in_use and "in use" in str(error)
            event("an id is in use")
            return
        assert not in_use
        self.count += 1
        self.sources[request_id], self.outputs[request_id] = source, []
        self.failed.discard(request_id)

    @rule()
    def reset(self) -> None:
        self.manager.pool.reset_prefix_cache()

    def take_transfers(self) -> None:
        self.connector.kv_transfer = dataclasses.replace(
            self.connector.kv_transfer, kv_load_failure_policy="fail" if self.fails else "recompute"
        )
        received = self.connector.take_output()
        for request_id in received.aborts:  # a peer reads its blocks, which it leaves behind
            event("aborted in place of a preemption")
            assert request_id in self.connector.read_by_peers
            self.scheduler.abort_request(request_id)
        for output in update_from_transfers(self.scheduler, received):
            assert self.fails and output.finish_reason == "error" and "spoiled" in output.error
            self.failed.add(output.request_id)
        self.scheduler.check_invariants()

    def step(self) -> None:
        self.take_transfers()
        receiving = {
            r.request_id
            for r in self.scheduler.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
        }
        plan = self.scheduler.schedule()
        assert (
            len(self.scheduler.queues.running)
            + len(self.scheduler.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS])
            <= self.config.max_num_seqs
        )
        assert not receiving & {share.request_id for share in plan.requests}, (
            "computes what has not come"
        )
        for request in self.scheduler.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]:
            assert (
                request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id in self.connector.coming
            )
        if plan.empty:
            if not self.under_way and self.scheduler.has_unfinished:
                event("waits for transfers")
                assert self.connector.coming or self.connector.going, (
                    f"nothing moves: {plan.blocked_by}"
                )
                assert not self.could_run(plan), (
                    "it waits for transfers, and could preempt a request"
                )
            return self.take_results(max(0, len(self.under_way) - 1))
        assert plan.num_tokens <= self.resolved.token_budget
        for what in plan.preempted.values():
            event(f"preempted by {what}")
        self.under_way.append((plan, self.runner.execute_model(plan)))
        self.take_results(self.ahead)

    def could_run(self, plan: SchedulerOutput) -> list[str]:
        """Running requests that could compute something now if all requests behind them were
        preempted, but for those whose blocks are being read."""
        found, manager, running = [], self.manager, self.scheduler.queues.running
        for i, request in enumerate(running):
            share, counts = self.scheduler.share(request, plan), list(manager.pool.ref_counts)
            for other in running[i + 1 :]:
                for block_id in manager.tables[other.request_id]:
                    counts[block_id] -= not self.connector.is_sending(other)
            wanted = manager.blocks_for(request.num_computed_tokens + share)
            if share and wanted - len(manager.tables[request.request_id]) <= counts.count(0):
                found.append(request.request_id)
        return found

    def check_finished(self, request_id: str, reason: str) -> None:
        assert request_id not in self.failed
        super().check_finished(request_id, reason)

    def teardown(self) -> None:
        """Life goes on for a while; then all transfers come to their end, one after the other, when
        nothing else can be done."""
        if not hasattr(self, "scheduler"):
            return
        self.live(self.count, 30)
        for _ in range(1000 + 200 * len(self.sources)):
            if not (self.scheduler.has_unfinished or self.connector.coming or self.connector.going):
                break
            before = self.state()
            self.step()
            self.scheduler.check_invariants()
            if self.state() == before and not self.under_way:
                if self.connector.coming:
                    self.end_coming(min(self.connector.coming))
                elif self.connector.going:
                    self.end_going(min(self.connector.going))
        self.take_transfers()
        assert not self.manager.held, "nobody reads or writes these blocks any more"
        super().teardown()

    def state(self) -> tuple[int, ...]:
        """Whether a step has changed anything."""
        requests = self.scheduler.queues.requests.values()
        done = sum(r.num_computed_tokens + r.num_tokens for r in requests)
        return (
            done,
            len(requests),
            len(self.scheduler.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]),
            len(self.manager.held),
        )


TestTransferScheduler = TransferMachine.TestCase
TestTransferScheduler.settings = settings(SETTINGS, max_examples=examples(60))


# ------------------------------------------------------------------------------ a pool that is full


class FullPool:
    """A scheduler with eight blocks of two tokens, some of which a peer reads: those of a request
    "d" that has ended."""

    def __init__(self, prompt: list[int], mode: str = "recompute", host_blocks: int = 0) -> None:
        config = EngineConfig(
            block_size=2,
            num_kv_blocks=8,
            max_num_seqs=4,
            long_prefill_token_threshold=4,
            preemption_mode=mode,
            kv_role="kv_both",
        )
        resolved = resolve(config, model_max_len=40, num_kv_blocks=8, num_host_blocks=host_blocks)
        self.manager = create_manager(resolved)
        self.runner, self.num_added = ContentRunner(2, dict.fromkeys("abcd")), 0
        self.connector = ScriptedConnector(config, self.runner.look, 2)
        self.connector.wanted.add("d")
        self.scheduler = create_scheduler(resolved, self.manager, self.connector)
        self.add("d", prompt, max_tokens=1)
        while self.scheduler.has_unfinished:
            self.step()
        assert list(self.manager.held) == ["d"]

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> None:
        source = EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add_request(Request(source, self.num_added))
        self.num_added += 1

    def step(self) -> tuple[list[str], dict[str, str]]:
        """A step from beginning to end; returns the requests that it computes, and those that it
        preempts."""
        update_from_transfers(self.scheduler, self.connector.take_output())
        plan = self.scheduler.schedule()
        if not plan.empty:
            self.scheduler.update_from_output(plan, self.runner.execute_model(plan))
        self.scheduler.check_invariants()
        return [share.request_id for share in plan.requests], plan.preempted


@pytest.mark.parametrize(("mode", "host_blocks"), [("recompute", 0), ("swap", 4), ("swap", 1)])
def test_full_pool_behind_a_lease(mode: str, host_blocks: int) -> None:
    """The oldest request does not wait for a peer when preempting the youngest frees the block that
    it needs."""
    pool = FullPool([5, 5, 5], mode, host_blocks)
    for name in "abc":
        pool.add(name, [ord(name)] * 3)
    for _ in range(2):  # then each has two full blocks, and no block is free
        assert pool.step() == (["a", "b", "c"], {})
    preempted = {"c": "swap" if host_blocks == 4 else "recompute"}
    assert pool.step() == (["a", "b"], preempted)
    for _ in range(30):
        pool.step()
    assert not pool.scheduler.has_unfinished and pool.manager.held


def test_preempting_would_not_be_enough() -> None:
    """The oldest request needs two blocks, and the one behind it shares all of its blocks but one
    with the peer: so nothing is preempted, the oldest request keeps its blocks, and the one behind
    it computes what it has room for."""
    pool = FullPool([5] * 5)
    pool.add("a", [1, 2] * 6)
    assert pool.step() == pool.step() == (["a"], {})
    pool.add("b", [5, 5, 5])
    assert pool.step() == pool.step() == (["b"], {})
    assert pool.step() == ([], {})
    assert len(pool.manager.tables["a"]) == 4 and len(pool.manager.tables["b"]) == 2
    pool.connector.go("d")
    assert pool.step() == (["a"], {"b": "recompute"})


def test_what_a_peer_reads_is_not_preempted() -> None:
    """A request whose blocks a peer reads is passed over: the one before it is preempted, and none
    is aborted."""
    pool = FullPool([5, 5, 5])
    for name, prompt in (("a", [1] * 3), ("b", [2] * 3), ("c", [3] * 2)):
        pool.add(name, prompt)
    pool.step()
    pool.connector.read(pool.scheduler.queues.requests["c"], pool.manager.tables["c"])
    assert pool.step() == (["a", "b", "c"], {})
    assert pool.step() == (["a", "c"], {"b": "recompute"})


def test_a_transfer_outlives_its_request() -> None:
    """The client leaves: the blocks stay held until the transfer has ended."""
    pool = FullPool([5, 5, 5])
    pool.connector.offers["x"] = 4
    pool.add("x", [7] * 5)
    pool.step()
    table = pool.manager.tables["x"]
    pool.scheduler.abort_request("x")
    pool.step()
    assert pool.manager.held["x"] == table
    pool.connector._output.finished_recving.add("x")
    pool.step()
    assert list(pool.manager.held) == ["d"]
