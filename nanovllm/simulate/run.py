"""Steps of a simulated engine that are made in one call."""

from __future__ import annotations

from math import isqrt

import msgspec


class Run(msgspec.Struct, frozen=True, gc=False):
    """Steps that compute a token for each member of the group of decoding requests, and nothing
    else. `finish` makes them all.

    Attributes:
        num_steps: how many.
        num_results: how many of them have ended when `finish` is called. The others stay in flight.
        ends: the last step samples the last token of a member. Its result is taken, too, although
            one more step may have to be planned before.
        origin: the end of the step in flight; without one, the begin of the first of these steps.
        first: time of the first step.
        growth: by how much each step takes longer than the one before.
        size: requests that compute.
        context: tokens that these attend to in the first step.
        first_wait: the first of these steps that is planned while a request waits.
    """

    num_steps: int
    num_results: int
    ends: bool
    origin: int
    first: int
    growth: int
    size: int
    context: int
    first_wait: int

    def price(self, num_steps: int) -> int:
        """Return the time of the first steps."""
        return num_steps * self.first + self.growth * (num_steps * (num_steps - 1) // 2)

    def steps_in(self, time: int) -> int:
        """Return the lowest number of steps that take this time or more."""
        first, growth = self.first, self.growth
        if time <= 0:
            return 0
        if growth == 0:
            return -(-time // first)
        # price(n) >= time is growth * n**2 + linear * n >= 2 * time.
        linear = 2 * first - growth
        num_steps = (isqrt(linear * linear + 8 * growth * time) - linear) // (2 * growth)
        # The root was rounded down.
        return num_steps + (self.price(num_steps) < time)
