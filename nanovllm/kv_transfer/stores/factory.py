"""Opens the stores of a connector, as its settings say."""

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
        shared_only: open only the store that other processes can access too, for look-ups; None if
            there is none.

    Raises:
        ValueError: settings that make no sense or a store that cannot be used; the message names
            the fix.
    """
    kv_transfer = config.kv_transfer
    size = config.kv_offloading_size
    assert kv_transfer is not None
    if kv_transfer.kv_connector == "pool":
        if size:
            raise ValueError(
                "set only one of them: kv_offloading_size has no effect with kv_connector 'pool'"
            )
        return _open_pool(kv_transfer, entry_bytes, shared_only)
    path, gib = kv_transfer.extras(disk_path="", disk_gib=16.0).values()
    disk = FolderStore(path, int(gib * GIB)) if path else None
    if shared_only:
        return disk
    available = psutil.virtual_memory().available
    num_bytes = int((size or 0) * GIB) // config.world_size
    if not entry_bytes <= num_bytes <= available:
        raise ValueError(
            f"kv_offloading_size gives a rank {num_bytes / GIB:.1f} GiB: set it to at least one KV "
            f"block of {entry_bytes} bytes per rank, and at most the host memory that is "
            f"available, {available / GIB:.1f} GiB"
        )
    return HostStore(num_bytes, entry_bytes, config.may_use_gpu and torch.cuda.is_available(), disk)


def _open_pool(kv_transfer: KVTransferConfig, entry_bytes: int, only_to_look: bool) -> KVStore:
    kind = kv_transfer.extra("store", "folder")
    if kind == "redis":
        settings = kv_transfer.extras(
            store=kind, url="redis://127.0.0.1:6379/0", namespace="nanovllm:"
        )
        return RedisStore(settings["url"], settings["namespace"])
    if kind == "mooncake":
        return MooncakeStore(entry_bytes, kv_transfer, only_to_look)
    if kind != "folder":
        raise ValueError(
            f"kv_connector_extra_config: store must be folder, redis or mooncake, got {kind!r}"
        )
    _, path, gib = kv_transfer.extras(store=kind, path="", gib=16.0).values()
    if not path:
        raise ValueError(
            'a pool in a folder needs kv_connector_extra_config: {"path": "/a/folder"}'
        )
    return FolderStore(path, int(gib * GIB))
