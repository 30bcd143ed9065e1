"""A request's KV transfer parameters, and the instructions for the ranks.

This module does not import torch: front ends use it to check requests, and must not block other
requests while torch loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from nanovllm.core.request import Request

BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class TransferParams(msgspec.Struct, kw_only=True):
    """`kv_transfer_params` of a request, under vLLM's names.

    Attributes:
        do_remote_decode: another engine continues this request, so hold its KV.
        do_remote_prefill: another engine has computed, or will compute, the prompt's KV.
        remote_request_id, remote_block_ids, remote_host, remote_port: prefill first: where the KV
            is, from the producer's answer.
        prefill_addresses: decode first: host and port of the available producers; see
            `KVConnectorScheduler.information`.
        kv_direction: decode first: the KV moves layer by layer while the producer computes (push),
            or in one read after the prefill (pull).
        virtual_time: see `RemoteKV`.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: str | None = None
    remote_block_ids: list[BlockId] | None = None
    remote_host: str | None = None
    remote_port: Port | None = None
    prefill_addresses: list[tuple[str, Port]] = []
    kv_direction: Literal["push", "pull"] = "push"
    virtual_time: tuple[int, int] | None = None

    @property
    def is_prefill_first(self) -> bool:
        """True if the producer has computed the KV already."""
        return self.do_remote_prefill and self.remote_request_id is not None

    @classmethod
    def of(cls, request: Request) -> TransferParams:
        """Return the parameters of a request, with defaults for those that it does not have.

        Raises:
            msgspec.ValidationError: they are not valid.
        """
        return msgspec.convert(request.kv_transfer_params or {}, cls)

    @classmethod
    def check(cls, given: object, kv_role: str) -> None:
        """Check the parameters of a request for an engine of this role.

        Raises:
            ValueError: they are not valid, or the role does not allow them; the message names the
                field.
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
    """A transfer of blocks between the ranks of this engine and of another.

    Attributes:
        peers: addresses of all ranks of the other engine, as `Transport` takes them.
    """

    transfer_id: str
    peers: list[msgspec.Raw]
    local_block_ids: list[int]
    remote_block_ids: list[int] = field(default_factory=list)
    is_last: bool = False


@dataclass
class TransferMetadata:
    """Instructions for the ranks: reads to begin, pushes to expect, pushes of KV that this step
    computes, and transfers to cancel."""

    reads: list[Move] = field(default_factory=list)
    expects: list[Move] = field(default_factory=list)
    pushes: list[Move] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
