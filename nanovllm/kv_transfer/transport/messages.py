"""What ranks that exchange KV blocks say to one another."""

from __future__ import annotations

import msgspec

from nanovllm.kv.layout import KVLayout


class Address(msgspec.Struct, frozen=True):
    """Where a rank can be reached, and what it has. `id` is of this very process: after a restart it has another one."""

    kind: str
    host: str
    port: int
    id: str
    layout: KVLayout


class Hello(msgspec.Struct, tag="hello"):
    """What both ends say first. `memory`: how the other one may reach the cache by itself; each transport has its own way."""

    id: str
    layout: KVLayout
    memory: bytes = b""


class Answer(msgspec.Struct, tag="answer"):
    """Yes, or why not."""

    error: str = ""


class Fetch(msgspec.Struct, tag="fetch"):
    """Send me blocks of these layers. For each layer comes an `Answer`, with the blocks as its payload.

    Attributes:
        head: of the owner, counted from its first one.
    """

    first_layer: int
    end_layer: int
    head: int
    num_heads: int
    block_ids: list[int]


class Push(msgspec.Struct, tag="push"):
    """May I write into these blocks of yours? An `Answer` comes, and if it is yes, I write and then say `Moved`."""

    transfer_id: str
    first_layer: int
    end_layer: int
    head: int
    num_heads: int
    block_ids: list[int]

    @property
    def layers(self) -> range:
        """Those that are to be written."""
        return range(self.first_layer, self.end_layer)


class Moved(msgspec.Struct, tag="moved"):
    """What was allowed has been read or written, or is the payload of this message. There is no answer."""


class Finish(msgspec.Struct, tag="finish"):
    """I shall write no more for this transfer, since all is written or because of an error; answered."""

    transfer_id: str
    error: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_request = msgspec.msgpack.Decoder(Fetch | Push | Moved | Finish).decode
