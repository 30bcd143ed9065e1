"""Moves only for a gain of more than a twentieth."""

from nanovllm.distributed.load_balance import balance


def rebalance(loads, old):
    new = balance(loads, old)
    gain = max(old.rank_loads(loads)) / max(new.rank_loads(loads))
    return new if gain > 1.05 else old
