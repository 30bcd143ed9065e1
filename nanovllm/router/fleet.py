"""`nanovllm serve --prefill N --decode M`: servers of both roles, each in a process of its own, and
a router in front of them.

A server that dies is started again, on its old port. One that is stopped or hangs is killed first.
All of them end with this process, however it ends: each watches the pipe that is its standard
input."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import pathlib
import re
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from nanovllm.assembly.flags import read_flags, words_of
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import ServerError, UsageError
from nanovllm.processes.start import is_stopped, kill_tree
from nanovllm.router.backends import Role
from nanovllm.router.config import RouterConfig
from nanovllm.router.run import RouterServer, backends_of
from nanovllm.server.access import Access
from nanovllm.server.signalled import say

KVRole = Literal["kv_producer", "kv_consumer"]

logger = logging.getLogger("nanovllm.router")

READY = re.compile(r"(http://\S+)/v1, described")
# Lines of a server's output to hide: the router's own requests, and hints for clients, which use
# the router's address instead.
ROUTINE = re.compile(
    '"GET /(health|kv_transfer|metrics) HTTP|^Chat with it|^Or try:|^  curl |^    -d '
)
# Pauses in seconds before the attempts to start a dead server again. If all of them fail, the whole
# fleet ends.
RESTART_PAUSES = (0.0, 1.0, 4.0)
# Seconds. The interval is short because servers on this machine restart fast.
MAX_HEALTH_CHECK_INTERVAL = 1.0
# Consecutive health checks without an answer after which a server counts as hanging.
MAX_SILENT_CHECKS = 12
# Seconds for a server to shut down, in addition to the time for running requests.
END_SECONDS = 10.0
# The longest line of a server's output, in bytes.
LONGEST_LINE = 2**24
ROLES: tuple[Role, ...] = "prefill", "decode"
# Has an entry for each NVIDIA GPU.
GPU_FOLDER = pathlib.Path("/proc/driver/nvidia/gpus")


class ServerProcess:
    """`nanovllm serve` in a process of its own.

    Args:
        role: "prefill" or "decode".
        name: such as "prefill 0", for its output.
        words: its command line, without the port.
        environment: its environment.

    Attributes:
        url: its address; "" before it has served for the first time.
    """

    process: asyncio.subprocess.Process | None = None

    def __init__(
        self, role: Role, name: str, words: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.role = role
        self.name = name
        self.words = words
        self.environment = environment
        self.url = ""

    async def start(self) -> None:
        """Start the server, and wait until it serves.

        Raises:
            UsageError, ServerError: it cannot serve.
        """
        port = self.url.rpartition(":")[2] or "0"
        # A new session, so that Ctrl-C in the terminal reaches only this process.
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "nanovllm",
            "serve",
            *self.words,
            "--port",
            port,
            "--exit-with-stdin",
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            limit=LONGEST_LINE,
            env=self.environment,
            start_new_session=True,
        )
        ready = asyncio.Event()
        self._relay = asyncio.create_task(self._relay_output(self.process, ready))
        await ready.wait()
        if (code := self.process.returncode) is not None:
            kind = UsageError if code == 2 else ServerError
            raise kind(f"{self.name} exited with code {code} before it could serve; see above")

    async def _relay_output(
        self, process: asyncio.subprocess.Process, ready: asyncio.Event
    ) -> None:
        """Show the server's output, and take its address from it, until the process has ended."""
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            if found := READY.search(text):
                self.url = found[1]
                text = "is ready"  # without its address: clients use the router's
            if text and not ROUTINE.search(text):
                say(f"[{self.name}] {text}")
            if found:
                ready.set()
        await process.wait()
        ready.set()

    async def keep_alive(self) -> None:
        """Restart the server whenever it dies.

        Raises:
            ServerError: it cannot serve any more.
        """
        assert self.process is not None
        while code := await self.process.wait():
            logger.warning("[%s] exited with code %d: restarting it", self.name, code)
            for pause in RESTART_PAUSES:
                await asyncio.sleep(pause)
                with contextlib.suppress(UsageError, ServerError):
                    await self.start()
                    break
            else:
                raise ServerError(f"{self.name} exits after every start; see above")
        logger.warning("[%s] is being stopped", self.name)
        await asyncio.Event().wait()  # never returns, so that the other servers keep running

    def end_silent(self, num_checks: int) -> None:
        """Kill the server, so that it restarts, if its process was stopped, or if it has not
        answered `MAX_SILENT_CHECKS` health checks."""
        assert self.process is not None
        if is_stopped(self.process.pid) or num_checks >= MAX_SILENT_CHECKS:
            logger.warning("[%s] is stopped or hangs: killing it", self.name)
            self.kill()

    def kill(self) -> None:
        """Kill the server and its engine."""
        if self.process is not None and self.process.returncode is None:
            kill_tree(self.process.pid)

    async def stop(self, seconds: float) -> None:
        """End the server with a signal, and kill it after `seconds`, or immediately if its process
        is stopped: it cannot handle the signal."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(0 if is_stopped(self.process.pid) else seconds):
                await self.process.wait()
        except TimeoutError:
            logger.warning("[%s] does not exit: killing it", self.name)
            self.kill()
            await self.process.wait()
        # The server's children may still hold the pipe open.
        await asyncio.wait([self._relay], timeout=1)


def run_fleet(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    if not (arguments.prefill and arguments.decode):
        raise UsageError(
            "--prefill and --decode must be used together, with at least one server each"
        )
    if config.kv_role != "none":
        raise UsageError("--kv-role is set by --prefill and --decode: do not set it")
    if config.trace is not None:
        raise UsageError(
            "--trace records one engine: do not set it, or start each server and the router "
            "yourself"
        )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    listener, access = read_flags(Access, arguments).listen(arguments.api_key)
    # Once for all servers, where the progress can be seen.
    resolve_model(config.model, config.revision)
    # Until the router handles signals.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    asyncio.run(_run(config, arguments, listener, access))
    return 0


async def _run(
    config: EngineConfig, arguments: argparse.Namespace, listener: socket.socket, access: Access
) -> None:
    """Start all servers, route requests to them until a signal arrives or one of them cannot serve,
    and end them."""
    routing = read_flags(RouterConfig, arguments)
    routing.health_check_interval = min(routing.health_check_interval, MAX_HEALTH_CHECK_INTERVAL)
    fleet = processes(config, arguments)

    def kill() -> None:
        for process in fleet:
            process.kill()

    try:
        await asyncio.gather(*(process.start() for process in fleet))
        urls = {role: [each.url for each in fleet if each.role == role] for role in ROLES}
        backends = backends_of(urls, routing, next(iter(access.api_keys), None))
        for process, backend in zip(fleet, backends, strict=True):
            backend.name = process.name
            backend.on_silence = process.end_silent
        name = config.model_names[0]
        router = RouterServer(backends, listener, access, name, arguments.metrics_prefix)
        await router.route(*(process.keep_alive() for process in fleet))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A second signal does not wait.
            asyncio.get_running_loop().add_signal_handler(number, kill)
        await asyncio.gather(
            *(process.stop(access.shutdown_timeout + END_SECONDS) for process in fleet)
        )


def processes(config: EngineConfig, arguments: argparse.Namespace) -> list[ServerProcess]:
    """Return the servers for a command line. They differ in their roles and GPUs only."""
    names = [(role, f"{role} {i}") for role in ROLES for i in range(getattr(arguments, role))]
    gpus, shares = divide_gpus(
        visible_gpus(config), len(names), config.world_size * config.data_parallel_size
    )
    words = [
        "--host",
        "127.0.0.1",
        "--shutdown-timeout",
        str(arguments.shutdown_timeout),
        *(["--show-text"] * arguments.show_text),
        *(["--strict"] * arguments.strict),
        "--metrics-prefix",
        arguments.metrics_prefix,
    ]
    common = {"NANOVLLM_KV_SECRET": secrets.token_hex(32)} | os.environ
    if arguments.api_key:  # not on the command line, where `ps` shows it
        common["NANOVLLM_API_KEY"] = ",".join(arguments.api_key)
    found = []
    for i, (role, name) in enumerate(names):
        kv_role: KVRole = "kv_producer" if role == "prefill" else "kv_consumer"
        settings = server_config(config, kv_role, arguments.kv_load_failure_policy, shares)
        environment = common | ({"CUDA_VISIBLE_DEVICES": gpus[i]} if gpus else {})
        found.append(ServerProcess(role, name, [*words, *words_of(settings)], environment))
    return found


def server_config(
    config: EngineConfig, kv_role: KVRole, kv_load_failure_policy: str, shares: int = 1
) -> EngineConfig:
    """Return the settings of one server.

    Args:
        kv_load_failure_policy: its connector's policy for KV that does not arrive.
        shares: number of engines that share one GPU's memory.
    """
    transfer = {"kv_load_failure_policy": kv_load_failure_policy} | json.loads(
        config.kv_transfer_config or "{}"
    )
    memory = config.gpu_memory_utilization / shares
    return replace(
        config,
        kv_role=kv_role,
        kv_transfer_config=json.dumps(transfer),
        gpu_memory_utilization=memory,
    )


def visible_gpus(config: EngineConfig) -> list[str]:
    """Return the GPUs that CUDA would see, without loading CUDA."""
    if not config.may_use_gpu:
        return []
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in given.split(",") if gpu]
    return [str(i) for i in range(len(list(GPU_FOLDER.iterdir())))] if GPU_FOLDER.is_dir() else []


def divide_gpus(gpus: Sequence[str], num_servers: int, size: int) -> tuple[list[str], int]:
    """Divide GPUs among servers that need `size` each.

    Returns:
        CUDA_VISIBLE_DEVICES of each server, and 1; or, if there are not enough GPUs, [] and how
        many servers share all of them.
    """
    if not gpus:
        return [], 1
    if len(gpus) < num_servers * size:
        return [], num_servers
    return [",".join(gpus[i * size : (i + 1) * size]) for i in range(num_servers)], 1
