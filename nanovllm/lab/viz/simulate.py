"""Runs the real scheduler and the real block tables without a model: thousands of steps in less
than a second."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import DEFAULT_TOKEN_BUDGET, ResolvedConfig, resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.trace.recorder import StepRecorder
from nanovllm.trace.trace import Trace

SAMPLED_TOKEN = 7


@dataclass
class SimulatedRequest:
    """A request of a simulation.

    Attributes:
        arrival_step: it is queued right before the step with this number.
        prompt: the prompt's length, or its token ids. Prompts given by length share no prefix with
            any other; equal token ids hit the prefix cache.
        output_len: tokens it generates.
        priority: smaller runs earlier, with `scheduling_policy="priority"`.
        request_id: by default r0, r1, ... in the order given.
        abort_step: its client disconnects right before this step, if the request has not ended by
            then.
    """

    arrival_step: int
    prompt: int | Sequence[int]
    output_len: int
    priority: int = 0
    request_id: str | None = None
    abort_step: int | None = None


def simulate(
    requests: Sequence[SimulatedRequest],
    *,
    num_kv_blocks: int = 1024,
    num_host_blocks: int | None = None,
    step_cost: float = 1.0,
    token_cost: float = 0.0,
    max_steps: int = 100_000,
    make_manager: Callable[[ResolvedConfig], KVCacheManager] = create_manager,
    scheduler_class: type[Scheduler] = Scheduler,
    **engine_options: Any,
) -> Trace:
    """Serve requests with the real scheduler and the real KV cache manager, and a runner that
    samples token 7.

    Args:
        requests: the requests, with their arrival steps.
        num_kv_blocks: blocks in the pool.
        num_host_blocks: blocks in host memory for swapped requests; by default as many as the pool
            has, if `preemption_mode="swap"`.
        step_cost, token_cost: a step takes `step_cost + token_cost * tokens` units of simulated
            time, which the records give as `start` and `duration`. By default every step takes one
            unit.
        max_steps: give up after so many steps.
        make_manager, scheduler_class: for experiments, a manager of blocks or a scheduler that
            decides in another way.
        engine_options: fields of `EngineConfig`, such as `block_size`, `max_num_batched_tokens`,
            `max_num_seqs`, `batching_policy`, `enable_chunked_prefill`, `preemption_mode`,
            `check_invariants`. A token budget below 256 lowers the default of `max_num_seqs` with
            it.

    Returns:
        The trace. Steps without any request are counted, but recorded only if an abort left nothing
        to compute: the next record's `step` is that of the next arrival.

    Raises:
        ValueError: a request that could never run, or an invalid option.
        RuntimeError: requests are left after `max_steps`.
    """
    budget = engine_options.get("max_num_batched_tokens") or DEFAULT_TOKEN_BUDGET
    engine_options = {"max_num_seqs": min(256, budget)} | engine_options
    given = EngineConfig(num_kv_blocks=num_kv_blocks, **engine_options)
    if num_host_blocks is None:
        num_host_blocks = num_kv_blocks if given.preemption_mode == "swap" else 0
    config = resolve(
        given,
        model_max_len=num_kv_blocks * given.block_size,
        num_kv_blocks=num_kv_blocks,
        num_host_blocks=num_host_blocks,
    )
    manager = make_manager(config)
    scheduler = create_scheduler(config, manager, scheduler_class=scheduler_class)
    return Simulation(config, scheduler, step_cost, token_cost).serve(requests, max_steps)


class Simulation:
    """A scheduler, a runner that samples token 7, and a record of the steps.

    Attributes:
        clock: simulated time.
    """

    def __init__(
        self, config: ResolvedConfig, scheduler: Scheduler, step_cost: float, token_cost: float
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.step_cost = step_cost
        self.token_cost = token_cost
        settings = TraceSettings(model="simulated", time_unit="simulated units")
        settings |= config.trace_settings
        self.recorder = StepRecorder(Trace(settings=settings), scheduler)
        self.clock = 0.0
        self.num_added = 0

    def serve(self, requests: Sequence[SimulatedRequest], max_steps: int) -> Trace:
        """Serve all requests; see `simulate`."""
        named = [(r.request_id or f"r{i}", r) for i, r in enumerate(requests)]
        arrivals = deque(sorted(named, key=lambda pair: pair[1].arrival_step))
        aborts = {name: r.abort_step for name, r in named if r.abort_step is not None}
        step = 0
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                if not arrivals:
                    return self.recorder.trace
                idle = max(0, arrivals[0][1].arrival_step - step)
                step += idle
                self.clock += idle * self.step_cost
            while arrivals and arrivals[0][1].arrival_step <= step:
                self.add(*arrivals.popleft())
            for name in [name for name, at in aborts.items() if at <= step]:
                self.abort(name, step)
                del aborts[name]
            if self.scheduler.has_unfinished:
                self.step(step)
                step += 1
        raise RuntimeError(f"requests are unfinished after {max_steps} steps")

    def add(self, name: str, source: SimulatedRequest) -> None:
        # By default ids that no other request has, so that the prefix cache has no accidental hits.
        first = 1_000_000 * (self.num_added + 1)
        prompt = list(
            range(first, first + source.prompt) if isinstance(source.prompt, int) else source.prompt
        )
        params = SamplingParams(max_tokens=source.output_len, ignore_eos=True, temperature=0.0)
        request = Request(
            EngineRequest(name, prompt, params, priority=source.priority), self.num_added
        )
        if self.config.given.scheduling_policy == "fcfs":
            request.order = (0, self.num_added)
        self.scheduler.add_request(request)
        self.recorder.arrived(request, self.clock)
        self.num_added += 1

    def abort(self, name: str, step: int) -> None:
        if self.scheduler.abort_request(name):
            self.recorder.ended(name, "abort")
        if not self.scheduler.has_unfinished:
            self.recorder.flush(step, self.clock)

    def step(self, step: int) -> None:
        plan = self.scheduler.schedule()
        if self.config.given.check_invariants:
            self.scheduler.check_invariants()
        if plan.empty:
            raise RuntimeError(f"no waiting request could be scheduled: {plan.blocked_by}")
        record = self.recorder.begin(plan, step, self.clock)
        # As the runner: a token for each request whose known tokens are all computed.
        result = ModelRunnerOutput(
            {r.request_id: [SampledToken(SAMPLED_TOKEN)] for r in plan.requests if r.samples}
        )
        outputs = self.scheduler.update_from_output(plan, result)
        duration = self.step_cost + self.token_cost * plan.num_tokens
        self.recorder.finish(record, duration, result, outputs)
        self.clock += duration
        if self.config.given.check_invariants:
            self.scheduler.check_invariants()
