"""Simulated engines for tests: small ones, with the settings of `EngineConfig`."""

from __future__ import annotations

from typing import Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import ResolvedConfig, resolve
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.workload import Workload, WorkloadRequest


class AffineCost(StepCost):
    """Steps take `base`, and more per token that they compute or attend to. After a pause, they
    take longer by `per_idle` of it. Of the base, `per_sample` is for each sample."""

    def __init__(
        self,
        base: int = 1000,
        per_token: int = 100,
        per_context: int = 1,
        per_idle: float = 0.0,
        per_sample: int = 0,
    ) -> None:
        self.base = base
        self.per_sample = per_sample
        self.per_idle = per_idle
        self.per_token = per_token
        self.per_context = per_context

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""
        base, per_context = self.decode(work.num_decodes)
        context = work.decode_context + sum(start + count for start, count in work.prefills)
        computed = sum(count for _, count in work.prefills)
        return base + per_context * context + self.per_token * computed

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context."""
        return self.base + self.per_token * num_decodes, self.per_context

    def head(self, work: StepWork) -> int:
        """Return what the last stage takes longer."""
        return self.per_sample * work.num_samples

    def after_idle(self, idle: int) -> int:
        """Return the extra time of the first step after a pause."""
        return round(self.per_idle * idle)


def config_of(num_blocks: int = 100, model_max_len: int = 4096, **options: Any) -> ResolvedConfig:
    """The settings of an engine; without `async_scheduling`, steps are synchronous."""
    return resolve(
        EngineConfig(num_kv_blocks=num_blocks, **options),
        model_max_len=model_max_len,
        num_kv_blocks=num_blocks,
        num_host_blocks=num_blocks,
    )


def engine_of(
    num_blocks: int = 100,
    model_max_len: int = 4096,
    *,
    copy_time: int = 0,
    fast: bool = True,
    **options: Any,
) -> SimulatedEngine:
    """An engine with these settings."""
    config = config_of(num_blocks, model_max_len, **options)
    return create_engine(SimulatedEngine, config, AffineCost(), copy_time=copy_time, fast=fast)


def groups_of(num_engines: int, size: int) -> list[range]:
    """For each engine, the engines of its group: `size` after one another."""
    begins = [number - number % size for number in range(num_engines)]
    return [range(begin, begin + size) for begin in begins]


def request_of(number: int, arrival: int, prompt: int, output: int, **more: Any) -> WorkloadRequest:
    """The request `r<number>`."""
    return WorkloadRequest(
        request_id=f"r{number}",
        arrival=arrival,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        **more,
    )


def workload_of(*requests: WorkloadRequest, prefix_block_size: int = 512) -> Workload:
    """A workload of these requests."""
    return Workload(requests, prefix_block_size)
