"""Links to and from engines, whose bandwidth simultaneous transfers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.core.scheduler import Scheduler
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.scheduling import KVTransfer
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.workload import SECOND


@dataclass
class Transfer:
    """A transfer of a request's KV. Times are in picoseconds.

    Attributes:
        source, target: the engines at its ends.
        left: bytes that are to be sent, times `SECOND`.
        begin, end: when it began, and when all bytes had arrived; `end` is 0 before.
        alone: how long it takes without other transfers.
        arrived: called when all bytes have arrived.
    """

    request_id: str
    source: int
    target: int
    num_bytes: int
    left: int
    begin: int
    alone: int
    arrived: Callable[[], None]
    end: int = 0


class Links:
    """One link per engine, for what it sends and receives.

    A transfer of n bytes alone takes `latency + n / bandwidth`. The transfers at a link share its
    bandwidth equally, and a transfer gets the smaller of its shares at its two ends: a link's
    sending and its receiving half are independent.

    Args:
        fleet: has the virtual clock.
        bandwidth: returns the bytes per second of an engine's link.
        latency: picoseconds before the first byte arrives.

    Attributes:
        num_bytes: bytes that were sent.
        num_transfers: how often.
        time: the time of all transfers, in picoseconds.
        watch: called with each transfer that has ended; None: nothing watches.
    """

    def __init__(self, fleet: Fleet, bandwidth: Callable[[int], float], latency: int) -> None:
        self.fleet = fleet
        self.bandwidth = bandwidth
        self.latency = latency
        self.num_bytes = 0
        self.num_transfers = 0
        self.time = 0
        self.watch: Callable[[Transfer], None] | None = None
        self._sent: Counter[int] = Counter()  # bytes, by engine
        self._received: Counter[int] = Counter()
        self._moving: list[Transfer] = []
        self._senders: Counter[int] = Counter()
        self._receivers: Counter[int] = Counter()
        # Transfers have progressed up to here.
        self._time = 0
        # The number of the event that ends the next transfer: earlier ones are void.
        self._event = 0

    def send(
        self, source: int, target: int, num_bytes: int, arrived: Callable[[], None], request_id: str
    ) -> None:
        """Begin a transfer for a request, and call `arrived` when it is complete."""
        bandwidth = min(self.bandwidth(source), self.bandwidth(target))
        transfer = Transfer(
            request_id=request_id,
            source=source,
            target=target,
            num_bytes=num_bytes,
            left=num_bytes * SECOND,
            begin=self.fleet.now,
            alone=self.latency + round(num_bytes * SECOND / bandwidth),
            arrived=arrived,
        )
        self.num_bytes += num_bytes
        self.num_transfers += 1
        self._sent[source] += num_bytes
        self._received[target] += num_bytes
        self.fleet.at(transfer.begin + self.latency, lambda: self._start(transfer))

    def utilization(self, duration: int) -> float:
        """Return the share of a duration in which the busiest link sends, or receives."""
        ends = (*self._sent.items(), *self._received.items())
        seconds = (num_bytes / self.bandwidth(engine) for engine, num_bytes in ends)
        return max(seconds, default=0.0) * SECOND / max(1, duration)

    def _start(self, transfer: Transfer) -> None:
        self._progress()
        self._moving.append(transfer)
        self._senders[transfer.source] += 1
        self._receivers[transfer.target] += 1
        self._expect_next()

    def _share(self, transfer: Transfer) -> tuple[int, int]:
        """Return a bandwidth, and how many transfers share it: at the end where less is left for
        this one."""
        sending = round(self.bandwidth(transfer.source)), self._senders[transfer.source]
        receiving = round(self.bandwidth(transfer.target)), self._receivers[transfer.target]
        return sending if sending[0] * receiving[1] < receiving[0] * sending[1] else receiving

    def _progress(self) -> None:
        """Move all transfers forward to now."""
        now = self.fleet.now
        elapsed = now - self._time
        self._time = now
        for transfer in self._moving:
            bandwidth, sharers = self._share(transfer)
            transfer.left -= elapsed * bandwidth // sharers

    def _expect_next(self) -> None:
        if self._moving:
            self._event += 1
            event = self._event
            end = self._time + min(map(self._time_left, self._moving))
            self.fleet.at(end, lambda: self._end(event))

    def _time_left(self, transfer: Transfer) -> int:
        """Return how long the rest takes if nothing changes, in whole picoseconds."""
        bandwidth, sharers = self._share(transfer)
        return (transfer.left * sharers + bandwidth // 2) // bandwidth

    def _end(self, event: int) -> None:
        if event != self._event:
            return
        self._progress()
        ended: list[Transfer] = []
        moving: list[Transfer] = []
        for transfer in self._moving:
            (moving if self._time_left(transfer) > 0 else ended).append(transfer)
        self._moving = moving
        for transfer in ended:
            self._senders[transfer.source] -= 1
            self._receivers[transfer.target] -= 1
        self._expect_next()
        for transfer in ended:
            transfer.end = self.fleet.now
            self.time += transfer.end - transfer.begin
            if self.watch is not None:
                self.watch(transfer)
            transfer.arrived()


def transfer_of(scheduler: Scheduler) -> KVTransfer:
    """Return what connects a scheduler to its connector."""
    return next(each for each in scheduler.features if isinstance(each, KVTransfer))


def tell_engine(fleet: Fleet, replica: int, ended: KVConnectorOutput) -> None:
    """Tell an engine about transfers that have ended."""
    scheduler = fleet.engines[replica].scheduler
    transfer = transfer_of(scheduler)
    transfer.connector.update_connector_output(ended)
    transfer.update_from_transfers(transfer.connector.take_output(), scheduler)
    fleet.wake(replica)
