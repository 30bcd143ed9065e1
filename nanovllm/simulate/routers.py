"""The policies of `nanovllm router` in front of simulated engines, with what each can know."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from nanovllm.features.data_parallel.router import load_score
from nanovllm.router.policies import PrefixIndex, Router
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.workload import WorkloadRequest


class ReportedBlocks(dict[Hashable, int]):
    """The blocks that an engine has cached (`BlockPool.cached_blocks`), each change of which is
    reported to a router immediately, as by vLLM's KV events.

    Args:
        index: the router's index.
        replica: the engine's number there.
    """

    def __init__(self, index: PrefixIndex, replica: int) -> None:
        super().__init__()
        self._index = index
        self._replica = replica

    def __setitem__(self, name: Hashable, block_id: int) -> None:
        super().__setitem__(name, block_id)
        self._index.add(self._replica, name)

    def __delitem__(self, name: Hashable) -> None:
        super().__delitem__(name)
        self._index.remove(self._replica, (name,))


class PolicyRouter:
    """Chooses engines with one of the router's policies.

    Args:
        router: the policy and its state. A load is `load_score`; with weights, it is the number
            of waiting requests, as in llm-d.
        engines: show their block pools, if the choice depends on them: with weights, on what is in
            use, and with the policy `precise`, on what they have cached.
        names: returns the names of a prompt's blocks.
        refresh: picoseconds between two looks at the loads of the engines, as by a router that
            scrapes metrics; 0: it always knows them.

    Attributes:
        available: the set of the engines that may be chosen.
    """

    def __init__(
        self,
        router: Router,
        engines: Sequence[SimulatedEngine],
        names: Callable[[WorkloadRequest], Sequence[Hashable]],
        refresh: int = 0,
    ) -> None:
        self.router = router
        self.refresh = refresh
        self.available = router.state.everyone
        self._names = names
        # Engines whose loads may have changed since the last choice.
        self._changed: dict[int, SimulatedEngine] = {}
        # Loads that the router does not know before the next look.
        self._unseen: dict[int, tuple[int, int]] = {}
        self._next_look = 0
        for replica, engine in enumerate(engines):
            engine.is_watched = router.reads_caches or router.state.weights is not None
            if router.reads_caches:
                reported = ReportedBlocks(router.state.cached, replica)
                engine.scheduler.manager.pool.cached_blocks = reported  # type: ignore[assignment]

    def choose(self, request: WorkloadRequest, now: int) -> int:
        """Return the number of the engine for a request."""
        self._look(now)
        state = self.router.state
        for replica, engine in self._changed.items():
            load, kv_percent = self._load_of(engine)
            state.set_load(replica, load, kv_percent)
        self._changed.clear()
        names = self._names(request) if self.router.compares_prefixes else ()
        return self.router.choose(names, self.available)

    def set_load(self, replica: int, engine: SimulatedEngine, now: int) -> None:
        """The load of an engine may have changed."""
        if self.refresh:
            self._look(now)
            self._unseen[replica] = self._load_of(engine)
        else:
            self._changed[replica] = engine

    def set_available(self, replica: int, is_available: bool) -> None:
        """An engine has failed, or its replacement is ready, with an empty cache."""
        self.available = self.available & ~(1 << replica) | is_available << replica
        self.router.state.sent.forget(replica)

    def _load_of(self, engine: SimulatedEngine) -> tuple[int, int]:
        if self.router.state.weights is None:
            return load_score(engine.num_waiting, engine.num_running), 0
        return engine.num_waiting, round(100 * engine.scheduler.manager.pool.usage)

    def _look(self, now: int) -> None:
        """Learn the loads as they were at the last look, if it is due: before this event."""
        if self.refresh and now >= self._next_look:
            for replica, load in self._unseen.items():
                self.router.state.set_load(replica, *load)
            self._unseen.clear()
            self._next_look = (now // self.refresh + 1) * self.refresh
