"""What the engine notes of each step: plain data. Whatever draws, counts or tests reads this."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TracedRequest:
    """A request's share of a step: tokens `start .. start + num_tokens - 1` were computed.

    Attributes:
        num_prompt_tokens: so that a reader can tell prompt from output tokens.
        new_block_ids: blocks appended to its table in this step (the whole table after an admission).
        sampled: token ids sampled at the end of the step; -1 stands for one that the reader may not know.
    """

    request_id: str
    start: int
    num_tokens: int
    num_prompt_tokens: int
    new_block_ids: list[int]
    sampled: list[int] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """ "decode" if the share is one token beyond the prompt, else "prefill": tokens that are known and were not
        computed, or whose blocks were lost."""
        return "decode" if self.num_tokens == 1 and self.start >= self.num_prompt_tokens else "prefill"

    @property
    def samples_first_token(self) -> bool:
        """Whether the request's output began here: after the prompt's last token, and whenever the reader came."""
        return bool(self.sampled) and self.start + self.num_tokens == self.num_prompt_tokens


@dataclass
class Snapshot:
    """The whole state of the pool once a step had been scheduled, for a reader who knows nothing of what came before.

    Attributes:
        tables: request id to block ids, of all requests that hold blocks on the device, but for those in `StepRecord.held`.
        num_tokens: request id to computed tokens, those of this step included.
        cached: free blocks that can still be found in the prefix cache.
        prompt_lens: request id to prompt length, of all requests that have not ended.
    """

    tables: dict[str, list[int]] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)
    prompt_lens: dict[str, int] = field(default_factory=dict)


@dataclass
class StepRecord:
    """One step of the engine; or, without requests and of no duration, what ended when nothing was left to compute.

    Attributes:
        step: counts from 0; a record without requests has the number of the step after it.
        start, duration: seconds since the trace began.
        token_budget: `max_num_batched_tokens`.
        arrived: request id to prompt length, for requests added since the last step.
        admitted: request id to tokens found in the prefix cache.
        resumed: swapped requests that came back.
        preempted: request id to "recompute" or "swap".
        finished: request id to finish reason, aborts since the last step included.
        swap_out, swap_in: blocks copied (from, to).
        blocked_by: why the first waiting request had to wait ("kv blocks", "max_num_seqs", ...); "" if none waits.
        waiting, running, swapped: the queues when the step had been scheduled. Records that were read from a file
            share lists that did not change.
        held: tables that KV transfers hold, by request id (or by the transfer's, once its request has gone on without it): of
            requests whose KV is being received, or has been and not been computed with, and of ended ones that a peer reads.
        num_free_blocks, num_blocks: of the device pool, when the step had been scheduled.
        num_evictions: cached blocks that were overwritten since the engine started.
        snapshot: everything a reader needs who starts here; None in most records.
        prompts, text: request id to its prompt, and to the text that it got in this step, where a reader may know them.
    """

    step: int
    start: float
    duration: float
    token_budget: int
    requests: list[TracedRequest]
    arrived: dict[str, int] = field(default_factory=dict)
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
