"""Scenes of labs: the engine's parts at work on a few requests, as plain data for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.core.block_pool import InvariantError
from nanovllm.core.schedule import SampledToken, ScheduledRequest, SchedulerOutput
from nanovllm.data.errors import UsageError
from nanovllm.features.speculation.scheduling import NgramProposer
from nanovllm.features.speculation.verification import keep_accepted
from nanovllm.lab.site.labs.engines import MAX_STEPS, create_engine, figures_of, requests_of
from nanovllm.lab.site.labs.fleets import Lab, Report, Scene, cell, fleet, waves
from nanovllm.lab.site.labs.lanes import lanes_of, request_lanes


def engine(lab: Lab, options: Mapping[str, Any], report: Report) -> Scene:
    """Serve the lab's requests with one engine, whose trace the player shows.

    Args:
        options: of `create_engine`; and `stream`, how many requests of the lab's stream arrive.
    """
    given = {**lab["engine"], **options}
    requests = requests_of([*lab["requests"], *stream_of(lab, given.pop("stream", None))])
    simulation = create_engine(given)
    scene: Scene = {}
    try:
        simulation.serve(requests, MAX_STEPS)
    except Exception as error:
        scene |= {"error": error, "step": simulation.number}
    if simulation.scheduler.fault:
        scene |= {"error": simulation.scheduler.fault, "step": simulation.fault_step}
        scene["note"] = "The run continues without this share, so that you see what the rule costs."
    trace = simulation.recorder.trace
    if len(trace):
        scene["trace"] = b"".join(trace.lines()).decode()
        scene["figures"] = figures_of(trace, simulation)
    if lab.get("lanes") == "requests":
        scene["lanes"] = lanes_of(request_lanes(trace), "step")
    elif lab.get("lanes") == "devices":
        planned = {"host": simulation.host} if simulation.plan_cost else {}
        rows = {**planned, "device": simulation.device, **simulation.rows}
        scene["lanes"] = lanes_of(rows, "time")
    return scene


def stream_of(lab: Lab, count: int | None) -> list[list[Any]]:
    """Return the rows of requests that arrive one after another, as the lab's `stream` says."""
    if "stream" not in lab:
        return []
    stream = lab["stream"]
    return [
        [f"{number + 1}", 1 + number * stream["every"], stream["prompt"], stream["output"]]
        for number in range(stream["count"] if count is None else count)
    ]


# ---------------------------------------------------------------- drafts


def drafts(lab: Lab, options: Mapping[str, Any], report: Report) -> Scene:
    """Generate a sequence of words with drafts, and show which of them are kept."""
    words = lab["words"].split()
    vocabulary = sorted(set(words))
    target = [vocabulary.index(word) for word in words]
    tokens = target[: lab["prompt"]]
    most = int(options.get("drafts", lab["drafts"]))
    proposer = NgramProposer(lab["longest"], 1)
    rows: list[Scene] = []
    num_drafted = 0
    scene: Scene = {}
    try:
        while len(tokens) < len(target):
            left = len(target) - len(tokens) - 1
            drafted = proposer.propose(tokens, min(most, left))[:left]
            kept = _verify(tokens, drafted, target)
            num_drafted += len(drafted)
            rows.append(_row_of(drafted, kept, vocabulary, len(rows)))
            tokens += kept
            if tokens != target[: len(tokens)]:
                wrong = next(i for i, each in enumerate(tokens) if each != target[i])
                raise InvariantError(
                    f"word {wrong} is {vocabulary[tokens[wrong]]!r}, and the model alone says "
                    f"{vocabulary[target[wrong]]!r}: drafts must not change the output"
                )
    except Exception as error:
        scene |= {"error": error, "step": len(rows) - 1}
    num_words = len(tokens) - lab["prompt"]
    num_accepted = sum(each["kind"] == "accepted" for row in rows for each in row["cells"])
    scene["picture"] = {
        "columns": most + 1,
        "rows": rows,
        "legend": {
            "accepted": "a draft that is kept",
            "rejected": "a draft that is dropped",
            "decode": "the model's own word",
        },
    }
    scene["figures"] = [
        ("steps of the model", f"{len(rows)}"),
        ("words generated", f"{num_words}"),
        ("words per step", f"{num_words / max(1, len(rows)):.2f}"),
        ("drafts", f"{num_drafted}"),
        ("drafts that were kept", f"{num_accepted}"),
    ]
    return scene


def _verify(tokens: list[int], drafted: list[int], target: list[int]) -> list[int]:
    """Let the model sample after the known tokens and after each draft; return what is kept."""
    sampled = []
    for count in range(len(drafted) + 1):
        begin = [*tokens, *drafted[:count]]
        is_known = begin == target[: len(begin)]
        # After a wrong draft, the model continues another sentence.
        sampled.append(target[len(begin)] if is_known else target[-1 - count])
    share = ScheduledRequest("r", len(tokens) - 1, 1 + len(drafted), [], [])
    share.extra_token_ids = drafted
    results = {"r": [SampledToken(token) for token in sampled]}
    return [each.token_id for each in keep_accepted(SchedulerOutput([share]), results)["r"]]


def _row_of(drafted: list[int], kept: list[int], vocabulary: list[str], step: int) -> Scene:
    num_accepted = max(0, len(kept) - 1)
    cells = [
        cell(at, vocabulary[token], "accepted" if at < num_accepted else "rejected")
        for at, token in enumerate(drafted)
    ]
    if kept:
        own = cell(num_accepted, vocabulary[kept[-1]], "decode")
        cells = [
            *cells[:num_accepted],
            own,
            *({**c, "at": c["at"] + 1} for c in cells[num_accepted:]),
        ]
    return {"name": f"step {step}", "cells": cells}


# ---------------------------------------------------------------- the playground


def what_if(lab: Lab, options: Mapping[str, Any], report: Report) -> Scene:
    """Simulate a fleet; returns its summary, and which of the fleets so far are on the frontier of
    P99 TTFT and P99 TPOT.

    Args:
        options: settings of `simulate`; `engines`, of which `split` are for prefill only; tokens
            per step as `chunk`; and the summaries of earlier fleets as `known`.
    """
    # Other labs start sooner without the simulator.
    from nanovllm.simulate.simulation import simulate
    from nanovllm.simulate.sweep import mark_frontier

    given = dict(options)
    known = given.pop("known")
    count = given.pop("engines")
    split = given.pop("split")
    layout = {"prefill": split, "decode": count - split} if split else {"replicas": count}
    chunk = {"max_num_batched_tokens": given.pop("chunk")}
    try:
        summary = simulate({**lab["fleet"], **given, **layout, **chunk})
    except UsageError as error:
        return {"impossible": str(error)}
    summaries = [*known, summary]
    mark_frontier(summaries)
    frontier = [number for number, each in enumerate(summaries) if each["on_frontier"]]
    return {"summary": summary, "frontier": frontier}


SCENES: dict[str, Callable[[Lab, Mapping[str, Any], Report], Scene]] = {
    "engine": engine,
    "fleet": fleet,
    "waves": waves,
    "drafts": drafts,
    "what_if": what_if,
}
