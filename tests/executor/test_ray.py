"""The ranks as Ray's actors."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import sys
import time

import psutil
import pytest

from nanovllm import LLM
from nanovllm.executor.base import ExecutorError
from tests.oracle import greedy, reference_tokens
from tests.server_process import SOON, wait_until

PROMPTS = [[5, 6, 7, 8], list(range(20, 70)), [9]]


@pytest.mark.nightly
def test_two_actors_compute_what_one_process_does(
    fork_server: None,
    tiny_model: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Ray of our own, which listens to this machine alone, and of which nothing is left when a
    rank has died."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray keeps its secret
    before = set(psutil.Process().children(recursive=True))
    llm = LLM(
        str(tiny_model),
        attention_backend="torch",
        dtype="float32",
        num_kv_blocks=64,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    started = [p for p in psutil.Process().children(recursive=True) if p not in before]
    for process in [*started, psutil.Process()]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip.removeprefix("::ffff:") in ("127.0.0.1", "::1"), (
                    process.cmdline()
                )
    assert greedy(llm, PROMPTS, 20) == [
        reference_tokens(str(tiny_model), prompt, 20) for prompt in PROMPTS
    ]

    executor = llm.engine.core.executor
    victim = executor.ranks[1].where  # type: ignore[attr-defined]
    found = re.fullmatch(r"process (\d+) on 127\.0\.0\.1", victim)
    assert found is not None
    os.kill(int(found[1]), 9)
    start = time.monotonic()
    with pytest.raises(ExecutorError, match=rf"rank 1, {victim}, has ended: .*died"):
        greedy(llm, PROMPTS, 100)
    assert time.monotonic() - start < SOON
    wait_until(lambda: not any(p.is_running() for p in started), 20, "Ray has ended")
    assert not os.path.exists(executor.folder)  # type: ignore[attr-defined]


def test_without_ray(tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nanovllm.executor.ray", raising=False)
    with pytest.raises(
        ValueError, match=r"needs Ray, which is not installed: pip install 'nanovllm\[ray\]'"
    ):
        LLM(str(tiny_model), tensor_parallel_size=2, distributed_executor_backend="ray")
    monkeypatch.undo()
    importlib.import_module("nanovllm.executor.ray")
