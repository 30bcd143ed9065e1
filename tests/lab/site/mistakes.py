"""A wrong edit of each lab, and what finds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A text that a reader replaces by another in a function.

    Attributes:
        says: part of the message of the run that fails; "": it does not fail, and looks different.
        fails: the tests that fail.
    """

    lab: str
    target: str
    old: str
    new: str
    says: str = ""
    fails: tuple[str, ...] = ()


ADVANCES = "test_the_oldest_request_advances_in_every_step"
PREEMPTION = (
    ADVANCES,
    "test_no_request_loses_its_blocks_in_a_step_that_computes_it",
    "test_later_requests_do_not_delay_the_oldest",
    "test_a_preempted_request_begins_again",
)
RUNNING_FIRST = "test_running_requests_get_their_shares_before_waiting_ones"
CONTINUE = "    scheduler.continue_running(plan, scheduler.queues.running)\n"
ADMIT = "    scheduler.admit(plan)\n"
MISTAKES = [
    Mistake(
        "preemption",
        "nanovllm.core.scheduler:last_running",
        "running[-1]",
        "running[0]",
        says="what it computes would overwrite the keys and values of other requests",
        fails=PREEMPTION,
    ),
    Mistake(
        "preemption",
        "nanovllm.core.scheduler:last_running",
        "running[-1]",
        "max(running, key=lambda r: r.num_computed_tokens)",
        says="what it computes would overwrite the keys and values of other requests",
        fails=PREEMPTION,
    ),
    Mistake(
        "preemption",
        "nanovllm.core.scheduler:last_running",
        "running[-1]",
        "request",
        fails=(ADVANCES, "test_a_preempted_request_begins_again"),
    ),
    Mistake(
        "preemption",
        "nanovllm.core.scheduler:Scheduler._preempt",
        "        victim.num_computed_tokens = 0\n",
        "",
        says="waits, but computed",
        fails=("test_a_preempted_request_begins_again",),
    ),
    Mistake(
        "blocks",
        "nanovllm.core.block_pool:BlockPool.touch",
        "            del self.free_block_queue[block_id]\n",
        "            pass\n",
        says="block 0 has 1 holders and is free",
        fails=("test_a_freed_block_keeps_its_content_until_it_is_reused",),
    ),
    Mistake(
        "blocks",
        "nanovllm.core.block_pool:BlockPool.get_new_blocks",
        "last=False",
        "last=True",
        fails=(
            "test_freed_blocks_join_the_free_list_at_its_end",
            "test_a_shared_block_is_free_when_its_last_holder_has_gone",
            "test_a_hash_leads_to_one_block",
        ),
    ),
    Mistake(
        "blocks",
        "nanovllm.core.block_pool:BlockPool.free_blocks",
        "for block_id in block_ids",
        "for block_id in sorted(block_ids)",
        fails=("test_freed_blocks_join_the_free_list_at_its_end",),
    ),
    Mistake(
        "tables",
        "nanovllm.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "self.pool.num_free - idle",
        "self.pool.num_free",
        says="MemoryError: 5 blocks requested, 2 of 10 free",
        fails=("test_computed_blocks_are_taken_out_of_the_free_list",),
    ),
    Mistake(
        "tables",
        "nanovllm.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        "(request.num_tokens - 1)",
        "request.num_tokens",
        says="none is left to compute, so there are no logits to sample from",
        fails=("test_a_prefix_is_found_block_by_block_up_to_the_first_difference",),
    ),
    Mistake(
        "share",
        "nanovllm.core.scheduler:Scheduler.share",
        "share = min(request.num_schedulable_tokens, left)",
        "share = request.num_schedulable_tokens",
        says="the step computes 92 tokens, and the budget is 16",
        fails=(
            "test_a_request_gets_what_it_misses_and_the_budget_allows",
            RUNNING_FIRST,
            "test_no_step_has_more_tokens_of_a_prompt_than_the_threshold",
            "test_without_chunks_a_prompt_is_computed_whole_or_not_at_all",
            "test_requests_are_admitted_in_order_until_one_has_to_wait",
        ),
    ),
    Mistake(
        "share",
        "nanovllm.core.scheduler:continue_then_admit",
        CONTINUE + ADMIT,
        ADMIT + CONTINUE,
        says="A has 2 shares of this step",
        fails=(RUNNING_FIRST,),
    ),
    Mistake(
        "share",
        "nanovllm.core.scheduler:continue_then_admit",
        "scheduler.queues.running",
        "sorted(scheduler.queues.running, key=lambda r: not r.in_prefill)",
        fails=(RUNNING_FIRST,),
    ),
    Mistake(
        "priorities",
        "nanovllm.core.queues:Queues.add",
        "key=lambda r: r.order",
        "key=lambda r: r.num_prompt_tokens",
        says="a queue is out of order",
        fails=(
            "test_requests_are_admitted_in_order_until_one_has_to_wait",
            "test_no_request_overtakes_one_that_has_to_wait",
        ),
    ),
    Mistake(
        "in-flight",
        "nanovllm.features.async_scheduling:OneStepAhead.may_plan",
        "return not any(",
        "return True or any(",
        says="P has a repetition penalty, which depends on its newest token",
        fails=("test_no_token_is_sampled_before_those_that_it_depends_on",),
    ),
    Mistake(
        "in-flight",
        "nanovllm.features.async_scheduling:OneStepAhead.may_plan",
        "(request.looks_back or self.needs_tokens)",
        "True",
    ),
    Mistake(
        "in-flight",
        "nanovllm.core.request:Request.num_schedulable_tokens",
        "pending and self.num_tokens + pending >= self.max_num_tokens",
        "False",
        fails=("test_a_pending_token_may_be_computed_unless_it_is_the_last",),
    ),
    Mistake(
        "in-flight",
        "nanovllm.core.scheduler:Scheduler.update_from_output",
        "request.num_pending_tokens -= scheduled.samples",
        "pass",
        says="no step is in flight, and the scheduler still waits for tokens of A",
        fails=("test_no_token_is_sampled_before_those_that_it_depends_on",),
    ),
    Mistake(
        "router",
        "nanovllm.features.data_parallel.router:EngineRouter.choose",
        "-self._match(rank, hashes), ",
        "",
        fails=("test_the_engine_with_the_longest_prefix_gets_the_prompt",),
    ),
    Mistake(
        "waves",
        "nanovllm.features.data_parallel.lock_step:LockStep.launching",
        "bool(self.queues.requests)",
        "bool(self.queues.waiting)",
        fails=("test_an_engine_says_that_it_has_requests_until_they_have_ended",),
    ),
    Mistake(
        "waves",
        "nanovllm.features.data_parallel.lock_step:LockStep.launching",
        "bool(self.queues.requests)",
        "True",
        says="no engine has had a request for 12 steps, and the wave does not end",
        fails=("test_an_engine_says_that_it_has_requests_until_they_have_ended",),
    ),
    Mistake(
        "waves",
        "nanovllm.features.data_parallel.lock_step:LockStep.arrived",
        "not result.extras[LOCK_STEP]",
        "not self.queues.requests",
        says="never joins: the fleet hangs",
        fails=("test_a_wave_ends_when_no_engine_has_requests",),
    ),
    Mistake(
        "waves",
        "nanovllm.features.data_parallel.waves:Waves.end",
        "max(self.ended, wave + 1)",
        "self.ended + 1",
        fails=("test_the_end_of_a_wave_may_be_reported_twice",),
    ),
    Mistake(
        "waves",
        "nanovllm.features.data_parallel.waves:Waves.start",
        "self._ordered = max(self._ordered, wave + 1)",
        "self._ordered = wave + 1 if wave == self.ended else self._ordered",
        says="engine 0 waits in a collective that engine 2 never joins: the fleet hangs",
        fails=("test_an_early_command_takes_effect_when_the_wave_before_ends",),
    ),
    Mistake(
        "waves",
        "nanovllm.features.data_parallel.router:EngineRouter.choose",
        "loads[rank], (rank - self._turn) % size",
        "rank",
        fails=(
            "test_equal_engines_take_turns",
            "test_the_least_busy_engine_gets_an_unknown_prompt",
        ),
    ),
    Mistake(
        "drafts",
        "nanovllm.features.speculation.verification:keep_accepted",
        "sampled[name][:count]",
        "sampled[name]",
        says="drafts must not change the output",
        fails=("test_tokens_are_kept_up_to_the_first_that_was_not_drafted",),
    ),
    Mistake(
        "drafts",
        "nanovllm.features.speculation.scheduling:NgramProposer.propose",
        "token_ids[place : place + count]",
        "token_ids[place + 1 : place + count]",
        fails=("test_an_ngram_proposes_what_followed_first",),
    ),
]
