"""Results of a simulation: plain data, for reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import msgspec

# A bucket of `TokenGaps` is at most 1 / 2**7 of its lowest value wide.
_BITS = 7


class ServedRequest(msgspec.Struct, gc=False, kw_only=True):
    """A request that has ended. Times are in picoseconds since the workload began.

    Attributes:
        num_output_tokens: tokens that it has sampled.
        num_cached_tokens: prompt tokens that the prefix cache had when it was first admitted.
        scheduled: when the first step was planned that computes it; None: there was none.
        first_token, last_token: when these were sampled; None: it has sampled no token.
        replica: the engine that served it; -1: none accepted it.
        outcome: "length": it is complete; "abort": its client has disconnected; "rejected": its
            prompt is too long for the engine; "failed": its replica has failed, or none was
            ready; "unfinished": the simulation ended before it.
        rejection: why it was rejected, in the words of the scheduler; "": it was not.
        is_cut: it is complete with fewer tokens than it asked for, since the context was full.
    """

    request_id: str
    arrival: int
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    scheduled: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    replica: int = -1
    num_preemptions: int = 0
    outcome: str = "length"
    rejection: str = ""
    is_cut: bool = False


@dataclass(kw_only=True)
class ReplicaCounters:
    """Totals of an engine.

    Attributes:
        num_steps: steps that it has computed.
        num_decodes: decoding requests, with or without drafts to verify, summed over the steps.
        decode_context: tokens that these attended to, drafts not included.
        num_draft_tokens, num_accepted_tokens: drafts that these computed, and that they got.
        num_prefill_tokens: tokens that other requests computed.
        num_held_blocks: KV blocks that requests hold, summed over the steps.
        busy: time in which one of its steps ran, in picoseconds.
        num_requests: requests that were sent to it.
        num_preemptions: how often a request lost its blocks.
        num_queried_tokens, num_hit_tokens: tokens that admissions looked up in the prefix cache,
            and found.
        num_evictions: cached blocks that lost their content to a new owner.
        waits: steps that were planned while requests waited, by what they waited for: see
            `SchedulerOutput.blocked_by`.
    """

    num_steps: int = 0
    num_decodes: int = 0
    decode_context: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prefill_tokens: int = 0
    num_held_blocks: int = 0
    busy: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_evictions: int = 0
    waits: Counter[str] = field(default_factory=Counter)


class TokenGaps:
    """The times between the tokens of each request, as a histogram over all requests.

    The buckets are at most 0.8 % wide. Counts, sum and maximum are exact.

    Attributes:
        buckets: the number of gaps in each bucket, by its number.
        total: the sum of all gaps, in picoseconds.
        longest: the longest gap, in picoseconds.
    """

    def __init__(self) -> None:
        self.buckets: dict[int, int] = defaultdict(int)
        self.count = 0
        self.total = 0
        self.longest = 0

    def add(self, gap: int, count: int = 1) -> None:
        """Count equal gaps."""
        self.count += count
        self.total += count * gap
        if gap > self.longest:
            self.longest = gap
        self.buckets[bucket_of(gap)] += count

    def add_growing(self, first: int, growth: int, num_steps: int, count: int) -> None:
        """Count `count` gaps for each of the lengths `first + i * growth`, i from 0 to
        `num_steps - 1`."""
        if not num_steps:
            return
        buckets = self.buckets
        last = first + (num_steps - 1) * growth
        num_gaps = count * num_steps
        self.count += num_gaps
        self.total += num_gaps * (first + last) // 2
        if last > self.longest:
            self.longest = last
        last_bucket = bucket_of(last)
        i = 0
        while (bucket := bucket_of(first + i * growth)) < last_bucket:
            following = -((first - lowest_of(bucket + 1)) // growth)
            buckets[bucket] += count * (following - i)
            i = following
        buckets[bucket] += count * (num_steps - i)

    def quantile(self, share: float) -> float:
        """Return the gap that `share` (0 to 1) of all gaps do not exceed, to within 0.4 %; 0.0
        without gaps."""
        wanted = max(1, -int(-share * self.count // 1))
        for bucket in sorted(self.buckets):
            wanted -= self.buckets[bucket]
            if wanted <= 0:
                return min(_middle(bucket), self.longest)
        return 0.0

    @property
    def mean(self) -> float:
        """The mean gap, in picoseconds; 0.0 without gaps."""
        return self.total / self.count if self.count else 0.0


def bucket_of(gap: int) -> int:
    """Return the number of the bucket that counts a gap: larger gaps have no smaller numbers."""
    shift = gap.bit_length() - 1 - _BITS
    return (shift << _BITS) + (gap >> shift) if shift > 0 else gap


def lowest_of(bucket: int) -> int:
    """Return the shortest gap that a bucket counts."""
    shift = max(0, (bucket >> _BITS) - 1)
    return (bucket - (shift << _BITS)) << shift


def _middle(bucket: int) -> float:
    return (lowest_of(bucket) + lowest_of(bucket + 1) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """How a fleet has served a workload.

    Attributes:
        requests: in the order in which they ended.
        replicas: the counters of each engine.
        gaps: the times between tokens.
        duration: from the begin of the workload until the last step or request has ended, in
            picoseconds.
    """

    requests: list[ServedRequest] = field(default_factory=list)
    replicas: list[ReplicaCounters] = field(default_factory=list)
    gaps: TokenGaps = field(default_factory=TokenGaps)
    duration: int = 0
