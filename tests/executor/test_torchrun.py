"""The ranks under torchrun: on one machine, on two, and what becomes of them when one goes
wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import httpx
import psutil
import pytest

from nanovllm.executor.reception import Card, Reception, connect, use_network_of
from nanovllm.executor.torchrun import Launch
from tests import rank_faults
from tests.forking import children
from tests.machines import ADDRESSES, Machines
from tests.oracle import make_tokenizer, reference_tokens
from tests.server_process import (
    SOON,
    START_SECONDS,
    are_gone,
    free_port,
    wait_until,
    with_positions,
)

PROMPT = [5, 6, 7, 8]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FLAGS = [
    "--attention-backend",
    "torch",
    "--dtype",
    "float32",
    "--num-kv-blocks",
    "64",
    "--served-model-name",
    "tiny",
]

SCRIPT = """
import os, sys
from nanovllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        attention_backend="torch",
        dtype="float32",
        num_kv_blocks=64,
        tensor_parallel_size=2,
    )
    assert os.environ["RANK"] == "0", "the other ranks do not come so far"
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params, use_tqdm=False)
    print("TOKENS", output.outputs[0].token_ids, flush=True)
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    """A program with an LLM on two ranks, which prints what it generates."""
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def tokens_in(text: str) -> list[int]:
    found = re.findall(r"^TOKENS (.*)$", text, re.MULTILINE)
    assert len(found) == 1, text
    return json.loads(found[0])


def test_a_program_on_two_ranks(tiny_model: pathlib.Path, script: pathlib.Path) -> None:
    command = [
        *TORCHRUN,
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        str(script),
        str(tiny_model),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert tokens_in(ended.stdout) == reference_tokens(str(tiny_model), PROMPT, 20)
    assert "Traceback" not in ended.stderr and "terminate called" not in ended.stderr


def serve_on_two_ranks() -> list[str]:
    """A command line, without the model."""
    options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    return [*TORCHRUN, *options, "-m", "nanovllm", "serve"]


def test_as_many_processes_as_ranks(tiny_model: pathlib.Path) -> None:
    command = serve_on_two_ranks()
    ended = subprocess.run(
        [*command, str(tiny_model), "-tp", "4"], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode != 0
    assert "tensor_parallel_size 4 x pipeline_parallel_size 1 is 4 ranks" in ended.stderr
    assert "WORLD_SIZE = 2 processes: start 4, or change the sizes" in ended.stderr


def test_strangers_are_not_let_in() -> None:
    reception = Reception("127.0.0.1")
    host, port, key = reception.invitation
    stranger = socket.create_connection((host, port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    impostor = connect((host, port, "0" * len(key)), "there", Card(1))
    with connect(reception.invitation, "here", Card(1)) as ours:
        ((card, connection),) = reception.wait_for([1])
        assert card.where == f"process {os.getpid()} on here"
        connection.send("welcome")
        assert ours.recv() == "welcome"
    stranger.close()
    impostor.close()


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        ValueError, match=r"needs torchrun, and 'RANK' is not in the environment: .* or use 'mp'"
    ):
        Launch()


def test_the_network_that_leads_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    Launch().join_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    Launch().join_network()  # the other machine cannot be there
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert "--master-addr 127.0.0.1 is a loopback address here" in caplog.text
    use_network_of("203.0.113.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    Launch().join_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


# ---------------------------------------------------------------- the server


def words_of(process: psutil.Process) -> list[str]:
    """A process's command line; empty if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Job:
    """`nanovllm serve` on two ranks under torchrun, with all its processes."""

    def __init__(self, model: pathlib.Path, folder: pathlib.Path, *options: str) -> None:
        self.output = folder / "output.txt"
        command = serve_on_two_ranks()
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, str(model), "--port", "0", "-tp", "2", *FLAGS, *options],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(folder)},
            )

    def __enter__(self) -> Job:
        wait_until(
            lambda: self._url or self.process.poll() is not None,
            START_SECONDS,
            "the server is ready",
        )
        assert self._url is not None, self.text
        self.client = httpx.Client(base_url=self._url, timeout=60)
        self.processes = children(psutil.Process(self.process.pid), recursive=True)
        # Rank 0 alone starts an engine.
        self.ranks = sorted(
            (p for p in self.processes if "serve" in words_of(p)), key=self._engines, reverse=True
        )
        assert [len(self._engines(rank)) for rank in self.ranks] == [1, 0]
        return self

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def _url(self) -> str | None:
        found = re.search(r"(http://\S+)/v1, described", self.text)
        return found[1] if found else None

    @staticmethod
    def _engines(rank: psutil.Process) -> list[int]:
        return [p.pid for p in children(rank) if "nanovllm.engine.client" in " ".join(words_of(p))]

    def complete(self, count: int) -> httpx.Response:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
        }
        return self.client.post("/v1/completions", json=body)

    @property
    def is_over(self) -> bool:
        """Whether none of its processes is left."""
        return are_gone(self.processes) and self.process.poll() is not None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        for process in (
            *self.processes,
            psutil.Process(self.process.pid) if self.process.poll() is None else None,
        ):
            if process is not None and process.is_running():
                process.kill()
        self.process.wait()


@pytest.fixture
def job(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Job]:
    with Job(tiny_model, tmp_path) as running:
        yield running


class Request(threading.Thread):
    """A request that takes a while."""

    def __init__(self, job: Job, count: int) -> None:
        super().__init__()
        self._job, self._count = job, count
        self.start()

    def run(self) -> None:
        self.response = self._job.complete(self._count)

    def answer(self) -> tuple[httpx.Response, float]:
        """The response, and how long one had to wait for it."""
        start = time.monotonic()
        self.join()
        return self.response, time.monotonic() - start


def wait_until_running(job: Job) -> None:
    running = 'num_requests_running{engine="0",model_name="tiny"} 1.0'
    wait_until(lambda: running in job.client.get("/metrics").text)


def test_a_server_on_two_ranks_answers_and_drains(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    text = make_tokenizer().decode(reference_tokens(str(tiny_model), PROMPT, 20))
    with Job(with_positions(tiny_model, tmp_path), tmp_path, "--num-kv-blocks", "2048") as job:
        assert job.complete(20).json()["choices"][0]["text"] == text
        # torchrun gives all processes 30 seconds to end.
        request = Request(job, 500)
        wait_until_running(job)
        job.process.terminate()  # torchrun passes the signal on to all processes of all ranks
        response, _ = request.answer()
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 500
        wait_until(lambda: job.is_over, SOON, "torchrun and all ranks have ended")
        assert are_gone(job.processes) and "the engine is dead" not in job.text


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"rank 1, process \d+ on .*has ended"),
        pytest.param(signal.SIGSTOP, r"rank 1, process \d+ on .*hangs", marks=pytest.mark.nightly),
    ],
)
def test_a_lost_rank_is_named_and_nothing_is_left(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, number: signal.Signals, words: str
) -> None:
    """The request has many more tokens to go when the rank is lost: it cannot end well before the
    loss is noticed."""
    with Job(with_positions(tiny_model, tmp_path), tmp_path, "--num-kv-blocks", "2048") as job:
        request = Request(job, 30_000)
        wait_until_running(job)
        job.ranks[1].send_signal(number)
        response, seconds = request.answer()
        assert seconds < SOON
        assert response.status_code == 503, response.text
        error = response.json()["error"]
        assert error["code"] == "engine_dead" and re.search(words, error["message"])
        # torchrun sees the loss of a rank, too, and ends the others.
        wait_until(lambda: job.is_over, 2 * SOON, "torchrun and all ranks have ended")
        assert job.process.returncode != 0


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_named(
    tiny_model: pathlib.Path,
    tmp_path: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    victim: int,
) -> None:
    """The engine's process waits for the rank, and must not be thought to hang, too."""
    faults = rank_faults.environment(tmp_path_factory.mktemp("faults"), f"{victim} launch hang 40")
    for name, value in faults.items():
        monkeypatch.setenv(name, value)
    with Job(tiny_model, tmp_path) as job:
        response, seconds = Request(job, 250).answer()
        words = (
            rf"rank {victim}, process \d+( on .*)?, hangs: for 4 seconds it has been at"
            r" .*rank_faults.py:\d+ in"
        )
        assert response.status_code == 503 and re.search(words, response.text), response.text
        assert seconds < SOON
        wait_until(lambda: job.is_over, 2 * SOON, "torchrun and all ranks have ended")


def test_the_ranks_end_with_rank_0_however_it_dies(job: Job) -> None:
    job.ranks[0].kill()
    wait_until(lambda: job.is_over, 2 * SOON, "torchrun and all ranks have ended")


# ---------------------------------------------------------------- two machines


def test_two_machines(tiny_model: pathlib.Path, script: pathlib.Path) -> None:
    port = free_port()
    with Machines() as machines:
        started = []
        for machine in range(2):
            command = [
                *TORCHRUN,
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                "--node-rank",
                str(machine),
            ]
            command += [
                "--master-addr",
                ADDRESSES[0],
                "--master-port",
                str(port),
                str(script),
                str(tiny_model),
            ]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(machines.start(machine, command, **pipes))
        outputs = [process.communicate(timeout=200)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], outputs
    assert tokens_in(outputs[0]) == reference_tokens(str(tiny_model), PROMPT, 20)
    assert "TOKENS" not in outputs[1]
