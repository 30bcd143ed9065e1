"""Requests of a workload, as all inputs give them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from nanovllm.data.trace_settings import TraceSettings

# The virtual clock counts whole picoseconds: sums are exact, in whatever order they are added.
SECOND = 10**12
# Tokens of a prompt, and of an output. No engine serves more: a larger number is a mistake.
MAX_LENGTH = 10**8
Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
OutputLength = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
# Times of files, about 300 years.
MAX_SECONDS = 1e10


class WorkloadRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A request of a workload.

    Attributes:
        arrival: when it arrives, in picoseconds since the workload began.
        num_prompt_tokens, num_output_tokens: its lengths.
        prefix_ids: a number for each started block of `Workload.prefix_block_size` prompt tokens.
            Two prompts have the same beginning as far as their numbers are equal. Empty: the
            prompt shares nothing with others.
        priority: smaller runs earlier, with `scheduling_policy="priority"`.
        abort: when its client disconnects; None: it does not.
    """

    request_id: str
    arrival: int
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: Sequence[int] = ()
    priority: int = 0
    abort: int | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrivals, which are read while they are needed.

    Attributes:
        requests: can be iterated once.
        prefix_block_size: prompt tokens per number in `WorkloadRequest.prefix_ids`.
        names_outputs: the numbers continue after the prompt, and name the output's blocks, so that
            a later prompt may begin with this prompt and its output.
        recorded: the settings of the engine that has served it; None: unknown.
    """

    requests: Iterable[WorkloadRequest]
    prefix_block_size: int = 512
    names_outputs: bool = False
    recorded: TraceSettings | None = None
