"""What servers have recorded while real clients used them is replayed with every plan equal."""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from nanovllm.simulate.replay import replay
from nanovllm.trace.trace import Trace
from tests.examples import by_night
from tests.kv_fleet import RouterProcess
from tests.server_process import ServerProcess, wait_until

NUM_CLIENTS = 6
# Few letters, so that prompts share prefixes and n-grams occur again.
LETTERS = "abc"
SMALL = (
    "--num-kv-blocks",
    "24",
    "--block-size",
    "4",
    "--max-model-len",
    "80",
    "--max-num-seqs",
    "5",
    "--scheduling-policy",
    "priority",
)
THREE = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 256, 3]]}
SERVERS: dict[str, list[str]] = {
    "synchronous": ["--no-async-scheduling"],
    "asynchronous": ["--async-scheduling"],
    "limited steps": ["--async-scheduling", "--max-step-ms", "8"],
    "swapping": ["--preemption-mode", "swap", "--swap-space", "0.001"],
    "n-grams": ["--speculative-config", json.dumps({"method": "ngram"} | THREE)],
    "pipeline": ["--pipeline-parallel-size", "2"],
}


def body_of(draw: random.Random) -> dict[str, Any]:
    """A request that any of the clients may send."""
    prompt = "".join(draw.choices(LETTERS, k=draw.choice([3, 8, 8, draw.randint(1, 50)])))
    body: dict[str, Any] = {
        "prompt": [10, 11, 12, 13, 14] * 5 if draw.random() < 0.2 else prompt,
        "max_tokens": draw.randint(1, 28),
        "temperature": draw.choice([0, 1]),
        "ignore_eos": draw.random() < 0.5,
        "priority": draw.randint(0, 2),
        "n": draw.choice([1, 1, 1, 2]),
    }
    if draw.random() < 0.3:
        body["stop"] = ["a", "e", "xy"]
    if draw.random() < 0.5:
        body["logit_bias"] = dict.fromkeys(("97", "98", "99"), 100)
    return body


def send(url: str, seed: int, num_requests: int) -> None:
    """Send requests as one client; some of them are streams that it leaves."""
    draw = random.Random(seed)
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(num_requests):
            body = body_of(draw)
            if draw.random() < 0.7:
                assert client.post("/v1/completions", json=body).status_code == 200
            else:
                body |= {"stream": True, "max_tokens": 28}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    for _, _ in zip(response.iter_lines(), range(draw.randint(1, 9)), strict=False):
                        pass
            time.sleep(draw.choice([0.0, 0.0, 0.03]))


def use(server: ServerProcess, num_requests: int) -> None:
    """Several clients send requests; then the server has nothing to do."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for each in [pool.submit(send, server.url, i, num_requests) for i in range(NUM_CLIENTS)]:
            each.result()


def check(path: pathlib.Path) -> set[str]:
    """Replay a trace. Returns what has happened in it."""
    trace = Trace.load(path)
    num_steps = sum(bool(step.requests) for step in trace)
    assert str(replay(trace)) == f"{num_steps:,} steps, all plans equal"
    happened = {name for step in trace for name, value in vars(step).items() if value}
    arrivals = [each for step in trace for each in step.arrivals.values()]
    happened |= {reason for step in trace for reason in step.finished.values()}
    happened |= {"priority"} & {"priority" for each in arrivals if each.priority}
    happened |= {"hit" for step in trace for hit in step.admitted.values() if hit}
    happened |= {"drafts" for step in trace for share in step.requests if share.num_drafts}
    return happened


# What happens with all servers.
ALWAYS = {"preempted", "aborted", "priority", "hit", "prefixes", "abort", "length", "stop"}


@pytest.mark.started
@pytest.mark.parametrize(
    "name", ["asynchronous", *by_night([name for name in SERVERS if name != "asynchronous"])]
)
def test_a_server(name: str, tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.jsonl"
    options = [*SMALL, *SERVERS[name], "--trace", str(path)]
    with ServerProcess(tiny_model, tmp_path, *options) as server:
        use(server, 12)
        likely = {"prompt": "abc", "logit_bias": {"97": 100}}
        text = server.complete(**likely, max_tokens=1)["choices"][0]["text"]
        stopped = server.complete(**likely, max_tokens=20, stop=text)
        assert stopped["choices"][0]["finish_reason"] == "stop"
        server.complete(**likely, max_tokens=20)  # it repeats itself, so that n-grams draft
        wait_until(server.is_idle)
    happened = check(path)
    assert happened >= ALWAYS
    assert ("swap_in" in happened) == (name == "swapping")
    assert ("drafts" in happened) == (name == "n-grams")
    assert ("planned" in happened) == (name in ("asynchronous", "limited steps"))


@pytest.mark.started
@pytest.mark.nightly
def test_a_prefill_and_a_decode_server(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Each records a trace, and serves the same clients through a router."""
    paths = []
    with contextlib.ExitStack() as servers:
        urls = []
        for role in ("producer", "consumer"):
            folder = tmp_path / role
            folder.mkdir()
            paths.append(folder / "run.jsonl")
            options = [*SMALL, "--kv-role", role, "--trace", str(paths[-1])]
            server = servers.enter_context(ServerProcess(tiny_model, folder, *options))
            urls.append(server.url)
        flags = ["--prefill", urls[0], "--decode", urls[1]]
        router = servers.enter_context(RouterProcess(tmp_path, *flags))
        use(router, 12)
        wait_until(lambda: all(router.is_idle(url) for url in urls))
    happened = [check(path) for path in paths]
    assert all("transfers" in each for each in happened)
    assert "held" in happened[0]
