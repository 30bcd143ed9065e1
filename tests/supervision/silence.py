"""Shorter silences, for tests: a hang is found sooner, and what is none is as safe as in earnest.

The watch loses sight of a process's waits for a processor for as much as a quarter of the silence,
before it begins to count them, and for two heartbeats, if a loaded machine delays its looks. So
heartbeats and looks must become shorter with the silence."""

from __future__ import annotations

import pytest

from nanovllm.processes import activity, channel, hang, starvation, supervisor

PERIODS = ("SILENCE_SECONDS", "HEARTBEAT_SECONDS", "LOOK_SECONDS")


def set_silence(silence: float, patch: pytest.MonkeyPatch | None = None) -> None:
    """Have this process find a hang after so many seconds, with all periods of `activity` in
    proportion.

    Args:
        silence: in seconds.
        patch: takes it back at the end of a test. Without it, this is a program that does nothing
            else.
    """
    factor = silence / activity.SILENCE_SECONDS
    for module in (channel, hang, starvation, supervisor):
        for name in PERIODS:
            if hasattr(module, name):
                put = setattr if patch is None else patch.setattr
                put(module, name, factor * getattr(activity, name))
