"""The engine's record of itself: one plain-data entry a step. Whatever draws, counts or tests reads this."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

FORMAT_VERSION = 1


@dataclass
class TracedRequest:
    """A request's share of a step: tokens `start .. start + num_tokens - 1` were computed.

    Attributes:
        num_prompt_tokens: so that a reader can tell prompt from output tokens.
        new_block_ids: blocks appended to its table in this step (the whole table after an admission).
        sampled: token ids sampled at the end of the step.
    """

    request_id: str
    start: int
    num_tokens: int
    num_prompt_tokens: int
    new_block_ids: list[int]
    sampled: list[int] = field(default_factory=list)


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
        waiting, running, swapped: the queues when the step had been scheduled.
        num_free_blocks, num_blocks: of the device pool, when the step had been scheduled.
        num_evictions: cached blocks that were overwritten since the engine started.
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
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_evictions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(request.num_tokens for request in self.requests)


class TraceError(ValueError):
    """A file that is not a trace of this format."""


class Trace:
    """A list of step records, in memory and, if a path is given, appended to a JSON-lines file as they come.

    Args:
        path: file to write; its first line says what it is.
        settings: what a reader needs to draw the steps (`block_size`, `num_blocks`, ...).
        keep: keep the records in memory too. Default: only without a path, so that a server's trace cannot
            fill its memory.
    """

    def __init__(
        self,
        path: str | pathlib.Path | None = None,
        settings: dict[str, Any] | None = None,
        keep: bool | None = None,
    ) -> None:
        self.steps: list[StepRecord] = []
        self.settings = settings or {}
        self._keep = path is None if keep is None else keep
        self._file = open(path, "w", encoding="utf-8") if path is not None else None  # noqa: SIM115
        self._path = path
        self._header_written = False

    def record(self, step: StepRecord) -> None:
        """Append one step."""
        if self._keep:
            self.steps.append(step)
        if self._file is not None:
            if not self._header_written:
                self._file.write(self._header())
                self._header_written = True
            self._file.write(msgspec.json.encode(step).decode() + "\n")
            self._file.flush()

    def _header(self) -> str:
        return json.dumps({"nanovllm_trace": FORMAT_VERSION, "settings": self.settings}) + "\n"

    def close(self) -> None:
        """Finish the file, if there is one."""
        if self._file is not None:
            if not self._header_written:
                self._file.write(self._header())
            self._file.close()
            self._file = None

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the kept steps as JSON lines."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._header())
            for step in self.steps:
                file.write(msgspec.json.encode(step).decode() + "\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Trace:
        """Read a trace.

        Raises:
            TraceError: the file is not a trace, is of another version, or a line is damaged; says which line.
        """
        lines = pathlib.Path(path).read_bytes().splitlines()
        try:
            header = json.loads(lines[0])
            version = header["nanovllm_trace"]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{path} is not a nanovllm trace: its first line must name the format"
            ) from error
        if version != FORMAT_VERSION:
            raise TraceError(
                f"{path} is a trace of version {version}; this nanovllm reads version {FORMAT_VERSION}"
            )
        trace = cls(settings=header.get("settings"))
        decoder = msgspec.json.Decoder(StepRecord)
        for number, line in enumerate(lines[1:], start=2):
            try:
                trace.steps.append(decoder.decode(line))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise TraceError(
                    f"{path}, line {number}: not a step record ({error}); was the file cut off?"
                ) from error
        return trace

    def to_perfetto(self, path: str | pathlib.Path) -> None:
        """Write the trace as Chrome trace events, which ui.perfetto.dev opens: a track a request, one for the steps, and
        counters for tokens and blocks."""
        events: list[dict[str, Any]] = []
        threads: dict[str, int] = {}

        def event(name: str, thread: int, step: StepRecord, **args: Any) -> None:
            span = {"name": name, "ph": "X", "pid": 1, "tid": thread, "args": args}
            events.append(span | {"ts": step.start * 1e6, "dur": step.duration * 1e6})

        for step in self.steps:
            if step.requests:
                event(f"step {step.step}", 0, step, tokens=step.num_tokens, requests=len(step.requests))
            for request in step.requests:
                thread = threads.setdefault(request.request_id, len(threads) + 1)
                one_new = request.num_tokens == 1 and request.start >= request.num_prompt_tokens
                kind = "decode" if one_new else "prefill"
                event(
                    f"{kind} {request.num_tokens}",
                    thread,
                    step,
                    start=request.start,
                    blocks=request.new_block_ids,
                )
            for request_id, mode in step.preempted.items():
                mark = {"name": f"preempted ({mode})", "ph": "i", "s": "t", "pid": 1, "ts": step.start * 1e6}
                events.append(mark | {"tid": threads.setdefault(request_id, len(threads) + 1)})
            counters = {
                "tokens in step": step.num_tokens,
                "held KV blocks": step.num_blocks - step.num_free_blocks,
                "waiting requests": len(step.waiting),
            }
            for name, value in counters.items():
                events.append(
                    {"name": name, "ph": "C", "pid": 1, "ts": step.start * 1e6, "args": {"value": value}}
                )
        for name, thread in {"engine": 0, **threads}.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}})
        pathlib.Path(path).write_text(json.dumps({"traceEvents": events}))
