"""The places beyond the pool in which prefixes are kept, with the servers that some of them need, on loopback."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from nanovllm.kv_transfer.stores.folder import FolderStore
from nanovllm.kv_transfer.stores.redis import RedisStore
from nanovllm.kv_transfer.stores.store import HostStore, KVStore

SERVER_SECONDS = 30.0
GIB = 1 << 30
HOST, HOST_AND_DISK = "host memory", "host memory, then disk"
DISK, SHARED_MEMORY = "folder on a disk", "folder in /dev/shm"
# Mooncake's client listens on all interfaces: it gets a network of its own, which has nothing but a loopback.
_ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
_MOONCAKE = """
ip link set lo up
"$0" --rpc_address=127.0.0.1 --rpc_port=50051 --metrics_host=127.0.0.1 --metrics_port=9003 --log_dir="$1" &
for _ in $(seq 300); do ss -ltn | grep -q 127.0.0.1:50051 && break; sleep 0.1; done
shift; exec "$@"
"""


@dataclass
class Place:
    """Where one engine keeps blocks.

    Attributes:
        options: of the engine.
        make_store: opens a store of the same kind, to measure it without an engine; None where that is not possible.
        wrapper: a command that the engine's is appended to.
        forget: lets the operating system forget what it has of it in memory.
    """

    name: str
    options: dict[str, Any]
    make_store: Callable[[], KVStore] | None = None
    wrapper: tuple[str, ...] = ()
    forget: Callable[[], None] = lambda: None


@dataclass
class Sizes:
    """How large the places are.

    Attributes:
        entry_bytes: of a block.
        host_blocks: in host memory.
        blocks: everywhere else.
    """

    entry_bytes: int
    host_blocks: int
    blocks: int

    @property
    def gib(self) -> float:
        """Of everywhere else, twice what is put there."""
        return 2 * self.blocks * self.entry_bytes / GIB


@contextmanager
def places(sizes: Sizes) -> Iterator[tuple[list[Place], dict[str, str]]]:
    """All that this machine has; and what it lacks, with the reason."""
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        folders = [
            pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nanovllm-", dir=where)))
            for where in (None, "/dev/shm" if os.path.isdir("/dev/shm") else None)
        ]
        found = [_host(sizes), _host(sizes, folders[0] / "tier"), _disk(sizes, folders[0] / "disk")]
        found.append(_folder(sizes, folders[1] / "pool"))
        for name, start in (("redis", _redis), ("mooncake", _mooncake)):
            place = stack.enter_context(start(sizes, folders[0]))
            if isinstance(place, Place):
                found.append(place)
            else:
                missing[name] = place
        yield found, missing


def _host(sizes: Sizes, disk: pathlib.Path | None = None) -> Place:
    size, entry = sizes.host_blocks * sizes.entry_bytes, sizes.entry_bytes
    extra = {"disk_path": str(disk), "disk_gib": sizes.gib} if disk is not None else {}
    options = {
        "kv_transfer_config": {"kv_connector": "offloading", "kv_connector_extra_config": extra},
        "kv_offloading_size": (size + entry // 2) / GIB,  # half a block more, since sizes are rounded down
    }
    return Place(HOST, options, lambda: HostStore(size, entry)) if disk is None else Place(HOST_AND_DISK, options)


def _disk(sizes: Sizes, path: pathlib.Path) -> Place:
    """A pool on a disk, which has to be read from there."""

    def forget() -> None:
        for file in path.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())  # what is not written yet is not forgotten
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    place = _folder(sizes, path)
    return dataclasses.replace(place, name=DISK, forget=forget)


def _folder(sizes: Sizes, path: pathlib.Path) -> Place:
    options = _pool({"store": "folder", "path": str(path), "gib": sizes.gib})
    return Place(SHARED_MEMORY, options, lambda: FolderStore(path, int(sizes.gib * GIB)))


@contextmanager
def _redis(sizes: Sizes, folder: pathlib.Path) -> Iterator[Place | str]:
    program = shutil.which("redis-server")
    if program is None or importlib.util.find_spec("redis") is None:
        yield "there is no redis-server, or no client: pip install 'nanovllm[redis]'"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    command += ["--maxmemory", str((64 << 20) + int(sizes.gib * GIB)), "--maxmemory-policy", "allkeys-lru"]
    # It ends with its standard input, which is closed however this process ends.
    words = ["sh", "-c", '"$@" & read end; kill -9 $!; wait', "sh", *command]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    try:
        _wait_until_it_listens(process, port)
        url = f"redis://127.0.0.1:{port}/0"
        yield Place("redis", _pool({"store": "redis", "url": url}), lambda: RedisStore(url))
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def _mooncake(sizes: Sizes, folder: pathlib.Path) -> Iterator[Place | str]:
    try:
        import mooncake.store
    except ImportError as error:
        yield f"there is no Mooncake: pip install 'nanovllm[mooncake]' ({error})"
        return
    if (
        not all(map(shutil.which, ("unshare", "ip", "ss")))
        or subprocess.run([*_ALONE, "true"], capture_output=True).returncode
    ):
        yield "its client listens on all interfaces, and a network of its own cannot be had here"
        return
    master = pathlib.Path(mooncake.store.__file__).parent / "mooncake_master"
    segment = max(64 << 20, int(sizes.gib * GIB))
    extra = {"store": "mooncake", "global_segment_size": segment, "listen_on_all_interfaces": True}
    yield Place("mooncake", _pool(extra), wrapper=(*_ALONE, "sh", "-c", _MOONCAKE, str(master), str(folder)))


def _pool(extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "pool", "kv_connector_extra_config": extra}}


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"redis-server does not answer on port {port}") from error
            time.sleep(0.02)
