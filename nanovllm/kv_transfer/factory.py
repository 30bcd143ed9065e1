"""Which connectors there are, and how the two halves of one are made."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.data.kv_transfer_config import KVTransferConfig

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.data.config import EngineConfig
    from nanovllm.kv.connector import KVConnectorScheduler, KVConnectorWorker
    from nanovllm.models.config import ModelConfig
    from nanovllm.runner.runner import ModelRunner

# Name -> its two halves, module and class; imported when chosen.
_OFFLOADING = ("offloading:OffloadingScheduler", "offloading_worker:OffloadingWorker")
CONNECTORS = {
    "local": ("disaggregated:DisaggregatedScheduler", "disaggregated:DisaggregatedWorker"),
    "nixl": ("disaggregated:DisaggregatedScheduler", "disaggregated:NixlWorker"),
    "offloading": _OFFLOADING,
    "pool": _OFFLOADING,
    "blend": ("blending:BlendScheduler", "blending:BlendWorker"),
}


def _load(kv_transfer: KVTransferConfig, half: int) -> Any:
    name = kv_transfer.kv_connector
    if name not in CONNECTORS:
        raise ValueError(f"kv_connector must be one of {', '.join(CONNECTORS)}; got {name!r}")
    module, class_name = CONNECTORS[name][half].split(":")
    return getattr(importlib.import_module(f"nanovllm.kv_transfer.{module}"), class_name)


def create_scheduler_connector(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path, ranks: Sequence[Any]
) -> KVConnectorScheduler:
    """The scheduler's half.

    Args:
        folder: the checkpoint.
        ranks: what their halves say of themselves, see `KVConnectorWorker.get_handshake_metadata`.

    Raises:
        ValueError: there is no such connector; the message names those that there are. Or its settings make no sense.
    """
    from nanovllm.kv_transfer.transport.identity import kv_identity

    assert config.kv_transfer is not None
    identity = kv_identity(config, model_config, folder)
    return _load(config.kv_transfer, 0)(config, config.kv_transfer, identity, ranks)


def cache_maker(config: EngineConfig) -> Callable[..., Tensor] | None:
    """What makes a layer's cache `(shape, dtype, device)` where the connector wants it; None if there is none."""
    return _load(config.kv_transfer, 1).empty_kv_cache if config.kv_transfer is not None else None


def create_worker_connector(runner: ModelRunner, kv_caches: dict[int, Tensor]) -> KVConnectorWorker | None:
    """A rank's half, if KV is shared.

    Args:
        runner: the rank's.
        kv_caches: its caches, by the layer's number in the model.

    Raises:
        ValueError: see `create_scheduler_connector`.
    """
    config, model_config = runner.config, runner.model_config
    if config.kv_transfer is None:
        return None
    from nanovllm.distributed.groups import get_tp_group
    from nanovllm.kv_transfer.transport.layout import KVLayout

    group, cache = get_tp_group(), next(iter(kv_caches.values()))
    layout = KVLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=0 if model_config.kv_lora_rank else model_config.num_kv_heads,
        block_size=config.block_size,
        width=cache.shape[-1],
        dtype=str(cache.dtype).removeprefix("torch."),
        num_blocks=len(cache),
        first_layer=min(kv_caches),
        end_layer=max(kv_caches) + 1,
        tp_rank=group.rank_in_group,
        tp_size=group.world_size,
    )
    connector: KVConnectorWorker = _load(config.kv_transfer, 1)(config, config.kv_transfer, layout)
    connector.register_kv_caches(kv_caches)
    connector.register_model(runner.model, runner.backend)
    return connector
