"""The times of a request's events, and the base class of an engine's observers, such as metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.data.outputs import CompletionOutput, RequestOutput


class EngineObserver:
    """Is notified of events in an engine. These methods do nothing; metrics override them."""

    def tokens(self, times: RequestTimes, piece: CompletionOutput, now: float) -> None:
        """Called when a completion gets tokens or ends. `times` still shows the tokens before
        these."""

    def finished(self, times: RequestTimes, last: CompletionOutput, now: float) -> None:
        """Called when a request has ended with all its completions; `last` is the last piece."""


@dataclass
class RequestTimes:
    """The times of a request's events, in seconds of the monotonic clock.

    Attributes:
        arrival: when it came to the front end, which had not yet tokenized its prompt.
        scheduled: when the engine first computed a part of the prompt.
        last_token, num_tokens: of each completion, by its index.
    """

    arrival: float
    num_prompt_tokens: int
    scheduled: float | None = None
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)

    def note(self, output: RequestOutput, now: float, observer: EngineObserver) -> None:
        """Note when an output came, and tell the observer."""
        for piece in output.outputs:
            observer.tokens(self, piece, now)
            if piece.token_ids:
                self.first_token = self.first_token or now
                self.last_token[piece.index] = now
                self.num_tokens[piece.index] = self.num_tokens.get(piece.index, 0) + len(
                    piece.token_ids
                )
        if output.finished:
            observer.finished(self, output.outputs[-1], now)
