"""Shorter silences, for tests: a hang is found sooner, and what is none is as safe as in earnest.

The watch loses sight of a process's waits for a processor for as much as a quarter of the silence,
before it begins to count them, and for two heartbeats, if a loaded machine delays its looks. So
heartbeats and looks must become shorter with the silence."""

from __future__ import annotations

from nanovllm.processes import activity, channel, hang, starvation

NAMES = ("SILENCE_SECONDS", "HEARTBEAT_SECONDS", "LOOK_SECONDS")


def periods_for(silence: float) -> dict[str, float]:
    """The constants of `activity` whose silence is this one, in seconds, and whose proportions are
    the same."""
    factor = silence / activity.SILENCE_SECONDS
    return {name: factor * getattr(activity, name) for name in NAMES}


def set_silence(silence: float) -> None:
    """Have the channel of this process find a hang after so many seconds: for a program that does
    nothing else."""
    for module in (channel, hang, starvation):
        for name, seconds in periods_for(silence).items():
            if hasattr(module, name):
                setattr(module, name, seconds)
