"""A supervisor of children without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanovllm.processes.channel import Failure
from nanovllm.processes.supervisor import Child, Supervisor


class Supervised(Supervisor[Child]):
    """Watches these children; what they send comes through a function."""

    def __init__(
        self, children: Sequence[Child], listen: Callable[[float], None] = lambda timeout: None
    ) -> None:
        super().__init__()
        self.children.extend(children)
        self.hears = listen

    def listen(self, timeout: float) -> None:
        self.hears(timeout)

    def look_with(self, listen: Callable[[float], None]) -> Failure | None:
        """Look once, and hear this meanwhile."""
        self.hears = listen
        return self.look()
