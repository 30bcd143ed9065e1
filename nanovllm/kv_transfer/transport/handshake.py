"""Makes connections on which both ends have proved that they know a secret, before either reads
anything else.

The client sends a random number, the listener another one, and then each sends the HMAC of both
numbers under the secret (a mutual challenge and response). The secret itself never travels, and no
proof can be used a second time. Then both send a flat dict that describes them, and an end that
finds a difference refuses; and a hello, which says what else the other end has to know. What
follows is authenticated at its beginning but neither signed nor encrypted: across a network that
strangers can reach, use a tunnel (WireGuard, IPsec)."""

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
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nanovllm.data.disk import HOME_REMEDY
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.pieces import check_same
from nanovllm.processes.channel import PeerLost

logger = logging.getLogger(__name__)

Facts = dict[str, str | int]
HELLO = b"nanovllm-kv-3\n"  # with the version of everything that follows
_NONCE = 32
MAX_HANDSHAKES = 64


class HandshakeError(ConnectionError):
    """The other end does not know the secret, or does not fit; the message says what differs."""


# --------------------------------------------------------------------------------------- the secret


def secret() -> bytes:
    """The secret that engines must share to exchange KV: `NANOVLLM_KV_SECRET`, or else the content
    of a file of this user, which is made once (~/.cache/nanovllm/kv_secret, or under
    `NANOVLLM_HOME` if that is set).

    Raises:
        ValueError: the secret is too short, other users can read the file, or it cannot be written.
    """
    if (given := os.environ.get("NANOVLLM_KV_SECRET")) is not None:
        return _long_enough(given.encode(), "NANOVLLM_KV_SECRET")
    path = (
        Path(os.environ.get("NANOVLLM_HOME") or Path.home() / ".cache" / "nanovllm") / "kv_secret"
    )
    if not path.exists():
        try:
            _make_secret(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(
                f"the secret of KV transfer, {path}, could not be written: {reason}; {HOME_REMEDY}"
            ) from error
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid != os.geteuid():
            raise ValueError(
                f"{path} can be read by others: remove it (a new one is made), or chmod 600 and "
                "chown it"
            )
        return _long_enough(file.read(), str(path))


def _make_secret(path: Path) -> None:
    """Write a random secret into a new file, which appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Mode 0600 from the start. Without a buffer: closing it would fail again on a full disk, and
    # leave the file.
    with tempfile.NamedTemporaryFile(dir=path.parent, buffering=0) as file:
        file.write(os.urandom(32).hex().encode())
        with contextlib.suppress(FileExistsError):  # another process was faster: use its file
            os.link(file.name, path)


def _long_enough(value: bytes, name: str) -> bytes:
    if len(value.strip()) < 16:
        raise ValueError(
            f"{name} is too short for a secret: 16 characters at least, better 64 random ones"
        )
    return value.strip()


# ------------------------------------------------------------------------------------ the handshake


@dataclass(frozen=True)
class Credentials:
    """What a process shows to the other end of a connection, and what it asks of it.

    Attributes:
        fingerprint: what must be equal at both ends.
        hello: what the other end gets as `Connection.hello`.
        timeout: seconds until a handshake must be complete.
        patience: see `Connection`.
    """

    secret: bytes
    fingerprint: Facts
    hello: bytes = b""
    timeout: float = 10.0
    patience: float = 30.0


def proof(secret: bytes, role: str, nonces: bytes) -> bytes:
    """Proof that a process knows the secret. It contains the role, so that sending a proof back
    proves nothing."""
    return hmac.digest(secret, HELLO + role.encode() + nonces, hashlib.sha256)


def shake_hands(connection: Connection, is_client: bool, credentials: Credentials) -> None:
    """Prove to each other that both know the secret, then compare the fingerprints and exchange the
    hellos.

    Raises:
        HandshakeError: the other end does not know the secret, has another fingerprint, or takes
            too long.
    """
    # One deadline for the whole handshake: a peer that sends one byte per second gains no time.
    connection.deadline = time.monotonic() + credentials.timeout
    try:
        own = os.urandom(_NONCE)
        connection.send_raw(HELLO + own)
        if connection.read(len(HELLO)) != HELLO:
            raise ValueError("it uses another protocol or another version of it")
        theirs = connection.read(_NONCE)
        nonces = own + theirs if is_client else theirs + own
        roles = ("client", "server") if is_client else ("server", "client")
        mine, expected = (proof(credentials.secret, role, nonces) for role in roles)
        if is_client:  # the client proves first: asking a listener reveals nothing
            connection.send_raw(mine)
        if not hmac.compare_digest(connection.read(len(expected)), expected):
            raise ValueError("it does not know the secret (NANOVLLM_KV_SECRET)")
        if not is_client:
            connection.send_raw(mine)
        connection.send(msgspec.msgpack.encode((credentials.fingerprint, credentials.hello)))
        answer = connection.receive(max(0.0, connection.deadline - time.monotonic()))
        facts, connection.hello = msgspec.msgpack.decode(answer, type=tuple[Facts, bytes])
        check_same(credentials.fingerprint, facts)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        connection.close()
        has_left = is_client and isinstance(error, OSError)
        hint = ": check that both use the same secret (NANOVLLM_KV_SECRET)" if has_left else ""
        raise HandshakeError(f"handshake with {connection.peer} failed: {error}{hint}") from error
    connection.deadline = float("inf")


def connect(host: str, port: int, credentials: Credentials) -> Connection:
    """Connect to a listener.

    Raises:
        PeerLost: no process listens there.
        HandshakeError: the other end does not know the secret, or differs.
    """
    try:
        sock = socket.create_connection((host, port), credentials.timeout)
    except OSError as error:
        raise PeerLost(f"no connection to {host}:{port}: {error}") from error
    connection = Connection(sock, f"{host}:{port}", credentials.patience)
    shake_hands(connection, True, credentials)
    return connection


class Listener:
    """Accepts connections in a thread, and gives each its own thread for the handshake and for
    `on_connection`.

    Args:
        host: the only address to listen on.
        port: 0: any free one.
        on_connection: called with each connection after its handshake; when it returns, the
            connection is closed.

    Attributes:
        address: host and port.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        on_connection: Callable[[Connection], None],
    ) -> None:
        self._credentials = credentials
        self._on_connection = on_connection
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self._socket.settimeout(0.5)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._connections: dict[Connection, threading.Thread] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, (host, port, *_) = self._socket.accept()
            except OSError as error:
                # For example, all file descriptors are used at the moment.
                if not isinstance(error, TimeoutError) and not self._closed.wait(0.1):
                    logger.warning("cannot accept a connection: %s", error)
                continue
            connection = Connection(sock, f"{host}:{port}", self._credentials.patience)
            thread = threading.Thread(
                target=self._serve, args=[connection], name=f"kv-{connection.peer}", daemon=True
            )
            self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            if not self._handshakes.acquire(blocking=False):
                raise HandshakeError(
                    f"{MAX_HANDSHAKES} handshakes are in progress, and {connection.peer} has to "
                    "wait"
                )
            try:
                shake_hands(connection, False, self._credentials)
            finally:
                self._handshakes.release()
            self._on_connection(connection)
        except HandshakeError as error:
            logger.warning("a connection was rejected: %s", error)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.info("the connection from %s has ended: %s", connection.peer, error)
        except Exception:
            logger.exception("the connection from %s is closed after an error", connection.peer)
        finally:
            connection.close()
            self._connections.pop(connection, None)

    def hang_up(self) -> None:
        """End all connections."""
        for connection, thread in list(self._connections.items()):
            connection.close()
            if thread.is_alive():
                # Otherwise it has ended, or begins now and finds the connection closed.
                thread.join(self._credentials.patience)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self.hang_up()
