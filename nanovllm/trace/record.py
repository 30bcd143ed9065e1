"""Records of the engine's steps: plain data for figures, counts and tests."""

from dataclasses import dataclass, field

import msgspec


@dataclass(slots=True)
class TracedRequest:
    """A request's share of a step, in which tokens `start .. start + num_tokens - 1` were computed.

    Attributes:
        num_prompt_tokens: separates prompt tokens from output tokens.
        new_block_ids: blocks that this step appended to its table (the whole table after an
            admission).
        sampled: token ids sampled at the end of the step; -1 if the reader must not see them.
        num_drafts: how many of the tokens, at the end, were drafts. All of `sampled` but the last
            one are those that were accepted.
    """

    request_id: str
    start: int
    num_tokens: int
    num_prompt_tokens: int
    new_block_ids: list[int]
    sampled: list[int] = field(default_factory=list)
    num_drafts: int = 0

    @property
    def kind(self) -> str:
        """ "decode" if the share is one token beyond the prompt, and drafts; otherwise "prefill":
        known tokens that were not computed before, or whose blocks were lost."""
        is_decode = self.num_tokens - self.num_drafts == 1 and self.start >= self.num_prompt_tokens
        return "decode" if is_decode else "prefill"

    @property
    def num_accepted(self) -> int:
        """Drafts that became tokens. The slots of the others, the last `num_drafts - num_accepted`
        ones, are written again."""
        return max(0, len(self.sampled) - 1)

    @property
    def samples_first_token(self) -> bool:
        """Whether the request's output begins in this step, after the prompt's last token."""
        return bool(self.sampled) and self.start + self.num_tokens == self.num_prompt_tokens


class Arrival(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a queued request that decide plans, besides the length of its prompt.

    Blocks are named by request and index, since a hash would reveal the prompt to a reader that can
    guess it.

    Attributes:
        time: seconds since the trace began.
        in_flight: steps whose results were missing at this time.
        max_tokens: the most output tokens that the context and the request allow.
        priority: smaller runs earlier; 0 if requests run in the order of arrival.
        prefix: (which arrival of the trace, counted from 0; number of blocks): the request's first
            blocks that have the same tokens as blocks of an earlier request; None: no block has.
        looks_back: see `SamplingParams.looks_back`.
        prompt_logprobs: the whole prompt is computed, and nothing taken from the prefix cache.
        is_remote: another engine may have computed the prompt.
        num_speculative_tokens: the most drafts per step; None: as many as for others.
    """

    time: float
    max_tokens: int
    in_flight: int = 0
    priority: int = 0
    prefix: tuple[int, int] | None = None
    looks_back: bool = False
    prompt_logprobs: bool = False
    is_remote: bool = False
    num_speculative_tokens: int | None = None


class TransfersEnded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """KV transfers that have ended between two steps; see `KVConnectorOutput`.

    Attributes:
        in_flight: steps whose results were missing.
        sent, received: ids of the requests whose blocks are no longer read, or written.
        invalid_blocks: request id to blocks whose content did not arrive.
        failed: requests that end, since their KV did not arrive.
    """

    in_flight: int = 0
    sent: list[str] = []
    received: list[str] = []
    invalid_blocks: dict[str, list[int]] = {}
    failed: list[str] = []


@dataclass
class Snapshot:
    """The whole state of the pool after a step was scheduled, for a reader that starts there.

    Attributes:
        tables: request id to block ids, of all requests with blocks on the device, without those in
            `StepRecord.held`.
        num_tokens: request id to computed tokens, including those of this step.
        cached: free blocks that are still in the prefix cache.
        prompt_lens: request id to prompt length, of all requests that have not ended.
        num_preemptions: times that a request was preempted since the engine started, including this
            step.
    """

    tables: dict[str, list[int]] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)
    prompt_lens: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0


@dataclass
class StepRecord:
    """One step of the engine; or, without requests and with duration 0, what happened after the
    last step.

    Attributes:
        step: counts from 0; a record without requests has the number of the step after it.
        start, duration: seconds since the trace began.
        planned: when the step was planned, if the device was busy until `start`; 0: then, too.
        token_budget: the most tokens that the step may compute: `max_num_batched_tokens`, or what
            `max_step_ms` allows.
        arrived: request id to prompt length, for requests added since the last step.
        arrivals: the same requests, with all that the scheduler knows of them.
        prefixes: like `Arrival.prefix`, for requests that have ended and whose output filled blocks
            with the same tokens as another request's.
        aborted: request id to the number of steps whose results were missing, for requests that
            have ended between two steps.
        cache_resets: the number of steps whose results were missing, for each time that all cached
            prefixes were forgotten since the last step.
        transfers: KV transfers that have ended since the last step.
        admitted: request id to tokens found in the prefix cache.
        resumed: swapped requests that run again.
        preempted: request id to "recompute" or "swap".
        finished: request id to finish reason, including aborts since the last step.
        swap_out, swap_in: blocks copied (from, to).
        blocked_by: why the first waiting request has to wait ("kv blocks", "max_num_seqs", ...); ""
            if none waits.
        waiting, running, swapped: the queues after the step was scheduled. Records from a file
            share lists that did not change.
        held: block tables that KV transfers hold, by request id, or by transfer id if the request
            continues without it. They belong to requests whose KV is being received, or was
            received and not used yet, and to ended requests that a peer reads.
        num_free_blocks, num_blocks: of the device pool, after the step was scheduled.
        num_evictions: cached blocks that were overwritten since the engine started.
        snapshot: everything that a reader needs to start here; None in most records.
        prompts, text: request id to its prompt, and to its new text of this step, if readers may
            see them.
    """

    step: int
    start: float
    duration: float
    token_budget: int
    requests: list[TracedRequest]
    planned: float = 0.0
    arrived: dict[str, int] = field(default_factory=dict)
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    prefixes: dict[str, tuple[int, int]] = field(default_factory=dict)
    aborted: dict[str, int] = field(default_factory=dict)
    cache_resets: list[int] = field(default_factory=list)
    transfers: list[TransfersEnded] = field(default_factory=list)
    admitted: dict[str, int] = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)
    preempted: dict[str, str] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocked_by: str = ""
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    held: dict[str, list[int]] = field(default_factory=dict)
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_evictions: int = 0
    snapshot: Snapshot | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(request.num_tokens for request in self.requests)


# Of a record on its way between two processes, in msgpack.
decode_record = msgspec.msgpack.Decoder(StepRecord).decode
