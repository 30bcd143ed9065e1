"""The least work of a workload, and the share of the roof that a run reached (the roofline model,
Williams et al. 2009).

An engine step reads every weight once for any number of tokens (of experts, those that a token
visits), and every decoding sequence reads its keys and values. The time is at least
`bytes / bandwidth` and at least `FLOPs / peak`; the larger of the two is the roof. Both count only
unavoidable work: the fewest steps that the longest output and the concurrency allow, no token
computed twice, no activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.models.config import ModelConfig


@dataclass(frozen=True)
class ModelCost:
    """The bytes and FLOPs of a model.

    Attributes:
        weight_bytes: read in every step: all layers without their routed experts, and the output
            head. Of the input embedding only single rows are read, so it counts only as far as it
            is the head.
        kv_bytes_per_token: of the KV cache, read for every token of context at every decode.
        layer_flops: for one token through all layers, without attention.
        head_flops: for the logits of one token.
        attention_flops: for one query token and one token of context. Of the two ways of latent
            attention, this is the one with fewer operations, which computes keys and values from
            latents (as `layer_flops` does, once per token).
        expert_bytes: of all routed experts, of which a step reads those that its tokens visit.
        expert_share: the share of a layer's experts that one token visits.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    layer_flops: int
    head_flops: int
    attention_flops: int
    expert_bytes: int = 0
    expert_share: float = 0.0

    @classmethod
    def of(cls, model: ModelConfig, bytes_per_number: int) -> ModelCost:
        """The cost of a model in a dtype with so many bytes per number, by the shapes of its
        checkpoint's tensors."""
        from nanovllm.models.loader import build_model  # it imports torch

        shapes = {
            name: place.shape
            for name, [place, *_] in build_model(model).checkpoint_places().items()
        }
        experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
        dense = {name: shape for name, shape in shapes.items() if ".experts." not in name}
        read = [
            shape
            for name, shape in dense.items()
            if "embed_tokens" not in name or "lm_head.weight" not in shapes
        ]
        matrices = sum(
            math.prod(shape)
            for name, shape in dense.items()
            if ".layers." in name and len(shape) == 2
        )
        visited, num_experts = (model.moe.top_k, model.moe.num_experts) if model.moe else (0, 1)
        nope, value = (
            (model.qk_nope_head_dim, model.v_head_dim)
            if model.kv_lora_rank
            else (0, model.head_dim)
        )
        return cls(
            weight_bytes=sum(map(math.prod, read)) * bytes_per_number,
            kv_bytes_per_token=model.kv_elements_per_token * bytes_per_number,
            layer_flops=2 * (matrices + experts * visited // num_experts),
            head_flops=2 * model.vocab_size * model.hidden_size,
            attention_flops=2
            * model.num_layers
            * model.num_heads
            * (nope + model.head_dim + value),
            expert_bytes=experts * bytes_per_number,
            expert_share=visited / num_experts,
        )

    def step_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads; for experts, the expected value if
        all are equally likely."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** num_tokens)


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
    # Every step gives each of its requests one token; the one that ends the prefill gives the
    # first.
    num_steps = max(max(outputs), -(-sum(outputs) // (max_concurrency or len(outputs))))
    # More requests in a step visit more experts, but fewer each. So the fewest are read if a step
    # has either as many requests as it may, or one. (Of prompts, whose steps these are, too, no
    # further experts are counted.)
    at_once = min(max_concurrency or len(outputs), len(outputs))
    full_steps = (sum(outputs) - num_steps) / max(1, at_once - 1)
    one = cost.step_bytes(1)
    full = cost.step_bytes(at_once)
    num_bytes = round(num_steps * one + full_steps * (full - one))
    flops = sum(outputs) * cost.head_flops
    for index, request in enumerate(requests):
        cached = prefix_len if cache == "hot" or (cache == "cold" and index > 0) else 0
        prompt = len(request.prompt_token_ids)
        # The last output token is never fed back.
        end = prompt + request.max_tokens - 1
        flops += (end - cached) * cost.layer_flops + _sum_of_contexts(
            cached, end
        ) * cost.attention_flops
        num_bytes += _sum_of_contexts(prompt, end) * cost.kv_bytes_per_token
    return Work(num_bytes, flops)


def _sum_of_contexts(begin: int, end: int) -> int:
    """Context lengths of the tokens at positions begin to end - 1, each counting itself: begin + 1
    + ... + end."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


def workload_work(
    cost: ModelCost | None, workload: Workload, requests: Sequence[BenchRequest]
) -> Work | None:
    """The least work of a workload; None where requests arrive over time, since then waiting is
    part of it, or the cost is not known."""
    if cost is None or workload.intruder_len or workload.request_rate != float("inf"):
        return None
    return least_work(cost, requests, workload.max_concurrency, workload.prefix_len, workload.cache)


def roofline_share(
    work: Work, seconds: float, bytes_per_second: float, flops_per_second: float
) -> tuple[float, float]:
    """The time that its bytes and that its FLOPs would take at the roof, each in percent of a run's
    time. The larger one is how close the run came to the lower roof."""
    return (
        100 * work.num_bytes / bytes_per_second / seconds,
        100 * work.flops / flops_per_second / seconds,
    )
