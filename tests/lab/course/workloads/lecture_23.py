"""Raises the time of a stage from its lowest bound until the layers fit."""


def layers_per_stage(costs, stages):
    limit = max(max(costs), -(-sum(costs) // stages))
    while True:
        sizes = [0]
        time = 0
        for left, cost in zip(range(len(costs), 0, -1), costs, strict=True):
            # Every later stage needs a layer, too.
            if sizes[-1] and (time + cost > limit or left <= stages - len(sizes)):
                sizes.append(0)
                time = 0
            sizes[-1] += 1
            time += cost
        if len(sizes) <= stages:
            return sizes
        limit += 1
