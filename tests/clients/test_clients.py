"""Programs that others have written for OpenAI's API, on a server of the course model.
`make clients` installs them."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import COURSE_MODEL
from tests.server_process import ServerProcess

FOLDER = pathlib.Path(__file__).parent
PYTHON = FOLDER.parents[1] / ".venv-clients" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="MISSING: .venv-clients, which `make clients` makes"
    ),
]


@pytest.fixture(scope="module")
def course_model() -> pathlib.Path:
    return resolve_model(COURSE_MODEL)


@pytest.fixture(scope="module")
def course_server(
    course_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the course model, also under the name "tiny"."""
    options = ("--attention-backend", "auto", "--max-model-len", "2048", "--num-kv-blocks", "256")
    with ServerProcess(course_model, tmp_path_factory.mktemp("course"), *options) as running:
        yield running


def run(program: str, *words: str | pathlib.Path) -> None:
    """Run one of the programs beside this file, which checks what it gets; it must end well."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "OPENAI", "LANG"))
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "LANG": "C.UTF-8",
    }
    command = [str(PYTHON), str(FOLDER / program), *map(str, words)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


def test_litellm(server: ServerProcess, course_server: ServerProcess) -> None:
    run("use_litellm.py", server.url, course_server.url)


def test_langchain(course_server: ServerProcess) -> None:
    run("use_langchain.py", course_server.url)


def test_instructor(course_server: ServerProcess) -> None:
    run("use_instructor.py", course_server.url)


def test_guidellm(
    course_server: ServerProcess, course_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    run("use_guidellm.py", course_server.url, course_model, tmp_path)
