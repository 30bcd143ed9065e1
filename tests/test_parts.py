"""Parts peel off: a copy of the package without a part generates the tokens of `transformers`,
serves, and says what it lacks."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.house import PACKAGE, PARTS, files_of
from tests.oracle import make_checkpoint, reference_tokens
from tests.server_process import ServerProcess

PROMPTS = [[5, 17, 200, 43], list(range(30, 70)), [9]]
COUNT = 12
# Prints the tokens of the prompts, then what the user is told, once for each thing that is wanted.
SCRIPT = """
import contextlib, io, json, sys
from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main

model, prompts, count, wishes = sys.argv[1], *map(json.loads, sys.argv[2:])
llm = LLM(model, dtype="float32", max_num_batched_tokens=16, max_num_seqs=8, check_invariants=True)
params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
answers = llm.generate(prompts, params, use_tqdm=False)
print(json.dumps([answer.outputs[0].token_ids for answer in answers]))

def construct(model, structured_outputs=None, **options):
    llm = LLM(model, **options)
    if structured_outputs:
        llm.generate("a", SamplingParams(structured_outputs=structured_outputs))

for wanted in wishes:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            assert (main(wanted) if isinstance(wanted, list) else construct(**wanted)) in (1, 2)
        except Exception as error:
            print(error, file=sys.stderr)
    print(json.dumps(said.getvalue()))
"""
# Per part, what a user may ask for in vain: options of LLM (or a checkpoint's variant), a kind of
# structured output, or arguments of the command line.
WANTED: dict[str, list[object]] = {
    "KV on the move": [{"kv_offloading_size": 0.1}, ["router", "--prefill", "http://127.0.0.1:1"]],
    "layers of several ranks": [],  # the executor is asked first
    "pipelines": [],
    "the simulator": [["simulate"]],
    "many processes": [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}],
    "experts, latent attention, Gemma 2": ["mixtral", "deepseek-v2-dense", "gemma2"],
    "Triton": [{"attention_backend": "triton"}],
    "CUDA graphs": [],  # these need a GPU
    "compiled operators": [],  # plain torch replaces them
    "layers in one call": [],  # they run one by one
    "GGUF files": [["fetch"], {"model": "smollm2-135m"}],
    "quantization": [
        {"quantization": "w8a8"},
        {"quantize_head": True},
        {"kv_cache_dtype": "int8"},
        ["quantize", "--out", "new"],
    ],
    "speculation": [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        ["train-eagle", "--out", "new"],
    ],
    "structured output": [("regex", "a+")],
    "traces": [
        {"trace": True},
        {"trace": "run.jsonl"},
        ["trace", "run.jsonl"],
        ["replay", "run.jsonl"],
    ],
    "limits and older policies": [{"batching_policy": "static"}, {"max_step_ms": 30}],
    "steps of a pipeline": [{"pipeline_parallel_size": 2, "device": "cpu"}],
    "sleeping devices": [{"device": "sleep"}],
    "the fast path for decodes": [],  # the whole rule replaces it
    "chat in the terminal": [["chat"]],
    "workshop": [["bench", "throughput"], ["kernels"]],
}


def sets_of_parts() -> list[list[str]]:
    """Seven sets of the parts. Each part is in two of them, and no two parts in the same two: so
    whatever part needs another, some copy has the one without the other. What the core needs of a
    part is missing where all of them are."""
    places = list(zip(PARTS, itertools.combinations(range(7), 2), strict=False))
    assert len(places) == len(PARTS)
    return [[part for part, where in places if number in where] for number in range(7)]


# At night each part by itself, too.
ONE_BY_ONE = [pytest.param([part], marks=pytest.mark.nightly) for part in PARTS]


def copy_without(parts: list[str], folder: pathlib.Path) -> dict[str, str]:
    """Copy the package into a folder without some parts; the environment in which that copy is the
    package."""
    copy = shutil.copytree(
        PACKAGE, folder / "nanovllm", ignore=shutil.ignore_patterns("__pycache__")
    )
    for part in parts:
        for file in files_of(part, copy):
            file.unlink()
    for path in sorted(copy.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    if "Triton" in parts:  # nor is the library there
        (folder / "triton.py").write_text(
            "raise ModuleNotFoundError('no Triton here', name='triton')\n"
        )
    return environment_of(folder)


def environment_of(folder: pathlib.Path) -> dict[str, str]:
    """The environment in which the package in this folder is the only one."""
    # An editable install would find in this tree what is missing in the copy.
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, "
        "'__module__', '')]\n"
    )
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    folder = environment["PYTHONPATH"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize("parts", [*sets_of_parts(), list(PARTS), *ONE_BY_ONE], ids=", ".join)
def test_the_rest_works_without(
    parts: list[str], tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "copy").mkdir()
    environment = copy_without(parts, tmp_path / "copy")
    expected = [reference_tokens(str(tiny_model), prompt, COUNT) for prompt in PROMPTS]
    wanted = [as_asked(each, tiny_model, tmp_path) for part in parts for each in WANTED[part]]
    with ServerProcess(tiny_model, tmp_path, package=tmp_path / "copy") as server:
        done = run(
            environment, "-c", SCRIPT, str(tiny_model), *map(json.dumps, (PROMPTS, COUNT, wanted))
        )
        assert done.returncode == 0, done.stderr
        tokens, *told = [json.loads(line) for line in done.stdout.splitlines()]
        assert tokens == expected
        if "traces" in parts:
            for path in ("/", "/trace"):
                missing = server.client.get(server.url + path)
                assert (
                    missing.status_code == 501
                    and "this copy of nanovllm does not have" in missing.text
                )
        if "structured output" in parts:
            tools = [{"type": "function", "function": {"name": "f"}}]
            missing = server.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x"}], "tools": tools},
            )
            assert (
                missing.status_code == 400 and "this copy of nanovllm does not have" in missing.text
            )
        assert server.metrics()
        answer = server.complete(prompt=PROMPTS, max_tokens=COUNT, ignore_eos=True)
    decode = AutoTokenizer.from_pretrained(tiny_model).decode
    assert [choice["text"] for choice in answer["choices"]] == [
        decode(t, skip_special_tokens=True) for t in expected
    ]
    assert len(told) == len(wanted)
    for what, answer in zip(wanted, told, strict=True):
        assert "this copy of nanovllm does not have" in answer.strip().splitlines()[-1], (
            what,
            answer,
        )


def as_asked(
    wanted: object, model: pathlib.Path, folder: pathlib.Path
) -> list[str] | dict[str, object]:
    """What a user asks for: arguments of the command line, or of `LLM`."""
    match wanted:
        case list():
            return wanted
        case tuple():
            return {"model": str(model), "structured_outputs": dict([wanted])}
        case str():
            (folder / wanted).mkdir(exist_ok=True)
            return {"model": str(make_checkpoint(folder / wanted, wanted))}
        case _:
            assert isinstance(wanted, dict)
            return {"model": str(model)} | wanted
