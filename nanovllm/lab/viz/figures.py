"""The films in figures/, made from films.toml: traces of the real scheduler, without a model, with
captions."""

import pathlib
import tomllib
from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm.lab.viz.film import Beat, Film
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.trace.trace import Trace


def _told(story: str) -> list[Beat]:
    """The beats of a story, which has a line for each: the step, what is in focus, and the words,
    which stand as long as they take to read."""
    beats = []
    for line in story.strip().splitlines():
        place, words = line.split(": ", 1)
        step, _, focus = place.partition(" ")
        beats.append(Beat(int(step), words, focus or None, round(0.8 + len(words) / 45, 1)))
    return beats


def _every_step(trace: Trace, told: list[Beat]) -> list[Beat]:
    """The told beats, and between them a short look at each step, with the caption before it."""
    beats: list[Beat] = []
    for record in (record for record in trace if record.requests and record.step <= told[-1].step):
        here = [beat for beat in told if beat.step == record.step]
        beats += here or [Beat(record.step, beats[-1].words if beats else "")]
    return beats


def make(
    requests: list[list[Any]],
    story: str,
    options: dict[str, Any],
    every_step: bool = False,
    **look: Any,
) -> Film:
    """A film from its entry in films.toml, which says what the arguments are; `look` goes to
    `Film`."""
    vocabulary: dict[str, int] = {}
    words: dict[str, list[str]] = {}
    simulated = []
    for name, step, prompt, output, *abort in requests:
        if isinstance(prompt, str):
            words[name] = f"{prompt} {output}".split()
            prompt = [vocabulary.setdefault(word, len(vocabulary)) for word in prompt.split()]
            output = len(output.split())
        abort_step = abort[0] if abort else None
        simulated.append(
            SimulatedRequest(step, prompt, output, request_id=name, abort_step=abort_step)
        )
    trace = simulate(simulated, **options)
    told = _told(story)
    beats = _every_step(trace, told) if every_step else told
    return Film(trace, beats=beats, settings={"words": words} if words else {}, **look)


_ENTRIES = tomllib.loads(pathlib.Path(__file__).with_name("films.toml").read_text(encoding="utf-8"))
FILMS: dict[str, Callable[[], Film]] = {
    f"{name}.gif": partial(make, **entry) for name, entry in _ENTRIES.items()
}
