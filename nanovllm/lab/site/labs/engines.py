"""One engine of a lab: the real scheduler, steps in flight, and the numbers of its trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.block_pool import InvariantError
from nanovllm.core.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.core.scheduler import Scheduler, continue_then_admit
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.lab.site.labs.lanes import Piece, num_computed_again, piece
from nanovllm.lab.viz.metrics import request_metrics
from nanovllm.lab.viz.simulate import SAMPLED_TOKEN, SimulatedRequest, Simulation
from nanovllm.trace.record import StepRecord
from nanovllm.trace.trace import Trace

Figures = list[tuple[str, str]]
MAX_STEPS = 400


class CarefulScheduler(Scheduler):
    """A scheduler whose plans are checked before they would be run.

    Attributes:
        fault: the first share of a request whose blocks the same step has taken. The run continues
            without this share, so that the reader sees what the rule costs; vLLM does the same if
            its policy is priority.
        planned: the newest plan, until it is run: as far as it is complete, if planning fails.
    """

    fault: InvariantError | None = None
    planned: SchedulerOutput | None = None

    def note(self, plan: SchedulerOutput) -> None:
        """Remember the plan that is being made; a hook `before_step`."""
        self.planned = plan

    def schedule(self) -> SchedulerOutput:
        """Plan a step.

        Raises:
            InvariantError: the step would write to blocks that its request does not hold, compute
                more tokens than its budget allows, or sample with a token that is not known.
        """
        plan = super().schedule()
        self._check_once(plan)
        for share in [each for each in plan.requests if each.request_id in plan.preempted]:
            self._take_back(share, plan)
        for share in plan.requests:
            self._check(share)
        if plan.num_tokens > self.settings.token_budget:
            raise InvariantError(
                f"the step computes {plan.num_tokens} tokens, and the budget is "
                f"{self.settings.token_budget}"
            )
        return plan

    def _check_once(self, plan: SchedulerOutput) -> None:
        """Check that each request has one share at most, and that the next one in line has tokens
        left to compute."""
        names = [share.request_id for share in plan.requests]
        for name in names:
            if names.count(name) > 1:
                raise InvariantError(
                    f"{name} has {names.count(name)} shares of this step: the second one needs the "
                    "token that the first one samples, and no token is known before its step has "
                    "ended"
                )
        request = self.queues.next_in_line
        if request is None or plan.preempted:
            return
        found = len(self.manager.get_computed_blocks(request)) * self.manager.block_size
        if found >= request.num_tokens:
            raise InvariantError(
                f"all {request.num_tokens} tokens of {request.request_id} are found in the prefix "
                "cache: none is left to compute, so there are no logits to sample from"
            )

    def _take_back(self, share: ScheduledRequest, plan: SchedulerOutput) -> None:
        """Take a share out of the plan whose request was preempted after it had got the share."""
        name = share.request_id
        self.fault = self.fault or InvariantError(
            f"{name} has a share of this step already, and its blocks are taken away: what it "
            "computes would overwrite the keys and values of other requests"
        )
        plan.requests.remove(share)
        plan.num_tokens -= share.num_tokens
        plan.num_samples -= share.samples > 0
        self.queues.requests[name].num_pending_tokens -= share.samples
        if plan.empty:
            self.queues.in_flight = [each for each in self.queues.in_flight if each is not plan]

    def _check(self, share: ScheduledRequest) -> None:
        name = share.request_id
        end = share.start + share.num_tokens
        num_blocks = len(self.manager.tables.get(name, []))
        if num_blocks * self.manager.block_size < end:
            raise InvariantError(
                f"{name} has a share of this step, tokens {share.start} to {end - 1}, and holds "
                f"{num_blocks} blocks: what it computes would overwrite the keys and values of "
                "other requests"
            )
        if share.last_is_pending and self.queues.requests[name].looks_back:
            raise InvariantError(
                f"{name} has a repetition penalty, which depends on its newest token, and this "
                "token is still in flight: the step would sample as if it had never been there"
            )


@dataclass
class StepInFlight:
    """A step whose result the host has not taken.

    Attributes:
        computed: when the device computes it.
        shares: the same of each request in it.
    """

    plan: SchedulerOutput
    record: StepRecord
    computed: Piece
    shares: dict[str, Piece]

    @property
    def duration(self) -> float:
        """Time in which the device computes it."""
        duration: float = self.computed["to"] - self.computed["from"]
        return duration


class Engine(Simulation):
    """A simulation of a host and a device: the host may plan steps before the results of earlier
    ones arrive. Its `clock` is the host's.

    Args:
        ahead: steps in flight, at most, while another is planned.
        plan_cost: time to plan a step.

    Attributes:
        looks_back: requests whose next token depends on all earlier ones, as with a penalty.
        number: the newest step.
        fault_step: the step of the scheduler's fault; -1: there is none.
        host, device: what they did when.
        rows: the same of each request.
        num_wasted: tokens that were computed for requests that had ended.
    """

    scheduler: CarefulScheduler

    def __init__(self, *arguments: Any, ahead: int = 0, plan_cost: float = 0.0) -> None:
        super().__init__(*arguments)
        self.ahead = ahead
        self.looks_back: Collection[str] = ()
        self.plan_cost = plan_cost
        self.number = 0
        self.fault_step = -1
        self.in_flight: list[StepInFlight] = []
        self.host: list[Piece] = []
        self.device: list[Piece] = []
        self.rows: dict[str, list[Piece]] = {}
        self.num_wasted = 0

    def add(self, name: str, source: SimulatedRequest) -> None:
        """Queue a request."""
        super().add(name, source)
        self.scheduler.queues.requests[name].looks_back = name in self.looks_back
        self.rows[name] = []

    def step(self, step: int) -> None:
        """Plan a step, and take the results of the oldest one if enough are in flight."""
        self.number = step
        plan = self.scheduler.schedule()
        if self.scheduler.fault and self.fault_step < 0:
            self.fault_step = step
        self.scheduler.planned = None
        if not plan.empty:
            self.launch(plan, step)
        elif not self.in_flight:
            raise self.standstill(plan)
        if plan.empty or len(self.in_flight) > self.ahead:
            self.take_result()
        while self.in_flight and not self.scheduler.has_unfinished:
            self.take_result()

    def standstill(self, plan: SchedulerOutput) -> Exception:
        """Return an error that describes why nothing can be computed."""
        requests = self.scheduler.queues.requests.values()
        pending = [each.request_id for each in requests if each.num_pending_tokens]
        if pending:
            return InvariantError(
                f"no step is in flight, and the scheduler still waits for tokens of {pending[0]}: "
                "they have all arrived, and it has not taken them off"
            )
        names = ", ".join(each.request_id for each in self.scheduler.queues.running)
        request = self.scheduler.queues.next_in_line
        if names:
            return RuntimeError(f"the step computes nothing: the share of {names} is 0")
        if request is None:
            return InvariantError("a request has not ended, and is in no queue")
        settings = self.scheduler.settings
        free = self.scheduler.manager.pool.num_free
        reasons = {
            "kv blocks": f"it needs more blocks than the {free} that are free, and no request runs "
            "whose end could free some",
            "max_num_batched_tokens": f"its share is 0, although the budget of "
            f"{settings.token_budget} tokens is not used: it misses {request.num_missing_tokens}",
        }
        why = reasons.get(plan.blocked_by, plan.blocked_by or "`admit` has given no reason")
        return RuntimeError(f"{request.request_id} waits forever: {why}")

    def draw_failure(self) -> None:
        """Record the step that has failed, as far as it was planned, so that it is drawn, too."""
        plan = self.scheduler.planned
        if plan is not None:
            known = self.scheduler.queues.requests
            plan.requests = [share for share in plan.requests if share.request_id in known]
            self.launch(plan, self.number)
        for step in self.in_flight:
            self.recorder.finish(step.record, step.duration, ModelRunnerOutput(), [])

    def launch(self, plan: SchedulerOutput, step: int) -> None:
        """Let the device compute a step when it is free."""
        begin = self.clock
        self.clock += self.plan_cost
        self.host.append(piece(begin, self.clock, "plan", f"{step}", f"plans step {step}"))
        start = max(self.clock, self.device[-1]["to"] if self.device else 0.0)
        end = start + self.step_cost + self.token_cost * plan.num_tokens
        kind = "prefill" if plan.num_prefill_tokens else "decode"
        parts = " ".join(f"{each.request_id}:{each.num_tokens}" for each in plan.requests)
        self.device.append(piece(start, end, kind, f"{step}", f"step {step}: {parts}"))
        record = self.recorder.begin(plan, step, start)
        shares: dict[str, Piece] = {}
        for share in record.requests:
            name = share.request_id
            words = f"step {step}: {share.num_tokens} tokens of {name}"
            shares[name] = piece(start, end, share.kind, f"{share.num_tokens}", words)
        for request in self.scheduler.queues.running:
            name = request.request_id
            waits = piece(start, end, "waits", "", f"step {step}: {name} has no share")
            self.rows[name].append(shares.get(name, waits))
        self.in_flight.append(StepInFlight(plan, record, self.device[-1], shares))

    def take_result(self) -> None:
        """Wait for the oldest step, and give its tokens to the scheduler."""
        step = self.in_flight[0]
        plan = step.plan
        self.clock = max(self.clock, step.computed["to"])
        for share in plan.requests:
            if share.request_id not in self.scheduler.queues.requests:
                self.num_wasted += share.num_tokens
                step.shares[share.request_id]["kind"] = "wasted"
        result = ModelRunnerOutput(
            {
                each.request_id: [SampledToken(SAMPLED_TOKEN)]
                for each in plan.requests
                if each.samples
            }
        )
        outputs = self.scheduler.update_from_output(plan, result)
        self.recorder.finish(step.record, step.duration, result, outputs)
        del self.in_flight[0]
        self.scheduler.check_invariants()

    @property
    def idle_time(self) -> float:
        """Time in which the device waits between two steps."""
        return sum(b["from"] - a["to"] for a, b in pairwise(self.device))


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
    """Return an idle engine with fields of `EngineConfig`, and `ahead`, `token_cost`, `plan_cost`
    and `looks_back`. Its scheduler follows the whole rule, without the fast path for decodes."""
    given: dict[str, Any] = {"max_num_seqs": 16, **options}
    ahead = given.pop("ahead", 0)
    token_cost = given.pop("token_cost", 0.0)
    plan_cost = given.pop("plan_cost", 0.0)
    looks_back = given.pop("looks_back", ())
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
    assert isinstance(scheduler, CarefulScheduler)
    scheduler.hooks.before_step = (*scheduler.hooks.before_step, scheduler.note)
    engine = Engine(resolved, scheduler, 1.0, token_cost, ahead=ahead, plan_cost=plan_cost)
    engine.looks_back = looks_back
    return engine


def figures_of(trace: Trace, engine: Engine, failed: bool) -> Figures:
    """Return the numbers in the table under the player; `failed`: the run has ended too early."""
    is_timed = engine.token_cost > 0 or engine.plan_cost > 0
    metrics = request_metrics(trace, "time" if is_timed else "step")
    firsts = [each["ttft"] for each in metrics.values() if each["ttft"] is not None]
    gaps = [gap for each in metrics.values() for gap in each["itl"]]
    unit = "time" if is_timed else "steps"
    scheduler = engine.scheduler
    figures = [
        ("steps that compute something", f"{sum(bool(record.requests) for record in trace)}"),
        ("tokens computed", f"{sum(record.num_tokens for record in trace)}"),
        ("tokens computed again", f"{num_computed_again(trace)}"),
        ("prompt tokens from the prefix cache", f"{scheduler.num_hit_tokens}"),
        ("preemptions", f"{sum(len(record.preempted) for record in trace)}"),
        ("cached blocks evicted", f"{scheduler.manager.pool.num_evictions}"),
        (f"{unit} to the first token, mean", f"{sum(firsts) / max(1, len(firsts)):.1f}"),
        (f"{unit} to the first token, longest", f"{max(firsts, default=0):.1f}"),
        (f"longest {unit} between two tokens", f"{max(gaps, default=0):.1f}"),
        ("ended, in order", " ".join(n for record in trace for n in record.finished) or "none"),
    ]
    first = next(iter(metrics.items()), None)
    if first is not None:
        name, metric = first
        latency = metric["latency"]
        value = "has not ended" if latency is None else f"{latency:.0f}"
        figures.insert(0, (f"{unit} until {name}, the oldest, has ended", value))
    if is_timed:
        figures.insert(
            1, ("time until all have ended", "have not ended" if failed else f"{engine.clock:.1f}")
        )
    if engine.plan_cost:
        figures.insert(0, ("time in which the device is idle", f"{engine.idle_time:.1f}"))
        figures.insert(1, ("wasted tokens", f"{engine.num_wasted}"))
    return figures
