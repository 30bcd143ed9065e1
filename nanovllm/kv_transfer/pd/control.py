"""What engines tell each other about KV: messages, mailboxes, leases and connections; and what both
sides of an engine share.

Control messages go from engine to engine, KV from rank to rank (`transport`). Threads of this
module receive the messages. Those for the scheduler wait in a mailbox until its next step; claims
and releases of leases are answered at once."""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from nanovllm.data.config import EngineConfig
from nanovllm.data.json import JsonObject
from nanovllm.distributed.activity import waiting_for_others
from nanovllm.distributed.life_signs import PeerLost
from nanovllm.kv.connector import KVConnectorScheduler
from nanovllm.kv_transfer.pd.plan import TransferMetadata
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.handshake import Credentials, Listener, connect, secret

logger = logging.getLogger(__name__)

# A peer that does not take a control message for so long is lost: an engine's thread sends them
# between two steps.
PATIENCE = 2.0
# A reader that has claimed blocks and has not read them after so long has stopped without losing
# its connection. Should it go on, it is told that what it has read is worth nothing.
CLAIM_SECONDS = 300.0


Ranks = list[JsonObject]  # how each rank of an engine is reached


class Prefill(msgspec.Struct, tag="prefill"):
    """A consumer orders the KV of these tokens.

    Attributes:
        transfer_id: unique among all engines.
        num_computed_tokens: so many at the beginning are not needed; a whole number of blocks.
        push: the consumer's blocks, from the first token on, into which KV is to be written; None:
            it will read.
    """

    transfer_id: str
    token_ids: list[int]
    num_computed_tokens: int
    cache_salt: str | None = None
    priority: int = 0
    push: list[int] | None = None


class Prefilled(msgspec.Struct, tag="prefilled"):
    """A producer's answer: the blocks in which the KV is, and which stay as they are until
    `Release`; or why there are none."""

    transfer_id: str
    block_ids: list[int] = []
    error: str = ""


class Claim(msgspec.Struct, tag="claim"):
    """A consumer is about to read these blocks: the lease does not end while the consumer is
    connected.

    Attributes:
        seal: of the tokens and blocks that it believes to find there (`seal`): its client has told
            it, and may be wrong.
    """

    request_id: str
    seal: bytes


class Release(msgspec.Struct, tag="release"):
    """A consumer has read what it has claimed or ordered, or no longer wants to."""

    request_id: str


class Released(msgspec.Struct, tag="released"):
    """The answer: whether these blocks were held for it until now. If not, what was read is worth
    nothing."""

    request_id: str
    was_held: bool


class FromConsumer(NamedTuple):
    """A consumer's message, or in place of `Release` the answer to it; None at the consumer's
    end."""

    sender: Consumer
    message: Prefill | Claim | Released | None


class FromProducer(NamedTuple):
    """A producer's ranks, when they are known, or its message; None when it is lost."""

    sender: Producer
    message: Ranks | Prefilled | Released | None


Mail = FromConsumer | FromProducer
M = TypeVar("M")

encode = msgspec.msgpack.Encoder().encode
_decode_consumer = msgspec.msgpack.Decoder(Prefill | Claim | Release).decode
_decode_producer = msgspec.msgpack.Decoder(Prefilled | Released).decode
_decode_ranks = msgspec.msgpack.Decoder(Ranks).decode


def credentials(identity: dict[str, str | int], ranks: Ranks) -> Credentials:
    """With which engines connect to each other. Both ends say what their KV is made of, and how
    their ranks are reached."""
    return Credentials(secret(), identity, encode(ranks), patience=PATIENCE)


def seal(token_ids: Sequence[int], block_ids: Sequence[int]) -> bytes:
    """A digest of tokens, and of the blocks that hold their keys and values."""
    return hashlib.sha256(encode([list(token_ids), list(block_ids)])).digest()


class Mailbox(Generic[M]):
    """Messages from many threads to one. `fileno` is readable if, and only if, there are any, so
    that the thread can wait for them together with other sources."""

    def __init__(self) -> None:
        self._messages: list[M] = []
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()

    def fileno(self) -> int:
        """To be polled."""
        return self._reader.fileno()

    def put(self, message: M) -> None:
        """From any thread; nothing happens once the mailbox is closed."""
        with self._lock, suppress(OSError):
            if not self._messages:
                self._writer.send(b"!")
            self._messages.append(message)

    def take(self) -> list[M]:
        """All messages so far."""
        with self._lock:
            if self._messages:
                self._reader.recv(1)
            messages = self._messages
            self._messages = []
            return messages

    @property
    def is_empty(self) -> bool:
        """Nothing to take."""
        return not self._messages

    def close(self) -> None:
        """Drop what is there, and what is put later."""
        with self._lock:
            self._messages = []
            self._reader.close()
            self._writer.close()


@dataclass
class _Lease:
    """Blocks that are held until the deadline, and not longer than there are readers.

    Attributes:
        readers: that have claimed or ordered the blocks, perhaps several times; None: the one that
            is expected.
    """

    deadline: float
    seal: bytes
    readers: list[Connection | None]

    @property
    def end(self) -> float:
        """When it ends, or 0 if it has ended."""
        return self.deadline if self.readers else 0.0


class Leases:
    """The blocks of requests that have ended, by their ids, and until when they are held for a
    reader.

    A lease that no reader claims ends at its deadline; a claimed one ends when all readers that
    have claimed it have released it or are gone, or `CLAIM_SECONDS` after the last claim. The
    threads of readers and the scheduler's thread all use this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    def grant(self, request_id: str, seconds: float, seal: bytes) -> None:
        """Hold a request's blocks for a reader that claims them within so many seconds."""
        with self._lock:
            self._leases[request_id] = _Lease(time.monotonic() + seconds, seal, [None])

    def grant_to(self, request_id: str, reader: Connection) -> None:
        """Hold a request's blocks for this reader, which has asked for them."""
        self.grant(request_id, CLAIM_SECONDS, b"")
        self.claim(request_id, b"", reader)

    def claim(self, request_id: str, seal: bytes, reader: Connection) -> None:
        """A reader is about to read; nothing happens if it is mistaken about what there is."""
        with self._lock:
            if (
                (lease := self._leases.get(request_id)) is not None
                and lease.readers
                and lease.seal == seal
            ):
                lease.deadline = time.monotonic() + CLAIM_SECONDS
                lease.readers = [*filter(None, lease.readers), reader]

    def release(self, request_id: str, reader: Connection | None = None) -> bool:
        """A reader has read, or the expected one does not come; returns whether the blocks were
        held for it until now."""
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or reader not in lease.readers:
                return False
            lease.readers.remove(reader)
            return True

    def drop(self, reader: Connection) -> None:
        """A reader is gone, and with it what it has claimed."""
        with self._lock:
            for lease in self._leases.values():
                lease.readers = [other for other in lease.readers if other is not reader]

    def take_ended(self) -> set[str]:
        """Requests whose blocks no reader needs any more."""
        with self._lock:
            now = time.monotonic()
            ended = {key: lease for key, lease in self._leases.items() if lease.end <= now}
            for request_id, lease in ended.items():
                del self._leases[request_id]
                if lease.readers:
                    logger.warning(
                        "the KV of %s was not read before its lease expired: its blocks are freed",
                        request_id,
                    )
            return set(ended)

    def clear(self) -> None:
        """Forget all leases."""
        with self._lock:
            self._leases.clear()

    @property
    def next_end(self) -> float:
        """From when on `take_ended` returns a request, in seconds of the monotonic clock."""
        with self._lock:
            return min((lease.end for lease in self._leases.values()), default=float("inf"))


# ------------------------------------------------------------------------------------- the two ends


def _send(connection: Connection, message: msgspec.Struct) -> None:
    """Send a message, which takes up to PATIENCE if the other engine does not read; nothing happens
    if it is gone."""
    try:
        connection.send(encode(message))
    except (PeerLost, ValueError) as error:
        logger.info("a message could not be delivered: %s", error)
        connection.close()


@dataclass(eq=False)
class Consumer:
    """An engine that asks this one for KV.

    Attributes:
        ranks: how its ranks are reached.
    """

    connection: Connection
    ranks: Ranks

    def tell(self, message: Prefilled | Released) -> None:
        """Answer; nothing happens if it is gone."""
        with waiting_for_others():
            _send(self.connection, message)


def listen(
    host: str, port: int, credentials: Credentials, mailbox: Mailbox[Mail], leases: Leases
) -> Listener:
    """Listen for consumers.

    Args:
        mailbox: gets the consumers' messages.
        leases: claims and releases act on them at once.
    """

    def serve(connection: Connection) -> None:
        consumer = Consumer(connection, _decode_ranks(connection.hello))
        try:
            while True:
                message = _decode_consumer(connection.receive())
                if isinstance(message, Claim):
                    leases.claim(message.request_id, message.seal, connection)
                elif isinstance(message, Release):
                    message = Released(
                        message.request_id, leases.release(message.request_id, connection)
                    )
                    consumer.tell(message)
                mailbox.put(FromConsumer(consumer, message))
        finally:
            connection.close()
            leases.drop(connection)
            mailbox.put(FromConsumer(consumer, None))

    return Listener(host, port, credentials, serve)


class Producer:
    """An engine that this one asks for KV. A thread connects to it, and then receives its messages.

    Args:
        mailbox: gets its messages.

    Attributes:
        ranks: how its ranks are reached; None before this is known.
        error: why the engine is lost; empty while it is not.
    """

    def __init__(
        self, address: tuple[str, int], credentials: Credentials, mailbox: Mailbox[Mail]
    ) -> None:
        self.ranks: Ranks | None = None
        self.error = ""
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._unsent: list[Prefill | Claim | Release] = []
        arguments = address, credentials, mailbox
        threading.Thread(
            target=self._receive, args=arguments, name="kv-control", daemon=True
        ).start()

    def _receive(
        self, address: tuple[str, int], credentials: Credentials, mailbox: Mailbox[Mail]
    ) -> None:
        try:
            with closing(connect(*address, credentials)) as connection:
                self.ranks = _decode_ranks(connection.hello)
                mailbox.put(FromProducer(self, self.ranks))
                with self._lock:
                    self._connection = connection
                    for message in self._unsent:
                        _send(connection, message)
                while not self.error:
                    mailbox.put(FromProducer(self, _decode_producer(connection.receive())))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self.error = "the engine at {}:{}: {}".format(*address, error)
        self._connection = None  # the last reference to a connection closes its socket
        mailbox.put(FromProducer(self, None))

    def tell(self, message: Prefill | Claim | Release) -> None:
        """Send a message, as soon as there is a connection."""
        with waiting_for_others(), self._lock:
            if self._connection is None:
                self._unsent.append(message)
            else:
                _send(self._connection, message)

    def close(self) -> None:
        """End the connection."""
        self.error = "this end is closed"
        if connection := self._connection:
            connection.close()


class Side(KVConnectorScheduler):
    """What both sides of an engine, the consumer and the producer, have in common.

    Attributes:
        address: where consumers can ask this engine; None if it is no producer.
        credentials: for connections to other engines.
        mailbox: gets messages from the threads of the connections.
        metadata: for the ranks, with the next step.
    """

    def __init__(self, config: EngineConfig, identity: dict[str, str | int], ranks: Ranks) -> None:
        super().__init__(config, identity, ranks)
        self.kv_transfer.extras(
            lease_seconds=0.0, min_remote_tokens=0, prefill_timeout=0.0, timeout=0.0
        )  # checks them
        self.identity = {"kv_connector": self.kv_transfer.kv_connector, **self.identity}
        self.address: tuple[str, int] | None = None
        self.credentials = credentials(self.identity, ranks)
        self.mailbox: Mailbox[Mail] = Mailbox()
        self.metadata = TransferMetadata()
        self.sources = [self.mailbox.fileno()]

    def forget_requests(self) -> None:
        """See `KVConnectorScheduler.forget_requests`."""
        super().forget_requests()
        self.metadata = TransferMetadata()

    def close(self) -> None:
        """See `KVConnectorScheduler.close`."""
        self.mailbox.close()
