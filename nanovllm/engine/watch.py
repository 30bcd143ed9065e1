"""The engine's process, seen from the front end: starts it, ends it, and notices when it stops or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

from nanovllm.distributed.life_signs import LOOK_SECONDS, SILENCE_SECONDS, Mouth, Peer, Watch

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


def _run_with_pulse(run_engine: Callable[..., None], pulse: Connection, *arguments: Any) -> None:
    """Run the engine, and a thread that sends heartbeats and reports a step that hangs."""
    mouth = Mouth(pulse.send, on_lost=_exit_later)
    mouth.watch_this_thread()
    mouth.start()
    run_engine(*arguments)


def _exit_later() -> None:
    """Called when the front end has ended. The engine's loop notices that as well and ends; if it hangs, a timer ends the process."""
    timer = threading.Timer(2 * SILENCE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


class EngineProcess(SpawnProcess):
    """An engine in a process of its own, which the constructor starts.

    Args:
        run_engine: the function that runs there, with `arguments`.
    """

    def __init__(self, run_engine: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        arguments = (run_engine, theirs, *arguments)
        super().__init__(target=_run_with_pulse, args=arguments, name="nanovllm-engine", daemon=True)
        # The terminal sends Ctrl-C to the whole process group, but only this process decides when the engine ends. A signal that is
        # blocked here is blocked in the child from its first instruction on. The start of multiprocessing's helper process unblocks
        # the signal, so it comes first.
        resource_tracker.ensure_running()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        theirs.close()
        # Set after `start`, which copies this object into the process: that must not have this end of the pipe.
        self._pulse, self._peer = ours, Peer("the engine process", f"process {self.pid}")
        self._peer.pid = self.pid

    def expect_heartbeats(self) -> None:
        """From now on, a process without heartbeats counts as hanging."""
        self._peer.expect_heartbeats()

    async def watch(self, on_hang: Callable[[str], None]) -> None:
        """Watch the process until it has ended. If it hangs, call `on_hang` with the reason, then kill it. (The end of the process
        shows at its sentinel.)"""
        watch = Watch([self._peer])
        while (verdict := watch.look(lambda timeout: self._peer.drain(self._pulse))) is None:
            await asyncio.sleep(LOOK_SECONDS)
        if not self._peer.is_gone:
            on_hang(verdict.text)
            self.kill()

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
