"""What engines tell each other about KV: messages, mailboxes, leases and connections.

Control messages go from engine to engine, KV from rank to rank (`transport`). Threads of this module receive the messages. Those
for the scheduler wait in a mailbox until its next step; claims and releases of leases are answered at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nanovllm.distributed.activity import waiting_for_others
from nanovllm.kv_transfer.transport.handshake import Connection, Listener, PeerLost, connect, secret

logger = logging.getLogger(__name__)

PURPOSE = "kv-control"
# A peer that does not take a control message for so long is lost: an engine's thread sends them between two steps.
PATIENCE = 2.0
# A reader that has claimed blocks and has not read them after so long has stopped without losing its connection. Should it go on,
# it is told that what it has read is worth nothing.
CLAIM_SECONDS = 300.0


class Introduction(msgspec.Struct, tag="introduction"):
    """The first message of both ends: the engine, and how each of its ranks is reached."""

    engine_id: str
    ranks: list[dict[str, Any]]


class Prefill(msgspec.Struct, tag="prefill"):
    """A consumer orders the KV of these tokens.

    Attributes:
        transfer_id: unique among all engines.
        num_computed_tokens: so many at the beginning are not needed; a whole number of blocks.
        push: the consumer's blocks, from the first token on, into which KV is to be written; None: it will read.
    """

    transfer_id: str
    token_ids: list[int]
    num_computed_tokens: int
    cache_salt: str | None = None
    priority: int = 0
    push: list[int] | None = None


class Prefilled(msgspec.Struct, tag="prefilled"):
    """A producer's answer: the blocks in which the KV is, and which stay as they are until `Release`; or why there are none."""

    transfer_id: str
    block_ids: list[int] = []
    error: str = ""


class Cancel(msgspec.Struct, tag="cancel"):
    """A consumer takes back an order."""

    transfer_id: str


class Claim(msgspec.Struct, tag="claim"):
    """A consumer is about to read these blocks: the lease does not end while the consumer is connected.

    Attributes:
        seal: of the tokens and blocks that it believes to find there (`seal`): its client has told it, and may be wrong.
    """

    request_id: str
    seal: bytes


class Release(msgspec.Struct, tag="release"):
    """A consumer has read what it has claimed, or no longer wants to."""

    request_id: str


class Released(msgspec.Struct, tag="released"):
    """The answer: whether these blocks were held for it until now. If not, what was read is worth nothing."""

    request_id: str
    was_held: bool


FromConsumer = Introduction | Prefill | Cancel | Claim | Release
FromProducer = Introduction | Prefilled | Released

encode = msgspec.msgpack.Encoder().encode
_decode_consumer = msgspec.msgpack.Decoder(FromConsumer).decode
_decode_producer = msgspec.msgpack.Decoder(FromProducer).decode


def seal(token_ids: Sequence[int], block_ids: Sequence[int]) -> bytes:
    """A digest of tokens, and of the blocks that hold their keys and values."""
    return hashlib.sha256(encode([list(token_ids), list(block_ids)])).digest()


class Mailbox:
    """Messages from many threads to one. `fileno` is readable if, and only if, there are any, so that the thread can wait for them
    together with other sources."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._lock, self._closed = threading.Lock(), False
        self._readable, self._writable = os.pipe()

    def fileno(self) -> int:
        """To be polled."""
        return self._readable

    def put(self, message: Any) -> None:
        """From any thread."""
        with self._lock:
            if self._closed:
                return
            if not self._messages:
                os.write(self._writable, b"!")
            self._messages.append(message)

    def take(self) -> list[Any]:
        """All messages so far."""
        with self._lock:
            if self._messages:
                os.read(self._readable, 1)
            messages, self._messages = self._messages, []
            return messages

    @property
    def is_empty(self) -> bool:
        """Nothing to take."""
        return not self._messages

    def close(self) -> None:
        """Drop what is there, and what is put later."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._messages = True, []
            os.close(self._readable)
            os.close(self._writable)


@dataclass
class _Lease:
    deadline: float
    seal: bytes
    claims: Counter[Connection] = field(default_factory=Counter)


class Leases:
    """The blocks of requests that have ended, by their ids, and until when they are held for a reader.

    A lease without claims ends at its deadline; a claimed one ends when all readers that have claimed it have released it or are
    gone, or `CLAIM_SECONDS` after the last claim. The threads of readers and the scheduler's thread all use this object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._ended: set[str] = set()

    def grant(self, request_id: str, seconds: float, seal: bytes) -> None:
        """Hold a request's blocks for a reader that claims them within so many seconds."""
        with self._lock:
            self._leases[request_id] = _Lease(time.monotonic() + seconds, seal)

    def grant_to(self, request_id: str, reader: Connection) -> None:
        """Hold a request's blocks for this reader, which has asked for them."""
        with self._lock:
            self._leases[request_id] = _Lease(time.monotonic() + CLAIM_SECONDS, b"", Counter([reader]))

    def claim(self, request_id: str, seal: bytes, reader: Connection) -> None:
        """A reader is about to read; nothing happens if it is mistaken about what there is."""
        with self._lock:
            if (lease := self._leases.get(request_id)) is not None and lease.seal == seal:
                lease.deadline = time.monotonic() + CLAIM_SECONDS
                lease.claims[reader] += 1

    def release(self, request_id: str, reader: Connection) -> bool:
        """A reader has read; returns whether the blocks were held for it until now."""
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or reader not in lease.claims:
                return False
            lease.claims -= Counter([reader])
            self._end_unless(lease.claims, request_id)
            return True

    def revoke(self, request_id: str) -> None:
        """End a lease that no reader has claimed."""
        with self._lock:
            if request_id in self._leases:
                self._end_unless(self._leases[request_id].claims, request_id)

    def drop(self, reader: Connection) -> None:
        """A reader is gone, and with it what it has claimed."""
        with self._lock:
            for request_id, lease in list(self._leases.items()):
                if lease.claims.pop(reader, 0):
                    self._end_unless(lease.claims, request_id)

    def _end_unless(self, is_needed: object, request_id: str) -> None:
        if not is_needed:
            del self._leases[request_id]
            self._ended.add(request_id)

    def take_ended(self) -> set[str]:
        """Requests whose blocks no reader needs any more."""
        with self._lock:
            now = time.monotonic()
            for request_id in [key for key, lease in self._leases.items() if lease.deadline <= now]:
                logger.warning("the KV of %s was not read in time: its blocks are given up", request_id)
                self._end_unless(False, request_id)
            ended, self._ended = self._ended, set()
            return ended

    def clear(self) -> None:
        """Forget all leases."""
        with self._lock:
            self._leases.clear()
            self._ended.clear()

    @property
    def next_end(self) -> float:
        """When the next lease ends, in seconds of the monotonic clock."""
        with self._lock:
            return min((lease.deadline for lease in self._leases.values()), default=float("inf"))

    @property
    def has_ended(self) -> bool:
        """True if `take_ended` would return a request."""
        return bool(self._ended) or self.next_end <= time.monotonic()

    def __len__(self) -> int:
        return len(self._leases)


def listen(
    host: str, port: int, identity: dict[str, str | int], introduction: Introduction, mailbox: Mailbox, leases: Leases
) -> Listener:
    """Listen for consumers.

    Args:
        mailbox: gets pairs of a `Consumer` and its message: `Prefill`, `Cancel`, or None at its end.
        leases: claims and releases act on them at once.
    """

    def serve(connection: Connection) -> None:
        connection.send(encode(introduction))
        theirs = _decode_consumer(connection.receive(PATIENCE))
        if not isinstance(theirs, Introduction):
            raise PeerLost(f"{connection.peer} does not introduce itself")
        consumer = Consumer(connection, theirs)
        try:
            while True:
                message = _decode_consumer(connection.receive())
                if isinstance(message, Claim):
                    leases.claim(message.request_id, message.seal, connection)
                    continue
                if isinstance(message, Release):
                    was_held = leases.release(message.request_id, connection)
                    connection.send(encode(Released(message.request_id, was_held)))
                mailbox.put((consumer, message))
        except msgspec.MsgspecError as error:
            raise PeerLost(f"{connection.peer} sends what this engine does not understand: {error}") from error
        finally:
            consumer.is_gone = True
            leases.drop(connection)
            mailbox.put((consumer, None))

    return Listener(host, port, secret(), identity, serve, PURPOSE, patience=PATIENCE)


@dataclass(eq=False)
class Consumer:
    """An engine that asks this one for KV."""

    connection: Connection
    introduction: Introduction
    is_gone: bool = False

    def tell(self, message: Prefilled) -> None:
        """Answer; nothing happens if it is gone."""
        try:
            with waiting_for_others():  # up to PATIENCE if it does not read
                self.connection.send(encode(message))
        except PeerLost as error:
            logger.info("an answer could not be delivered: %s", error)


@dataclass(eq=False)
class Producer:
    """An engine that this one asks for KV: a connection that is made, and read, by a thread of its own.

    Attributes:
        introduction: what it has said of itself; None before.
        error: why the connection is lost; "" while it is not.
    """

    host: str
    port: int
    identity: dict[str, str | int]
    own: Introduction
    on_message: Callable[[Producer, Any], None]
    introduction: Introduction | None = None
    error: str = ""
    _outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    _connection: Connection | None = None
    _closed: bool = False

    def __post_init__(self) -> None:
        name = f"{PURPOSE}-{self.host}:{self.port}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def tell(self, message: Prefill | Cancel | Claim | Release) -> None:
        """Send a message, as soon as there is a connection."""
        self._outbox.put(encode(message))

    def _run(self) -> None:
        try:
            connection = connect(self.host, self.port, secret(), self.identity, purpose=PURPOSE, patience=PATIENCE)
            self._connection = connection
            if self._closed:  # meanwhile
                raise PeerLost("closed")
            connection.send(encode(self.own))
            introduction = _decode_producer(connection.receive(PATIENCE))
            if not isinstance(introduction, Introduction):
                raise PeerLost(f"{connection.peer} does not introduce itself")
            self.introduction = introduction
            sender = threading.Thread(target=self._send, args=(connection,), name="kv-sender", daemon=True)
            sender.start()
            self.on_message(self, introduction)
            while True:
                self.on_message(self, _decode_producer(connection.receive()))
        except (OSError, msgspec.MsgspecError, ValueError) as error:  # PeerLost and HandshakeError are OSErrors
            self.error = f"the engine at {self.host}:{self.port}: {error}"
            if self._connection is not None:
                self._connection.close()
            self._outbox.put(None)
            self.on_message(self, None)

    def _send(self, connection: Connection) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                connection.send(message)
        except PeerLost:
            connection.close()  # the thread that receives says so

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        self._outbox.put(None)
        if self._connection is not None:
            self._connection.close()
