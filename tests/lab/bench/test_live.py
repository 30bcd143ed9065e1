"""Live loads and simulated ones, on a device whose step times are known exactly."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from nanovllm.data.config import EngineConfig
from nanovllm.engine.llm import LLMEngine
from nanovllm.executor import virtual_clock
from nanovllm.lab.bench.live import (
    LOADS,
    LiveLoad,
    compare,
    create_requests,
    figure,
    plan,
    serve,
    simulate,
)
from nanovllm.simulate.calibrate import StepTimer, joining_load, loads
from nanovllm.simulate.plan import plan_fleet
from nanovllm.simulate.report import MILLISECOND
from nanovllm.simulate.results import FleetResult, ReplicaCounters, ServedRequest
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.workload import SECOND

# 10 ms per step and more, and no sleep: a virtual second passes in a nanosecond.
SLEEP = '{"machine": "L40S", "model": "llama-3.1-8b", "scale": 1e-9}'


class Clock:
    """A clock that only the device and waiting move."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.idle_until = 0.0
        self.timer: StepTimer | None = None
        patch.setattr(virtual_clock, "read_clock", lambda scale: round(self.now() * SECOND))

    def now(self) -> float:
        """The time in seconds."""
        return max(self.idle_until, 0.0 if self.timer is None else self.timer.now())

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        # A nanosecond more: floats round, and an arrival must not stay ahead for ever.
        self.idle_until = self.now() + seconds + 1e-9


def start(
    folder: pathlib.Path, clock: Clock, num_kv_blocks: int | None, layout: dict[str, int]
) -> StepTimer:
    clock.timer = None
    config = EngineConfig(
        model=str(folder),
        device="sleep",
        sleep_config=SLEEP,
        num_kv_blocks=num_kv_blocks or 1000,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        async_scheduling=False,
        **layout,  # type: ignore[arg-type]
    )
    clock.timer = StepTimer(LLMEngine(config))
    return clock.timer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_calibration_finds_a_known_cost_and_live_loads_take_as_long_as_simulated_ones(
    tiny_model: pathlib.Path, clock: Clock, layout: dict[str, int]
) -> None:
    timer = start(tiny_model, clock, None, layout)
    for load in loads(timer.core.resolved, timer.numbers):
        timer.seen += timer.run(load)
    timer.unseen += timer.run(joining_load(timer.core.resolved, timer.numbers, 4))
    cost = timer.create_cost()
    timer.core.close()
    assert cost.error < 0.01
    assert 0.97 < cost.low <= cost.high < 1.03
    for load in LOADS[1::2]:
        timer = start(tiny_model, clock, load.num_kv_blocks, layout)
        simulated_device = replace(timer.core.config, device="cpu", sleep_config=None)
        fleet = plan(simulated_device, cost)
        requests = create_requests(load, fleet, 20.0, seed=1)
        live = serve(timer.engine, requests, clock.now, clock.sleep)
        simulated = simulate(fleet, requests)
        timer.core.close()
        check_figures(simulated, live)
        hit_rates = [figure(result, "prefix_cache_hit_rate") for result in (live, simulated)]
        assert hit_rates[1] == pytest.approx(hit_rates[0], abs=0.05)
    assert 0 < hit_rates[0] < 1, "prefixes are found, and evicted"


def check_figures(simulated: FleetResult, live: FleetResult, ttft: float = 0.05) -> None:
    """The goals of held-out errors hold, but for another one for TTFT."""
    allowed = {"mean_tpot_ms": 0.03, "output_throughput": 0.03}
    allowed |= {"mean_ttft_ms": ttft, "p99_ttft_ms": 0.1}
    for name, error in allowed.items():
        assert figure(simulated, name) == pytest.approx(figure(live, name), rel=error)


@pytest.mark.nightly
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_pipelines_take_as_long_as_those_of_a_known_machine(
    tiny_model: pathlib.Path, clock: Clock, load: LiveLoad
) -> None:
    """The devices sleep for the time that the machine's data predict for each stage. With a light
    load, the simulated TTFT is 7 % too long; without the head's time on the last stage, TPOT would
    be 6 % too short under every load."""
    timer = start(tiny_model, clock, load.num_kv_blocks, {"pipeline_parallel_size": 2})
    timer.core.settings = replace(timer.core.settings, steps_ahead=1)  # which calibrations lower
    engine = replace(
        timer.core.config, model="llama-3.1-8b", max_model_len=2048, device="cpu", sleep_config=None
    )
    fleet = plan_fleet(FleetConfig(machine="L40S"), engine)
    requests = create_requests(load, fleet, 20.0, seed=1)
    live = serve(timer.engine, requests, clock.now, clock.sleep)
    simulated = simulate(fleet, requests)
    timer.core.close()
    check_figures(simulated, live, ttft=0.08)


def served(num_tokens: int, tpot_ms: int, ttft_ms: int) -> FleetResult:
    """A run with one request."""
    first = ttft_ms * MILLISECOND
    last = first + (num_tokens - 1) * tpot_ms * MILLISECOND
    request = ServedRequest(
        request_id="r",
        arrival=0,
        num_prompt_tokens=1,
        num_output_tokens=num_tokens,
        first_token=first,
        last_token=last,
    )
    return FleetResult(requests=[request], replicas=[ReplicaCounters()], duration=1000 * SECOND)


def test_errors_are_compared_with_the_goal_and_with_the_difference_of_live_runs() -> None:
    runs = [served(100, tpot_ms, 100) for tpot_ms in (10, 12)]
    rows = list(compare("light", runs, served(100, 14, 106)))
    goals = [row for row in rows if "reached" in row]
    assert [row["reached"] for row in goals] == [True, True, False, True]
