"""Engines under measurement, each in processes of its own, started and ended here.

An engine is used in one of two ways: offline, through `worker.py`, or as a server, through HTTP.
Both have the same `run(workload, requests)`."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import psutil

from nanovllm.assembly.flags import words_of
from nanovllm.data.config import EngineConfig, parse_bytes
from nanovllm.data.errors import ServerError
from nanovllm.lab.bench import client
from nanovllm.lab.bench.machine import peak_memory, process_tree, usable_cores
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.lab.processes import free_port, python_environment

KINDS = ("offline", "server")
#: How each can be used. (`generate` of transformers is a function, and a client that watches needs
# a server.)
ENGINES = {
    "nanovllm": KINDS,
    "vllm": KINDS,
    "llamacpp": KINDS,
    "hf": KINDS[:1],
    "watched": KINDS[1:],
}
#: Those with environments of their own.
PEERS = {"vllm": "vLLM", "llamacpp": "llama-cpp-python, and llama-server (or it is on the PATH)"}
#: Requests at once in llama.cpp. llama-server computes neighbouring slots together, so it has as
# many as W4 has clients.
SLOTS = 32
SERVER_SLOTS = 8

START_SECONDS = 600.0
STOP_SECONDS = 10.0
# The options that vLLM has under the same names; it does not get the others.
_VLLM_OPTIONS = {
    "block_size",
    "dtype",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "load_format",
    "long_prefill_token_threshold",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "scheduling_policy",
    "seed",
    "speculative_config",
    "tokenizer",
}
# Parameters of llama.cpp's context, and llama-server's flags for them.
_LLAMA_FLAGS = dict(
    n_seq_max="-np", n_ctx="-c", n_batch="-b", n_ubatch="-ub", n_threads="-t", n_threads_batch="-tb"
)


class EngineFailed(ServerError):
    """An engine did not start, or ended while it was needed; the message says how, and where its
    log is."""


def end_of_log(path: pathlib.Path) -> str:
    """ ": " and the last line of a log; nothing if it is empty."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


@dataclass
class EngineSettings:
    """How to start an engine.

    Attributes:
        name: one of `ENGINES`.
        model: folder of the checkpoint; llama.cpp's GGUF file.
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
        if self.name == "llamacpp":
            slots = min(SLOTS, self.options.get("max_num_seqs", SLOTS))
            budget = self.options.get("max_num_batched_tokens", 2048)
            length = self.options["max_model_len"]
            sizes = (
                slots,
                slots * length,
                budget,
                min(budget, 512),
                self.num_threads,
                self.num_threads,
            )
            return dict(zip(_LLAMA_FLAGS, sizes, strict=True))
        return dict(self.options)

    @property
    def note(self) -> str:
        """How it runs requests, where the workload's title does not say so."""
        notes = {
            "hf": "requests are one batch, padded on the left",
            "watched": "nanovllm while a client reads its /trace",
        }
        served = f"served by llama-server with {SERVER_SLOTS}"
        notes["llamacpp"] = (
            f"{SLOTS} slots, which keep their last prompt, in batches for `llama_decode`; {served}"
        )
        return notes.get(self.name, "")

    def environment(self) -> dict[str, str]:
        """Its environment variables: as many threads as all the others, and nothing from the
        network."""
        found = python_environment() | {"HF_HUB_OFFLINE": "1"}
        found.pop("OMP_WAIT_POLICY", None)  # nanovllm sets it for itself; it would slow the others
        if self.name in PEERS:
            del found["PYTHONPATH"]
        if self.name != "vllm":
            return found | {"OMP_NUM_THREADS": str(self.num_threads)}
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
    """The faster allocator and the OpenMP runtime that vLLM's CPU build recommends, as far as they
    are installed."""
    folders = [
        pathlib.Path(python).parents[1] / "lib",
        *sorted(pathlib.Path("/usr/lib").glob("*-linux-gnu")),
    ]
    found = []
    for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        paths = (folder / name for folder in folders)
        found += [str(path) for path in paths if path.is_file()][:1]
    return found


def llama_server(python: str) -> str | None:
    """llama.cpp's own server, beside an interpreter or on the PATH."""
    return shutil.which("llama-server", path=f"{pathlib.Path(python).parent}:{os.environ['PATH']}")


@dataclass
class Started:
    """A start of an engine.

    Attributes:
        kind: "offline" or "server".
        seconds: from nothing to the first token of a first request.
        versions: of the packages it runs on.
        peak_bytes: the most resident memory of all its processes together, so far.
    """

    engine: str
    kind: str
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    peak_bytes: int = 0


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
        """Stop all its processes where they are: an engine that waits busily would slow the one
        that is measured."""
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
        return EngineFailed(
            f"{self.settings.name} {what}{end_of_log(self._log)} (log: {self._log})"
        )

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
        # A process that is still ending would disturb the next engine.
        psutil.wait_procs(tree, STOP_SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class OfflineEngine(EngineProcess):
    """An engine behind `worker.py`."""

    kind = "offline"
    answers_on_stdout = True
    part = ""

    def run(self, workload: Workload, requests: Sequence[BenchRequest]) -> list[Timeline]:
        timelines = [Timeline(0.0, [(t, n) for t, n in line]) for line in self.ask(requests)]
        for line, request in zip(timelines, requests, strict=True):
            if line.num_tokens != request.max_tokens:
                raise self._failed(f"gave {line.num_tokens} tokens instead of {request.max_tokens}")
        return timelines

    def ask(self, requests: Sequence[BenchRequest]) -> list[list[Any]]:
        """Run requests; the worker's timelines."""
        orders = [
            {"prompt_token_ids": r.prompt_token_ids, "max_tokens": r.max_tokens} for r in requests
        ]
        return self._exchange({"requests": orders})["timelines"]

    def _command(self) -> list[str]:
        return [self.settings.python, str(pathlib.Path(__file__).with_name("worker.py"))]

    def _first_token(self) -> dict[str, str]:
        settings = self.settings
        engine = settings.name + self.part
        options = settings.engine_options()
        return self._exchange({"engine": engine, "model": str(settings.model), "options": options})[
            "versions"
        ]

    def _exchange(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send the worker an order; its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and there will be no answer
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise self._failed(f"ended with status {self.process.wait()}")
        return json.loads(line)


class SchedulerAlone(OfflineEngine):
    """Only the scheduler of an engine."""

    part = " scheduler"


class Server(EngineProcess):
    """An engine behind its own OpenAI-compatible server."""

    kind = "server"

    def run(self, workload: Workload, requests: Sequence[BenchRequest]) -> list[Timeline]:
        talk = client.run_workload(self.url, self.fields, workload, requests)
        if self.settings.name == "watched":
            talk = client.watched(self.url, talk)
        try:
            return asyncio.run(talk)
        except (client.ServerError, httpx.HTTPError) as error:
            raise self._failed(f"failed ({error or type(error).__name__})") from error

    def _command(self) -> list[str]:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = self.settings
        options = self.settings.engine_options()
        address = ["--host", "127.0.0.1", "--port", str(port), "--model", str(settings.model)]
        if settings.name == "llamacpp":
            slots = min(SERVER_SLOTS, options["n_seq_max"])
            options |= {"n_seq_max": slots, "n_ctx": slots * settings.options["max_model_len"]}
            flags = [
                word for name, value in options.items() for word in (_LLAMA_FLAGS[name], str(value))
            ]
            return [str(llama_server(settings.python)), *address, *flags]
        module = ["nanovllm", "serve"]
        extra = list[str]()
        if settings.name == "vllm":
            module = ["vllm.entrypoints.openai.api_server"]
            extra = ["--enforce-eager"]
        return [
            settings.python,
            "-m",
            *module,
            *address,
            *extra,
            *words_of(EngineConfig(**options)),
        ]

    def _first_token(self) -> dict[str, str]:
        deadline = time.perf_counter() + START_SECONDS
        with httpx.Client(base_url=self.url, timeout=START_SECONDS) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):  # not listening yet
                    if http.get("/health").status_code == 200:
                        break
                if self.process.poll() is not None:
                    raise self._failed(f"server ended with status {self.process.returncode}")
                if time.perf_counter() > deadline:
                    raise self._failed(f"server did not start within {START_SECONDS:.0f} seconds")
                time.sleep(0.05)
            name = self.settings.name
            self.fields: dict[str, Any] = {"model": http.get("/v1/models").json()["data"][0]["id"]}
            # They count the tokens.
            self.fields |= {"timings_per_token": True} if name == "llamacpp" else {}
            body = self.fields | {"prompt": [3, 4, 5, 6], "max_tokens": 1, "temperature": 0}
            answer = http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                raise self._failed(f"server answered {answer.text[:200]!r}")
            page, field = (
                ("/props", "build_info") if name == "llamacpp" else ("/version", "version")
            )
            return {name: http.get(page).json()[field]}
