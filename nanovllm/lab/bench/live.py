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
from typing import NamedTuple

from nanovllm.data.config import EngineConfig
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.groups import Grid
from nanovllm.engine.llm import LLMEngine
from nanovllm.lab.bench.metrics import alternate, percentile
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal
from nanovllm.lab.processes import run_ranks
from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.calibrate import StepTimer
from nanovllm.simulate.measured import MeasuredCost, write_cost
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.simulation import FleetPlan, plan_fleet
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


class Times(NamedTuple):
    """When a request arrived, and its first and last token, in seconds since the load began."""

    arrival: float
    first_token: float
    last_token: float
    num_output_tokens: int


@dataclass(frozen=True)
class Served:
    """How a load was served.

    Attributes:
        tpot, ttft, p99_ttft: in seconds; the means over requests, and the 99th percentile.
        throughput: output tokens per second.
        hit_rate: share of looked-up tokens that the prefix cache had.
    """

    tpot: float
    throughput: float
    ttft: float
    p99_ttft: float
    hit_rate: float
    num_preemptions: float


# Of `Served`: title, unit, factor, and the goal for the error in percent.
FIGURES = {
    "tpot": ("mean TPOT", "ms", 1000, 3),
    "throughput": ("output throughput", "tokens/s", 1, 3),
    "ttft": ("mean TTFT", "ms", 1000, 5),
    "p99_ttft": ("P99 TTFT", "ms", 1000, 10),
}


def live(setting: Setting) -> Iterator[Row]:
    """Loads on a live engine, alternating, and simulated."""
    measure = partial(measure_loads, setting)
    found = run_ranks(measure, Grid(), threads=setting.threads, timeout=setting.seconds)[0]
    for name, runs, simulated in found:
        yield from compare(name, runs, simulated)


def measure_loads(setting: Setting) -> list[tuple[str, list[Served], Served]]:
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

    def run(load: LiveLoad) -> Served:
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
    most = simulate(fleet, probe).throughput / mean_output
    return create(load.share * most, max(4, min(load.share, 1.0) * most * seconds))


def serve(
    engine: LLMEngine,
    requests: Sequence[WorkloadRequest],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Serve requests live: each one arrives at its time, and is queued before the next step."""
    core = engine.core
    core.reset_prefix_cache()
    before = core.stats
    prompts = {each.request_id: draw_tokens(each, core.limits.vocab_size) for each in requests}
    waiting = deque(requests)
    tokens: dict[str, list[float]] = {each.request_id: [] for each in requests}
    begin = clock()
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].arrival / SECOND <= clock() - begin:
            request = waiting.popleft()
            engine.add_request(
                request.request_id,
                {"prompt_token_ids": prompts[request.request_id]},
                SamplingParams(
                    temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
                ),
            )
        if not engine.has_unfinished:
            sleep(max(0.0, waiting[0].arrival / SECOND - (clock() - begin)))
            continue
        outputs = engine.step()
        now = clock() - begin
        for output in outputs:
            tokens[output.request_id].append(now)
    after = core.stats
    queried = after.num_queried_tokens - before.num_queried_tokens
    return figures(
        [
            Times(
                each.arrival / SECOND,
                tokens[each.request_id][0],
                tokens[each.request_id][-1],
                each.num_output_tokens,
            )
            for each in requests
        ],
        hit_rate=(after.num_hit_tokens - before.num_hit_tokens) / queried,
        num_preemptions=after.num_preemptions - before.num_preemptions,
    )


def simulate(fleet: FleetPlan, requests: Sequence[WorkloadRequest]) -> Served:
    """Serve the same requests on a simulated engine."""
    workload = Workload("live", requests, BLOCK_SIZE)
    result = fleet.create_fleet(workload).run(workload)
    times = []
    for each in result.requests:
        assert each.first_token is not None and each.last_token is not None
        times.append(
            Times(
                each.arrival / SECOND,
                each.first_token / SECOND,
                each.last_token / SECOND,
                each.num_output_tokens,
            )
        )
    (replica,) = result.replicas
    return figures(
        times,
        hit_rate=replica.num_hit_tokens / replica.num_queried_tokens,
        num_preemptions=replica.num_preemptions,
    )


def figures(times: Sequence[Times], hit_rate: float, num_preemptions: int) -> Served:
    """Compute the figures of a run from the times of its requests."""
    ttft = [each.first_token - each.arrival for each in times]
    return Served(
        tpot=mean(
            (each.last_token - each.first_token) / (each.num_output_tokens - 1)
            for each in times
            if each.num_output_tokens > 1
        ),
        throughput=sum(each.num_output_tokens for each in times)
        / max(each.last_token for each in times),
        ttft=mean(ttft),
        p99_ttft=percentile(ttft, 99),
        hit_rate=hit_rate,
        num_preemptions=num_preemptions,
    )


def compare(name: str, runs: Sequence[Served], simulated: Served) -> Iterator[Row]:
    """Compare a simulation with the mean of the live runs, and these with each other."""
    for field, (title, unit, factor, allowed) in FIGURES.items():
        values = [factor * getattr(run, field) for run in runs]
        difference = 100 * (max(values) - min(values)) / mean(values)
        error = 100 * (factor * getattr(simulated, field) / mean(values) - 1)
        yield {
            "table": "Live and simulated",
            "load": name,
            "figure": f"{title}, {unit}",
            "live": values,
            "difference of live runs %": difference,
            "simulated": factor * getattr(simulated, field),
            "error %": error,
            "hit rate, live": mean(run.hit_rate for run in runs),
            "hit rate, simulated": simulated.hit_rate,
            "preemptions, live": mean(run.num_preemptions for run in runs),
            "preemptions, simulated": simulated.num_preemptions,
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
