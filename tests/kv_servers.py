"""Servers of shared pools, on this machine's loopback only: Redis, and Mooncake's master."""

from __future__ import annotations

import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from tests.server_process import free_port, wait_until


def listens(port: int) -> bool:
    """Whether somebody does, on loopback."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@dataclass
class KVServer:
    """A server that can be killed and started again, on the same ports.

    Attributes:
        ports: the first is the one that clients ask.
    """

    command: list[str]
    ports: list[int]
    log: pathlib.Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        wait_until(
            lambda: process.poll() is not None or all(map(listens, self.ports)),
            60,
            f"{self.command[0]} answers",
        )
        assert process.poll() is None, self.log.read_text(errors="replace")

    def kill(self) -> None:
        """As a crash does it. It has no children."""
        for process in self.processes:
            process.kill()
            process.wait(30)
        self.processes.clear()


@contextmanager
def _running(server: KVServer) -> Iterator[KVServer]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def redis_server(folder: pathlib.Path, megabytes: int = 64) -> Iterator[KVServer]:
    """A Redis server that keeps nothing on disk. Skips the test, and says why, where there is
    none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server: `make servers` installs it, as root")
    pytest.importorskip("redis", reason="no Redis client: pip install 'nanovllm[redis]'")
    port = free_port()
    command = [
        program,
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    command += [
        "--dir",
        str(folder),
        "--maxmemory",
        f"{megabytes}mb",
        "--maxmemory-policy",
        "allkeys-lru",
    ]
    with _running(KVServer(command, [port], folder / "redis.log")) as server:
        yield server


@contextmanager
def mooncake_master(folder: pathlib.Path) -> Iterator[KVServer]:
    """Mooncake's master. Skips the test, and says why, where there is none."""
    try:
        import mooncake.store
    except ImportError as error:
        pytest.skip(
            f"no Mooncake ({error}): pip install 'nanovllm[mooncake]', and `make servers`, as root"
        )
    program = pathlib.Path(mooncake.store.__file__).parent / "mooncake_master"
    rpc, metrics = free_port(), free_port()
    # It listens on all interfaces unless it is told not to.
    command = [
        str(program),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc}",
        "--metrics_host=127.0.0.1",
    ]
    command += [f"--metrics_port={metrics}", "--default_kv_lease_ttl=500", f"--log_dir={folder}"]
    with _running(KVServer(command, [rpc, metrics], folder / "mooncake.log")) as server:
        yield server


def on_own_loopback(module: str, story: str, *arguments: str) -> None:
    """Run a function of a test module on a machine that has nothing but a loopback: a network
    namespace.

    For programs that listen on all interfaces whatever they are told. A skip inside is a skip here.
    """
    program = (
        f"import sys, pytest; from {module} import {story}\n"
        f"try: {story}(*sys.argv[1:])\n"
        "except pytest.skip.Exception as skip: print(skip.msg); sys.exit(77)"
    )
    space = ["unshare", "--map-root-user", "--net", "--kill-child", "--pid", "--fork"]
    inside = [
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        program,
        *arguments,
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*space, "true"], capture_output=True).returncode
    ):
        pytest.skip(
            "no network of one's own (a container needs CAP_SYS_ADMIN or user namespaces, and "
            "`unshare`)"
        )
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run([*space, *inside], cwd=root, capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
