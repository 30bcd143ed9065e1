"""The requests of a trace: their arrivals, the blocks that they share, and the times of their
tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.simulate.machines import file_of
from nanovllm.simulate.settings import ENGINE_FLAGS, flag_of, parse_role
from nanovllm.simulate.workload import MAX_LENGTH, MAX_SECONDS, SECOND, WorkloadRequest
from nanovllm.trace.record import Arrival, StepRecord

# Settings whose names in traces are others.
NAMES = {
    "num_blocks": "num_kv_blocks",
    "token_budget": "max_num_batched_tokens",
    "max_request_tokens": "max_model_len",
}
LAYOUT = (
    "model",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "kv_cache_dtype",
)
MEMORY = ("machine", *LAYOUT, "data_parallel_size", "gpu_memory_utilization", "block_size")
# Settings that an engine computes unless they are given, and those from which they follow.
FOLLOWS = {
    "num_kv_blocks": MEMORY,
    "max_model_len": (*MEMORY, "num_kv_blocks"),
    "async_scheduling": (
        "machine",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
    ),
}
# Without chunked prefill, a step has room for the longest request.
WHOLE_PROMPTS = {"max_num_batched_tokens": (*MEMORY, "num_kv_blocks", "max_model_len")}


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


def inherit(
    recorded: TraceSettings, given: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return the settings of the recorded engine that are not given, and notes about them. Values
    that the engine had computed are missing if a setting is given from which they follow: they are
    computed again. So are model and layout if the machine is one that was measured with its own.

    Args:
        given: settings of the simulation. Those of roles count, too.

    Raises:
        UsageError: see `parse_role` and `file_of`.
    """
    places: dict[str, Mapping[str, object]] = {}
    for role in ("prefill_config", "decode_config"):
        if given.get(role):
            places[f"{role}."] = parse_role(flag_of(role), str(given[role]))
    places[""] = given
    flags = {name: flag_of(place + name) for place, own in places.items() for name in own}
    follows = _follows(recorded, [own.get("machine") for own in places.values()])
    stated = _stated(recorded)
    inherited: dict[str, object] = {}
    computed: dict[str, object] = {}
    reasons: set[str] = set()
    for name in ENGINE_FLAGS:
        if name not in stated or name in given:
            continue
        causes = flags.keys() & follows.get(name, ())
        if causes:
            computed[name] = stated[name]
            reasons |= {flags[cause] for cause in causes}
        else:
            inherited[name] = stated[name]
    notes = []
    if words := as_flags(inherited):
        notes.append(f"settings of the trace: {words}")
    if words := as_flags(computed):
        names = " and ".join(sorted(reasons))
        notes.append(f"computed because of {names}: the trace has {words}")
    if recorded.speculative_config and not given.get("spec_acceptance"):
        notes.append("the recorded engine had drafts: set --spec-acceptance to simulate them")
    return inherited, notes


def _follows(recorded: TraceSettings, machines: Sequence[object]) -> dict[str, tuple[str, ...]]:
    """Return the settings that an engine computes or has from its machine, and those from which
    they follow.

    Args:
        machines: those that are given, for all engines or for a role.
    """
    follows = dict(FOLLOWS)
    if not recorded.enable_chunked_prefill:
        follows |= WHOLE_PROMPTS
    for machine in machines:
        file = file_of(machine) if isinstance(machine, str | dict) else None
        if file is not None and "model" in file:
            follows |= dict.fromkeys(LAYOUT, ("machine",))
    return follows


def _stated(recorded: TraceSettings) -> dict[str, object]:
    """Return the settings of a trace under the names of flags."""
    stated = {NAMES.get(name, name): value for name, value in msgspec.to_builtins(recorded).items()}
    if recorded.max_request_tokens >= recorded.num_blocks * recorded.block_size:
        stated.pop("max_model_len", None)  # it follows from the pool
    return stated


def as_flags(settings: Mapping[str, object]) -> str:
    """Return the settings that are not the engine's defaults as flags."""
    return " ".join(
        flag_of(f"no_{name}" if value is False else name)
        + ("" if isinstance(value, bool) else f" {value}")
        for name, value in settings.items()
        # 0.0: no limit, or no memory
        if str(value) not in (str(getattr(EngineConfig, name)), "0.0")
    )


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
