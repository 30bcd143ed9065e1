"""The settings in the first line of a trace."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MAX_SIZE = 2**31
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes and policies of an engine, and how a page is to show its trace.

    A field with its default is not stated: it is not in the file, and `|` does not copy it. A new
    setting is a new field here and, if it comes from the engine's configuration, a line in
    `ResolvedConfig.trace_settings`.

    Attributes:
        model: its name.
        time_unit: of `start` and `duration` in the records.
        block_size: tokens per KV block.
        num_blocks: KV blocks of the pool.
        token_budget: tokens per step, at most.
        max_num_seqs: running requests, at most.
        batching_policy, enable_prefix_caching, enable_chunked_prefill, scheduling_policy,
            long_prefill_token_threshold, preemption_mode, pipeline_parallel_size: see
            `EngineConfig`.
        tensor_parallel_size, enable_expert_parallel, kv_cache_dtype, swap_space,
            kv_offloading_size: see `EngineConfig`. Plans do not depend on them, but the times of
            steps or the sizes of pools do.
        max_request_tokens, num_host_blocks, async_scheduling: see `ResolvedConfig`.
        max_step_ms: see `EngineConfig`; 0: no limit.
        speculative_config: method and numbers of drafts as JSON, see `SpeculativeConfig`; "": none.
        kv_connector: see `EngineConfig`; "": none.
        in_lock_step: the engine makes each step together with others.
        data_rank: which of several engines this is, from 0.
        data_parallel_size: the number of engines.
        live: whether the engine is running: False for a trace that is replayed.
    """

    model: str = ""
    time_unit: str = "s"
    block_size: Size = 0
    num_blocks: Size = 0
    token_budget: Size = 0
    max_num_seqs: int = 0
    batching_policy: Literal["", "chunked", "prefill_first", "static"] = ""
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_step_ms: float = 0.0
    max_request_tokens: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    num_host_blocks: int = 0
    # None: the trace is older than these settings.
    async_scheduling: bool | None = None
    pipeline_parallel_size: Size = 1
    tensor_parallel_size: Size = 1
    enable_expert_parallel: bool = False
    kv_cache_dtype: str = "auto"
    swap_space: float = 1.0
    kv_offloading_size: float = 0.0
    speculative_config: str = ""
    kv_connector: str = ""
    in_lock_step: bool = False
    data_rank: int | None = None
    data_parallel_size: int = 1
    live: bool | None = None

    def __or__(self, later: TraceSettings) -> TraceSettings:
        """These settings, replaced by those that `later` states."""
        return msgspec.convert(
            msgspec.to_builtins(self) | msgspec.to_builtins(later), TraceSettings
        )
