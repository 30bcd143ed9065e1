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
from nanovllm.simulate.calibrate import StepTimer, full_loads, joining_load, loads
from nanovllm.simulate.plan import FleetPlan, plan_fleet
from nanovllm.simulate.report import MILLISECOND
from nanovllm.simulate.results import FleetResult, ReplicaCounters, ServedRequest
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.workload import SECOND, WorkloadRequest

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


LAYOUTS: list[dict[str, int]] = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_calibration_finds_a_known_cost_and_live_loads_take_as_long_as_simulated_ones(
    tiny_model: pathlib.Path, clock: Clock, layout: dict[str, int]
) -> None:
    timer = start(tiny_model, clock, None, layout)
    for load in loads(timer.core.resolved, timer.numbers):
        timer.seen += timer.run(load)
    timer.unseen += timer.run(joining_load(timer.core.resolved, timer.numbers, 4))
    for load in full_loads(timer.core.resolved, timer.numbers):
        timer.full += timer.run_full(load)
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


def check_figures(simulated: FleetResult, live: FleetResult) -> None:
    """The goals of held-out errors hold."""
    allowed = {"mean_tpot_ms": 0.03, "output_throughput": 0.03}
    allowed |= {"mean_ttft_ms": 0.05, "p99_ttft_ms": 0.1}
    for name, error in allowed.items():
        assert figure(simulated, name) == pytest.approx(figure(live, name), rel=error)


@pytest.mark.nightly
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_pipelines_take_as_long_as_those_of_a_known_machine(
    tiny_model: pathlib.Path, clock: Clock, load: LiveLoad
) -> None:
    """The devices sleep for the time that the machine's data predict for each stage. Without the
    head's time on the last stage, TPOT would be 6 % too short under every load."""
    timer, fleet = start_pipeline(tiny_model, clock, load.num_kv_blocks)
    requests = create_requests(load, fleet, 20.0, seed=1)
    live = serve(timer.engine, requests, clock.now, clock.sleep)
    simulated = simulate(fleet, requests)
    timer.core.close()
    check_figures(simulated, live)


def start_pipeline(
    folder: pathlib.Path, clock: Clock, num_kv_blocks: int | None
) -> tuple[StepTimer, FleetPlan]:
    """A pipeline of sleeping ranks, and the simulation of its machine."""
    timer = start(folder, clock, num_kv_blocks, {"pipeline_parallel_size": 2})
    config = timer.core.config
    engine = replace(
        config, model="llama-3.1-8b", max_model_len=2048, device="cpu", sleep_config=None
    )
    return timer, plan_fleet(FleetConfig(machine="L40S"), engine)


def test_first_tokens_of_a_pipeline_arrive_when_they_are_simulated(
    tiny_model: pathlib.Path, clock: Clock
) -> None:
    """Requests that find an idle engine, and others that arrive at some moment of a step of an
    earlier one. Of these, a step has the prompt alone, and the first stage may still be busy."""
    timer, fleet = start_pipeline(tiny_model, clock, None)
    requests = [
        WorkloadRequest(
            request_id=f"{name} {number}",
            arrival=(1000 * number + ms) * MILLISECOND,
            num_prompt_tokens=50 * number,
            num_output_tokens=6,
        )
        for number in range(1, 6)
        for name, ms in (("alone", 0), ("meets another", 30 + 5 * number))
    ]
    live = serve(timer.engine, requests, clock.now, clock.sleep).requests
    timer.core.close()
    simulated = {each.request_id: ttft(each) for each in simulate(fleet, requests).requests}
    found = {each.request_id: ttft(each) for each in live}
    for number in range(1, 6):
        name = f"alone {number}"
        assert simulated[name] == pytest.approx(found[name], rel=1e-6)
        name = f"meets another {number}"
        # In the simulation, both stages take the time of the message between them.
        assert simulated[name] == pytest.approx(found[name], rel=2e-3)
        assert found[name] > 1.3 * found[f"alone {number}"]


def ttft(request: ServedRequest) -> int:
    """Picoseconds to the first token."""
    assert request.first_token is not None
    return request.first_token - request.arrival


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
