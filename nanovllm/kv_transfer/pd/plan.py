"""What a request says of its KV, and what the ranks are told to do about it.

Front ends check requests with this module, in the middle of other requests: it imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from nanovllm.data.json import JsonObject
from nanovllm.data.request import Request

BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class TransferParams(msgspec.Struct, kw_only=True):
    """`kv_transfer_params` of a request, under vLLM's names.

    Attributes:
        do_remote_decode: another engine will go on with this request: hold its KV for it.
        do_remote_prefill: another engine has computed, or will compute, the prompt's KV.
        remote_request_id, remote_block_ids, remote_host, remote_port: prefill first: where the KV
            is, as the producer has said.
        prefill_addresses: decode first: host and port of producers that can be asked,
            `KVConnectorScheduler.information`.
        kv_direction: decode first: whether the consumer reads layer by layer (push), or all at once
            (pull).
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: str | None = None
    remote_block_ids: list[BlockId] | None = None
    remote_host: str | None = None
    remote_port: Port | None = None
    prefill_addresses: list[tuple[str, Port]] = []
    kv_direction: Literal["push", "pull"] = "push"

    @property
    def is_prefill_first(self) -> bool:
        """The KV is there already."""
        return self.do_remote_prefill and self.remote_request_id is not None

    @classmethod
    def of(cls, request: Request) -> TransferParams:
        """What came with a request, if anything.

        Raises:
            msgspec.ValidationError: nonsense came.
        """
        return msgspec.convert(request.kv_transfer_params or {}, cls)

    @classmethod
    def check(cls, given: object, kv_role: str) -> None:
        """See whether an engine of this role can do what came with a request.

        Raises:
            ValueError: it cannot, or nonsense came; the message names the field.
        """
        try:
            params = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"kv_transfer_params: {error}") from error
        for name, role in ("do_remote_decode", "producer"), ("do_remote_prefill", "consumer"):
            if getattr(params, name) and kv_role not in ("kv_both", f"kv_{role}"):
                raise ValueError(
                    f"kv_transfer_params: {name} needs an engine with --kv-role {role} or both"
                )
        if params.is_prefill_first and None in (
            params.remote_host,
            params.remote_port,
            params.remote_block_ids,
        ):
            raise ValueError(
                "kv_transfer_params: remote_request_id needs remote_host, remote_port, "
                "remote_block_ids"
            )


@dataclass
class Move:
    """Blocks between this engine's ranks and another's.

    Attributes:
        peers: addresses of all ranks of the other engine.
    """

    transfer_id: str
    peers: list[JsonObject]
    local_block_ids: list[int]
    remote_block_ids: list[int] = field(default_factory=list)
    is_last: bool = False


@dataclass
class TransferMetadata:
    """What the ranks have to do: read, let peers write, push what this step computes, stop."""

    reads: list[Move] = field(default_factory=list)
    expects: list[Move] = field(default_factory=list)
    pushes: list[Move] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
