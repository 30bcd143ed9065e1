"""Quantized weights: every format is read as its description says, in every architecture and grid,
and what cannot be is refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM, ops
from nanovllm.assembly.executor import read_model_config
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.checkpoint.quantization import QuantizationConfig
from nanovllm.checkpoint.weights import CheckpointError
from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid
from nanovllm.kv_transfer.factory import kv_identity
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.layers.quantization import W8A8, W8A16, QuantizedWeight, Scheme
from nanovllm.models.loader import load_model
from nanovllm.ops import quantized, reference_quantized
from nanovllm.ops.reference_quantized import pack, round_to_nearest, unpack
from tests.oracle import VARIANTS, greedy, greedy_choices, make_checkpoint, reference_tokens
from tests.quantized import FORMATS, compressed_tensors, grid, quantize_checkpoint, words
from tests.stages import staged  # noqa: F401  (a fixture)
from tests.stand_ins import set_failure, set_kernels

PROMPTS = [
    [5, 9, 100, 22, 7, 8, 200, 31, 44, 45, 46, 250, 251, 3, 17, 90, 4, 6, 11],
    [12],
    [66, 67, 68] * 7,
]
WEIGHT_ONLY = [kind for kind in FORMATS if not kind.startswith(("w8a8", "w4a8"))]
OTHERS = [
    "qwen2",
    "gemma2",
    "llama-mha-tied",
    "mixtral",
    "qwen3-moe",
    "deepseek-v2",
    "deepseek-v3-dense",
]
GPTQ, AWQ, ASYMMETRIC = (
    "gptq 4 bits, groups of 16, version 1",
    "awq",
    "asymmetric 4 bits, groups of 16",
)
# Each of 3 ranks has 16 of 48 inputs, and one of 3 KV heads.
UNEVEN = {"vocab_size": 263, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}


def tokens(folder: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return greedy(LLM(folder, dtype="float32", num_kv_blocks=64, **options), prompts, 10)


def expected_tokens(plain: pathlib.Path, found: list[list[int]]) -> list[list[int]]:
    return greedy_choices(str(plain), PROMPTS, found, 10)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes (quantized checkpoint, dequantized one) of a variant and a kind,
    once."""
    found: dict[tuple[str, str], tuple[pathlib.Path, pathlib.Path]] = {}

    def make(variant: str, kind: str) -> tuple[pathlib.Path, pathlib.Path]:
        if (variant, kind) not in found:
            folder = tmp_path_factory.mktemp("checkpoint")
            found[variant, kind] = quantize_checkpoint(
                make_checkpoint(folder / "original", variant), folder, kind
            )
        return found[variant, kind]

    return make


# ---------------------------------------------------------------- formats and architectures


@pytest.mark.parametrize(
    ("variant", "kind"),
    [*(("llama", kind) for kind in WEIGHT_ONLY), *zip(OTHERS, WEIGHT_ONLY * 2, strict=False)],
)
def test_tokens_are_those_of_the_dequantized_weights(made: Any, variant: str, kind: str) -> None:
    quantized_folder, plain = made(variant, kind)
    found = tokens(str(quantized_folder), PROMPTS)
    assert found == expected_tokens(plain, found)


@pytest.mark.parametrize("kind", [kind for kind in WEIGHT_ONLY if "symmetric" in kind])
def test_compressed_tensors_in_transformers_says_the_same(made: Any, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    folder, _ = made("llama", kind)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=settings, attn_implementation="eager"
    ).eval()
    for prompt, found in zip(PROMPTS, tokens(str(folder), PROMPTS), strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + found[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == found


def test_packing_is_that_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    numbers = torch.randint(
        -8, 8, (24, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8
    )
    packed = pack(numbers + 8)
    assert torch.equal(packed, words((numbers + 8).numpy(), 4))
    assert torch.equal(helpers.pack_to_int32(numbers, 4), packed)
    assert torch.equal(helpers.unpack_from_int32(packed, 4, numbers.shape), numbers)
    assert torch.equal(unpack(packed) - 8, numbers)


# ---------------------------------------------------------------- grids of ranks


def in_grid(folder: str, prompts: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    return tokens(folder, prompts, **options)


WHOLE_EXPERTS = {"enable_expert_parallel": True}
MOVING = WHOLE_EXPERTS | {"enable_eplb": True, "eplb_config": '{"step_interval": 3}'}


# By night also formats and divisions that the others contain.
@pytest.mark.parametrize(
    ("changes", "kind", "ranks", "options"),
    [
        pytest.param(UNEVEN, GPTQ, Grid(tensor=3), {}, marks=pytest.mark.nightly),
        (UNEVEN, ASYMMETRIC, Grid(tensor=3), {}),
        pytest.param("mixtral", AWQ, Grid(tensor=2), WHOLE_EXPERTS, marks=pytest.mark.nightly),
        ("mixtral", AWQ, Grid(tensor=2), MOVING),
        ("qwen3-moe", "gptq 8 bits, groups of 0, version 2", Grid(tensor=2), {}),
    ],
    ids=["gptq-tp3", "asymmetric-tp3", "awq-ep2", "awq-eplb2", "gptq8-tp2"],
)
def test_tokens_stay_the_same_on_several_ranks(
    made: Any, monkeypatch: pytest.MonkeyPatch, changes: Any, kind: str, ranks: Grid, options: Any
) -> None:
    if isinstance(changes, dict):
        monkeypatch.setitem(VARIANTS, "uneven", ("LlamaConfig", changes))
        changes = "uneven"
    folder, plain = made(changes, kind)
    found = run_ranks(in_grid, ranks, str(folder), PROMPTS, options, timeout=120)
    assert found == [expected_tokens(plain, found[0])] * ranks.tensor


@pytest.mark.parametrize(("variant", "head"), [("llama", False), ("llama-mha-tied", True)])
@pytest.mark.usefixtures("staged")
def test_tokens_stay_the_same_on_two_stages(made: Any, variant: str, head: bool) -> None:
    """A tied head in 8 bits is on the last stage, and its embedding on the first."""
    folder, _ = made(variant, GPTQ)
    alone = tokens(str(folder), PROMPTS, quantize_head=head)
    assert tokens(str(folder), PROMPTS, quantize_head=head, pipeline_parallel_size=2) == alone


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "groups", "symmetric"), [(4, 9, True), (4, 9, False), (4, 1, True), (8, 18, True)]
)
def test_a_product_is_that_with_the_dequantized_weight(
    bits: int, groups: int, symmetric: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 576, generator=generator)
    x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((7, 576), (48,)))
    values, scales, zeros = round_to_nearest(weight, bits, groups, symmetric, dtype)
    whole = quantized.dequantize(values, scales, zeros, dtype)
    numbers, their_scales, their_zeros = grid(weight.numpy(), bits, 576 // groups, not symmetric)
    theirs = (numbers.reshape(48, groups, -1) - their_zeros[..., None]) * their_scales[..., None]
    rounding = weight.abs() * 2**-8  # of scales and weights in bfloat16
    step = torch.from_numpy(their_scales).repeat_interleave(576 // groups, 1)
    assert (
        (whole.float() - torch.from_numpy(theirs).reshape(48, 576)).abs() <= 1.1 * step + rounding
    ).all()
    assert ((whole.float() - weight).abs() <= 0.52 * step + rounding).all()
    product = quantized.linear_w8a16(x, values, scales, bias) if bits == 8 else None
    product = quantized.linear_w4a16(x, values, scales, zeros, bias) if product is None else product
    assert torch.equal(product, ops.linear(x, whole, bias)) and product.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_a_group_of_zeros_is_stored_as_zeros(
    bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """With a scale above 0 (0 / 0 has no nearest number), and the types that a file stores."""
    weight = torch.zeros(2, 16)
    weight[:, :8] = torch.tensor([-0.08, 0.0, 0.52, 0.2, 0.0, 0.0, 0.0, 0.0])
    values, scales, zeros = round_to_nearest(weight, bits, 2, symmetric, dtype)
    assert values.dtype == (torch.int32 if bits == 4 else torch.int8)
    assert scales.dtype == dtype and (scales > 0).all() and scales.isfinite().all()
    assert zeros is None if symmetric else zeros is not None and zeros.dtype == torch.uint8
    whole = quantized.dequantize(values, scales, zeros, torch.float32)
    assert not whole[:, 8:].any() and (whole[:, :8] - weight[:, :8]).abs().max() < 0.05


@pytest.mark.parametrize("inputs", [64, 576, 1536, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_sums_are_exact(inputs: int, dtype: torch.dtype) -> None:
    """Against float64, which holds the integers and their sums exactly. Many inputs have the
    largest magnitude."""
    generator = torch.Generator().manual_seed(inputs)
    values = torch.randint(-128, 128, (33, inputs), generator=generator, dtype=torch.int8)
    values[:3] = torch.tensor([-128, 127, -127])[:, None]
    x = (torch.randn(9, inputs, generator=generator) * 3).to(dtype)
    x[0], x[1], x[2] = 0, x[1].abs().max(), -x[2].abs().max()
    scales, bias = (
        torch.rand(33, 1, generator=generator),
        torch.randn(33, generator=generator).to(dtype),
    )
    rows, row_scales = quantized.quantize_rows(x)
    largest = x.float().abs().amax(1, keepdim=True)
    assert torch.equal(row_scales, largest / 127), "the divisor is 127, not 127.5"
    inverse = np.divide(
        np.float32(127),
        largest.numpy(),
        out=np.zeros((9, 1), np.float32),
        where=largest.numpy() > 0,
    )
    assert torch.equal(rows, torch.from_numpy(np.rint(x.float().numpy() * inverse).astype(np.int8)))
    sums = (rows.double() @ values.double().T).float()
    expected = (sums * row_scales * scales.T + bias.float()).to(dtype)
    assert torch.equal(quantized.linear_w8a8(x, values, scales, bias), expected)


def test_halves_are_rounded_to_even() -> None:
    rows, scales = quantized.quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]))
    assert rows.tolist() == [[127, 0, 2, 2, 0, -2, -2]] and scales.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme", [Scheme(4, 64), Scheme(4, 64, quantizes_inputs=True), Scheme(8, 64), W8A8], ids=str
)
def test_a_row_does_not_depend_on_its_batch(scheme: Scheme, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = QuantizedWeight.empty((192, 576), scheme, torch.device("cpu")).to(dtype)
    weight.values.view(torch.int8).random_(-128, 127, generator=generator)
    weight.scales.uniform_(0.01, 0.02, generator=generator)
    weight.pack()
    x = torch.randn(70, 576, generator=generator).to(dtype)
    together = ops.linear(x, weight)  # type: ignore[arg-type]
    alone = torch.cat([ops.linear(row, weight) for row in x.split(1)])  # type: ignore[arg-type]
    few = torch.cat([ops.linear(rows, weight) for rows in x.split(3)])  # type: ignore[arg-type]
    if not ops._kernels(x.device).__name__.endswith("native") and not scheme.quantizes_inputs:
        pytest.skip("torch's products choose an order for the whole matrix")
    assert torch.equal(together, alone) and torch.equal(together, few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme", [Scheme(4, 64, has_zeros=True), Scheme(8, 64), W8A16, W8A8], ids=str
)
@pytest.mark.parametrize("shape", [(48, 128), (3, 48, 128)])
def test_a_cpu_without_a_kernel_dequantizes_once(
    shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_kernels(monkeypatch, quantized, reference_quantized)
    weight = QuantizedWeight.empty(shape, scheme, torch.device("cpu")).to(dtype)
    for tensor in weight.parameters():
        tensor.copy_(
            torch.rand(tensor.shape)
            if tensor.is_floating_point()
            else torch.randint(0, 16, tensor.shape)
        )
    x, bias = torch.randn(5, 128).to(dtype), torch.randn(48).to(dtype)
    whole = weight.dequantize()
    values, scales = (
        (weight.values, weight.scales) if len(shape) == 2 else (weight.values[0], weight.scales[0])
    )
    weight.pack()
    assert (weight.values.dtype == dtype) == (scheme != W8A8), (
        "integers stay where their products are of integers"
    )
    again = AssertionError("dequantized again")
    set_failure(monkeypatch, reference_quantized, "dequantize", again)
    matrix, packed = (whole, weight) if len(shape) == 2 else (whole[0], weight[0])
    exact = quantized.linear_w8a8(x, values, scales, bias) if scheme == W8A8 else None
    assert torch.equal(
        packed(x, bias), ops.linear(x, ops.pack_weight(matrix), bias) if exact is None else exact
    )


@pytest.mark.parametrize("scheme", [Scheme(4, 32), W8A16, W8A8], ids=str)
def test_experts_that_share_a_group_of_outputs_are_not_packed(scheme: Scheme) -> None:
    weight = QuantizedWeight.empty((2, 24, 64), scheme, torch.device("cpu"))
    for tensor in weight.parameters():
        tensor.copy_(
            torch.rand(tensor.shape)
            if tensor.is_floating_point()
            else torch.randint(0, 16, tensor.shape)
        )
    whole, x = weight.dequantize()[1].double(), torch.randint(-127, 128, (3, 64)).double()
    x[:, 0] = 127  # so that integers are not rounded
    weight.pack()
    error = (weight[1](x.float()) - x @ whole.T).abs()
    # A sum may cancel out: what float32 rounds depends on the terms, not on the sum.
    assert (error <= 8 * torch.finfo(torch.float32).eps * (x.abs() @ whole.abs().T)).all()


def test_weights_on_other_devices_stay_integers() -> None:
    for scheme in (Scheme(4, 64), Scheme(8, 64)):
        weight = QuantizedWeight.empty((48, 128), scheme, torch.device("meta"))
        weight.pack()
        assert not weight.values.is_floating_point()


@pytest.mark.parametrize("kind", [ASYMMETRIC, "w8a8"])
@pytest.mark.parametrize("head", [False, True])
def test_prefix_cache_and_chunks_change_no_token(made: Any, kind: str, head: bool) -> None:
    folder, _ = made("llama-mha-tied", kind)
    llm = LLM(str(folder), dtype="float32", num_kv_blocks=64, block_size=4, quantize_head=head)
    first = greedy(llm, PROMPTS, 10)
    assert greedy(llm, PROMPTS[::-1], 10)[::-1] == first
    chunked = tokens(
        str(folder),
        PROMPTS,
        quantize_head=head,
        max_num_batched_tokens=5,
        max_num_seqs=3,
        block_size=4,
    )
    assert chunked == first


# ---------------------------------------------------------------- while loading, and the head


def test_w8a8_of_an_unquantized_checkpoint_rounds_to_nearest(made: Any) -> None:
    _, plain = made("llama", GPTQ)
    config = read_model_config(EngineConfig(str(plain), quantization="w8a8"), plain)
    model = load_model(plain, config, torch.float32)
    stored = load_file(plain / "model.safetensors")
    weight: Any = model.model.layers[1].mlp.gate_up_proj.weight
    matrices = torch.cat(
        [stored[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    )
    assert weight.scheme == W8A8 and torch.equal(
        weight.scales, matrices.abs().amax(1, keepdim=True) / 127
    )
    assert torch.equal(weight.values, (matrices / weight.scales).round().to(torch.int8))
    assert isinstance(model.lm_head.weight, Tensor) and torch.equal(
        model.lm_head.weight, stored["lm_head.weight"]
    )


W4A8 = [kind for kind in FORMATS if kind.startswith("w4a8")]
FOUR_BITS = [kind for kind in WEIGHT_ONLY if FORMATS[kind][0] == 4]


@pytest.mark.parametrize("kind", [*W4A8, *FOUR_BITS])
def test_4_bit_weights_as_they_are_stored_are_multiplied_by_8_bit_inputs(
    made: Any, kind: str
) -> None:
    """If the checkpoint says so, or the setting."""
    folder, plain = made("llama", kind)
    options: dict[str, Any] = {} if kind in W4A8 else {"quantization": "w4a8"}
    model = load_model(
        folder, read_model_config(EngineConfig(str(folder), **options), folder), torch.bfloat16
    )
    stored = load_file(plain / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weight: Any = model.model.layers[1].get_submodule(name).weight
        assert weight.scheme.kind == "w4a8" and weight.scales.dtype == torch.float32
        whole = quantized.dequantize(weight.values, weight.scales, weight.zeros, torch.float32)
        assert torch.equal(whole, stored[f"model.layers.1.{name}.weight"])
    found = tokens(str(folder), PROMPTS, **options)
    assert found == [tokens(str(folder), [prompt], **options)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", FOUR_BITS[:1])
def test_the_same_4_bit_weights_give_the_same_tokens_from_each_format(made: Any, kind: str) -> None:
    folders = [made("llama", each)[0] for each in ("w4a8", "w4a8 in words", kind)]
    found = [tokens(str(folder), PROMPTS, quantization="w4a8") for folder in folders]
    assert found[0] == found[1] == found[2]


def test_w4a8_of_an_unquantized_checkpoint_rounds_to_nearest_in_groups_of_64(made: Any) -> None:
    _, plain = made("llama", GPTQ)
    config = read_model_config(EngineConfig(str(plain), quantization="w4a8"), plain)
    weight: Any = load_model(plain, config, torch.bfloat16).model.layers[1].self_attn.o_proj.weight
    matrix = load_file(plain / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    grouped = matrix.unflatten(1, (-1, 64))
    assert weight.scheme == Scheme(4, 64, quantizes_inputs=True)
    assert torch.equal(weight.scales, grouped.abs().amax(-1) / 7.5)
    expected = (grouped / weight.scales[..., None]).round().clamp(-8, 7).flatten(1)
    assert torch.equal(unpack(weight.values) - 8, expected.int())


@pytest.mark.parametrize("variant", ["llama", "llama-mha-tied", "gemma2"])
def test_a_quantized_head_and_a_tied_embedding_are_one_matrix(made: Any, variant: str) -> None:
    _, plain = made(variant, GPTQ)
    config = read_model_config(EngineConfig(str(plain), quantize_head=True), plain)
    model = load_model(plain, config, torch.bfloat16)
    head: Any = model.lm_head.weight
    tied = config.tie_word_embeddings
    assert (
        head.scheme == W8A8
        and head.values.dtype == torch.int8
        and head.scales.dtype == torch.float32
    )
    assert (model.model.embed_tokens.weight is head) == tied
    stored = load_file(plain / "model.safetensors")[
        "model.embed_tokens.weight" if tied else "lm_head.weight"
    ]
    ids = torch.tensor([3, 0, 319])
    rows = head.rows(ids)
    model.pack_weights()
    assert rows.dtype == torch.bfloat16 and torch.equal(head.rows(ids), rows)
    assert (
        (rows.float() - stored[ids]).abs() <= 0.52 * head.scales[ids] + stored[ids].abs() * 2**-8
    ).all()


def test_dummy_weights_take_the_checkpoint_s_scheme(made: Any) -> None:
    folder, _ = made("llama", "w8a8")
    options: Any = {"load_format": "dummy", "quantization": "auto"}
    config = read_model_config(EngineConfig(str(folder), **options), folder)
    assert config.quantization == QuantizationConfig("w8a8")
    weight: Any = (
        load_model(folder, config, torch.bfloat16, load_format="dummy")
        .model.layers[0]
        .mlp.down_proj.weight
    )
    assert weight.scheme == W8A8 and len(weight.values.unique()) > 100


def test_a_quantized_engine_has_kv_of_its_own(made: Any) -> None:
    folder, plain = made("llama", GPTQ)
    settings: list[Any] = [
        {},
        *({"quantization": kind} for kind in ("w8a8", "w4a16", "w4a8")),
        {"quantize_head": True},
    ]
    configs = [EngineConfig(str(plain), **each) for each in settings]
    identities = [
        kv_identity(config, read_model_config(config, plain), plain)["weights"]
        for config in configs
    ]
    for each in ({"quantization": "w4a8"}, {}, {"quantization": "gptq"}):
        config = EngineConfig(str(folder), **each)  # type: ignore[arg-type]
        identities.append(kv_identity(config, read_model_config(config, folder), folder)["weights"])
    assert len(set(identities)) == 7 and identities[-2] == identities[-1]


# ---------------------------------------------------------------- refusals


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CT = compressed_tensors("pack-quantized", 4, 64, False, False)


def with_scheme(form: str = "pack-quantized", inputs: Any = None, **changes: Any) -> dict[str, Any]:
    settings = compressed_tensors(form, 4, 64, False, False)
    group = settings["config_groups"]["group_0"]
    group["targets"] = changes.pop("targets", ["Linear"])
    group["weights"] |= changes
    group["input_activations"] = inputs
    return settings


GPTQ_SETTINGS = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "sym": True,
    "desc_act": False,
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 4}, "quant_method is missing"),
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported; supported are gptq, awq, compressed-tensors, fp8",
        ),
        (GPTQ_SETTINGS | {"bits": 3}, "gptq with 3 bits is not supported; quantize to 4 or 8"),
        (GPTQ_SETTINGS | {"bits": "four"}, "bits must be a valid integer"),
        (
            GPTQ_SETTINGS | {"sym": False},
            "asymmetric gptq with 4 bits is not supported; quantize with symmetric weights",
        ),
        (GPTQ_SETTINGS | {"group_size": 20}, "group_size 20 is not supported; use a multiple of 8"),
        (GPTQ_SETTINGS | {"group_size": -2}, "group_size -2 is not supported; use a multiple of 8"),
        (GPTQ_SETTINGS | {"dynamic": {"+:(": {"bits": 8}}}, "'re:\\(' is no regular expression"),
        (GPTQ_SETTINGS | {"dynamic": {"x": {"bits": 2}}}, "gptq with 2 bits is not supported"),
        (
            GPTQ_SETTINGS | {"checkpoint_format": "marlin"},
            "'marlin' is not supported; supported are gptq, gptq_v2",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
            "'gemv' is not supported; supported are gemm",
        ),
        (
            {"quant_method": "awq", "w_bit": 8, "q_group_size": 64},
            "awq with 8 bits is not supported; quantize to 4",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
            "symmetric awq with 4 bits is not supported; quantize with asymmetric weights",
        ),
        (
            with_scheme("marlin-24"),
            "'marlin-24' is not supported; supported are pack-quantized, int-quantized, float-q",
        ),
        (
            with_scheme(num_bits=3),
            "pack-quantized with 3 bits is not supported; quantize to 4 or 8",
        ),
        (
            with_scheme(num_bits=8, symmetric=False),
            "asymmetric pack-quantized with 8 bits is not supported",
        ),
        (
            with_scheme("int-quantized", num_bits=8),
            "int-quantized with 8 bits and a scale per group is not supported; use a scale per row",
        ),
        (
            with_scheme("int-quantized", symmetric=False),
            "asymmetric int-quantized with 4 bits is not supported",
        ),
        (
            with_scheme(type="float"),
            "pack-quantized with float weights is not supported; use weights of type int",
        ),
        (
            with_scheme("float-quantized", type="float", num_bits=4),
            "float-quantized with 4 bits is not supported; quantize to 8",
        ),
        (with_scheme(targets=4), "targets must be a valid list"),
        (
            with_scheme(inputs=DYNAMIC, num_bits=8),
            "pack-quantized with 8 bits and quantized inputs is not supported",
        ),
        (FP8 | {"weight_block_size": [128, -1]}, "weight_block_size.1 must be at least 1"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size must have 2 entries"),
        (FP8 | {"activation_scheme": "magic"}, "'magic' is not supported; supported are dynamic"),
        (FP8 | {"fmt": "e5m2"}, "'e5m2' is not supported; supported are e4m3"),
        (
            with_scheme(actorder="group"),
            "and actorder: group is not supported; use actorder: weight",
        ),
        (
            with_scheme(inputs={"num_bits": 8, "type": "int"}),
            "use int-quantized with dynamic symmetric 8-bit integers",
        ),
        (CT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported; remove it"),
        (CT | {"config_groups": {"group_0": {"weights": 4}}}, "weights must be a valid dictionary"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizationConfig.from_dict({"quantization_config": settings})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            GPTQ,
            {"group_size": 128},
            "has 96 inputs, which is not a multiple of 128: quantize with group_size 32 or -1",
        ),
        (
            GPTQ,
            {"quantization": "awq"},
            "quantization 'awq' does not fit this checkpoint, which is gptq: do not set it",
        ),
        (
            "w8a16",
            {"quantization": "w4a8"},
            "'w4a8' is for 4-bit weights, and this checkpoint has none: do not set it",
        ),
        (
            GPTQ,
            {"quantization": "w8a8"},
            "is for an unquantized checkpoint, and this one is gptq: do not set it",
        ),
        (
            None,
            {"quantization": "gptq"},
            (
                "quantization 'gptq' does not fit this checkpoint, which is not quantized: do not "
                "set it"
            ),
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    made: Any, tmp_path: pathlib.Path, kind: str | None, changes: dict[str, Any], message: str
) -> None:
    folder = made("llama", kind or GPTQ)[0 if kind else 1]
    options = {name: value for name, value in changes.items() if name == "quantization"}
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if kind and not options:
        raw["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(
            tmp_path,
            read_model_config(EngineConfig(str(tmp_path), **options), tmp_path),
            torch.float32,
        )


def ask_in_vain(folder: str) -> str:
    with pytest.raises(ValueError) as refusal:
        LLM(folder, dtype="float32", num_kv_blocks=8)
    return str(refusal.value)


def test_ranks_that_would_split_a_group_are_refused(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VARIANTS, "narrow", ("LlamaConfig", {"intermediate_size": 48}))
    folder, _ = made("narrow", GPTQ)
    message = (
        "a rank would have 24 of 48 inputs, which splits a group of 16; for this layer, "
        "tensor_parallel_size may be 1, 3"
    )
    for said in run_ranks(ask_in_vain, Grid(tensor=2), str(folder), timeout=120):
        assert message in said


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        (
            "qzeros",
            lambda t: t + 1,
            "a zero point is not 8; store asymmetric weights as compressed-tensors",
        ),
        (
            "g_idx",
            lambda t: t // 2,
            "self_attn.q_proj.g_idx: a group does not have 16 inputs; download it again",
        ),
        ("bias", lambda t: t + 1, "bias is not zero, and this architecture has no bias there"),
        (
            "scales",
            lambda t: t[:, 1:].contiguous(),
            r"scales has shape \[4, 63\], the configuration says \[4, 64\]",
        ),
        ("scales", None, r"lacks model.layers.1.self_attn.q_proj.scales"),
        (
            "qweight",
            lambda t: t[:5].contiguous(),
            r"qweight has shape \[5, 64\], the configuration says \[8, 64\]",
        ),
    ],
)
def test_damaged_tensors_are_refused(
    made: Any, tmp_path: pathlib.Path, end: str, change: Any, message: str
) -> None:
    folder, _ = made("llama", GPTQ)
    stored, name = (
        load_file(folder / "model.safetensors"),
        f"model.layers.1.self_attn.q_proj.{end}",
    )
    tensor = stored.pop(name)
    save_file(
        stored if change is None else stored | {name: change(tensor)},
        tmp_path / "model.safetensors",
    )
    config = read_model_config(EngineConfig(str(folder)), folder)
    with pytest.raises((CheckpointError, ValueError), match=message):
        load_model(tmp_path, config, torch.float32)


@pytest.mark.parametrize("kind", [GPTQ, "w8a16"])
def test_parts_of_one_matrix_that_are_quantized_differently_are_dequantized(
    made: Any, tmp_path: pathlib.Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder, plain), layer = made("llama", kind), "model.layers.0.self_attn.k_proj"
    stored = {
        n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith(layer)
    }
    stored[f"{layer}.weight"] = load_file(plain / "model.safetensors")[f"{layer}.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    found = tokens(str(tmp_path), PROMPTS)
    assert found == expected_tokens(plain, found)
    [line] = [text for text in caplog.messages if "dequantized" in text]
    assert line == (
        "model.layers.0.self_attn.q_proj and 1 more are dequantized while loading: "
        "stacked with matrices that are quantized differently"
    )


def test_layers_that_the_file_leaves_alone_stay_as_they_are(
    made: Any, tmp_path: pathlib.Path
) -> None:
    """As `ignore`, `modules_to_not_convert` and `dynamic` say: the tensors' names follow from
    them."""
    (folder, plain), layer = made("llama", GPTQ), "model.layers.1.mlp.down_proj"
    stored = {
        n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith(layer)
    }
    stored[f"{layer}.weight"] = load_file(plain / "model.safetensors")[f"{layer}.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    found = tokens(str(tmp_path), PROMPTS)
    assert found == expected_tokens(plain, found)


@pytest.mark.nightly
def test_the_course_model_in_8_bits_prefers_nearly_the_same_tokens() -> None:
    folder = str(resolve_model("smollm2-135m"))
    prompt = [504, 3575, 282, 4649, 314]
    found = greedy(
        LLM(folder, dtype="float32", num_kv_blocks=16, max_model_len=64, quantization="w8a8"),
        [prompt],
        3,
    )
    assert found == [reference_tokens(folder, prompt, 3)]
