"""A server whose engine has several ranks, and what its clients see when one of them is lost."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import threading
import time
from typing import Any

import psutil
import pytest

from tests.oracle import make_tokenizer, reference_tokens
from tests.server_process import ServerProcess, wait_until

# Errors come within 5 s; a busy machine may take longer.
SOON = 15.0
PROMPT = [5, 6, 7, 8]
BODY = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Load(threading.Thread):
    """Requests, one after another, until one fails.

    Attributes:
        error: what the API said then.
        failed: when, in seconds of the monotonic clock.
    """

    def __init__(self, server: ServerProcess, stream: bool) -> None:
        super().__init__()
        self._server, self._stream = server, stream
        self.error: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        while not self.error:
            self.error = self._in_pieces() if self._stream else self._whole()
        self.failed = time.monotonic()

    def _whole(self) -> dict[str, Any]:
        response = self._server.post("/v1/completions", BODY)
        assert response.status_code in (200, 503)
        return response.json().get("error", {})

    def _in_pieces(self) -> dict[str, Any]:
        with self._server.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            if response.status_code == 503:
                return json.loads(response.read())["error"]
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        return next((json.loads(line)["error"] for line in lines if '"error"' in line), {})


@pytest.mark.parametrize(
    ("number", "victim", "grid", "words"),
    [
        (signal.SIGKILL, 0, "-tp", r"rank 0, process \d+, was killed by SIGKILL"),
        (signal.SIGKILL, 1, "-pp", r"rank 1 \(stage 1, tensor rank 0\), process \d+, was killed by SIGKILL"),
        (signal.SIGSTOP, 1, "-tp", r"rank 1, process \d+, hangs: nothing was heard of it for 4 seconds"),
    ],
)
def test_every_request_gets_an_error_and_nothing_is_left(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, number: int, victim: int, grid: str, words: str
) -> None:
    with ServerProcess(tiny_model, tmp_path, grid, "2", "--num-kv-blocks", "64") as server:
        ranks = server.engine.children()
        assert len(ranks) == 2
        text = make_tokenizer().decode(reference_tokens(str(tiny_model), PROMPT, 20))
        assert server.complete(prompt=PROMPT, max_tokens=20, ignore_eos=True)["choices"][0]["text"] == text
        loads = [Load(server, stream=bool(i % 2)) for i in range(4)]
        wait_until(lambda: server.metrics()["num_requests_running"] > 1)
        ranks[victim].send_signal(number)
        start = time.monotonic()
        for load in loads:
            load.join()
            assert load.failed - start < SOON
            assert re.search(words, load.error["message"]), load.error
            assert load.error["type"] == "server_error" and load.error["code"] == "engine_dead"
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", BODY).status_code == 503
        wait_until(
            lambda: not any(p.is_running() for p in (*ranks, server.engine)), SOON, "the ranks have ended"
        )
        assert server.stop() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["output.txt"]
    assert not list(pathlib.Path("/dev/shm").glob("nanovllm*"))


def test_a_rank_is_missed_while_nobody_asks(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with ServerProcess(tiny_model, tmp_path, "-tp", "2", "--num-kv-blocks", "64") as server:
        server.engine.children()[1].kill()
        wait_until(lambda: server.get("/health").status_code == 503, SOON, "the server is unhealthy")
        assert "rank 1" in server.text


def test_the_ranks_end_with_the_server_however_it_dies(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with ServerProcess(tiny_model, tmp_path, "-tp", "2", "--num-kv-blocks", "64") as server:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) >= 3
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(p.is_running() for p in processes), SOON, "all have ended")
