"""Memory that processes of one machine share: segments, and a queue of messages in a segment.

Built by notebooks/21_process_groups.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nanovllm.distributed
from nanovllm.ops.native_library import BuildError, load_library

logger = logging.getLogger(__name__)


class PeerLost(ConnectionError):
    """The process at the other end has died or left; the message says which."""


@cache
def load_shared_memory_library() -> ctypes.CDLL | None:
    """The functions of shared_memory.cpp; None, with the reason in the log, if they cannot be compiled."""
    if os.environ.get("NANOVLLM_NATIVE") == "0":
        return None
    try:
        source = Path(nanovllm.distributed.__path__[0]) / "shared_memory.cpp"
        library = load_library([source], flags=("-O3", "-march=native", "-std=c++17", "-fPIC"), what=source.name)
    except BuildError as error:
        logger.warning("shared memory is polled, and summed by gloo: %s", error)
        return None
    library.wait_for.argtypes = library.count_to.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    library.wait_for.restype = ctypes.c_bool
    library.count_to.restype = library.leave.restype = None
    library.leave.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.put_short.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5, ctypes.c_char_p, ctypes.c_int64]
    library.get_short.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5, ctypes.c_void_p]
    library.put_short.restype, library.get_short.restype = ctypes.c_bool, ctypes.c_int64
    return library


@dataclass(frozen=True)
class SegmentHandle:
    """What another process of this machine needs to map a segment."""

    path: str
    num_members: int
    num_bytes: int
    token: bytes  # random: on another machine the same path may be a different file


_LINE = 64  # bytes of a member's line at the beginning of a segment, as in shared_memory.cpp
_WORDS = _LINE // 4
_COUNT, _PROCESS, _LEFT = 0, 2, 3  # words of a line
_TOKEN = 32  # offset in the first line
_MODULUS = 2**32
_fence = threading.Lock()


def _open(handle: SegmentHandle) -> int:
    descriptor = os.open(handle.path, os.O_RDWR)
    if os.pread(descriptor, len(handle.token), _TOKEN) != handle.token:
        os.close(descriptor)
        raise OSError(f"{handle.path} is another file: the segment is on another machine, or gone")
    return descriptor


def _unlink(path: str) -> None:
    if not path.startswith("/proc/"):
        Path(path).unlink(missing_ok=True)


def _lock(descriptor: int, member: int, kind: int = fcntl.F_WRLCK) -> None:
    """Lock a member's byte of the file, or unlock it (F_UNLCK).

    On Linux the lock belongs to this open file; elsewhere to the process, which loses it when it closes any descriptor of the file.

    Raises:
        OSError: another process holds the lock.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, member, 1, 0)  # struct flock of 64-bit Linux
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    else:
        command = fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB
        fcntl.lockf(descriptor, command, 1, member)


class Segment:
    """Memory mapped by several processes. Each is a member, and has a counter that the others can wait for.

    On Linux the memory has no name (`memfd_create`): the kernel frees it when the last process that maps it ends, however that
    happens. Elsewhere it is a temporary file, which loses its name once all members have mapped it.

    Args:
        handle: which segment.
        member: which of its members this process is.
        descriptor: its open file, if this process has just made it.
        is_lazy: allocate each page when it is first touched; otherwise all pages now.

    Attributes:
        payload: offset of the data in bytes, after the members' lines.
        data: the whole segment, as bytes.

    Raises:
        OSError: its creator is gone or runs on another machine, or another process is this member.
    """

    def __init__(
        self, handle: SegmentHandle, member: int, descriptor: int | None = None, is_lazy: bool = False
    ) -> None:
        if not 0 <= member < handle.num_members:
            raise ValueError(f"member {member} of a segment that has {handle.num_members}")
        self.handle, self.member = handle, member
        self._descriptor = _open(handle) if descriptor is None else descriptor
        # All pages at once: otherwise each would cost a page fault in the middle of a message.
        flags = mmap.MAP_SHARED | (0 if is_lazy else getattr(mmap, "MAP_POPULATE", 0))
        try:
            # The kernel releases this lock when the process dies, which shows the others that it has died.
            _lock(self._descriptor, member)
            self._map = mmap.mmap(self._descriptor, handle.num_bytes, flags)
        except OSError as error:
            os.close(self._descriptor)
            taken = isinstance(error, BlockingIOError | PermissionError)
            raise OSError(f"another process is member {member} of the segment" if taken else str(error)) from error
        self._library = load_shared_memory_library()
        self._export = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._export)
        self.data = memoryview(self._map)
        self.payload = handle.num_members * _LINE
        self._words = self.data[: self.payload].cast("I")
        self._words[member * _WORDS + _PROCESS] = os.getpid()

    @classmethod
    def create(cls, num_members: int, payload_bytes: int, member: int = 0, is_lazy: bool = False) -> Segment:
        """A new segment of zeros.

        Raises:
            OSError: there is not enough memory.
        """
        num_bytes, token = num_members * _LINE + payload_bytes, os.urandom(16)
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("nanovllm")
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            descriptor, path = tempfile.mkstemp(prefix="nanovllm-")
        try:
            os.ftruncate(descriptor, num_bytes)
            if hasattr(os, "posix_fallocate") and not is_lazy:  # without this, a lack of memory is a bus error later
                os.posix_fallocate(descriptor, 0, num_bytes)
            os.pwrite(descriptor, token, _TOKEN)
        except OSError:
            os.close(descriptor)
            _unlink(path)
            raise
        return cls(SegmentHandle(path, num_members, num_bytes, token), member, descriptor, is_lazy)

    def count(self, member: int) -> int:
        """A member's counter, modulo 2**32."""
        value = self._words[member * _WORDS + _COUNT]
        with _fence:  # a memory barrier: read the data after the counter
            return value

    def count_to(self, count: int) -> None:
        """Set this member's counter, and wake the processes that wait for it."""
        if self._library:
            self._library.count_to(self.address, self.member, count % _MODULUS)
            return
        with _fence:
            self._words[self.member * _WORDS + _COUNT] = count % _MODULUS

    def reached(self, member: int, target: int) -> bool:
        """Whether a member's counter has reached `target`; it may be ahead by less than 2**31."""
        return (self.count(member) - target) % _MODULUS < _MODULUS // 2

    def _wait_briefly(self, member: int, target: int) -> bool:
        if self._words[self.member * _WORDS + _LEFT]:
            raise ValueError("closed")
        if self._library:
            return self._library.wait_for(self.address, member, target % _MODULUS)
        for attempt in range(40):
            if self.reached(member, target):
                return True
            time.sleep(0 if attempt < 20 else 0.001)
        return False

    def wait_for(self, member: int, target: int, deadline: float, describe: Callable[[], str]) -> None:
        """Wait until a member's counter has reached `target`: spin, then yield the core, then sleep.

        Args:
            deadline: in seconds of `time.monotonic()`.
            describe: what has not happened, for an error message.

        Raises:
            TimeoutError: the counter has not reached it in time.
            PeerLost: the member is gone.
        """
        while not self._wait_briefly(member, target):
            if (lost := self.why_lost(member)) and not self.reached(member, target):
                raise PeerLost(f"{describe()}: {lost}")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{describe()} in time")

    def joined(self, member: int) -> bool:
        """Whether a member has ever mapped the segment."""
        return self._words[member * _WORDS + _PROCESS] != 0

    def why_lost(self, member: int) -> str:
        """Why a member is gone; empty while it is there or has not joined yet."""
        if self._words[member * _WORDS + _LEFT]:
            return "it has left"
        process = self._words[member * _WORDS + _PROCESS]
        if process in (0, os.getpid()):
            return ""
        try:
            _lock(self._descriptor, member)
        except OSError:
            return ""  # it holds its lock
        _lock(self._descriptor, member, fcntl.F_UNLCK)
        return f"process {process} has died"

    def wait_until_joined(self, timeout: float) -> list[int]:
        """Wait until all members have joined, and remove the segment's name. Returns the members that have not joined in time."""
        deadline = time.monotonic() + timeout
        while missing := [m for m in range(self.handle.num_members) if not self.joined(m)]:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        _unlink(self.handle.path)
        return missing

    def close(self) -> None:
        """Tell the others that this member has left. The last object that maps the memory frees it."""
        if self._words[self.member * _WORDS + _LEFT]:
            return
        self._words[self.member * _WORDS + _LEFT] = 1
        if self._library:
            self._library.leave(self.address, self.member)
        os.close(self._descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_words"):
            self.close()


@dataclass(frozen=True)
class QueueHandle:
    """What a reader in another process needs to attach to a queue; it can be pickled."""

    segment: SegmentHandle
    slot_bytes: int
    num_slots: int


_LENGTH = 8  # bytes before each message, which hold its length


class MessageQueue:
    """A ring of slots in shared memory: one process writes, and every reader gets every message, in order.

    A message that is longer than a slot takes several slots, and may be longer than the ring. When the ring is full, the writer
    waits for the slowest reader. A waiting process spins for some microseconds, then yields its core, then sleeps in the kernel.

    The writer calls `create`, each reader calls `attach`. One thread at a time may use an end.
    """

    def __init__(self, segment: Segment, slot_bytes: int, num_slots: int) -> None:
        self._segment = segment
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self.num_readers = segment.handle.num_members - 1
        self.handle = QueueHandle(segment.handle, slot_bytes, num_slots)
        self._ring = segment.data[segment.payload :]
        self._ring_bytes = slot_bytes * num_slots
        # A long message moves in batches of slots, so that writer and readers work at the same time.
        self._batch = max(1, num_slots // 2)
        self._count = 0  # slots that this end has written or read
        self._parts: list[bytes] = []  # of a message that is not complete yet
        self._missing = 0
        self._broken = ""
        self._library = segment._library
        self._place = (segment.address, segment.payload, slot_bytes, num_slots)
        self._slot = ctypes.create_string_buffer(slot_bytes * bool(segment.member))  # of a reader

    @classmethod
    def create(cls, num_readers: int, slot_bytes: int = 1 << 16, num_slots: int = 16) -> MessageQueue:
        """The writing end of a new queue.

        Args:
            slot_bytes: more than 8; most messages, with 8 bytes for their length, should fit.
        """
        if num_readers < 1 or num_slots < 1 or slot_bytes <= _LENGTH:
            raise ValueError(
                f"a queue needs a reader, a slot and more than {_LENGTH} bytes a slot, not {num_readers} readers and "
                f"{num_slots} slots of {slot_bytes} bytes"
            )
        return cls(Segment.create(1 + num_readers, slot_bytes * num_slots), slot_bytes, num_slots)

    @classmethod
    def attach(cls, handle: QueueHandle, reader_index: int) -> MessageQueue:
        """The reading end of a queue, in the process of a reader.

        Raises:
            OSError: the writer is gone or runs on another machine.
        """
        return cls(Segment(handle.segment, 1 + reader_index), handle.slot_bytes, handle.num_slots)

    def wait_until_attached(self, timeout: float) -> None:
        """Wait until every reader has attached.

        Raises:
            TimeoutError: the message names the readers that have not.
        """
        if missing := self._segment.wait_until_joined(timeout):
            names = ", ".join(f"reader {member - 1}" for member in missing)
            raise TimeoutError(f"{names} of {self.num_readers} not attached after {timeout:g} s")

    def put(self, data: bytes | bytearray | memoryview, timeout: float = 60.0) -> None:
        """Write a message; waits while the ring is full.

        Raises:
            TimeoutError: a reader has not made room in time. Nothing was written, unless the message is longer than the ring.
            PeerLost: a reader that has to make room has died or left.
        """
        self._check(writer=True)
        if self._put_short(data):
            return
        deadline = time.monotonic() + timeout
        data = memoryview(data).cast("B")
        slots_left = -(-(_LENGTH + len(data)) // self.slot_bytes)
        self._wait_for_room(min(slots_left, self.num_slots), deadline)
        position = self._count * self.slot_bytes
        self._write(position, len(data).to_bytes(_LENGTH, "little"))
        position += _LENGTH
        begun = False
        while slots_left:
            batch = min(slots_left, self._batch)
            if begun:
                self._wait_for_room(batch, deadline, begun)
            size = min((self._count + batch) * self.slot_bytes - position, len(data))
            self._write(position, data[:size])
            position, data, begun = position + size, data[size:], True
            slots_left -= batch
            self._count += batch
            self._segment.count_to(self._count)

    def _write(self, position: int, data: bytes | memoryview) -> None:
        """Copy bytes to a position in the endless sequence of slots; they may wrap around the end of the ring."""
        place = position % self._ring_bytes
        fitting = min(len(data), self._ring_bytes - place)
        self._ring[place : place + fitting] = data[:fitting]
        self._ring[: len(data) - fitting] = data[fitting:]

    def _read(self, position: int, size: int) -> bytes:
        place = position % self._ring_bytes
        fitting = min(size, self._ring_bytes - place)
        part = bytes(self._ring[place : place + fitting])
        return part + bytes(self._ring[: size - fitting]) if fitting < size else part

    def _wait_for_room(self, slots: int, deadline: float, begun: bool = False) -> None:
        """Wait until every reader has read the old content of the next slots."""
        for reader in range(1, 1 + self.num_readers):

            def describe(reader: int = reader) -> str:
                return f"reader {reader - 1} of {self.num_readers} has not made room in the queue"

            try:
                self._segment.wait_for(reader, self._count + slots - self.num_slots, deadline, describe)
            except Exception as error:
                if begun:
                    self._broken = f"a message was written only in part ({error})"
                raise

    def get(self, timeout: float = 60.0) -> bytes:
        """Wait for the next message.

        Raises:
            TimeoutError: none has arrived in time. A message that has arrived in part is not lost: call again.
            PeerLost: the writer has died or left, and all its messages have been read.
        """
        self._check(writer=False)
        if (message := self._get_short()) is not None:
            return message
        deadline = time.monotonic() + timeout
        while True:
            self._segment.wait_for(0, self._count + 1, deadline, lambda: "the writer has not sent a message")
            position = self._count * self.slot_bytes
            if not self._parts:
                self._missing = int.from_bytes(self._read(position, _LENGTH), "little")
                position += _LENGTH
            arrived = (self._segment.count(0) - self._count) % _MODULUS
            slots = min(arrived, -(-(position % self.slot_bytes + self._missing) // self.slot_bytes) or 1, self._batch)
            part = self._read(position, min((self._count + slots) * self.slot_bytes - position, self._missing))
            self._count += slots
            self._segment.count_to(self._count)
            self._parts.append(part)
            self._missing -= len(part)
            if not self._missing:
                message = part if len(self._parts) == 1 else b"".join(self._parts)
                self._parts = []
                return message

    def _put_short(self, data: bytes | bytearray | memoryview) -> bool:
        """Write a message in one call if it fits into a slot, as nearly all do, and there is room now."""
        if not self._library or not isinstance(data, bytes) or len(data) > self.slot_bytes - _LENGTH:
            return False
        is_written = self._library.put_short(*self._place, self.num_readers, self._count, data, len(data))
        self._count += is_written
        return is_written

    def _get_short(self) -> bytes | None:
        """Read the next message in one call if it arrives soon and fits into a slot."""
        if not self._library or self._parts:
            return None
        size = self._library.get_short(*self._place, self._segment.member, self._count, self._slot)
        self._count += size >= 0
        return ctypes.string_at(self._slot, size) if size >= 0 else None

    def _check(self, writer: bool) -> None:
        if writer != (self._segment.member == 0):
            raise ValueError("the writer puts and readers get; this is the other end")
        if self._broken:
            raise RuntimeError(f"this queue cannot be used any more: {self._broken}")

    def close(self) -> None:
        """Leave: the others can read what has been written, then they get `PeerLost`."""
        self._segment.close()
