"""What several test modules share: a tiny checkpoint, and one running server for all tests that do
not hurt it."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import subprocess
import sys
import zlib
from collections.abc import Iterator

import httpx._transports.default
import pytest
from hypothesis import HealthCheck, settings

from tests import forking
from tests.examples import all_examples, examples
from tests.server_process import ServerProcess

# 39 grammars for a check of addresses in schemas, which no test needs, would be compiled by each
# worker: a second each.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
subprocess.Popen = forking.Popen  # type: ignore[misc]
# To load the certificates of the world takes each client of httpx 60 ms, and servers of tests have
# none.
transports = httpx._transports.default
transports.create_ssl_context = functools.cache(transports.create_ssl_context)
# On a busy machine an example may take any time. By day examples are the same in each run; new ones
# are tried by night.
settings.register_profile(
    "untimed",
    max_examples=examples(100),
    deadline=None,
    derandomize=not all_examples(),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


# By night it is the date.
TEST_SEED = os.environ.get("NANOVLLM_TEST_SEED", "0")


def pytest_report_header() -> str:
    return f"random tensors: NANOVLLM_TEST_SEED={TEST_SEED}"


def seed(name: str) -> None:
    """Make random tensors depend on what they are for, not on the tests that ran before."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(f"{TEST_SEED} {name}".encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    seed(f"{fixturedef.argname} of {request.node.nodeid}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed(item.nodeid)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random Llama checkpoint with 256 positions and bytes as tokens."""
    from tests.oracle import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def server(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the tiny model, under the name "tiny"."""
    with ServerProcess(tiny_model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def fork_server() -> None:
    """The processes that all others are forked from run before a test looks which processes and
    files it leaves."""
    from multiprocessing import forkserver

    import tests.processes  # noqa: F401 -- says what the server imports

    forkserver.ensure_running()
    forking.start_origin()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands that run in this process set the level of the log."""
    logger = logging.getLogger("nanovllm")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of Python that a test with this mark starts are not forked."""
    if request.node.get_closest_marker("started") is not None:
        monkeypatch.setattr(forking, "is_on", False)
