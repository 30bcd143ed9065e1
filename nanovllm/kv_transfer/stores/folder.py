"""Keeps KV blocks in a folder that several engines share, that survives them, and that needs no server.

There is one file per block. It appears whole or not at all, since it is written under another name first; its checksum reveals
damage by a crash or a bad disk. A folder on a disk is a pool for this machine's engines, past and future; one on a network file
system whose locks work, for engines on several machines; one on /dev/shm is shared memory.

Built by notebooks/32_kv_sharing.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nanovllm.kv_transfer.stores.store import HEADER_BYTES, KEY_BYTES, KVStore, is_intact, seal

# A round of evictions looks at every file, so it makes room for many, down to this share of the bound.
LOW_WATER = 0.9

_TEMPORARY = ".tmp"
_numbers = itertools.count()


class FolderStore(KVStore):
    """Entries as files of a folder.

    A file's modification time says when its entry was last used, so that all processes know it and it survives them. The file
    `.size` holds the number of bytes of all files; a process locks it while it begins, finishes or removes a file.

    Args:
        path: the folder; made, for this user only, if it is not there.
        num_bytes: bound on all files together, half-written ones included.

    Raises:
        ValueError: the folder cannot be used, or other users could put blocks there; the message says why.
    """

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        super().__init__()
        self.path, self.num_bytes = Path(path).absolute(), num_bytes
        self._last_time = 0
        self._lock = threading.Lock()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
                raise ValueError(
                    f"other users may write to the folder {self.path}: name one that does not exist yet, or one of your own "
                    f"(chmod 700)"
                )
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._books = os.open(self.path / ".size", flags, 0o600)
            with self._alone():
                self._set_size(self._sweep(0))
        except OSError as error:
            raise ValueError(
                f"the folder {self.path} cannot keep KV blocks ({error.strerror}): name one that this user may write to"
            ) from error

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        try:
            count = next((i for i, key in enumerate(keys) if not self._file(key).exists()), len(keys))
            for key in reversed(keys[:count]):
                self._touch(key)
        except OSError as error:
            self._complain(f"{self.path} cannot be searched for KV blocks: {error.strerror}")
            return 0
        return count

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`. Entries that do not fit on the disk are not kept."""
        left = len(keys)
        try:
            for key, buffer in zip(reversed(keys), reversed(buffers), strict=True):
                if not self._touch(key):
                    self._write(key, buffer)
                left -= 1
        except OSError as error:
            self._count(failed=left)
            self._complain(f"a KV block could not be written to {self.path}: {error.strerror or error}")

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found = []
        for key, buffer in zip(reversed(keys), reversed(buffers), strict=True):
            try:
                found.append(self._read(key, buffer))
            except FileNotFoundError:
                found.append(False)
            except OSError as error:
                self._complain(f"a KV block could not be read from {self.path}: {error.strerror}")
                found.append(False)
        self._count_found(found)
        return found[::-1]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `KVStore.remove`."""
        for key in keys:
            self._discard(self._file(key))

    def close(self) -> None:
        """Close the folder; the entries stay."""
        os.close(self._books)

    # ---------------------------------------------------------------- one file

    def _file(self, key: bytes) -> Path:
        return self.path / key.hex()

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        file = os.open(self._file(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            header = bytearray(HEADER_BYTES)
            count = os.readv(file, [header, buffer, bytearray(1)])
            if count == HEADER_BYTES + len(buffer) and is_intact(header, key, buffer):
                os.utime(file, ns=self._now())
                return True
        finally:
            os.close(file)
        self._drop_damaged(key, str(self.path))
        return False

    def _write(self, key: bytes, buffer: memoryview) -> None:
        header, size = seal(key, buffer), HEADER_BYTES + len(buffer)
        file, temporary = self._begin(size)
        try:
            if os.writev(file, [header, buffer]) != size:
                raise OSError("the disk is full")
            os.utime(file, ns=self._now())
            # No fsync: after a power failure the file may be damaged, which is found when it is read.
            with self._alone():
                if not self._file(key).exists():  # else another process was faster
                    os.rename(temporary, self._file(key))
            self._count(stored=1)
        finally:
            self._discard(temporary)  # unless it has become the entry
            os.close(file)

    def _begin(self, size: int) -> tuple[int, Path]:
        """Make room for a file and begin it: it has its final length, and is locked as long as its writer lives."""
        with self._alone():
            total = self._size()
            if total + size > self.num_bytes:
                total = self._sweep(size)
                self._set_size(total)
                if total + size > self.num_bytes:
                    raise OSError(f"its {size} bytes do not fit into {self.num_bytes}")
            temporary = self.path / f"{os.getpid()}-{next(_numbers)}-{time.time_ns()}{_TEMPORARY}"
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.ftruncate(file, size)
            except OSError:
                os.close(file)
                temporary.unlink()
                raise
            self._set_size(total + size)
        return file, temporary

    def _touch(self, key: bytes) -> bool:
        """Mark an entry as used now. False if it is not there."""
        try:
            os.utime(self._file(key), ns=self._now())
        except FileNotFoundError:
            return False
        return True

    def _now(self) -> tuple[int, int]:
        """Access and modification time in ns, never the same twice, so that the times give the order of uses."""
        self._last_time = max(self._last_time + 1, time.time_ns())
        return self._last_time, self._last_time

    def _discard(self, file: Path) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError), self._alone():
            size = file.stat().st_size
            file.unlink()
            self._set_size(self._size() - size)

    # ---------------------------------------------------------------- all files

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes, and other threads of this one, from beginning, finishing or removing files."""
        with self._lock:
            fcntl.flock(self._books, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._books, fcntl.LOCK_UN)

    def _size(self) -> int:
        return int.from_bytes(os.pread(self._books, 8, 0), "little")

    def _set_size(self, size: int) -> None:
        os.pwrite(self._books, max(0, size).to_bytes(8, "little"), 0)

    def _sweep(self, room: int) -> int:
        """Count all bytes anew, remove unfinished files of dead processes, and, if there is no room for `room` more bytes, evict the
        least recently used entries; returns the bytes that are left."""
        total, entries = 0, []
        with os.scandir(self.path) as files:
            for file in files:
                if file.name.endswith(_TEMPORARY) and self._is_dead(file.path):
                    os.unlink(file.path)
                elif file.name.endswith(_TEMPORARY) or len(file.name) == 2 * KEY_BYTES:
                    status = file.stat(follow_symlinks=False)
                    total += status.st_size
                    entries.append((status.st_mtime_ns, status.st_size, file.path))
        goal = self.num_bytes - room
        if total > goal:
            goal = min(goal, int(LOW_WATER * self.num_bytes))
        for _, size, path in sorted(entries):
            if total <= goal:
                break
            if not path.endswith(_TEMPORARY):
                os.unlink(path)
                total -= size
                self._count(evicted=1)
        return total

    @staticmethod
    def _is_dead(path: str) -> bool:
        """Whether the writer of a temporary file has died, which has released its lock."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(file)
