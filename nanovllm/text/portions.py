"""Divides long work on an event loop into portions of a few milliseconds, so that other tasks run
between them."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TypeVar

from nanovllm.data.request import EngineOutput

Item = TypeVar("Item")

# Positions of a text per portion. With 20 log-probabilities each, a portion takes 1 to 3 ms.
PORTION = 64


async def in_portions(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Yield the items; after each portion, let the event loop run other tasks."""
    for i, item in enumerate(items, 1):
        yield item
        if i % PORTION == 0:
            await asyncio.sleep(0)


def early_portions(outputs: Iterable[EngineOutput]) -> Iterator[EngineOutput]:
    """Split the prompt log-probabilities of a long step, as if shorter steps had computed them.
    Yields all portions but the last, which stays in `outputs` with everything else."""
    for output in outputs:
        entries = output.prompt_logprobs or []
        first = output.prompt_logprobs_start
        for i in range(0, len(entries) - PORTION, PORTION):
            output.prompt_logprobs = entries[i + PORTION :]
            output.prompt_logprobs_start = first + i + PORTION
            part = EngineOutput(
                output.request_id, engine=output.engine, num_cached_tokens=output.num_cached_tokens
            )
            part.prompt_logprobs = entries[i : i + PORTION]
            part.prompt_logprobs_start = first + i
            yield part
