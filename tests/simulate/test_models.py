"""Models and machines that the simulator knows by name, and layouts that it rejects."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm.data.errors import UsageError
from nanovllm.simulate import models
from nanovllm.simulate.machines import find_machine, known_machines
from nanovllm.simulate.models import Layout, find_model, model_names
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.sources import select

# Parameters in billions, as the models' cards or their checkpoints have them, without layers that
# draft: GLM-4.5's have 358.3 and Air's 110.5, with one such layer, its embedding and its head.
PUBLISHED = {
    "smollm2-135m": 0.1345,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "mistral-7b": 7.248,
    "mistral-nemo-12b": 12.25,
    "mistral-small-24b": 23.57,
    "mistral-large-123b": 122.61,
    "yi-34b": 34.39,
    "phi-4": 14.66,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-coder-30b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "qwen3-coder-480b": 480.15,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.62,
    "glm-4.5-air": 110.47 - 3.617,
    "glm-4.5": 358.34 - 5.540,
    "glm-4.6": 358.34 - 5.540,
    "minimax-m2": 228.70,
    "deepseek-v2-lite": 15.71,
    "deepseek-v3": 671.03,
    "deepseek-r1": 671.03,
    "deepseek-v3.1": 671.03,
    "kimi-k2": 1026.41,
}
# A small simulation.
FEW = {"num_prompts": 4, "request_rate": 20.0, "random_input_len": 64, "random_output_len": 4}


def test_models_have_their_published_parameters():
    assert {name: find_model(name).num_parameters / 1e9 for name in model_names()} == pytest.approx(
        PUBLISHED, rel=3e-3
    )


@pytest.mark.parametrize("name", model_names())
def test_every_model_is_simulated_by_its_name(name: str) -> None:
    size = 8 if find_model(name).weight_bytes(Layout()) > 200e9 else 1
    settings = {"model": name, "machine": "MI355X", "tensor_parallel_size": size}
    summary = simulate({**FEW, **settings})
    assert summary["completed"] == 4
    assert str(summary["setup"]).startswith(f"{name} on MI355X, TP {size}, ")


@pytest.mark.parametrize("name", known_machines())
def test_every_machine_is_simulated_by_its_name(name: str) -> None:
    machine = known_machines()[name]
    summary = simulate({**FEW, "model": "smollm2-135m", "machine": name})
    assert summary["completed"] == 4
    assert (machine.price_per_hour is None) == ("dollars_per_million_tokens" not in summary)
    apart = simulate({**FEW, "model": "smollm2-135m", "machine": name, "prefill": 1, "decode": 1})
    assert apart["num_transfers"] == 4


def test_an_architecture_with_the_matrices_of_another_one_costs_as_much(tmp_path: Path) -> None:
    """A config.json of GLM-4.5-Air with what decides about values alone."""
    known = tomllib.loads((Path(models.__file__).with_suffix(".toml")).read_text())["glm-4.5-air"]
    rest = {
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e6},
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**known, **rest}))
    model = find_model(str(path))
    assert model.config.architecture == "Glm4MoeForCausalLM"
    layout = Layout(tensor_parallel_size=8)
    assert model.matrices(layout) == find_model("glm-4.5-air").matrices(layout)


def test_a_config_json_is_read_from_a_folder_or_a_path(tmp_path, monkeypatch):
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
    # A folder comes before a repository of the same name.
    repository = tmp_path / "meta-llama" / "Llama-3.1-8B"
    repository.mkdir(parents=True)
    (repository / "config.json").write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path, path, "meta-llama/Llama-3.1-8B"):
        found = find_model(str(name))
        assert found.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4
        assert found.bytes_per_weight == 4
    assert find_model(str(path), kv_cache_dtype="fp8").kv_bytes_per_token() == 2 * 2 * 2 * 16
    path.write_text("{}")
    with pytest.raises(
        UsageError, match=r"architecture 'none' is not supported; .*Phi3ForCausalLM"
    ):
        find_model(str(path))


def test_unknown_names_are_answered_with_the_list():
    with pytest.raises(UsageError, match=r"'gpt-5' is unknown: choose smollm2-135m, .*deepseek-v3"):
        find_model("gpt-5")
    for name in ("V100", "H100x", "H100x0", "H100x8x8", ""):
        with pytest.raises(UsageError, match=r"is unknown: choose A100, .*laptop"):
            find_machine(name)
    assert find_machine("H100").devices == find_machine("H100x8").devices == 8
    assert find_machine("H100x2").devices == 2
    for name in known_machines():
        assert find_machine(name.lower()).name == name
        assert find_machine(f"{name}x16").devices == 16
    assert find_machine("GB200").devices == 72


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistral-nemo-12b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("01-ai/Yi-34B-Chat", "yi-34b"),
    ],
)
def test_models_are_known_by_the_names_of_their_repositories_in_any_case(
    name: str, known: str
) -> None:
    assert find_model(name) == find_model(known)
    assert list(select(model=name).models) == [known]


def test_each_source_is_a_name_of_its_model():
    for name in model_names():
        model = find_model(name)
        assert find_model(model.source.removeprefix("huggingface.co/")) == model
        assert find_model(name.upper()) == model


@pytest.mark.parametrize("name", ["llama-3.1-7b", "meta-llama/Llama-3.1-71B", "Llama3.1-70B"])
def test_an_unknown_model_is_answered_with_one_of_a_similar_name(name: str) -> None:
    with pytest.raises(UsageError, match=r"is unknown; did you mean llama-3\.[13]-.*b\? Choose s"):
        find_model(name)


def test_an_unknown_model_is_no_mistake_of_the_prefill_engines() -> None:
    with pytest.raises(UsageError, match=r"^--model 'gpt-5' is unknown: choose"):
        simulate({**FEW, "model": "gpt-5", "prefill": 1, "decode": 1})


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


def test_ranks_beyond_the_kv_heads_have_copies_and_stages_divide_the_layers() -> None:
    model = find_model("llama-3.1-70b")
    assert model.kv_bytes_per_token(16) == model.kv_bytes_per_token(8) == 327_680 / 8
    assert model.weight_bytes(Layout(pipeline_parallel_size=2)) < 0.52 * model.weight_bytes(
        Layout()
    )


@pytest.mark.parametrize("names", [3, {"a": 1}, [], [3], [[]], "LlamaForCausalLM"])
def test_architectures_that_are_no_list_of_names_are_reported_in_a_line(
    tmp_path: Path, names: object
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": names}))
    with pytest.raises(UsageError, match="architecture") as caught:
        find_model(str(path))
    assert "\n" not in str(caught.value)


def test_old_quantizations_are_read_from_files_of_their_own(tmp_path: Path) -> None:
    """As AutoGPTQ and AutoAWQ wrote them: the engine reads them, too."""
    known = tomllib.loads((Path(models.__file__).with_suffix(".toml")).read_text())["llama-3.1-8b"]
    (tmp_path / "config.json").write_text(json.dumps(known))
    assert find_model(str(tmp_path)).bytes_per_weight == 2
    gptq = {"bits": 8, "group_size": 128, "desc_act": False, "sym": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(gptq))
    for path in (tmp_path, tmp_path / "config.json"):
        assert find_model(str(path)).bytes_per_weight == 1
    (tmp_path / "quantize_config.json").unlink()
    awq = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(awq))
    assert find_model(str(tmp_path)).bytes_per_weight == 0.5
    assert find_model("llama-3.1-8b").bytes_per_weight == 2
    (tmp_path / "quant_config.json").write_text("[")
    with pytest.raises(UsageError, match=r"^--model .*quant_config\.json' is not valid JSON"):
        find_model(str(tmp_path))


def test_a_folder_without_a_config_json_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--model '.*' has no config.json: choose smollm2-135m"):
        find_model(str(tmp_path))
