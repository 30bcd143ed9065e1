"""Scenes with several engines: a router and its engines, and engines in lock-step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanovllm.core.block_pool import InvariantError
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.data_parallel.router import EngineRouter, load_score
from nanovllm.features.data_parallel.waves import Waves
from nanovllm.lab.site.labs.engines import MAX_STEPS, Engine, Figures, create_engine, requests_of
from nanovllm.lab.viz.metrics import request_metrics
from nanovllm.lab.viz.simulate import SimulatedRequest

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
    rows: list[list[Scene]] = [[] for _ in engines]
    arrivals = deque(sorted(requests_of(lab["requests"]), key=lambda each: each.arrival_step))
    scene: Scene = {}
    step = 0
    try:
        while arrivals or any(each.scheduler.has_unfinished for each in engines):
            if step > MAX_STEPS:
                raise RuntimeError(f"requests are unfinished after {MAX_STEPS} steps")
            while arrivals and arrivals[0].arrival_step <= step:
                send(arrivals.popleft(), engines, router)
            for row, each in zip(rows, engines, strict=True):
                if each.scheduler.has_unfinished:
                    each.step(step)
                    row.append(_cell_of(each, step))
            step += 1
    except Exception as error:
        scene |= {"error": error, "step": step}
    scene["picture"] = {
        "columns": step,
        "rows": [{"name": f"engine {i}", "cells": row} for i, row in enumerate(rows)],
        "legend": {
            "prefill": "admits a request and computes its prompt",
            "hit": "admits a request, most of whose prompt is cached here",
            "decode": "decodes",
        },
    }
    scene["figures"] = fleet_figures(engines)
    return scene


def send(source: SimulatedRequest, engines: Sequence[Engine], router: EngineRouter) -> None:
    """Let the router choose, and give the request to the chosen engine."""
    assert source.request_id is not None and not isinstance(source.prompt, int)
    loads = [
        load_score(len(each.scheduler.queues.waiting), len(each.scheduler.queues.running))
        for each in engines
    ]
    request = EngineRequest(source.request_id, list(source.prompt), SamplingParams())
    engine = engines[router.choose(request, loads)]
    engine.clock = float(source.arrival_step)
    engine.add(source.request_id, source)


def _cell_of(engine: Engine, step: int) -> Scene:
    record = engine.recorder.trace.steps[-1]
    prompts = [each for each in record.requests if each.kind == "prefill"]
    text = " ".join(each.request_id for each in prompts)
    hits = sum(record.admitted.values())
    kind = "decode"
    if prompts:
        kind = "hit" if hits > sum(each.num_tokens for each in prompts) else "prefill"
    title = f"{record.num_tokens} tokens computed"
    if hits:
        title += f", {hits} tokens of these prompts were there"
    return cell(step, text or f"{len(record.requests)}", kind, title)


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
    """Run engines in lock-step, as those that share experts. The coordinator's command to start a
    wave reaches each engine after a delay, and the answer whether any has requests comes one step
    later."""
    engines = [create_engine(lab["engine"]) for _ in lab["delays"]]
    run = _LockStep(engines, [Waves() for _ in engines], lab["delays"])
    arrivals = deque(
        (at, rank, name, SimulatedRequest(at, prompt, output, request_id=name))
        for name, at, prompt, output, rank in lab["requests"]
    )
    scene: Scene = {}
    try:
        while arrivals or run.is_active:
            while arrivals and arrivals[0][0] <= run.step_number:
                _, rank, name, source = arrivals.popleft()
                engines[rank].add(name, source)
            run.tick()
    except Exception as error:
        scene |= {"error": error, "step": run.step_number}
    cells = [each for row in run.rows for each in row]
    count = Counter(each["kind"] for each in cells)
    scene["picture"] = {
        "columns": run.step_number,
        "rows": [{"name": f"engine {i}", "cells": row} for i, row in enumerate(run.rows)],
        "legend": {
            "prefill": "tokens of requests",
            "padding": "one token of padding, for the collectives",
            "waits": "waits in a collective for an engine that has not begun",
        },
    }
    scene["figures"] = [
        ("steps of engines with requests", f"{count['prefill']}"),
        ("steps of engines without, that compute padding", f"{count['padding']}"),
        ("steps in which an engine waits", f"{count['waits']}"),
        ("waves", f"{max(each.ended for each in run.waves)}"),
    ]
    return scene


class _LockStep:
    """Engines whose steps need one another.

    Attributes:
        rows: the cells of each engine.
        step_number: the newest step.
    """

    LONGEST_WAIT = 12  # steps

    def __init__(self, engines: list[Engine], waves: list[Waves], delays: list[int]) -> None:
        self.engines = engines
        self.waves = waves
        self.delays = delays
        self.coordinator = Waves()
        self.rows: list[list[Scene]] = [[] for _ in engines]
        self.step_number = 0
        self._commands: list[tuple[int, int, int]] = []  # when, to which engine, which wave
        self._answers: deque[tuple[int, int, bool]] = deque()  # when, of which wave, anyone?
        self._num_waits = 0

    @property
    def is_active(self) -> bool:
        """True while an engine has requests, or runs."""
        return any(each.scheduler.has_unfinished for each in self.engines) or any(
            each.running for each in self.waves
        )

    def tick(self) -> None:
        """Let the coordinator and all engines do one step."""
        now = self.step_number
        unfinished = any(each.scheduler.has_unfinished for each in self.engines)
        if unfinished and not self.coordinator.running:
            wave = self.coordinator.ended
            self.coordinator.start(wave)
            self._commands += [(now + delay, i, wave) for i, delay in enumerate(self.delays)]
        for when, rank, wave in self._commands:
            if when == now:
                self.waves[rank].start(wave)
        while self._answers and self._answers[0][0] <= now:
            _, wave, anyone = self._answers.popleft()
            if not anyone:
                for each in (*self.waves, self.coordinator):
                    each.end(wave)
        running = [each.running for each in self.waves]
        if all(running):
            self._compute(now)
        else:
            self._wait(running, now)
        self.step_number += 1

    def _compute(self, now: int) -> None:
        self._num_waits = 0
        for engine, row in zip(self.engines, self.rows, strict=True):
            if engine.scheduler.has_unfinished:
                engine.step(now)
                tokens = engine.recorder.trace.steps[-1].num_tokens
                row.append(cell(now, f"{tokens}", "prefill", f"{tokens} tokens"))
            else:
                row.append(cell(now, "1", "padding", "one token of padding"))
        unfinished = any(each.scheduler.has_unfinished for each in self.engines)
        self._answers.append((now + 2, self.waves[0].ended, unfinished))

    def _wait(self, running: list[bool], now: int) -> None:
        for runs, row in zip(running, self.rows, strict=True):
            if runs:
                row.append(cell(now, "…", "waits", "waits in a collective"))
        self._num_waits = self._num_waits + 1 if any(running) or self.is_active else 0
        if self._num_waits > self.LONGEST_WAIT:
            if not any(running):
                raise InvariantError("an engine has requests, and no wave runs")
            raise InvariantError(
                f"engine {running.index(True)} waits in a collective that engine "
                f"{running.index(False)} never joins: the fleet hangs"
            )
