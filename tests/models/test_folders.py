"""Model folders as users have them: stored in another way than save_pretrained does today, and read
as transformers reads them."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM
from nanovllm.checkpoint.weights import standard_name, weight_files
from nanovllm.kv_transfer.factory import weights_digest
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.offline.command import Recipe
from nanovllm.offline.quantize import quantize
from tests.examples import by_night
from tests.oracle import greedy, make_checkpoint, reference_tokens
from tests.pairwise import in_turn
from tests.quantized import FORMATS, quantize_checkpoint

PROMPTS = [[5, 9, 100, 22, 7, 8, 200, 31], [12], [66, 67, 68] * 7, list(range(3, 60))]
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
W4A16 = "symmetric 4 bits, groups of 16"

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """A function that makes a tiny checkpoint of a variant, once."""
    found: dict[str, pathlib.Path] = {}

    def make(variant: str) -> pathlib.Path:
        if variant not in found:
            found[variant] = make_checkpoint(tmp_path_factory.mktemp("original") / variant, variant)
        return found[variant]

    return make


def rewritten(
    source: pathlib.Path,
    folder: pathlib.Path,
    change: Change = dict,
    config: dict[str, Any] | None = None,
) -> pathlib.Path:
    """A copy of a checkpoint with other tensors and other values in config.json."""
    shutil.copytree(source, folder)
    tensors = change(load_file(folder / WHOLE))
    # A file cannot have two names for one memory.
    save_file(
        {name: t.contiguous().clone() for name, t in tensors.items()},
        folder / WHOLE,
        {"format": "pt"},
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return folder


def check_equal(
    folder: pathlib.Path, reference: pathlib.Path | None = None, **options: Any
) -> list[list[int]]:
    """12 greedy tokens after each prompt are those of transformers, which reads the same folder or
    the reference."""
    found = greedy(LLM(str(folder), dtype="float32", num_kv_blocks=64, **options), PROMPTS, 12)
    assert found == [reference_tokens(str(reference or folder), prompt, 12) for prompt in PROMPTS]
    return found


# ---------------------------------------------------------------- embedding and output head


TIED = {"tie_word_embeddings": True}
RANKS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


def same_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}


def head_alone(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}


def late_difference(tensors: Tensors) -> Tensors:
    """One number of the last row differs, by so much that the last token is always the best."""
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += 100 * tensors["model.norm.weight"].sign()
    return tensors | {"lm_head.weight": head}


# By day each change in one of the divisions, in turn.
@pytest.mark.parametrize(
    ("change", "ranks"),
    in_turn([dict, same_head, head_alone, late_difference], RANKS),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_tied_configuration_with_a_head_in_the_file(
    originals: Any, tmp_path: pathlib.Path, change: Change, ranks: str
) -> None:
    """A head of its own is used; the same one is not; one that is stored alone is the embedding,
    too."""
    folder = rewritten(originals("llama"), tmp_path / "model", change, TIED)
    check_equal(folder, **RANKS[ranks])
    model = load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)
    is_one = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_one == (change in (same_head, head_alone))


def test_a_head_of_its_own_matters(originals: Any, tmp_path: pathlib.Path) -> None:
    """The tests above would pass without heads if they changed nothing."""
    own = rewritten(originals("llama"), tmp_path / "own", config=TIED)
    same = rewritten(originals("llama"), tmp_path / "same", same_head, TIED)
    assert reference_tokens(str(own), PROMPTS[0], 12) != reference_tokens(str(same), PROMPTS[0], 12)


@pytest.mark.parametrize("variant", ["gemma2", "qwen2", "mixtral", "deepseek-v3"])
def test_an_own_head_of_another_architecture(
    originals: Any, tmp_path: pathlib.Path, variant: str
) -> None:
    def add_head(tensors: Tensors) -> Tensors:
        head = torch.randn(
            tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(1)
        )
        return tensors | {"lm_head.weight": head / 8}

    check_equal(rewritten(originals(variant), tmp_path / "model", add_head, TIED))


@pytest.mark.parametrize("change", [dict, head_alone], ids=lambda each: each.__name__)
def test_a_tied_configuration_of_several_shards(tmp_path: pathlib.Path, change: Change) -> None:
    """The embedding is in the first shard, the head in the last."""
    folder = make_checkpoint(tmp_path / "model", shards=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | TIED))
    files = weight_files(folder)
    assert len(files) > 1
    for file in files:
        save_file(change(load_file(file)), file, {"format": "pt"})
    check_equal(folder)


@pytest.mark.parametrize("change", [dict, head_alone], ids=lambda each: each.__name__)
def test_a_tied_configuration_with_quantized_matrices(
    originals: Any, tmp_path: pathlib.Path, change: Change
) -> None:
    source = rewritten(originals("llama"), tmp_path / "source", change, TIED)
    folder, plain = quantize_checkpoint(source, tmp_path, W4A16)
    check_equal(folder, reference=plain)


@pytest.mark.parametrize("change", [dict, head_alone, same_head], ids=lambda each: each.__name__)
def test_quantize_keeps_the_head(originals: Any, tmp_path: pathlib.Path, change: Change) -> None:
    pytest.importorskip("compressed_tensors")
    source = rewritten(originals("llama"), tmp_path / "source", change, TIED)
    folder = quantize(str(source), tmp_path / "new", Recipe(method="rtn", group_size=32))
    own = change is dict
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is not own
    assert ("lm_head.weight" in load_file(folder / WHOLE)) == own
    check_equal(folder)


def test_quantize_takes_the_head_that_is_used(originals: Any, tmp_path: pathlib.Path) -> None:
    """Not the embedding, if the head is to be quantized, too."""
    pytest.importorskip("compressed_tensors")
    source = rewritten(originals("llama"), tmp_path / "source", config=TIED)
    recipe = Recipe(method="rtn", group_size=32, quantize_head=True)
    stored = load_file(quantize(str(source), tmp_path / "new", recipe) / WHOLE)
    head = stored["lm_head.weight"].float() * stored["lm_head.weight_scale"].float()
    torch.testing.assert_close(head, load_file(source / WHOLE)["lm_head.weight"], atol=0.01, rtol=0)


def test_a_head_that_is_quantized_is_its_own(originals: Any, tmp_path: pathlib.Path) -> None:
    """A tied configuration beside a head in 8 bits."""
    source = rewritten(originals("llama"), tmp_path / "source")
    recipe = Recipe(method="rtn", scheme="w8a8", quantize_head=True)
    right = quantize(str(source), tmp_path / "right", recipe)
    tied = rewritten(right, tmp_path / "tied", config=TIED)
    assert greedy(LLM(str(tied), dtype="float32", num_kv_blocks=64), PROMPTS, 12) == greedy(
        LLM(str(right), dtype="float32", num_kv_blocks=64), PROMPTS, 12
    )


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.embed_tokens.weight"])
def test_an_untied_configuration_needs_both(
    originals: Any, tmp_path: pathlib.Path, missing: str
) -> None:
    folder = rewritten(
        originals("llama"),
        tmp_path / "model",
        lambda tensors: {n: t for n, t in tensors.items() if n != missing},
    )
    with pytest.raises(ValueError, match=f"lacks {missing}"):
        load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)


# ---------------------------------------------------------------- names


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def text_part(tensors: Tensors) -> Tensors:
    """As transformers 4.52 and later save the text part of a model that sees."""
    return {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }


def old_text_part(tensors: Tensors) -> Tensors:
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


NAMES: list[Change] = [without_prefix, text_part, old_text_part]


@pytest.mark.parametrize(
    "variant", ["llama-mha-tied", "deepseek-v3", *by_night(["llama", "gemma2", "mixtral"])]
)
@pytest.mark.parametrize("change", NAMES, ids=lambda each: each.__name__)
def test_names_with_another_prefix(
    originals: Any, tmp_path: pathlib.Path, change: Change, variant: str
) -> None:
    folder = rewritten(originals(variant), tmp_path / "model", change)
    # transformers knows the first of these ways alone; it reads the original.
    check_equal(folder, reference=folder if change is without_prefix else originals(variant))


def test_a_base_model_that_was_saved_without_its_head(
    tmp_path: pathlib.Path, originals: Any
) -> None:
    """`LlamaModel.save_pretrained` of a tied model, and the base model's class in config.json."""
    import transformers

    source = originals("llama-mha-tied")
    folder = tmp_path / "model"
    transformers.AutoModel.from_pretrained(source, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    assert "embed_tokens.weight" in load_file(folder / WHOLE)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaModel"]
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"]})
    )
    check_equal(folder, reference=source)


@pytest.mark.parametrize("kind", [W4A16, "awq", "gptq 4 bits, groups of 16, version 1", "w8a8"])
def test_quantized_tensors_with_another_prefix(
    originals: Any, tmp_path: pathlib.Path, kind: str
) -> None:
    folder, plain = quantize_checkpoint(originals("llama"), tmp_path, kind)
    renamed = rewritten(folder, tmp_path / "renamed", text_part)
    if kind != "w8a8":  # its inputs are rounded, too
        check_equal(renamed, reference=plain)
        return
    found, expected = (
        greedy(LLM(str(each), dtype="float32", num_kv_blocks=64), PROMPTS, 12)
        for each in (renamed, folder)
    )
    assert found == expected


@pytest.mark.parametrize("change", NAMES, ids=lambda each: each.__name__)
def test_quantize_writes_standard_names(
    originals: Any, tmp_path: pathlib.Path, change: Change
) -> None:
    pytest.importorskip("compressed_tensors")
    source = rewritten(originals("llama"), tmp_path / "source", change)
    recipe = Recipe(method="rtn", group_size=32)
    folder = quantize(str(source), tmp_path / "new", recipe)
    usual = quantize(str(originals("llama")), tmp_path / "usual", recipe)
    assert load_file(folder / WHOLE).keys() == load_file(usual / WHOLE).keys()
    check_equal(folder)


def test_standard_names_stay_as_they_are() -> None:
    for name in (
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
        "model.norm.weight",
        "midlayer.fc.weight",
    ):
        assert standard_name(name) == name


def test_a_part_that_sees_is_refused(originals: Any, tmp_path: pathlib.Path) -> None:
    def with_eyes(tensors: Tensors) -> Tensors:
        return text_part(tensors) | {"model.visual.patch_embed.weight": torch.zeros(3)}

    folder = rewritten(originals("llama"), tmp_path / "model", with_eyes)
    with pytest.raises(ValueError, match=r"no place for 'model\.visual\.patch_embed\.weight'"):
        load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)


# ---------------------------------------------------------------- experts in one tensor


FUSED = [
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-normed",
    "deepseek-v2",
    "deepseek-v2-groups",
    "deepseek-v3",
]


def save_fused(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The checkpoint as transformers 5 keeps it in memory, with all experts of a layer in one
    tensor."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(folder, save_original_format=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(folder / WHOLE))
    return folder


@pytest.mark.parametrize("variant", FUSED)
def test_experts_in_one_tensor(originals: Any, tmp_path: pathlib.Path, variant: str) -> None:
    folder = save_fused(originals(variant), tmp_path / "fused")
    assert check_equal(folder) == [
        reference_tokens(str(originals(variant)), prompt, 12) for prompt in PROMPTS
    ]


@pytest.mark.parametrize(
    ("variant", "options"),
    in_turn(
        ["mixtral", "deepseek-v3"],
        [
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"pipeline_parallel_size": 2},
        ],
        one_in=2,
    ),
    ids=str,
)
def test_experts_in_one_tensor_are_divided(
    originals: Any, tmp_path: pathlib.Path, variant: str, options: dict[str, Any]
) -> None:
    check_equal(save_fused(originals(variant), tmp_path / "fused"), **options)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_in_one_tensor_are_quantized(
    originals: Any, tmp_path: pathlib.Path, variant: str
) -> None:
    """`nanovllm quantize` writes what it writes of the usual form, up to Mixtral's names."""
    fused = save_fused(originals(variant), tmp_path / "fused")
    recipe = Recipe(method="rtn", group_size=8)
    found, usual = (
        load_file(quantize(str(source), tmp_path / name, recipe) / WHOLE)
        for name, source in (("a", fused), ("b", originals(variant)))
    )
    names = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    }
    for old, new in names.items():
        usual = {name.replace(old, new): tensor for name, tensor in usual.items()}
    assert found.keys() == usual.keys()
    assert all(torch.equal(found[name], usual[name]) for name in found)


def test_experts_in_one_tensor_are_quantized_while_they_are_loaded(
    originals: Any, tmp_path: pathlib.Path
) -> None:
    fused = save_fused(originals("mixtral"), tmp_path / "fused")
    found, expected = (
        greedy(LLM(str(each), dtype="float32", num_kv_blocks=64, quantization="w8a8"), PROMPTS, 12)
        for each in (fused, originals("mixtral"))
    )
    assert found == expected


# ---------------------------------------------------------------- files


OTHERS = [
    "consolidated.safetensors",
    "consolidated.00.safetensors",
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "model.fp16.safetensors",
    "model-00001-of-00002.safetensors",
]


def wrong_weights(folder: pathlib.Path) -> Tensors:
    """Other numbers under the same names."""
    return {name: tensor + 1 for name, tensor in load_file(folder / WHOLE).items()}


@pytest.mark.parametrize(("name", "names"), in_turn(OTHERS, ["of a model", "of something else"]))
def test_other_files_beside_the_weights(
    originals: Any, tmp_path: pathlib.Path, name: str, names: str
) -> None:
    folder = rewritten(originals("llama"), tmp_path / "model")
    digest = weights_digest(folder)
    others = wrong_weights(folder) if names == "of a model" else {"state.exp_avg": torch.zeros(3)}
    save_file(others, folder / name, {"format": "pt"})
    check_equal(folder)
    assert weights_digest(folder) == digest


@pytest.mark.parametrize("shards", ["are there", "are gone"])
def test_a_whole_file_beside_a_stale_index(
    originals: Any, tmp_path: pathlib.Path, shards: str
) -> None:
    folder = rewritten(originals("llama"), tmp_path / "model")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weights = wrong_weights(folder)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {name: names[i % 2] for i, name in enumerate(weights)}})
    )
    for i in range(2 if shards == "are there" else 0):
        save_file(
            {name: t for j, (name, t) in enumerate(weights.items()) if j % 2 == i},
            folder / names[i],
        )
    check_equal(folder)


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_beside_shards(tmp_path: pathlib.Path, name: str) -> None:
    if name.startswith("model-0"):
        name = "old-00001-of-00009.safetensors"
    folder = make_checkpoint(tmp_path / "model", shards=3)
    save_file({"model.norm.weight": torch.zeros(64)}, folder / name, {"format": "pt"})
    check_equal(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "model.fp16.safetensors"])
def test_the_only_file_of_another_name(originals: Any, tmp_path: pathlib.Path, name: str) -> None:
    folder = rewritten(originals("llama"), tmp_path / "model")
    (folder / WHOLE).rename(folder / name)
    save_file({"state": torch.zeros(3)}, folder / "optimizer.safetensors")
    check_equal(folder, reference=originals("llama"))


def test_shards_without_an_index(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path / "model", shards=3)
    expected = [reference_tokens(str(folder), prompt, 12) for prompt in PROMPTS]
    (folder / INDEX).unlink()
    found = greedy(LLM(str(folder), dtype="float32", num_kv_blocks=64), PROMPTS, 12)
    assert found == expected
    first, second, *_ = weight_files(folder)
    second.unlink()
    with pytest.raises(ValueError, match=f"the folder lacks {second.name}"):
        weight_files(folder)
    shutil.copy(first, folder / "other.safetensors")
    with pytest.raises(
        ValueError,
        match=r"the choice between its \d+ files \(.*other\.safetensors.*\) is ambiguous",
    ):
        weight_files(folder)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], r"has no \*\.safetensors file; convert"),
        (
            ["adapter_model.safetensors"],
            "adapter_model.safetensors is a LoRA adapter: merge it into its base model",
        ),
        (
            ["consolidated.safetensors"],
            "consolidated.safetensors is in Mistral's own format: download",
        ),
        (["optimizer.safetensors"], "optimizer.safetensors contains the state of an optimizer"),
        (
            ["model.fp16.safetensors", "model.bf16.safetensors"],
            "its 2 files .* is ambiguous: name the model's weights model.safetensors",
        ),
        (["a-1-of-1.safetensors", "b-1-of-1.safetensors"], "its 2 files .* is ambiguous"),
    ],
    ids=str,
)
def test_folders_without_a_choice_are_refused(
    originals: Any, tmp_path: pathlib.Path, names: list[str], words: str
) -> None:
    folder = rewritten(originals("llama"), tmp_path / "model")
    (folder / WHOLE).unlink()
    for name in names:
        save_file({"x": torch.zeros(1)}, folder / name)
    with pytest.raises(ValueError, match=words):
        load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)


# ---------------------------------------------------------------- compressed-tensors


@pytest.mark.parametrize("kind", [W4A16, "w8a16"])
@pytest.mark.parametrize(
    "sparsity",
    [
        {"format": "dense"},
        {
            "format": "dense",
            "sparsity_structure": "unstructured",
            "global_sparsity": 0.1,
            "ignore": [],
            "targets": [],
        },
        {},
        None,
    ],
    ids=str,
)
def test_a_dense_sparsity_config_means_nothing(
    originals: Any, tmp_path: pathlib.Path, kind: str, sparsity: dict[str, Any] | None
) -> None:
    folder, plain = quantize_checkpoint(originals("llama"), tmp_path, kind)
    nothing = {
        "transform_config": {"config_groups": {}} if sparsity else {},
        "kv_cache_scheme": None,
    }
    settings = FORMATS[kind][4] | nothing | {"sparsity_config": sparsity}
    (folder / "config.json").write_text(
        json.dumps(
            json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
        )
    )
    check_equal(folder, reference=plain)


@pytest.mark.parametrize("form", ["sparse-24-bitmask", "sparse-bitmask"])
def test_another_sparsity_config_is_refused(originals: Any, form: str) -> None:
    settings = FORMATS[W4A16][4] | {"sparsity_config": {"format": form}}
    raw = json.loads((originals("llama") / "config.json").read_text()) | {
        "quantization_config": settings
    }
    with pytest.raises(
        ValueError,
        match=f"sparsity_config of format '{form}' is not supported; save the weights in",
    ):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"transform_config": {"other": 1}},
    ],
    ids=str,
)
def test_quantized_caches_and_transforms_are_refused(
    originals: Any, settings: dict[str, Any]
) -> None:
    raw = json.loads((originals("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is not supported; remove it"):
        ModelConfig.from_dict(raw | {"quantization_config": FORMATS[W4A16][4] | settings})


def test_the_reader_does_not_copy_experts(originals: Any, tmp_path: pathlib.Path) -> None:
    """The matrices of experts are views of the file's tensor, which is read where it is copied."""
    from nanovllm.checkpoint.weights import standard_tensors

    folder = save_fused(originals("mixtral"), tmp_path / "fused")
    with safe_open(folder / WHOLE, framework="pt") as file:
        fused = file.get_tensor("model.layers.0.mlp.experts.gate_up_proj")
    memory = range(fused.data_ptr(), fused.data_ptr() + fused.nbytes)
    parts = dict(standard_tensors("model.layers.0.mlp.experts.gate_up_proj", fused))
    assert len(parts) == 16 and all(part.data_ptr() in memory for part in parts.values())
