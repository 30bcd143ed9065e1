"""The settings with which an engine runs: those that the user gave, and the numbers that follow
from them, from the model, the device and the size of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.data.config import EngineConfig
from nanovllm.data.trace_settings import TraceSettings

DEFAULT_TOKEN_BUDGET = 2048
# With drafts, a CUDA graph computes up to this many tokens.
MAX_DECODES_WITH_DRAFTS = 256


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Settings that leave nothing open. `resolve` makes them.

    Attributes:
        given: the settings as the user gave them, for all that needs no decision.
        max_model_len: the most tokens of a request, prompt and output, for which the model has
            positions and the user asked.
        max_request_tokens: the most tokens that one request may ever have: `max_model_len`, or
            less if the KV pool is smaller.
        token_budget: the most tokens that a step computes.
        async_scheduling: the next step is prepared while the device computes the current one.
        num_kv_blocks: KV blocks of the pool.
        num_host_blocks: KV blocks in host memory, for swapped requests.
    """

    given: EngineConfig
    max_model_len: int
    max_request_tokens: int
    token_budget: int
    async_scheduling: bool
    num_kv_blocks: int
    num_host_blocks: int

    @property
    def max_num_samples(self) -> int:
        """The most tokens that a step samples: one for each request, and one more for each
        draft."""
        speculative = self.given.speculative
        drafts = speculative.num_speculative_tokens or 0 if speculative is not None else 0
        return min(self.token_budget, self.given.max_num_seqs * (1 + drafts))

    @property
    def max_decodes(self) -> int:
        """The most rows of a step that a CUDA graph computes: one of each request, or up to 256 if
        there are drafts."""
        rows = max(self.given.max_num_seqs, min(self.max_num_samples, MAX_DECODES_WITH_DRAFTS))
        return min(self.token_budget, rows)

    @property
    def trace_settings(self) -> TraceSettings:
        """Sizes and policies for the header of a trace of this engine's steps: all that decides
        which steps it plans, and how long they take."""
        given = self.given
        return TraceSettings(
            block_size=given.block_size,
            num_blocks=self.num_kv_blocks,
            token_budget=self.token_budget,
            max_num_seqs=given.max_num_seqs,
            batching_policy=given.batching_policy,
            enable_prefix_caching=given.enable_prefix_caching,
            enable_chunked_prefill=given.enable_chunked_prefill,
            long_prefill_token_threshold=given.long_prefill_token_threshold,
            max_step_ms=given.max_step_ms or 0.0,
            max_request_tokens=self.max_request_tokens,
            scheduling_policy=given.scheduling_policy,
            preemption_mode=given.preemption_mode,
            num_host_blocks=self.num_host_blocks,
            async_scheduling=self.async_scheduling,
            pipeline_parallel_size=given.pipeline_parallel_size,
            tensor_parallel_size=given.tensor_parallel_size,
            enable_expert_parallel=given.enable_expert_parallel,
            kv_cache_dtype=given.kv_cache_dtype,
            swap_space=given.swap_space,
            kv_offloading_size=given.kv_offloading_size,
            speculative_config="" if given.speculative is None else given.speculative.counts,
            kv_connector=given.kv_transfer.kv_connector if given.kv_transfer is not None else "",
            in_lock_step=given.in_lock_step,
        )


def resolve(
    config: EngineConfig,
    *,
    model_max_len: int,
    num_kv_blocks: int,
    num_host_blocks: int = 0,
    on_gpu: bool = False,
) -> ResolvedConfig:
    """Decide everything that the settings leave open. See `EngineConfig.check_limits` for what must
    hold.

    Args:
        model_max_len: positions of the model.
        num_kv_blocks: KV blocks that fit on every rank.
        num_host_blocks: see `EngineConfig.count_host_blocks`.
        on_gpu: the ranks compute on GPUs.
    """
    max_model_len = config.max_model_len or model_max_len
    max_request_tokens = min(max_model_len, num_kv_blocks * config.block_size)
    token_budget = config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
    if not config.enable_chunked_prefill and config.max_num_batched_tokens is None:
        token_budget = max(token_budget, max_request_tokens)
    async_scheduling = config.async_scheduling
    if async_scheduling is None:
        async_scheduling = on_gpu and config.pipeline_parallel_size == 1
    return ResolvedConfig(
        given=config,
        max_model_len=max_model_len,
        max_request_tokens=max_request_tokens,
        token_budget=token_budget,
        async_scheduling=async_scheduling,
        num_kv_blocks=num_kv_blocks,
        num_host_blocks=num_host_blocks,
    )
