"""A step as plain data: what the scheduler asks of the runner, and what the runner returns."""

from __future__ import annotations

import msgspec

from nanovllm.core.request import BlockCopies, Request
from nanovllm.data.request import TokenLogprobs
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

    @classmethod
    def of(cls, request: Request, num_tokens: int, new_block_ids: list[int]) -> ScheduledRequest:
        """Describe a share of `num_tokens` tokens that begins at the first missing token. If it
        reaches the last known token, the request samples."""
        start = request.num_computed_tokens
        scheduled = cls(
            request.request_id,
            start,
            num_tokens,
            request.token_ids[request.num_sent_tokens :],
            new_block_ids,
        )
        num_extra = num_tokens - request.num_missing_tokens
        if num_extra >= 0:
            scheduled.samples = 1 + num_extra
            scheduled.last_is_pending = start + num_tokens - num_extra > request.num_tokens
        if num_extra > 0:
            scheduled.extra_token_ids = request.extra_token_ids[:num_extra]
        return scheduled


class SchedulerOutput(msgspec.Struct):
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
        blocked_by: why the next request in line, waiting or swapped, was not admitted; "" if no
            request is in line.
        extras: by feature, what its half in the scheduler has to tell its half in the runner.
        all_report: every runner of the engine reports what its features have to tell; otherwise,
            only the one that samples does.
    """

    requests: list[ScheduledRequest] = []
    removed_ids: list[str] = []
    swap_out: BlockCopies = []
    swap_in: BlockCopies = []
    preempted: dict[str, str] = {}
    admitted: dict[str, int] = {}
    resumed: list[str] = []
    blocked_by: str = ""
    token_budget: int = 0
    num_prefill_tokens: int = 0
    extras: dict[str, object] = {}
    all_report: bool = False
    num_tokens: int = 0
    num_samples: int = 0

    def __post_init__(self) -> None:
        if self.requests:
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
            token_budget=self.token_budget, extras=self.extras, all_report=self.all_report
        )


class SampledToken(msgspec.Struct, gc=False):
    """What the runner sampled for one request; or `error`, why it could not, which ends the
    request."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""


class ModelRunnerOutput(msgspec.Struct):
    """What the runner returns for a step.

    Attributes:
        sampled: by request, its new tokens: one, and one more for each extra token that was right.
        prompt_logprobs: by request, log-probabilities of prompt tokens.
        extras: by feature, what its half in the runner has to tell its half in the scheduler.
        others: the `extras` of the other runners, if all report.
    """

    sampled: dict[str, list[SampledToken]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    extras: dict[str, object] = {}
    others: list[dict[str, object]] = []
