"""Requests without token ids: they have lengths, and names for their blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from nanovllm.core.request import Request, RequestStatus
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.simulate.results import ServedRequest
from nanovllm.simulate.workload import WorkloadRequest

NEVER = 1 << 62
# Names are read in less time than attributes of an enum.
RUNNING = RequestStatus.RUNNING
WAITING = RequestStatus.WAITING
NO_STOPS: dict[int, int | None] = {}


class Tokens(msgspec.Struct, gc=False):
    """The tokens of a request, of which only the number is known: what the scheduler needs of a
    list of them."""

    request: SimulatedRequest

    def __len__(self) -> int:
        return self.request.num_tokens

    def __getitem__(self, key: slice) -> range:
        """Return as many of any numbers."""
        return range(self.request.num_tokens)[key]

    def append(self, token_id: int) -> None:
        """Count a token."""
        self.request.num_tokens += 1


class SimulatedRequest(Request):
    """A request on its way through a simulated engine. It has a number of tokens, and its blocks
    have numbers instead of hashes.

    Attributes:
        num_tokens: known tokens, prompt and output.
        arrival: when it arrived, in picoseconds, like all times here.
        scheduled: when the first step was planned that computes it; None: not yet.
        first_token, last_token: when these were sampled; None: not yet.
        replica: the engine that serves it.
        rejection: why the engine has rejected it; "": it has not.
        has_copies: it has computed a block whose content is cached as another block.
        is_member: see `DecodingQueues`, like all that follows.
        is_ending: its last token is in flight, so that the next step has no share for it.
        planned, taken: steps as of which its counters are right.
        last_step: the step that samples its last token, while it is a member.
        event: the next step in which something happens to it.
        last_event: the last such step.
    """

    # Slots take a quarter of the memory of a dictionary.
    __slots__ = (
        *(vars(Request(EngineRequest("", [], SamplingParams()))).keys() - {"token_ids"}),
        "arrival",
        "event",
        "first_token",
        "has_copies",
        "is_ending",
        "is_member",
        "last_event",
        "last_step",
        "last_token",
        "num_tokens",
        "planned",
        "rejection",
        "replica",
        "scheduled",
        "taken",
    )
    num_tokens: int
    scheduled: int | None
    first_token: int | None
    last_token: int | None

    def __init__(self, source: WorkloadRequest, names: list[int], order: tuple[int, int]) -> None:
        # All that `Request` sets, in less time.
        self.request_id = source.request_id
        self.num_prompt_tokens = source.num_prompt_tokens
        self.sampling_params = _sampling_params(source.num_output_tokens)
        self.status = WAITING
        self.num_computed_tokens = self.num_pending_tokens = self.num_sent_tokens = 0
        self.max_num_tokens = self.min_tokens = self.num_external_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens = -1
        self.stop_reasons = NO_STOPS
        self.looks_back = False
        self.finish_reason = self.stop_reason = self.num_exact_tokens = None
        self.cache_salt = self.kv_transfer_params = self.remote_kv = None
        self.num_tokens = source.num_prompt_tokens
        self.extra_token_ids = []
        self.block_hashes = names  # type: ignore[assignment]
        self.order = order
        self.arrival = source.arrival
        self.scheduled = self.first_token = self.last_token = None
        self.replica = self.planned = self.taken = 0
        self.rejection = ""
        self.has_copies = self.is_member = self.is_ending = False
        self.last_step = self.event = NEVER
        self.last_event = -1

    @property
    def token_ids(self) -> Tokens:  # type: ignore[override]
        """Its tokens."""
        return Tokens(self)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """See `Request`, like the next two, which are equal to it with fewer calls."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens that the next step could compute."""
        num_pending = self.num_pending_tokens
        num_tokens = self.num_tokens + num_pending
        if num_pending and num_tokens >= self.max_num_tokens:
            return 0
        num_extra = len(self.extra_token_ids) if self.num_sent_tokens else 0
        return num_tokens - self.num_computed_tokens + num_extra

    @property
    def in_prefill(self) -> bool:
        """True while more than the newest token has to be computed."""
        num_tokens = self.num_tokens + self.num_pending_tokens
        return num_tokens - self.num_computed_tokens > 1 or num_tokens == self.num_prompt_tokens

    def served(self) -> ServedRequest:
        """Return what became of it."""
        return ServedRequest(
            request_id=self.request_id,
            arrival=self.arrival,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens if self.num_cached_tokens > 0 else 0,
            scheduled=self.scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            replica=self.replica,
            num_preemptions=self.num_preemptions,
            outcome=self.finish_reason or "unfinished",
            rejection=self.rejection,
            is_cut=(
                self.finish_reason == "length"
                and self.num_output_tokens < (self.sampling_params.max_tokens or 0)
            ),
        )


class RequestMaker:
    """Creates the requests of a workload.

    Two requests share a block if their prompts are equal up to the block's last token. A number in
    `WorkloadRequest.prefix_ids`, 0 or more, has to name the whole prefix, as in Mooncake's traces.
    A block that contains tokens that no number describes belongs to its request alone; so does one
    that contains output, unless numbers name outputs.

    Args:
        block_size: tokens per block of the engines.
        prefix_block_size: prompt tokens per number in `prefix_ids`.
        by_priority: requests run in the order of their priorities.
        names_outputs: see `Workload`.
    """

    def __init__(
        self,
        block_size: int,
        prefix_block_size: int,
        by_priority: bool = False,
        names_outputs: bool = False,
    ) -> None:
        self.block_size = block_size
        self.prefix_block_size = prefix_block_size
        self.by_priority = by_priority
        self.names_outputs = names_outputs
        # At most this number of blocks ends in the tokens that a number describes.
        self._per_number = -(-prefix_block_size // block_size)
        self._num_made = 0
        self._own_name = -1

    def __call__(self, source: WorkloadRequest) -> SimulatedRequest:
        """Create a request."""
        priority = source.priority if self.by_priority else 0
        request = SimulatedRequest(source, self._names(source), (priority, self._num_made))
        self._num_made += 1
        return request

    def _names(self, source: WorkloadRequest) -> list[int]:
        """Name all blocks that the request may ever fill: by its prefixes, then numbers below 0
        that no other request has."""
        num_tokens = source.num_prompt_tokens + source.num_output_tokens
        num_named = num_tokens if self.names_outputs else source.num_prompt_tokens
        names = self.prompt_names(source.prefix_ids, num_named)
        end = self._own_name - num_tokens // self.block_size + len(names)
        names += range(self._own_name, end, -1)
        self._own_name = end
        return names

    def prompt_names(self, prefix_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Name the full blocks of a prompt as far as its numbers describe them."""
        size = self.block_size
        per_number = self._per_number
        covered = len(prefix_ids) * self.prefix_block_size
        if covered > num_prompt_tokens:
            covered = num_prompt_tokens
        count = covered // size
        if size == self.prefix_block_size:
            return list(prefix_ids[:count])
        names: list[int] = []
        end = 0
        for prefix_id in prefix_ids[: -(-covered // self.prefix_block_size)]:
            # Blocks that end in this number's tokens.
            first = end // size
            end += self.prefix_block_size
            num_blocks = min(end // size, count) - first
            names += range(prefix_id * per_number, prefix_id * per_number + num_blocks)
        return names


_PARAMS = SamplingParams(ignore_eos=True, temperature=0.0)


@functools.cache
def _sampling_params(num_output_tokens: int) -> SamplingParams:
    """Return the parameters of all requests with this number of output tokens. A workload has
    checked the number, so that no new parameters have to be checked."""
    params = SamplingParams.__new__(SamplingParams)
    vars(params).update(vars(_PARAMS), max_tokens=num_output_tokens)
    return params
