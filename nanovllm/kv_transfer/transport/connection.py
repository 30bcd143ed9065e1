"""Sends and receives messages and payloads in frames, each with a checksum, over one TCP connection.

A frame is a header, a message and perhaps a payload, each with its CRC-32. Among Python's own checksums, zlib's crc32 is the
fastest that finds any burst of up to 32 bits: 2 GB/s here, where adler32, which is weaker, does 1.4.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from nanovllm.distributed.life_signs import PeerLost

MAX_MESSAGE = 16 << 20  # bytes
_MAGIC = b"nvkv"
_HEADER = struct.Struct("<4sIQII")  # magic, bytes of the message and of the payload, CRC of the message and of these
_CRC = struct.Struct("<I")
_BUFFERS = 512  # per system call; Linux takes 1024
_GROUP_BYTES = 1 << 20  # of payload that are checked and sent at a time
# Half a minute after a host has vanished silently its connections count as lost, even if nothing is being sent.
_TCP_OPTIONS = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30000}


class CorruptFrame(PeerLost):
    """The received bytes are not those that were sent, or make no sense. The connection is of no use any more."""


def _in_groups(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """All bytes of the buffers, in groups that are still in the processor's cache after their checksum was computed."""
    group, size = [], 0
    for buffer in buffers:
        for part in (buffer[i : i + _GROUP_BYTES] for i in range(0, len(buffer), _GROUP_BYTES)):
            group.append(part)
            size += len(part)
            if size >= _GROUP_BYTES or len(group) == _BUFFERS:
                yield group
                group, size = [], 0
    yield group


class Connection:
    """One end of a connection. Any thread may send; only one thread at a time may receive.

    Args:
        peer: what error messages call the other end.
        patience: seconds after which a peer counts as lost that stops in the middle of a frame or takes no bytes.

    Attributes:
        payload_bytes: length of the payload that follows the last message and has not been received yet.
        deadline: `time.monotonic()` after which bytes no longer move; set during the handshake.
    """

    def __init__(self, sock: socket.socket, peer: str, patience: float = 30.0) -> None:
        self.peer, self.patience, self.payload_bytes, self.deadline = peer, patience, 0, float("inf")
        self._socket, self._closed, self._sending = sock, False, threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Send a message, and as its payload the bytes of all buffers, which are not copied.

        Raises:
            ValueError: the message is longer than `MAX_MESSAGE`.
            PeerLost: the other end is gone, or takes no bytes.
        """
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes: {MAX_MESSAGE} at most")
        size, crc = sum(map(len, buffers)), 0
        header = _HEADER.pack(_MAGIC, len(message), size, zlib.crc32(message), 0)[: -_CRC.size]
        with self._sending:
            self.send_raw([memoryview(header + _CRC.pack(zlib.crc32(header)) + message)])
            for group in _in_groups(buffers):
                for part in group:
                    crc = zlib.crc32(part, crc)
                self.send_raw(group)
            if size:
                self.send_raw([memoryview(_CRC.pack(crc))])

    def receive(self, timeout: float | None = None) -> bytes:
        """The next message. If it has a payload (`payload_bytes`), call `receive_payload` next.

        Args:
            timeout: seconds until the message must have begun; None: no limit.

        Raises:
            TimeoutError: no message has begun; the connection can still be used.
            PeerLost: the other end is gone, or has stopped in the middle.
            CorruptFrame: the bytes are not a frame.
        """
        if self.payload_bytes:
            raise CorruptFrame(f"{self.peer} sent {self.payload_bytes} bytes with a message that has none")
        if self._closed:
            raise PeerLost(f"the connection to {self.peer} is closed")
        if not self.is_readable(timeout):
            raise TimeoutError(f"{self.peer} is silent")
        header = bytearray(_HEADER.size)
        self.receive_raw([memoryview(header)])
        magic, length, payload, crc, header_crc = _HEADER.unpack(header)
        if magic != _MAGIC or zlib.crc32(header[: -_CRC.size]) != header_crc:
            raise self._corrupt("what is no frame")
        if length > MAX_MESSAGE:
            raise self._corrupt(f"a message of {length} bytes")
        message = bytearray(length)
        self.receive_raw([memoryview(message)])
        if zlib.crc32(message) != crc:
            raise self._corrupt("a message with a wrong checksum")
        self.payload_bytes = payload
        return bytes(message)

    def receive_payload(self, buffers: Sequence[memoryview]) -> None:
        """Receive the payload of the last message into `buffers`, which together are as long.

        Raises:
            PeerLost: as in `receive`; part of the buffers may have been filled.
            CorruptFrame: the payload has another length (then no byte was written), or a wrong checksum.
        """
        if (size := sum(map(len, buffers))) != self.payload_bytes:
            raise self._corrupt(f"{self.payload_bytes} bytes where {size} were expected")
        crc, sent = 0, bytearray(_CRC.size)
        for group in _in_groups(buffers):
            self.receive_raw(group)
            for part in group:
                crc = zlib.crc32(part, crc)
        if size:
            self.receive_raw([memoryview(sent)])
            if _CRC.unpack(sent)[0] != crc:
                raise self._corrupt("a payload with a wrong checksum")
        self.payload_bytes = 0

    def is_readable(self, seconds: float | None = 0) -> bool:
        """Whether `receive` would return or raise at once; waits for that moment, None: without a limit."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else 1000 * seconds))

    def is_lost(self) -> bool:
        """Whether the other end is gone, as far as can be known without waiting and without taking bytes it has sent."""
        try:
            return self._closed or (self.is_readable() and self._socket.recv(1, socket.MSG_PEEK) == b"")
        except OSError:
            return True

    def close(self) -> None:
        """End the connection: the other end, and threads that wait here, get `PeerLost`."""
        self._closed = True
        # The descriptor stays open: a thread that waits for it now could otherwise meet another file with its number.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._socket.close()

    def _corrupt(self, what: str) -> CorruptFrame:
        self.close()
        return CorruptFrame(f"{self.peer} sent {what}")

    def send_raw(self, views: list[memoryview]) -> None:
        """Send bytes without a frame."""
        self._transfer(views, self._socket.sendmsg)

    def receive_raw(self, views: list[memoryview]) -> None:
        """Fill all views with bytes that have no frame."""
        self._transfer(views, lambda views: self._socket.recvmsg_into(views)[0])

    def _transfer(self, views: list[memoryview], step: Callable[[list[memoryview]], int]) -> None:
        """Send or fill all of `views`, step by step."""
        views = [view for view in views if len(view)]
        while views:
            try:
                self._socket.settimeout(max(1e-3, min(self.patience, self.deadline - time.monotonic())))
                size = step(views)
            except TimeoutError:
                self.close()  # the rest of a frame that was cut off would be taken for a header
                raise PeerLost(f"{self.peer} has stopped in the middle of a message") from None
            except OSError as error:
                raise PeerLost(f"{self.peer}: {error}") from error
            if not size:
                raise PeerLost(f"{self.peer} has closed the connection")
            while views and size >= len(views[0]):
                size -= len(views.pop(0))
            if size:
                views[0] = views[0][size:]
