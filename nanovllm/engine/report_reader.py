"""Waits for the reports of an engine's process in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from nanovllm.engine.errors import EngineDeadError, EngineStartError
from nanovllm.engine.process import Report
from nanovllm.processes.activity import LOOK_SECONDS

if TYPE_CHECKING:
    from nanovllm.engine.client import EngineClient


class ReportReader:
    """The reports of an engine's process, for the task that waits for them.

    Args:
        client: the process.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._arrival = asyncio.Event()
        self._files = [
            source if isinstance(source, int) else source.fileno() for source in client.sources
        ]
        for file in self._files:
            asyncio.get_running_loop().add_reader(file, self._arrival.set)

    async def next(self) -> list[Report]:
        """Wait for the next reports.

        Raises:
            EngineStartError: the engine refuses the settings.
            EngineDeadError: it has ended, or hangs.
        """
        while True:
            self._arrival.clear()
            failure = self._client.look()
            if reports := self._client.take_reports():
                return reports
            if failure is not None:
                self.close()  # a closed connection stays readable
                raise (EngineStartError if failure.is_users else EngineDeadError)(str(failure))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._arrival.wait()

    def close(self) -> None:
        """Listen no more."""
        for file in self._files:
            asyncio.get_running_loop().remove_reader(file)
        self._files = []
