"""Quantized checkpoints as people find them: heads, groups as large as a row, several formats in
one file, inputs in the order of their groups, and FP8."""

from __future__ import annotations

import json
import pathlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM
from nanovllm.assembly.executor import read_model_config
from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.models.loader import load_model
from nanovllm.ops.reference_quantized import unpack
from tests.oracle import VARIANTS, greedy, greedy_choices, make_checkpoint
from tests.quantized import (
    FORMATS,
    Stored,
    compressed_tensors,
    is_quantized,
    store_checkpoint,
    stored_as,
    words,
)
from tests.stages import staged  # noqa: F401  (a fixture)

PROMPTS = [[5, 9, 100, 22, 7, 8, 200, 31, 44, 45, 46, 250, 251, 3, 17, 90], [12], [66, 67, 68] * 7]
GPTQ, PACKED = "gptq 4 bits, groups of 16, version 1", "symmetric 4 bits, groups of 16"
HEADS = [GPTQ, "awq", PACKED, "asymmetric 4 bits, groups of 16", "w8a16"]

Folders = tuple[pathlib.Path, pathlib.Path]


def tokens(folder: str, **options: Any) -> list[list[int]]:
    return greedy(LLM(folder, dtype="float32", num_kv_blocks=64, **options), PROMPTS, 10)


def check_tokens(folders: Folders, **options: Any) -> None:
    """Compare with `transformers`, which runs the dequantized checkpoint."""
    quantized, plain = folders
    found = tokens(str(quantized), **options)
    assert found == greedy_choices(str(plain), PROMPTS, found, 10)


def on_ranks(folders: Folders, ranks: Grid) -> None:
    """The same on several ranks."""
    quantized, plain = folders
    found = run_ranks(tokens, ranks, str(quantized), timeout=120)
    assert found == [greedy_choices(str(plain), PROMPTS, found[0], 10)] * ranks.tensor


def load(folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, read_model_config(EngineConfig(str(folder)), folder), dtype)


def change_tensors(folder: pathlib.Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that adds a variant of another one for this test, and returns its name."""

    def add(base: str, **changes: Any) -> str:
        config_class, before = VARIANTS[base]
        monkeypatch.setitem(VARIANTS, "of this test", (config_class, before | changes))
        return "of this test"

    return add


# ---------------------------------------------------------------- heads


def with_quantized_head(folder: pathlib.Path, kind: str, name: str, keep: bool) -> Folders:
    """A tied checkpoint whose head is quantized under a name, beside its embedding or alone."""

    def store(name_in_file: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, whole = stored_as(kind, matrix)
        is_head = "embed_tokens" in name_in_file
        return {end: t for end, t in tensors.items() if not (is_head and end == "bias")}, whole

    source = make_checkpoint(folder / "original", "llama-mha-tied")
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    folders = store_checkpoint(
        source, folder, FORMATS[kind][4], store, lambda n: is_quantized(n) or "embed" in n
    )
    start = "model.embed_tokens."

    def rename(tensors: dict[str, Tensor]) -> None:
        for old in [old for old in tensors if old.startswith(start)]:
            tensors[old.replace(start, f"{name}.")] = tensors.pop(old)
        if keep:
            tensors["model.embed_tokens.weight"] = embedding

    for each in folders:
        change_tensors(each, rename if each is folders[0] or keep else dict)
    if keep:  # transformers ties them, whatever the file says
        config = json.loads((folders[1] / "config.json").read_text(encoding="utf-8"))
        (folders[1] / "config.json").write_text(
            json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8"
        )
    return folders


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("name", "keep"),
    [("lm_head", False), ("model.embed_tokens", False), ("lm_head", True)],
    ids=["head alone", "embedding alone", "head and embedding"],
)
def test_a_quantized_head_of_a_tied_model(
    tmp_path: pathlib.Path, kind: str, name: str, keep: bool
) -> None:
    folders = with_quantized_head(tmp_path, kind, name, keep)
    check_tokens(folders)
    model = load(folders[0])
    assert model.lm_head.weight.scheme.bits == FORMATS[kind][0], "the head as it is stored"
    assert (model.model.embed_tokens.weight is model.lm_head.weight) == (not keep)


def test_a_quantized_embedding_leaves_another_head_alone(tmp_path: pathlib.Path) -> None:
    def store(_: str, matrix: Tensor) -> Stored:
        return stored_as("w8a16", matrix)

    source = make_checkpoint(tmp_path / "original")
    folders = store_checkpoint(
        source, tmp_path, FORMATS["w8a16"][4], store, lambda n: is_quantized(n) or "embed" in n
    )
    check_tokens(folders)
    head = load(folders[0]).lm_head.weight
    assert torch.equal(head, load_file(source / "model.safetensors")["lm_head.weight"])


def test_a_quantized_tied_head_multiplies_8_bit_inputs(tmp_path: pathlib.Path) -> None:
    quantized, plain = with_quantized_head(tmp_path, "w8a8", "lm_head", keep=False)
    model = load(quantized)
    assert model.lm_head.weight.scheme.kind == "w8a8"
    ids = torch.tensor([3, 0, 319])
    whole = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens(ids), whole[ids])


@pytest.mark.parametrize("kind", [GPTQ, "awq", "w8a16"])
def test_a_quantized_head_of_a_tied_model_on_two_ranks(tmp_path: pathlib.Path, kind: str) -> None:
    on_ranks(with_quantized_head(tmp_path, kind, "lm_head", keep=False), Grid(tensor=2))


@pytest.mark.usefixtures("staged")
def test_a_quantized_head_of_a_tied_model_on_two_stages(tmp_path: pathlib.Path) -> None:
    folders = with_quantized_head(tmp_path, PACKED, "lm_head", keep=False)
    check_tokens(folders, pipeline_parallel_size=2)
    llm = LLM(str(folders[0]), dtype="float32", num_kv_blocks=8, pipeline_parallel_size=2)
    head: Any = llm.engine.core.runner.model.lm_head.weight
    assert head.scheme.bits == 4, "the last stage has it as it is stored"


# ---------------------------------------------------------------- groups and formats in one file


@pytest.mark.parametrize("kind", [GPTQ, "awq", PACKED, "asymmetric 4 bits, groups of 16"])
@pytest.mark.parametrize("size", ["moe_intermediate_size", "hidden_size"])
def test_groups_as_large_as_a_row(
    tmp_path: pathlib.Path, kind: str, size: str, variant: Callable[..., str]
) -> None:
    """Matrices of one layer have one group or several, and the same group size."""
    sizes = {"moe_intermediate_size": 48, "hidden_size": 64} | {size: 16}
    name = variant("qwen3-moe", **sizes)
    folders = store_checkpoint(
        make_checkpoint(tmp_path / "original", name),
        tmp_path,
        FORMATS[kind][4],
        lambda _, matrix: stored_as(kind, matrix),
    )
    check_tokens(folders)
    experts = load(folders[0]).model.layers[0].mlp.experts
    assert {experts.w13.scheme.bits, experts.w2.scheme.bits} == {4}


@pytest.mark.parametrize("kind", [GPTQ, PACKED])
def test_groups_as_large_as_a_row_on_two_ranks(
    tmp_path: pathlib.Path, kind: str, variant: Callable[..., str]
) -> None:
    """All inputs share a scale, so each rank may have half of them."""
    folders = store_checkpoint(
        make_checkpoint(tmp_path / "original", variant("qwen3-moe", moe_intermediate_size=16)),
        tmp_path,
        FORMATS[kind][4],
        lambda _, matrix: stored_as(kind, matrix),
    )
    on_ranks(folders, Grid(tensor=2))


def test_8_bit_rows_of_any_length(tmp_path: pathlib.Path, variant: Callable[..., str]) -> None:
    """Bytes need no words of 4 or 8."""
    name = variant("llama", intermediate_size=90)
    folders = store_checkpoint(
        make_checkpoint(tmp_path / "original", name),
        tmp_path,
        FORMATS["w8a16"][4],
        lambda _, matrix: stored_as("w8a16", matrix),
    )
    check_tokens(folders)


def two_formats(second: str, target: str) -> dict[str, Any]:
    """A `quantization_config` in which some layers have another format than `PACKED`."""
    first = FORMATS[PACKED][4]
    one = first["config_groups"]["group_0"]
    other = FORMATS[second][4]["config_groups"]["group_0"]
    groups = {"group_0": dict(one), "group_1": other | {"targets": [target]}}
    return first | {"format": "mixed-precision", "config_groups": groups}


@pytest.mark.parametrize(
    "second", ["symmetric 8 bits, groups of 16", "w8a16", "symmetric 4 bits, groups of 0"]
)
def test_down_projections_of_experts_in_another_format(
    tmp_path: pathlib.Path, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    folders = store_checkpoint(
        make_checkpoint(tmp_path / "original", "qwen3-moe"),
        tmp_path,
        two_formats(second, r"re:.*down_proj$"),
        lambda name, matrix: stored_as(second if "down_proj" in name else PACKED, matrix),
    )
    check_tokens(folders)
    experts = load(folders[0]).model.layers[0].mlp.experts
    assert (experts.w13.scheme.bits, experts.w2.scheme.bits) == (4, FORMATS[second][0])
    assert "dequantized" not in caplog.text


def test_bits_and_groups_are_those_of_the_first_target_that_names_a_layer(
    tmp_path: pathlib.Path,
) -> None:
    """The name of one layer comes before the kind of all, whatever the order in the file."""
    second = "symmetric 8 bits, groups of 16"
    folders = store_checkpoint(
        make_checkpoint(tmp_path / "original"),
        tmp_path,
        two_formats(second, "model.layers.1.self_attn.o_proj"),
        lambda name, matrix: stored_as(
            second if "layers.1.self_attn.o_" in name else PACKED, matrix
        ),
    )
    check_tokens(folders)
    layers = load(folders[0]).model.layers
    assert [layer.self_attn.o_proj.weight.scheme.bits for layer in layers] == [4, 8, 4]


def test_overrides_of_gptq(tmp_path: pathlib.Path) -> None:
    """As GPTQModel writes them: the first expression that fits a layer's name, and layers that are
    left out."""
    second, left = "gptq 8 bits, groups of 16, version 1", "layers.2.mlp.down_proj"
    dynamic = {rf"-:.*{left}$": {}, r"+:.*\.o_proj$": {"bits": 8}, r".*o_proj$": {"bits": 4}}
    folders = store_checkpoint(
        make_checkpoint(tmp_path / "original"),
        tmp_path,
        FORMATS[GPTQ][4] | {"dynamic": dynamic},
        lambda name, matrix: stored_as(second if "o_proj" in name else GPTQ, matrix),
        lambda name: is_quantized(name) and left not in name,
    )
    check_tokens(folders)
    layer = load(folders[0]).model.layers[2]
    assert layer.self_attn.o_proj.weight.scheme.bits == 8
    assert isinstance(layer.mlp.down_proj.weight, Tensor)


def test_a_file_that_contradicts_its_configuration_is_refused(tmp_path: pathlib.Path) -> None:
    settings = two_formats("w8a16", "re:.*down_proj$")
    source = make_checkpoint(tmp_path / "original")
    folder, _ = store_checkpoint(source, tmp_path, settings, lambda _, m: stored_as(PACKED, m))
    message = (
        r"mlp.down_proj.weight_packed \(int32\) is not in the format that config.json names, "
        "int-quantized: correct quantization_config"
    )
    with pytest.raises(ValueError, match=message):
        load(folder)
    settings["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ValueError, match="is quantized, and no target in config"):
        load(folder)


# -------------------------------------------------------------- inputs in another order (desc_act)


def in_order_of(name: str, inputs: int, per_matrix: bool) -> Tensor:
    """A random order of a matrix's inputs: of its own, or the same for all with these inputs."""
    key = name if per_matrix else re.sub(r"[a-z]+_proj|w[123]", "", name)
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def reordered(
    folder: pathlib.Path,
    name: str,
    kind: str = GPTQ,
    per_matrix: bool = False,
    chosen: Callable[[str], bool] = is_quantized,
) -> Folders:
    """A GPTQ checkpoint whose groups are of 16 inputs anywhere."""

    def store(layer: str, matrix: Tensor) -> Stored:
        order = in_order_of(layer, matrix.shape[1], per_matrix)
        group = torch.empty_like(order)
        group[order] = torch.arange(len(order)) // 16
        tensors, whole = stored_as(kind, matrix[:, order])
        position = order.argsort()
        values = unpack(tensors["qweight"].T, FORMATS[kind][0])[:, position]
        tensors["qweight"] = words(values.numpy(), FORMATS[kind][0]).T.contiguous()
        return tensors | {"g_idx": group.int()}, whole[:, position]

    settings = FORMATS[kind][4] | {"desc_act": True, "static_groups": False}
    source = make_checkpoint(folder / "original", name)
    return store_checkpoint(source, folder, settings, store, chosen)


GPTQ8 = "gptq 8 bits, groups of 16, version 1"


@pytest.mark.parametrize("kind", [GPTQ, GPTQ8])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "deepseek-v2"])
def test_groups_of_inputs_that_are_not_neighbours(
    tmp_path: pathlib.Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folders = reordered(tmp_path, name, kind)
    check_tokens(folders)
    lines = [line for line in caplog.messages if " dequantized while loading: " in line]
    assert len(lines) == (name == "deepseek-v2"), "what latent attention absorbs, and nothing else"
    assert all("kv_b_proj" in line for line in lines)
    weight = load(folders[0]).model.layers[0].self_attn.o_proj.weight
    assert weight.scheme.reordered and weight.scheme.bits == FORMATS[kind][0]


@pytest.mark.parametrize("kind", [GPTQ, GPTQ8])
def test_reordered_groups_of_a_tied_head(tmp_path: pathlib.Path, kind: str) -> None:
    """A row of the embedding has its numbers in the order of the channels."""

    def chosen(name: str) -> bool:
        return is_quantized(name) or "embed_tokens" in name

    def without_bias(tensors: dict[str, Tensor]) -> None:
        del tensors["model.embed_tokens.bias"]

    folders = reordered(tmp_path, "llama-mha-tied", kind, chosen=chosen)
    change_tensors(folders[0], without_bias)
    check_tokens(folders)
    assert load(folders[0]).lm_head.weight.scheme.reordered


def test_reordered_groups_and_8_bit_inputs(tmp_path: pathlib.Path) -> None:
    """The order of the inputs changes neither their scales nor the sums."""
    quantized, plain = reordered(tmp_path, "llama")
    weight = (
        load_model(
            quantized,
            read_model_config(EngineConfig(str(quantized), quantization="w4a8"), quantized),
            torch.float32,
        )
        .model.layers[1]
        .mlp.down_proj.weight
    )
    whole = load_file(plain / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    x = torch.randn(5, whole.shape[1], generator=torch.Generator().manual_seed(0))
    x[:, 0] = 4
    x = (x.clamp(-4, 4) * 127 / 4).round() * 4 / 127  # so that integers are not rounded
    assert weight.scheme.kind == "w4a8"
    before = weight(x)
    weight.pack()
    torch.testing.assert_close(before, x @ whole.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight(x), before)


def test_stacked_matrices_of_different_orders_are_dequantized(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = reordered(tmp_path, "llama", per_matrix=True)
    check_tokens(folders)
    layer = load(folders[0]).model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj.weight, Tensor)
    assert layer.self_attn.o_proj.weight.scheme.reordered
    assert "q_proj and 14 more are dequantized while loading: desc_act" in caplog.text


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_reordered_groups_on_two_ranks(tmp_path: pathlib.Path, name: str) -> None:
    """A rank's inputs of o_proj and down_proj belong to groups of which the other has inputs."""
    on_ranks(reordered(tmp_path, name), Grid(tensor=2))


def whole_experts(folder: str) -> list[list[int]]:
    settings = {"enable_eplb": True, "eplb_config": '{"step_interval": 3}'}
    return tokens(folder, enable_expert_parallel=True, **settings)


def test_reordered_groups_of_experts_that_move(tmp_path: pathlib.Path) -> None:
    quantized, plain = reordered(tmp_path, "mixtral")
    found = run_ranks(whole_experts, Grid(tensor=2), str(quantized), timeout=120)
    assert found == [greedy_choices(str(plain), PROMPTS, found[0], 10)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t * 0, "g_idx: a group does not have 16 inputs"),
        (lambda t: t - 7, "g_idx: a group does not have 16 inputs"),
        (lambda t: t + 2**30, "g_idx: a group does not have 16 inputs"),
        (None, "lacks model.layers.1.mlp.up_proj.g_idx, the order of its inputs"),
    ],
)
def test_damaged_orders_are_refused(
    tmp_path: pathlib.Path, change: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    folder, _ = reordered(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.g_idx"

    def damage(tensors: dict[str, Tensor]) -> None:
        groups = tensors.pop(name)
        if change is not None:
            tensors[name] = change(groups)

    change_tensors(folder, damage)
    with pytest.raises(ValueError, match=message):
        load(folder)


# ---------------------------------------------------------------- FP8

LARGEST = 448.0  # of float8_e4m3fn


def fp8(matrix: Tensor, per: str, block: tuple[int, int] = (0, 0)) -> tuple[Tensor, Tensor, Tensor]:
    """(float8 numbers, scales, dequantized floats) of a matrix, by a loop over its parts."""
    outputs, inputs = matrix.shape
    sizes = {"tensor": (outputs, inputs), "row": (1, inputs), "block": block}
    height, width = sizes[per]
    numbers = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    whole = torch.empty(outputs, inputs)
    scales = torch.empty(-(-outputs // height), -(-inputs // width))
    for i, top in enumerate(range(0, outputs, height)):
        for j, left in enumerate(range(0, inputs, width)):
            part = matrix[top : top + height, left : left + width]
            scales[i, j] = part.abs().max() / LARGEST
            rounded = (part / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[top : top + height, left : left + width] = rounded
            whole[top : top + height, left : left + width] = rounded.float() * scales[i, j]
    return numbers, scales, whole


def float_quantized(of_weights: str, **inputs: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with FP8 weights."""
    settings = compressed_tensors("float-quantized", 8, 0, False, False)
    group = settings["config_groups"]["group_0"]
    group["weights"] |= {"type": "float", "strategy": of_weights}
    if of_weights == "block":
        group["weights"]["block_structure"] = [16, 24]
    group["input_activations"] = {"num_bits": 8, "type": "float", "symmetric": True} | inputs
    return settings


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}
# name -> (what shares a scale, the end of its name, quantization_config)
FP8: dict[str, tuple[str, str, dict[str, Any]]] = {
    "blocks": ("block", "weight_scale_inv", BLOCKS | {"fmt": "e4m3"}),
    "tensor, dynamic": ("tensor", "weight_scale", {"quant_method": "fp8"}),
    "tensor, static": (
        "tensor",
        "weight_scale",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "compressed-tensors, channel": (
        "row",
        "weight_scale",
        float_quantized("channel", strategy="token", dynamic=True),
    ),
    "compressed-tensors, flat": ("row", "weight_scale", float_quantized("channel")),
    "compressed-tensors, tensor": (
        "tensor",
        "weight_scale",
        float_quantized("tensor", strategy="tensor", dynamic=False),
    ),
    "compressed-tensors, block": (
        "block",
        "weight_scale",
        float_quantized("block", strategy="group", dynamic=True, group_size=128),
    ),
}


def fp8_checkpoint(folder: pathlib.Path, kind: str, name: str) -> Folders:
    per, end, settings = FP8[kind]

    def store(_: str, matrix: Tensor) -> Stored:
        numbers, scales, whole = fp8(matrix, per, (16, 24))
        if per == "tensor":
            scales = scales[0, 0] if settings["quant_method"] == "fp8" else scales[0]
        if "flat" in kind:
            scales = scales[:, 0]
        tensors = {"weight": numbers, end: scales}
        if "static" in kind or kind.endswith("tensors, tensor"):
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, whole

    return store_checkpoint(make_checkpoint(folder / "original", name), folder, settings, store)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in FP8),
        *(("qwen3-moe", kind) for kind in ("blocks", "compressed-tensors, channel")),
        *(("deepseek-v3", kind) for kind in ("blocks", "tensor, static")),
        ("qwen3", "blocks"),
        ("mixtral", "tensor, static"),
    ],
)
def test_fp8_tokens_are_those_of_the_dequantized_weights(
    tmp_path: pathlib.Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of 16 outputs and 24 inputs, so that the last ones are not whole."""
    folders = fp8_checkpoint(tmp_path, kind, name)
    check_tokens(folders)
    [line] = [line for line in caplog.messages if " dequantized while loading: " in line]
    assert "each takes the memory of --dtype" in line


@pytest.mark.parametrize("kind", ["blocks", "compressed-tensors, channel", "tensor, dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_numbers_are_rounded_once(
    tmp_path: pathlib.Path, kind: str, dtype: torch.dtype
) -> None:
    """Every float8 number and a scale, against their product in float64."""
    quantized, plain = fp8_checkpoint(tmp_path, kind, "llama")
    weight = load(quantized, dtype).model.layers[1].mlp.down_proj.weight
    whole = load_file(plain / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(weight, whole.to(dtype))


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek-v3"])
def test_fp8_on_two_ranks(tmp_path: pathlib.Path, name: str) -> None:
    """Ranks begin within a block: 48 of 96 inputs, in blocks of 24; 32 of 64 in blocks of 24."""
    on_ranks(fp8_checkpoint(tmp_path, "blocks", name), Grid(tensor=2))


def test_an_fp8_head_becomes_w8a8(tmp_path: pathlib.Path) -> None:
    """The setting quantizes the dequantized rows anew; the embedding stays as it is."""
    per, end, settings = FP8["compressed-tensors, channel"]

    def store(_: str, matrix: Tensor) -> Stored:
        numbers, scales, whole = fp8(matrix, per)
        return {"weight": numbers, end: scales}, whole

    source = make_checkpoint(tmp_path / "original")
    quantized, plain = store_checkpoint(
        source, tmp_path, settings, store, lambda name: is_quantized(name) or "lm_head" in name
    )
    check_tokens((quantized, plain))
    found = tokens(str(quantized), quantize_head=True)
    assert found == tokens(str(plain), quantize_head=True)


@pytest.mark.parametrize("kind", ["blocks", "compressed-tensors, channel"])
def test_fp8_may_be_named_and_has_a_dummy(tmp_path: pathlib.Path, kind: str) -> None:
    quantized, _ = fp8_checkpoint(tmp_path, kind, "llama")
    assert tokens(str(quantized), quantization="fp8") == tokens(str(quantized))
    assert len(tokens(str(quantized), load_format="dummy")) == len(PROMPTS)
    config = EngineConfig(str(quantized), load_format="dummy")
    assert read_model_config(config, quantized).quantization is None


def test_fp8_of_an_unquantized_checkpoint_is_refused(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    message = "quantization 'fp8' does not fit .* not quantized: use w8a8 for 8 bits per weight"
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), quantization="fp8", num_kv_blocks=8)


NAME = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("kind", "end", "change", "message"),
    [
        ("blocks", "weight_scale_inv", None, f"lacks {NAME}weight_scale_inv"),
        ("blocks", "weight", None, f"has no place for '{NAME}weight_scale_inv'"),
        (
            "blocks",
            "weight_scale_inv",
            lambda t: t[1:].contiguous(),
            r"weight_scale_inv has shape \[5, 3\], the configuration says \[6, 3\]",
        ),
        (
            "blocks",
            "weight_scale_inv",
            lambda t: t * torch.nan,
            f"{NAME}weight_scale_inv: a scale is infinite or not a number",
        ),
        ("blocks", "weight", lambda t: t[:, 1:].contiguous(), r"weight has shape \[96, 63\]"),
        (
            "blocks",
            "weight",
            lambda t: t.view(torch.int8),
            r"up_proj.weight \(int8\) is not in the format that config.json names, fp8",
        ),
        (
            "tensor, dynamic",
            "weight_scale",
            lambda t: t.repeat(2),
            r"weight_scale has shape \[2\], the configuration says \[\]",
        ),
        (
            "compressed-tensors, channel",
            "weight_scale",
            lambda t: t[:5].contiguous(),
            r"weight_scale has shape \[5, 1\], the configuration says \[96, 1\]",
        ),
        ("tensor, static", "weight_scale", lambda t: t / 0, "infinite or not a number"),
    ],
)
def test_damaged_fp8_is_refused(
    tmp_path: pathlib.Path,
    kind: str,
    end: str,
    change: Callable[[Tensor], Tensor] | None,
    message: str,
) -> None:
    folder, _ = fp8_checkpoint(tmp_path, kind, "llama")

    def damage(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(NAME + end)
        if change is not None:
            tensors[NAME + end] = change(tensor)

    change_tensors(folder, damage)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "end", "message"),
    [
        (GPTQ, "qweight", r"qweight \(float32\) is not in the format that config.json names, gptq"),
        ("awq", "qzeros", "qzeros must be of int32, got float32"),
        (PACKED, "weight_packed", r"weight_packed \(float32\) is not in the format"),
        ("asymmetric 4 bits, groups of 16", "weight_zero_point", "must be of int32, got float32"),
    ],
)
def test_words_of_another_dtype_are_refused(
    tmp_path: pathlib.Path, kind: str, end: str, message: str
) -> None:
    folder, _ = store_checkpoint(
        make_checkpoint(tmp_path / "original"),
        tmp_path,
        FORMATS[kind][4],
        lambda _, matrix: stored_as(kind, matrix),
    )

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[NAME + end] = tensors[NAME + end].float()

    change_tensors(folder, damage)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("kind", [GPTQ, "awq", PACKED, "w8a16"])
def test_scales_that_are_no_numbers_are_refused(tmp_path: pathlib.Path, kind: str) -> None:
    folder, _ = store_checkpoint(
        make_checkpoint(tmp_path / "original"),
        tmp_path,
        FORMATS[kind][4],
        lambda _, matrix: stored_as(kind, matrix),
    )

    def damage(tensors: dict[str, Tensor]) -> None:
        [name] = [n for n in tensors if n.startswith(NAME) and "scale" in n]
        tensors[name][0, 0] = torch.inf

    change_tensors(folder, damage)
    with pytest.raises(ValueError, match=r"up_proj.*scale.*: a scale is infinite or not a number"):
        load(folder)
