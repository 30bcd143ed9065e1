"""Engines under measurement, each in processes of its own, started and ended here.

An engine is used in one of two ways: offline, through `worker.py`, or as a server, through HTTP. Both have the same
`run(workload, requests)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import httpx
import psutil

from nanovllm.data.config import EngineConfig, parse_bytes
from nanovllm.data.flags import ServerError
from nanovllm.lab.bench import client
from nanovllm.lab.bench.machine import peak_memory, process_tree, usable_cores
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.lab.processes import free_port, python_environment

ENGINES = ("nanovllm", "hf", "vllm")
#: `generate` of transformers is a function, not a server.
SERVING_ENGINES = ("nanovllm", "vllm")

T = TypeVar("T")

START_SECONDS = 600.0
STOP_SECONDS = 10.0
# The options that vLLM has under the same names; it does not get the others.
_VLLM_OPTIONS = {
    "block_size", "dtype", "enable_chunked_prefill", "enable_prefix_caching", "load_format",
    "long_prefill_token_threshold", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "scheduling_policy",
    "seed", "tokenizer",
}  # fmt: skip


class EngineFailed(ServerError):
    """An engine did not start, or ended while it was needed; the message says how, and where its log is."""


def end_of_log(path: pathlib.Path) -> str:
    """ ": " and the last line of a log; nothing if it is empty."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


@dataclass
class EngineSettings:
    """How to start an engine.

    Attributes:
        name: one of `ENGINES`.
        model: folder of the checkpoint.
        options: settings under nanovllm's names, the ones that differ from its defaults.
        num_threads: cores that it may compute on.
        python: interpreter of the environment that has the engine.
    """

    name: str
    model: pathlib.Path
    options: dict[str, Any]
    num_threads: int
    python: str = sys.executable

    def engine_options(self) -> dict[str, Any]:
        """The options that this engine has."""
        if self.name == "vllm":
            return {name: value for name, value in self.options.items() if name in _VLLM_OPTIONS}
        return dict(self.options)

    def environment(self) -> dict[str, str]:
        """Its environment variables: as many threads as all the others, and nothing from the network."""
        found = python_environment() | {"HF_HUB_OFFLINE": "1"}
        if self.name != "vllm":
            return found | {"OMP_NUM_THREADS": str(self.num_threads)}
        del found["PYTHONPATH"]
        cores = ",".join(str(core) for core in usable_cores()[: self.num_threads])
        kv_bytes = parse_bytes(self.options.get("kv_cache_memory", "2GiB"), "kv_cache_memory")
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes // 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
        }
        libraries = preload_libraries(self.python)
        return found | ({"LD_PRELOAD": ":".join(libraries)} if libraries else {})


def preload_libraries(python: str) -> list[str]:
    """The faster allocator and the OpenMP runtime that vLLM's CPU build recommends, as far as they are installed."""
    folders = [pathlib.Path(python).parents[1] / "lib", *sorted(pathlib.Path("/usr/lib").glob("*-linux-gnu"))]
    found = []
    for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        paths = (folder / name for folder in folders)
        found += [str(path) for path in paths if path.is_file()][:1]
    return found


@dataclass
class Started:
    """A start of an engine.

    Attributes:
        kind: "offline" or "server".
        seconds: from nothing to the first token of a first request.
        versions: of the packages it runs on.
        peak_bytes: the most resident memory of all its processes together, so far.
        group: starts of different engines with the same number belong together.
    """

    engine: str
    kind: str
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    peak_bytes: int = 0
    group: int = 0


class EngineProcess:
    """The processes of one engine; a context manager, at whose end none of them is left."""

    kind: str
    answers_on_stdout = False
    process: subprocess.Popen[str]
    started: Started

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        # It runs in an empty folder, so that it imports nothing from the current one.
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=f"bench-{settings.name}-"))
        self._log = self._folder / "engine.log"

    def __enter__(self) -> Self:
        begin = time.perf_counter()
        self._spawn()
        try:
            versions = self._first_token()
        except BaseException:
            self._end()
            raise
        self.started = Started(self.settings.name, self.kind, time.perf_counter() - begin, versions)
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *rest: object) -> None:
        self.started.peak_bytes = peak_memory(self.process.pid)
        self._end()
        # After a failure the log stays.
        if exception_type is None or not issubclass(exception_type, EngineFailed):
            shutil.rmtree(self._folder)

    def run(self, workload: Workload, requests: Sequence[BenchRequest]) -> list[Timeline]:
        """Run a workload; the timelines of its requests.

        Raises:
            EngineFailed: the engine ended, or its answer is not what was asked for.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Stop all its processes where they are: an engine that waits busily would slow the one that is measured."""
        for process in process_tree(self.process.pid):
            process.suspend()

    def wake(self) -> None:
        """Let its processes go on."""
        for process in process_tree(self.process.pid):
            process.resume()

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _first_token(self) -> dict[str, str]:
        """Wait for the first token; returns versions."""
        raise NotImplementedError

    def _spawn(self) -> None:
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self._command(),
                env=self.settings.environment(),
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.answers_on_stdout else log,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which ends the engine
            )

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(f"{self.settings.name} {what}{end_of_log(self._log)} (log: {self._log})")

    def _end(self) -> None:
        self.wake()
        tree = process_tree(self.process.pid)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(tree, STOP_SECONDS)  # a process that is still ending would disturb the next engine
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class OfflineEngine(EngineProcess):
    """An engine behind `worker.py`."""

    kind, answers_on_stdout = "offline", True

    def run(self, workload: Workload, requests: Sequence[BenchRequest]) -> list[Timeline]:
        orders = [{"prompt_token_ids": r.prompt_token_ids, "max_tokens": r.max_tokens} for r in requests]
        self._send({"requests": orders})
        timelines = [Timeline(0.0, [(t, n) for t, n in line]) for line in self._receive()["timelines"]]
        for line, request in zip(timelines, requests, strict=True):
            if line.num_tokens != request.max_tokens:
                raise self._failed(f"gave {line.num_tokens} tokens instead of {request.max_tokens}")
        return timelines

    def _command(self) -> list[str]:
        return [self.settings.python, str(pathlib.Path(__file__).with_name("worker.py"))]

    def _first_token(self) -> dict[str, str]:
        settings = self.settings
        self._send({"engine": settings.name, "model": str(settings.model), "options": settings.engine_options()})
        return self._receive()["versions"]

    def _send(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("has ended") from None

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._failed(f"ended with status {self.process.wait()}")
        return json.loads(line)


class Server(EngineProcess):
    """An engine behind its own OpenAI-compatible server."""

    kind = "server"

    def run(self, workload: Workload, requests: Sequence[BenchRequest]) -> list[Timeline]:
        return self._talk(client.run_workload(self.url, self.model_name, workload, requests))

    def keep_busy(
        self, requests: Iterator[BenchRequest], num_streams: int, during: Coroutine[Any, Any, T]
    ) -> tuple[list[Timeline], T]:
        """So many requests at once, one after another, until `during` is over; see `client.keep_busy`.

        Raises:
            EngineFailed: the server ended, or its answer is not what was asked for.
        """
        return self._talk(client.keep_busy(self.url, self.model_name, requests, num_streams, during))

    def _talk(self, talk: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run(talk)
        except (client.ServerError, httpx.HTTPError) as error:
            raise self._failed(f"failed ({error or type(error).__name__})") from error

    def _command(self) -> list[str]:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        module = ["nanovllm", "serve"]
        extra: list[str] = []
        if self.settings.name == "vllm":
            module, extra = ["vllm.entrypoints.openai.api_server"], ["--enforce-eager"]
        address = ["--host", "127.0.0.1", "--port", str(port), "--model", str(self.settings.model)]
        flags = EngineConfig(**self.settings.engine_options()).words()
        return [self.settings.python, "-m", *module, *address, *extra, *flags]

    def _first_token(self) -> dict[str, str]:
        deadline = time.perf_counter() + START_SECONDS
        with httpx.Client(base_url=self.url, timeout=START_SECONDS) as http:
            while not self._is_healthy(http):
                if self.process.poll() is not None:
                    raise self._failed(f"server ended with status {self.process.returncode}")
                if time.perf_counter() > deadline:
                    raise self._failed(f"server did not start within {START_SECONDS:.0f} seconds")
                time.sleep(0.05)
            self.model_name = http.get("/v1/models").json()["data"][0]["id"]
            body = {"model": self.model_name, "prompt": [3, 4, 5, 6], "max_tokens": 1, "temperature": 0}
            answer = http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                raise self._failed(f"server answered {answer.text[:200]!r}")
            return {self.settings.name: http.get("/version").json()["version"]}

    @staticmethod
    def _is_healthy(http: httpx.Client) -> bool:
        try:
            return http.get("/health").status_code == 200
        except httpx.TransportError:  # not listening yet
            return False
