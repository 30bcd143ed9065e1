"""Second part of lecture 20: send shorter orders.

The executor writes each step's plan into shared memory, from which its ranks read it. Counted are
the bytes of all orders. One plan resembles the one before. `Encoder` and `Decoder` are in different
processes: a rank knows nothing but the bytes, and gets all of them, in their order.
"""

import pickle

from nanovllm.core.schedule import SchedulerOutput


class Encoder:
    """The executor's half."""

    def encode(self, plan: SchedulerOutput) -> bytes:
        """Return the order for a plan."""
        return pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)


class Decoder:
    """The half of a rank."""

    def decode(self, order: bytes) -> SchedulerOutput:
        """Return the plan."""
        plan: SchedulerOutput = pickle.loads(order)
        return plan
