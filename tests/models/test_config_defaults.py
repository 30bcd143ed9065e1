"""What config.json leaves out, and what it says twice: the engine reads it as transformers'
configuration classes do."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any, get_type_hints

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm import LLM
from nanovllm.checkpoint.files import CONFIG_FIELDS, ModelFileError
from nanovllm.models.config import SUPPORTED_ARCHITECTURES, ModelConfig, UnsupportedModelError
from nanovllm.models.defaults import DEFAULTS, NUM_EXPERTS, Defaults
from nanovllm.models.llama import rotary_table
from tests.examples import by_night
from tests.oracle import TINY, VARIANTS, greedy, make_checkpoint, reference_tokens

PROMPTS = [[5, 9, 100, 22, 7, 8, 200, 31], [12], [66, 67, 68] * 7, list(range(3, 80))]
CLASSES: dict[str, Any] = {
    architecture: getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    for architecture in SUPPORTED_ARCHITECTURES
}
# Keys that no configuration class has a default for.
WITHOUT_DEFAULT = {
    "architectures": "chooses the table",
    "quantization_config": "not quantized",
    "eos_token_id": (
        "the tokenizer's end of a text; a class default would end texts of other vocabularies"
    ),
    "rope_scaling": "transformers 4's name of rope_parameters",
    "original_max_position_embeddings": "of the rotary parameters",
    "partial_rotary_factor": "of the rotary parameters",
    "scoring_func": "transformers has one for each architecture",
    "moe_layer_freq": "transformers reads 1",
}
KEYS = sorted({key for keys in CONFIG_FIELDS.values() for key in keys.split()})


# ---------------------------------------------------------------- the table


def test_the_table_has_all_architectures_and_all_keys() -> None:
    assert DEFAULTS.keys() == SUPPORTED_ARCHITECTURES.keys()
    assert get_type_hints(Defaults).keys() == set(KEYS) - WITHOUT_DEFAULT.keys()
    assert set(NUM_EXPERTS) < set(KEYS)


@pytest.mark.parametrize("key", [key for key in KEYS if key not in WITHOUT_DEFAULT])
@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_a_default_is_that_of_transformers(architecture: str, key: str) -> None:
    """The class's own default, before it is adapted to other keys. A key that the class lacks is
    not in the table."""
    config_class = CLASSES[architecture]
    missing = object()
    theirs = getattr(config_class, "default_theta" if key == "rope_theta" else key, missing)
    if isinstance(theirs, property):
        theirs = missing
    ours: Any = DEFAULTS[architecture].get(key, missing)
    assert ours is theirs or (ours == theirs and type(ours) is type(theirs))


@pytest.mark.parametrize(
    "key", [key for key in WITHOUT_DEFAULT if key not in ("architectures", "eos_token_id")]
)
def test_other_keys_have_no_default(key: str) -> None:
    for config_class in CLASSES.values():
        assert isinstance(getattr(config_class, key, None), (property, type(None)))


# Keys of transformers' classes that do not change what a model answers.
WITHOUT_EFFECT = {
    *(
        "initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "pretraining_tp",
        "attention_dropout",
    ),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "num_mtp_layers"),
}


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_key_of_transformers_that_changes_answers_is_read(architecture: str) -> None:
    """So a key that a new release adds is either read, or refused, or listed here."""
    base = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    keys = {field.name for field in dataclasses.fields(CLASSES[architecture])} - base
    assert {"hidden_size", "rms_norm_eps"} < keys
    assert keys - WITHOUT_EFFECT <= set(KEYS)


def test_attention_in_both_directions_is_refused() -> None:
    raw = {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention is not supported"):
        ModelConfig.from_dict(raw)


# ---------------------------------------------------------------- what a configuration means


def described(config: Any, architecture: str) -> dict[str, Any]:
    """What transformers understands, in the terms of `ModelConfig`."""
    count = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    parameters = config.rope_parameters
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": count,
        "num_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": parameters["rope_theta"],
        "rope_type": parameters["rope_type"],
        "windows": [window if kind == "sliding_attention" else 0 for kind in kinds],
        "head_dim": (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        ),
        "q_lora_rank": getattr(config, "q_lora_rank", None) or 0,
        "kv_lora_rank": getattr(config, "kv_lora_rank", 0),
        "v_head_dim": getattr(config, "v_head_dim", 0),
        "attention_soft_cap": getattr(config, "attn_logit_softcapping", None) or 0,
        "logit_soft_cap": getattr(config, "final_logit_softcapping", None) or 0,
    }


def understood(config: ModelConfig) -> dict[str, Any]:
    """The same of the engine."""
    return {
        "rope_type": config.rope_scaling["rope_type"],
        "windows": config.layer_windows,
        **{
            name: getattr(config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_layers",
                "num_heads",
                "max_position_embeddings",
                "rms_norm_eps",
                "tie_word_embeddings",
                "rope_theta",
                "head_dim",
                "q_lora_rank",
                "kv_lora_rank",
                "v_head_dim",
                "attention_soft_cap",
                "logit_soft_cap",
            )
        },
    }


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_an_empty_configuration(architecture: str) -> None:
    """All keys are left out, but for one that DeepSeek-V2 has no default for."""
    needed = {"num_experts_per_tok": 6} if architecture == "DeepseekV2ForCausalLM" else {}
    theirs, ours = (
        CLASSES[architecture](**needed),
        ModelConfig.from_dict(needed | {"architectures": [architecture]}),
    )
    assert understood(ours) == described(theirs, architecture)
    if "kv_lora_rank" not in DEFAULTS[architecture]:
        assert ours.num_kv_heads == theirs.num_key_value_heads
    if ours.moe is not None:
        num_experts = next(getattr(theirs, name) for name in NUM_EXPERTS if hasattr(theirs, name))
        assert (ours.moe.num_experts, ours.moe.top_k) == (num_experts, theirs.num_experts_per_tok)
        assert ours.moe.intermediate_size == getattr(
            theirs, "moe_intermediate_size", theirs.intermediate_size
        )
        assert ours.moe.num_shared_experts == getattr(theirs, "n_shared_experts", 0)
        assert ours.moe.scaling_factor == getattr(theirs, "routed_scaling_factor", 1.0)
        assert ours.moe.renormalize == getattr(theirs, "norm_topk_prob", True)
        assert ours.moe.num_groups == (getattr(theirs, "n_group", None) or 1)
        assert ours.moe.sparse_layers.count(False) == getattr(theirs, "first_k_dense_replace", 0)


WINDOWS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 12},
    {"sliding_window": None},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 12},
    {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0},
    {"use_sliding_window": False, "sliding_window": 12, "max_window_layers": 0},
    {"sliding_window": 12, "max_window_layers": 1},
]


@pytest.mark.parametrize("changes", WINDOWS, ids=str)
@pytest.mark.parametrize(
    "architecture", [name for name, keys in DEFAULTS.items() if "sliding_window" in keys]
)
def test_windows_are_those_of_transformers(architecture: str, changes: dict[str, Any]) -> None:
    for num_layers in (3, 30):
        raw = {"num_hidden_layers": num_layers} | changes
        theirs = CLASSES[architecture](**raw)
        ours = ModelConfig.from_dict(raw | {"architectures": [architecture]})
        assert ours.layer_windows == described(theirs, architecture)["windows"]


def test_layers_of_an_unknown_type_are_refused() -> None:
    raw = TINY | {
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["full_attention"] * 2 + ["linear_attention"],
    }
    with pytest.raises(
        UnsupportedModelError, match="a layer of type 'linear_attention' is not supported"
    ):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "architecture", [name for name, keys in DEFAULTS.items() if {*NUM_EXPERTS} & {*keys}]
)
@pytest.mark.parametrize("name", NUM_EXPERTS)
def test_each_name_of_the_number_of_experts_replaces_the_default(
    architecture: str, name: str
) -> None:
    raw = {
        "architectures": [architecture],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        name: 4,
    }
    moe = ModelConfig.from_dict(raw).moe
    assert moe is not None and moe.num_experts == 4


# Variant, and keys that are left out of the file or changed. Sizes are those of the random weights,
# so they stay.
FOLDERS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("qwen2", ("use_sliding_window", "layer_types", "max_window_layers"), {"sliding_window": 20}),
    ("qwen3", ("use_sliding_window", "layer_types", "max_window_layers"), {"sliding_window": 20}),
    ("qwen3-moe", ("use_sliding_window",), {"sliding_window": 20}),
    (
        "qwen2",
        ("layer_types", "max_window_layers"),
        {"sliding_window": 20, "use_sliding_window": True},
    ),
    ("qwen3-moe", (), {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 28}),
    ("mistral-window", ("sliding_window",), {}),
    ("mistral-window", (), {"use_sliding_window": False}),
    ("mixtral", ("rope_parameters", "rms_norm_eps"), {}),
    ("mixtral", ("num_experts_per_tok", "num_local_experts"), {}),
    (
        "gemma2",
        ("rope_parameters", "rms_norm_eps", "attn_logit_softcapping", "layer_types", "head_dim"),
        {},
    ),
    (
        "deepseek-v3",
        ("rope_interleave", "routed_scaling_factor", "norm_topk_prob", "topk_method"),
        {},
    ),
    (
        "deepseek-v2",
        ("topk_method", "routed_scaling_factor", "norm_topk_prob", "n_shared_experts"),
        {},
    ),
]


@pytest.mark.parametrize(("variant", "absent", "changes"), FOLDERS, ids=str)
def test_folders_without_keys(
    tmp_path: pathlib.Path, variant: str, absent: tuple[str, ...], changes: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path / "model", variant)
    check_changed(folder, absent, changes)


def check_changed(
    folder: pathlib.Path, absent: tuple[str, ...], changes: dict[str, Any]
) -> list[list[int]]:
    """Greedy tokens after several prompts equal those of transformers, once config.json has
    changed."""
    raw = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in raw.items() if name not in absent}
    (folder / "config.json").write_text(json.dumps(kept | changes))
    found = greedy(LLM(str(folder), dtype="float32", num_kv_blocks=64), PROMPTS, 12)
    assert found == [reference_tokens(str(folder), prompt, 12) for prompt in PROMPTS]
    return found


def test_qwen3_without_head_dim_has_128(tmp_path: pathlib.Path) -> None:
    VARIANTS["qwen3-128"] = ("Qwen3Config", {"head_dim": 128})
    try:
        folder = make_checkpoint(tmp_path / "model", "qwen3-128")
    finally:
        del VARIANTS["qwen3-128"]
    check_changed(folder, ("head_dim",), {})


# ---------------------------------------------------------------- rotary parameters


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default"}
ROTARY: list[dict[str, Any]] = [
    {"rope_parameters": DEFAULT, "rope_scaling": LINEAR},
    {"rope_parameters": DEFAULT, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
    {"rope_parameters": LINEAR, "rope_scaling": DEFAULT},
    {"rope_parameters": LINEAR, "rope_scaling": {}},
    {"rope_parameters": LINEAR, "rope_scaling": None},
    {
        "rope_parameters": LINEAR | {"rope_theta": 5000.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    {
        "rope_parameters": DEFAULT | {"rope_theta": 5000.0},
        "rope_scaling": LINEAR,
        "rope_theta": 500.0,
    },
    {"rope_parameters": DEFAULT | {"rope_theta": 5000.0}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_theta": 5000.0}},
    {"rope_parameters": DEFAULT, "rope_theta": 500.0},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}},
    {"rope_scaling": LINEAR | {"rope_theta": 300.0}, "rope_theta": 500.0},
    {"rope_scaling": LLAMA3, "max_position_embeddings": 128},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 128},
    {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64},
        "original_max_position_embeddings": 32,
    },
    {"rope_theta": 500.0},
    {},
]


@pytest.mark.parametrize("keys", ROTARY, ids=str)
@pytest.mark.parametrize(
    "architecture", [name for name in SUPPORTED_ARCHITECTURES if "Deepseek" not in name]
)
def test_rotary_parameters_are_those_of_transformers(
    architecture: str, keys: dict[str, Any]
) -> None:
    config = CLASSES[architecture](**json.loads(json.dumps(keys)))
    config.standardize_rope_params()  # as its model does
    theirs = config.rope_parameters
    ours = ModelConfig.from_dict(keys | {"architectures": [architecture]})
    expected = {name: value for name, value in theirs.items() if name not in ("rope_theta", "type")}
    assert (ours.rope_theta, ours.rope_scaling) == (theirs["rope_theta"], expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("keys", [*ROTARY[:16:2], *by_night(ROTARY[1:16:2])], ids=str)
def test_folders_with_rotary_parameters(
    llama: pathlib.Path, tmp_path: pathlib.Path, keys: dict[str, Any]
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    found = check_changed(folder, ("rope_parameters",), keys)
    plain = [reference_tokens(str(llama), prompt, 12) for prompt in PROMPTS]
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(keys))).rope_parameters
    is_plain = theirs["rope_type"] == "default" and theirs["rope_theta"] == 10_000.0
    assert (found == plain) == is_plain


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    "keys",
    [
        {
            "rope_parameters": DEFAULT,
            "rope_scaling": YARN | {"original_max_position_embeddings": 32},
        },
        {"rope_scaling": YARN | {"original_max_position_embeddings": 32}, "rope_theta": 500.0},
        {"rope_scaling": YARN, "max_position_embeddings": 100},
        {
            "rope_scaling": YARN | {"original_max_position_embeddings": 64},
            "original_max_position_embeddings": 32,
        },
        {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "variant",
    ["deepseek-v3-dense", "llama", *by_night(["deepseek-v2-dense", "qwen2", "qwen3", "mistral"])],
)
def test_folders_with_yarn(tmp_path: pathlib.Path, variant: str, keys: dict[str, Any]) -> None:
    check_changed(make_checkpoint(tmp_path / "model", variant), ("rope_parameters",), keys)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"truncate": False},
        {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
        {"attention_factor": 0.75},
        {"factor": 1.0},
        {"mscale_all_dim": None},
        {"beta_fast": None, "beta_slow": None, "mscale": None},
    ],
    ids=str,
)
def test_tables_of_yarn_are_those_of_transformers(more: dict[str, Any]) -> None:
    scaling = YARN | {"original_max_position_embeddings": 64} | more
    keys: dict[str, Any] = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_scaling": {name: value for name, value in scaling.items() if value is not None},
    }
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**json.loads(json.dumps(keys))))
    cos, sin = theirs(torch.zeros(1), torch.arange(300)[None])
    expected = torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=1)
    ours = rotary_table(ModelConfig.from_dict(keys | {"architectures": ["LlamaForCausalLM"]}), 300)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


@pytest.mark.parametrize("stored", [64, 512])
def test_with_yarn_the_context_is_as_long_as_the_parameters_say(stored: int) -> None:
    """Qwen's files store the original length, and DeepSeek's the stretched one."""
    keys = {
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": stored,
        "rope_scaling": YARN | {"original_max_position_embeddings": 64},
    }
    assert ModelConfig.from_dict(keys).max_position_embeddings == 512


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"rope_parameters": DEFAULT, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "of type 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "of type 'longrope'"),
        (
            {"rope_parameters": {"full_attention": DEFAULT}},
            r"per layer type \(full_attention\) are not supported",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": DEFAULT,
                    "sliding_attention": LINEAR,
                    "rope_theta": 5.0,
                }
            },
            r"per layer type \(full_attention, sliding_attention\) are not supported",
        ),
        (
            {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"]
)
def test_other_rotary_parameters_are_refused(
    architecture: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.from_dict(keys | {"architectures": [architecture]})


@pytest.mark.parametrize(("factor", "length"), [(1e6, 100_000_000), (1e-6, 0)])
def test_yarn_to_an_absurd_length_is_refused(factor: float, length: int) -> None:
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 100,
        "rope_scaling": YARN | {"factor": factor},
    }
    words = f"stretches 100 positions to {length}, and must lead to 1 to 16777216"
    with pytest.raises(ModelFileError, match=words):
        ModelConfig.from_dict(keys)
