"""Adds up inside the nodes, then pairs of ranks exchange their quarters, then distributes."""


def all_reduce(num_ranks, length):
    part = length // 4

    def piece(rank):
        return rank % 4 * part, (rank % 4 + 1) * part

    def inside(adds):
        return [
            (source, target, *(piece(target) if adds else piece(source)), adds)
            for source in range(num_ranks)
            for target in range(num_ranks)
            if source != target and source // 4 == target // 4
        ]

    across = [(rank, (rank + 4) % 8, *piece(rank), True) for rank in range(8)]
    return [inside(True), across, inside(False)]
