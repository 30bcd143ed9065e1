"""What a caller receives, in vLLM's shapes: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, overload

import msgspec

from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.spec_decoding import SpecDecodingStats
from nanovllm.data.structured_outputs import GrammarError

if TYPE_CHECKING:
    from nanovllm.data.request import EngineRequest


class RequestFailedError(RuntimeError):
    """One request has failed, and no other; the message says why."""


# Not a dataclass: an answer can have 100,000 of these, and the garbage collector would visit each.
class Logprob(msgspec.Struct, gc=False):
    """One token's log-probability at one position.

    Attributes:
        logprob: natural logarithm of the model's probability.
        rank: 1 for the likeliest token; None if it was not computed.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dictionary per position, by token id; None for the first prompt token, which nothing precedes.
PositionLogprobs = dict[int, Logprob] | None


# Structs, since one is made per token, which takes a fifth of the time of a dataclass.
class CompletionOutput(msgspec.Struct, gc=False):
    """One of the `n` completions of a request. In a stream, text, token_ids and logprobs hold only
    the new part.

    Attributes:
        index: 0 to n - 1.
        cumulative_logprob: sum over the chosen tokens so far, if log-probabilities were asked for.
        finish_reason: "stop", "length", "abort", "error", or None while it is running.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence
            token.
        engine: number of the data-parallel engine that generates it; 0 until that is known.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    engine: int = 0


class RequestOutput(msgspec.Struct):
    """A request with its completions.

    As in nano-vllm, `output["text"]` and `output["token_ids"]` belong to the first completion.

    Attributes:
        prompt: the text, if the request was given as text.
        prompt_logprobs: one entry per prompt token, if requested.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache or from another engine.
        kv_transfer_params: parameters for the engine that continues the request.
        error: what went wrong, if a finish reason is "error": in the server, or because the grammar
            could not be followed any further.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs] | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: RemoteKV | None = None
    error: RequestFailedError | GrammarError | None = None

    @overload
    def __getitem__(self, key: Literal["text"]) -> str: ...

    @overload
    def __getitem__(self, key: Literal["token_ids"]) -> list[int]: ...

    def __getitem__(self, key: str) -> str | list[int]:
        if key not in ("text", "token_ids"):
            raise KeyError(
                f"an output has the keys 'text' and 'token_ids', not {key!r}; all else are "
                "attributes"
            )
        first = self.outputs[0]
        return first.text if key == "text" else first.token_ids


def join_pieces(pieces: list[CompletionOutput]) -> CompletionOutput:
    """One completion from the pieces of its stream."""
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return msgspec.structs.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=None if all(piece.logprobs is None for piece in pieces) else logprobs,
    )


class OutputCollector:
    """Joins the pieces of one request; linear in their number."""

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
        assert self._last is not None
        return msgspec.structs.replace(
            self._last, outputs=[join_pieces(self._pieces[index]) for index in sorted(self._pieces)]
        )


@dataclass
class EngineStats:
    """State of an engine after a step; counters count from its start.

    Attributes:
        kv_cache_usage: share of the KV blocks that requests hold, 0 to 1.
        num_waves: completed waves of an engine in lock-step with others (see
            `features.data_parallel.waves`).
        num_receiving: requests whose KV is being received from another engine or store.
        num_held_requests: finished requests whose blocks are kept until another engine has read
            them.
        num_external_queried_tokens, num_external_hit_tokens: tokens that the connector was asked
            for, and supplied.
        engines: the stats of each data-parallel engine; empty for a single engine.
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
    spec_decoding: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    engines: list[EngineStats] = field(default_factory=list)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the looked-up tokens that the prefix cache had, 0 to 1, since the engine's
        start."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0

    @classmethod
    def together(cls, engines: list[EngineStats]) -> EngineStats:
        """The stats of several engines as one: sums, the mean of `kv_cache_usage`, and the maximum
        of `num_waves`."""
        names = [f.name for f in fields(cls) if f.name not in ("spec_decoding", "engines")]
        total = cls(*(sum(getattr(engine, name) for engine in engines) for name in names))
        for drafts in (engine.spec_decoding for engine in engines):
            total.spec_decoding.add(
                drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens_per_pos
            )
        total.engines = engines
        total.kv_cache_usage /= len(engines)
        total.num_waves = max(engine.num_waves for engine in engines)
        return total


@dataclass
class KVConnectorOutput:
    """KV transfers that have ended, by request id.

    Attributes:
        finished_sending: no peer reads these requests' blocks any more.
        finished_recving: no peer writes to these requests' blocks any more. The requested content
            has arrived, except for `invalid_block_ids`.
        invalid_block_ids: request id → blocks whose content did not arrive or cannot be trusted.
            (In vLLM, one set for all requests; but by the time the last rank reports, a block's
            number may belong to another request.)
        reasons: request id → what went wrong.
        requests: `EngineRequest`s that other engines ask for.
        aborts: ids of requests that have to end, because the engine that has asked for them no
            longer wants them, or cannot have them.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: dict[str, set[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.finished_recving or self.requests or self.aborts)

    def of(self, request_id: str) -> KVConnectorOutput:
        """What it says of one request that has ended."""
        return KVConnectorOutput(
            self.finished_sending & {request_id},
            self.finished_recving & {request_id},
            {
                key: block_ids
                for key, block_ids in self.invalid_block_ids.items()
                if key == request_id
            },
            reasons={key: reason for key, reason in self.reasons.items() if key == request_id},
        )

    def add(self, other: KVConnectorOutput) -> None:
        """Merge the output of another rank."""
        self.finished_sending |= other.finished_sending
        self.finished_recving |= other.finished_recving
        self.reasons |= other.reasons
        for request_id, block_ids in other.invalid_block_ids.items():
            self.invalid_block_ids[request_id] = (
                self.invalid_block_ids.get(request_id, set()) | block_ids
            )


# The name in the core, which speaks of no connector.
EndedTransfers = KVConnectorOutput
