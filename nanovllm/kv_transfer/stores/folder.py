"""Keeps KV blocks in a folder that several engines share, that survives them, and that needs no
server.

There is one file per block. It appears whole or not at all, since it is written under another name
first; its checksum reveals damage by a crash or a bad disk. A folder on a disk is a pool for this
machine's engines, past and future; one on a network file system whose locks work, for engines on
several machines; one on /dev/shm is shared memory."""

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

from filelock import FileLock

from nanovllm.kv_transfer.stores.sealed import HEADER_BYTES, KEY_BYTES, Pair, SealedStore, seal

# A round of evictions looks at every file, so it makes room for many, down to this share of the
# bound.
LOW_WATER = 0.9
# A process that keeps the folder's lock for longer has been stopped. Until it goes on, no other one
# writes.
LOCK_SECONDS = 5.0


def _open(path: Path, mode: str) -> IO[bytes]:
    """Open a file, which no other user may read. No link is followed."""
    return open(
        path,
        mode,
        buffering=0,
        opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600),
    )


def _touch(file: Path | int) -> bool:
    """Mark an entry as used now; False if it is not there. (The kernel's own time stamps are too
    coarse to give the order of uses.)"""
    try:
        os.utime(file, ns=(time.time_ns(),) * 2)
    except FileNotFoundError:
        return False
    return True


class FolderStore(SealedStore):
    """Entries as files of a folder.

    A file's modification time says when its entry was last used, so that all processes know it and
    it survives them. The file `.size` holds the number of bytes of all entries; a process holds the
    lock `.lock` while it writes or removes a file.

    Args:
        path: the folder; made, for this user only, if it is not there.
        num_bytes: bound on all files together.

    Raises:
        ValueError: the folder cannot be used, or other users could put blocks there; the message
            says why.
    """

    batch = 1
    refusals = (OSError,)  # a full disk answers, too

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        super().__init__()
        if num_bytes <= 0:
            raise ValueError("give the folder for KV blocks more than 0 GiB")
        self.path = Path(path).absolute()
        self.num_bytes = num_bytes
        self._total = 0  # bytes of all entries; see `_alone`
        self.place = f"the folder {self.path}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
                raise PermissionError("other users may write to it")
            (self.path / ".size").touch(0o600)
            with self._alone():
                self._sweep(0)
        except OSError as error:
            mistake = (
                f"{self.place} cannot store KV blocks ({error}): name a folder that does not "
                "exist yet"
            )
            raise ValueError(f"{mistake}, or one that only this user may write to") from error

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        return SealedStore.contains(
            self, list(takewhile(lambda key: os.path.exists(self._file(key)), keys))
        )

    # ---------------------------------------------------------------- one file

    def _file(self, key: bytes) -> Path:
        return self.path / key.hex()

    def _find(self, keys: Sequence[bytes]) -> list[bool]:
        return [_touch(self._file(key)) for key in keys]

    def _fetch(self, pairs: Sequence[Pair]) -> list[bytes | None]:
        ((key, buffer),) = pairs
        header = bytearray(HEADER_BYTES)
        try:
            with _open(self._file(key), "rb") as file:
                # One byte more, to notice a file that is too long.
                size = os.readv(file.fileno(), [header, buffer, bytearray(1)])
                _touch(file.fileno())
        except FileNotFoundError:
            return [None]
        return [bytes(header) if size == HEADER_BYTES + len(buffer) else b""]

    def _send(self, pairs: Sequence[Pair]) -> int:
        ((key, buffer),) = pairs
        header = seal(key, buffer)
        size = HEADER_BYTES + len(buffer)
        temporary = self.path / ".new.tmp"
        with self._alone():
            if _touch(self._file(key)):  # another process was faster
                return 1
            if self._total + size > self.num_bytes:
                self._sweep(size)
            if self._total + size > self.num_bytes:
                raise OSError(f"{size} bytes do not fit in {self.num_bytes}")
            with _open(temporary, "wb") as file:
                if os.writev(file.fileno(), [header, buffer]) != size:
                    raise OSError("the disk is full")
                _touch(file.fileno())
            # No fsync: damage by a power failure is found when the entry is read.
            os.rename(temporary, self._file(key))
            self._total += size
        return 1

    def _delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with suppress(FileNotFoundError), self._alone():
                self._total -= self._file(key).stat().st_size
                self._file(key).unlink()

    # ---------------------------------------------------------------- all files

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes, and other threads of this one, from writing or removing files.
        Meanwhile, `_total` is right.

        Raises:
            TimeoutError: another process keeps the lock.
        """
        lock = FileLock(self.path / ".lock", LOCK_SECONDS, mode=0o600, poll_interval=0.001)
        with lock, _open(self.path / ".size", "r+b") as books:
            self._total = int.from_bytes(os.pread(books.fileno(), 8, 0), "little")
            try:
                yield
            finally:
                os.pwrite(books.fileno(), max(0, self._total).to_bytes(8, "little"), 0)

    def _sweep(self, room: int) -> None:
        """Count all bytes anew, remove what dead processes have begun to write, and, if there is no
        room for `room` more bytes, evict the least recently used entries."""
        entries = []
        with os.scandir(self.path) as files:
            for file in files:
                if file.name.endswith(".tmp"):
                    os.unlink(file)
                elif len(file.name) == 2 * KEY_BYTES:
                    status = file.stat(follow_symlinks=False)
                    entries.append((status.st_mtime_ns, status.st_size, file.path))
        self._total = sum(size for _, size, _ in entries)
        goal = self.num_bytes - room
        if self._total > goal:
            goal = min(goal, int(LOW_WATER * self.num_bytes))
        for _, size, path in sorted(entries):
            if self._total <= goal:
                break
            os.unlink(path)
            self._total -= size
            self.stats.evicted += 1
