"""Connections on which both ends have proved that they know a secret, before either reads anything else.

Who connects sends a random number, who listens another one, and then each sends the HMAC of both under the secret (a mutual
challenge and response): the secret itself never travels, and no answer is worth anything a second time. Then both say what
they are, a flat dict, and whoever finds a difference refuses. What follows is authenticated at its beginning but neither
signed nor encrypted: across a network that others can reach, use a tunnel (WireGuard, IPsec).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from nanovllm.distributed.shared_memory import PeerLost
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.pieces import check_same

logger = logging.getLogger(__name__)

_HELLO = b"nanovllm-kv-1\n"  # and the version of all that follows
_NONCE = 32
_MAX_HANDSHAKES = 64


class HandshakeError(ConnectionError):
    """The other end does not know the secret, or does not fit; the message says what differs."""


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
            raise ValueError(f"{path} can be read by others: remove it (a new one is made), or chmod 600 and chown it")
        return _long_enough(file.read().strip(), str(path))


def _long_enough(value: bytes, name: str) -> bytes:
    if len(value) < 16:
        raise ValueError(f"{name} is too short for a secret: 16 characters at least, better 64 random ones")
    return value


def _proof(secret: bytes, role: str, purpose: str, nonces: bytes) -> bytes:
    """What only those can say who know the secret. The roles differ, so nobody can be answered with his own words."""
    return hmac.digest(secret, _HELLO + f"{role} {purpose} ".encode() + nonces, hashlib.sha256)


# ------------------------------------------------------------------------------------------------ the handshake


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
    connection.deadline = time.monotonic() + timeout  # of all of it: who sends a byte a second gains nothing
    try:
        own, other = os.urandom(_NONCE), bytearray(len(_HELLO) + _NONCE)
        connection.send_raw([memoryview(_HELLO + own)])
        connection.receive_raw([memoryview(other)])
        if not other.startswith(_HELLO):
            raise HandshakeError(f"{connection.peer} speaks another protocol or another version of it")
        theirs = bytes(other[len(_HELLO) :])
        nonces = own + theirs if is_client else theirs + own
        roles = ("client", "server") if is_client else ("server", "client")
        if is_client:  # it proves first: nobody learns anything from a listener by asking
            connection.send_raw([memoryview(_proof(secret, roles[0], purpose, nonces))])
        proof = bytearray(hashlib.sha256().digest_size)
        connection.receive_raw([memoryview(proof)])
        if not hmac.compare_digest(proof, _proof(secret, roles[1], purpose, nonces)):
            raise HandshakeError(f"{connection.peer} does not know the secret (NANOVLLM_KV_SECRET)")
        if not is_client:
            connection.send_raw([memoryview(_proof(secret, roles[0], purpose, nonces))])
        connection.send(msgspec.msgpack.encode(fingerprint))
        check_same(fingerprint, msgspec.msgpack.decode(connection.receive(), type=dict[str, str | int]))
    except HandshakeError:
        raise
    except (ValueError, msgspec.MsgspecError) as error:
        raise HandshakeError(f"{connection.peer}: {error}") from error
    except (PeerLost, TimeoutError) as error:
        hint = ": does it have another secret (NANOVLLM_KV_SECRET)?" if is_client else ""
        raise HandshakeError(f"no handshake with {connection.peer}: {error}{hint}") from error
    connection.deadline = float("inf")


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
                logger.warning("%s:%d is turned away: %d handshakes are under way", host, port, _MAX_HANDSHAKES)
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
