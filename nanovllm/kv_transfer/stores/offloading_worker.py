"""The ranks' half of the connector that keeps KV blocks beyond the pool: it copies them, see `offloading`."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.distributed.life_signs import waiting_for_others
from nanovllm.kv.connector import KVConnectorWorker
from nanovllm.kv_transfer.stores.factory import open_store
from nanovllm.kv_transfer.stores.offloading import OffloadingMetadata, share_key
from nanovllm.kv_transfer.stores.store import HostStore, TieredStore

if TYPE_CHECKING:
    from nanovllm.data.config import EngineConfig
    from nanovllm.data.kv_transfer_config import KVTransferConfig
    from nanovllm.kv.layout import KVLayout

logger = logging.getLogger(__name__)

# Blocks pass in pieces of so many bytes; and so many may wait to be written. More are not saved: no step waits for a disk.
PIECE_BYTES = 16 << 20
BACKLOG_BYTES = 512 << 20


class OffloadingWorker(KVConnectorWorker):
    """Copies this rank's share of blocks to its stores and back: one thread writes, and one reads.

    Attributes:
        store: where they go.
        num_dropped: blocks that were not saved, because too many waited to be written.
    """

    def __init__(self, config: EngineConfig, kv_transfer: KVTransferConfig, layout: KVLayout) -> None:
        super().__init__(config, kv_transfer, layout)
        self.num_dropped = 0
        self.entry_bytes = layout.block_bytes * len(layout.layers)
        # Ranks that have the same layers and heads have the same bytes.
        self.share = f"layers {layout.layers} heads {layout.heads}"
        store = open_store(config, kv_transfer, self.entry_bytes)
        assert store is not None, "every connector has a place for its blocks"
        self.store = store
        upper = store.upper if isinstance(store, TieredStore) else store
        self._host = upper if isinstance(upper, HostStore) else None
        self._writer = ThreadPoolExecutor(1, "kv-writer")
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._writes: list[tuple[set[bytes], Future[None]]] = []
        self._reads: set[Future[None]] = set()
        self._arrived: queue.SimpleQueue[tuple[str, set[int]]] = queue.SimpleQueue()
        self._invalid: dict[str, set[int]] = {}
        self._rows: list[Tensor] = []
        self._piece_length = max(1, PIECE_BYTES // self.entry_bytes)
        self._spare: list[Tensor] = []

    def register_kv_caches(self, kv_caches: dict[int, Tensor]) -> None:
        """See `KVConnectorWorker.register_kv_caches`."""
        KVConnectorWorker.register_kv_caches(self, kv_caches)
        # Of each layer [num_blocks, bytes of a block].
        self._rows = [cache.view(len(cache), -1).view(torch.uint8) for cache in kv_caches.values()]
        on_gpu = self._rows[0].is_cuda
        self._stream = torch.cuda.Stream(self._rows[0].device) if on_gpu else None

    def get_handshake_metadata(self) -> dict[str, Any]:
        """What the scheduler's half has to know."""
        return {
            "share": self.share,
            "entry_bytes": self.entry_bytes,
            "num_slots": self._host.num_slots if self._host is not None else 0,
        }

    # ---------------------------------------------------------------- in

    def start_load_kv(self) -> None:
        """See `KVConnectorWorker.start_load_kv`."""
        metadata: OffloadingMetadata = self.metadata
        self._writes = [(keys, write) for keys, write in self._writes if not write.done()]
        if metadata.evict:
            self._write(set(), self._evict, metadata.evict)
        for request_id, blocks in metadata.loads:
            wanted = {key for _, key in blocks}
            before = [write for keys, write in self._writes if keys & wanted]
            # Whoever had these blocks before may still be computed, for nothing, by a step that a GPU has not finished.
            event = torch.cuda.current_stream().record_event() if self._stream is not None else None
            read = self._reader.submit(self._load, request_id, blocks, before, event)
            self._reads.add(read)
            read.add_done_callback(self._reads.discard)

    @torch.inference_mode()
    def _load(
        self,
        request_id: str,
        blocks: list[tuple[int, bytes]],
        before: list[Future[None]],
        event: torch.cuda.Event | None,
    ) -> None:
        invalid = {block_id for block_id, _ in blocks}
        try:
            for write in before:
                write.result()
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                if event is not None:
                    event.wait()
                for piece in self._pieces(blocks):
                    invalid -= self._load_piece(piece)
        except Exception:
            logger.exception("KV blocks could not be loaded, and are computed")
        finally:
            self._arrived.put((request_id, invalid))
            self.notify()

    def _load_piece(self, blocks: list[tuple[int, bytes]]) -> set[int]:
        """Fill some blocks; returns those that could be."""
        staging = self._borrow()
        try:
            entries = staging[: len(blocks)]
            found = self.store.get(self._names(blocks), [memoryview(row) for row in entries.numpy()])
            there = [i for i, is_there in enumerate(found) if is_there]
            block_ids = [blocks[i][0] for i in there]
            if there:
                self._scatter(entries if all(found) else entries[there], block_ids)
        finally:
            self._spare.append(staging)
        return set(block_ids)

    def _scatter(self, entries: Tensor, block_ids: list[int]) -> None:
        """Write entries `[len(block_ids), entry_bytes]` into the caches of all layers."""
        entries = entries.view(len(block_ids), len(self._rows), -1)
        if self._stream is None:
            # Not torch's index_copy_: that would start threads, which get into the way of those that compute.
            for i, rows in enumerate(self._rows):
                rows.numpy()[block_ids] = entries[:, i].numpy()
            return
        ids = torch.tensor(block_ids, device=self._stream.device)
        entries = entries.to(self._stream.device, non_blocking=True)
        for i, rows in enumerate(self._rows):
            rows.index_copy_(0, ids, entries[:, i])
        self._stream.synchronize()

    def get_finished(self, wait_seconds: float = 0.0) -> tuple[set[str], set[str]]:
        """See `KVConnectorWorker.get_finished`."""
        self._invalid, finished = {}, set()
        try:
            while True:
                request_id, invalid = (
                    self._arrived.get(timeout=wait_seconds) if wait_seconds else self._arrived.get_nowait()
                )
                wait_seconds = 0.0
                finished.add(request_id)
                if invalid:
                    self._invalid[request_id] = invalid
        except queue.Empty:
            return set(), finished

    def get_block_ids_with_load_errors(self) -> dict[str, set[int]]:
        """See `KVConnectorWorker.get_block_ids_with_load_errors`."""
        return self._invalid

    # ---------------------------------------------------------------- out

    def wait_for_save(self) -> None:
        """See `KVConnectorWorker.wait_for_save`. Whole blocks are copied, after the last layer: so it is the same with a CUDA
        graph, in which no layer can say when it is done. The next step comes behind these copies, also on a GPU."""
        saves: list[tuple[int, bytes]] = self.metadata.saves
        waiting = sum(len(keys) for keys, write in self._writes if not write.done())
        num_dropped = max(0, len(saves) + waiting - BACKLOG_BYTES // self.entry_bytes)
        self.num_dropped += num_dropped
        for piece in self._pieces(saves[num_dropped:]):  # the beginnings come last
            staging, event = self._gather([block_id for block_id, _ in piece])
            self._write({key for _, key in piece}, self._save, piece, staging, event)

    def _gather(self, block_ids: list[int]) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copies of blocks, in borrowed memory; there as soon as the event has come."""
        staging = self._borrow()
        entries = staging[: len(block_ids)].view(len(block_ids), len(self._rows), -1)
        if self._stream is None:
            for i, rows in enumerate(self._rows):
                entries[:, i].numpy()[:] = rows.numpy()[block_ids]
            return staging, None
        ids = torch.tensor(block_ids, pin_memory=True).to(self._stream.device, non_blocking=True)
        copies = torch.stack([rows.index_select(0, ids) for rows in self._rows], dim=1)
        entries.copy_(copies, non_blocking=True)
        return staging, torch.cuda.current_stream().record_event()

    def _save(self, blocks: list[tuple[int, bytes]], staging: Tensor, event: torch.cuda.Event | None) -> None:
        try:
            if event is not None:
                event.synchronize()
            rows = staging[: len(blocks)].numpy()
            # For a store, the first key is the one that is used last.
            self.store.put(self._names(blocks)[::-1], [memoryview(row) for row in rows][::-1])
        finally:
            self._spare.append(staging)

    def _borrow(self) -> Tensor:
        """Host memory for a piece; if possible such as was used before, since the kernel has given out its pages by then."""
        try:
            return self._spare.pop()
        except IndexError:
            shape = (self._piece_length, self.entry_bytes)
            return torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _evict(self, keys: list[bytes]) -> None:
        assert self._host is not None
        self._host.evict([share_key(self.share, key) for key in keys])

    def _write(self, keys: set[bytes], job: Any, *arguments: Any) -> None:
        """Have the writer do something that these keys wait for."""

        def work() -> None:
            try:
                job(*arguments)
            except Exception:
                logger.exception("KV blocks could not be saved")

        self._writes.append((keys, self._writer.submit(work)))

    # ---------------------------------------------------------------- both

    def _names(self, blocks: list[tuple[int, bytes]]) -> list[bytes]:
        return [share_key(self.share, key) for _, key in blocks]

    def _pieces(self, blocks: list[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
        return (blocks[i : i + self._piece_length] for i in range(0, len(blocks), self._piece_length))

    def forget_requests(self) -> dict[str, list[int]]:
        """See `KVConnectorWorker.forget_requests`."""
        with waiting_for_others():  # a disk or a server
            for read in list(self._reads):
                read.result()
        self.get_finished()
        return {}

    def close(self) -> None:
        """Write what is still to be written, and close the stores."""
        self._reader.shutdown()
        self._writer.shutdown()
        self.store.close()
