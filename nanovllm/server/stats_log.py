"""A line in the log every ten seconds while the server is busy: throughput, requests, and use of
the KV cache, in vLLM's words."""

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from nanovllm.data.outputs import EngineStats
from nanovllm.server.metrics import Metrics

logger = logging.getLogger("nanovllm.server")


@dataclass
class EngineTotals:
    """Counts of one engine up to its last line.

    Attributes:
        time: of the line, in seconds of the monotonic clock.
        prompt_tokens, generation_tokens: as in the metrics of these names.
        num_queried_tokens, num_hit_tokens: of the prefix cache.
        hit_rate: hits per query in the last interval that had queries.
        was_busy: the line was about an engine with work.
    """

    time: float
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    hit_rate: float = 0.0
    was_busy: bool = False


class StatsLog:
    """Writes the lines: one per engine and interval while the engine has work, and one more when it
    has become idle.

    Args:
        metrics: the server's; they count the tokens and have the engines' statistics.
        seconds: between two lines.
    """

    def __init__(self, metrics: Metrics, seconds: float) -> None:
        self.metrics = metrics
        self.seconds = seconds
        self._totals = [EngineTotals(time.monotonic()) for _ in metrics.values]

    async def run(self) -> None:
        """Write lines until the task is cancelled."""
        while True:
            await asyncio.sleep(self.seconds)
            for line in self.lines(time.monotonic()):
                logger.info(line)

    def lines(self, now: float) -> list[str]:
        """Return the lines that are due, and begin the next interval."""
        found = []
        for index, (_, stats) in enumerate(self.metrics.engine_stats()):
            before = self._totals[index]
            after = self._count(index, stats, now)
            has_tokens = (after.prompt_tokens, after.generation_tokens) != (
                before.prompt_tokens,
                before.generation_tokens,
            )
            after.was_busy = (
                has_tokens or stats.num_running + stats.num_waiting + stats.num_swapped > 0
            )
            if after.was_busy or before.was_busy:
                found.append(self._line(index, stats, before, after))
            self._totals[index] = after
        return found

    def _count(self, index: int, stats: EngineStats, now: float) -> EngineTotals:
        """Return the engine's counts as of now."""
        totals = replace(self._totals[index], time=now)
        totals.prompt_tokens = self.metrics.total("prompt_tokens", index)
        totals.generation_tokens = self.metrics.total("generation_tokens", index)
        num_queried = stats.num_queried_tokens - totals.num_queried_tokens
        if num_queried > 0:
            totals.hit_rate = (stats.num_hit_tokens - totals.num_hit_tokens) / num_queried
        totals.num_queried_tokens = stats.num_queried_tokens
        totals.num_hit_tokens = stats.num_hit_tokens
        return totals

    def _line(
        self, index: int, stats: EngineStats, before: EngineTotals, after: EngineTotals
    ) -> str:
        """Return what is logged about one engine and the interval between two moments."""
        seconds = max(after.time - before.time, 1e-9)
        prompt_throughput = (after.prompt_tokens - before.prompt_tokens) / seconds
        generation_throughput = (after.generation_tokens - before.generation_tokens) / seconds
        cache = "GPU KV cache" if self.metrics.engine.limits.on_gpu else "KV cache"
        return (
            f"Engine {index:03d}: Avg prompt throughput: {prompt_throughput:.1f} tokens/s, Avg "
            f"generation throughput: {generation_throughput:.1f} tokens/s, Running: "
            f"{stats.num_running} reqs, Waiting: {stats.num_waiting + stats.num_swapped} reqs, "
            f"{cache} usage: {100 * stats.kv_cache_usage:.1f}%, Prefix cache hit rate: "
            f"{100 * after.hit_rate:.1f}%"
        )
