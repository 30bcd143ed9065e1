"""One engine of a lab: the real scheduler, steps in flight, and the numbers of its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.block_pool import InvariantError
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.core.scheduler import Scheduler, continue_then_admit
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.lab.viz.metrics import request_metrics
from nanovllm.lab.viz.simulate import SAMPLED_TOKEN, SimulatedRequest, Simulation
from nanovllm.trace.trace import Trace

Figures = list[tuple[str, str]]
MAX_STEPS = 400


class CarefulScheduler(Scheduler):
    """A scheduler whose plans are checked before they would be run."""

    def schedule(self) -> SchedulerOutput:
        """Plan a step.

        Raises:
            InvariantError: the step would write to blocks that its request does not hold.
        """
        plan = super().schedule()
        for share in plan.requests:
            table = self.manager.tables.get(share.request_id, [])
            end = share.start + share.num_tokens
            if len(table) * self.manager.block_size < end:
                raise InvariantError(
                    f"{share.request_id} has a share of this step, tokens {share.start} to "
                    f"{end - 1}, and holds {len(table)} blocks: what it computes would overwrite "
                    "the keys and values of other requests"
                )
        if plan.num_tokens > self.settings.token_budget:
            raise InvariantError(
                f"the step computes {plan.num_tokens} tokens, and the budget is "
                f"{self.settings.token_budget}"
            )
        return plan


class Engine(Simulation):
    """A simulation that may plan steps before the results of earlier ones arrive.

    Args:
        ahead: steps in flight, at most, while another is planned.
        plan_cost: time to plan a step.

    Attributes:
        number: the newest step.
    """

    def __init__(self, *arguments: Any, ahead: int = 0, plan_cost: float = 0.0) -> None:
        super().__init__(*arguments)
        self.ahead = ahead
        self.plan_cost = plan_cost
        self.number = 0
        self.in_flight: list[tuple[SchedulerOutput, Any]] = []

    def step(self, step: int) -> None:
        """Plan a step, and take the results of the oldest one if enough are in flight."""
        self.number = step
        self.clock += 0 if self.ahead else self.plan_cost
        plan = self.scheduler.schedule()
        if plan.empty and not self.in_flight:
            raise RuntimeError(f"no waiting request could be scheduled: {plan.blocked_by}")
        if not plan.empty:
            self.in_flight.append((plan, self.recorder.begin(plan, step, self.clock)))
            self.clock += self.duration_of(plan)
        if plan.empty or len(self.in_flight) > self.ahead:
            self.take_result()
        while self.in_flight and not self.scheduler.has_unfinished:
            self.take_result()

    def duration_of(self, plan: SchedulerOutput) -> float:
        """Return the time that a step takes; steps ahead are planned during it."""
        compute = self.step_cost + self.token_cost * plan.num_tokens
        return max(compute, self.plan_cost) if self.ahead else compute

    def take_result(self) -> None:
        """Give the oldest step's tokens to the scheduler."""
        plan, record = self.in_flight.pop(0)
        result = ModelRunnerOutput(
            {
                each.request_id: [SampledToken(SAMPLED_TOKEN)]
                for each in plan.requests
                if each.samples
            }
        )
        outputs = self.scheduler.update_from_output(plan, result)
        self.recorder.finish(record, self.duration_of(plan), result, outputs)
        self.scheduler.check_invariants()


def requests_of(rows: Sequence[Sequence[Any]]) -> list[SimulatedRequest]:
    """Return requests from rows of (id, arrival step, prompt tokens, output tokens, more).

    The last is optional: `prefix`, "x8" for eight tokens that all prompts with an x begin with, and
    other fields of `SimulatedRequest`.
    """
    requests = []
    for number, (name, at, length, output_len, *more) in enumerate(rows):
        options = dict(more[0]) if more else {}
        prefix = options.pop("prefix", "")
        prompt: int | list[int] = length
        if prefix:
            shared = [1000 * ord(prefix[0]) + i for i in range(int(prefix[1:]))]
            own = 1_000_000 * (number + 1)
            prompt = [*shared, *range(own, own + length - len(shared))]
        requests.append(SimulatedRequest(at, prompt, output_len, request_id=name, **options))
    return requests


def create_engine(options: Mapping[str, Any]) -> Engine:
    """Return an idle engine with fields of `EngineConfig`, and `ahead`, `token_cost` and
    `plan_cost`. Its scheduler follows the whole rule, without the fast path for decodes."""
    given: dict[str, Any] = {"max_num_seqs": 16, **options}
    ahead = given.pop("ahead", 0)
    token_cost = given.pop("token_cost", 0.0)
    plan_cost = given.pop("plan_cost", 0.0)
    given["async_scheduling"] = ahead > 0
    config = EngineConfig(**given)
    blocks = config.num_kv_blocks or 0
    resolved = resolve(
        config,
        model_max_len=blocks * config.block_size,
        num_kv_blocks=blocks,
        num_host_blocks=blocks if config.preemption_mode == "swap" else 0,
    )
    manager = create_manager(resolved)
    scheduler = create_scheduler(resolved, manager, scheduler_class=CarefulScheduler)
    if config.batching_policy == "chunked":
        scheduler.fill = continue_then_admit
    return Engine(resolved, scheduler, 1.0, token_cost, ahead=ahead, plan_cost=plan_cost)


def figures_of(trace: Trace, engine: Engine) -> Figures:
    """Return the numbers in the table under the player."""
    is_timed = engine.token_cost > 0 or engine.plan_cost > 0
    metrics = request_metrics(trace, "time" if is_timed else "step").values()
    firsts = [each["ttft"] for each in metrics if each["ttft"] is not None]
    gaps = [gap for each in metrics for gap in each["itl"]]
    unit = "time" if is_timed else "steps"
    scheduler = engine.scheduler
    figures = [
        ("steps", f"{sum(bool(record.requests) for record in trace)}"),
        ("tokens computed", f"{sum(record.num_tokens for record in trace)}"),
        ("prompt tokens from the prefix cache", f"{scheduler.num_hit_tokens}"),
        ("preemptions", f"{sum(len(record.preempted) for record in trace)}"),
        ("cached blocks evicted", f"{scheduler.manager.pool.num_evictions}"),
        (f"{unit} to the first token, mean", f"{sum(firsts) / max(1, len(firsts)):.1f}"),
        (f"{unit} to the first token, longest", f"{max(firsts, default=0):.1f}"),
        (f"longest {unit} between two tokens", f"{max(gaps, default=0):.1f}"),
        ("ended, in order", " ".join(n for record in trace for n in record.finished) or "none"),
    ]
    if is_timed:
        figures.insert(1, ("time until all have ended", f"{engine.clock:.1f}"))
    return figures
