"""Decides which KV blocks are kept outside of the pool: in host memory and on a disk (connector
"offloading"), or in a store that engines share (connector "pool").

Every block is saved once, when it has become full, and not when it is evicted from the pool. So no
step waits until a block has been copied before it can be overwritten, a block that is still in one
engine's pool can be used by another, and a crash costs nothing. Blocks that are never loaded are
saved in vain, but in the background.

A block that is missing or damaged is not an error: it is computed.

Built by notebooks/32_kv_sharing.ipynb: edit it there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.connector import KVConnectorScheduler, Tables
from nanovllm.kv_transfer.stores.store import BYTE, HostKeys, KVStore
from nanovllm.processes.activity import waiting_for_others


def block_key(identity: dict[str, str | int], block_hash: bytes) -> bytes:
    """The key of a block's KV: a hash of everything that determines it, and of all tokens up to its
    end (`core.kv_cache_manager.hash_block`)."""
    parts = "\0".join(f"{name}={value}" for name, value in sorted(identity.items()))
    return hashlib.sha256(hashlib.sha256(parts.encode()).digest() + block_hash).digest()


def share_key(share: str, key: bytes) -> bytes:
    """The key of the part of a block that one rank has."""
    return hashlib.sha256(share.encode() + b"\0" + key).digest()


@dataclass(frozen=True)
class RankStore:
    """A rank's part of each block, and its host memory, as the scheduler's half sees them.

    Attributes:
        share: names the part of a block that the rank has. Ranks with equal parts have equal names.
        entry_bytes: length of this part.
        num_slots: how many of them its host memory can hold.
    """

    share: str
    entry_bytes: int
    num_slots: int


@dataclass
class OffloadingMetadata:
    """What the ranks must do around a step.

    Attributes:
        evict: keys that are evicted from host memory, before the saves.
        saves: key -> block id, of blocks that are full when the step has been computed; the most
            recently used come last.
        loads: request id -> key -> block id, of the blocks that it waits for, in their order.
    """

    evict: list[bytes] = field(default_factory=list)
    saves: dict[bytes, int] = field(default_factory=dict)
    loads: dict[str, dict[bytes, int]] = field(default_factory=dict)


class _BelowHost(KVStore):
    """What is below the ranks' host memory, as the scheduler's half sees it: blocks can be looked
    up, and the ranks move evicted blocks there.

    Attributes:
        shared: the store that other engines use, too.
        evicted: keys of blocks that the ranks have to evict.
    """

    def __init__(self, shared: KVStore | None, shares: Sequence[str]) -> None:
        super().__init__()
        self.shared = shared or KVStore()
        self._shares = shares
        self.evicted: list[bytes] = []

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks are there; all shares of each."""
        names = [share_key(share, key) for key in keys for share in self._shares]
        with waiting_for_others():  # a disk or a server
            return self.shared.contains(names) // len(self._shares)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Have the ranks evict these blocks."""
        self.evicted += keys


class OffloadingScheduler(KVConnectorScheduler):
    """Knows which blocks are kept, and which requests wait for them.

    It decides which blocks are in the ranks' host memory, and therefore knows it: all ranks have
    the same blocks there, each its share. In a store that other engines use too, it looks blocks
    up.

    Attributes:
        host: which blocks are in the ranks' host memory, by their keys.

    Raises:
        ValueError: settings that make no sense; the message names the fix.
    """

    def __init__(
        self, config: EngineConfig, identity: dict[str, str | int], ranks: Sequence[RankStore]
    ) -> None:
        super().__init__(config, identity, ranks)
        if not config.enable_prefix_caching:
            raise ValueError(
                "enable enable_prefix_caching: blocks are stored under the hashes of the prefix "
                "cache"
            )
        if self.kv_transfer.kv_load_failure_policy == "fail":
            raise ValueError(
                "use kv_load_failure_policy 'recompute': this connector recomputes blocks that are "
                "not stored"
            )
        self._key = lru_cache(1 << 16)(partial(block_key, identity))
        shared = self._open_shared(max(rank.entry_bytes for rank in ranks))
        self._is_shared = shared is not None
        self._below = _BelowHost(shared, list(dict.fromkeys(rank.share for rank in ranks)))
        self.host = HostKeys(min(rank.num_slots for rank in ranks), lower=self._below)
        self.host.is_in_use = lambda key: any(key in blocks for blocks in self._loading.values())
        # Request id -> the request, and how many blocks from its beginning are kept, or have been
        # given to the ranks to be saved.
        self._saved: dict[str, tuple[Request, int]] = {}
        self._loading: dict[str, dict[bytes, int]] = {}  # request id -> key -> block id
        self._loads: dict[str, dict[bytes, int]] = {}  # those of them that begin with the next step

    def _open_shared(self, entry_bytes: int) -> KVStore | None:
        """Open the store that other engines use, too; None: there is none."""
        from nanovllm.kv_transfer.stores.factory import open_store  # imports torch

        return open_store(self.config, entry_bytes, shared_only=True)

    def _keys(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        return [self._key(block_hash) for block_hash in block_hashes]

    # ---------------------------------------------------------- a request's KV comes from elsewhere

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens after the first `num_computed_tokens` can be loaded (0 if none), and
        True: the request waits for them.

        The kept blocks are those of `request.block_hashes` that `host.contains` finds (by their
        `_keys`), counted from the beginning of the prompt. `_saved[request_id]` becomes the pair of
        the request and their number, even if nothing can be loaded. Only whole blocks are loaded,
        not the one with the last of `num_tokens`, whose logits are needed, and none unless
        `kv_transfer.is_consumer`.

        The scheduler asks again as long as the request waits for free blocks. If other engines
        share the store (`_is_shared`), a lookup is slow, and the number in `_saved` is used again;
        host memory is looked up anew, since it may have evicted blocks."""
        if request.request_id not in self._saved or not self._is_shared:
            self._saved[request.request_id] = (
                request,
                self.host.contains(self._keys(request.block_hashes)),
            )
        size = self.config.block_size
        _, num_saved = self._saved[request.request_id]
        # The last token's logits are needed.
        usable = (
            min(num_saved, (request.num_tokens - 1) // size) if self.kv_transfer.is_consumer else 0
        )
        return max(0, usable * size - num_computed_tokens), True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """See `KVConnectorScheduler.update_state_after_alloc`."""
        first = request.num_computed_tokens // self.config.block_size
        end = first + num_external_tokens // self.config.block_size
        keys = self._keys(request.block_hashes[first:end])
        blocks = dict(zip(keys, block_ids[first:end], strict=True))
        self._loads[request.request_id] = self._loading[request.request_id] = blocks
        self._in_flight.add(request.request_id)
        self.host.put(keys, [BYTE] * len(keys))  # blocks from a disk stay in host memory

    # ---------------------------------------------------------------- a request's KV is kept

    def build_connector_meta(
        self, plan: SchedulerOutput, tables: Tables
    ) -> OffloadingMetadata | None:
        """See `KVConnectorScheduler.build_connector_meta`: the blocks that become full in this
        step, and those to be loaded."""
        saves: dict[bytes, int] = {}
        for scheduled in plan.requests if self.kv_transfer.is_producer else ():
            if scheduled.request_id in self._saved:
                saves |= self._new_blocks(scheduled.request_id, tables[scheduled.request_id])
        if self.host.num_slots:
            new = [key for key in saves if key not in self.host]
            self.host.put(new[::-1], [BYTE] * len(new))
            # A block that got a slot and lost it again in the same step is not copied at all.
            saves = {key: saves[key] for key in new if key in self.host}
        metadata = OffloadingMetadata(self._below.evicted, saves, self._loads)
        self._below.evicted = []
        self._loads = {}
        return metadata if self._in_flight or saves or metadata.evict else None

    def _new_blocks(self, request_id: str, table: Sequence[int]) -> dict[bytes, int]:
        """Full blocks to be saved: the beginning comes last, and so is evicted last."""
        request, first = self._saved[request_id]
        # A block that contains an unsampled token has no hash yet; it gets one with the next step.
        end = min(request.num_computed_tokens, request.num_tokens) // self.config.block_size
        self._saved[request_id] = request, max(first, end)
        keys = self._keys(request.block_hashes[first:end])
        return dict(zip(reversed(keys), reversed(table[first:end]), strict=True))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `KVConnectorScheduler.update_connector_output`. Blocks that could not be loaded no
        longer count as kept."""
        KVConnectorScheduler.update_connector_output(self, output)
        for request_id in output.finished_recving:
            blocks = self._loading.pop(request_id)
            invalid = output.invalid_block_ids.get(request_id, set())
            lost = [key for key, block_id in blocks.items() if block_id in invalid]
            self.host.evict(lost)
            if lost and request_id in self._saved:
                self._saved[request_id] = self._saved[request_id][0], 0

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """See `KVConnectorScheduler.request_finished`. The blocks can be freed: those to be saved
        have been copied."""
        self._saved.pop(request.request_id, None)
        return False, None

    def forget_requests(self) -> None:
        """See `KVConnectorScheduler.forget_requests`. The kept blocks stay."""
        KVConnectorScheduler.forget_requests(self)
        self._saved.clear()
        self._loading.clear()
        self._loads.clear()

    def close(self) -> None:
        """Close the shared store."""
        self._below.shared.close()
