"""All layers in one call of C++ compute, to the last bit, what they compute one by one; what C++
cannot compute, or a learner has changed, runs one by one."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.assembly.model import LoadedModel
from nanovllm.layers import quantization
from nanovllm.models import llama
from nanovllm.models.fused import FusedLayers
from nanovllm.ops import native
from tests.oracle import make_checkpoint
from tests.pairwise import half_by_day, in_turn
from tests.quantized import quantize_checkpoint

pytestmark = pytest.mark.skipif(
    not native.is_available(), reason="plain torch has no call for several layers"
)

PROMPTS = [[5, 6, 7, 8], list(range(20, 90)), [9], list(range(20, 70))]


def generate(folder: pathlib.Path, dtype: str, **options: Any) -> tuple[bool, list[Any]]:
    """Whether the layers are fused, and tokens with their log-probabilities, greedy and drawn."""
    llm = LLM(
        str(folder),
        dtype=dtype,
        num_kv_blocks=100,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        **options,
    )
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True, logprobs=1)
        for i in range(4)
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    fused = isinstance(llm.engine.core.runner.model.model.layer_calls[0], FusedLayers)
    return fused, [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


# By day each architecture with one of the dtypes, in turn.
@pytest.mark.parametrize(
    ("variant", "dtype"),
    in_turn(
        [
            "llama",
            "llama-mha-tied",
            "llama-biased",
            "llama-head-dim",
            "qwen2-window",
            "qwen3",
            "mistral-window",
        ],
        ["bfloat16", "float32"],
    ),
)
def test_the_bits_are_those_of_layers_one_by_one(
    variant: str, dtype: str, tmp_path: pathlib.Path
) -> None:
    folder = make_checkpoint(tmp_path, variant)
    one_by_one, expected = generate(folder, dtype, enforce_eager=True)
    fused, values = generate(folder, dtype)
    assert (one_by_one, fused) == (False, True)
    assert values == expected


QUANTIZED = ["w8a8", "w4a16", "w4a8"]


@pytest.mark.parametrize(
    ("kind", "variant", "dtype"),
    half_by_day(["mixed", *QUANTIZED], ["llama", "llama-biased", "qwen3"], ["bfloat16", "float32"]),
)
def test_the_bits_of_quantized_layers_are_those_of_layers_one_by_one(
    kind: str, variant: str, dtype: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed: each matrix of a layer is of another kind, or of none, and those of the next layer are
    others."""
    original = quantization._online

    def mixed(model: Any, method: str) -> Any:
        by_kind = [*(original(model, each) for each in QUANTIZED), {}]
        for i, matrix in enumerate(by_kind[0]):
            matrices = by_kind[(i + i // 4) % 4]
            if matrix in matrices:
                chosen[matrix] = matrices[matrix]
        return dict(chosen)

    chosen: dict[Any, Any] = {}
    if kind == "mixed":
        monkeypatch.setattr(quantization, "_online", mixed)
    folder = make_checkpoint(tmp_path, variant)
    options = {"quantization": "w8a8" if kind == "mixed" else kind, "quantize_head": True}
    one_by_one, expected = generate(folder, dtype, enforce_eager=True, **options)
    if kind == "mixed":
        assert {weight.scheme.kind for weight in chosen.values()} == {*QUANTIZED}
        assert len(chosen) == 9, "a fourth of the matrices is not quantized"
        chosen.clear()
    fused, values = generate(folder, dtype, **options)
    assert (one_by_one, fused) == (False, True)
    assert values == expected


@pytest.mark.parametrize(
    "kind", ["asymmetric 4 bits, groups of 16", "w4a8 in words, asymmetric", "w8a16"]
)
def test_checkpoints_with_zero_points_are_fused_and_so_are_those_that_are_dequantized(
    kind: str, tmp_path: pathlib.Path
) -> None:
    folder, _ = quantize_checkpoint(make_checkpoint(tmp_path / "original", "llama"), tmp_path, kind)
    _, expected = generate(folder, "bfloat16", enforce_eager=True)
    assert generate(folder, "bfloat16") == (True, expected)


@pytest.mark.parametrize("variant", ["gemma2", "mixtral", "deepseek-v2-dense"])
def test_other_layers_run_one_by_one(variant: str, tmp_path: pathlib.Path) -> None:
    assert generate(make_checkpoint(tmp_path, variant), "float32")[0] is False


def test_a_learners_class_is_called(
    tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    class MyMLP(llama.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    monkeypatch.setattr(llama, "MLP", MyMLP)
    assert generate(tiny_model, "float32")[0] is False
    assert calls


def test_a_hook_is_called(tiny_model: pathlib.Path) -> None:
    llm = LLM(str(tiny_model), dtype="float32", num_kv_blocks=100)
    model = llm.engine.core.runner.model.model
    calls: list[int] = []
    model.layers[1].mlp.register_forward_hook(lambda module, inputs, out: calls.append(len(out)))
    assert isinstance(model.layer_calls[0], FusedLayers)
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert calls == [4, 1, 1]


def test_a_hook_of_pytorch_hears_of_each_layer(
    tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose attention layers have hooks runs them one by one, although they are fused. KV
    transfer saves layers in such hooks."""
    _, expected = generate(tiny_model, "float32")
    seen: list[int] = []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen.append(module.layer)

    prepare = LoadedModel.prepare

    def prepare_and_hook(loaded: LoadedModel, model: Any) -> None:
        prepare(loaded, model)
        for attention in model.attention_layers.values():
            attention.register_forward_hook(note)

    monkeypatch.setattr(LoadedModel, "prepare", prepare_and_hook)
    fused, values = generate(tiny_model, "float32")
    assert fused and values == expected
    assert set(seen) == set(range(max(seen) + 1)) and len(seen) > 2


def test_a_block_that_does_not_exist_is_refused(tiny_model: pathlib.Path) -> None:
    llm = LLM(str(tiny_model), dtype="float32", num_kv_blocks=100)
    llm.engine.core.runner.rows.block_tables[:] = 200
    original = llm.engine.core.runner.rows.update

    def update(schedule: Any) -> Any:
        rows = original(schedule)
        llm.engine.core.runner.rows.block_tables[rows] = 200
        return rows

    llm.engine.core.runner.rows.update = update  # type: ignore[method-assign]
    with pytest.raises(IndexError, match="do not agree"):
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2), use_tqdm=False)
