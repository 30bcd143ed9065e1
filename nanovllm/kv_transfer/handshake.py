"""Connections on which both ends have proved that they know a secret, before either reads anything else.

Who connects sends a random number, who listens another one, and then each sends the HMAC of both under the secret (a mutual
challenge and response): the secret itself never travels, and no answer is worth anything a second time. Then both say what
they are, a flat dict, and whoever finds a difference refuses. What follows is authenticated at its beginning but neither
signed nor encrypted: across a network that others can reach, use a tunnel (WireGuard, IPsec).

Everything then travels in frames: a header, a message, perhaps a payload, each with its CRC-32. Of what Python brings, zlib's
crc32 is the fastest that finds any burst of up to 32 bits: 2 GB/s here, where adler32, which is weaker, does 1.4.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import select
import socket
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from nanovllm.distributed.shared_memory import PeerLost
from nanovllm.kv_transfer.layout import check_same

logger = logging.getLogger(__name__)

MAX_MESSAGE = 16 << 20  # bytes
_HELLO = b"nanovllm-kv-1\n"  # and the version of all that follows
_NONCE = 32
_MAGIC = b"nvkv"
_HEADER = struct.Struct(
    "<4sIQII"
)  # magic, bytes of the message and of the payload, CRC of the message and of these
_CRC = struct.Struct("<I")
_BUFFERS = 512  # for one system call; Linux takes 1024
_AT_ONCE = (
    1 << 20
)  # bytes of payload that are checked and sent by turns: they are still in the processor's cache
_MAX_HANDSHAKES = 64


class HandshakeError(ConnectionError):
    """The other end does not know the secret, or does not fit; the message says what differs."""


class CorruptFrame(PeerLost):
    """What has come is not what was sent; the connection is of no use any more."""


# ------------------------------------------------------------------------------------------------ the secret


def secret() -> bytes:
    """What the engines that may exchange KV know: `NANOVLLM_KV_SECRET`, or else a file of this user, which is made once
    (~/.cache/nanovllm/kv_secret, under `NANOVLLM_HOME` if that is set).

    Raises:
        ValueError: it is too short, or others can read the file.
    """
    if (given := os.environ.get("NANOVLLM_KV_SECRET")) is not None:
        return _long_enough(given.strip().encode(), "NANOVLLM_KV_SECRET")
    path = Path(os.environ.get("NANOVLLM_HOME") or Path.home() / ".cache" / "nanovllm") / "kv_secret"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 0600 from the start
            file.write(os.urandom(32).hex().encode())
            file.flush()
            with contextlib.suppress(FileExistsError):  # another process was faster: its file counts
                os.link(file.name, path)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid != os.geteuid():
            raise ValueError(
                f"{path} can be read by others: remove it (a new one is made), or chmod 600 and chown it"
            )
        return _long_enough(file.read().strip(), str(path))


def _long_enough(value: bytes, name: str) -> bytes:
    if len(value) < 16:
        raise ValueError(f"{name} is too short for a secret: 16 characters at least, better 64 random ones")
    return value


def _proof(secret: bytes, role: str, purpose: str, nonces: bytes) -> bytes:
    """What only those can say who know the secret. The roles differ, so nobody can be answered with his own words."""
    return hmac.digest(secret, _HELLO + f"{role} {purpose} ".encode() + nonces, hashlib.sha256)


# -------------------------------------------------------------------------------------------------- connections


class Connection:
    """One end of a connection, after the handshake. Any thread may send; one at a time may receive.

    Args:
        peer: how errors call the other end.
        patience: seconds after which a peer that stops in the middle of a frame, or does not take what it is sent, counts
            as lost.

    Attributes:
        payload_bytes: of the payload that follows the message that came last, and has not been received.
    """

    def __init__(self, sock: socket.socket, peer: str, patience: float = 30.0) -> None:
        self.peer, self.patience, self.payload_bytes = peer, patience, 0
        self._socket, self._deadline, self._closed = sock, float("inf"), False
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
        header = _HEADER.pack(_MAGIC, len(message), sum(map(len, buffers)), zlib.crc32(message), 0)[:-4]
        with self._sending:
            self._send_all([memoryview(header + _CRC.pack(zlib.crc32(header)) + message)])
            crc, group, size = 0, [], 0
            for buffer in buffers:
                for part in (buffer[i : i + _AT_ONCE] for i in range(0, len(buffer), _AT_ONCE)):
                    crc = zlib.crc32(part, crc)
                    group.append(part)
                    size += len(part)
                    if size >= _AT_ONCE:
                        self._send_all(group)
                        group, size = [], 0
            if buffers:
                self._send_all([*group, memoryview(_CRC.pack(crc))])

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
        self._receive_all([memoryview(header)])
        magic, length, payload, crc, header_crc = _HEADER.unpack(header)
        if magic != _MAGIC or zlib.crc32(header[:-4]) != header_crc:
            raise self._corrupt("what is no frame")
        if length > MAX_MESSAGE:
            raise self._corrupt(f"a message of {length} bytes")
        message = bytearray(length)
        self._receive_all([memoryview(message)])
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
        crc, group, size = 0, [], 0
        for buffer in buffers:
            for part in (buffer[i : i + _AT_ONCE] for i in range(0, len(buffer), _AT_ONCE)):
                group.append(part)
                size += len(part)
                if size >= _AT_ONCE or len(group) == _BUFFERS:
                    crc, group, size = self._receive_group(group, crc), [], 0
        crc = self._receive_group(group, crc)
        if self.payload_bytes:
            self._receive_all([memoryview(sent := bytearray(_CRC.size))])
            if _CRC.unpack(sent)[0] != crc:
                raise self._corrupt("a payload with a wrong checksum")
        self.payload_bytes = 0

    def _receive_group(self, group: list[memoryview], crc: int) -> int:
        self._receive_all(group)
        for part in group:
            crc = zlib.crc32(part, crc)
        return crc

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

    def _send_all(self, views: list[memoryview]) -> None:
        self._transfer(views, select.POLLOUT, lambda views: self._socket.sendmsg(views))

    def _receive_all(self, views: list[memoryview]) -> None:
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
        limit = min(float("inf") if seconds is None else seconds, self._deadline - time.monotonic())
        if not poller.poll(None if limit == float("inf") else max(0, limit) * 1000):
            raise TimeoutError(f"{self.peer} is silent")


def _shake_hands(
    connection: Connection,
    is_client: bool,
    secret: bytes,
    fingerprint: dict[str, str | int],
    purpose: str,
    timeout: float,
) -> None:
    """Prove to one another that both know the secret, then compare what both are.

    Raises:
        HandshakeError: the other end does not know the secret, is something else, or takes too long.
    """
    connection._deadline = time.monotonic() + timeout  # of all of it: who sends a byte a second gains nothing
    try:
        own, other = os.urandom(_NONCE), bytearray(len(_HELLO) + _NONCE)
        connection._send_all([memoryview(_HELLO + own)])
        connection._receive_all([memoryview(other)])
        if not other.startswith(_HELLO):
            raise HandshakeError(f"{connection.peer} speaks another protocol or another version of it")
        theirs = bytes(other[len(_HELLO) :])
        nonces = own + theirs if is_client else theirs + own
        roles = ("client", "server") if is_client else ("server", "client")
        if is_client:  # it proves first: nobody learns anything from a listener by asking
            connection._send_all([memoryview(_proof(secret, roles[0], purpose, nonces))])
        proof = bytearray(hashlib.sha256().digest_size)
        connection._receive_all([memoryview(proof)])
        if not hmac.compare_digest(proof, _proof(secret, roles[1], purpose, nonces)):
            raise HandshakeError(f"{connection.peer} does not know the secret (NANOVLLM_KV_SECRET)")
        if not is_client:
            connection._send_all([memoryview(_proof(secret, roles[0], purpose, nonces))])
        connection.send(msgspec.msgpack.encode(fingerprint))
        check_same(fingerprint, msgspec.msgpack.decode(connection.receive(), type=dict[str, str | int]))
    except HandshakeError:
        raise
    except (ValueError, msgspec.MsgspecError) as error:
        raise HandshakeError(f"{connection.peer}: {error}") from error
    except (PeerLost, TimeoutError) as error:
        hint = ": does it have another secret (NANOVLLM_KV_SECRET)?" if is_client else ""
        raise HandshakeError(f"no handshake with {connection.peer}: {error}{hint}") from error
    connection._deadline = float("inf")


def connect(
    host: str,
    port: int,
    secret: bytes,
    fingerprint: dict[str, str | int],
    timeout: float = 10.0,
    purpose: str = "kv",
    patience: float = 30.0,
) -> Connection:
    """Connect to a listener.

    Args:
        fingerprint: what has to be the same at both ends.
        timeout: seconds until it has to be done.
        purpose: of the connection: a listener for another one refuses.
        patience: as in `Connection`.

    Raises:
        PeerLost: nobody listens there.
        HandshakeError: the other end does not know the secret, or differs.
    """
    try:
        sock = socket.create_connection((host, port), timeout)
    except OSError as error:
        raise PeerLost(f"no connection to {host}:{port}: {error}") from error
    connection = Connection(sock, f"{host}:{port}", patience)
    try:
        _shake_hands(connection, True, secret, fingerprint, purpose, timeout)
    except HandshakeError:
        connection.close()
        raise
    return connection


class Listener:
    """Waits for connections in a thread; each gets its handshake, and then its work, in a thread of its own.

    Args:
        host: the address to listen on; nothing else can be reached.
        port: 0: any that is free.
        on_connection: called with each connection that has proved itself; when it returns, the connection is closed.
        timeout: seconds for a handshake.

    Attributes:
        address: host and port.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        fingerprint: dict[str, str | int],
        on_connection: Callable[[Connection], None],
        purpose: str = "kv",
        timeout: float = 10.0,
        patience: float = 30.0,
    ) -> None:
        self._secret, self._fingerprint, self._purpose = secret, fingerprint, purpose
        self._on_connection, self._timeout, self._patience = on_connection, timeout, patience
        self._socket = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        self._socket.settimeout(0.5)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._connections: dict[Connection, threading.Thread] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"{purpose}-listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, (host, port, *_) = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed.wait(0.1):  # no file descriptor left, for example: others may come back
                    logger.warning("cannot accept a connection: %s", error)
                continue
            connection = Connection(sock, f"{host}:{port}", self._patience)
            if not self._handshakes.acquire(blocking=False):
                logger.warning(
                    "%s:%d is turned away: %d handshakes are under way", host, port, _MAX_HANDSHAKES
                )
                connection.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name=f"{self._purpose}-{host}:{port}", daemon=True
            )
            self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            try:
                _shake_hands(connection, False, self._secret, self._fingerprint, self._purpose, self._timeout)
            finally:
                self._handshakes.release()
            self._on_connection(connection)
        except HandshakeError as error:
            logger.warning("a connection is refused: %s", error)
        except PeerLost as error:
            logger.info("a connection has ended: %s", error)
        except Exception:
            logger.exception("the connection from %s is closed after an error", connection.peer)
        finally:
            connection.close()
            self._connections.pop(connection, None)

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for connection, thread in list(self._connections.items()):
            connection.close()
            if thread is not threading.current_thread():
                thread.join(self._patience)
