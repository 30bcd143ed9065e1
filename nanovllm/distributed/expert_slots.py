"""How many experts each rank holds: the check that engines and the simulator share."""

from __future__ import annotations


def slots_per_rank(num_experts: int, num_ranks: int, num_redundant: int = 0) -> int:
    """Return the number of experts on each of `num_ranks` ranks, copies included.

    Raises:
        ValueError: the slots cannot be divided evenly, or are more than experts times ranks.
    """
    total = num_experts + num_redundant
    most = num_experts * (num_ranks - 1)
    if total % num_ranks or num_redundant > most:
        steps = ", ".join(map(str, range(-num_experts % num_ranks, most + 1, num_ranks)[:3]))
        raise ValueError(
            f"{num_experts} experts and {num_redundant} redundant ones do not fill {num_ranks} "
            "ranks evenly, each expert at most once on each; num_redundant_experts may be "
            f"{steps}, ... up to {most}"
        )
    return total // num_ranks
