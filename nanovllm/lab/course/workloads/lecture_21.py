"""Second part of lecture 21: an all-reduce over two nodes.

Ranks 0 to 3 are on one node, ranks 4 to 7 on another. A round takes 20 time units, and for each
number a unit on the busiest rank, which sends and receives at the same time, or 8 units on the
busiest of the two links that leave a node. Counted are the time units. This ring treats
all links alike.
"""

Transfer = tuple[int, int, int, int, bool]


def all_reduce(num_ranks: int, length: int) -> list[list[Transfer]]:
    """Return the rounds after which each rank has the sum of all ranks' numbers.

    Each round is a list of transfers (source, target, start, end, adds): the target adds the
    source's numbers `start` to `end` to its own, or replaces its own by them. The source sends what
    it had before the round.
    """
    part = length // num_ranks
    rounds = []
    for adds in (True, False):
        for step in range(num_ranks - 1):
            transfers = []
            for rank in range(num_ranks):
                first = (rank - step + (not adds)) % num_ranks * part
                target = (rank + 1) % num_ranks
                transfers.append((rank, target, first, first + part, adds))
            rounds.append(transfers)
    return rounds
