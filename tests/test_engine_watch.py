"""The process of an engine is not taken for dead while it computes for long."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from nanovllm import life_signs
from nanovllm.engine_watch import EngineProcess
from nanovllm.life_signs import in_step

STEP_LIMIT = 0.2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads do")


def compute_for_long() -> None:
    """An engine with a step that takes longer than the limit for ranks."""
    life_signs.STEP_SECONDS = STEP_LIMIT
    end = time.thread_time() + 5 * STEP_LIMIT
    with in_step():
        while time.thread_time() < end:
            pass


async def test_a_step_of_an_engine_may_compute_for_any_time() -> None:
    process, hangs = EngineProcess(compute_for_long), list[str]()
    process.expect_heartbeats()
    async with asyncio.timeout(60):
        await process.watch(hangs.append)
        await process.end(was_told=True)
    assert hangs == [] and process.exitcode == 0
