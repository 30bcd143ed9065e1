"""Second part of lecture 40: graphs of the sizes that occur.

A step is replayed with the smallest graph that has enough rows, and the rest are padding. Counted
are the rows of padding in 1,000 steps. Each graph takes memory and time to record, so that you may
have as many as the lecture's ladder has for these steps: 11.
"""

from nanovllm.features.cuda_graphs.graphs import ladder


def graph_sizes(seen: list[int], most: int) -> list[int]:
    """Return the numbers of rows of the graphs.

    Args:
        seen: the number of rows of each step.
        most: the most graphs.
    """
    return ladder(64)
