"""Waves: the steps that engines in lock-step run together.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations


class Waves:
    """Decides when an engine in lock-step computes.

    A wave is a sequence of steps that all engines run together. It begins with the coordinator's
    command, and ends after the first step in which no engine has a request.

    Attributes:
        ended: the number of waves that have ended, which is the number of the current or next wave.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._ordered = 0  # waves whose start was commanded

    @property
    def running(self) -> bool:
        """True while every engine must run steps."""
        return self._ordered > self.ended

    def start(self, wave: int) -> None:
        """Handle the command to start this wave.

        A late command changes nothing. A command that arrives before this engine has seen the end
        of the previous wave takes effect when that wave ends."""
        self._ordered = max(self._ordered, wave + 1)

    def end(self, wave: int) -> None:
        """End this wave, because no engine had a request in one of its steps. Steps that were
        already in flight belong to the same wave, and end it again."""
        self.ended = max(self.ended, wave + 1)
