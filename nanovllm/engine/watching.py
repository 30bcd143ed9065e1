"""The readers of a running engine's trace, as the front end serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from nanovllm.assembly.front_end import create_broadcasts, create_texts
from nanovllm.data.outputs import RequestOutput
from nanovllm.data.parts import MissingPartError
from nanovllm.data.request import EngineRequest
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.trace.stream import RequestTexts, StepBroadcast, StepStream


class Watching:
    """The readers of the traces of all engines behind one front end.

    Args:
        settings: for each engine, the header of its trace.
        order: gives an engine, by its number, an order.
        tokenizer: spells prompts and outputs for the readers, if they may see them; else None.

    Attributes:
        broadcasts: by engine, the readers of its trace; none if that part of the package is
            missing.
    """

    def __init__(
        self,
        settings: Sequence[TraceSettings],
        order: Callable[[int, Literal["watch", "unwatch"]], None],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.broadcasts: list[StepBroadcast] = []
        self._why_not = ""
        self._texts: RequestTexts | None = None if tokenizer is None else create_texts(tokenizer)
        try:
            self.broadcasts = create_broadcasts(settings, order, self._texts)
        except MissingPartError as error:
            self._why_not = str(error)

    def watch(self, engine: int) -> StepStream:
        """Stream the lines of an engine's trace to a new reader; see `AsyncEngine.watch`."""
        if self._why_not:
            raise ValueError(self._why_not)
        if engine not in range(count := len(self.broadcasts)):
            fitting = f"from 0 to {count - 1}" if count > 1 else "0, the only one"
            raise ValueError(f"engine must be {fitting}, not {engine}")
        return self.broadcasts[engine].watch()

    def expect(self, request_id: str, prompt: str | None, requests: list[EngineRequest]) -> None:
        """Take in a request's prompt, for readers who may see it."""
        if self._texts is not None:
            self._texts.expect(request_id, prompt, requests)

    def add(self, output: RequestOutput) -> None:
        """Take in a request's output, for readers who may see it."""
        if self._texts is not None:
            self._texts.add(output)

    def put(self, steps: Mapping[int, list[msgspec.Raw]]) -> None:
        """Pass records of steps, by engine, to the readers."""
        for engine, broadcast in enumerate(self.broadcasts):
            broadcast.put(steps.get(engine, ()))

    def end(self) -> None:
        """End all streams."""
        for broadcast in self.broadcasts:
            broadcast.end()
