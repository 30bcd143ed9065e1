"""The strategy for other engines and stores with which an engine works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.request import EngineOutput

if TYPE_CHECKING:
    from nanovllm.core.engine import EngineCore


class Peers:
    """The strategy for other engines and stores with which this engine works. This base class knows
    of none.

    Attributes:
        in_lock_step: the engine runs each step together with others, also when it has nothing to
            compute.
        is_quiet: the engine may sleep although it has work, since all of it waits for others.
        may_free_blocks: others may soon free blocks, or fill those of a request that waits.
        sources: become readable when a message of theirs arrives.
    """

    in_lock_step = False
    is_quiet = False
    may_free_blocks = False
    sources: Sequence[object] = ()

    def has_work(self, has_unfinished: bool) -> bool:
        """Return whether there is a step to run.

        Args:
            has_unfinished: this engine has requests.
        """
        return has_unfinished

    def idle_seconds(self, has_work: bool) -> float | None:
        """Return how long an idle engine may sleep if nothing arrives; None: no limit."""
        return None

    # ---------------------------------------------------------------- requests

    def check_request(self, request: Request) -> None:
        """Check a new request.

        Raises:
            ValueError: others cannot do what it asks of them.
        """

    def decline(self, request: Request, reason: str) -> None:
        """Tell others that this engine has rejected a request."""

    def revoke(self, request_id: str) -> None:
        """Tell others that no client waits for this request."""

    # ---------------------------------------------------------------- every step

    def take(self, engine: EngineCore) -> list[EngineOutput]:
        """Handle what has arrived from others. Returns outputs of requests that end with it."""
        return []

    def must_run(self, plan: SchedulerOutput) -> bool:
        """Return whether an empty plan has something to do for others."""
        return False

    def launching(self, plan: SchedulerOutput) -> None:
        """Add to a plan, which is about to be launched, what others have to know."""

    def wait(self) -> None:
        """Wait for a moment, since nothing can be computed before others have done something."""

    def rest(self) -> None:
        """Take note that the engine has no work."""

    # ---------------------------------------------------------------- the end

    def forget_requests(self) -> None:
        """Drop the state of all requests after a failed step."""

    def close(self) -> None:
        """End all connections."""
