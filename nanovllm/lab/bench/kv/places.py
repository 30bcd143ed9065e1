"""The places beyond the pool that keep prefixes, with the servers that some of them need, on
loopback."""

import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from nanovllm.lab.bench.parts import Skip
from nanovllm.lab.processes import free_port

SERVER_SECONDS = 30.0
GIB = 1 << 30
HOST = "host memory"
HOST_AND_DISK = "host memory, then disk"
DISK = "folder on a disk"
SHARED_MEMORY = "folder in /dev/shm"
# Mooncake's client listens on all interfaces, so it runs in a network namespace that has only a
# loopback.
_ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
_MOONCAKE = pathlib.Path(__file__).with_name("mooncake.sh")


@dataclass
class Place:
    """Where one engine keeps blocks.

    Attributes:
        options: of the engine.
        is_one_store: whether the store that its options open can be measured without an engine.
        wrapper: a command that the engine's command is appended to.
        forget: drops the store's files from the operating system's memory.
    """

    name: str
    options: dict[str, Any]
    is_one_store: bool = True
    wrapper: tuple[str, ...] = ()
    forget: Callable[[], None] = lambda: None


@contextmanager
def places(
    entry_bytes: int, host_blocks: int, num_blocks: int
) -> Iterator[tuple[list[Place], dict[str, str]]]:
    """All places that this machine has; and those that it lacks, with the reason.

    Args:
        entry_bytes: of a block.
        host_blocks: blocks that fit into host memory.
        num_blocks: blocks that are put into every other place, which is twice as large.
    """
    gib = 2 * num_blocks * entry_bytes / GIB
    host_bytes = host_blocks * entry_bytes
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        disk, memory = (
            pathlib.Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="nanovllm-", dir=where))
            )
            for where in (None, "/dev/shm" if os.path.isdir("/dev/shm") else None)
        )

        folders = {DISK: disk / "disk", SHARED_MEMORY: memory / "pool"}

        def host(extra: dict[str, Any]) -> dict[str, Any]:
            config = {"kv_connector": "offloading", "kv_connector_extra_config": extra}
            # Half a block more, because sizes are rounded down.
            return {
                "kv_transfer_config": config,
                "kv_offloading_size": (host_bytes + entry_bytes // 2) / GIB,
            }

        found = [
            Place(HOST, host({})),
            Place(
                HOST_AND_DISK,
                host({"disk_path": str(disk / "tier"), "disk_gib": gib}),
                is_one_store=False,
            ),
            *(
                Place(name, _pool({"store": "folder", "path": str(path), "gib": gib}))
                for name, path in folders.items()
            ),
        ]
        found[2].forget = functools.partial(_drop_from_memory, folders[DISK])
        for name, start in (("redis", _redis), ("mooncake", _mooncake)):
            try:
                found.append(stack.enter_context(start(gib, disk)))
            except Skip as reason:
                missing[name] = str(reason)
        yield found, missing


def _drop_from_memory(path: pathlib.Path) -> None:
    """Let the operating system forget the files of a folder, so that they are read from the
    disk."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # a page that is not written yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _redis(gib: float, folder: pathlib.Path) -> Iterator[Place]:
    program = shutil.which("redis-server")
    if program is None or importlib.util.find_spec("redis") is None:
        raise Skip("there is no redis-server, or no client: pip install 'nanovllm[redis]'")
    import redis

    port = free_port()
    command = [
        program,
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    command += [
        "--maxmemory",
        str((64 << 20) + int(gib * GIB)),
        "--maxmemory-policy",
        "allkeys-lru",
    ]
    # It ends when its standard input is closed, which also happens if this process is killed.
    words = ["sh", "-c", '"$@" & read end; kill -9 $!; wait', "sh", *command]
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        patience = redis.retry.Retry(
            redis.backoff.ConstantBackoff(0.02), int(SERVER_SECONDS / 0.02)
        )
        redis.Redis(port=port, retry=patience).ping()
        yield Place("redis", _pool({"store": "redis", "url": f"redis://127.0.0.1:{port}/0"}))
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def _mooncake(gib: float, folder: pathlib.Path) -> Iterator[Place]:
    try:
        import mooncake.store
    except ImportError as error:
        raise Skip(f"there is no Mooncake: pip install 'nanovllm[mooncake]' ({error})") from error
    if (
        not all(map(shutil.which, ("unshare", "ip", "ss")))
        or subprocess.run([*_ALONE, "true"], capture_output=True).returncode
    ):
        raise Skip(
            "its client listens on all interfaces, and a separate network namespace is not "
            "available here"
        )
    master = pathlib.Path(mooncake.store.__file__).parent / "mooncake_master"
    segment = max(64 << 20, int(gib * GIB))
    extra = {"store": "mooncake", "global_segment_size": segment, "listen_on_all_interfaces": True}
    yield Place(
        "mooncake",
        _pool(extra),
        is_one_store=False,
        wrapper=(*_ALONE, "sh", str(_MOONCAKE), str(master), str(folder)),
    )


def _pool(extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "pool", "kv_connector_extra_config": extra}}
