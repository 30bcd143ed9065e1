"""Scenes of labs: the engine's parts at work on a few requests, as plain data for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.core.block_pool import InvariantError
from nanovllm.core.schedule import SampledToken, ScheduledRequest, SchedulerOutput
from nanovllm.data.errors import UsageError
from nanovllm.features.speculation.scheduling import NgramProposer
from nanovllm.features.speculation.verification import keep_accepted
from nanovllm.lab.site.labs import contest
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
        simulation.draw_failure()
    trace = simulation.recorder.trace
    if len(trace):
        scene["trace"] = b"".join(trace.lines()).decode()
        scene["figures"] = figures_of(trace, simulation, "error" in scene)
    if simulation.scheduler.fault:
        scene |= {"error": simulation.scheduler.fault, "step": simulation.fault_step}
        scene["note"] = "The run continues without this share, so that you see what the rule costs."
    if lab.get("lanes") == "requests":
        scene["lanes"] = lanes_of(request_lanes(trace), "step")
        if "step" in scene:
            scene["lanes"]["fault"] = [scene["step"], scene["step"] + 1]
    elif lab.get("lanes") == "devices":
        planned = {"host": simulation.host} if simulation.plan_cost else {}
        rows = {**planned, "device": simulation.device, **simulation.rows}
        scene["lanes"] = lanes_of(rows, "time")
        if "error" in scene and simulation.device:
            scene["lanes"]["fault"] = [simulation.device[-1][end] for end in ("from", "to")]
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
    run = _Drafts(lab)
    most = int(options.get("drafts", lab["drafts"]))
    proposer = NgramProposer(lab["longest"], 1)
    scene: Scene = {}
    try:
        while len(run.tokens) < len(run.target) and len(run.rows) < len(run.target):
            run.step(proposer, most)
            if run.wrong and "error" not in scene:
                scene |= {"error": run.fault, "step": len(run.rows) - 1}
                scene["note"] = "The run continues, so that you see what became of the sentence."
    except Exception as error:
        scene |= {"error": error, "step": len(run.rows)}
    cells = [each for row in run.rows for each in row["cells"]]
    scene["text"] = run.text
    scene["picture"] = {
        "columns": max([most + 1, *(len(row["cells"]) for row in run.rows)]),
        "rows": run.rows,
        "legend": {
            "accepted": "a draft that is kept",
            "decode": "the model's own word",
            "rejected": "a draft that is dropped",
            "wrong": "a word that the model alone would not have sampled here",
        },
    }
    num_words = len(run.tokens) - run.num_prompt
    scene["figures"] = [
        ("steps of the model", f"{len(run.rows)}"),
        ("words generated", f"{num_words}"),
        ("words per step", f"{num_words / max(1, len(run.rows)):.2f}"),
        ("drafts", f"{run.num_drafted}"),
        ("drafts that were kept", f"{sum(each['kind'] == 'accepted' for each in cells)}"),
        ("wrong words", f"{len(run.wrong)}"),
    ]
    return scene


class _Drafts:
    """A sequence of words that a model with drafts writes.

    Attributes:
        target, tokens: what the model alone writes, and what it has written with drafts.
        wrong: positions at which the two differ.
        rows: for the picture, one per step.
    """

    def __init__(self, lab: Lab) -> None:
        words = lab["words"].split()
        self.vocabulary = sorted(set(words))
        self.target = [self.vocabulary.index(word) for word in words]
        self.num_prompt: int = lab["prompt"]
        self.tokens = self.target[: self.num_prompt]
        self.wrong: list[int] = []
        self.rows: list[Scene] = []
        self.num_drafted = 0

    def step(self, proposer: NgramProposer, most: int) -> None:
        """Draft, verify, and keep what the reader's code keeps.

        Raises:
            InvariantError: it keeps nothing.
        """
        begin = len(self.tokens)
        left = len(self.target) - begin - 1
        drafted = proposer.propose(self.tokens, min(most, left))[:left]
        kept = _verify(self.tokens, drafted, self.target)
        if not kept:
            raise InvariantError("the step keeps no token: the model's first one is always right")
        self.num_drafted += len(drafted)
        self.tokens += kept
        new = range(begin, min(len(self.tokens), len(self.target)))
        self.wrong += [at for at in new if self.tokens[at] != self.target[at]]
        is_wrong = [at in self.wrong for at in new]
        self.rows.append(_row_of(drafted, kept, is_wrong, self.vocabulary, len(self.rows)))

    @property
    def fault(self) -> InvariantError:
        """The first wrong word, as an error."""
        at = self.wrong[0]
        word, right = (self.vocabulary[each[at]] for each in (self.tokens, self.target))
        return InvariantError(
            f"word {at} is {word!r}, and the model alone says {right!r}: drafts must not change "
            "the output"
        )

    @property
    def text(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The prompt and the output: each word, and its kind."""
        words = [
            (self.vocabulary[token], "wrong" if at in self.wrong else "decode")
            for at, token in enumerate(self.tokens[: len(self.target)])
        ]
        return [("prompt", words[: self.num_prompt]), ("output", words[self.num_prompt :])]


def _verify(tokens: list[int], drafted: list[int], target: list[int]) -> list[int]:
    """Let the model sample after the known tokens and after each draft; return what is kept."""
    sampled = []
    for count in range(len(drafted) + 1):
        begin = [*tokens, *drafted[:count]]
        is_known = begin == target[: len(begin)]
        # After a wrong word, the model continues another sentence.
        sampled.append(target[len(begin) if is_known else target.index(begin[-1]) + 1])
    share = ScheduledRequest("r", len(tokens) - 1, 1 + len(drafted), [], [])
    share.extra_token_ids = drafted
    results = {"r": [SampledToken(token) for token in sampled]}
    return [each.token_id for each in keep_accepted(SchedulerOutput([share]), results)["r"]]


def _row_of(
    drafted: list[int], kept: list[int], is_wrong: list[bool], vocabulary: list[str], step: int
) -> Scene:
    """Draw a step: the words that are kept, and then the drafts that are dropped."""
    # The last word that is kept is the model's own.
    is_draft = [at < len(kept) - 1 and kept[at] == draft for at, draft in enumerate(drafted)]
    cells = []
    for at, wrong in enumerate(is_wrong):
        right = "accepted" if at < len(drafted) and is_draft[at] else "decode"
        cells.append(cell(at, vocabulary[kept[at]], "wrong" if wrong else right))
    dropped = [draft for draft, accepted in zip(drafted, is_draft, strict=True) if not accepted]
    for draft in dropped:
        cells.append(cell(len(cells), vocabulary[draft], "rejected"))
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
    "contest": contest.scene,
}
