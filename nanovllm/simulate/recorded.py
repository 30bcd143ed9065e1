"""The requests of a trace: their arrivals, the blocks that they share, and the times of their
tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from nanovllm.data.errors import UsageError
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.simulate.workload import MAX_LENGTH, MAX_SECONDS, SECOND, WorkloadRequest
from nanovllm.trace.record import Arrival, StepRecord

# Flags of the settings in a trace.
FLAGS = {
    "model": "model",
    "block_size": "block-size",
    "num_blocks": "num-kv-blocks",
    "token_budget": "max-num-batched-tokens",
    "max_num_seqs": "max-num-seqs",
    "batching_policy": "batching-policy",
    "enable_prefix_caching": "enable-prefix-caching",
    "enable_chunked_prefill": "enable-chunked-prefill",
    "long_prefill_token_threshold": "long-prefill-token-threshold",
    "max_step_ms": "max-step-ms",
    "scheduling_policy": "scheduling-policy",
    "preemption_mode": "preemption-mode",
    "async_scheduling": "async-scheduling",
    "pipeline_parallel_size": "pipeline-parallel-size",
}


class Sample(NamedTuple):
    """The tokens that a request got from a step.

    Attributes:
        time: when the step ended, in seconds.
        num_tokens: the new tokens.
        num_drafts: drafts that the step verified.
    """

    time: float
    num_tokens: int
    num_drafts: int


@dataclass
class RecordedRequest:
    """A request of a trace.

    Attributes:
        output_prefix: like `Arrival.prefix`, of its blocks with output.
        reason: why it ended; "": it did not.
        is_aborted: it ended between two steps.
        end: when it ended, in seconds; if aborted, at the latest.
    """

    name: str
    num_prompt_tokens: int
    arrival: Arrival
    output_prefix: tuple[int, int] | None = None
    samples: list[Sample] = field(default_factory=list)
    reason: str = ""
    is_aborted: bool = False
    end: float = 0.0

    @property
    def num_sampled(self) -> int:
        """The length of its output."""
        return sum(sample.num_tokens for sample in self.samples)


def recorded_requests(records: Iterable[StepRecord]) -> list[RecordedRequest]:
    """Return the requests of a trace in the order of their arrivals. Those of older traces have
    arrived with the step that mentions them."""
    requests: list[RecordedRequest] = []
    # The newest request of each name, and those of them that have not ended.
    named: dict[str, RecordedRequest] = {}
    live: dict[str, RecordedRequest] = {}
    for record in records:
        # Of two requests with one name in a record, the earlier one has ended.
        for name in live.keys() & record.aborted.keys():
            _end(live.pop(name), record)
        for name, length in record.arrived.items():
            arrival = record.arrivals.get(name) or Arrival(time=record.start, max_tokens=0)
            named[name] = live[name] = RecordedRequest(name, length, arrival)
            requests.append(named[name])
        for share in record.requests:
            # A step in flight samples once more for a request that has ended.
            if share.sampled and share.request_id in live:
                sample = Sample(
                    record.start + record.duration, len(share.sampled), share.num_drafts
                )
                live[share.request_id].samples.append(sample)
        for name in live.keys() & record.finished.keys():
            _end(live.pop(name), record)
        for name in named.keys() & record.prefixes.keys():
            named[name].output_prefix = record.prefixes[name]
    return requests


def _end(request: RecordedRequest, record: StepRecord) -> None:
    request.reason = record.finished[request.name]
    request.is_aborted = all(share.request_id != request.name for share in record.requests)
    request.end = record.start + (0.0 if request.is_aborted else record.duration)


def other_settings(recorded: TraceSettings, simulated: Sequence[TraceSettings]) -> list[str]:
    """Return, as flags, the settings of a recorded engine that no simulated one has."""
    stated = msgspec.to_builtins(recorded)
    others = [msgspec.to_builtins(each) for each in simulated]
    return [
        _as_flag(flag, stated[name])
        for name, flag in FLAGS.items()
        if name in stated and all(_plain(stated[name]) != _plain(each.get(name)) for each in others)
    ]


def _as_flag(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{flag}"
    return f"--{flag} {value:g}" if isinstance(value, float) else f"--{flag} {value}"


def _plain(value: object) -> object:
    """Return a setting without what may differ in names of the same model."""
    return value.rpartition("/")[2].lower() if isinstance(value, str) else value


def first_with_block(
    requests: Sequence[RecordedRequest], number: int, index: int, block_size: int
) -> int:
    """Return which request of a trace was the first to have a block.

    Args:
        number, index: a request that has it, and its place there.

    Raises:
        UsageError: none was.
    """
    for _ in requests:
        request = requests[number]
        is_prompt = index < request.num_prompt_tokens // block_size
        prefix = request.arrival.prefix if is_prompt else request.output_prefix
        owner, count = prefix or (number, 0)
        if index >= count:
            return number
        number = owner
        if not 0 <= number < len(requests):
            break
    raise UsageError(
        f"the trace is damaged: no request is the first one with block {index} of {request.name!r}"
    )


def traced_workload(records: Iterable[StepRecord], block_size: int) -> Iterator[WorkloadRequest]:
    """Return the requests of a trace in the order of their arrivals, to be served again. One that
    was aborted would have got as many tokens as it may.

    Raises:
        UsageError: times or lengths that no trace has.
    """
    requests = recorded_requests(records)
    names: set[str] = set()
    for number, each in sorted(enumerate(requests), key=lambda pair: pair[1].arrival.time):
        num_output_tokens = each.num_sampled
        is_aborted = each.reason == "abort"
        if is_aborted:
            num_output_tokens = max(num_output_tokens, each.arrival.max_tokens)
        _check(each, num_output_tokens)
        num_blocks = -(-(each.num_prompt_tokens + num_output_tokens) // block_size)
        yield WorkloadRequest(
            # In a simulation, an earlier request of this name may not have ended yet.
            request_id=f"{each.name}, arrival {number}" if each.name in names else each.name,
            arrival=round(each.arrival.time * SECOND),
            num_prompt_tokens=each.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            priority=each.arrival.priority,
            abort=round(each.end * SECOND) if is_aborted else None,
            prefix_ids=[
                first_with_block(requests, number, i, block_size) << 32 | i
                for i in range(num_blocks)
            ],
        )
        names.add(each.name)


def _check(request: RecordedRequest, num_output_tokens: int) -> None:
    longest = max(request.num_prompt_tokens, num_output_tokens)
    latest = max(abs(request.arrival.time), abs(request.end))
    if not 1 <= request.num_prompt_tokens <= longest <= MAX_LENGTH or latest > MAX_SECONDS:
        raise UsageError(
            f"the trace is damaged: request {request.name!r} arrived at {request.arrival.time:g} s "
            f"with {request.num_prompt_tokens} tokens, got {num_output_tokens}, and ended at "
            f"{request.end:g} s"
        )
