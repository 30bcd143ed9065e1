"""An engine's process that sends heartbeats, so that the front end notices when it stops or hangs."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.distributed.activity import LOOK_SECONDS
from nanovllm.distributed.life_signs import SILENCE_SECONDS, Mouth, Peer, Watch
from nanovllm.engine.watch import EngineProcess


def _run_with_pulse(run_engine: Callable[..., None], pulse: Connection, *arguments: Any) -> None:
    """Run the engine, and a thread that sends heartbeats and reports a step that hangs."""
    PatientMouth(pulse.send)
    run_engine(*arguments)


class PatientMouth(Mouth):
    """If the front end is gone, the engine's loop notices that as well and ends; if it hangs, a timer ends the process."""

    def on_lost(self) -> None:
        """Start the timer."""
        timer = threading.Timer(2 * SILENCE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()


class WatchedEngineProcess(EngineProcess):
    """An engine in a process of its own, which is killed when it hangs."""

    def __init__(self, run_engine: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        super().__init__(_run_with_pulse, run_engine, theirs, *arguments)
        theirs.close()
        # Set after the start, which copies this object into the process: that must not have this end of the pipe.
        self._peer = Peer("the engine process", f"process {self.pid}", ours)
        self._peer.pid = self.pid

    def expect_heartbeats(self) -> None:
        """See `EngineProcess`."""
        self._peer.expect_heartbeats()

    async def watch(self, on_hang: Callable[[str], None]) -> None:
        """See `EngineProcess`."""
        watch = Watch([self._peer])
        while (verdict := watch.look(lambda timeout: self._peer.drain())) is None:
            await asyncio.sleep(LOOK_SECONDS)
        if not self._peer.is_gone:
            on_hang(verdict.text)
            self.kill()
