"""Memory that processes of one machine share: segments, and a queue of messages in a segment.

Built by notebooks/20_executor.ipynb: edit it there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import psutil

import nanovllm.distributed
from nanovllm.ops.native_library import BuildError, load_library
from nanovllm.processes.channel import PeerLost


@dataclass(frozen=True)
class SegmentHandle:
    """What another process of this machine needs to map a segment."""

    path: str
    num_members: int
    num_bytes: int
    token: bytes  # random: on another machine the same path may be a different file


_LINE = 64  # bytes of a member's line at the beginning of a segment, as in shared_memory.cpp
_WORDS = _LINE // 4
# words of a line
_COUNT = 0
_PROCESS = 2
_LEFT = 3
_TOKEN = 32  # offset in the first line


def _open(handle: SegmentHandle) -> int:
    descriptor = os.open(handle.path, os.O_RDWR)
    if os.pread(descriptor, len(handle.token), _TOKEN) != handle.token:
        os.close(descriptor)
        raise OSError(f"{handle.path} is another file: the segment is on another machine, or gone")
    return descriptor


class Segment:
    """Memory mapped by several processes. Each is a member, and has a counter that the others can
    wait for.

    On Linux the memory has no name (`memfd_create`): the kernel frees it when the last process that
    maps it ends, however that happens. Elsewhere it is a temporary file of its creator.

    Args:
        handle: which segment.
        member: which of its members this process is.
        file: its open file, if this process has just made it.
        is_lazy: allocate each page when it is first touched; otherwise all pages now.

    Attributes:
        payload: offset of the data in bytes, after the members' lines.
        data: the whole segment, as bytes.

    Raises:
        OSError: its creator is gone or runs on another machine.
    """

    _is_mapped = False  # until all of `__init__` has succeeded

    def __init__(
        self,
        handle: SegmentHandle,
        member: int,
        file: IO[bytes] | None = None,
        is_lazy: bool = False,
    ) -> None:
        self.handle = handle
        self.member = member
        self._file = file or os.fdopen(_open(handle), "r+b", buffering=0)
        # All pages at once: otherwise each would cost a page fault in the middle of a message.
        flags = mmap.MAP_SHARED | (0 if is_lazy else getattr(mmap, "MAP_POPULATE", 0))
        self._map = mmap.mmap(self._file.fileno(), handle.num_bytes, flags)
        self._export = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._export)
        self.data = memoryview(self._map)
        self.payload = handle.num_members * _LINE
        self._words = self.data[: self.payload].cast("I")
        self._words[member * _WORDS + _PROCESS] = os.getpid()
        self._is_mapped = True

    @classmethod
    def create(cls, num_members: int, payload_bytes: int, is_lazy: bool = False) -> Segment:
        """Create a segment of zeros; its creator is member 0.

        Raises:
            OSError: there is not enough memory.
        """
        num_bytes = num_members * _LINE + payload_bytes
        token = os.urandom(16)
        file: IO[bytes]
        if hasattr(os, "memfd_create"):
            file = os.fdopen(os.memfd_create("nanovllm"), "r+b", buffering=0)
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile(prefix="nanovllm-", buffering=0)  # noqa: SIM115
            path = file.name
        os.ftruncate(file.fileno(), num_bytes)
        if hasattr(os, "posix_fallocate") and not is_lazy:
            # Without this, a lack of memory is a bus error later.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        os.pwrite(file.fileno(), token, _TOKEN)
        return cls(SegmentHandle(path, num_members, num_bytes, token), 0, file, is_lazy)

    def count(self, member: int) -> int:
        """A member's counter, modulo 2**32."""
        return self._words[member * _WORDS + _COUNT]

    def ahead(self, member: int) -> int:
        """Return how far a member's counter is ahead of this member's."""
        return (self.count(member) - self.count(self.member) + 2**31) % 2**32 - 2**31

    def why_lost(self, member: int) -> str:
        """Return why a member is gone: "it has left" if its word _LEFT is set (see `close`),
        "process 77 has died" if the process whose id is in its word _PROCESS does not exist any
        more or is a zombie. Empty while it is there, or has not joined yet (its word is 0). This
        very process is alive, of course."""
        if self._words[member * _WORDS + _LEFT]:
            return "it has left"
        process = self._words[member * _WORDS + _PROCESS]
        if process in (0, os.getpid()):
            return ""
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
                return ""
        return f"process {process} has died"

    def check(self, what: str, lost: str, deadline: float) -> None:
        """Raise an error if it is of no use to wait any longer for a member.

        Args:
            what: has not happened yet, for the message.
            lost: see `why_lost`.
            deadline: in seconds of `time.monotonic()`.

        Raises:
            PeerLost: the member is lost.
            TimeoutError: after the deadline.
        """
        if lost:
            raise PeerLost(f"{what}: {lost}")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} in time")

    def close(self) -> None:
        """Tell the others that this member has left. The last object that maps the memory frees
        it."""
        self._words[self.member * _WORDS + _LEFT] = 1
        self._file.close()

    def __del__(self) -> None:
        if self._is_mapped:
            self.close()


@cache
def load_shared_memory_library() -> ctypes.CDLL:
    """Return the functions of shared_memory.cpp.

    Raises:
        OSError: they cannot be compiled.
    """
    try:
        source = Path(nanovllm.distributed.__path__[0]) / "shared_memory.cpp"
        library = load_library(
            [source], flags=("-O3", "-march=native", "-std=c++17", "-fPIC"), what=source.name
        )
    except BuildError as error:
        raise OSError(f"the functions for shared memory are not compiled: {error}") from error
    place = ctypes.c_void_p
    size = ctypes.c_int64
    number = ctypes.c_int
    kind = ctypes.c_uint64
    flag = ctypes.c_bool
    ring = (place, size, size, number)
    library.put.argtypes = [*ring, ctypes.c_char_p, size, size]
    library.get.argtypes = [*ring, place, size, place]
    ring_and_buffers = (*ring, number, place, place)
    library.collective.argtypes = [*ring_and_buffers, size, size, number, kind, size, flag]
    library.put.restype = library.get.restype = library.collective.restype = size
    return library


class MessageQueue:
    """A ring in shared memory: one process writes, and every reader gets every message, in order.

    A message may be longer than the ring. When the ring is full, the writer waits for the slowest
    reader. A waiting process spins for some microseconds, then yields its core, then sleeps in the
    kernel.

    The writer calls `create`, each reader calls `attach`. One thread at a time may use an end. When
    an end is gone, the others can read what has been written; then they get `PeerLost`.

    Attributes:
        handle: with which readers attach; it can be pickled.
        segment: the shared memory; an end that closes it leaves.

    Raises:
        OSError: its functions are not compiled, or see `Segment`.
    """

    def __init__(self, segment: Segment) -> None:
        self._library = load_shared_memory_library()
        self.segment = segment
        self.handle = segment.handle
        self._num_readers = segment.handle.num_members - 1
        self._ring = (segment.address, segment.payload, len(segment.data) - segment.payload)
        self._buffer = ctypes.create_string_buffer(1 << 16)  # of a reader
        # A reader's message: its length (-1: unknown), and how many bytes of it are read.
        self._progress = (ctypes.c_int64 * 2)(-1, 0)

    @classmethod
    def create(cls, num_readers: int, num_bytes: int = 1 << 20) -> MessageQueue:
        """The writing end of a new queue.

        Args:
            num_bytes: of the ring; a power of two, and at least 16.
        """
        return cls(Segment.create(1 + num_readers, num_bytes))

    @classmethod
    def attach(cls, handle: SegmentHandle, reader_index: int) -> MessageQueue:
        """The reading end of a queue, in the process of a reader.

        Raises:
            OSError: the writer is gone or runs on another machine.
        """
        return cls(Segment(handle, 1 + reader_index))

    def put(self, data: bytes, timeout: float = 60.0) -> None:
        """Write a message; waits while the ring is full.

        Raises:
            TimeoutError: a reader has not made room in time. Nothing was written, unless the
                message is longer than half of the ring: then the queue cannot be used any more.
            PeerLost: a reader that has to make room has died or left.
        """
        message = len(data).to_bytes(8, "little") + data
        sent = 0
        deadline = time.monotonic() + timeout
        while (
            sent := self._library.put(*self._ring, self._num_readers, message, len(message), sent)
        ) < len(message):
            slowest = min(range(1, 1 + self._num_readers), key=self.segment.ahead)
            what = f"reader {slowest - 1} of {self._num_readers} has not made room in the queue"
            self.segment.check(what, self.segment.why_lost(slowest), deadline)

    def get(self, timeout: float = 60.0) -> bytes:
        """Wait for the next message.

        Raises:
            TimeoutError: none has arrived in time. A message that has arrived in part is not lost:
                call again.
            PeerLost: the writer has died or left, and all its messages have been read.
        """
        deadline = time.monotonic() + timeout
        lost = ""
        while True:
            reader = (self.segment.member, self._buffer, len(self._buffer), self._progress)
            size = self._library.get(*self._ring, *reader)
            if size >= 0:
                return ctypes.string_at(self._buffer, size)
            if self._progress[0] > len(self._buffer):
                self._buffer = ctypes.create_string_buffer(self._progress[0])
                continue
            self.segment.check("the writer has not sent a message", lost, deadline)
            lost = self.segment.why_lost(0)  # after its last message, so look once more
