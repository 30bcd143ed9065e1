"""Tries every last size but one, for every number of graphs."""

from collections import Counter
from functools import cache


def graph_sizes(seen, most):
    counts = Counter(seen)

    @cache
    def best(last, graphs):
        """The least padding of steps up to `last` rows, and the sizes."""
        if graphs == 1:
            return sum((last - n) * c for n, c in counts.items() if n <= last), (last,)
        tried = [best(last, 1)]
        for size in range(1, last):
            padding, sizes = best(size, graphs - 1)
            padding += sum((last - n) * c for n, c in counts.items() if size < n <= last)
            tried.append((padding, (*sizes, last)))
        return min(tried)

    return list(best(max(seen), most)[1])
