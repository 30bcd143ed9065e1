"""What several test modules share: a tiny checkpoint, and one running server for all tests that do not hurt it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import examples
from tests.server_process import ServerProcess

# On a busy machine an example may take any time.
settings.register_profile(
    "untimed", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


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


@pytest.fixture(scope="session")
def fork_server() -> None:
    """The process that all others are forked from runs before a test looks which processes and files it leaves."""
    from multiprocessing import forkserver

    import tests.processes  # noqa: F401 -- says what the server imports

    forkserver.ensure_running()


@pytest.fixture
def forked(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and engines that this process starts are forked from one that has imported torch."""
    from tests.processes import StartedOrForked

    monkeypatch.setattr("subprocess.Popen", StartedOrForked)
