"""The process of an engine is not taken for dead while it computes for long, or while a debugger holds it."""

from __future__ import annotations

import asyncio
import multiprocessing
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from nanovllm.distributed import life_signs
from nanovllm.distributed.activity import in_step
from nanovllm.distributed.life_signs import is_debugged_or_dumps_core
from nanovllm.engine.pulse import WatchedEngineProcess

SILENCE = 2.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads do")

# Stops every thread of a process, as `gdb -p` and `gcore` do, until a line comes.
DEBUGGER = """
import ctypes, os, sys
ATTACH, DETACH, ANY_THREAD = 16, 17, 0x40000000
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
threads = [int(name) for name in os.listdir(f"/proc/{sys.argv[1]}/task")]
for thread in threads:
    if ptrace(ATTACH, thread, None, None):
        sys.exit(print("refused", flush=True))
    os.waitpid(thread, ANY_THREAD)
print("held", flush=True)
input()
for thread in threads:
    ptrace(DETACH, thread, None, None)
"""


def compute_for_long() -> None:
    """An engine with a step that takes longer than a hang."""
    life_signs.SILENCE_SECONDS = SILENCE / 4
    end = time.thread_time() + SILENCE
    with in_step():
        while time.thread_time() < end:
            pass


def rest_until_told(connection: Connection) -> None:
    """An engine without requests."""
    connection.recv()


async def test_a_step_of_an_engine_may_compute_for_any_time() -> None:
    process, hangs = WatchedEngineProcess(compute_for_long), list[str]()
    process.expect_heartbeats()
    async with asyncio.timeout(60):
        await process.watch(hangs.append)
        await process.end(was_told=True)
    assert hangs == [] and process.exitcode == 0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


async def test_an_engine_that_a_debugger_holds_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_signs, "SILENCE_SECONDS", SILENCE)
    ours, theirs = multiprocessing.Pipe()
    process, hangs = WatchedEngineProcess(rest_until_told, theirs), list[str]()
    watch = asyncio.create_task(process.watch(hangs.append))
    born = process._peer.heard
    try:
        await until(lambda: process._peer.heard > born)  # its heart beats
        process.expect_heartbeats()
        command = [sys.executable, "-c", DEBUGGER, str(process.pid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as debugger:
            assert debugger.stdout is not None
            if await asyncio.to_thread(debugger.stdout.readline) != "held\n":
                pytest.skip("a process may not trace another one here")
            held = time.monotonic()
            # Nothing is sent now. What was sent before has been taken in a second later.
            await until(lambda: hangs or process._peer.heard > held + 1)
            debugger.communicate("\n")
        resumed = process._peer.heard
        await until(lambda: hangs or process._peer.heard > resumed)
        assert hangs == [] and process.is_alive()
        ours.send("end")
        await process.end(was_told=True)
        await watch
        assert hangs == [] and process.exitcode == 0
    finally:
        process.kill()
        await watch


@pytest.mark.parametrize(
    ("status", "counts"),
    [
        ("State:\tt (tracing stop)\nCoreDumping:\t0\n", True),
        ("State:\tD (disk sleep)\nCoreDumping:\t1\n", True),
        ("State:\tT (stopped)\nCoreDumping:\t0\n", False),
    ],
)
def test_debuggers_and_core_dumps_are_told_from_a_stop(
    monkeypatch: pytest.MonkeyPatch, status: str, counts: bool
) -> None:
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path: status)
    assert is_debugged_or_dumps_core(1) is counts
