"""Models and machines that the simulator knows by name, and layouts that it rejects."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nanovllm.data.errors import UsageError
from nanovllm.simulate.machines import find_machine
from nanovllm.simulate.models import Layout, find_model, model_names
from nanovllm.simulate.roofline import kv_blocks

# Parameters in billions, as the models' cards have them.
PUBLISHED = {
    "smollm2-135m": 0.1345,
    "llama-3.2-1b": 1.236,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "mistral-7b": 7.248,
    "yi-34b": 34.39,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "mixtral-8x7b": 46.70,
    "deepseek-v2-lite": 15.71,
    "deepseek-v3": 671.03,
}


def test_models_have_their_published_parameters():
    assert {name: find_model(name).num_parameters / 1e9 for name in model_names()} == pytest.approx(
        PUBLISHED, rel=3e-3
    )


def test_a_config_json_is_read_from_a_folder_or_a_path(tmp_path):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "torch_dtype": "float32",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    for name in (tmp_path, path):
        found = find_model(str(name))
        assert found.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4
        assert found.bytes_per_weight == 4
    assert find_model(str(path), kv_cache_dtype="fp8").kv_bytes_per_token() == 2 * 2 * 2 * 16
    path.write_text("{}")
    with pytest.raises(UsageError, match="architecture 'none' is not supported"):
        find_model(str(path))


def test_unknown_names_are_answered_with_the_list():
    with pytest.raises(UsageError, match=r"'gpt-5' is unknown: choose smollm2-135m, .*deepseek-v3"):
        find_model("gpt-5")
    for name in ("V100", "H100x", "H100x0", "H100x8x8", ""):
        with pytest.raises(UsageError, match=r"is unknown: choose A100, .*laptop"):
            find_machine(name)
    assert find_machine("H100").devices == find_machine("H100x8").devices == 8
    assert find_machine("H100x2").devices == 2
    for name in ["A100", "H100", "H800", "H200", "B200", "L40S", "laptop"]:
        assert find_machine(name).name == name


def test_an_impossible_layout_gets_the_engines_message():
    llama = find_model("llama-3.1-70b").config
    with pytest.raises(UsageError, match="8 KV heads cannot be divided among 3 ranks"):
        Layout(tensor_parallel_size=3).check(llama)
    with pytest.raises(UsageError, match="pipeline_parallel_size"):
        Layout(pipeline_parallel_size=81).check(llama)
    experts = Layout(data_parallel_size=144, enable_expert_parallel=True)
    deepseek = find_model("deepseek-v3").config
    with pytest.raises(UsageError, match=r"do not fill 144 ranks evenly.* may be 32, 176"):
        experts.check(deepseek)
    replace(experts, num_redundant_experts=32).check(deepseek)


def test_a_model_that_does_not_fit_is_short_of_memory_by_a_number():
    model = find_model("llama-3.1-70b")
    with pytest.raises(UsageError, match=r"63\.8 GB per device are missing \(141\.1 GB of weights"):
        kv_blocks(model, find_machine("H100"), Layout(), 16)
    free = 80 * 2**30 * 0.9 - model.weight_bytes(Layout(tensor_parallel_size=4))
    found = kv_blocks(model, find_machine("H100"), Layout(tensor_parallel_size=4), 16)
    assert found == free // (327_680 / 4 * 16)
    # Ranks beyond the number of KV heads have copies, and stages divide the layers.
    assert model.kv_bytes_per_token(16) == model.kv_bytes_per_token(8) == 327_680 / 8
    assert model.weight_bytes(Layout(pipeline_parallel_size=2)) < 0.52 * model.weight_bytes(
        Layout()
    )
