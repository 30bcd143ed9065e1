"""Transfers that share links, with times that can be worked out by hand."""

from __future__ import annotations

import random

from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.links import Links
from nanovllm.simulate.workload import SECOND
from tests.simulate.engines import engine_of, workload_of


def times_of(
    transfers: list[tuple[int, int, int, int]], bandwidth: float, latency: int = 0
) -> tuple[list[int], Links]:
    """When transfers (begin, source, target, bytes) arrive."""
    clock = Fleet([engine_of()])
    links = Links(clock, lambda engine: bandwidth, latency)
    ends = [0] * len(transfers)

    def begin(number: int, source: int, target: int, num_bytes: int) -> None:
        def arrived() -> None:
            ends[number] = clock.now

        links.send(source, target, num_bytes, arrived, "r")

    for number, (at, source, target, num_bytes) in enumerate(transfers):
        clock.at(at, lambda n=number, s=source, t=target, b=num_bytes: begin(n, s, t, b))  # type: ignore[misc]
    clock.run(workload_of())
    return ends, links


# One byte per picosecond.
FAST = float(SECOND)


def test_a_transfer_alone_takes_latency_and_bytes_by_bandwidth() -> None:
    ends, links = times_of([(7, 0, 1, 1000)], FAST, latency=50)
    assert ends == [7 + 50 + 1000]
    assert (links.num_transfers, links.num_bytes, links.time) == (1, 1000, 1050)
    assert times_of([(7, 0, 1, 1000)], FAST / 4)[0] == [7 + 4000]


def test_simultaneous_transfers_of_one_sender_share_its_bandwidth() -> None:
    # Together they take the time of 2000 bytes.
    assert times_of([(0, 0, 1, 1000), (0, 0, 2, 1000)], FAST)[0] == [2000, 2000]
    # The second joins at 400: 600 bytes of the first are left, and take 1200 at half speed. Then
    # 400 bytes of the second are left.
    assert times_of([(0, 0, 1, 1000), (400, 0, 2, 1000)], FAST)[0] == [1600, 2000]
    # Receivers share, too.
    assert times_of([(0, 0, 2, 1000), (400, 1, 2, 1000)], FAST)[0] == [1600, 2000]
    # A shorter one leaves earlier: 300 each until 600, and the rest of 700 alone.
    assert times_of([(0, 0, 1, 1000), (0, 0, 2, 300)], FAST)[0] == [1300, 600]


def test_transfers_between_other_engines_do_not_matter() -> None:
    ends, links = times_of([(0, 0, 1, 1000), (0, 2, 3, 1000), (0, 1, 0, 1000)], FAST)
    assert ends == [1000, 1000, 1000], "sending and receiving are independent"
    assert links.time == 3000


def test_the_smaller_share_of_both_ends_counts() -> None:
    # Sender 0 has three transfers, receiver 4 has two: a third of the bandwidth each until 600.
    # Then sender 1 sends alone: the other 400 bytes of its transfer shared receiver 4 by half.
    transfers = [(0, 0, 4, 200), (0, 0, 2, 200), (0, 0, 3, 200), (0, 1, 4, 700)]
    assert times_of(transfers, FAST)[0] == [600, 600, 600, 1000]


def test_no_bandwidth_is_lost_or_won() -> None:
    rng = random.Random(0)
    for _ in range(50):
        at = 0
        transfers = []
        for _ in range(30):
            at += rng.randrange(800)
            transfers.append((at, 0, rng.randrange(1, 4), rng.randrange(1, 2000)))
        ends, _ = times_of(transfers, FAST)
        # A single sender is always busy while it has something to send.
        busy = 0
        for begin, _, _, num_bytes in transfers:
            busy = max(busy, begin) + num_bytes
        assert busy <= max(ends) <= busy + 30 * 30, "rounded up at each event"
        for (begin, _, _, num_bytes), end in zip(transfers, ends, strict=True):
            assert end >= begin + num_bytes
