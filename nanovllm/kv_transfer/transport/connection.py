"""Sends and receives messages and payloads in frames, each with a checksum, over one TCP
connection.

A frame is a header and a message, and perhaps a payload; both parts end with their xxHash, which is
as fast as memory."""

import contextlib
import select
import socket
import struct
import threading
import time

import xxhash

from nanovllm.processes.channel import PeerLost

MAX_MESSAGE = 16 << 20  # bytes
_MAGIC = b"nvkv"
_HEADER = struct.Struct("<4sIQ")  # magic, bytes of the message and of the payload
_CHECKSUM_BYTES = 8
# Of payload that are sent and checked at a time: they are still in the processor's cache.
_STEP_BYTES = 1 << 20
# Half a minute after a host has vanished silently its connections count as lost, even if nothing is
# being sent.
_TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30000,
}


class CorruptFrame(PeerLost):
    """The received bytes are not those that were sent, or make no sense. The connection is of no
    use any more."""


class Connection:
    """One end of a connection. Any thread may send; only one thread at a time may receive.

    Args:
        peer: what error messages call the other end.
        patience: seconds after which a peer counts as lost that stops in the middle of a frame or
            takes no bytes.

    Attributes:
        payload_bytes: length of the payload that follows the last message and has not been received
            yet.
        deadline: `time.monotonic()` after which bytes no longer move; set during the handshake.
        hello: what the other end has said of itself in the handshake.
    """

    def __init__(self, sock: socket.socket, peer: str, patience: float = 30.0) -> None:
        self.peer = peer
        self.patience = patience
        self.payload_bytes = 0
        self.deadline = float("inf")
        self.hello = b""
        self._socket = sock
        self._closed = False
        self._sending = threading.Lock()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: bytes, payload: bytes | memoryview = b"") -> None:
        """Send a message, and perhaps a payload.

        Raises:
            ValueError: the message is longer than `MAX_MESSAGE`.
            PeerLost: the other end is gone, or takes no bytes.
        """
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes: {MAX_MESSAGE} at most")
        frame = _HEADER.pack(_MAGIC, len(message), len(payload)) + message
        with self._sending:
            self.send_raw(frame + xxhash.xxh3_64_digest(frame))
            if payload:
                self.send_raw(self._transfer(memoryview(payload), is_sending=True))

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
            raise CorruptFrame(
                f"{self.peer} sent {self.payload_bytes} bytes with a message that has none"
            )
        if self._closed:
            raise PeerLost(f"the connection to {self.peer} is closed")
        if not self.is_ready(timeout):
            raise TimeoutError(f"{self.peer} is silent")
        header = self.read(_HEADER.size)
        magic, length, payload = _HEADER.unpack(header)
        if magic != _MAGIC or length > MAX_MESSAGE:
            raise self._corrupt("what is no frame")
        message = self.read(length)
        if self.read(_CHECKSUM_BYTES) != xxhash.xxh3_64_digest(header + message):
            raise self._corrupt("a message with a wrong checksum")
        self.payload_bytes = payload
        return message

    def receive_payload(self, buffer: memoryview) -> None:
        """Receive the payload of the last message into `buffer`, which is as long.

        Raises:
            PeerLost: as in `receive`; part of the buffer may have been filled.
            CorruptFrame: the payload has another length (then no byte was written), or a wrong
            checksum.
        """
        if len(buffer) != self.payload_bytes:
            raise self._corrupt(f"{self.payload_bytes} bytes where {len(buffer)} were expected")
        if buffer and self._transfer(buffer) != self.read(_CHECKSUM_BYTES):
            raise self._corrupt("a payload with a wrong checksum")
        self.payload_bytes = 0

    def is_ready(self, seconds: float | None = 0, event: int = select.POLLIN) -> bool:
        """Whether receiving, or with POLLOUT sending, would return or raise at once; waits for that
        moment, None: without a limit."""
        poller = select.poll()
        poller.register(self._socket, event)
        return bool(poller.poll(None if seconds is None else 1000 * max(0.0, seconds)))

    def is_lost(self) -> bool:
        """Whether the other end is gone, as far as can be known without waiting and without taking
        bytes it has sent."""
        try:
            return self._closed or self._socket.recv(1, socket.MSG_PEEK) == b""
        except OSError as error:
            return not isinstance(error, BlockingIOError)

    def close(self) -> None:
        """End the connection: the other end, and threads that wait here, get `PeerLost`."""
        self._closed = True
        # The descriptor stays open: a thread that waits for it now could otherwise meet another
        # file with its number.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._socket.close()

    def _corrupt(self, what: str) -> CorruptFrame:
        self.close()
        return CorruptFrame(f"{self.peer} sent {what}")

    def send_raw(self, data: bytes) -> None:
        """Send bytes without a frame."""
        self._transfer(memoryview(data), is_sending=True)

    def read(self, size: int) -> bytes:
        """The next bytes, which have no frame."""
        data = bytearray(size)
        self._transfer(memoryview(data))
        return bytes(data)

    def _transfer(self, data: memoryview, is_sending: bool = False) -> bytes:
        """Send or fill all of `data`, step by step; returns its checksum."""
        step, event = (
            (self._socket.send, select.POLLOUT)
            if is_sending
            else (self._socket.recv_into, select.POLLIN)
        )
        checksum = xxhash.xxh3_64()
        while data:
            try:
                size = step(data[:_STEP_BYTES])
            except BlockingIOError:
                if self.is_ready(min(self.patience, self.deadline - time.monotonic()), event):
                    continue
                self.close()  # the rest of a frame that was cut off would be taken for a header
                raise PeerLost(f"{self.peer} stopped in the middle of a message") from None
            except OSError as error:
                raise PeerLost(f"{self.peer}: {error}") from error
            if not size:
                raise PeerLost(f"{self.peer} has closed the connection")
            checksum.update(data[:size])
            data = data[size:]
        return checksum.digest()
