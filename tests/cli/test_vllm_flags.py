"""Command lines of `vllm serve`, from its documentation and recipes, are accepted or rejected in
one line."""

import argparse
import re
import shlex
from typing import Any

import pytest

from nanovllm.assembly.flags import Parser, add_flags
from nanovllm.cli import main as cli
from nanovllm.cli import serve, vllm_flags
from nanovllm.data.config import EngineConfig
from tests.stand_ins import note_starts

# Each with the flags that have no effect, and settings that the engine must get.
PASTED: list[tuple[str, list[str], dict[str, Any]]] = [
    (
        "Qwen/Qwen2.5-1.5B-Instruct --dtype auto --trust-remote-code",
        ["--trust-remote-code"],
        {"dtype": "auto"},
    ),
    (
        "NousResearch/Hermes-3-Llama-3.1-8B --enable-auto-tool-choice --tool-call-parser hermes",
        ["--enable-auto-tool-choice", "--tool-call-parser"],
        {"model": "NousResearch/Hermes-3-Llama-3.1-8B"},
    ),
    (
        (
            "deepseek-ai/DeepSeek-R1 --trust-remote-code --served-model-name r1 "
            "--tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend "
            "ray --uvicorn-log-level warning"
        ),
        ["--trust-remote-code", "--uvicorn-log-level"],
        {"served_model_name": ["r1"], "tensor_parallel_size": 8, "pipeline_parallel_size": 2},
    ),
    (
        (
            "Qwen/Qwen3-30B-A3B -tp 4 -ep --enable-eplb --eplb-config.window_size 100 "
            "--eplb-config.step_interval=200"
        ),
        [],
        {
            "tensor_parallel_size": 4,
            "enable_expert_parallel": True,
            "eplb_config": '{"window_size": 100, "step_interval": 200}',
        },
    ),
    (
        (
            "meta-llama/Llama-3.1-8B-Instruct --max-model-len 8K --gpu-memory-utilization 0.9 "
            "--disable-log-requests"
        ),
        ["--disable-log-requests"],
        {"max_model_len": 8192},
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct -O3 "
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'""",
        ["--optimization-level"],
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}'},
    ),
    (
        (
            "Qwen/Qwen3-8B --max_model_len 4096 --tokenizer_mode auto --config_format hf "
            "--limit-mm-per-prompt.image 0"
        ),
        ["--limit-mm-per-prompt"],
        {"max_model_len": 4096},
    ),
    (
        "google/gemma-3-4b-it --max-logprobs 20 -q awq "
        """--compilation-config '{"cudagraph_capture_sizes": [1, 2]}'""",
        ["--compilation-config"],
        {"quantization": "awq"},
    ),
    (
        (
            "--model mistralai/Mistral-7B-Instruct-v0.3 --cudagraph-capture-sizes 1 2 4 "
            "--api-server-count=2 --block-size 32"
        ),
        ["--cudagraph-capture-sizes", "--api-server-count"],
        {"model": "mistralai/Mistral-7B-Instruct-v0.3", "block_size": 32},
    ),
    (
        (
            "Qwen/Qwen2.5-7B-Instruct-AWQ --quantization awq_marlin --served-model-name qwen "
            "qwen2.5 --max-model-len auto"
        ),
        [],
        {"quantization": "awq", "served_model_name": ["qwen", "qwen2.5"], "max_model_len": None},
    ),
    (
        (
            "Qwen/Qwen3-8B -q gptq_marlin --max-model-len -1 "
            "--compilation-config.cudagraph_capture_sizes+ 1,2 "
            "--compilation-config.cudagraph_capture_sizes+=4"
        ),
        ["--compilation-config"],
        {"quantization": "gptq", "max_model_len": None},
    ),
    (
        (
            "facebook/opt-125m --num-gpu-blocks-override 100 --no-enable-log-requests "
            "--no-trust-remote-code"
        ),
        [],
        {"num_kv_blocks": 100},
    ),
]


@pytest.mark.parametrize(
    ("line", "ignored", "settings"), PASTED, ids=[line[0].split()[-2] for line in PASTED]
)
def test_a_line_of_vllm_can_be_pasted(
    line: str,
    ignored: list[str],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The settings arrive, no word is taken for another flag's value, and one line of the log names
    the flags without effect."""
    seen = note_starts(monkeypatch)
    assert cli.main(["serve", *shlex.split(line), "--port", "0"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "without effect" in line]
    assert {name: getattr(seen[0], name) for name in settings} == settings
    assert len(lines) == bool(ignored)
    assert re.findall(r"--[a-z0-9-]+", re.sub(r"\(.*?\)", "", " ".join(lines))) == ignored


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        (
            "Qwen/Qwen2.5-Coder-1.5B-Instruct --enable-lora --lora-modules a=b c=d",
            ["--lora-modules", "merge the adapter"],
        ),
        (
            "Qwen/Qwen3-8B --reasoning-parser qwen3 --trust-remote-code",
            ["--reasoning-parser", "in the client"],
        ),
        (
            "x --chat-template t.jinja --ssl-keyfile k",
            ["chat_template.jinja in the model's folder", "reverse proxy"],
        ),
        ("x --tokenizer-mode mistral", ["--tokenizer-mode", "Hugging Face"]),
        ("x --max-logprobs 50", ["maximum is 20"]),
        ("x --hf-token", ["HF_TOKEN"]),
        ("x --cpu-offload-gb 4 --nnodes 2 --node-rank 0", ["--quantization", "torchrun"]),
        ("x --hf-overrides.rope_theta 5", ["config.json"]),
    ],
)
def test_a_flag_that_asks_for_something_missing_says_what_to_do(
    line: str, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(message in error for message in messages), error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="serve")
    serve.add_arguments(parser)
    return parser


GROUPS = [*vllm_flags.IGNORED, *vllm_flags.REJECTED]


@pytest.mark.parametrize("group", GROUPS, ids=[group.names()[0] for group in GROUPS])
def test_every_flag_takes_its_values_and_no_more(group: vllm_flags.FlagGroup) -> None:
    parser = _parser()
    words: dict[str, list[str]] = {name: [] for name in group.switches.split()}
    words |= {name: ["v"] for name in group.values.split()}
    words |= {name: ["v", "w"] for name in group.lists.split()}
    words |= {name: [] for name in group.optional.split()}
    for name, values in words.items():
        for flag in {f"--{name}", f"--{name.replace('-', '_')}"}:
            parsed = parser.parse_args(
                [flag, *values, "--port", "7"] if values else ["model", flag, "--port", "7"]
            )
            assert parsed.vllm_flags == (name,) and parsed.port == 7
    for name in group.switches.split():
        assert parser.parse_args([f"--no-{name}"]).vllm_flags == ()


def test_no_flag_has_two_answers_and_help_lists_none() -> None:
    names = [name for group in GROUPS for name in group.names()]
    assert len(names) == len(set(names))
    assert {*vllm_flags.NEUTRAL, *vllm_flags.SHORT_NAMES} <= {*names}
    text = _parser().format_help()
    assert "--enable-lora" not in text and "--port" in text


def test_the_servers_own_flags_keep_their_meaning() -> None:
    own = Parser(prog="serve")
    add_flags(EngineConfig, own)
    before = dict(own._option_string_actions)
    vllm_flags.add_arguments(own)
    assert all(own._option_string_actions[flag] is action for flag, action in before.items())
