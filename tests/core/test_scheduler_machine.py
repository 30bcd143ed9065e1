"""Random lives of block pool, block tables and scheduler, with every invariant checked after every
step."""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.block_pool import BlockPool
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.step_time_limit import StepTimeLimit
from nanovllm.features.step_times import StepTimes
from tests.content_runner import ContentRunner, next_token
from tests.examples import examples

SETTINGS = settings(
    max_examples=examples(60), stateful_step_count=60, suppress_health_check=list(HealthCheck)
)


class MillisecondPerToken(StepTimes):
    """Predicts a millisecond for each prompt token."""

    def prefill_tokens(self, seconds: float) -> int:
        return round(1000 * seconds)


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables take, share, publish and give back blocks; a dictionary remembers what each block
    should contain."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.written: dict[int, bytes] = {}  # what was last published in a block

    @rule(count=st.integers(0, 9))
    def get_new_blocks(self, count: int) -> None:
        before = list(self.pool.free_block_queue)
        if count > len(before):
            try:
                self.pool.get_new_blocks(count)
            except MemoryError:
                assert list(self.pool.free_block_queue) == before
                return
            raise AssertionError("blocks out of thin air")
        blocks = self.pool.get_new_blocks(count)
        assert blocks == before[:count], "not the least recently used"
        for block in blocks:
            self.written.pop(block, None)
        self.tables.append(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.tables:
            return
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free_blocks(reversed(table))

    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        if not any(self.tables):
            return
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        known = self.pool.block_hashes[block]
        if self.pool.cache_full_block(block, bytes([name])) and known is None:
            self.written[block] = bytes([name])

    @rule(name=st.integers(0, 5))
    def find(self, name: int) -> None:
        block = self.pool.get_cached_block(bytes([name]))
        if block is not None:
            assert self.written[block] == bytes([name]), "a stale hash"
            self.pool.touch([block])
            self.tables.append([block])

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.written.clear()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants(self.tables)
            assert {b: h for b, h in enumerate(self.pool.block_hashes) if h} == self.written


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and are aborted under random settings; contents and outputs are checked."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.integers(3, 14),
        max_num_seqs=st.integers(2, 6),
        extra_budget=st.sampled_from([0, 1, 3, 20]),
        threshold=st.sampled_from([0, 1, 2, 5]),
        chunked=st.booleans(),
        policy=st.sampled_from(["chunked", "chunked", "prefill_first", "static"]),
        mode=st.sampled_from(["recompute", "swap", "swap"]),
        host_blocks=st.sampled_from([0, 4, 40, 40]),
        caching=st.booleans(),
        order=st.sampled_from(["fcfs", "priority"]),
        stages=st.sampled_from([1, 1, 2, 3]),
        overlap=st.booleans(),
        limit=st.sampled_from([None, 1, 2, 5]),
        drafts=st.sampled_from(["", "ngram", "draft_model"]),
        num_drafts=st.integers(1, 5),
    )
    def start(
        self,
        block_size,
        num_blocks,
        max_num_seqs,
        extra_budget,
        threshold,
        chunked,
        policy,
        mode,
        host_blocks,
        caching,
        order,
        stages,
        overlap,
        limit,
        drafts,
        num_drafts,
    ) -> None:
        if drafts and policy == "static":
            policy = "chunked"
        if drafts and stages > 1:
            drafts = "ngram"
        speculative = {
            "method": drafts,
            "num_speculative_tokens": num_drafts,
            "prompt_lookup_min": 1,
        }
        if drafts == "draft_model":
            speculative["model"] = "the content runner's"
        config = EngineConfig(
            block_size=block_size,
            num_kv_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget if chunked else None,
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
            batching_policy=policy,
            preemption_mode=mode,
            enable_prefix_caching=caching,
            scheduling_policy=order,
            pipeline_parallel_size=stages,
            async_scheduling=overlap and stages == 1,
            max_step_ms=limit,
            speculative_config=speculative if drafts else None,
        )
        self.config = config
        self.resolved = resolve(
            config, model_max_len=40, num_kv_blocks=num_blocks, num_host_blocks=host_blocks
        )
        self.manager = create_manager(self.resolved)
        self.scheduler = self.make_scheduler()
        for feature in self.scheduler.features:
            if isinstance(feature, StepTimeLimit):
                feature.step_times = MillisecondPerToken()
        self.salts: dict[str, str | None] = {}
        self.runner = ContentRunner(block_size, self.salts)
        self.sources: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.count = 0
        # So many steps are under way when the next one is scheduled: those of the other stages, or
        # one ahead.
        self.ahead = stages - 1 or int(overlap)
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def make_scheduler(self) -> Scheduler:
        """The one to be examined, with these settings."""
        return create_scheduler(self.resolved, self.manager)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 25),
        priority=st.integers(0, 2),
        eos=st.sampled_from([[], [3]]),
        salt=st.sampled_from([None, None, None, "x"]),
        copies=st.integers(1, 4),
    )
    def add_several(self, prompt, max_tokens, priority, eos, salt, copies) -> None:
        for i in range(copies):  # prompts that share more or less of their beginning
            self.add(prompt[: max(1, len(prompt) - i)], max_tokens + i, priority, eos, salt)

    def add(self, prompt, max_tokens, priority, eos, salt) -> None:
        source = EngineRequest(
            f"r{self.count}",
            prompt,
            SamplingParams(max_tokens=max_tokens),
            eos,
            priority=priority,
            cache_salt=salt,
        )
        request = Request(source, self.count)
        if self.config.scheduling_policy == "fcfs":
            request.order = (0, self.count)
        self.count += 1
        try:
            self.scheduler.add_request(request)
        except ValueError as error:
            assert len(prompt) >= self.resolved.max_request_tokens and str(
                self.resolved.max_request_tokens - 1
            ) in str(error)
            return
        self.sources[source.request_id] = source
        self.salts[source.request_id] = salt
        self.outputs[source.request_id] = []

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.scheduler.queues.requests:
            return
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.queues.requests)))
        assert self.scheduler.abort_request(request_id)
        assert not self.scheduler.abort_request(request_id)

    @rule(times=st.integers(1, 8))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()
            self.scheduler.check_invariants()

    def step(self) -> None:
        waiting = list(self.scheduler.queues.waiting)
        decoding = any(not request.in_prefill for request in self.scheduler.queues.running)
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if not self.scheduler.has_unfinished:
            # And is not run: what the runner has to drop must come with a later one.
            assert plan.empty
            return self.take_results()
        if plan.empty and self.under_way:
            event("waits for results")
            return self.take_results(len(self.under_way) - 1)
        assert not plan.empty, f"nothing moves: {plan.blocked_by}"
        assert plan.num_tokens <= self.resolved.token_budget
        assert len(self.scheduler.queues.running) <= self.config.max_num_seqs
        limit, mixes = self.config.max_step_ms, self.config.batching_policy == "chunked"
        if limit and decoding and mixes and self.config.enable_chunked_prefill:
            event("limited by max_step_ms")
            assert plan.num_prefill_tokens <= limit
        if not self.config.enable_chunked_prefill:
            for scheduled in plan.requests:
                request = self.scheduler.queues.requests[scheduled.request_id]
                assert request.num_computed_tokens >= request.num_tokens, "a prompt was cut"
        # Admission keeps the order of the queue.
        admitted = [r.request_id for r in waiting if r.request_id in plan.admitted]
        assert (
            admitted == [r.request_id for r in waiting][: len(admitted)]
            or self.scheduler.queues.swapped
        )
        for what in plan.preempted.values():
            event(f"preempted by {what}")
        if plan.resumed:
            event("resumed")
        if any(plan.admitted.values()):
            event("prefix hit")
        if any(scheduled.last_is_pending for scheduled in plan.requests):
            event("scheduled ahead")
        if any(scheduled.extra_token_ids for scheduled in plan.requests):
            event("verifies drafts")
        if self.config.pipeline_parallel_size > 1:
            self.check_division(plan)
        self.under_way.append((plan, self.runner.execute_model(plan)))
        self.take_results(self.ahead)

    def seconds(self) -> float:
        """How long a step took: at random, so that drafts pay now and then."""
        return self.runner.random.choice([0.01, 0.011, 0.02])

    def check_division(self, plan: SchedulerOutput) -> None:
        """No step needs a token that the last stage has not sampled yet, and none takes more than
        its share."""
        on_their_way = {
            r.request_id for step, _ in self.under_way for r in step.requests if r.samples
        }
        assert not any(r.last_is_pending or r.request_id in on_their_way for r in plan.requests)
        stages, requests = (
            self.config.pipeline_parallel_size,
            min(self.config.max_num_seqs, self.count),
        )
        assert sum(r.samples > 0 for r in plan.requests) <= -(-requests // stages)
        if sum(bool(step.requests) for step, _ in self.under_way) == stages - 1:
            event(f"{stages} steps under way")

    def take_results(self, keep: int = 0) -> None:
        while len(self.under_way) > keep:
            plan, result = self.under_way.popleft()
            self.scheduler.took(plan, self.seconds())
            for output in self.scheduler.update_from_output(plan, result):
                self.outputs[output.request_id] += output.new_token_ids
                if output.finish_reason:
                    self.check_finished(output.request_id, output.finish_reason)

    def check_finished(self, request_id: str, reason: str) -> None:
        source = self.sources[request_id]
        tokens, limit = list(source.prompt_token_ids), source.sampling_params.max_tokens
        assert limit is not None
        expected: list[int] = []
        while len(expected) < limit and len(tokens) < self.resolved.max_request_tokens:
            expected.append(next_token(tokens))
            tokens.append(expected[-1])
            if expected[-1] in source.eos_token_ids:
                break
        assert self.outputs[request_id] == expected
        assert reason == ("stop" if expected[-1] in source.eos_token_ids else "length")

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # A request has at most 25 tokens to generate; alone, and in a pipeline of three stages, it
        # takes some 100 steps.
        for _ in range(1000 + 200 * len(self.sources)):
            if not self.scheduler.has_unfinished:
                break
            self.step()
            self.scheduler.check_invariants()
        self.take_results()
        assert not self.scheduler.has_unfinished, "a request starves"
        assert self.runner.tokens.keys() <= set(self.scheduler.schedule().removed_ids), (
            "the runner remembers the dead"
        )
        assert self.manager.pool.num_free == self.manager.pool.num_blocks
        assert (
            not self.manager.host_pool
            or self.manager.host_pool.num_free == self.manager.host_pool.num_blocks
        )


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = SETTINGS
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(SETTINGS, max_examples=examples(120))
