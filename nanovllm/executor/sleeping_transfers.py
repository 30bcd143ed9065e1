"""Predicts when a rank with a sleeping device has read KV from other engines. Few bytes really
move."""

from __future__ import annotations

import threading
from typing import cast

from nanovllm.core.runner import ModelRunner
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.executor.sleeping import SleepingForward
from nanovllm.executor.virtual_clock import RankRead, read_clock, sleep_until
from nanovllm.kv_transfer.connector import KV_TRANSFER
from nanovllm.kv_transfer.factory import connector_of
from nanovllm.kv_transfer.pd.disaggregated import DisaggregatedWorker
from nanovllm.kv_transfer.pd.plan import TransferMetadata
from nanovllm.kv_transfer.transport.pieces import Piece


class ReadClock:
    """The rank's link to other engines, on which one read follows another.

    Args:
        runner: has caches, and a connector that reads into them.
        sleeper: the runner's device.
    """

    def __init__(self, runner: ModelRunner, sleeper: SleepingForward) -> None:
        transport = cast(DisaggregatedWorker, connector_of(runner)).transport
        self.layout = transport.layout
        self.sleeper = sleeper
        # By transfer, when the engine has ordered it, and when all blocks so far have arrived.
        self._orders: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._free = 0
        self._lock = threading.Lock()
        transport.after_read = self.sleep

    def take_orders(self, plan: SchedulerOutput, order: int) -> None:
        """Note when the transfers of a plan were ordered."""
        metadata = cast("TransferMetadata | None", plan.extras.get(KV_TRANSFER))
        if metadata is not None:
            self._orders |= {move.transfer_id: order for move in metadata.reads}

    def sleep(self, transfer_id: str, piece: Piece, num_blocks: int) -> None:
        """Sleep until the blocks would have arrived. Called by the thread that has read them."""
        device = self.sleeper
        share = len(piece.layers) * piece.num_heads
        whole = len(self.layout.layers) * len(self.layout.heads)
        num_bytes = device.cost.bytes_per_block * num_blocks * share // whole
        with self._lock:
            # A push is not ordered here: it begins once the other engine has computed the blocks.
            order = self._orders.get(transfer_id) or read_clock(device.scale)
            begin = max(order, self._free)
            end = self._free = begin + device.cost.transfer(num_bytes)
            self._ends[transfer_id] = end
            device.timeline.write(
                RankRead(transfer_id=transfer_id, begin=begin, end=end, num_bytes=num_bytes)
            )
        sleep_until(end, device.scale)

    def take_ends(self, result: ModelRunnerOutput) -> int:
        """Return when the last of the transfers of which a result tells has ended; 0 if there is
        none."""
        output = cast("KVConnectorOutput | None", result.extras.get(KV_TRANSFER))
        if output is None:
            return 0
        ended = output.finished_recving | output.finished_sending
        for transfer_id in ended:
            self._orders.pop(transfer_id, None)
        return max((self._ends.pop(transfer_id, 0) for transfer_id in ended), default=0)
