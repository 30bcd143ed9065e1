"""Random workloads, and everything that an engine does with them, step by step or many steps at
once.

    python -m tests.simulate.exact NUMBER [SEED]    # compare this number of workloads, twice
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from nanovllm.core.schedule import SchedulerOutput
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.requests import SimulatedRequest
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.run import Run
from nanovllm.simulate.workload import Workload, WorkloadRequest
from tests.simulate.engines import AffineCost, config_of, request_of

# Id, first token, number of tokens, new blocks, samples, number of new tokens.
Share = tuple[str, int, int, list[int], int, int]


class LoggedEngine(SimulatedEngine):
    """Notes each step's plan in full. Steps that are made at once are made one by one for this."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[tuple[object, ...]] = []

    def _silent(self, plan: SchedulerOutput, ahead: int) -> list[tuple[tuple[int, int], Share]]:
        """The unlisted shares; `ahead` steps were in flight when the step before was planned."""
        if self.group is None:
            return []
        now = self.group.planned, self.group.taken
        listed = {share.request_id for share in plan.requests}
        found: list[tuple[tuple[int, int], Share]] = []
        for request in self.group.requests.values():
            assert isinstance(request, SimulatedRequest)
            is_silent = request.is_member and not request.is_ending
            if is_silent and request.request_id not in listed:
                start = request.num_computed_tokens + now[0] - request.planned
                num_new = 1 + ahead - (now[0] - now[1])
                if (request.planned, request.taken) == now:  # it may have joined just now
                    num_new = request.num_tokens - request.num_sent_tokens
                found.append((request.order, (request.request_id, start, 1, [], 1, num_new)))
        return found

    def _log(self, plan: SchedulerOutput, ahead: int, removed: list[str], blocked_by: str) -> None:
        end = self._in_flight[-1].end
        group = self._silent(plan, ahead)
        rest = []
        for share in plan.requests:
            request = self.scheduler.queues.requests[share.request_id]
            assert isinstance(request, SimulatedRequest)
            entry = (
                share.request_id,
                share.start,
                share.num_tokens,
                list(share.new_block_ids),
                share.samples,
                len(share.new_token_ids),
            )
            if request.is_member:
                group.append((request.order, entry))
            else:
                rest.append(entry)
        shares = [entry for _, entry in sorted(group, key=lambda pair: pair[0])] + rest
        counts = plan.num_tokens, plan.num_samples, plan.num_prefill_tokens
        changes = plan.admitted, plan.preempted, plan.resumed, plan.swap_in, plan.swap_out
        self.plans.append((end, shares, counts, changes, removed, blocked_by))

    def _launch(self, plan: SchedulerOutput, now: int) -> None:
        planned = self.group.planned if self.group is not None else 0
        ahead = self.group.ahead if self.group is not None else 0
        super()._launch(plan, now)
        if self.group is not None:
            self.group.planned = planned
        removed = self._removed if self._run is not None else plan.removed_ids
        blocked_by = self._reason if self._run is not None else plan.blocked_by
        self._log(plan, ahead, list(removed), blocked_by)
        if self.group is not None:
            self.group.planned = planned + 1

    def _begin_run(self, now: int) -> bool:
        if self.group is None:
            return False
        removed = list(self.group.removed_ids)
        waits = bool(self.group.waiting or self.group.swapped)
        begins = super()._begin_run(now)
        if begins:
            self._removed = removed
            self._waits = waits
            self._blocked_before = self._blocked_by
        return begins

    def _finish_run(self, run: Run) -> list[SimulatedRequest]:
        ended = []
        for i in range(run.num_steps):
            ends = run.ends and i == run.num_steps - 1
            single = replace(
                run,
                num_steps=1,
                num_results=1 if ends else 1 - self.steps_ahead,
                ends=ends,
                origin=run.origin + run.price(i),
                first=run.first + i * run.growth,
                context=run.context + i * run.size,
                first_wait=max(0, run.first_wait - i),
            )
            self._look(run, i)
            ended += super()._finish_run(single)
            if not (ends and self.steps_ahead):
                self._log_silently(single.origin + single.price(1), run.size)
        return ended

    def _plan_after(self, start: int) -> None:
        self._log_silently(start, self._whole.size)
        self._look(self._whole, self._whole.num_steps)
        assert self.group is not None
        size = self.group.size
        super()._plan_after(start)
        if size:
            self._log_silently(self._in_flight[-1].end, size)

    def _look(self, run: Run, number: int) -> None:
        """See what members and their tables are before the next of a run's steps is planned."""
        group = self.group
        assert group is not None
        self._whole = run
        planned_at = run.origin + run.price(number - self.steps_ahead)
        waiting = [*group.waiting, *group.swapped]
        self._reason = ""
        if number:
            self._waits = any(r.arrival <= planned_at for r in waiting)  # type: ignore[attr-defined]
        if self._waits:
            is_full = group.num_seated >= self.scheduler.settings.max_num_seqs
            self._reason = "max_num_seqs" if is_full else self._blocked_before
        self._before = self._silent(SchedulerOutput(), group.ahead)
        self._tables = {name: (table, len(table)) for name, table in group.manager.tables.items()}

    def _log_silently(self, end: int, size: int) -> None:
        """Log the step that was planned after the last look."""
        shares = []
        for _, share in sorted(self._before, key=lambda pair: pair[0]):
            request_id, start, *_, num_new = share
            table, length = self._tables[request_id]
            shares.append((request_id, start, 1, table[length:], 1, num_new))
        nothing: tuple[object, ...] = ({}, {}, [], [], [])
        self.plans.append((end, shares, (size, size, 0), nothing, self._removed, self._reason))
        self._removed = []


class LeastBusy:
    """Sends a request where the fewest are."""

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0] * num_replicas

    def choose(self, request: WorkloadRequest, now: int) -> int:
        """Return the first of the least busy engines."""
        return self.loads.index(min(self.loads))

    def set_load(self, replica: int, engine: SimulatedEngine, now: int) -> None:
        """Note an engine's load."""
        self.loads[replica] = 2 * engine.num_waiting + engine.num_running


@dataclass
class Case:
    """A random workload, and the settings of the engines that serve it."""

    requests: Sequence[WorkloadRequest]
    prefix_block_size: int
    names_outputs: bool
    num_replicas: int
    options: dict[str, Any]

    def run(self, fast: bool, logged: bool) -> tuple[Fleet, FleetResult]:
        """Serve the workload."""
        config = config_of(**self.options)
        kind = LoggedEngine if logged else SimulatedEngine
        engines = [
            create_engine(kind, config, AffineCost(per_idle=0.3), copy_time=70, fast=fast)
            for _ in range(self.num_replicas)
        ]
        fleet = Fleet(engines, LeastBusy(self.num_replicas))
        workload = Workload(self.requests, self.prefix_block_size, names_outputs=self.names_outputs)
        return fleet, fleet.run(workload)


def case_of(seed: int) -> Case:
    """The case with this number."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 7, 16])
    prefix_block_size = rng.choice([block_size, 2 * block_size, 5, 8])
    most_prompt = rng.choice([6, 40, 40, 300])
    most_output = rng.choice([3, 30, 200])
    gap = rng.choice([10, 1000, 30_000])
    names_outputs = rng.random() < 0.2
    arrival = 0
    requests = []
    for i in range(rng.randint(1, 25)):
        arrival += rng.choice([0, rng.randrange(gap), 1000 + rng.randrange(300)])
        prompt = rng.randint(1, most_prompt)
        stem = rng.randrange(3) * 100
        num_shared = rng.choice([rng.randint(0, 6), rng.randint(0, 60) * names_outputs])
        output = rng.choice([1, 2, 3, rng.randint(1, most_output)])
        num_ids = -(-(prompt + names_outputs * output) // prefix_block_size)
        ids = [stem + j if j < num_shared else 1000 * (i + 1) + j for j in range(num_ids)]
        is_aborted = rng.random() < 0.15
        request = request_of(
            i,
            arrival,
            prompt,
            output=output,
            prefix_ids=ids,
            priority=rng.randrange(3),
            abort=arrival + rng.randrange(60 * gap + 3000) if is_aborted else None,
        )
        requests.append(request)
    return Case(
        requests,
        prefix_block_size,
        names_outputs,
        rng.choice([1, 1, 3]),
        _options(rng, requests, block_size),
    )


def crowded_case_of(seed: int) -> Case:
    """The case with this number in which prompts with the same beginning arrive together, at an
    engine with few blocks: it computes some blocks twice, and prompts do not fit into a step."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 1, 2, 3])
    arrival = 0
    requests = []
    for i in range(rng.randint(4, 20)):
        arrival += rng.choice([0, 0, 0, rng.randrange(3000), rng.randrange(30000)])
        prompt = rng.randint(10, 60)
        stem = rng.randrange(2) * 100
        num_shared = rng.choice([60, rng.randint(5, 60)])
        output = rng.choice([1, 2, rng.randint(1, 60)])
        num_ids = -(-prompt // block_size)
        request = request_of(
            i,
            arrival,
            prompt,
            output=output,
            prefix_ids=[stem + j if j < num_shared else 1000 * (i + 1) + j for j in range(num_ids)],
            priority=rng.randrange(2),
            abort=arrival + rng.randrange(60000) if rng.random() < 0.1 else None,
        )
        requests.append(request)
    longest = max(each.num_prompt_tokens + each.num_output_tokens for each in requests)
    max_num_seqs = rng.choice([2, 4, 8, 16])
    options = {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + rng.choice([0, 2, 5, 10, 20]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([1, 2, 4, 8, 16]),
        "preemption_mode": rng.choice(["recompute", "swap", "recompute"]),
        "enable_prefix_caching": True,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.5,
    }
    return Case(requests, block_size, False, 1, options)


def _options(
    rng: random.Random, requests: Sequence[WorkloadRequest], block_size: int
) -> dict[str, Any]:
    longest = max(each.num_prompt_tokens + each.num_output_tokens for each in requests)
    max_num_seqs = rng.choice([1, 2, 4, 16])
    options = {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + rng.choice([0, 0, 1, 5, 40, 400]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([0, 1, 16, 60, 2000]),
        "preemption_mode": rng.choice(["recompute", "swap"]),
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.5,
    }
    if rng.random() < 0.1:
        options["long_prefill_token_threshold"] = rng.randint(1, 20)
    elif rng.random() < 0.1:
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": None}
    elif rng.random() < 0.1:
        options["batching_policy"] = rng.choice(["prefill_first", "static"])
    elif rng.random() < 0.1:
        options |= {"async_scheduling": False, "pipeline_parallel_size": 2}
    return options


def state_of(fleet: Fleet, result: FleetResult) -> dict[str, object]:
    """Everything that is left after a run."""
    pools = []
    for engine in fleet.engines:
        engine.scheduler.check_invariants()
        pool = engine.scheduler.manager.pool
        pools.append((list(pool.free_block_queue), dict(pool.cached_blocks), pool.ref_counts))
    return {
        "requests": result.requests,
        "counters": result.replicas,
        "gaps": vars(result.gaps),
        "duration": result.duration,
        "pools": pools,
    }


def compare(case: Case) -> Counter[str]:
    """Check that steps made at once are equal to steps made one by one. Returns how many there
    were."""
    singly, results = case.run(fast=False, logged=True)
    expected = state_of(singly, results)
    logged, other_results = case.run(fast=True, logged=True)
    for engine, other in zip(singly.engines, logged.engines, strict=True):
        assert isinstance(engine, LoggedEngine) and isinstance(other, LoggedEngine)
        for number, (plan, found) in enumerate(zip(engine.plans, other.plans, strict=False)):
            assert plan == found, f"step {number}:\n{plan}\n{found}"
        assert len(engine.plans) == len(other.plans)
    for name, value in state_of(logged, other_results).items():
        assert value == expected[name], name
    for name, value in state_of(*case.run(fast=True, logged=False)).items():
        assert value == expected[name], name
    counts = Counter(each.outcome for each in results.requests)
    for counters in results.replicas:
        counts["steps"] += counters.num_steps
        counts["preemptions"] += counters.num_preemptions
        counts["hit tokens"] += counters.num_hit_tokens
        counts["evictions"] += counters.num_evictions
    return counts


def main() -> None:
    """Compare as many cases as the command line asks for."""
    number = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    total: Counter[str] = Counter()
    for seed in range(first, first + number):
        for create in (case_of, crowded_case_of):
            try:
                total += compare(create(seed))
            except Exception:
                print(f"{create.__name__}({seed}): {create(seed).options}", file=sys.stderr)
                raise
    print(f"{2 * number} workloads are equal: {dict(total)}")


if __name__ == "__main__":
    main()
