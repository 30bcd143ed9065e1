"""The strategy for recording an engine's steps as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.outputs import EndedTransfers
from nanovllm.data.request import EngineOutput

if TYPE_CHECKING:
    from nanovllm.trace.recorder import RecordSink
    from nanovllm.trace.trace import StepRecord


class Recorder:
    """The strategy for recording steps as plain data. This base class records nothing.

    Attributes:
        is_on: it records.
    """

    is_on = False

    def arrived(self, request: Request, time: float) -> None:
        """Note a request that was queued, at a time in seconds since the engine started."""

    def ended(self, request_id: str, reason: str) -> None:
        """Note a request that has ended between two steps."""

    def transfers_ended(self, ended: EndedTransfers) -> None:
        """Note KV transfers that have ended between two steps."""

    def begin(self, plan: SchedulerOutput, step: int, start: float) -> StepRecord | None:
        """Return a record of a step that is about to be launched."""
        return None

    def finish(
        self,
        record: StepRecord | None,
        duration: float,
        result: ModelRunnerOutput,
        outputs: Sequence[EngineOutput],
    ) -> None:
        """Complete the record of a step, which took `duration` seconds."""

    def start_over(self, lost: list[str]) -> None:
        """Drop the records of the steps in flight, which have failed; these requests have ended."""

    def flush(self, step: int, start: float, is_idle: bool = True) -> None:
        """Record what no record contains yet, since there may be no next step."""

    def cache_reset(self) -> None:
        """Note that all cached prefixes were forgotten between two steps."""

    def watch(self, sink: RecordSink) -> None:
        """Pass all further records to a reader."""

    def unwatch(self, sink: RecordSink) -> bool:
        """Pass no more records to a reader. Returns whether there are others."""
        return False

    def close(self) -> None:
        """Finish what is written."""
