"""Parts peel off: a copy of the package without a part generates the tokens of `transformers`, serves, and says what it lacks."""

from __future__ import annotations

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
GENERATE = """
import json, sys
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_num_batched_tokens=16, max_num_seqs=8, check_invariants=True)
answers = llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True), use_tqdm=False)
print(json.dumps([answer.outputs[0].token_ids for answer in answers]))
"""
ASK = "import sys; from nanovllm import LLM; LLM(**{'model': sys.argv[1]} | eval(sys.argv[2]))"
# Per part, what a user may ask for in vain: options of LLM (or a checkpoint's variant), or arguments of the command line.
WANTED: dict[str, list[object]] = {
    "KV on the move": [{"kv_offloading_size": 0.1}, ["router", "--prefill", "http://127.0.0.1:1"]],
    "many processes": [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}],
    "experts, latent attention, Gemma 2": ["mixtral", "deepseek-v2-dense", "gemma2"],
    "Triton": [{"attention_backend": "triton"}],
    "compiled operators": [],  # plain torch replaces them
    "GGUF files": [["fetch"], {"model": "smollm2-135m"}],
    "traces": [{"trace": True}, {"trace": "run.jsonl"}, ["trace", "run.jsonl"], ["replay", "run.jsonl"]],
    "chat in the terminal": [["chat"]],
    "workshop": [["bench", "throughput"], ["kernels"]],
}


def copy_without(parts: list[str], folder: pathlib.Path) -> dict[str, str]:
    """Copy the package into a folder without some parts; the environment in which that copy is the package."""
    copy = shutil.copytree(PACKAGE, folder / "nanovllm", ignore=shutil.ignore_patterns("__pycache__"))
    for part in parts:
        for file in files_of(part, copy):
            file.unlink()
    for path in sorted(copy.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    # An editable install would find in this tree what is missing in the copy.
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
    )
    if "Triton" in parts:  # nor is the library there
        (folder / "triton.py").write_text("raise ModuleNotFoundError('no Triton here', name='triton')\n")
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    folder = environment["PYTHONPATH"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[part] for part in PARTS] + [list(PARTS)], ids=[*PARTS, "all of them"])
def test_the_rest_works_without(parts: list[str], tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "copy").mkdir()
    environment = copy_without(parts, tmp_path / "copy")
    expected = [reference_tokens(str(tiny_model), prompt, COUNT) for prompt in PROMPTS]
    with ServerProcess(tiny_model, tmp_path, package=tmp_path / "copy") as server:
        done = run(environment, "-c", GENERATE, str(tiny_model), json.dumps(PROMPTS), str(COUNT))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == expected
        if "traces" in parts:
            for path in ("/", "/trace"):
                missing = server.client.get(server.url + path)
                assert missing.status_code == 501 and "this copy of nanovllm does not have" in missing.text
        assert server.metrics()
        answer = server.complete(prompt=PROMPTS, max_tokens=COUNT, ignore_eos=True)
    decode = AutoTokenizer.from_pretrained(tiny_model).decode
    assert [choice["text"] for choice in answer["choices"]] == [decode(t, skip_special_tokens=True) for t in expected]
    for part in parts:
        for wanted in WANTED[part]:
            done = ask(environment, wanted, tiny_model, tmp_path)
            assert done.returncode != 0
            last = done.stderr.strip().splitlines()[-1]
            assert "this copy of nanovllm does not have" in last, done.stderr


def ask(
    environment: dict[str, str], wanted: object, model: pathlib.Path, folder: pathlib.Path
) -> subprocess.CompletedProcess[str]:
    """Ask for a feature as a user would."""
    match wanted:
        case list():
            return run(environment, "-m", "nanovllm", *wanted)
        case str():
            (folder / wanted).mkdir(exist_ok=True)
            return run(environment, "-c", ASK, str(make_checkpoint(folder / wanted, wanted)), "{}")
        case _:
            return run(environment, "-c", ASK, str(model), repr(wanted))
