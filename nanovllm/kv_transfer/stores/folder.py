"""Keeps KV blocks in a folder that several engines share, that survives them, and that needs no server.

There is one file per block. It appears whole or not at all, since it is written under another name first; its checksum reveals
damage by a crash or a bad disk. A folder on a disk is a pool for this machine's engines, past and future; one on a network file
system whose locks work, for engines on several machines; one on /dev/shm is shared memory.

Built by notebooks/32_kv_sharing.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

from nanovllm.kv_transfer.stores.store import HEADER_BYTES, KEY_BYTES, Pair, SealedStore, seal

# A round of evictions looks at every file, so it makes room for many, down to this share of the bound.
LOW_WATER = 0.9
# A process that keeps the folder's lock for longer has been stopped. Until it goes on, no other one writes.
LOCK_SECONDS = 5.0

_TEMPORARY = ".new.tmp"


def _open(path: Path, mode: str) -> IO[bytes]:
    """Open a file, which no other user may read. No link is followed."""
    return open(path, mode, buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))


def _size(books: int) -> int:
    return int.from_bytes(os.pread(books, 8, 0), "little")


def _set_size(books: int, size: int) -> None:
    os.pwrite(books, max(0, size).to_bytes(8, "little"), 0)


class FolderStore(SealedStore):
    """Entries as files of a folder.

    A file's modification time says when its entry was last used, so that all processes know it and it survives them. The file
    `.size` holds the number of bytes of all entries; a process locks it while it writes or removes a file.

    Args:
        path: the folder; made, for this user only, if it is not there.
        num_bytes: bound on all files together.

    Raises:
        ValueError: the folder cannot be used, or other users could put blocks there; the message says why.
    """

    batch = 1
    refusals = (OSError,)  # a full disk answers, too

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        super().__init__()
        self.path, self.num_bytes = Path(path).absolute(), num_bytes
        self.place = f"the folder {self.path}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
                raise PermissionError("other users may write to it")
            (self.path / ".size").touch(0o600)
            with self._alone() as books:
                self._sweep(books, 0)
        except OSError as error:
            raise ValueError(
                f"{self.place} cannot keep KV blocks ({error}): name one that does not exist yet, or that only this user may write to"
            ) from error

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        return SealedStore.contains(self, list(takewhile(lambda key: os.path.exists(self._file(key)), keys)))

    # ---------------------------------------------------------------- one file

    def _file(self, key: bytes) -> Path:
        return self.path / key.hex()

    def _find(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._touch(key) for key in keys]

    def _touch(self, key: bytes) -> bool:
        """Mark an entry as used now. False if it is not there."""
        try:
            os.utime(self._file(key), ns=self._now())
        except FileNotFoundError:
            return False
        return True

    def _now(self) -> tuple[int, int]:
        """Access and modification time in ns. (The kernel's own time stamps are too coarse to give the order of uses.)"""
        now = time.time_ns()
        return now, now

    def _fetch(self, pairs: Sequence[Pair]) -> list[bytes | None]:
        ((key, buffer),) = pairs
        header = bytearray(HEADER_BYTES)
        try:
            with _open(self._file(key), "rb") as file:
                # One byte more, to notice a file that is too long.
                size = os.readv(file.fileno(), [header, buffer, bytearray(1)])
                os.utime(file.fileno(), ns=self._now())
        except FileNotFoundError:
            return [None]
        return [bytes(header) if size == HEADER_BYTES + len(buffer) else b""]

    def _send(self, pairs: Sequence[Pair]) -> int:
        ((key, buffer),) = pairs
        header, size = seal(key, buffer), HEADER_BYTES + len(buffer)
        with self._alone() as books:
            if self._touch(key):  # another process was faster
                return 1
            total = _size(books)
            if total + size > self.num_bytes:
                total = self._sweep(books, size)
            if total + size > self.num_bytes:
                raise OSError(f"{size} bytes do not fit into {self.num_bytes}")
            self._write(self._file(key), [header, buffer], size)
            _set_size(books, total + size)
        return 1

    def _write(self, path: Path, parts: Sequence[bytes | memoryview], size: int) -> None:
        temporary = self.path / _TEMPORARY
        try:
            with _open(temporary, "wb") as file:
                if os.writev(file.fileno(), parts) != size:
                    raise OSError("the disk is full")
                os.utime(file.fileno(), ns=self._now())
            os.rename(temporary, path)  # no fsync: damage by a power failure is found when the entry is read
        finally:
            temporary.unlink(missing_ok=True)

    def _delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with suppress(FileNotFoundError), self._alone() as books:
                size = self._file(key).stat().st_size
                self._file(key).unlink()
                _set_size(books, _size(books) - size)

    # ---------------------------------------------------------------- all files

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Keep other processes, and other threads of this one, from writing or removing files. Yields the file of the size.

        Raises:
            TimeoutError: another process keeps the lock.
        """
        with _open(self.path / ".size", "r+b") as books:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(books, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError("another process does not release its lock")
                time.sleep(0.001)
            yield books.fileno()

    def _sweep(self, books: int, room: int) -> int:
        """Count all bytes anew, remove what dead processes have begun to write, and, if there is no room for `room` more bytes, evict
        the least recently used entries; returns the bytes that are left."""
        entries = []
        with os.scandir(self.path) as files:
            for file in files:
                if file.name.endswith(".tmp"):
                    os.unlink(file)
                elif len(file.name) == 2 * KEY_BYTES:
                    status = file.stat(follow_symlinks=False)
                    entries.append((status.st_mtime_ns, status.st_size, file.path))
        total, goal = sum(size for _, size, _ in entries), self.num_bytes - room
        if total > goal:
            goal = min(goal, int(LOW_WATER * self.num_bytes))
        for _, size, path in sorted(entries):
            if total <= goal:
                break
            os.unlink(path)
            total -= size
            self.stats.evicted += 1
        _set_size(books, total)
        return total
