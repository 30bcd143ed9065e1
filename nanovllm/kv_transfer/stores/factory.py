"""Opens the stores of a connector, as its settings say."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.kv_transfer.stores.store import HostStore, KVStore, TieredStore

GIB = 1 << 30


def open_store(
    config: EngineConfig, kv_transfer: KVTransferConfig, entry_bytes: int, shared_only: bool = False
) -> KVStore | None:
    """Open the store of one rank.

    Args:
        entry_bytes: a rank's share of a block.
        shared_only: open only the store that other processes can access too, for look-ups; None if there is none.

    Raises:
        ValueError: settings that make no sense or a store that cannot be used; the message names the fix.
    """
    if kv_transfer.kv_connector == "pool":
        if config.kv_offloading_size:
            raise ValueError("leave one of them out: kv_offloading_size has no effect with kv_connector 'pool'")
        return _open_pool(kv_transfer, entry_bytes, shared_only)
    kv_transfer.check_extra("disk_path", "disk_gib")
    path, disk_gib = kv_transfer.extra("disk_path", ""), kv_transfer.extra("disk_gib", 16.0)
    disk = _open_folder(path, disk_gib) if path else None
    if shared_only:
        return disk
    if not config.kv_offloading_size:
        raise ValueError("kv_connector 'offloading' needs host memory: set kv_offloading_size, in GiB")
    host_bytes = int(config.kv_offloading_size * GIB) // config.world_size
    host = HostStore(host_bytes, entry_bytes, pin_memory=config.device != "cpu" and torch.cuda.is_available())
    return TieredStore(host, disk) if disk is not None else host


def _open_folder(path: str, gib: float) -> KVStore:
    from nanovllm.kv_transfer.stores.folder import FolderStore

    if gib <= 0:
        raise ValueError(f"a folder of KV blocks needs more than 0 GiB, got {gib}")
    return FolderStore(path, int(gib * GIB))


def _open_pool(kv_transfer: KVTransferConfig, entry_bytes: int, only_to_look: bool) -> KVStore:
    kind = kv_transfer.extra("store", "folder")
    if kind == "folder":
        kv_transfer.check_extra("store", "path", "gib")
        path = kv_transfer.extra("path", "")
        if not path:
            raise ValueError('a pool in a folder needs kv_connector_extra_config: {"path": "/a/folder"}')
        return _open_folder(path, kv_transfer.extra("gib", 16.0))
    if kind == "redis":
        from nanovllm.kv_transfer.stores.redis import RedisStore

        kv_transfer.check_extra("store", "url", "namespace")
        url = kv_transfer.extra("url", "redis://127.0.0.1:6379/0")
        return RedisStore(url, kv_transfer.extra("namespace", "nanovllm:"))
    if kind == "mooncake":
        from nanovllm.kv_transfer.stores.mooncake import MooncakeStore

        settings: dict[str, Any] = dict(kv_transfer.kv_connector_extra_config)
        del settings["store"]
        if only_to_look:
            settings["global_segment_size"] = 0
        return MooncakeStore(entry_bytes, settings)
    raise ValueError(f"kv_connector_extra_config: store must be folder, redis or mooncake, got {kind!r}")
