"""Copies KV blocks from a rank's cache to its stores and back: the worker half of the connector in
`offloading`."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import compress

import torch
from torch import Tensor

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.connector import KVConnectorWorker
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.stores.factory import open_store
from nanovllm.kv_transfer.stores.offloading import OffloadingMetadata, RankStore, share_key
from nanovllm.kv_transfer.stores.store import KVStore
from nanovllm.processes.activity import waiting_for_others

logger = logging.getLogger(__name__)

# Blocks are copied in pieces of this size. When more bytes than the backlog wait to be written,
# blocks are not saved: no step waits for a disk.
PIECE_BYTES = 16 << 20
BACKLOG_BYTES = 512 << 20

Blocks = Mapping[bytes, int]  # key -> block id


class OffloadingWorker(KVConnectorWorker):
    """Copies this rank's share of each block: one thread writes to the stores, and one reads from
    them.

    Attributes:
        store: where the blocks are kept.
        writer: the thread that writes to it, in the order of the calls.
    """

    metadata: OffloadingMetadata | None

    def __init__(
        self, config: EngineConfig, layout: KVLayout, kv_caches: dict[int, Tensor]
    ) -> None:
        super().__init__(config, layout, kv_caches)
        self.entry_bytes = layout.block_bytes * len(layout.layers)
        # Ranks that have the same layers and heads have the same bytes.
        self.share = f"layers {layout.layers} heads {layout.heads}"
        self.store = open_store(config, self.entry_bytes) or KVStore()
        self.writer = ThreadPoolExecutor(1, "kv-writer")
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._writes: dict[bytes, Future[None]] = {}  # by key
        # By request id; the result is the blocks that were not filled.
        self._reads: dict[str, Future[set[int]]] = {}
        # Of each layer [num_blocks, bytes of a block].
        self._rows = [cache.view(len(cache), -1).view(torch.uint8) for cache in kv_caches.values()]
        self._stream = torch.cuda.Stream(self._rows[0].device) if self._rows[0].is_cuda else None
        self._piece_length = max(1, PIECE_BYTES // self.entry_bytes)

    def get_handshake_metadata(self) -> RankStore:
        """What the scheduler's half must know of this rank."""
        return RankStore(self.share, self.entry_bytes, self.store.num_slots)

    # ---------------------------------------------------------------- in

    def start_load_kv(self) -> None:
        """See `KVConnectorWorker.start_load_kv`."""
        metadata = self.metadata
        assert metadata is not None, "set around each step"
        self._writes = {key: write for key, write in self._writes.items() if not write.done()}
        if metadata.evict:
            self.writer.submit(self.store.evict, self._names(metadata.evict))
        for request_id, blocks in metadata.loads.items():
            before = [self._writes[key] for key in blocks if key in self._writes]
            # A step that the GPU has not finished may still write to these blocks, for a request
            # that has ended.
            read = self._reads[request_id] = self._reader.submit(
                self._load, blocks, before, self._record_event()
            )
            read.add_done_callback(lambda _: self.notify())

    @torch.inference_mode()
    def _load(
        self, blocks: Blocks, before: list[Future[None]], event: torch.cuda.Event | None
    ) -> set[int]:
        """Fill blocks after some writes have ended; returns the ids of those that could not be
        filled."""
        invalid = set(blocks.values())
        try:
            wait(before)
            with torch.cuda.stream(self._stream):  # on a CPU, this does nothing
                if event is not None:
                    event.wait()
                for keys, block_ids in self._pieces(blocks):
                    entries = self._new_entries(len(keys))
                    found = self.store.get(
                        self._names(keys), [memoryview(row) for row in entries.numpy()]
                    )
                    if filled := list(compress(block_ids, found)):
                        self._scatter(
                            entries if all(found) else entries[torch.tensor(found)], filled
                        )
                    invalid -= set(filled)
        except Exception:
            logger.exception("KV blocks could not be loaded, and are computed")
        return invalid

    def _scatter(self, entries: Tensor, block_ids: Sequence[int]) -> None:
        """Write entries `[len(block_ids), entry_bytes]` into the caches of all layers."""
        entries = entries.view(len(block_ids), len(self._rows), -1)
        if self._stream is None:
            # Not torch's index_copy_, which would start threads that compete with those that
            # compute.
            for i, rows in enumerate(self._rows):
                rows.numpy()[block_ids] = entries[:, i].numpy()
            return
        ids = torch.tensor(block_ids, device=self._stream.device)
        entries = entries.to(self._stream.device, non_blocking=True)
        for i, rows in enumerate(self._rows):
            rows.index_copy_(0, ids, entries[:, i])
        self._stream.synchronize()

    def get_finished(self, wait_seconds: float = 0.0) -> KVConnectorOutput:
        """See `KVConnectorWorker.get_finished`."""
        wait(self._reads.values(), wait_seconds, FIRST_COMPLETED)
        finished = {request_id for request_id, read in self._reads.items() if read.done()}
        invalid = {request_id: self._reads.pop(request_id).result() for request_id in finished}
        return KVConnectorOutput(finished_recving=finished, invalid_block_ids=invalid)

    # ---------------------------------------------------------------- out

    def wait_for_save(self) -> None:
        """See `KVConnectorWorker.wait_for_save`. Whole blocks are copied, after the last layer, so
        that it works with a CUDA graph, which calls no hook per layer. On a GPU, too, the next step
        runs after these copies."""
        assert self.metadata is not None, "set around each step"
        saves: Blocks = self.metadata.saves
        num_waiting = sum(not write.done() for write in self._writes.values())
        num_dropped = max(0, len(saves) + num_waiting - BACKLOG_BYTES // self.entry_bytes)
        for keys, block_ids in self._pieces(saves, num_dropped):
            # The beginnings of prompts come last.
            write = self.writer.submit(
                self._save, keys, self._gather(block_ids), self._record_event()
            )
            self._writes |= dict.fromkeys(keys, write)

    def _gather(self, block_ids: Sequence[int]) -> Tensor:
        """Copies of blocks in host memory; from a GPU they are complete when the current stream has
        come so far."""
        ids = torch.tensor(block_ids, pin_memory=self._stream is not None).to(
            self._rows[0].device, non_blocking=True
        )
        copies = torch.stack([rows.index_select(0, ids) for rows in self._rows], dim=1).flatten(1)
        return (
            copies
            if self._stream is None
            else self._new_entries(len(block_ids)).copy_(copies, non_blocking=True)
        )

    def _save(self, keys: Sequence[bytes], entries: Tensor, event: torch.cuda.Event | None) -> None:
        try:
            if event is not None:
                event.synchronize()
            rows = [memoryview(row) for row in entries.numpy()]
            # A store counts the first key as used last.
            self.store.put(self._names(keys)[::-1], rows[::-1])
        except Exception:
            logger.exception("KV blocks could not be saved")

    # ---------------------------------------------------------------- both

    def _record_event(self) -> torch.cuda.Event | None:
        """What the GPU has been given so far; None on a CPU."""
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    def _new_entries(self, count: int) -> Tensor:
        """Host memory for some blocks."""
        return torch.empty(
            count, self.entry_bytes, dtype=torch.uint8, pin_memory=self._stream is not None
        )

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [share_key(self.share, key) for key in keys]

    def _pieces(
        self, blocks: Blocks, start: int = 0
    ) -> Iterator[tuple[Sequence[bytes], Sequence[int]]]:
        """Keys and block ids, from `start` on."""
        keys = list(blocks)
        block_ids = list(blocks.values())
        for i in range(start, len(blocks), self._piece_length):
            yield keys[i : i + self._piece_length], block_ids[i : i + self._piece_length]

    def forget_requests(self) -> None:
        """See `KVConnectorWorker.forget_requests`."""
        with waiting_for_others():  # a disk or a server
            wait(self._reads.values())
        self._reads.clear()

    def close(self) -> None:
        """Finish all writes, and close the stores."""
        self._reader.shutdown()
        self.writer.shutdown()
        self.store.close()
