"""The engine's process, seen from the front end: starts it and ends it. `pulse` also notices when it stops or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

# The time that an engine gets to end by itself.
END_SECONDS = 5.0


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process of this machine, such as SIGSTOP or Ctrl-Z. A debugger's stop does not count."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants. SIGKILL also ends processes that are stopped or hang."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                each.kill()


class EngineProcess(SpawnProcess):
    """An engine in a process of its own, which the constructor starts. Its end shows at its sentinel.

    Args:
        run_engine: the function that runs there, with `arguments`.
    """

    def __init__(self, run_engine: Callable[..., None], *arguments: Any) -> None:
        super().__init__(target=run_engine, args=arguments, name="nanovllm-engine", daemon=True)
        # The terminal sends Ctrl-C to the whole process group, but only this process decides when the engine ends. A signal that is
        # blocked here is blocked in the child from its first instruction on. The start of multiprocessing's helper process unblocks
        # the signal, so it comes first.
        resource_tracker.ensure_running()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def expect_heartbeats(self) -> None:
        """From now on, a process without heartbeats counts as hanging, if it is watched."""

    async def watch(self, on_hang: Callable[[str], None]) -> None:
        """Watch the process until it has ended. If it hangs, call `on_hang` with the reason, then kill it."""

    def kill(self) -> None:
        """Kill the process and its ranks, even if they are stopped or hang."""
        if self.pid is not None and self.is_alive():
            kill_tree(self.pid)

    async def end(self, was_told: bool) -> None:
        """Wait until the process has ended. Kill it unless it was told to end and ends in time."""
        if was_told:
            await asyncio.to_thread(self.join, END_SECONDS)
        self.kill()
        await asyncio.to_thread(self.join)
