"""Keys, bounds, and all the ways in which a server can end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from nanovllm.ops.native_library import find_compiler
from nanovllm.server.signalled import say
from tests.server_process import SOON, ServerProcess, are_gone, wait_until, with_positions

LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
# With the positions of `lasting_model`, it runs for as long as a busy machine takes to look at it.
VERY_LONG = LONG | {"max_tokens": 20_000, "n": 128}


@pytest.fixture
def lasting_model(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return with_positions(tiny_model, tmp_path)


@pytest.fixture(scope="module")
def guarded(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with two keys, two places and a short queue, in which each key has one place."""
    options = [
        "--api-key",
        "first",
        "--api-key",
        "second",
        "--max-num-seqs",
        "2",
        "--max-num-waiting",
        "2",
    ]
    with ServerProcess(tiny_model, tmp_path_factory.mktemp("guarded"), *options) as server:
        yield server


def test_only_who_has_a_key_comes_in(guarded: ServerProcess) -> None:
    body = {"prompt": "abc", "max_tokens": 1}
    for key in ("first", "second"):
        response = guarded.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    wrong = [
        "Bearer third",
        "Bearer",
        "Basic first",
        "first",
        "Bearer first second",
        "Bearer \xff",
        "",
    ]
    for header in wrong:
        response = guarded.post(
            "/v1/completions", body, headers={"Authorization": header.encode("latin-1")}
        )
        assert response.status_code == 401, header
        assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/tokenize", "/detokenize", "/trace", "/health/", "/v1/nothing"):
        assert guarded.get(path).status_code == 401, path
    for path in ("/health", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200
    # A body of any size is not even read.
    assert guarded.post("/v1/completions", content=b"x" * 20_000_000).status_code == 401


@contextlib.contextmanager
def flood(server: ServerProcess, key: str) -> Iterator[list[httpx.Response]]:
    """Six clients that ask again and again, and what they are answered: at least twenty refusals
    when the body begins."""
    over, answers = threading.Event(), []

    def ask() -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
            while not over.is_set():
                answers.append(client.post(f"{server.url}/v1/completions", json=LONG))

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(ask) for _ in range(6)]
        try:
            wait_until(lambda: sum(answer.status_code == 429 for answer in answers) > 20)
            yield answers
        finally:
            over.set()
    for client in clients:
        client.result()


def test_past_the_bound_clients_are_asked_to_come_back(guarded: ServerProcess) -> None:
    # Two requests can run, and one of this key can wait: of six clients three are refused at any
    # time.
    with flood(guarded, "first") as answers:
        pass
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert "--max-num-waiting 2, divided among 2 keys" in error["message"]
    assert error["type"] == "rate_limit_error"
    wait_until(guarded.is_idle)
    headers = {"Authorization": "Bearer first"}
    assert (
        guarded.post(
            "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers
        ).status_code
        == 200
    )


def test_a_flood_with_one_key_leaves_room_for_the_other(guarded: ServerProcess) -> None:
    headers, body = {"Authorization": "Bearer second"}, LONG | {"max_tokens": 5}
    with flood(guarded, "first"):
        answers = [guarded.post("/v1/completions", body, headers=headers) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 5


def test_a_killed_engine_is_reported_and_nothing_hangs(
    lasting_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with ServerProcess(lasting_model, tmp_path) as server:
        found: dict[str, Any] = {}

        def whole() -> None:
            found["whole"] = server.post("/v1/completions", VERY_LONG)

        def stream() -> None:
            found["stream"] = server.events("/v1/completions", VERY_LONG)

        threads = [threading.Thread(target=whole), threading.Thread(target=stream)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metrics()["num_requests_running"] == 256)
        server.engine.kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "somebody waits for a dead engine"
        assert found["whole"].status_code == 503
        error = found["whole"].json()["error"]
        assert (
            error["code"] == "engine_dead"
            and error["type"] == "server_error"
            and "SIGKILL" in error["message"]
        )
        assert "SIGKILL" in found["stream"][-1]["error"]["message"]
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
        assert server.get("/version").status_code == server.get("/metrics").status_code == 200
        assert server.stop() == 0


@pytest.mark.parametrize("busy", [False, True])
def test_the_engine_ends_with_its_parent(
    lasting_model: pathlib.Path, tmp_path: pathlib.Path, busy: bool
) -> None:
    with ServerProcess(lasting_model, tmp_path) as server:
        thread = threading.Thread(target=lambda: _ignore_cut(server))
        if busy:
            thread.start()
            wait_until(lambda: server.metrics()["num_requests_running"] == 128)
        server.process.kill()
        gone, _ = psutil.wait_procs([server.engine], timeout=60)
        assert gone, "the engine has outlived its parent"
        if busy:
            thread.join(60)
    assert not list(tmp_path.glob("nanovllm-*")), "sockets were left behind"


def _ignore_cut(server: ServerProcess) -> None:
    with pytest.raises(httpx.HTTPError):
        server.post("/v1/completions", VERY_LONG)


@pytest.mark.started
def test_a_signal_lets_running_requests_end(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    trace = tmp_path / "run.jsonl"
    model = with_positions(tiny_model, tmp_path)
    lasting = LONG | {"n": 4, "max_tokens": 1000}
    options = ["--trace", str(trace), "--num-kv-blocks", "2048", "--shutdown-timeout", "300"]
    with ServerProcess(model, tmp_path, *options) as server:
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(
                httpx.post, f"{server.url}/v1/completions", json=lasting, timeout=300
            )
            stream = pool.submit(server.events, "/v1/completions", lasting)
            wait_until(lambda: server.metrics()["num_requests_running"] == 8)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: _refuses_connections(server.url), 60)
            assert {c["finish_reason"] for c in whole.result().json()["choices"]} == {"length"}
            reasons = [event["choices"][0]["finish_reason"] for event in stream.result()]
            assert reasons.count("length") == 4
        assert server.process.wait(60) == 0
        psutil.wait_procs([server.engine], timeout=60)
        assert not server.engine.is_running()
    from nanovllm.trace.trace import Trace

    assert len(Trace.load(trace).steps) >= 1000
    assert "Traceback" not in server.text


def _refuses_connections(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=60)
    except httpx.ConnectError:
        return True
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        # it was taken on at the last moment, and not served; or the socket was closed before the
        # server took it on
        pass
    return False


def test_after_the_timeout_requests_are_aborted(
    lasting_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with ServerProcess(lasting_model, tmp_path, "--shutdown-timeout", "0.2") as server:
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(server.events, "/v1/completions", VERY_LONG)
            wait_until(lambda: server.metrics()["num_requests_running"] == 128)
            server.process.send_signal(signal.SIGINT)
            reasons = [event["choices"][0]["finish_reason"] for event in stream.result()]
            assert reasons.count("abort") == 128
        assert server.process.wait(60) == 0


def test_a_second_signal_does_not_wait(lasting_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with ServerProcess(lasting_model, tmp_path) as server:
        thread = threading.Thread(target=lambda: _ignore_cut(server))
        thread.start()
        wait_until(lambda: server.metrics()["num_requests_running"] == 128)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None, "it still drains"
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(25) == 128 + signal.SIGINT
        gone, _ = psutil.wait_procs([server.engine], timeout=60)
        assert gone
        thread.join(60)


def test_a_stdout_that_takes_no_more_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        say("a banner")
        say("and more")
    assert caplog.text.count("stdout cannot be written to") == 1


# Tells the engine its macros as the true compiler does, and then compiles for ever.
SLOW_COMPILER = """#!/bin/sh
case "$*" in
*-dM*) exec "{compiler}" "$@" ;;
*) exec sleep 300 ;;
esac
"""


@pytest.mark.started
def test_ctrl_c_while_kernels_are_compiled_leaves_nothing(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(SLOW_COMPILER.format(compiler=find_compiler()))
    compiler.chmod(0o755)
    home = tmp_path / "home"
    variables = os.environ | {
        "NANOVLLM_HOME": str(home),
        "CXX": str(compiler),
        "NANOVLLM_NATIVE": "1",
    }
    command = [sys.executable, "-m", "nanovllm", "serve", str(tiny_model), "--port", "0"]
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until(lambda: list(home.glob("native/*/")), 120, "the compilation has begun")
        wait_until(lambda: running_sleeps(process.pid), 60, "a compiler runs")
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(SOON) in (0, 130)
        wait_until(lambda: are_gone(started), SOON, "all that it has started ends")
        assert list((home / "native").iterdir()) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def running_sleeps(pid: int) -> list[psutil.Process]:
    """Compilers among the descendants of a process."""
    return [each for each in psutil.Process(pid).children(recursive=True) if each.name() == "sleep"]
