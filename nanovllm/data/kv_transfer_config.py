"""How an engine shares KV with other engines: plain data, under vLLM's names."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from nanovllm.data.checks import Keywords, check_fields, set_fields
from nanovllm.data.json import JsonObject

if TYPE_CHECKING:
    from nanovllm.data.config import EngineConfig

T = TypeVar("T")


@dataclass(frozen=True)
class KVTransferConfig(Keywords):
    """Settings of a connector.

    Attributes:
        kv_connector: a name in `factory.CONNECTORS`.
        kv_role: whether the engine computes KV for other engines, takes it from other engines, or
            both.
        kv_ip, kv_port: where other engines ask for it; port 0 is any free one.
        kv_load_failure_policy: what happens to a request whose KV does not come: "recompute" it
            here, or "fail".
        kv_connector_extra_config: settings of this connector alone.
        engine_id: the engine's name among all engines; unique.

    Raises:
        ValueError: a value that makes no sense; the message names the fix.
    """

    kv_connector: str = "local"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_ip: str = "127.0.0.1"
    kv_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_connector_extra_config: JsonObject = field(default_factory=dict)
    engine_id: str = ""

    def __post_init__(self) -> None:
        if not str(self.kv_role).startswith("kv_"):
            set_fields(self, kv_role=f"kv_{self.kv_role}")
        check_fields(self)
        set_fields(self, engine_id=self.engine_id or uuid.uuid4().hex)

    @classmethod
    def of(cls, config: EngineConfig) -> KVTransferConfig:
        """What the flags of an `EngineConfig` ask for.

        Raises:
            ValueError: `kv_transfer_config` is no JSON, or has a value that makes no sense.
        """
        flags = {"kv_role": config.kv_role, "kv_connector": config.kv_connector}
        given = {name: value for name, value in flags.items() if value not in (None, "none")}
        offloading = {"kv_connector": "offloading"} if config.kv_offloading_size else {}
        try:
            extra = msgspec.json.decode(config.kv_transfer_config or "{}", type=JsonObject)
            settings: JsonObject = {"engine_id": config.kv_engine_id} | offloading | extra | given
            kv_transfer = cls(**settings)
        except (TypeError, msgspec.DecodeError) as error:
            raise ValueError(
                f'kv_transfer_config must be JSON such as {{"kv_connector": "local"}}: {error}'
            ) from error
        rank = config.data_parallel_rank
        if not rank:
            return kv_transfer
        # Each engine of a data-parallel group shares KV under its own name and port.
        return replace(
            kv_transfer,
            engine_id=f"{kv_transfer.engine_id}-{rank}",
            kv_port=kv_transfer.kv_port + rank if kv_transfer.kv_port else 0,
        )

    @property
    def is_producer(self) -> bool:
        """The engine computes KV for other engines."""
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """The engine takes KV from other engines."""
        return self.kv_role != "kv_producer"

    def extra(self, name: str, default: T) -> T:
        """One setting from `kv_connector_extra_config`, of the same type as its default.

        Raises:
            ValueError: it has another type.
        """
        value: T = self.kv_connector_extra_config.get(name, default)
        kind = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool):
            raise ValueError(
                f"kv_connector_extra_config: {name} must be a {type(default).__name__}, got "
                f"{value!r}"
            )
        return value

    def extras(self, **defaults: object) -> JsonObject:
        """All settings from `kv_connector_extra_config`, each of the same type as its default.

        Raises:
            ValueError: there is one without a default, or of another type.
        """
        if unknown := sorted(self.kv_connector_extra_config.keys() - defaults.keys()):
            there = ", ".join(defaults)
            raise ValueError(
                f"kv_connector_extra_config: {unknown[0]!r} is unknown here; there are {there}"
            )
        return {name: self.extra(name, default) for name, default in defaults.items()}
