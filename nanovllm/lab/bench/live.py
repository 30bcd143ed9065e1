"""`nanovllm bench simulate --part live`: loads on a live engine, and their simulation with step
times that `nanovllm simulate --calibrate` has measured."""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

from nanovllm.data.config import EngineConfig
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.groups import Grid
from nanovllm.engine.llm import LLMEngine
from nanovllm.lab.bench.metrics import alternate
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal
from nanovllm.lab.processes import run_ranks
from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.calibrate import StepTimer
from nanovllm.simulate.measured import MeasuredCost, write_cost
from nanovllm.simulate.plan import FleetPlan, plan_fleet
from nanovllm.simulate.report import summarize
from nanovllm.simulate.results import FleetResult, ReplicaCounters, ServedRequest
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest

CALIBRATION_SECONDS = 120.0
# Of one run of a load.
LOAD_SECONDS = 20.0
MAX_NUM_SEQS = 32
BLOCK_SIZE = 16
LENGTHS = SyntheticWorkload(random_input_len=144, random_output_len=48, random_range_ratio=0.75)
# Twelve prefixes of 16 blocks each do not fit in a pool of 160 blocks, half of which running
# requests need.
PREFIXES = replace(LENGTHS, random_input_len=64, random_prefix_len=256, num_prefixes=12)


@dataclass(frozen=True)
class LiveLoad:
    """A load.

    Attributes:
        share: of the rate that the engine can serve.
        lengths: of its requests.
        num_kv_blocks: of the engine; None: as many as its memory holds.
    """

    name: str
    share: float
    lengths: SyntheticWorkload = LENGTHS
    num_kv_blocks: int | None = None


LOADS = [
    LiveLoad("light", 0.3),
    LiveLoad("near saturation", 0.85),
    LiveLoad("past saturation", 1.5),
    LiveLoad("thrashing prefix cache", 0.7, PREFIXES, num_kv_blocks=160),
]


# Of `summarize`: title, unit, and the goal for the error in percent.
FIGURES = {
    "mean_tpot_ms": ("mean TPOT", "ms", 3),
    "output_throughput": ("output throughput", "tokens/s", 3),
    "mean_ttft_ms": ("mean TTFT", "ms", 5),
    "p99_ttft_ms": ("P99 TTFT", "ms", 10),
}


def live(setting: Setting) -> Iterator[Row]:
    """Loads on a live engine, alternating, and simulated."""
    measure = partial(measure_loads, setting)
    found = run_ranks(measure, Grid(), threads=setting.threads, timeout=setting.seconds)[0]
    for name, runs, simulated in found:
        yield from compare(name, runs, simulated)


def measure_loads(setting: Setting) -> list[tuple[str, list[FleetResult], FleetResult]]:
    """Serve each load live and simulated; returns for each its name, the live runs and the
    simulated one. A part of the calibration precedes each live run, so that a machine whose speed
    drifts is the same one for both."""
    options = setting.options(
        enable_prefix_caching=True, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE
    )
    configs = {
        load.name: EngineConfig(**options, num_kv_blocks=load.num_kv_blocks) for load in LOADS
    }
    timer = StepTimer(LLMEngine(EngineConfig(**options)))
    timer.measure(1.0 if setting.dry_run else CALIBRATION_SECONDS / 3)
    rates = timer.create_cost()
    num_runs = max(2, setting.repeats)
    seconds = 0.1 if setting.dry_run else CALIBRATION_SECONDS * 2 / 3 / (num_runs * len(LOADS))
    engines: dict[int | None, LLMEngine] = {}
    requests: dict[str, list[WorkloadRequest]] = {}
    for load in LOADS:
        config = configs[load.name]
        duration = 1.0 if setting.dry_run else LOAD_SECONDS
        requests[load.name] = create_requests(load, plan(config, rates), duration, setting.seed)
        if load.num_kv_blocks not in engines:
            engines[load.num_kv_blocks] = LLMEngine(config)

    def run(load: LiveLoad) -> FleetResult:
        timer.measure(seconds)
        engine = engines[load.num_kv_blocks]
        # It compiles at first, and has been idle since its last load.
        serve(engine, requests[load.name][:4])
        return serve(engine, requests[load.name])

    found = alternate({load.name: partial(run, load) for load in LOADS}, num_runs, warm_up=0)
    cost = timer.create_cost()
    return [
        (name, runs, simulate(plan(configs[name], cost), requests[name]))
        for name, runs in found.items()
    ]


def plan(config: EngineConfig, cost: MeasuredCost) -> FleetPlan:
    """Describe a simulated engine with the same settings, by the file of its cost."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder, "this.json")
        write_cost(cost, machine)
        return plan_fleet(FleetConfig(machine=str(machine)), replace(config, model=cost.model))


def create_requests(
    load: LiveLoad, fleet: FleetPlan, seconds: float, seed: int
) -> list[WorkloadRequest]:
    """Create the requests of a load that takes about `seconds`, at a share of the rate at which the
    engine serves such requests when all wait."""

    def create(rate: float, count: float) -> list[WorkloadRequest]:
        lengths = replace(load.lengths, request_rate=rate, num_prompts=round(count), seed=seed)
        return list(create_workload(lengths, BLOCK_SIZE).requests)

    probe = create(rate=1e6, count=100)
    mean_output = mean(each.num_output_tokens for each in probe)
    most = figure(simulate(fleet, probe), "output_throughput") / mean_output
    return create(load.share * most, max(4, min(load.share, 1.0) * most * seconds))


def serve(
    engine: LLMEngine,
    requests: Sequence[WorkloadRequest],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> FleetResult:
    """Serve requests live: each one arrives at its time, and is queued before the next step."""
    core = engine.core
    core.reset_prefix_cache()
    before = core.stats
    prompts = {each.request_id: draw_tokens(each, core.limits.vocab_size) for each in requests}
    waiting = deque(requests)
    served: dict[str, ServedRequest] = {}
    begin = clock()
    now = 0
    while waiting or engine.has_unfinished:
        now = round((clock() - begin) * SECOND)
        while waiting and waiting[0].arrival <= now:
            request = waiting.popleft()
            served[request.request_id] = ServedRequest(
                request_id=request.request_id,
                arrival=request.arrival,
                num_prompt_tokens=request.num_prompt_tokens,
            )
            engine.add_request(
                request.request_id,
                {"prompt_token_ids": prompts[request.request_id]},
                SamplingParams(
                    temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
                ),
            )
        if not engine.has_unfinished:
            sleep((waiting[0].arrival - now) / SECOND)
            continue
        outputs = engine.step()
        now = round((clock() - begin) * SECOND)
        for output in outputs:
            each = served[output.request_id]
            each.num_output_tokens += 1
            each.first_token = each.first_token or now
            each.last_token = now
    after = core.stats
    counters = ReplicaCounters(
        num_queried_tokens=after.num_queried_tokens - before.num_queried_tokens,
        num_hit_tokens=after.num_hit_tokens - before.num_hit_tokens,
        num_preemptions=after.num_preemptions - before.num_preemptions,
    )
    return FleetResult(requests=list(served.values()), replicas=[counters], duration=now)


def simulate(fleet: FleetPlan, requests: Sequence[WorkloadRequest]) -> FleetResult:
    """Serve the same requests on a simulated engine."""
    workload = Workload(requests, BLOCK_SIZE)
    return fleet.create_fleet(workload).run(workload)


def figure(result: FleetResult, name: str) -> float:
    """Return a number of the summary."""
    value = summarize(result)[name]
    assert isinstance(value, float | int)
    return value


def compare(name: str, runs: Sequence[FleetResult], simulated: FleetResult) -> Iterator[Row]:
    """Compare a simulation with the mean of the live runs, and these with each other."""
    for field, (title, unit, allowed) in FIGURES.items():
        values = [figure(run, field) for run in runs]
        difference = 100 * (max(values) - min(values)) / mean(values)
        error = 100 * (figure(simulated, field) / mean(values) - 1)
        yield {
            "table": "Live and simulated",
            "load": name,
            "figure": f"{title}, {unit}",
            "live": values,
            "difference of live runs %": difference,
            "simulated": figure(simulated, field),
            "error %": error,
            "hit rate, live": mean(figure(run, "prefix_cache_hit_rate") for run in runs),
            "hit rate, simulated": figure(simulated, "prefix_cache_hit_rate"),
            "preemptions, live": mean(figure(run, "num_preemptions") for run in runs),
            "preemptions, simulated": figure(simulated, "num_preemptions"),
        }
        yield goal(
            f"{name}: error of {title}", abs(error), "%", at_most=max(allowed, 2 * difference)
        )


def draw_tokens(request: WorkloadRequest, vocab_size: int) -> list[int]:
    """Draw a prompt; two have equal tokens as far as the numbers of their blocks are equal."""
    names: Sequence[int | str] = request.prefix_ids or [request.request_id]
    per_name = BLOCK_SIZE if request.prefix_ids else request.num_prompt_tokens
    drawn = [random.Random(name) for name in names]
    tokens = [numbers.randrange(vocab_size) for numbers in drawn for _ in range(per_name)]
    return tokens[: request.num_prompt_tokens]
