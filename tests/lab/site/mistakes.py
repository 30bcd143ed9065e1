"""A wrong edit of each lab, and what finds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A text that a reader replaces by another in a function.

    Attributes:
        says: part of the message of the run that fails; "": it does not fail, and looks different.
        fails: the tests that fail.
    """

    lab: str
    target: str
    old: str
    new: str
    says: str = ""
    fails: tuple[str, ...] = ()


PREEMPTION = (
    "test_a_preempted_request_begins_again",
    "test_a_preempted_request_keeps_its_blocks_in_host_memory",
    "test_a_swapped_request_goes_before_later_ones_that_wait",
)
MISTAKES = [
    Mistake(
        "preemption",
        "nanovllm.core.scheduler:last_running",
        "running[-1]",
        "running[0]",
        says="what it computes would overwrite the keys and values of other requests",
        fails=(*PREEMPTION, "test_blocks_are_not_swapped_in_a_plan_that_is_not_run"),
    ),
    Mistake(
        "preemption",
        "nanovllm.core.scheduler:Scheduler._preempt",
        "        victim.num_computed_tokens = 0\n",
        "",
        says="waits, but computed",
        fails=("test_a_preempted_request_begins_again",),
    ),
]
