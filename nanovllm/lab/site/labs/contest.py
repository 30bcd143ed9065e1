"""Scores of a reader's rule against vLLM's, on three workloads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from nanovllm.features.data_parallel.router import EngineRouter
from nanovllm.lab.site.labs.engines import Engine, create_engine
from nanovllm.lab.site.labs.fleets import fleet_picture, send
from nanovllm.lab.site.labs.lanes import joined, lanes_of, request_lanes
from nanovllm.lab.viz.metrics import request_metrics
from nanovllm.lab.viz.simulate import SimulatedRequest

LONGEST = 2.0  # times the longest wait under vLLM's rule
MAX_STEPS = 5000
Waits = dict[str, float]  # by request


class UnfairError(RuntimeError):
    """A rule that gets no score: a request waits too long, or does not get what it asks for."""


def mixed(count: int, gap: int, longest: int, seed: int) -> list[SimulatedRequest]:
    """Return requests, every sixth of which is long."""
    draw = Random(seed)
    requests = []
    for number in range(count):
        prompt = longest if number % 6 == 2 else 4 + int(draw.random() * longest / 4)
        output = 4 + int(draw.random() * 20)
        requests.append(SimulatedRequest(number * gap, prompt, output, request_id=f"r{number}"))
    return requests


def bursts(count: int, size: int, gap: int, seed: int) -> list[SimulatedRequest]:
    """Return requests that arrive several at a time."""
    draw = Random(seed)
    return [
        SimulatedRequest(
            number // size * gap,
            4 + int(draw.random() * 40),
            2 + int(draw.random() * 30),
            request_id=f"r{number}",
        )
        for number in range(count)
    ]


def documents(count: int, num_documents: int, favour: float, seed: int) -> list[SimulatedRequest]:
    """Return questions about documents; the first document has a larger share of them."""
    draw = Random(seed)
    requests = []
    for number in range(count):
        which = 0 if draw.random() < favour else int(draw.random() * num_documents)
        prompt = [1000 * (which + 1) + i for i in range(24 + 4 * (which % 4))]
        prompt += range(10**6 * (number + 1), 10**6 * (number + 1) + 3)
        requests.append(SimulatedRequest(number // 2, prompt, 5, request_id=f"r{number}"))
    return requests


ENGINE = {"num_kv_blocks": 40, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8}
FLEET = {"num_kv_blocks": 40, "block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 8}
# By contest: what is counted, and the workloads by name.
CONTESTS: dict[str, tuple[str, Mapping[str, Sequence[SimulatedRequest]]]] = {
    "last_running": (
        "steps from arrival to end",
        {
            "one in six is long": mixed(48, 3, 80, 1),
            "bursts": bursts(48, 8, 30, 2),
            "all at once": bursts(32, 32, 1, 3),
        },
    ),
    "Queues.add": (
        "steps to the first token",
        {
            "one in six is long": mixed(48, 2, 80, 1),
            "bursts": bursts(48, 12, 30, 2),
            "steady": bursts(48, 2, 4, 3),
        },
    ),
    "EngineRouter.choose": (
        "steps to the first token",
        {
            "twelve documents": documents(72, 12, 0.0, 1),
            "a popular one": documents(72, 8, 0.5, 2),
            "many documents": documents(72, 30, 0.1, 3),
        },
    ),
}


def waits_of(contest: str, requests: Sequence[SimulatedRequest]) -> Waits:
    """Serve a workload with the rule that is in place; return what counts for each request."""
    engines = engines_of(contest)
    serve(contest, requests, engines)
    return counted(contest, engines)


def counted(contest: str, engines: Sequence[Engine]) -> Waits:
    """Return the wait of each request, if it is over."""
    key = "latency" if contest == "last_running" else "ttft"
    waits: Waits = {}
    for each in engines:
        metrics = request_metrics(each.recorder.trace).items()
        waits |= {name: metric[key] for name, metric in metrics if metric[key] is not None}
    return waits


def engines_of(contest: str) -> list[Engine]:
    """Return the idle engines of a contest."""
    if contest == "EngineRouter.choose":
        return [create_engine(FLEET) for _ in range(3)]
    return [create_engine(ENGINE)]


def serve(contest: str, requests: Sequence[SimulatedRequest], engines: Sequence[Engine]) -> None:
    """Serve a workload.

    Raises:
        Exception: of the rule, or of the engine; with a note that names the step.
        UnfairError: a request did not get what it had asked for.
    """
    if contest == "EngineRouter.choose":
        router = EngineRouter(len(engines), FLEET["block_size"], capacity=FLEET["num_kv_blocks"])
        serve_all(requests, engines, lambda each: send(each, engines, router))
    else:
        serve_all(requests, engines, lambda each: add(each, engines[0]))
    check_outputs(requests, engines)


def add(source: SimulatedRequest, engine: Engine) -> None:
    """Queue a request, and check that the queue leaves it as it is.

    Raises:
        UnfairError: the rule has changed more than the request's place in line.
    """
    name = str(source.request_id)
    engine.add(name, source)
    request = engine.scheduler.queues.requests[name]
    limit = request.num_prompt_tokens + source.output_len
    state = (request.num_tokens, request.max_num_tokens, request.num_computed_tokens)
    if state != (source.prompt, limit, 0):
        raise UnfairError(f"the rule changes more of {name} than its place in line")


def check_outputs(requests: Sequence[SimulatedRequest], engines: Sequence[Engine]) -> None:
    """Check that each request has all tokens that it asked for.

    Raises:
        UnfairError: one has not.
    """
    counts: Counter[str] = Counter()
    for engine in engines:
        for record in engine.recorder.trace:
            for share in record.requests:
                counts[share.request_id] += len(share.sampled)
    for each in requests:
        count = counts[str(each.request_id)]
        if count != each.output_len:
            raise UnfairError(
                f"{each.request_id} asks for {each.output_len} tokens, and gets {count}: a rule "
                "must not change what is computed"
            )


def serve_all(
    requests: Sequence[SimulatedRequest],
    engines: Sequence[Engine],
    send: Callable[[SimulatedRequest], None],
) -> None:
    """Run all engines step by step until every request has ended.

    Raises:
        Exception: of the rule, or of the engine: such as an InvariantError, if the rule has taken
            blocks that the step needs. A note names the step.
        RuntimeError: some requests have not ended after `MAX_STEPS`.
    """
    waiting = list(requests)
    for step in range(MAX_STEPS):
        try:
            while waiting and waiting[0].arrival_step <= step:
                send(waiting.pop(0))
            busy = [each for each in engines if each.scheduler.has_unfinished]
            if not busy and not waiting:
                return
            for each in busy:
                each.step(step)
                if each.scheduler.fault:
                    raise each.scheduler.fault
        except Exception as error:
            error.add_note(f"This is step {step} of the workload.")
            raise
    raise RuntimeError(f"requests are unfinished after {MAX_STEPS} steps")


def baselines(contest: str) -> dict[str, Waits]:
    """Return the waits under the rule that is in place, by workload."""
    _, workloads = CONTESTS[contest]
    return {name: waits_of(contest, requests) for name, requests in workloads.items()}


def score(
    contest: str, usual: Mapping[str, Waits], report: Callable[[Any], None]
) -> dict[str, Any]:
    """Return the score of the rule that is in place; each workload is reported when it is known.

    Args:
        usual: the waits under vLLM's rule.

    Raises:
        UnfairError: a request waits too long, or does not get what it asks for.
        Exception: see `serve`; with a note that names the workload.
    """
    unit, workloads = CONTESTS[contest]
    ratios = []
    for name, requests in workloads.items():
        try:
            waits = waits_of(contest, requests)
        except Exception as error:
            error.add_note(f"The workload is: {name}.")
            raise
        own = mean(waits)
        theirs = mean(usual[name])
        bound = LONGEST * max(usual[name].values())
        latest = max(waits, key=lambda each: waits[each])
        if waits[latest] > bound:
            raise UnfairError(
                f"{name}: {latest} waits {waits[latest]:.0f} steps; at most {bound:.0f} are fair"
            )
        ratios.append(theirs / own)
        report({"workload": name, "yours": own, "usual": theirs, "unit": unit})
    return {"score": round(100 * math.prod(ratios) ** (1 / len(ratios)), 1)}


def scene(
    lab: Mapping[str, Any], options: Mapping[str, Any], report: Callable[[Any], None]
) -> dict[str, Any]:
    """Serve one workload of a contest, and draw what the score counts.

    Args:
        options: `rule`, the contest's name, by default the first; and `workload`, a number.
    """
    contest = options.get("rule", next(iter(CONTESTS)))
    unit, workloads = CONTESTS[contest]
    requests = list(workloads.values())[options.get("workload", 0)]
    engines = engines_of(contest)
    found: dict[str, Any] = {}
    try:
        serve(contest, requests, engines)
    except Exception as error:
        found["error"] = error
        for each in engines:
            each.draw_failure()
    traces = [each.recorder.trace for each in engines]
    waits = counted(contest, engines)
    found["figures"] = [
        (f"{unit}, mean", f"{sum(waits.values()) / max(1, len(waits)):.1f}"),
        (f"{unit}, longest", f"{max(waits.values(), default=0):.0f}"),
        ("preemptions", f"{sum(each.scheduler.num_preemptions for each in engines)}"),
        ("tokens computed", f"{sum(r.num_tokens for trace in traces for r in trace)}"),
    ]
    if len(engines) > 1:
        found["picture"] = fleet_picture(engines)
    else:
        found["lanes"] = lanes_of(joined(request_lanes(traces[0])), "step")
    return found


def mean(waits: Waits) -> float:
    """Return the mean of all requests' waits."""
    return sum(waits.values()) / len(waits)
