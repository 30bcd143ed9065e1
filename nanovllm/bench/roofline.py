"""The least work that a workload takes, against what the machine can do (the roofline model, Williams et al. 2009).

A step of the engine reads every weight once, however many tokens it computes, and every decoding sequence reads its
keys and values. So the time is at least `bytes / bandwidth`, and at least `FLOPs / peak`; the larger of the two is
the roof. Both count only what cannot be avoided: as few steps as the longest output and the concurrency allow, no
token computed twice, no activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm.bench.workloads import BenchRequest, Workload
from nanovllm.models.config import ModelConfig


@dataclass(frozen=True)
class ModelCost:
    """What a model costs.

    Attributes:
        weight_bytes: read in every step: all layers and the output head. Of the input embedding only single rows
            are read, so it counts only as far as it is the head.
        kv_bytes_per_token: of the KV cache, read for every token of context at every decode.
        layer_flops: for one token through all layers, without attention.
        head_flops: for the logits of one token.
        attention_flops: for one query token and one token of context.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    layer_flops: int
    head_flops: int
    attention_flops: int

    @classmethod
    def of(cls, model: ModelConfig, bytes_per_number: int) -> ModelCost:
        """The cost of a model in a dtype with so many bytes a number."""
        hidden, query = model.hidden_size, model.num_heads * model.head_dim
        key_value = 2 * model.num_kv_heads * model.head_dim
        matrices = hidden * (query + key_value) + query * hidden + 3 * hidden * model.intermediate_size
        vectors = (
            2 * hidden + (query + key_value if model.qkv_bias else 0) + (hidden if model.output_bias else 0)
        )
        head = model.vocab_size * hidden
        return cls(
            weight_bytes=(model.num_layers * (matrices + vectors) + hidden + head) * bytes_per_number,
            kv_bytes_per_token=model.kv_elements_per_token * bytes_per_number,
            layer_flops=2 * model.num_layers * matrices,
            head_flops=2 * head,
            attention_flops=4 * model.num_layers * query,
        )


@dataclass(frozen=True)
class Work:
    """The least that has to be read and computed."""

    num_bytes: int
    flops: int


def least_work(
    cost: ModelCost,
    requests: Sequence[BenchRequest],
    max_concurrency: int | None = None,
    prefix_len: int = 0,
    cache: Literal["none", "cold", "hot"] = "none",
) -> Work:
    """The least work of a workload.

    Args:
        max_concurrency: requests that may be in one step; None: all.
        prefix_len: tokens that all prompts share.
        cache: whether the prefix is computed by every request, by one, or by none.
    """
    outputs = [request.max_tokens for request in requests]
    # Every step gives each of its requests one token; the one that ends the prefill gives the first.
    num_steps = max(max(outputs), -(-sum(outputs) // (max_concurrency or len(outputs))))
    num_bytes, flops = num_steps * cost.weight_bytes, sum(outputs) * cost.head_flops
    for index, request in enumerate(requests):
        cached = prefix_len if cache == "hot" or (cache == "cold" and index > 0) else 0
        prompt = len(request.prompt_token_ids)
        # The last output token is never fed back.
        end = prompt + request.max_tokens - 1
        flops += (end - cached) * cost.layer_flops + _sum_of_contexts(cached, end) * cost.attention_flops
        num_bytes += _sum_of_contexts(prompt, end) * cost.kv_bytes_per_token
    return Work(num_bytes, flops)


def _sum_of_contexts(begin: int, end: int) -> int:
    """Context lengths of the tokens at positions begin to end - 1, each counting itself: begin + 1 + ... + end."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


def workload_work(cost: ModelCost, workload: Workload, requests: Sequence[BenchRequest]) -> Work | None:
    """The least work of a workload; None where requests arrive over time, since then waiting is part of it."""
    if workload.intruder_len or workload.request_rate != float("inf"):
        return None
    return least_work(cost, requests, workload.max_concurrency, workload.prefix_len, workload.cache)


@dataclass(frozen=True)
class RooflineShare:
    """How close a run came to the roof, in percent.

    Attributes:
        bandwidth: the time that its bytes would take, of the time it took.
        compute: the same for its FLOPs.
    """

    bandwidth: float
    compute: float

    @property
    def percent(self) -> float:
        """Of the lower roof, the one that the run would have touched first."""
        return max(self.bandwidth, self.compute)


def roofline_share(
    work: Work, seconds: float, bytes_per_second: float, flops_per_second: float
) -> RooflineShare:
    """What a run made of the machine."""
    return RooflineShare(
        100 * work.num_bytes / bytes_per_second / seconds, 100 * work.flops / flops_per_second / seconds
    )
