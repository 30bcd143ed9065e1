"""Decides which KV blocks are kept outside of the pool: in host memory and on a disk (connector "offloading"), or in a store that
engines share (connector "pool").

Every block is saved once, when it has become full, and not when it is evicted from the pool. So no step waits until a block has
been copied before it can be overwritten, a block that is still in one engine's pool can be used by another, and a crash costs
nothing. Blocks that are never loaded are saved in vain, but in the background.

A block that is missing or damaged is not an error: it is computed.

Built by notebooks/32_kv_sharing.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import Request
from nanovllm.data.schedule import SchedulerOutput
from nanovllm.distributed.life_signs import waiting_for_others
from nanovllm.kv.connector import KVConnectorScheduler
from nanovllm.kv_transfer.stores.factory import open_store


def block_key(identity: dict[str, str | int], block_hash: bytes) -> bytes:
    """The key of a block's KV: a hash of everything that determines it, and of all tokens up to its end (`kv.manager.hash_block`)."""
    parts = "\0".join(f"{name}={value}" for name, value in sorted(identity.items()))
    return hashlib.sha256(hashlib.sha256(parts.encode()).digest() + block_hash).digest()


def share_key(share: str, key: bytes) -> bytes:
    """The key of the part of a block that one rank has."""
    return hashlib.sha256(share.encode() + b"\0" + key).digest()


@dataclass
class OffloadingMetadata:
    """What the ranks must do around a step.

    Attributes:
        evict: keys that are evicted from host memory, before the saves.
        saves: (block id, key) of blocks that are full when the step has been computed; the most recently used come last.
        loads: request id, and (block id, key) of the blocks that it waits for, in their order.
    """

    evict: list[bytes] = field(default_factory=list)
    saves: list[tuple[int, bytes]] = field(default_factory=list)
    loads: list[tuple[str, list[tuple[int, bytes]]]] = field(default_factory=list)


@dataclass
class _Sequence:
    """The state of a request.

    Attributes:
        keys: of its full blocks.
        num_saved: how many blocks from the beginning are kept, or have been given to the ranks to be saved.
        is_looked_up: True if `num_saved` was looked up since the request was last admitted.
    """

    request: Request
    keys: list[bytes] = field(default_factory=list)
    num_saved: int = 0
    is_looked_up: bool = False


class OffloadingScheduler(KVConnectorScheduler):
    """Knows which blocks are kept, and which requests wait for them.

    It decides which blocks are in the ranks' host memory, and therefore knows it: all ranks have the same blocks there, each its
    share. In a store that other engines use too, it looks blocks up.

    Raises:
        ValueError: settings that make no sense; the message names the fix.
    """

    def __init__(self, config: EngineConfig, identity: dict[str, str | int], ranks: Sequence[Any]) -> None:
        super().__init__(config, identity, ranks)
        kv_transfer = self.kv_transfer
        if not config.enable_prefix_caching:
            raise ValueError("leave enable_prefix_caching on: blocks are kept under the hashes of the prefix cache")
        if kv_transfer.kv_load_failure_policy == "fail":
            raise ValueError(
                f"use kv_load_failure_policy 'recompute': kv_connector {kv_transfer.kv_connector!r} computes blocks that were not kept"
            )
        self._shares = list(dict.fromkeys(rank["share"] for rank in ranks))
        self._num_slots = min(rank["num_slots"] for rank in ranks)
        self._shared = open_store(config, kv_transfer, max(rank["entry_bytes"] for rank in ranks), shared_only=True)
        self._in_host: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._pinned: Counter[bytes] = Counter()  # being loaded: not evicted
        self._sequences: dict[str, _Sequence] = {}
        self._loading: dict[str, list[tuple[int, bytes]]] = {}
        self._next = OffloadingMetadata()

    # ---------------------------------------------------------------- what is kept

    def _keys(self, sequence: _Sequence) -> list[bytes]:
        hashes, keys = sequence.request.block_hashes, sequence.keys
        keys += [block_key(self.identity, block_hash) for block_hash in hashes[len(keys) :]]
        return keys

    def _count_kept(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are kept, in host memory or in the shared store; they count as used."""
        count = 0
        while count < len(keys):
            if keys[count] in self._in_host:
                count += 1
                continue
            end = next((i for i in range(count, len(keys)) if keys[i] in self._in_host), len(keys))
            count += self._count_shared(keys[count:end])
            if count < end:
                break
        for key in reversed(keys[:count]):
            if key in self._in_host:
                self._in_host.move_to_end(key)
        return count

    def _count_shared(self, keys: Sequence[bytes]) -> int:
        if self._shared is None:
            return 0
        names = [share_key(share, key) for key in keys for share in self._shares]
        with waiting_for_others():  # a disk or a server
            return self._shared.contains(names) // len(self._shares)

    def _keep_in_host(self, key: bytes) -> bool:
        """Give a block a slot in host memory. False if it has one already, or if none can be freed."""
        if key in self._in_host or not self._num_slots:
            return False
        if len(self._in_host) == self._num_slots:
            victim = next((other for other in self._in_host if not self._pinned[other]), None)
            if victim is None:
                return False
            del self._in_host[victim]
            self._next.evict.append(victim)
        self._in_host[key] = None
        return True

    # ---------------------------------------------------------------- a request's KV comes from elsewhere

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """See `KVConnectorScheduler.get_num_new_matched_tokens`. The scheduler asks again as long as the request waits for free
        blocks; the shared store is asked only once."""
        sequence = self._sequences.setdefault(request.request_id, _Sequence(request))
        if not sequence.is_looked_up or self._shared is None:
            sequence.is_looked_up = True
            sequence.num_saved = self._count_kept(self._keys(sequence))
        if not self.kv_transfer.is_consumer:
            return 0, True
        size = self.config.block_size
        # The last token's logits are needed.
        usable = min(sequence.num_saved, (request.num_tokens - 1) // size)
        return max(0, usable * size - num_computed_tokens), True

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """See `KVConnectorScheduler.update_state_after_alloc`."""
        size = self.config.block_size
        first = request.num_computed_tokens // size
        end = first + num_external_tokens // size
        keys = self._keys(self._sequences[request.request_id])
        blocks = list(zip(block_ids[first:end], keys[first:end], strict=True))
        self._pinned.update(key for _, key in blocks)
        for _, key in reversed(blocks):
            self._keep_in_host(key)  # blocks from a disk stay in host memory
        self._loading[request.request_id] = blocks
        self._in_flight.add(request.request_id)
        self._next.loads.append((request.request_id, blocks))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `KVConnectorScheduler.update_connector_output`. Blocks that could not be loaded no longer count as kept."""
        KVConnectorScheduler.update_connector_output(self, output)
        for request_id in output.finished_recving:
            blocks = self._loading.pop(request_id)
            self._pinned -= Counter(key for _, key in blocks)
            invalid = output.invalid_block_ids.get(request_id, set())
            for _, key in (lost := [block for block in blocks if block[0] in invalid]):
                self._in_host.pop(key, None)
            if lost and request_id in self._sequences:
                sequence = self._sequences[request_id]
                sequence.num_saved = min(sequence.num_saved, sequence.keys.index(lost[0][1]))

    # ---------------------------------------------------------------- a request's KV is kept

    def build_connector_meta(
        self, schedule: SchedulerOutput, tables: Mapping[str, list[int]]
    ) -> OffloadingMetadata | None:
        """See `KVConnectorScheduler.build_connector_meta`: the blocks that become full in this step, and those to be loaded."""
        saves: dict[bytes, int] = {}
        for scheduled in schedule.requests:
            sequence = self._sequences.get(scheduled.request_id)
            if sequence is None:
                continue
            if scheduled.sampling_params is not None:  # the request was admitted, perhaps not for the first time
                sequence.is_looked_up = False
            if self.kv_transfer.is_producer:
                saves |= self._new_blocks(sequence, tables[scheduled.request_id])
        metadata, self._next = self._next, OffloadingMetadata()
        # A block that got a slot and lost it again in the same step is not copied at all.
        metadata.saves = [
            (block_id, key) for key, block_id in saves.items() if not self._num_slots or key in self._in_host
        ]
        return metadata if self._loading or metadata.saves or metadata.evict else None

    def _new_blocks(self, sequence: _Sequence, table: Sequence[int]) -> dict[bytes, int]:
        """Full blocks to be saved: the beginning comes last, and so is evicted last."""
        request = sequence.request
        # A block that contains an unsampled token has no hash yet; it gets one with the next step.
        end = min(request.num_computed_tokens, request.num_tokens) // self.config.block_size
        keys, first = self._keys(sequence), sequence.num_saved
        sequence.num_saved = max(first, end)
        return {
            keys[i]: table[i]
            for i in range(end - 1, first - 1, -1)
            if not self._num_slots or self._keep_in_host(keys[i])
        }

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnectorScheduler.request_finished`. The blocks can be freed: those to be saved have been copied."""
        self._sequences.pop(request.request_id, None)
        return False, None

    def forget_requests(self, open_transfers: Collection[str] = ()) -> None:
        """See `KVConnectorScheduler.forget_requests`. The kept blocks stay."""
        KVConnectorScheduler.forget_requests(self)
        self._sequences.clear()
        self._loading.clear()
        self._pinned.clear()
        self._next = OffloadingMetadata()

    def close(self) -> None:
        """Close the stores."""
        if self._shared is not None:
            self._shared.close()
