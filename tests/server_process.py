"""A server in a process of its own, as a user starts it, and what tests want to know of it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from tests import forking

START_SECONDS = 120
# Errors come within 5 s; a busy machine may take several times as long.
SOON = 30.0


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, what: str = "") -> None:
    """Look again and again until the condition holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.02)


def free_port() -> int:
    """A port for a program that must be told which, and that listens on it later. The system gives
    no other program one below its own range, which usually begins at 32,768."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def wait_for_shared_memory_to_go() -> None:
    """See that no shared memory is left that no process uses any more: what others use belongs to
    tests that still run."""

    def left_over() -> set[pathlib.Path]:
        there, used = set(pathlib.Path("/dev/shm").glob("nanovllm*")), set[str]()
        for maps in pathlib.Path("/proc").glob("[0-9]*/maps") if there else ():
            with contextlib.suppress(OSError):  # the process has just ended
                used.update(re.findall(r"/dev/shm/nanovllm\S*", maps.read_text()))
        return {path for path in there if str(path) not in used}

    found = left_over()
    wait_until(lambda: not found & left_over(), 60, f"shared memory is left: {found}")


def are_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(map(runs, processes))


class ServerProcess:
    """`nanovllm serve` on a port that the system chose.

    Args:
        model: folder of the checkpoint.
        folder: where its output goes.
        *options: further flags.
        package: the folder that holds the package, if it is not the tree under test.
    """

    package: pathlib.Path | None = None

    def __init__(
        self,
        model: pathlib.Path,
        folder: pathlib.Path,
        *options: str,
        package: pathlib.Path | None = None,
    ) -> None:
        self.package = package
        command = [sys.executable, "-m", "nanovllm", "serve", str(model), "--port", "0"]
        command += [
            "--served-model-name",
            "tiny",
            "--attention-backend",
            "torch",
            "--dtype",
            "float32",
            *options,
        ]
        self._launch(command, folder)

    def _launch(self, command: list[str], folder: pathlib.Path) -> None:
        self.output = folder / "output.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        if self.package is not None:
            environment["PYTHONPATH"] = str(self.package)
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.package,
                start_new_session=True,
            )
        self.client = httpx.Client(timeout=60)

    def __enter__(self) -> Self:
        wait_until(
            lambda: self._url() or self.process.poll() is not None,
            START_SECONDS,
            "the server is ready",
        )
        assert self.process.poll() is None, self.text
        url = self._url()
        assert url is not None
        self.url = url
        self.client.base_url = httpx.URL(url)
        wait_until(lambda: self.get("/health").status_code == 200)
        self.engine = self._engine_process()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    @property
    def text(self) -> str:
        """Everything the server has printed."""
        return self.output.read_text(errors="replace")

    def _url(self) -> str | None:
        found = re.search(r"(http://\S+)/v1, described", self.text)
        return found[1] if found else None

    def _engine_process(self) -> psutil.Process:
        found = forking.children(psutil.Process(self.process.pid))
        (engine,) = [
            child for child in found if "nanovllm.engine.client" in " ".join(child.cmdline())
        ]
        return engine

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return self.client.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST an object as JSON, or `content=` as it is."""
        return (
            self.client.post(path, json=body, **options)
            if body is not None
            else self.client.post(path, **options)
        )

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions."""
        response = self.post("/v1/completions", {"prompt": "abc", "temperature": 0} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream; checks that it ends with [DONE]."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metrics(self, url: str = "") -> dict[str, float]:
        """All metrics, over all engines: sums, and of the pools' usage the highest. Labels other
        than the model's name and the engine are part of the key. With a URL, another server's."""
        found: dict[str, float] = {}
        for line in self.get(f"{url}/metrics").text.splitlines():
            if not line.startswith("#"):
                name, number = line.rsplit(" ", 1)
                key = re.sub(
                    r'(model_name="tiny"|engine="\d+"),?',
                    "",
                    name.removeprefix("nanovllm:").removeprefix("vllm:"),
                )
                key, value = key.replace("{}", "").replace(",}", "}"), float(number)
                before = found.get(key, 0.0)
                found[key] = max(before, value) if key == "kv_cache_usage_perc" else before + value
        return found

    def is_idle(self, url: str = "") -> bool:
        """Whether no request is in the engine and every block is free."""
        metrics = self.metrics(url)
        names = (
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_swapped",
            "kv_cache_usage_perc",
        )
        return all(metrics[name] == 0 for name in names)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def kept_busy(server: ServerProcess, num_clients: int, **body: Any) -> Iterator[None]:
    """Clients that ask again and again until the body of the `with` ends: what is to be seen while
    requests run is there for as long as somebody looks, also on a fast or a busy machine."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            server.complete(**body)

    with ThreadPoolExecutor(num_clients) as threads:
        clients = [threads.submit(ask) for _ in range(num_clients)]
        try:
            yield
        finally:
            over.set()
            for client in clients:
                client.result()


def with_positions(tiny_model: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The tiny model with room for long answers: a request that is to be seen running has many more
    tokens than are computed before somebody looks, also on a busy machine."""
    model = shutil.copytree(tiny_model, folder / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 32_000}))
    return model
