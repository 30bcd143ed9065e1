"""Scenes of labs: the engine's parts at work on a few requests, as plain data for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.block_pool import InvariantError
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.lab.viz.metrics import request_metrics
from nanovllm.lab.viz.simulate import SAMPLED_TOKEN, SimulatedRequest, Simulation
from nanovllm.trace.trace import Trace

Lab = Mapping[str, Any]
Scene = dict[str, Any]
Report = Callable[[Scene], None]
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

    Attributes:
        number: the newest step.
    """

    def __init__(self, *arguments: Any, ahead: int) -> None:
        super().__init__(*arguments)
        self.ahead = ahead
        self.number = 0
        self.in_flight: list[tuple[SchedulerOutput, Any]] = []

    def step(self, step: int) -> None:
        """Plan a step, and take the results of the oldest one if enough are in flight."""
        self.number = step
        plan = self.scheduler.schedule()
        if plan.empty and not self.in_flight:
            raise RuntimeError(f"no waiting request could be scheduled: {plan.blocked_by}")
        if not plan.empty:
            self.in_flight.append((plan, self.recorder.begin(plan, step, self.clock)))
            self.clock += self.step_cost + self.token_cost * plan.num_tokens
        if plan.empty or len(self.in_flight) > self.ahead:
            self.take_result()
        while self.in_flight and not self.scheduler.has_unfinished:
            self.take_result()

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
        duration = self.step_cost + self.token_cost * plan.num_tokens
        self.recorder.finish(record, duration, result, outputs)
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
    """Return an idle engine with fields of `EngineConfig`, `ahead` and `token_cost`."""
    given = {"max_num_seqs": 16, "ahead": 0, "token_cost": 0.0, **options}
    ahead = given.pop("ahead")
    token_cost = given.pop("token_cost")
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
    return Engine(resolved, scheduler, 1.0, token_cost, ahead=ahead)


def engine(lab: Lab, options: Mapping[str, Any], report: Report) -> Scene:
    """Serve the lab's requests with one engine, whose trace the player shows."""
    simulation = create_engine({**lab["engine"], **options})
    scene: Scene = {}
    try:
        simulation.serve(requests_of(lab["requests"]), MAX_STEPS)
    except Exception as error:
        scene |= {"error": error, "step": simulation.number}
    trace = simulation.recorder.trace
    if len(trace):
        scene["trace"] = b"".join(trace.lines()).decode()
        scene["figures"] = figures_of(trace, simulation.scheduler)
    return scene


def figures_of(trace: Trace, scheduler: Scheduler) -> Figures:
    """Return the numbers in the table under the player."""
    metrics = request_metrics(trace)
    firsts = [each["ttft"] for each in metrics.values() if each["ttft"] is not None]
    gaps = [gap for each in metrics.values() for gap in each["itl"]]
    order = [name for record in trace for name in record.finished]
    numbers = [
        ("steps", f"{sum(bool(record.requests) for record in trace)}"),
        ("tokens computed", f"{sum(record.num_tokens for record in trace)}"),
        ("tokens found in the cache", f"{scheduler.num_hit_tokens}"),
        ("preemptions", f"{sum(len(record.preempted) for record in trace)}"),
        ("cached blocks evicted", f"{scheduler.manager.pool.num_evictions}"),
        ("steps to the first token, mean", f"{sum(firsts) / max(1, len(firsts)):.1f}"),
        ("steps to the first token, longest", f"{max(firsts, default=0):.0f}"),
        ("longest pause between two tokens", f"{max(gaps, default=0):.0f} steps"),
        ("end in this order", " ".join(order) or "none"),
    ]
    return numbers


SCENES: dict[str, Callable[[Lab, Mapping[str, Any], Report], Scene]] = {"engine": engine}
