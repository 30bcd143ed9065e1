"""The engine's process as the front end sees it: how it is started and ended, and how a stop or a hang is noticed."""

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

# What an engine gets to end by itself.
END_SECONDS = 5.0


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped by a signal, as SIGSTOP and Ctrl-Z do. A debugger's stop does not count."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def kill_tree(pid: int) -> None:
    """Kill a process, and every process that it or its children have started: SIGKILL also ends what is stopped or hangs."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                each.kill()


def _run_with_pulse(run_engine: Callable[..., None], pulse: Connection, *arguments: Any) -> None:
    """The engine's process: besides the engine, a thread that sends heartbeats, and a complaint if a step hangs."""
    mouth = Mouth(pulse.send, on_lost=_exit_later)
    mouth.watch_this_thread()
    mouth.start()
    run_engine(*arguments)


def _exit_later() -> None:
    """The front end is gone. The engine's loop notices that, too, and ends; if it hangs, end the process all the same."""
    timer = threading.Timer(2 * SILENCE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


class EngineProcess(SpawnProcess):
    """An engine in a process of its own, which is started here.

    Args:
        run_engine: what runs there, with `arguments`.
    """

    def __init__(self, run_engine: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        arguments = (run_engine, theirs, *arguments)
        super().__init__(target=_run_with_pulse, args=arguments, name="nanovllm-engine", daemon=True)
        # The terminal sends Ctrl-C to the whole process group, but it is this process that decides when the engine
        # ends. A blocked signal stays blocked in a child, from its first instruction on. (multiprocessing's helper
        # process is started before, because its start unblocks the signal.)
        resource_tracker.ensure_running()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        theirs.close()
        # `start` has copied this object into the process, which must not have our end of the pipe.
        self._pulse, self._peer = ours, Peer("the engine process", f"process {self.pid}")
        self._peer.pid = self.pid

    def expect_heartbeats(self) -> None:
        """The engine is ready: from now on its silence counts."""
        self._peer.expect_heartbeats()

    async def watch(self, on_hang: Callable[[str], None]) -> None:
        """Look after the process until it has ended. If it hangs, call `on_hang` with the reason, then kill it.

        How the process has ended by itself is for its sentinel to say.
        """
        watch = Watch([self._peer])
        while (verdict := watch.look(lambda timeout: self._peer.drain(self._pulse))) is None:
            await asyncio.sleep(LOOK_SECONDS)
        if not self._peer.is_gone:
            on_hang(verdict.text)
            self.kill()

    def kill(self) -> None:
        """Kill the process and its ranks, which may be stopped or hang, too."""
        if self.pid is not None and self.is_alive():
            kill_tree(self.pid)

    async def end(self, was_told: bool) -> None:
        """Wait until the process has ended. It is killed unless it was told to end, and does in time."""
        if was_told:
            await asyncio.to_thread(self.join, END_SECONDS)
        self.kill()
        await asyncio.to_thread(self.join)
