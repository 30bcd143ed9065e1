"""The KV pool of a simulated engine: activations against those that a real step allocates, and
pools against those in logs of vLLM."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nanovllm.assembly.runner import create_runner
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.features.cuda_graphs.memory import run_largest_step
from nanovllm.models.config import ModelConfig
from nanovllm.simulate.machines import GIB, find_machine, known_machines
from nanovllm.simulate.models import Layout, ModelShape, find_model
from nanovllm.simulate.roofline import kv_blocks, largest_step
from tests.stand_ins import set_asynchronous

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
QWEN_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# What a step allocates besides, such as positions, places, rotary angles and the histograms of the
# search for nuclei.
TOLERANCE = 0.014


class LiveBytes(TorchDispatchMode):
    """Adds up the memory that operators allocate and that is in use.

    Attributes:
        peak: the most bytes at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known = weakref.WeakSet[Any]()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {id(memory) for memory in _memories((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for memory in _memories(out):
            if id(memory) not in given and memory not in self.known:
                self.known.add(memory)
                self.live += memory.nbytes()
                weakref.finalize(memory, self._free, memory.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _free(self, num_bytes: int) -> None:
        self.live -= num_bytes


def _memories(values: object) -> list[torch.UntypedStorage]:
    tensors = [each for each in tree_iter(values) if isinstance(each, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]


def activations_of(shape: dict[str, Any], num_tokens: int, num_requests: int) -> int:
    """Return the most bytes that the operators of an engine's largest step hold, operator by
    operator, as on a GPU."""
    config = EngineConfig(
        dtype="bfloat16",
        load_format="dummy",
        num_kv_blocks=4,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_tokens,
    )
    runner = create_runner(config, ModelConfig.from_dict(shape), Path("no folder"))
    # On a CPU, one call computes a layer.
    runner.model.model.layer_calls = list(runner.model.model.layers)
    with pytest.MonkeyPatch.context() as patch:
        set_asynchronous(patch)
        with LiveBytes() as measured:
            run_largest_step(runner, config, 4096)
    return measured.peak


def predicted(shape: dict[str, Any], num_tokens: int, num_requests: int) -> float:
    model = ModelShape("generated", ModelConfig.from_dict(shape))
    return model.activation_bytes(Layout(), num_tokens, num_requests)


@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        LLAMA | {"hidden_size": 384, "intermediate_size": 960, "num_key_value_heads": 8},
        LLAMA | {"intermediate_size": 128},  # attention needs more
        LLAMA | {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 2048},
        QWEN_MOE,
        QWEN_MOE | {"moe_intermediate_size": 1024},  # gate and up need more than outputs
        QWEN_MOE | {"num_experts_per_tok": 8, "moe_intermediate_size": 32},
        DEEPSEEK,
        DEEPSEEK | {"intermediate_size": 8192},  # the dense layer needs more than experts
    ],
)
def test_activations_of_layers_are_those_of_a_real_step(shape: dict[str, Any]) -> None:
    measured = activations_of(shape, 1024, 4)
    assert predicted(shape, 1024, 4) == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(("num_requests", "vocab_size"), [(8, 131_072), (80, 65_536), (384, 8440)])
def test_activations_of_sampling_are_those_of_a_real_step(
    num_requests: int, vocab_size: int
) -> None:
    shape = LLAMA | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": vocab_size}
    measured = activations_of(shape, num_requests, num_requests)
    found = predicted(shape, num_requests, num_requests)
    assert found == pytest.approx(measured, rel=TOLERANCE)


def test_activations_of_a_model_of_the_course_are_those_of_a_real_step() -> None:
    shape = LLAMA | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    }
    assert ModelConfig.from_dict(shape).kv_elements_per_token == (
        find_model("smollm2-135m").config.kv_elements_per_token
    )
    assert predicted(shape, 512, 4) == pytest.approx(activations_of(shape, 512, 4), rel=TOLERANCE)


def test_ranks_divide_what_the_engine_divides() -> None:
    llama, step = find_model("llama-3.1-70b"), (8192, 1)
    hidden, wide = 2 * 3 * 8192 * 8192, 2 * 3 * 28_672 * 8192
    for tp in (1, 2, 4, 8):
        found = llama.activation_bytes(Layout(tensor_parallel_size=tp), *step)
        assert found == hidden + wide / tp
    # With whole experts on each of four ranks, a rank gets a quarter of the uses.
    qwen = find_model("qwen3-30b-a3b")
    parts = qwen.activation_bytes(Layout(tensor_parallel_size=4), *step)
    whole = qwen.activation_bytes(
        Layout(tensor_parallel_size=4, enable_expert_parallel=True), *step
    )
    assert whole == 2 * 8192 * (2048 * 3 + 2 * 768 + (4 * 2 + 3) * 2048) < parts


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, (2048, 256)),
        ({"max_num_batched_tokens": 8192, "max_num_seqs": 1024}, (8192, 1024)),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, (64, 64)),
        ({"max_num_seqs": 3, "max_model_len": 100}, (300, 3)),
        ({"enable_chunked_prefill": False}, (4096, 256)),
        ({"enable_chunked_prefill": False, "max_model_len": 1000}, (2048, 256)),
    ],
)
def test_largest_step(options: dict[str, Any], step: tuple[int, int]) -> None:
    assert largest_step(EngineConfig(**options), 4096) == step


class Log(NamedTuple):
    """A run of vLLM.

    Attributes:
        kv: GiB for KV per device, as logged.
        options: of the layout and the engine, where they are not vLLM's defaults on this machine.
        bytes_per_weight: of the checkpoint, if it is not the model's own.
    """

    model: str
    machine: str
    kv: float
    options: dict[str, Any] | None = None
    bytes_per_weight: float = 2

    def predict(self) -> float:
        """Return the predicted GiB for KV."""
        engine = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "max_model_len": 8192}
        engine |= {"gpu_memory_utilization": 0.95} | (self.options or {})
        names = ("tensor_parallel_size", "pipeline_parallel_size")
        layout = Layout(**{name: engine.pop(name) for name in names if name in engine})
        model = replace(find_model(self.model), bytes_per_weight=self.bytes_per_weight)
        config = EngineConfig(**engine)
        num_blocks = kv_blocks(model, find_machine(self.machine), layout, config)
        per_token = model.kv_bytes_per_token(layout.tensor_parallel_size)
        return num_blocks * config.block_size * per_token / layout.pipeline_parallel_size / GIB


TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
OLD = {"gpu_memory_utilization": 0.9, "max_num_seqs": 256}
# vLLM 0.19 on H100, 2026-04: github.com/llm-d-incubation/llm-d-planner/pull/205, in
# accuracy/results/v0.19.0/logs of its commit d3121e0.
LOGS = [
    Log("llama-3.1-8b", "H100", 58.11),
    Log("llama-3.1-8b", "H100", 63.76, TP2),
    Log("llama-3.1-8b", "H100", 67.44, TP4),
    Log("llama-3.1-8b", "H100", 66.54, {"pipeline_parallel_size": 2}),
    Log("qwen2.5-7b", "H100", 58.53),
    Log("qwen2.5-7b", "H100", 63.84, TP2),
    Log("qwen3-8b", "H100", 57.50),
    Log("phi-4", "H100", 46.08),
    Log("deepseek-v2-lite", "H100", 43.61),
    Log("qwen3-30b-a3b", "H100", 15.41),
    Log("mixtral-8x7b", "H100", 28.44, TP2),
    Log("qwen2.5-72b", "H100", 3.04, TP2),
    Log("llama-3.3-70b", "H100", 37.28, TP2, bytes_per_weight=1),
    Log("llama-3.3-70b", "H100", 54.09, TP4, bytes_per_weight=1),
]
# Versions before 0.17, whose sampler took up to 2.6 GiB more: pull requests and issues of
# github.com/vllm-project/vllm.
OLD_LOGS = [
    # 10511, 2024-12: 14.96 GiB of weights, 1.26 of activations, 1.79 outside of torch; -tp 2: 3.58
    Log("llama-3.1-8b", "H100", 53.29, OLD),
    Log("llama-3.1-8b", "H100", 58.97, OLD | TP2),
    # 15815, 2025-04: 30.71 GiB of weights, 1.26 of activations, 0.30 outside of torch
    Log(
        *("qwen2.5-32b", "L40S", 7.71),
        OLD | TP2 | {"max_model_len": 10_000, "max_num_batched_tokens": 10_000},
    ),
]


@pytest.mark.parametrize("log", LOGS)
def test_kv_pools_are_those_of_logs(log: Log) -> None:
    assert log.predict() == pytest.approx(log.kv, rel=0.03)


@pytest.mark.parametrize("log", OLD_LOGS)
def test_kv_pools_are_near_those_of_old_logs(log: Log) -> None:
    assert log.predict() == pytest.approx(log.kv, rel=0.06)


def test_a_model_that_does_not_fit_is_short_of_memory_by_a_number() -> None:
    model, h100 = find_model("llama-3.1-70b"), find_machine("H100")
    small = EngineConfig(max_num_batched_tokens=256, max_num_seqs=1)
    weights = model.weight_bytes(Layout())
    missing = weights + model.activation_bytes(Layout(), 256, 1) - 0.9 * 79.65 * GIB + 0.7 * GIB
    message = (
        rf"{(missing + 16 * 327_680) / 1e9:.1f} GB per device are missing \(141.1 GB of weights, "
        r"0.1 GB of activations\); raise tensor_parallel_size, lower max_num_batched_tokens or "
        "max_num_seqs, or choose a machine with more memory"
    )
    with pytest.raises(UsageError, match=message):
        kv_blocks(model, h100, Layout(), small)
    # 70B in 16 bits leaves two H100s room for a few requests, and none with a large budget.
    layout = Layout(tensor_parallel_size=2)
    assert 0 < kv_blocks(model, h100, layout, EngineConfig()) < 1200
    large = EngineConfig(max_num_batched_tokens=65_536)
    with pytest.raises(
        UsageError, match=r" 8.9 GB of activations\); raise tensor_parallel_size, lo"
    ):
        kv_blocks(model, h100, layout, large)
    with pytest.raises(UsageError, match=r"activations\); raise gpu_memory_utilization 0.1$"):
        engine = EngineConfig(gpu_memory_utilization=0.1)
        kv_blocks(find_model("llama-3.1-8b"), h100, Layout(), engine)


def test_libraries_for_collectives_take_memory_of_ranks_that_share_layers() -> None:
    h100 = find_machine("H100")
    without = msgspec.structs.replace(h100, collectives_gib=0.0)
    moe, dense = find_model("qwen3-30b-a3b"), find_model("llama-3.1-8b")
    experts = Layout(data_parallel_size=4, enable_expert_parallel=True)
    for model, layout, share in (
        (dense, Layout(), False),
        (dense, Layout(tensor_parallel_size=2), True),
        (dense, experts, False),
        (moe, experts, True),
        (moe, Layout(data_parallel_size=4), False),
    ):
        pools = [kv_blocks(model, each, layout, EngineConfig()) for each in (without, h100)]
        size = 16 * model.kv_bytes_per_token(layout.tensor_parallel_size)
        assert pools[0] - pools[1] == pytest.approx(share * 1.85 * GIB / size, abs=1)


def test_machines_hold_memory_back_but_a_laptop() -> None:
    held = {name: each.reserved_gib for name, each in known_machines().items()}
    assert held.pop("laptop") == 0
    assert all(0.5 <= each <= 1 for each in held.values())
