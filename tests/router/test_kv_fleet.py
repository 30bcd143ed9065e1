"""`nanovllm serve --prefill N --decode M`, with engines."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from nanovllm.assembly.flags import add_flags, read_flags, words_of
from nanovllm.data.config import EngineConfig
from nanovllm.router.fleet import divide_gpus, server_config, visible_gpus
from tests.forking import children
from tests.kv_fleet import KVFleet, RouterProcess
from tests.server_process import ServerProcess, wait_until

pytestmark = pytest.mark.slow

PROMPTS = [f"{i}: once upon a time there was a small model " + "that dreamt " * i for i in range(8)]


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> dict[tuple[str, str], str]:
    """What one engine without any of this says, by order and prompt."""
    return {
        (order, prompt): server.complete(prompt=f"{order} {prompt}", max_tokens=12)["choices"][0][
            "text"
        ]
        for order in ORDERS
        for prompt in PROMPTS
    }


@pytest.fixture(scope="module")
def fleet(tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVFleet]:
    """One server that prefills and two that decode. When they end, nothing is left of them."""
    folder = tmp_path_factory.mktemp("fleet")
    with KVFleet(
        tiny_model, folder, 1, 2, "--check-invariants", "--shutdown-timeout", "5"
    ) as running:
        yield running
        processes = running.processes()
        assert running.stop() == 0, running.text
        running.wait_until_gone(processes)


ORDERS = {
    "prefill first": (),
    "decode first, push": ("--kv-order", "decode_first"),
    "decode first, pull": (
        "--kv-order",
        "decode_first",
        "--kv-direction",
        "pull",
        "--policy",
        "prefix_aware",
    ),
    "prefill first, by scores": (
        "--policy",
        "prefix_aware",
        "--routing-weights",
        "prefix:2",
        "kv:1",
        "queue:1",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_answers_are_those_of_one_engine(
    order: str, fleet: KVFleet, tmp_path: pathlib.Path, expected: dict[tuple[str, str], str]
) -> None:
    urls = {name: fleet.server_url(name) for name in fleet.names}
    servers = "--prefill", urls["prefill 0"], "--decode", urls["decode 0"], urls["decode 1"]
    before = num_fetched(fleet)
    # Of each order its own prompts: nothing of them is cached at the beginning.
    prompts = [f"{order} {prompt}" for prompt in PROMPTS]
    with RouterProcess(tmp_path, *servers, *ORDERS[order]) as router:
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda prompt: router.complete(prompt=prompt, max_tokens=12), prompts)
            )
        streamed = router.events(
            "/v1/completions", {"prompt": prompts[0], "max_tokens": 12, "temperature": 0}
        )
        assert not router.router_metrics()["request_errors_total"], router.text + fleet.text
        assert "GET /metrics" not in fleet.text, "the router's own requests are not shown"
    wait_until(fleet.all_blocks_are_back, 60, "all blocks are back")
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [expected[order, prompt] for prompt in PROMPTS]
    assert "".join(event["choices"][0]["text"] for event in streamed) == texts[0]
    # The beginning may be cached where the request is decoded, and the last token is computed there
    # in any case.
    num_new = sum(answer["usage"]["prompt_tokens"] - len(order) - 17 for answer in answers)
    assert num_fetched(fleet) - before >= num_new > 0


def num_fetched(fleet: KVFleet) -> float:
    """Tokens whose KV has come from the prefill server."""
    names = "decode 0", "decode 1"
    return sum(
        fleet.metrics(fleet.server_url(name))["external_prefix_cache_hits_total"] for name in names
    )


HOLD = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a prompt of more than a block, to be held"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hold this, too, for a while"}]},
        ),
    ],
)
def test_answers_say_where_the_kv_is(path: str, body: dict[str, Any], fleet: KVFleet) -> None:
    prefill, decode = fleet.server_url("prefill 0"), fleet.server_url("decode 0")
    whole = fleet.post(prefill + path, body | HOLD).json()["kv_transfer_params"]
    *_, last = fleet.events(prefill + path, body | HOLD)
    for params in (whole, last["kv_transfer_params"]):
        assert (
            params["do_remote_prefill"]
            and params["remote_block_ids"]
            and params["remote_host"] == "127.0.0.1"
        )
        answer = fleet.post(
            decode + path, body | {"kv_transfer_params": params, "max_tokens": 3}
        ).json()
        assert answer["usage"]["completion_tokens"] and not answer.get("kv_transfer_params")
    wait_until(fleet.all_blocks_are_back, 60, "all blocks are back")


def test_a_refused_request_leaves_nothing_behind(fleet: KVFleet) -> None:
    """The prefill server's blocks are free long before their lease of 60 s ends."""
    prefill = fleet.server_url("prefill 0")
    before = fleet.metrics(prefill)["prompt_tokens_total"]
    # The prefill server is not asked for log-probabilities, so only the decode server refuses.
    refused = fleet.post(
        "/v1/completions", {"prompt": "refused after its prefill " * 8, "logprobs": 999}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
    assert fleet.metrics(prefill)["prompt_tokens_total"] > before
    wait_until(fleet.all_blocks_are_back, 30, "all blocks are back")


def test_kv_can_be_released_wherever_it_is(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A server of two engines is told which request's KV is not wanted, not which engine has it."""
    with ServerProcess(tiny_model, tmp_path, "--kv-role", "producer", "-dp", "2") as server:
        held = [
            server.complete(**HOLD, prompt=prompt)["kv_transfer_params"] for prompt in PROMPTS[:2]
        ]
        assert not server.is_idle()
        assert (
            server.post("/kv_transfer/release", {"remote_request_id": "another"}).status_code == 204
        )
        for params in held:
            assert server.post("/kv_transfer/release", params).status_code == 204
        wait_until(server.is_idle, 30, "all blocks are free")
        for wrong in (5, "\ud800", "x" * 1001):
            content, headers = (
                json.dumps({"remote_request_id": wrong}),
                {"Content-Type": "application/json"},
            )
            refused = server.post("/kv_transfer/release", content=content, headers=headers)
            assert (
                refused.status_code == 400
                and refused.json()["error"]["param"] == "remote_request_id"
            )


def test_the_routers_page_leads_to_those_of_the_servers(fleet: KVFleet) -> None:
    page = fleet.get("/").text
    for name in fleet.names:
        assert f'<a href="{fleet.server_url(name)}/">' in page
        assert "text/html" in fleet.get(f"{fleet.server_url(name)}/").headers["content-type"]


def test_nothing_listens_beyond_this_machine(fleet: KVFleet) -> None:
    listening = [
        connection.laddr.ip
        for process in fleet.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    # The router, three servers, and of each engine a rank that has blocks; and of the producer
    # where it can be asked.
    assert len(listening) >= 8 and set(listening) == {"127.0.0.1"}


def test_what_is_said_of_kv_has_to_fit(fleet: KVFleet, server: ServerProcess) -> None:
    refused = server.post("/v1/completions", {"prompt": "a"} | HOLD)
    assert refused.status_code == 400 and "--kv-role" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "kv_transfer_params"
    for several in ({"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}):
        url = fleet.server_url("prefill 0") + "/v1/completions"
        refused = server.post(url, several | HOLD)
        assert (
            refused.status_code == 400
            and "one prompt and n = 1" in refused.json()["error"]["message"]
        )
    wrong_role = server.post(
        fleet.server_url("decode 0") + "/v1/completions", {"prompt": "a"} | HOLD
    )
    assert (
        wrong_role.status_code == 400
        and "--kv-role producer" in wrong_role.json()["error"]["message"]
    )
    assert "Traceback" not in fleet.text, "what is refused is no bug"


def test_a_server_that_dies_is_started_again(fleet: KVFleet) -> None:
    for name in ("decode 1", "prefill 0"):
        url, engine = fleet.server_url(name), children(fleet.server(name))
        served = f"[{name}] is ready"
        wanted = fleet.text.count(served) + 1
        fleet.kill(name)
        for prompt in PROMPTS:
            assert fleet.complete(prompt=prompt, max_tokens=12)["usage"]["completion_tokens"], (
                "someone is left"
            )
        fleet.wait_until_gone(engine)
        wait_until(lambda s=served, w=wanted: fleet.text.count(s) == w, 120, "it serves again")  # type: ignore[misc]
        fleet.wait_until_ready()
        assert fleet.server_url(name) == url
    before = num_fetched(fleet)
    fleet.complete(prompt="something new " * 8, max_tokens=3)
    assert num_fetched(fleet) > before, "it is found in its old place, with a new engine"


@pytest.mark.parametrize(
    ("name", "is_engine"),
    [("decode 1", False), pytest.param("prefill 0", True, marks=pytest.mark.nightly)],
)
def test_a_process_that_is_stopped_is_replaced(fleet: KVFleet, name: str, is_engine: bool) -> None:
    server = fleet.server(name)
    (engine,) = [
        child for child in children(server) if "nanovllm.engine.client" in " ".join(child.cmdline())
    ]
    served = f"[{name}] is ready"
    times = fleet.text.count(served)
    with ThreadPoolExecutor(4) as pool:
        (engine if is_engine else server).send_signal(signal.SIGSTOP)
        prompts = [f"{name} has stopped: {prompt}" for prompt in PROMPTS]
        answers = list(
            pool.map(lambda prompt: fleet.complete(prompt=prompt, max_tokens=12), prompts)
        )
    assert all(answer["usage"]["completion_tokens"] for answer in answers), (
        "the other servers go on"
    )
    fleet.wait_until_gone([server, engine])
    wait_until(lambda: fleet.text.count(served) == times + 1, 120, "it serves again")
    fleet.wait_until_ready()


def test_the_routers_address_is_the_first_that_is_announced(fleet: KVFleet) -> None:
    """A newcomer takes the first address that is printed for the one to use."""
    assert re.findall(r"http://[\w.:]+", fleet.text)[0] == fleet.url
    assert all(fleet.text.count(f"[{name}] is ready") for name in fleet.names)


def test_nothing_is_left_when_the_command_is_killed(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with KVFleet(tiny_model, tmp_path, 1, 1) as fleet:
        processes = fleet.processes()
        assert len(processes) >= 5
        fleet.process.send_signal(signal.SIGKILL)
        fleet.wait_until_gone(processes)


def test_an_engine_that_cannot_start_ends_all(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    fleet = KVFleet(tiny_model, tmp_path, 1, 1, "--max-model-len", "100000")
    assert fleet.process.wait(120) == 2
    assert (
        "prefill 0 exited with code 2" in fleet.text or "decode 0 exited with code 2" in fleet.text
    )
    assert "positions of the model" in fleet.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefill", "1"], "--prefill and --decode must be used together"),
        (["--prefill", "1", "--decode", "1", "--kv-role", "both"], "--kv-role is set by"),
        (["--prefill", "1", "--decode", "1", "--trace", "x"], "--trace records one engine"),
        (["--prefill", "http://127.0.0.1:1", "--decode", "1"], "--prefill: invalid int value"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], message: str, capsys: Any) -> None:
    from nanovllm.cli.main import main

    try:
        code: Any = main(["serve", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2 and message in capsys.readouterr().err


def test_settings_reach_the_servers() -> None:
    config = EngineConfig(
        model="some where",
        max_num_seqs=8,
        enable_prefix_caching=False,
        check_invariants=True,
        kv_transfer_config='{"kv_connector_extra_config": {"lease_seconds": 3}}',
    )
    parser = argparse.ArgumentParser()
    add_flags(EngineConfig, parser)
    arrived = read_flags(
        EngineConfig,
        parser.parse_args(words_of(server_config(config, "consumer", "fail", shares=2))),
    )
    assert (arrived.model, arrived.max_num_seqs, arrived.gpu_memory_utilization) == (
        "some where",
        8,
        0.45,
    )
    assert not arrived.enable_prefix_caching and arrived.check_invariants
    assert arrived.kv_transfer is not None and arrived.kv_transfer.kv_load_failure_policy == "fail"
    assert arrived.kv_transfer.kv_connector_extra_config == {"lease_seconds": 3}


def test_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    assert divide_gpus([], 2, 1) == ([], 1)
    assert divide_gpus(["0", "1", "2"], 2, 1) == (["0", "1"], 1)
    assert divide_gpus(["4", "5", "6", "7"], 2, 2) == (["4,5", "6,7"], 1)
    assert divide_gpus(["0"], 3, 1) == ([], 3)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "3,1")
    assert (
        visible_gpus(EngineConfig()) == ["3", "1"]
        and visible_gpus(EngineConfig(device="cpu")) == []
    )


def test_kv_that_does_not_come_is_an_error_of_the_server(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Nobody listens where the KV is said to be, and the server may not compute it: not an empty
    answer, nor the client's fault."""
    settings = {"kv_connector": "local", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}
    with (
        socket.socket() as nobody,
        ServerProcess(tiny_model, tmp_path, "--kv-transfer-config", json.dumps(settings)) as server,
    ):
        nobody.bind(("127.0.0.1", 0))
        place = {
            "remote_host": "127.0.0.1",
            "remote_port": nobody.getsockname()[1],
            "remote_engine_id": "p",
        }
        params = {
            "do_remote_prefill": True,
            "remote_request_id": "r",
            "remote_block_ids": [3, 1, 2],
            **place,
        }
        for more in {}, {"structured_outputs": {"regex": "a+"}}:
            body = {"prompt": "a" * 40, "max_tokens": 3, "kv_transfer_params": params, **more}
            failed = server.post("/v1/completions", body)
            assert failed.status_code == 500, failed.text + server.text
            assert "did not arrive" in failed.json()["error"]["message"]
            stream = server.post("/v1/completions", body | {"stream": True})
            assert '"error"' in stream.text and "did not arrive" in stream.text
