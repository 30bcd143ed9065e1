"""What `from nanovllm import ...` gives, used as its documentation and users of other engines use
it."""

from __future__ import annotations

import inspect
import json
import logging
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from nanovllm import LLM, AsyncEngine, SamplingParams
from nanovllm.data.config import COURSE_MODEL
from tests.oracle import make_checkpoint

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        str(make_checkpoint(tmp_path_factory.mktemp("tiny"))), dtype="float32", num_kv_blocks=64
    )


# ---------------------------------------------------------------- AsyncEngine


def lines_of(program: str) -> list[str]:
    """The lines of a program, without blank ones."""
    return [line for line in program.splitlines() if line]


def streaming_program() -> str:
    """The program in the docstring of `AsyncEngine`."""
    documentation = inspect.getdoc(AsyncEngine) or ""
    return textwrap.dedent(documentation[documentation.index("    import asyncio") :])


def test_the_program_in_the_documentation_streams() -> None:
    program = streaming_program()
    assert len(lines_of(program)) == 8
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    params = SamplingParams(temperature=0)
    wanted = LLM(COURSE_MODEL, num_kv_blocks=64, max_model_len=128).generate(["Paris is"], params)
    assert done.stdout == wanted[0]["text"] != ""


def test_the_readme_of_the_package_has_the_same_program() -> None:
    readme = (ROOT / "nanovllm/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert lines_of(streaming_program()) in [lines_of(block) for block in blocks]


# ---------------------------------------------------------- programs written for nano-vllm and vLLM


def test_an_output_has_the_keys_that_nano_vllms_have(llm: LLM) -> None:
    prompts = ["introduce yourself", "list all prime numbers within 100"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=20, n=2))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output["text"] == output.outputs[0].text
        assert output["token_ids"] == output.outputs[0].token_ids
        with pytest.raises(KeyError, match="keys 'text' and 'token_ids', not 'prompt'"):
            output["prompt"]


def test_token_ids_may_have_parameters_of_their_own(llm: LLM) -> None:
    """As nano-vllm's benchmark calls it: lists of token ids, a list of parameters, and no bar."""
    lengths = [3, 9, 5]
    prompts = [[5 + i for i in range(length)] for length in lengths]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths
    ]
    llm.generate(["Benchmark: "], SamplingParams())
    for outputs in (
        llm.generate(prompts, params, use_tqdm=False),
        llm.generate(prompts, params, False),
    ):
        assert [len(output["token_ids"]) for output in outputs] == lengths


def test_settings_of_nano_vllm_are_taken_under_its_names(tmp_path: pathlib.Path) -> None:
    folder = str(make_checkpoint(tmp_path / "tiny", "qwen3"))
    own = LLM(
        folder,
        enforce_eager=True,
        tensor_parallel_size=1,
        max_model_len=128,
        max_num_batched_tokens=16384,
        max_num_seqs=512,
        gpu_memory_utilization=0.9,
    )
    assert own.generate([[5, 6, 7]], SamplingParams(), use_tqdm=False)[0]["token_ids"]


CODE = """
import pathlib
pathlib.Path(__file__).with_name("it_ran").touch()
class Anything: pass
"""


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("has_tokenizer_file", [True, False])
def test_code_in_a_models_folder_never_runs(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, trust: bool, has_tokenizer_file: bool
) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    (folder / "custom.py").write_text(CODE)
    classes = {"AutoConfig": "custom.Anything", "AutoModelForCausalLM": "custom.Anything"}
    classes |= {"AutoTokenizer": ["custom.Anything", "custom.Anything"]}  # type: ignore[dict-item]
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps(settings | {"auto_map": classes, "tokenizer_class": "Anything"})
        )
    if not has_tokenizer_file:
        (folder / "tokenizer.json").unlink()
    caplog.set_level(logging.WARNING, "nanovllm")
    options = {
        "dtype": "float32",
        "num_kv_blocks": 8,
        "max_model_len": 64,
        "trust_remote_code": trust,
    }
    if has_tokenizer_file:
        assert LLM(str(folder), **options).generate([[5, 6]], use_tqdm=False)[0]["token_ids"]
    else:
        with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
            LLM(str(folder), **options)
    assert not (folder / "it_ran").exists()
    lines = [record.message for record in caplog.records if "trust_remote_code" in record.message]
    assert len(lines) == trust
