"""What a caller gets back, in vLLM's shapes: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import msgspec


# An answer can have 100,000 of them, each of which a dataclass would have the garbage collector visit.
class Logprob(msgspec.Struct, gc=False):
    """One token's log-probability at one position.

    Attributes:
        logprob: natural logarithm of the model's probability.
        rank: 1 for the likeliest token; None where it was not worked out.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dictionary a position, by token id; None for the first prompt token, which nothing precedes.
PositionLogprobs = dict[int, Logprob] | None


@dataclass
class CompletionOutput:
    """One of the `n` completions of a request. In a stream, text, token_ids and logprobs hold what is new.

    Attributes:
        index: 0 to n - 1.
        cumulative_logprob: sum over the chosen tokens so far, if log-probabilities were asked for.
        finish_reason: "stop", "length", "abort", "error", or None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence token.
        engine: which of several engines generates it (data parallelism); 0 until that is known.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    engine: int = 0

    @property
    def finished(self) -> bool:
        """True once nothing more will come."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request with its completions.

    Attributes:
        prompt: the text, if the request came as text.
        prompt_logprobs: one entry a prompt token, if asked for.
        num_cached_tokens: prompt tokens that the prefix cache supplied, or another engine.
        kv_transfer_params: what to tell the engine that goes on with the request.
        error: what went wrong, if a finish reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs] | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    error: str = ""


def join_pieces(pieces: list[CompletionOutput]) -> CompletionOutput:
    """One completion from the pieces of its stream."""
    last = pieces[-1]
    wants_logprobs = any(piece.logprobs is not None for piece in pieces)
    return CompletionOutput(
        last.index,
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.token_ids],
        last.cumulative_logprob,
        [entry for piece in pieces for entry in piece.logprobs or ()] if wants_logprobs else None,
        last.finish_reason,
        last.stop_reason,
        last.engine,
    )


class OutputCollector:
    """Puts the pieces of one request together again; linear in their number."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._pieces: dict[int, list[CompletionOutput]] = {}

    def add(self, output: RequestOutput) -> None:
        """Take one piece."""
        self._last = output
        for piece in output.outputs:
            self._pieces.setdefault(piece.index, []).append(piece)

    def result(self) -> RequestOutput:
        """The whole request so far."""
        assert self._last is not None, "no output has come yet"
        last = self._last
        outputs = [join_pieces(self._pieces[index]) for index in sorted(self._pieces)]
        return RequestOutput(
            last.request_id,
            last.prompt,
            last.prompt_token_ids,
            outputs,
            last.finished,
            last.prompt_logprobs,
            last.num_cached_tokens,
            last.kv_transfer_params,
            last.error,
        )


@dataclass
class EngineStats:
    """Where the engine stands after a step; counters count from its start.

    Attributes:
        kv_cache_usage: share of the KV blocks that is held; 1 is all.
        num_waves: those that have ended, of an engine in lock-step with others.
        num_receiving: requests whose KV is on its way from elsewhere.
        num_held_requests: requests that have ended, and whose blocks are held for others.
        num_external_queried_tokens, num_external_hit_tokens: asked for elsewhere, and come from there.
        engines: of several engines, each one's own; empty for a single one.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_steps: int = 0
    num_waves: int = 0
    num_receiving: int = 0
    num_held_requests: int = 0
    num_external_queried_tokens: int = 0
    num_external_hit_tokens: int = 0
    engines: list[EngineStats] = field(default_factory=list)

    @classmethod
    def together(cls, engines: list[EngineStats]) -> EngineStats:
        """What several engines come to: sums, the mean of `kv_cache_usage`, and the most of `num_waves`."""
        names = [f.name for f in fields(cls) if f.name != "engines"]
        total = cls(*(sum(getattr(engine, name) for engine in engines) for name in names))
        total.engines = engines
        total.kv_cache_usage /= len(engines)
        total.num_waves = max(engine.num_waves for engine in engines)
        return total


@dataclass
class KVConnectorOutput:
    """What has come to an end, by request id.

    Attributes:
        finished_sending: nobody will read these requests' blocks any more.
        finished_recving: nobody will write to these requests' blocks any more: what was asked for is there, except for
            `invalid_block_ids`.
        invalid_block_ids: by request, blocks whose content did not come or cannot be trusted. (In vLLM a set for all requests
            together; but a block's number may mean another request's block by the time at which the last rank says so.)
        abandoned: requests that need not wait any longer, and under which name their blocks are to be held, since somebody may
            still write to them: until `finished_recving` has this name.
        reasons: by request, what went wrong.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: dict[str, set[int]] = field(default_factory=dict)
    abandoned: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.finished_recving or self.abandoned)

    def add(self, other: KVConnectorOutput) -> None:
        """Take over what another one says."""
        self.finished_sending |= other.finished_sending
        self.finished_recving |= other.finished_recving
        self.reasons |= other.reasons
        for request_id, block_ids in other.invalid_block_ids.items():
            self.invalid_block_ids[request_id] = self.invalid_block_ids.get(request_id, set()) | block_ids
