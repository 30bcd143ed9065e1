"""A server whose engine has several ranks, and what its clients see when one of them is lost."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from tests import rank_faults
from tests.forking import children
from tests.oracle import make_checkpoint, make_tokenizer, reference_tokens
from tests.server_process import (
    SOON,
    ServerProcess,
    are_gone,
    wait_for_shared_memory_to_go,
    wait_until,
)

PROMPT = [5, 6, 7, 8]
BODY = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Load(threading.Thread):
    """Requests, one after another, until one fails.

    Attributes:
        error: what the API said then, or that there is no API any more.
        failed: when, in seconds of the monotonic clock.
    """

    def __init__(self, server: ServerProcess, stream: bool) -> None:
        super().__init__()
        self._server, self._stream = server, stream
        self.error: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        while not self.error:
            try:
                self.error = self._in_pieces() if self._stream else self._whole()
            except httpx.TransportError as error:
                self.error = {"message": str(error)}
        self.failed = time.monotonic()

    def _whole(self) -> dict[str, Any]:
        response = self._server.post("/v1/completions", BODY)
        assert response.status_code in (200, 503)
        return response.json().get("error", {})

    def _in_pieces(self) -> dict[str, Any]:
        with self._server.client.stream(
            "POST", "/v1/completions", json=BODY | {"stream": True}
        ) as response:
            if response.status_code == 503:
                return json.loads(response.read())["error"]
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        return next((json.loads(line)["error"] for line in lines if '"error"' in line), {})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One with experts, which engines can share."""
    return make_checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral")


def descendant(process: psutil.Process, path: tuple[int, ...]) -> psutil.Process:
    """(1, 0) is the first child of the second child."""
    return descendant(children(process)[path[0]], path[1:]) if path else process


LOCK_STEP = "--enable-expert-parallel"


# By day one fault; the others, which tests of executors and of data parallelism have without a
# server, nightly.
FAULTS = [
    ("-pp 2", signal.SIGKILL, (1,), r"rank 1 \(stage 1, .*\), process \d+, was killed by SIGKILL")
]
MORE_FAULTS = [
    (
        "-tp 2",
        "hang 300",
        (1,),
        r"rank 1, process \d+, hangs: for 4 s.* at .*rank_faults.py:\d+ in strike",
    ),
    (
        "-dp 2",
        signal.SIGSTOP,
        (),
        r"the engine process, process \d+, hangs: nothing was heard of it for 4 s",
    ),
    ("-tp 2", signal.SIGKILL, (0,), r"rank 0, process \d+, was killed by SIGKILL"),
    ("-tp 2", signal.SIGSTOP, (1,), r"rank 1, process \d+, hangs: nothing was heard of it for 4 s"),
    ("-dp 2", signal.SIGKILL, (), "the engine process,? .*was killed by SIGKILL"),
    (
        "-tp 2",
        signal.SIGSTOP,
        (),
        r"the engine process, process \d+, hangs: nothing was heard of it for 4 s",
    ),
    (
        f"-dp 2 -tp 2 {LOCK_STEP}",
        signal.SIGKILL,
        (1, 0),
        r"data rank 1, process \d+, failed: .*: rank 0, process \d+, was killed by SIGKILL",
    ),
]


@pytest.mark.parametrize(
    ("grid", "fault", "victim", "words"),
    [*FAULTS, *(pytest.param(*fault, marks=pytest.mark.nightly) for fault in MORE_FAULTS)],
)
def test_every_request_gets_an_error_and_nothing_is_left(
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    grid: str,
    fault: signal.Signals | str,
    victim: tuple[int, ...],
    words: str,
) -> None:
    if isinstance(fault, str):
        variables = rank_faults.environment(
            tmp_path_factory.mktemp("faults"), f"{victim[0]} launch {fault}"
        )
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    with ServerProcess(model, tmp_path, *grid.split(), "--num-kv-blocks", "64") as server:
        processes = [server.engine, *children(server.engine, recursive=True)]
        assert len(processes) == (7 if "-dp 2 -tp 2" in grid else 3)
        text = make_tokenizer().decode(reference_tokens(str(model), PROMPT, 20))
        assert (
            server.complete(prompt=PROMPT, max_tokens=20, ignore_eos=True)["choices"][0]["text"]
            == text
        )
        loads = [Load(server, stream=bool(i % 2)) for i in range(4)]
        wait_until(lambda: server.metrics()["num_requests_running"] > 1)
        if isinstance(fault, signal.Signals):
            descendant(server.engine, victim).send_signal(fault)
        start = time.monotonic()
        for load in loads:
            load.join()
            assert load.failed - start < SOON
            assert re.search(
                f"^the engine is dead: (ExecutorError: )?{words}", load.error["message"]
            ), load.error
            assert load.error["type"] == "server_error" and load.error["code"] == "engine_dead"
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", BODY).status_code == 503
        wait_until(lambda: are_gone(processes), SOON, "the engine and all ranks have ended")
        assert server.stop() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["output.txt"]
    wait_for_shared_memory_to_go()


def test_a_rank_is_missed_while_nobody_asks(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with ServerProcess(tiny_model, tmp_path, "-tp", "2", "--num-kv-blocks", "64") as server:
        children(server.engine)[1].kill()
        wait_until(
            lambda: server.get("/health").status_code == 503, SOON, "the server is unhealthy"
        )
        assert "rank 1" in server.text


@pytest.mark.parametrize("grid", ["-tp", pytest.param("-dp", marks=pytest.mark.nightly)])
def test_the_ranks_end_with_the_server_however_it_dies(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, grid: str
) -> None:
    with ServerProcess(tiny_model, tmp_path, grid, "2", "--num-kv-blocks", "64") as server:
        processes = children(psutil.Process(server.process.pid), recursive=True)
        assert len(processes) >= 3
        loads = [Load(server, stream=True) for _ in range(2)]
        wait_until(lambda: server.metrics()["num_requests_running"] > 1)
        server.process.kill()
        server.process.wait()
        for load in loads:
            load.join()
        wait_until(lambda: are_gone(processes), SOON, "all have ended")
    assert [path.name for path in tmp_path.iterdir()] == ["output.txt"]
