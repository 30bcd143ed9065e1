"""A step as plain data: what the scheduler asks of the runner, and what the runner returns.

Built by notebooks/13_scheduler.ipynb and 42: edit it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import BlockCopies, TokenLogprobs
from nanovllm.data.sampling_params import SamplingParams


class ScheduledRequest(msgspec.Struct, gc=False, omit_defaults=True):
    """One request's share of a step: compute `num_tokens` tokens from position `start` on.

    Attributes:
        new_token_ids: tokens the runner has not seen yet; all of them on the first step after an
            admission.
        new_block_ids: blocks appended to the request's table since the runner last saw it.
        sampling_params, num_prompt_tokens: set only on the first step after an admission; None
            and 0 later.
        samples: how many tokens the step samples for it: 0 while it has not caught up, else one
            after its last known token and one after each extra token.
        last_is_pending: the last token to compute is the one that the step before samples; it is
            not known yet.
        extra_token_ids: tokens to compute after the known ones, see `Request.extra_token_ids`.
    """

    request_id: str
    start: int
    num_tokens: int
    new_token_ids: list[int]
    new_block_ids: list[int] | tuple[()]
    sampling_params: SamplingParams | None = None
    num_prompt_tokens: int = 0
    samples: int = 0
    last_is_pending: bool = False
    extra_token_ids: list[int] | tuple[()] = ()

    # How many tokens the runner shall draft for the next step.
    num_drafts: int = 0


@dataclass
class SchedulerOutput:
    """A step as plain data: everything that a runner, here or in another process, has to know.

    Attributes:
        requests: each request's share, in the order in which the tokens are packed.
        removed_ids: requests whose state the runner drops before the step (ended or preempted).
        swap_out, swap_in: block copies to make before the step, in this order.
        preempted: how ("swap", "recompute"), by request; for the trace.
        admitted: tokens that were computed already, by request; for the trace.
        resumed: requests that were swapped in; for the trace.
        token_budget: the most tokens that the step may compute; for the trace.
        num_prefill_tokens: prompt tokens that the step computes.
        num_tokens, num_samples: tokens that the step computes, and requests for which it samples.
        blocked_by: why the first waiting request was not admitted; "" if no request waits.
        unfinished: the engine has unfinished requests, of which the engines in lock-step with it
            must know.
        connector_metadata: KV that the ranks have to fetch or to save; None if there is nothing to
            do. See `kv.connector`.
    """

    requests: list[ScheduledRequest] = field(default_factory=list)
    removed_ids: list[str] = field(default_factory=list)
    swap_out: BlockCopies = field(default_factory=list)
    swap_in: BlockCopies = field(default_factory=list)
    preempted: dict[str, str] = field(default_factory=dict)
    admitted: dict[str, int] = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)
    blocked_by: str = ""
    token_budget: int = 0
    num_prefill_tokens: int = 0
    unfinished: bool = True
    connector_metadata: object = None
    num_tokens: int = field(init=False)
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(request.num_tokens for request in self.requests)
        self.num_samples = sum(request.samples > 0 for request in self.requests)

    def add(self, request: ScheduledRequest) -> None:
        """Put a request's share into the step."""
        self.requests.append(request)
        self.num_tokens += request.num_tokens
        self.num_samples += request.samples > 0

    @property
    def empty(self) -> bool:
        """True when there is nothing to compute."""
        return not self.requests

    def without_removals(self) -> SchedulerOutput:
        """An empty plan, for a runner that should drop no request yet."""
        return SchedulerOutput(
            token_budget=self.token_budget, connector_metadata=self.connector_metadata
        )


class SampledToken(msgspec.Struct, gc=False):
    """What the runner sampled for one request; or `error`, why it could not, which ends the
    request."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""


@dataclass
class ModelRunnerOutput:
    """What the runner returns for a step.

    Attributes:
        sampled: by request, its new tokens: one, and one more for each extra token that was right.
        prompt_logprobs: by request, log-probabilities of prompt tokens.
        anyone_unfinished: whether any of the engines in lock-step had a request.
        connector_output: KV transfers that have ended.
        draft_token_ids: by request, new drafts.
    """

    sampled: dict[str, list[SampledToken]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    anyone_unfinished: bool = True
    connector_output: KVConnectorOutput | None = None

    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
