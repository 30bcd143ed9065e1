"""Waves of steps, rule by rule."""

from __future__ import annotations

from nanovllm.features.data_parallel.waves import Waves


def test_a_command_starts_a_wave() -> None:
    waves = Waves()
    assert not waves.running
    waves.start(0)
    assert waves.running and waves.ended == 0
    waves.end(0)
    assert not waves.running and waves.ended == 1


def test_the_end_of_a_wave_may_be_reported_twice() -> None:
    waves = Waves()
    waves.start(0)
    waves.end(0)
    waves.end(0)
    assert waves.ended == 1, (
        "two steps of wave 0 were in flight, and both report its end: there was one wave"
    )
    waves.start(1)
    assert waves.running
    waves.end(0)
    assert waves.running, "wave 0 has ended before: wave 1 goes ahead"


def test_a_late_command_changes_nothing() -> None:
    waves = Waves()
    for wave in (0, 1):
        waves.start(wave)
        waves.end(wave)
    waves.start(0)
    assert not waves.running and waves.ended == 2, (
        "wave 0 is over: an engine that starts it again computes alone, and waits forever"
    )


def test_an_early_command_takes_effect_when_the_wave_before_ends() -> None:
    waves = Waves()
    waves.start(0)
    waves.start(1)
    waves.end(0)
    assert waves.running, (
        "the command to start wave 1 came before the end of wave 0. It is not sent again: if it is "
        "lost, all other engines wait for this one forever"
    )
    waves.end(1)
    assert not waves.running
