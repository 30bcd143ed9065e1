"""Defines the messages that ranks exchange when they move KV blocks."""

import msgspec

from nanovllm.kv_transfer.layout import KVLayout


class Refused(Exception):
    """A rank refuses a peer's request; the message says why, and the connection can still be
    used."""


class Address(msgspec.Struct, frozen=True):
    """Where a rank can be reached, and its layout. `id` changes when the process restarts."""

    host: str
    port: int
    id: str
    layout: KVLayout


class Hello(msgspec.Struct):
    """What both ends say in the handshake. `memory` says how the cache can be accessed directly, in
    the transport's own format."""

    id: str
    layout: KVLayout
    memory: bytes = b""


class Answer(msgspec.Struct, tag="answer"):
    """The answer to a request: empty if it is granted, else why it is refused."""

    error: str = ""


class Fetch(msgspec.Struct, tag="fetch"):
    """Asks the owner for blocks of some layers. It answers as the transport says: see
    `Link.serve_fetch`.

    Attributes:
        head: counted from the owner's first head.
    """

    first_layer: int
    end_layer: int
    head: int
    num_heads: int
    block_ids: list[int]


class Push(msgspec.Struct, tag="push"):
    """Offers blocks of some layers, which have just been computed, for a transfer that the receiver
    expects. It reads them, and then answers.

    Attributes:
        block_ids: the receiver's.
        source_ids: the sender's.
        is_last: the sender pushes no more for this transfer.
    """

    transfer_id: str
    first_layer: int
    end_layer: int
    block_ids: list[int]
    source_ids: list[int]
    is_last: bool = False


class Moved(msgspec.Struct, tag="moved"):
    """The blocks of a granted `Fetch` have been read, by direct access. It has no answer."""


class GiveUp(msgspec.Struct, tag="give up"):
    """The sender pushes no more for this transfer, because of an error."""

    transfer_id: str
    error: str


Message = Fetch | Push | Moved | GiveUp | Answer

encode = msgspec.msgpack.Encoder().encode
decode_address = msgspec.msgpack.Decoder(Address).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
decode = _decode_message.decode
