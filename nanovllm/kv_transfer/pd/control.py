"""Control messages between engines about KV: messages, mailboxes, leases and connections, and the
base class of an engine's producer and consumer.

Control messages go from engine to engine, KV from rank to rank (`transport`). Threads of this
module receive the messages. Messages for the scheduler wait in a mailbox until its next step. The
threads handle claims and releases of leases immediately."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.mailbox import Mailbox
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.kv_transfer.pd.plan import TransferMetadata
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.handshake import Credentials, Listener, connect, secret
from nanovllm.processes.activity import waiting_for_others
from nanovllm.processes.channel import PeerLost

logger = logging.getLogger(__name__)

# Seconds after which a peer that does not read a control message counts as lost. The limit is short
# because the engine's thread sends control messages between two steps.
PATIENCE = 2.0
# Seconds after which a claim expires: a reader that has not released the blocks by then hangs, with
# its connection open. If it resumes, the producer answers `was_held=False`, and the reader discards
# what it has read.
CLAIM_SECONDS = 300.0


# The addresses of an engine's ranks. Only their transports decode them, so that a wrong one fails
# a transfer, and not the connection between the engines.
Ranks = list[msgspec.Raw]


class Prefill(msgspec.Struct, tag="prefill"):
    """A consumer's request for the KV of these tokens.

    Attributes:
        transfer_id: unique among all engines.
        num_computed_tokens: leading tokens whose KV the consumer already has; a multiple of the
            block size.
        push: the consumer's blocks, from the first token on, that the producer's pushes fill; None:
            the consumer reads.
    """

    transfer_id: str
    token_ids: list[int]
    num_computed_tokens: int
    cache_salt: str | None = None
    priority: int = 0
    push: list[int] | None = None


class Prefilled(msgspec.Struct, tag="prefilled"):
    """A producer's answer: the blocks with the KV, which it holds until `Release`; or an error."""

    transfer_id: str
    block_ids: list[int] = []
    error: str = ""


class Claim(msgspec.Struct, tag="claim"):
    """A consumer is about to read a finished request's blocks. The producer holds them while the
    consumer is connected, for up to `CLAIM_SECONDS`.

    Attributes:
        seal: digest of the tokens and blocks that the consumer expects (`seal`). They come from a
            client, so the producer verifies them.
    """

    request_id: str
    seal: bytes


class Release(msgspec.Struct, tag="release"):
    """A consumer has read the blocks that it claimed or ordered, or no longer needs them."""

    request_id: str


class Released(msgspec.Struct, tag="released"):
    """The answer to `Release`: whether the producer held the blocks until now. If not, the consumer
    discards what it has read."""

    request_id: str
    was_held: bool


class FromConsumer(NamedTuple):
    """A consumer's message: a `Released` instead of a `Release`, and None after the consumer has
    disconnected."""

    sender: Consumer
    message: Prefill | Claim | Released | None


class FromProducer(NamedTuple):
    """A producer's ranks, once they are known, or its message; None once the connection is lost."""

    sender: Producer
    message: Ranks | Prefilled | Released | None


Mail = FromConsumer | FromProducer
M = TypeVar("M")

encode = msgspec.msgpack.Encoder().encode
_decode_consumer = msgspec.msgpack.Decoder(Prefill | Claim | Release).decode
_decode_producer = msgspec.msgpack.Decoder(Prefilled | Released).decode
_decode_ranks = msgspec.msgpack.Decoder(Ranks).decode


def credentials(identity: dict[str, str | int], ranks: Ranks) -> Credentials:
    """Return the credentials with which engines authenticate to each other. Both ends send the
    properties of their KV, and how to reach their ranks."""
    return Credentials(secret(), identity, encode(ranks), patience=PATIENCE)


def seal(token_ids: Sequence[int], block_ids: Sequence[int]) -> bytes:
    """Return a digest of tokens, and of the blocks that hold their KV."""
    return hashlib.sha256(encode([list(token_ids), list(block_ids)])).digest()


@dataclass
class _Lease:
    """A reservation of blocks until the deadline or until the last reader releases them, whichever
    comes first.

    Attributes:
        readers: a connection for each claim or order of the blocks; None stands for the reader that
            has not claimed them yet.
    """

    deadline: float
    seal: bytes
    readers: list[Connection | None]

    @property
    def end(self) -> float:
        """When the lease ends, in seconds of the monotonic clock; 0 if it has ended."""
        return self.deadline if self.readers else 0.0


class Leases:
    """Leases of the blocks of finished requests, by request id.

        unclaimed    ends at its deadline
        claimed      ends when each reader that claimed it has released it or disconnected, or
                     `CLAIM_SECONDS` after the last claim

    Thread-safe: the readers' threads and the scheduler's thread use one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    def grant(self, request_id: str, seconds: float, seal: bytes) -> None:
        """Hold a request's blocks for a reader that claims them within `seconds`."""
        with self._lock:
            self._leases[request_id] = _Lease(time.monotonic() + seconds, seal, [None])

    def grant_to(self, request_id: str, reader: Connection) -> None:
        """Hold a request's blocks for the reader that has ordered them."""
        self.grant(request_id, CLAIM_SECONDS, b"")
        self.claim(request_id, b"", reader)

    def claim(self, request_id: str, seal: bytes, reader: Connection) -> None:
        """Extend a lease for a reader that is about to read. Do nothing if there is no such lease,
        or if its seal is different."""
        with self._lock:
            if (
                (lease := self._leases.get(request_id)) is not None
                and lease.readers
                and lease.seal == seal
            ):
                lease.deadline = time.monotonic() + CLAIM_SECONDS
                lease.readers = [*filter(None, lease.readers), reader]

    def release(self, request_id: str, reader: Connection | None = None) -> bool:
        """End a reader's hold of the blocks; None is the reader that has not claimed them.

        Returns:
            Whether the blocks were held for it until now.
        """
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or reader not in lease.readers:
                return False
            lease.readers.remove(reader)
            return True

    def drop(self, reader: Connection) -> None:
        """Release all claims of a reader that has disconnected."""
        with self._lock:
            for lease in self._leases.values():
                lease.readers = [other for other in lease.readers if other is not reader]

    def take_ended(self) -> set[str]:
        """Remove and return the requests whose leases have ended."""
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
        """When the next lease ends, in seconds of the monotonic clock; infinity without leases."""
        with self._lock:
            return min((lease.end for lease in self._leases.values()), default=float("inf"))


# ------------------------------------------------------------------------------------- the two ends


def _send(connection: Connection, message: msgspec.Struct) -> None:
    """Send a message. This blocks for up to `PATIENCE` if the other engine does not read. If the
    engine is gone, log it and close the connection."""
    try:
        connection.send(encode(message))
    except (PeerLost, ValueError) as error:
        logger.info("a message could not be delivered: %s", error)
        connection.close()


@dataclass(eq=False)
class Consumer:
    """An engine that requests KV from this one.

    Attributes:
        ranks: how to reach its ranks.
    """

    connection: Connection
    ranks: Ranks

    def tell(self, message: Prefilled | Released) -> None:
        """Send an answer; do nothing if the engine is gone."""
        with waiting_for_others():
            _send(self.connection, message)


def listen(
    host: str, port: int, credentials: Credentials, mailbox: Mailbox[Mail], leases: Leases
) -> Listener:
    """Listen for consumers.

    Args:
        mailbox: gets the consumers' messages.
        leases: claims and releases change them immediately.
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
    """An engine from which this one requests KV. A thread connects to it, and then receives its
    messages.

    Args:
        mailbox: gets its messages.

    Attributes:
        ranks: how to reach its ranks; None until the scheduler has heard of the connection.
        error: why the connection is lost; empty until then.
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
                mailbox.put(FromProducer(self, _decode_ranks(connection.hello)))
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
        """Send a message, or queue it until the connection is made."""
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
    """Base class of an engine's producer and consumer.

    Attributes:
        address: where consumers reach this engine; None if it is not a producer.
        ranks: the addresses of this engine's ranks.
        credentials: for connections to other engines.
        mailbox: gets messages from the threads of the connections.
        metadata: for the ranks, in the next step.
    """

    def __init__(self, config: EngineConfig, identity: dict[str, str | int], ranks: Ranks) -> None:
        super().__init__(config, identity, ranks)
        # Checks that these settings are numbers, and that there are no others.
        self.kv_transfer.extras(
            lease_seconds=0.0, min_remote_tokens=0, prefill_timeout=0.0, timeout=0.0
        )
        self.identity = {"kv_connector": self.kv_transfer.kv_connector, **self.identity}
        self.address: tuple[str, int] | None = None
        self.ranks = ranks
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
