"""A connection between two ranks or engines: messages and payloads in frames, each with a checksum.

A frame is a header, a message and perhaps a payload, each with its CRC-32. Of what Python brings, zlib's crc32 is the fastest that
finds any burst of up to 32 bits: 2 GB/s here, where adler32, which is weaker, does 1.4.
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

from nanovllm.distributed.shared_memory import PeerLost

MAX_MESSAGE = 16 << 20  # bytes
_MAGIC = b"nvkv"
_HEADER = struct.Struct("<4sIQII")  # magic, bytes of the message and of the payload, CRC of the message and of these
_CRC = struct.Struct("<I")
_BUFFERS = 512  # for one system call; Linux takes 1024
_AT_ONCE = 1 << 20  # bytes of payload that are checked and sent by turns


class CorruptFrame(PeerLost):
    """What has come is not what was sent; the connection is of no use any more."""


def _in_groups(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """All bytes of the buffers, as many at once as are still in the processor's cache after they have been checked."""
    group, size = [], 0
    for buffer in buffers:
        for part in (buffer[i : i + _AT_ONCE] for i in range(0, len(buffer), _AT_ONCE)):
            group.append(part)
            size += len(part)
            if size >= _AT_ONCE or len(group) == _BUFFERS:
                yield group
                group, size = [], 0
    yield group


class Connection:
    """One end of a connection, after the handshake. Any thread may send; one at a time may receive.

    Args:
        peer: how errors call the other end.
        patience: seconds after which a peer that stops in the middle of a frame, or does not take what it is sent, counts
            as lost.

    Attributes:
        payload_bytes: of the payload that follows the message that came last, and has not been received.
        deadline: of everything, in seconds of `time.monotonic()`: while the other end has not proved itself.
    """

    def __init__(self, sock: socket.socket, peer: str, patience: float = 30.0) -> None:
        self.peer, self.patience, self.payload_bytes = peer, patience, 0
        self._socket, self.deadline, self._closed = sock, float("inf"), False
        self._sending = threading.Lock()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes without a word is missed after half a minute, also while nothing is being sent.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 15),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 30000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            PeerLost: the other end is gone, or takes nothing.
        """
        self.send_with_payload(message, ())

    def send_with_payload(self, message: bytes, buffers: Sequence[memoryview]) -> None:
        """Send a message, and after it the bytes of all buffers, straight from where they are.

        Args:
            buffers: of bytes.

        Raises:
            ValueError: the message is longer than `MAX_MESSAGE`.
            PeerLost: as in `send`.
        """
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes: {MAX_MESSAGE} at most")
        size = sum(map(len, buffers))
        header = _HEADER.pack(_MAGIC, len(message), size, zlib.crc32(message), 0)[:-4]
        with self._sending:
            self.send_raw([memoryview(header + _CRC.pack(zlib.crc32(header)) + message)])
            crc = 0
            for group in _in_groups(buffers):
                for part in group:
                    crc = zlib.crc32(part, crc)
                self.send_raw(group)
            if size:
                self.send_raw([memoryview(_CRC.pack(crc))])

    def receive(self, timeout: float | None = None) -> bytes:
        """The next message. If it has a payload (`payload_bytes`), call `receive_payload` next.

        Args:
            timeout: seconds until it must have begun; None: as long as it takes.

        Raises:
            TimeoutError: nothing has come; the connection is as good as before.
            PeerLost: the other end is gone, or has stopped in the middle.
            CorruptFrame: nonsense has come.
        """
        if self.payload_bytes:
            raise CorruptFrame(f"{self.peer} sent {self.payload_bytes} bytes with a message that has none")
        header = bytearray(_HEADER.size)
        self._wait(select.POLLIN, timeout)
        self.receive_raw([memoryview(header)])
        magic, length, payload, crc, header_crc = _HEADER.unpack(header)
        if magic != _MAGIC or zlib.crc32(header[:-4]) != header_crc:
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
        """Receive what belongs to the last message, straight into where it shall be.

        Args:
            buffers: writable bytes; together as long as the payload.

        Raises:
            PeerLost: as in `receive`; the buffers may be filled in part.
            CorruptFrame: it has another length (then nothing was written), or a wrong checksum.
        """
        if (size := sum(map(len, buffers))) != self.payload_bytes:
            raise self._corrupt(f"{self.payload_bytes} bytes where {size} were expected")
        crc = 0
        for group in _in_groups(buffers):
            self.receive_raw(group)
            for part in group:
                crc = zlib.crc32(part, crc)
        if self.payload_bytes:
            self.receive_raw([memoryview(sent := bytearray(_CRC.size))])
            if _CRC.unpack(sent)[0] != crc:
                raise self._corrupt("a payload with a wrong checksum")
        self.payload_bytes = 0

    def is_readable(self) -> bool:
        """Whether `receive` would not have to wait, be it for a message or for an error."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def is_lost(self) -> bool:
        """Whether the other end is gone, as far as that can be known at once and without taking what it has sent."""
        try:
            return self._closed or self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End it: the other end, and threads of this one that are waiting here, get `PeerLost`."""
        self._closed = True
        # Not closed here: a thread that is just waiting might meet another file with this descriptor.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._socket.close()

    def _corrupt(self, what: str) -> CorruptFrame:
        self.close()
        return CorruptFrame(f"{self.peer} sent {what}")

    def send_raw(self, views: list[memoryview]) -> None:
        """Send bytes that are no frame."""
        self._transfer(views, select.POLLOUT, lambda views: self._socket.sendmsg(views))

    def receive_raw(self, views: list[memoryview]) -> None:
        """Receive bytes that are no frame."""
        self._transfer(views, select.POLLIN, lambda views: self._socket.recvmsg_into(views)[0])

    def _transfer(self, views: list[memoryview], event: int, step: Callable[[list[memoryview]], int]) -> None:
        """Send or fill all of `views`, step by step."""
        views = [view for view in views if len(view)]
        first = 0
        while first < len(views):
            try:
                size = step(views[first : first + _BUFFERS])
            except BlockingIOError:
                try:
                    self._wait(event, self.patience)
                except TimeoutError:
                    self.close()  # who goes on after a frame that was cut off would take its rest for a header
                    raise PeerLost(f"{self.peer} has stopped in the middle of a message") from None
                continue
            except OSError as error:
                raise PeerLost(f"{self.peer}: {error}") from error
            if not size:
                raise PeerLost(f"{self.peer} has closed the connection")
            while first < len(views) and size >= len(views[first]):
                size -= len(views[first])
                first += 1
            if size:
                views[first] = views[first][size:]

    def _wait(self, event: int, seconds: float | None) -> None:
        if self._closed:
            raise PeerLost(f"the connection to {self.peer} is closed")
        poller = select.poll()
        poller.register(self._socket, event)
        limit = min(float("inf") if seconds is None else seconds, self.deadline - time.monotonic())
        if not poller.poll(None if limit == float("inf") else max(0, limit) * 1000):
            raise TimeoutError(f"{self.peer} is silent")
