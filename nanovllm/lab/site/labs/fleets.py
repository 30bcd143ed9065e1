"""Scenes with several engines: a router and its engines, and engines in lock-step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.core.block_pool import InvariantError
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.data_parallel.lock_step import LOCK_STEP, LockStep
from nanovllm.features.data_parallel.router import EngineRouter, load_score
from nanovllm.features.data_parallel.waves import Waves
from nanovllm.lab.site.labs.engines import MAX_STEPS, Engine, Figures, create_engine, requests_of
from nanovllm.lab.site.labs.lanes import Piece, lanes_of, piece
from nanovllm.lab.viz.metrics import request_metrics
from nanovllm.lab.viz.simulate import SimulatedRequest
from nanovllm.trace.record import StepRecord

Lab = Mapping[str, Any]
Scene = dict[str, Any]
Report = Callable[[Scene], None]


def cell(at: int, text: str, kind: str, title: str = "") -> Scene:
    """Return a cell of a picture: a row's text in a column, in the colour of its kind."""
    return {"at": at, "text": text, "kind": kind, "title": title or text}


def fleet(lab: Lab, options: Mapping[str, Any], report: Report) -> Scene:
    """Serve requests with several engines, each of which has its own prefix cache. A router
    chooses the engine."""
    engines = [create_engine(lab["engine"]) for _ in range(lab["servers"])]
    block_size = lab["engine"]["block_size"]
    router = EngineRouter(len(engines), block_size, capacity=lab["engine"]["num_kv_blocks"])
    arrivals = deque(sorted(requests_of(lab["requests"]), key=lambda each: each.arrival_step))
    scene: Scene = {}
    step = 0
    try:
        while arrivals or any(each.scheduler.has_unfinished for each in engines):
            if step > MAX_STEPS:
                raise RuntimeError(f"requests are unfinished after {MAX_STEPS} steps")
            while arrivals and arrivals[0].arrival_step <= step:
                send(arrivals.popleft(), engines, router)
            for each in engines:
                if each.scheduler.has_unfinished:
                    each.step(step)
            step += 1
    except Exception as error:
        scene |= {"error": error, "step": step}
        for each in engines:
            each.draw_failure()
    scene["picture"] = fleet_picture(engines)
    scene["figures"] = fleet_figures(engines)
    return scene


def fleet_picture(engines: Sequence[Engine]) -> Scene:
    """Draw what each engine does in each step, and which requests arrive."""
    records = [record for each in engines for record in each.recorder.trace]
    steps = 1 + max((record.step for record in records), default=-1)
    arrivals: dict[int, list[str]] = {}
    for record in records:
        arrivals.setdefault(record.step, []).extend(record.arrived)
    rows = [
        {"name": "step", "cells": [cell(step, f"{step}", "axis") for step in range(steps)]},
        {
            "name": "arrive",
            "cells": [
                cell(step, " ".join(sorted(names)), "axis")
                for step, names in arrivals.items()
                if names
            ],
        },
    ]
    for number, each in enumerate(engines):
        cells = [_cell_of(record) for record in each.recorder.trace]
        rows.append({"name": f"engine {number}", "cells": cells})
    return {
        "columns": steps,
        "rows": rows,
        "legend": {
            "prefill": "computes prompts; behind the bar, how many requests wait here",
            "hit": "admits requests, most of whose prompts are cached here",
            "decode": "decodes for so many requests",
        },
    }


def send(source: SimulatedRequest, engines: Sequence[Engine], router: EngineRouter) -> None:
    """Let the router choose, and give the request to the chosen engine."""
    assert source.request_id is not None
    prompt = source.prompt
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    params = SamplingParams(max_tokens=source.output_len)
    loads = [
        load_score(len(each.scheduler.queues.waiting), len(each.scheduler.queues.running))
        for each in engines
    ]
    request = EngineRequest(source.request_id, tokens, params)
    engine = engines[router.choose(request, loads)]
    engine.clock = float(source.arrival_step)
    engine.add(source.request_id, source)


def _cell_of(record: StepRecord) -> Scene:
    prompts = [each for each in record.requests if each.kind == "prefill"]
    text = " ".join(each.request_id for each in prompts) or f"{len(record.requests)}"
    hits = sum(record.admitted.values())
    kind = "decode"
    if prompts:
        kind = "hit" if hits > sum(each.num_tokens for each in prompts) else "prefill"
    title = f"{len(record.requests)} requests run, {record.num_tokens} tokens are computed"
    if hits:
        title += f", {hits} tokens of these prompts were there"
    if record.waiting:
        text += f" | {len(record.waiting)}"
        title += f"; {', '.join(record.waiting)} wait"
    return cell(record.step, text, kind, title)


def fleet_figures(engines: Sequence[Engine]) -> Figures:
    """Return the numbers in the table under the picture."""
    firsts = first_tokens(engines)
    traces = [each.recorder.trace for each in engines]
    return [
        ("tokens computed", f"{sum(r.num_tokens for trace in traces for r in trace)}"),
        ("prompt tokens from prefix caches", f"{sum(e.scheduler.num_hit_tokens for e in engines)}"),
        ("steps to the first token, mean", f"{sum(firsts) / max(1, len(firsts)):.1f}"),
        ("steps to the first token, longest", f"{max(firsts, default=0):.0f}"),
        ("requests of each engine", " ".join(f"{each.num_added}" for each in engines)),
    ]


def first_tokens(engines: Sequence[Engine]) -> list[float]:
    """Return the steps from each request's arrival to its first token."""
    metrics = [
        each for engine in engines for each in request_metrics(engine.recorder.trace).values()
    ]
    return [each["ttft"] for each in metrics if each["ttft"] is not None]


def waves(lab: Lab, options: Mapping[str, Any], report: Report) -> Scene:
    """Run engines in lock-step, as those that share experts, with a router in front of them.

    The coordinator's command to start a wave reaches each engine after a delay. A step is over when
    the engine with the most tokens has computed them: the others wait for it in each layer."""
    run = _LockStepFleet(lab, {**lab["engine"], **options})
    arrivals = deque(requests_of(lab["requests"]))
    scene: Scene = {}
    try:
        while arrivals or run.is_active:
            while arrivals and arrivals[0].arrival_step <= run.step_number:
                send(arrivals.popleft(), run.engines, run.router)
            run.tick()
    except Exception as error:
        scene |= {"error": error, "step": run.step_number}
    names = [f"engine {i}" for i in range(len(run.rows))]
    scene["lanes"] = lanes_of(dict(zip(names, run.rows, strict=True)), "time")
    firsts = first_tokens(run.engines)
    scene["figures"] = [
        ("time in which engines wait for others", f"{run.stalled:.1f}"),
        ("steps of padding only", f"{run.num_paddings}"),
        ("time until all have ended", "have not ended" if "error" in scene else f"{run.clock:.1f}"),
        ("tokens of requests", f"{run.num_tokens}"),
        ("tokens if all pad to the largest step", f"{run.num_padded}"),
        ("steps to the first token, mean", f"{sum(firsts) / max(1, len(firsts)):.1f}"),
        ("requests of each engine", " ".join(f"{each.num_added}" for each in run.engines)),
        ("waves", f"{max(each.waves.ended for each in run.locks)}"),
    ]
    return scene


@dataclass
class _Result:
    """The result of a plan, which an engine takes in the tick `due`: `anyone` has requests."""

    due: int
    plan: SchedulerOutput
    anyone: bool


class _LockStepFleet:
    """Engines whose steps need one another.

    Attributes:
        locks: the engine's own rule for each of them.
        rows: what each engine does when.
        stalled: time in which engines wait for others, of all engines.
        num_padded: tokens if every engine computed as many as the one with the most.
    """

    LONGEST_WAIT = 12  # steps

    def __init__(self, lab: Lab, options: Mapping[str, Any]) -> None:
        self.engines = [create_engine(options) for _ in lab["delays"]]
        self.delays = lab["delays"]
        self.locks = [LockStep(each.scheduler.queues) for each in self.engines]
        self.router = EngineRouter(len(self.engines), options["block_size"], capacity=0)
        self.coordinator = Waves()
        self.rows: list[list[Piece]] = [[] for _ in self.engines]
        self.step_number = 0
        self.clock = self.stalled = 0.0
        self.num_tokens = self.num_padded = self.num_paddings = 0
        self._commands: list[tuple[int, int, int]] = []  # when, to which engine, which wave
        self.lags = lab["lags"]
        # Steps in flight: the plans of all engines, and whether any of them has requests.
        self._in_flight: deque[tuple[list[SchedulerOutput], bool]] = deque()
        # By engine, the results that it has not taken yet, and when it takes them.
        self._results: list[deque[_Result]] = [deque() for _ in self.engines]
        self._num_waits = 0
        self._num_idle_steps = 0

    @property
    def is_active(self) -> bool:
        """True while an engine has requests, or runs."""
        unfinished = any(each.scheduler.has_unfinished for each in self.engines)
        return unfinished or any(each.waves.running for each in self.locks)

    def _have_work(self) -> list[bool]:
        """Return which engines launch a step: not those that are late with the last result."""
        parts = zip(self.locks, self.engines, self._results, strict=True)
        return [
            lock.has_work(engine.scheduler.has_unfinished) and not results
            for lock, engine, results in parts
        ]

    def tick(self) -> None:
        """Let the coordinator and all engines do one step."""
        now = self.step_number
        for lock, results in zip(self.locks, self._results, strict=True):
            while results and results[0].due <= now:
                result = results.popleft()
                lock.arrived(result.plan, ModelRunnerOutput(extras={LOCK_STEP: result.anyone}))
        self.coordinator.ended = max(each.waves.ended for each in self.locks)
        unfinished = any(each.scheduler.has_unfinished for each in self.engines)
        if unfinished and not self.coordinator.running:
            wave = self.coordinator.ended
            self.coordinator.start(wave)
            self._commands += [(now + delay, i, wave) for i, delay in enumerate(self.delays)]
        for when, rank, wave in self._commands:
            if when == now:
                self.locks[rank].waves.start(wave)
        work = self._have_work()
        if all(work):
            self._compute(now)
        else:
            self._wait(work)
            if self._in_flight:
                self._send_result(now)
        self.step_number += 1

    def _compute(self, now: int) -> None:
        """Run a step of all engines; the result of the step before it arrives."""
        self._num_waits = 0
        plans = []
        counts = []
        kinds = []
        for engine, lock in zip(self.engines, self.locks, strict=True):
            plan = SchedulerOutput()
            lock.launching(plan)
            plans.append(plan)
            if engine.scheduler.has_unfinished:
                engine.step(now)
                record = engine.recorder.trace.steps[-1]
                counts.append(record.num_tokens)
                is_prefill = any(share.kind == "prefill" for share in record.requests)
                kinds.append("prefill" if is_prefill else "decode")
            else:
                counts.append(0)
                kinds.append("padding")
        self._in_flight.append((plans, any(plan.extras[LOCK_STEP] for plan in plans)))
        self._draw(counts, kinds, now)
        if len(self._in_flight) > 1:
            self._send_result(now)
        self._num_idle_steps = 0 if any(counts) else self._num_idle_steps + 1
        if self._num_idle_steps > self.LONGEST_WAIT:
            raise InvariantError(
                f"no engine has had a request for {self.LONGEST_WAIT} steps, and the wave does not "
                "end: all of them compute padding"
            )

    def _draw(self, counts: list[int], kinds: list[str], now: int) -> None:
        engine = self.engines[0]
        times = [engine.step_cost + engine.token_cost * max(1, count) for count in counts]
        end = self.clock + max(times)
        for row, count, kind, time in zip(self.rows, counts, kinds, times, strict=True):
            words = f"step {now}: {count} tokens" if count else f"step {now}: one token of padding"
            row.append(piece(self.clock, self.clock + time, kind, f"{count or 1}", words))
            if self.clock + time < end:
                words = f"step {now}: waits in each layer for the engine with {max(counts)} tokens"
                row.append(piece(self.clock + time, end, "stalled", "", words))
                self.stalled += end - self.clock - time
        self.clock = end
        self.num_tokens += sum(counts)
        self.num_padded += max(1, *counts) * len(counts)
        self.num_paddings += counts.count(0)

    def _send_result(self, now: int) -> None:
        """Send the oldest step's result to all engines. Some are late with the end of a wave."""
        plans, anyone = self._in_flight.popleft()
        for results, plan, lag in zip(self._results, plans, self.lags, strict=True):
            results.append(_Result(now + 1 + (0 if anyone else lag), plan, anyone))

    def _wait(self, work: list[bool]) -> None:
        end = self.clock + 1
        for has_work, row in zip(work, self.rows, strict=True):
            if has_work:
                words = "waits in a collective for an engine that has not begun"
                row.append(piece(self.clock, end, "stalled", "", words))
                self.stalled += 1
        self.clock = end
        self._num_waits = self._num_waits + 1 if self.is_active else 0
        if self._num_waits > self.LONGEST_WAIT:
            if not any(work):
                raise InvariantError("an engine has requests, and no wave runs: it waits forever")
            raise InvariantError(
                f"engine {work.index(True)} waits in a collective that engine "
                f"{work.index(False)} never joins: the fleet hangs"
            )
