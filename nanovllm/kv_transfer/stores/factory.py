"""Opens the stores of a connector, as its settings say."""

from __future__ import annotations

import psutil
import torch

from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.kv_transfer.stores.folder import FolderStore
from nanovllm.kv_transfer.stores.servers import MooncakeStore, RedisStore
from nanovllm.kv_transfer.stores.store import HostStore, KVStore

GIB = 1 << 30


def open_store(config: EngineConfig, entry_bytes: int, shared_only: bool = False) -> KVStore | None:
    """Open the store of one rank.

    Args:
        entry_bytes: a rank's share of a block.
        shared_only: open only the store that other processes can access too, for look-ups; None if there is none.

    Raises:
        ValueError: settings that make no sense or a store that cannot be used; the message names the fix.
    """
    kv_transfer, size = config.kv_transfer, config.kv_offloading_size
    assert kv_transfer is not None
    if kv_transfer.kv_connector == "pool":
        if size:
            raise ValueError("leave one of them out: kv_offloading_size has no effect with kv_connector 'pool'")
        return _open_pool(kv_transfer, entry_bytes, shared_only)
    kv_transfer.check_extra("disk_path", "disk_gib")
    disk = _open_folder(kv_transfer, "disk_path", "disk_gib")
    if shared_only:
        return disk
    if not size:
        raise ValueError("kv_connector 'offloading' needs host memory: set kv_offloading_size, in GiB")
    available, num_bytes = psutil.virtual_memory().available, int(size * GIB) // config.world_size
    if not entry_bytes <= num_bytes <= available:
        raise ValueError(
            f"kv_offloading_size gives a rank {num_bytes / GIB:.1f} GiB: raise it to at least one KV block of {entry_bytes} bytes "
            f"per rank, or lower it to the host memory that is available, {available / GIB:.1f} GiB"
        )
    pinned = config.device != "cpu" and torch.cuda.is_available()
    return HostStore(num_bytes, entry_bytes, pinned, disk)


def _open_folder(kv_transfer: KVTransferConfig, path_name: str, gib_name: str) -> KVStore | None:
    path, gib = kv_transfer.extra(path_name, ""), kv_transfer.extra(gib_name, 16.0)
    if gib <= 0:
        raise ValueError(f"kv_connector_extra_config: {gib_name} must be more than 0 GiB, got {gib}")
    return FolderStore(path, int(gib * GIB)) if path else None


def _open_pool(kv_transfer: KVTransferConfig, entry_bytes: int, only_to_look: bool) -> KVStore:
    kind = kv_transfer.extra("store", "folder")
    if kind == "redis":
        kv_transfer.check_extra("store", "url", "namespace")
        url = kv_transfer.extra("url", "redis://127.0.0.1:6379/0")
        return RedisStore(url, kv_transfer.extra("namespace", "nanovllm:"))
    if kind == "mooncake":
        return MooncakeStore(entry_bytes, kv_transfer, only_to_look)
    if kind != "folder":
        raise ValueError(f"kv_connector_extra_config: store must be folder, redis or mooncake, got {kind!r}")
    kv_transfer.check_extra("store", "path", "gib")
    if (folder := _open_folder(kv_transfer, "path", "gib")) is None:
        raise ValueError('a pool in a folder needs kv_connector_extra_config: {"path": "/a/folder"}')
    return folder
