"""What several test modules share: a tiny checkpoint, and one running server for all tests that do not hurt it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.server_process import ServerProcess


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random Llama checkpoint with 256 positions and bytes as tokens."""
    from tests.oracle import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def server(tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the tiny model, under the name "tiny"."""
    with ServerProcess(tiny_model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and engines that this process starts are forked from one that has imported torch."""
    from multiprocessing import forkserver

    from tests.processes import StartedOrForked

    forkserver.ensure_running()  # before a test looks which processes it leaves
    monkeypatch.setattr("subprocess.Popen", StartedOrForked)
