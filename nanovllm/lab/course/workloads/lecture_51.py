"""Second part of lecture 51: a fleet of which two engines are slow.

Of six engines, two take four times as long for a step as the others, and nothing tells the router
which. Counted are the milliseconds from the arrivals to the first tokens, on the virtual clock, of
three fleets whose slow engines differ. To count unfinished requests is not enough.

Change what MyRouter overrides, or override more.
"""

from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import RoundRobin
from nanovllm.simulate.workload import WorkloadRequest


class MyRouter(RoundRobin):
    """A router that looks at the engines."""

    def choose(self, request: WorkloadRequest, now: int) -> int:
        """See `RoundRobin.choose`; `now` is in picoseconds."""
        return super().choose(request, now)

    def set_load(self, replica: int, engine: SimulatedEngine, now: int) -> None:
        """An engine may have another load: see `engine.num_waiting` and `engine.num_running`."""
