"""Model folders of strangers: whatever is wrong with one is said in seconds, by file and field, and
nothing is built."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import weights
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.text.tokenizer import Tokenizer
from tests.cli.test_cli import one_line_of, run
from tests.oracle import make_checkpoint, reference_tokens
from tests.stand_ins import set_failure

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
TOKENIZER = "tokenizer_config.json"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": values}


# Fields of a file, and the words that the error must have.
WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (
        CONFIG,
        {"num_hidden_layers": 10**9},
        "num_hidden_layers must be at most 1000, got 1000000000",
    ),
    (CONFIG, {"num_hidden_layers": 1000}, "the checkpoint lacks model.layers.3."),
    (CONFIG, {"num_hidden_layers": "3"}, "num_hidden_layers must be a valid integer, got '3'"),
    (CONFIG, {"num_hidden_layers": 2.5}, "num_hidden_layers must be a valid integer, got 2.5"),
    (CONFIG, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    (CONFIG, {"vocab_size": [320]}, "vocab_size must be a valid integer, got [320]"),
    (CONFIG, {"vocab_size": 2**24}, "weight has shape [320, 64], the configuration"),
    (CONFIG, {"hidden_size": -64}, "hidden_size must be at least 1, got -64"),
    (CONFIG, {"hidden_size": 2**20, "head_dim": 16}, "weight has shape ["),
    (CONFIG, {"intermediate_size": 2**20}, "weight has shape ["),
    (CONFIG, {"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
    (
        CONFIG,
        {"num_attention_heads": 3},
        "num_attention_heads must be a multiple of num_key_value_heads, got 3",
    ),
    (CONFIG, {"head_dim": 15}, "head_dim must be even"),
    (
        CONFIG,
        {"max_position_embeddings": 10**12},
        "max_position_embeddings must be at most 16777216",
    ),
    (CONFIG, {"rms_norm_eps": "nan"}, "rms_norm_eps must be a valid number, got 'nan'"),
    (CONFIG, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be at"),
    (CONFIG, {"rope_theta": 0, "rope_parameters": None}, "rope_theta must be at least 1.001"),
    (CONFIG, rope(rope_theta=0), "rope_parameters.rope_theta must be at least 1.001"),
    (CONFIG, rope(**LLAMA3 | {"factor": None}), "rope_parameters must have factor"),
    (CONFIG, rope(rope_type="linear", factor=0), "rope_parameters.factor must be at least"),
    (CONFIG, {"rope_parameters": [1]}, "rope_parameters must be a valid dictionary, got [1]"),
    (CONFIG, {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be a valid boolean"),
    (CONFIG, {"architectures": 5}, "architectures must be a valid list, got 5"),
    (
        CONFIG,
        {"layer_types": ["full_attention"]},
        "layer_types must have num_hidden_layers (3) entries, got 1",
    ),
    (CONFIG, {"quantization_config": 4}, "quantization_config must be a valid dictionary"),
    (CONFIG, {"architectures": ["DeepseekV2ForCausalLM"]}, "num_experts_per_tok is missing"),
    (
        CONFIG,
        {"eos_token_id": 10**9},
        "eos_token_id must be from 0 to 319, the size of the vocabulary",
    ),
    (
        CONFIG,
        {"eos_token_id": -2},
        "eos_token_id must be from 0 to 319, the size of the vocabulary, got -2",
    ),
    (
        GENERATION,
        {"eos_token_id": [2, 320]},
        "eos_token_id must be from 0 to 319, the size of the vocabulary, got 320",
    ),
    (GENERATION, {"eos_token_id": {}}, "eos_token_id must be a valid list, got {}"),
    (
        INDEX,
        {"weight_map": {"a": "../../secret.safetensors"}},
        "own folder, got '../../secret.safetensors'",
    ),
    (INDEX, {"weight_map": {"a": "/etc/passwd"}}, "own folder, got '/etc/passwd'"),
    (INDEX, {"weight_map": {"a": "other.safetensors"}}, "the folder lacks other.safetensors"),
    (INDEX, {"weight_map": ["model.safetensors"]}, "weight_map must be a valid dictionary"),
    (INDEX, {"weight_map": {}}, "the checkpoint lacks"),
    (INDEX, {"metadata": {}}, "weight_map is missing"),
    (TOKENIZER, {"eos_token": 5}, "eos_token must be a valid string, got 5"),
    (TOKENIZER, {"chat_template": [{"name": 1}]}, "chat_template"),
    (TOKENIZER, {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder.x"),
]

# Fields that the engine can do without, and the words that the warning must have.
USELESS_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (
        GENERATION,
        {"temperature": -1},
        "generation_config.json: temperature must be a finite number of at least 0, got -1",
    ),
    (GENERATION, {"top_k": "many"}, "generation_config.json: top_k must be an integer, got 'many'"),
    (GENERATION, {"top_p": 0.0}, "generation_config.json: top_p must be a finite number above 0"),
    (
        TOKENIZER,
        {"bos_token": False},
        "tokenizer_config.json: bos_token must be a valid string, got False",
    ),
    (TOKENIZER, {"pad_token": 0}, "tokenizer_config.json: pad_token must be a valid string, got 0"),
    (
        TOKENIZER,
        {"extra_special_tokens": 5},
        "tokenizer_config.json: extra_special_tokens must be a valid list, got 5",
    ),
    (
        TOKENIZER,
        {"extra_special_tokens": ["<a>", ["<b>"]]},
        "tokenizer_config.json: extra_special_tokens.1 must be a valid",
    ),
]

# Other spellings of a usable value.
SPELLINGS: list[tuple[str, dict[str, Any]]] = [
    (CONFIG, {"eos_token_id": -1}),
    (GENERATION, {"eos_token_id": [-1, 2.0]}),
    (GENERATION, {"top_k": 50.0, "temperature": 1}),
    (CONFIG, {"max_position_embeddings": 131072.0}),
]

# Bytes of a file, and the words that the error must have.
WRONG_BYTES: list[tuple[str, bytes, str]] = [
    (CONFIG, b"{" * 10, "is not valid JSON"),
    (CONFIG, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "recursion"),
    (CONFIG, b"[]", "must hold a JSON object, got []"),
    (CONFIG, b'{"vocab_size": "\xff"}', "is not valid JSON"),
    (GENERATION, b"null", "must hold a JSON object, got None"),
    (INDEX, b"<html>", "is not valid JSON"),
    (TOKENIZER, b'"x"', "must hold a JSON object"),
    ("chat_template.jinja", b"\xff", "is not valid UTF-8"),
    ("tokenizer.json", b'{"a":' * 10_000, "is not a tokenizer file"),
    (WEIGHTS, b"", "cannot be read"),
    (WEIGHTS, struct.pack("<Q", 2**60) + b"{}", "cannot be read"),
    (WEIGHTS, struct.pack("<Q", 2) + b"[]", "cannot be read"),
    (
        WEIGHTS,
        b'\x40\0\0\0\0\0\0\0{"x":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4]}}  ',
        "cannot be read",
    ),
]


@pytest.fixture
def folder(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the tiny model, to be broken."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def change(path: pathlib.Path, **fields: Any) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))


def check_refused(folder: pathlib.Path, file: str, words: str) -> None:
    if file == INDEX:  # which counts where there is no whole file
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    begin = time.monotonic()
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ValueError, match=re.escape(words)) as caught,
    ):
        taken = AssertionError("memory is taken for the weights")
        set_failure(patch, torch.nn.Module, "_apply", taken)
        Tokenizer.from_pretrained(folder)
        load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)
    assert time.monotonic() - begin < 60
    # A configuration that does not fit the weights: the message names the tensor.
    assert file in str(caught.value) or re.search(
        r"lacks|configuration|no place", str(caught.value)
    )
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("file", "fields", "words"), WRONG_FIELDS, ids=lambda value: str(value)[:60]
)
def test_a_wrong_field_is_named(
    folder: pathlib.Path, file: str, fields: dict[str, Any], words: str
) -> None:
    change(folder / file, **fields)
    check_refused(folder, file, words)


@pytest.mark.parametrize(
    ("file", "fields", "words"), USELESS_FIELDS, ids=lambda value: str(value)[:60]
)
def test_a_field_that_is_not_needed_is_ignored_with_a_warning(
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    fields: dict[str, Any],
    words: str,
) -> None:
    change(folder / file, **{"top_k": 7} | fields)
    Tokenizer.from_pretrained(folder)
    defaults = ModelConfig.from_pretrained(folder).generation_defaults
    assert defaults == ({"top_k": 7} if file == GENERATION and "top_k" not in fields else {})
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert words in warning and warning.endswith("is ignored")


@pytest.mark.parametrize(("file", "fields"), SPELLINGS, ids=str)
def test_other_spellings_of_a_value(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture, file: str, fields: dict[str, Any]
) -> None:
    """-1 for no token, and integers that are written as floating-point numbers."""
    for each in (CONFIG, GENERATION):
        change(folder / each, eos_token_id=None)
    change(folder / file, **fields)
    config = ModelConfig.from_pretrained(folder)
    assert config.eos_token_ids == ([2] if file == GENERATION and "eos_token_id" in fields else [])
    if "top_k" in fields:
        assert (
            config.generation_defaults == fields
            and type(config.generation_defaults["top_k"]) is int
        )
    if "max_position_embeddings" in fields:
        assert (
            config.max_position_embeddings == 131072 and type(config.max_position_embeddings) is int
        )
    assert not caplog.records


@pytest.mark.parametrize(
    ("file", "content", "words"), WRONG_BYTES, ids=lambda value: str(value)[:30]
)
def test_a_damaged_file_is_named(
    folder: pathlib.Path, file: str, content: bytes, words: str
) -> None:
    (folder / file).write_bytes(content)
    check_refused(folder, file, words)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.side_proj.weight"] = torch.zeros(1)


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop, "the checkpoint lacks model.norm.weight"),
        (add, "this LlamaForCausalLM has no place for 'model.layers.0.mlp.side_proj.weight'"),
        (
            cut,
            "model.layers.1.mlp.up_proj.weight has shape [95, 64], the configuration says [96, 64]",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: pathlib.Path, damage: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    tensors = load_file(folder / WEIGHTS)
    damage(tensors)
    save_file(tensors, folder / WEIGHTS)
    check_refused(folder, WEIGHTS, words)


def test_a_model_that_is_larger_than_the_machine_is_refused(folder: pathlib.Path) -> None:
    change(folder / CONFIG, intermediate_size=2**20, hidden_size=2**20, num_hidden_layers=1000)
    config = ModelConfig.from_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"config\.json: the model needs \d+\.\d GiB, and this machine has"
    ):
        load_model(folder, config, torch.float32, load_format="dummy")


@pytest.mark.parametrize(
    ("file", "fields"), [(CONFIG, {"num_hidden_layers": 10**9}), (TOKENIZER, {"eos_token": 5})]
)
def test_the_server_refuses_it_in_one_line(
    folder: pathlib.Path, file: str, fields: dict[str, Any]
) -> None:
    change(folder / file, **fields)
    line = one_line_of(run("serve", str(folder), "--port", "0"), 2)
    assert (
        line.startswith("nanovllm serve: error: ") and file in line and next(iter(fields)) in line
    )


# ---------------------------------------------------------------- what ends a text


def test_every_file_may_name_ends_of_a_text(tmp_path: pathlib.Path) -> None:
    """The tokenizer's end-of-sequence token, config.json's and generation_config.json's are all
    ends."""
    folder = make_checkpoint(tmp_path)
    prompt = list(range(3, 40))
    free = reference_tokens(str(folder), prompt, 24)
    tokens = list(dict.fromkeys(free))[3:6]  # each is the first of its kind
    spelling = Tokenizer.from_pretrained(folder).convert_ids_to_tokens(tokens)[0]
    unused = next(token for token in range(3, 320) if token not in free)
    for where in range(3):
        ends = [unused] * 3
        ends[where] = tokens[where]
        change(folder / TOKENIZER, eos_token=spelling if where == 0 else "</s>")
        change(folder / CONFIG, eos_token_id=ends[1])
        change(folder / GENERATION, eos_token_id=[ends[2]])
        llm = LLM(str(folder), dtype="float32", num_kv_blocks=32)
        end = free.index(tokens[where]) + 1
        for changes, count in (
            ({}, end),
            ({"min_tokens": end + 1}, None),
            ({"ignore_eos": True}, 24),
        ):
            params = SamplingParams(temperature=0, max_tokens=24, **changes)
            out = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
            if count is None:  # the end is not sampled before its time
                assert tokens[where] not in out.token_ids[:end]
            else:
                assert out.token_ids == free[:count]
                assert (out.finish_reason, out.stop_reason) == (
                    "length" if count == 24 else "stop",
                    None,
                )


def test_weights_that_this_user_may_not_read_are_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors calls them missing."""
    file = tmp_path / "model.safetensors"
    file.touch()

    missing = FileNotFoundError(f"No such file or directory: {file}")
    set_failure(monkeypatch, weights, "safe_open", missing)
    with pytest.raises(PermissionError, match="Permission denied"), weights.open_tensors(file):
        pass
    file.unlink()
    with pytest.raises(FileNotFoundError), weights.open_tensors(file):
        pass
