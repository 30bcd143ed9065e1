"""GGUF files as models: what transformers reads from the same file is the same."""

import json
import os
import shutil
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanovllm import LLM
from nanovllm.checkpoint import gguf as gguf_convert
from nanovllm.checkpoint.conversion import make_in_child
from nanovllm.checkpoint.files import ModelFileError
from nanovllm.checkpoint.home import ModelNotFoundError
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.checkpoint.weights import weight_files
from nanovllm.lab.bench.to_gguf import write_gguf
from nanovllm.models.config import ModelConfig
from tests.checkpoint.gguf_models import (
    HEAD_DIM,
    Kind,
    continuations,
    converted,
    random_model,
    write_model,
    write_transformers_model,
)
from tests.oracle import greedy, make_checkpoint


def reference(path: Path, head_dim: int, is_rounded: bool) -> Any:
    """transformers' own model of a GGUF file, its weights rounded to bfloat16 or not."""
    # Of Qwen 3, transformers reads all but the size of heads.
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, head_dim=head_dim)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    for parameter in model.parameters() if is_rounded else ():
        if parameter.ndim > 1:  # vectors are stored in float32
            parameter.data = parameter.data.bfloat16().float()
    return model.eval()


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [
        ("llama", Kind.F32, False),
        ("llama", Kind.F16, True),
        ("llama", Kind.Q4_K, False),
        ("llama", Kind.Q4_0, True),
        ("qwen2", Kind.BF16, True),
        ("qwen2", Kind.Q6_K, False),
        ("qwen3", Kind.Q8_0, False),
        ("qwen3", Kind.Q4_K, True),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else str(value),
)
def test_tokens_are_those_of_transformers(
    family: str, kind: Kind, tied: bool, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", family, kind, tied=tied)
    model = reference(path, HEAD_DIM[family], is_rounded=kind not in (Kind.F32, Kind.F16))
    prompts = [[5, 60, 200, 77, 31, 8], list(range(20, 60))]
    expected = continuations(model, prompts, 16)
    llm = LLM(str(converted(path)), dtype="float32", max_model_len=128)
    assert greedy(llm, prompts, 16) == expected


def test_a_file_and_its_folder_are_models_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    (tmp_path / "mine").mkdir()
    path = write_model(tmp_path / "mine" / "small.gguf")
    folder = resolve_model(str(path))
    assert folder.is_relative_to(tmp_path / "home") and list(path.parent.iterdir()) == [path]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(path.parent)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert capfd.readouterr().err.count("Converting") == 1
    os.utime(path, ns=(0, 0))  # a file of the same size may hold another model
    assert resolve_model(str(path)) == folder
    assert capfd.readouterr().err.count("Converting") == 1

    write_model(path, "qwen3")  # another file in its place
    assert resolve_model(str(path)) == folder
    assert ModelConfig.from_pretrained(folder).architecture == "Qwen3ForCausalLM"
    assert [name.name for name in folder.parent.iterdir() if name.is_dir()] == [folder.name]

    shutil.copy(path, path.with_name("other.gguf"))
    with pytest.raises(ModelNotFoundError, match=r"name one of other\.gguf, small\.gguf"):
        resolve_model(str(path.parent))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ModelNotFoundError, match=r"small\.gguf': it ends too early") as caught:
        resolve_model(str(path))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err.count("Traceback") == 0


def test_a_name_may_have_any_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "home" / "models" / "gguf"
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    # 245 bytes, of at most 255
    path = write_model(tmp_path / f"{'模型' * 40}.GGUF")
    folder = resolve_model(str(path))
    assert folder.parent == cache and "模型" in folder.name
    assert resolve_model(str(tmp_path)) == folder

    path = tmp_path / "a{0}[1] {b} %s*.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"a\{0}\[1\] \{b} %s\*\.gguf': it ends too early"):
        resolve_model(str(path))
    write_model(path)
    folder = resolve_model(str(path))
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert resolve_model(str(link)).name.startswith("link-")
    folder.rename(folder.with_name(f".{folder.name}-left"))  # by a process that was killed
    assert resolve_model(str(path)) == folder
    assert len(list(cache.iterdir())) == 3
    for missing in ("missing.gguf", "folder/missing.GGUF"):
        with pytest.raises(ModelNotFoundError, match="there is no folder or file"):
            resolve_model(missing)
    with pytest.raises(ModelNotFoundError, match=r"of 'a\{}\{0}' .*exit code 3") as caught:
        make_in_child(
            (sys.executable, "-c", "raise SystemExit(3)"),
            tmp_path,
            threading.Event(),
            "the checkpoint of 'a{}{0}'",
        )
    assert "\n" not in str(caught.value)


def test_a_folder_with_both_formats_is_the_one_that_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    folder = make_checkpoint(tmp_path / "model")
    path = write_model(folder / "model.gguf")
    assert resolve_model(str(folder)) == folder
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    assert (folder / "config.json").is_file()
    assert resolve_model(str(folder)) == resolve_model(str(path)) != folder
    shutil.copy(path, folder / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files.*name one of model\.gguf"):
        resolve_model(str(folder))


def test_a_folder_that_lacks_something_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    path = write_model(tmp_path / "model.gguf")
    folder = resolve_model(str(path))
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "notes.txt").write_text("a user's own file does no harm")
    resolve_model(str(path))
    assert (folder / "notes.txt").exists()
    weights = folder / "model.safetensors"
    for damage in (
        weights.unlink,
        lambda: os.truncate(weights, 1000),
        (folder / "tokenizer.json").unlink,
        lambda: (folder / "origin.json").write_text("{"),
    ):
        damage()
        assert resolve_model(str(path)) == folder
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole


def test_a_conversion_that_is_killed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    cache = tmp_path / "home" / "models" / "gguf"
    path = write_model(tmp_path / "model.gguf")

    def kill_when_it_writes() -> None:
        deadline = time.monotonic() + 60
        while not list(cache.glob(".model-*/checkpoint/*")) and time.monotonic() < deadline:
            time.sleep(0.001)
        for child in psutil.Process().children():
            if "nanovllm.checkpoint.gguf_model" in child.cmdline():
                child.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_when_it_writes)
    killer.start()
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf' could not be made: exit code -9"):
        resolve_model(str(path))
    killer.join()
    assert list(cache.iterdir()) == []
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="ends too early"):
        resolve_model(str(path))
    assert list(cache.iterdir()) == []


def test_a_large_model_is_written_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_file(converted(write_model(tmp_path / "whole.gguf")) / "model.safetensors")
    monkeypatch.setattr(gguf_convert, "_SHARD_BYTES", 500_000)
    monkeypatch.setattr(gguf_convert, "_CHUNK", 1000)
    folder = converted(write_model(tmp_path / "parts.gguf"))
    files = weight_files(folder)
    assert len(files) > 2 and all(file.stat().st_size < 600_000 for file in files)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_disk_without_space_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="No space left on device"):
        converted(path)
    assert list((tmp_path / "model").iterdir()) == []


# --- Weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Kind.F32, torch.float32), (Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)],
    ids=["F32", "F16", "BF16"],
)
def test_numbers_that_are_not_quantized_stay_what_they_are(
    kind: Kind, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen2", kind)
    folder = converted(path)
    weights = load_file(folder / "model.safetensors")
    for name, standard in (
        ("token_embd", "embed_tokens"),
        ("blk.1.ffn_up", "layers.1.mlp.up_proj"),
    ):
        found = weights[f"model.{standard}.weight"]
        assert found.dtype == dtype
        assert torch.equal(found.float(), numbers_of(path, f"{name}.weight"))
    assert weights["model.norm.weight"].dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).split(".")[1]


def numbers_of(path: Path, name: str) -> torch.Tensor:
    """A tensor of a file, as the `gguf` package reads it."""
    (tensor,) = (each for each in gguf.GGUFReader(path).tensors if each.name == name)
    numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(numbers, np.float32))


def can_dequantize(kind: Kind) -> bool:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def test_every_type_that_the_library_dequantizes_is_read(tmp_path: Path) -> None:
    kinds = tuple(kind for kind in Kind if can_dequantize(kind))
    assert len(kinds) > 20
    path = write_model(tmp_path / "model.gguf", "qwen2", kinds, layers=4)
    stored = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert set(kinds) <= set(stored.values())
    weights = load_file(converted(path) / "model.safetensors")
    assert len(weights) == len(stored)
    names = {"attn_output": "self_attn.o_proj"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for layer in range(4):
        for name, standard in names.items():
            in_file = f"blk.{layer}.{name}.weight"
            exact = numbers_of(path, in_file)
            found = weights[f"model.layers.{layer}.{standard}.weight"]
            if stored[in_file] not in (Kind.F32, Kind.F16):
                exact = exact.bfloat16()
            assert found.dtype == (torch.float16 if stored[in_file] == Kind.F16 else exact.dtype)
            assert torch.equal(found.to(exact.dtype), exact), stored[in_file]


# --- Models of transformers, written as llama.cpp's converter does -------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
YARN_OF_TRANSFORMERS = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_OF_GGUF: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.attn_factor": 1.0,
}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LlamaConfig(**SMALL, rope_parameters=YARN_OF_TRANSFORMERS), YARN_OF_GGUF),
        (
            Qwen3Config(
                **SMALL, rope_parameters=YARN_OF_TRANSFORMERS | {"beta_fast": 8, "beta_slow": 2}
            ),
            YARN_OF_GGUF | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        ),
        (
            Qwen2Config(**SMALL, rope_parameters=YARN_OF_TRANSFORMERS | {"rope_type": "linear"}),
            {"rope.scale_linear": 4.0},
        ),
        (
            MixtralConfig(**SMALL, num_local_experts=6, num_experts_per_tok=2),
            {"expert_count": 6, "expert_used_count": 2},
        ),
        (
            Qwen3MoeConfig(
                **SMALL,
                num_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=32,
                norm_topk_prob=True,
            ),
            {
                "expert_count": 8,
                "expert_used_count": 3,
                "expert_feed_forward_length": 32,
                "expert_weights_norm": True,
            },
        ),
    ],
    ids=["llama-yarn", "qwen3-yarn", "qwen2-linear", "mixtral", "qwen3moe"],
)
def test_tokens_are_those_of_the_model_that_the_file_was_made_of(
    config: PretrainedConfig, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(config)
    path = write_transformers_model(tmp_path / "model.gguf", model, fields)
    # The first is longer than the context that YaRN stretches.
    prompts = [[(7 * i * i + 3 * i) % 250 + 2 for i in range(100)], [5, 60, 200, 77]]
    llm = LLM(str(converted(path)), dtype="float32", max_model_len=256)
    assert greedy(llm, prompts, 24) == continuations(model, prompts, 24)


def test_a_file_of_our_own_benchmark_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "linear-rope")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["th"] = 259
    tokenizer["model"]["merges"] = [["t", "h"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = tmp_path / "written.gguf"
    write_gguf(folder, path, "F32", "F32")
    prompts = [[5, 60, 200, 77, 31, 8], list(range(20, 60))]
    theirs = LLM(str(folder), dtype="float32")
    ours = LLM(str(converted(path)), dtype="float32")
    expected = greedy(theirs, prompts, 16)
    assert len(set(expected[0])) > 4
    assert greedy(ours, prompts, 16) == expected
    assert ours.generate(["the path"])[0].prompt_token_ids[0] == 259


# --- Rotary scaling -------------------------------------------------------------------------------


def llama3_factors(factor: float, high: float) -> np.ndarray:
    """As llama.cpp's converter computes them, with its names."""
    found = []
    for freq in 1.0 / (5e4 ** (np.arange(0, 64, 2) / 64)):
        wavelen = 2 * np.pi / freq
        if wavelen < 8192 / high:
            found.append(1.0)
        elif wavelen > 8192 / 1.0:
            found.append(factor)
        else:
            smooth = (8192 / wavelen - 1.0) / (high - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}


@pytest.mark.parametrize(
    ("fields", "factors", "expected"),
    [
        ({}, None, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            None,
            {"rope_type": "linear", "factor": 2.5},
        ),
        (YARN, None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        # As llama.cpp reads them.
        ({"llama.rope.scaling.factor": 2.0}, None, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scale_linear": 2.0}, None, {"rope_type": "linear", "factor": 2.0}),
        (YARN | {"llama.rope.scaling.type": "none"}, None, {"rope_type": "default"}),
        ({}, np.full(32, 4.0, np.float32), {"rope_type": "linear", "factor": 4.0}),
        (
            {},
            llama3_factors(32.0, 4.0),
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_rotary_scaling(
    fields: dict[str, Any], factors: np.ndarray | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    tensors = {} if factors is None else {"rope_freqs.weight": factors}
    path = write_model(tmp_path / "model.gguf", fields=fields, tensors=tensors)
    written = json.loads((converted(path) / "config.json").read_text())["rope_parameters"]
    assert written == {"rope_theta": 5e4, **expected}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope.scaling.attn_factor": 1.0},
        {"rope.scale_linear": 1.0},
        {"rope.scaling.factor": 1.0},
        {"rope.scaling.factor": 0.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0},
        {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 1.0},
        {"rope.scaling.yarn_log_multiplier": 0.0},
        {"attention.causal": True},
        {"attention.sliding_window": 0},
        {"attention.sliding_window": 256},
        {"attention.clamp_kqv": 0.0},
        {"attention.max_alibi_bias": 0.0},
        {"expert_count": 0, "expert_used_count": 0},
        {"logit_scale": 1.0, "residual_scale": 0.0, "embedding_scale": 1.0},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_a_value_that_changes_nothing_is_accepted(fields: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((converted(write_model(tmp_path / "no.gguf")) / "config.json").read_text())
    named = {f"llama.{name}": value for name, value in fields.items()}
    path = write_model(tmp_path / "some.gguf", fields=named)
    assert json.loads((converted(path) / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, {}, "'longrope' is not supported"),
        (YARN | {"llama.rope.scaling.attn_factor": 0.5}, {}, "attn_factor is not supported"),
        ({"llama.expert_count": 8}, {}, "llama.expert_used_count is missing"),
        ({"llama.expert_weights_scale": 2.5}, {}, "expert_weights_scale is not supported"),
        ({"llama.attention.causal": False}, {}, "attention.causal is not supported"),
        ({"llama.residual_scale": 0.5}, {}, "residual_scale is not supported"),
        ({"llama.pooling_type": 3}, {}, "pooling_type is not supported"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor is not supported"),
        ({"split.count": 3, "split.no": 1}, {}, r"file 2 of the 3 .*llama-gguf-split --merge"),
        ({"general.type": "adapter"}, {}, "'adapter', and no model"),
        ({"llama.attention.sliding_window": 32}, {}, "sliding_window is not supported"),
        ({"llama.rope.dimension_count": 32}, {}, "dimension_count is 32, and heads have 64"),
        ({"llama.attention.key\nlength": 32}, {}, "attention.key length is not supported"),
        ({}, {"rope_freqs.weight": llama3_factors(8.0, 8.0)}, "not those of Llama 3"),
        ({}, {"blk.0.attn_q.bias": np.ones(256, np.float32)}, r"'blk\.0\.attn_q\.bias' is not"),
        ({}, {"blk.0.more.weight": np.ones(8, np.float32)}, r"'blk\.0\.more\.weight' is not"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(
    fields: dict[str, Any], tensors: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", fields=fields, tensors=tensors)
    with pytest.raises(ModelFileError, match=rf"model\.gguf': .*{message}"):
        converted(path)


def test_sizes_that_do_not_make_a_model_are_refused_on_one_line(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    name = b"llama.attention.head_count"
    found = path.read_bytes()
    value = found.index(name + struct.pack("<I", gguf.GGUFValueType.UINT32)) + len(name) + 4
    path.write_bytes(found[:value] + struct.pack("<I", 3) + found[value + 4 :])
    with pytest.raises(ModelFileError, match=r"model\.gguf': its sizes do not") as caught:
        converted(path)
    assert "\n" not in str(caught.value)


def test_a_type_that_the_library_cannot_dequantize_is_refused_by_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", kind=Kind.Q8_0)
    found = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    place = found.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", found, place) == (Kind.Q8_0,)
    path.write_bytes(found[:place] + struct.pack("<I", Kind.Q8_1) + found[place + 4 :])
    with pytest.raises(ModelFileError, match=r"Q8_1 of the tensor|goes is not all there"):
        converted(path)
