"""Defines the messages that ranks exchange when they move KV blocks, and how they are received."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame, PeerLost

T = TypeVar("T")


class Refused(Exception):
    """A rank refuses a peer's request; the message says why, and the connection can still be used."""


class Address(msgspec.Struct, frozen=True):
    """Where a rank can be reached, and its layout. `id` changes when the process restarts."""

    host: str
    port: int
    id: str
    layout: KVLayout


class Hello(msgspec.Struct, tag="hello"):
    """The first message of both ends. `memory` says how the peer can access the cache directly, in the transport's own format."""

    id: str
    layout: KVLayout
    memory: bytes = b""


class Answer(msgspec.Struct, tag="answer"):
    """The answer to a request: empty if it is granted, else why it is refused."""

    error: str = ""


class Fetch(msgspec.Struct, tag="fetch"):
    """Asks the owner to send blocks of some layers. For each layer it sends an `Answer` with the blocks as payload.

    Attributes:
        head: counted from the owner's first head.
    """

    first_layer: int
    end_layer: int
    head: int
    num_heads: int
    block_ids: list[int]

    @property
    def layers(self) -> range:
        """The layers to be moved."""
        return range(self.first_layer, self.end_layer)


class Push(Fetch, tag="push"):
    """Asks to write into the receiver's blocks. After its `Answer` the sender writes, and then sends `Moved`."""

    transfer_id: str


class Moved(msgspec.Struct, tag="moved"):
    """The allowed blocks have been read or written, or are the payload of this message. It has no answer."""


class Finish(msgspec.Struct, tag="finish"):
    """The sender writes no more for this transfer, because all is written or because of an error."""

    transfer_id: str
    error: str = ""


Request = Fetch | Push | Moved | Finish

encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def receive(connection: Connection, decode: Callable[[bytes], T], timeout: float | None = None) -> T:
    """Receive and decode the peer's next message.

    Raises:
        PeerLost: no message came in time.
        CorruptFrame: the message makes no sense.
    """
    try:
        return decode(connection.receive(timeout))
    except TimeoutError:
        raise PeerLost(f"no message from {connection.peer} within {timeout:g} s") from None
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"{connection.peer} sent a message that makes no sense: {error}") from error


def ask(connection: Connection, request: Fetch | Push | Finish, timeout: float) -> None:
    """Send a request, and wait until the peer grants it; raises as `receive_answer`."""
    connection.send(encode(request))
    receive_answer(connection, timeout)


def receive_answer(connection: Connection, timeout: float) -> None:
    """Wait until the peer grants a request; a payload of the answer has still to be received.

    Raises:
        Refused: the peer refuses the request.
        PeerLost: as in `receive`.
    """
    if error := receive(connection, _decode_answer, timeout).error:
        raise Refused(error)
