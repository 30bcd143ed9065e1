"""`--routing-weights`: the router chooses by what its servers report, as the simulated one does."""

from __future__ import annotations

import contextlib
import pathlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats
from nanovllm.router.config import RouterConfig
from nanovllm.router.policies import Router, RouterState
from nanovllm.router.pool import PIECE_BYTES, BackendPool, prefix_names
from nanovllm.router.run import backends_of
from nanovllm.server.metrics import Metrics
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.settings import FleetConfig
from tests.kv_fleet import RouterProcess
from tests.router.test_router import FakeServer, fleet_of, until
from tests.server_process import ServerProcess, kept_busy, wait_until
from tests.simulate.engines import engine_of, request_of

WORDS = ["prefix:3", "kv:2", "queue:2"]
NUM_BLOCKS = 40
BLOCK_SIZE = 4


# ---------------------------------------------------------------- the flag


@pytest.mark.parametrize("words", [None, "queue:1", ["prefix:0.5"], WORDS])
@pytest.mark.parametrize("policy", ["load", "estimated"])
def test_the_flag_means_the_same_to_both_routers(words: Any, policy: Any) -> None:
    simulated = FleetConfig(routing_policy=policy, routing_weights=words)
    assert RouterConfig(policy=policy, routing_weights=words).weights == simulated.weights
    assert (simulated.weights is None) == (words is None)


@pytest.mark.parametrize("words", ["kv", "kv:0", "kv:-1", "kv:nan", "kv:inf", "cpu:1", "kv:2:3"])
def test_wrong_weights_are_refused_by_both_routers_in_the_same_words(words: str) -> None:
    messages = []
    for create in (
        lambda: RouterConfig(policy="estimated", routing_weights=[words]),
        lambda: FleetConfig(routing_policy="estimated", routing_weights=[words]),
    ):
        with pytest.raises(ValueError) as caught:
            create()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0] == (
        "--routing-weights must be a name of prefix, kv, queue and a positive number, such as kv:2"
        f", got '{words}'"
    )


# ---------------------------------------------------------------- the choice


@contextlib.contextmanager
def in_state(engine: Any, waiting: int, held: int) -> Iterator[None]:
    """A simulated engine with so many waiting requests and held blocks."""
    make = RequestMaker(BLOCK_SIZE, 8)
    pool = engine.scheduler.manager.pool
    requests = [make(request_of(number, 0, prompt=4, output=4)) for number in range(waiting)]
    for request in requests:
        engine.scheduler.add_request(request)
    blocks = pool.get_new_blocks(held)
    yield
    pool.free_blocks(blocks)
    for request in requests:
        engine.scheduler.abort_request(request.request_id)


@pytest.mark.parametrize("size", [1, 2, 5, 9])
@pytest.mark.parametrize("words", [WORDS, ["queue:1"], ["kv:1"], ["prefix:1", "kv:1", "queue:1"]])
@pytest.mark.parametrize("policy", ["load", "estimated"])
def test_the_router_chooses_as_the_simulated_one(policy: Any, words: list[str], size: int) -> None:
    """From the same loads, prompts and failures."""
    rng = random.Random(f"{policy} {words} {size}")
    config = RouterConfig(policy=policy, routing_weights=words)
    urls = [f"http://127.0.0.1:{8000 + number}" for number in range(size)]
    servers = backends_of({"regular": urls}, config)
    pool = BackendPool(servers, policy, capacity=30, weights=config.weights)
    for server in servers:
        server.problem = ""

    engines = [engine_of(NUM_BLOCKS, block_size=BLOCK_SIZE) for _ in range(size)]
    weights = FleetConfig(routing_policy=policy, routing_weights=words).weights
    router = Router(policy, RouterState(size, capacity=30, weights=weights))
    bodies: dict[str, Any] = {}
    simulated = PolicyRouter(
        router, engines, lambda request: prefix_names(bodies[request.request_id])
    )

    counts = [0] * size
    for number in range(200):
        if rng.random() < 0.1:
            replica = rng.randrange(size)
            servers[replica].problem = "" if servers[replica].problem else "is away"
            servers[replica].on_change()
            simulated.set_available(replica, servers[replica].is_healthy)
        story = rng.choice("abcd") * PIECE_BYTES
        body = {"prompt": story * rng.randrange(9) + str(rng.randrange(3)) * PIECE_BYTES}
        request = request_of(number, 0, prompt=4, output=4)
        bodies[request.request_id] = body
        with contextlib.ExitStack() as stack:
            for replica, (server, engine) in enumerate(zip(servers, engines, strict=True)):
                waiting, held = rng.randrange(4), rng.randrange(NUM_BLOCKS)
                stack.enter_context(in_state(engine, waiting, held))
                simulated.set_load(replica, engine, now=number)
                server.num_waiting = waiting
                server.kv_percent = round(100 * engine.scheduler.manager.pool.usage)
                server.num_running = rng.randrange(9)  # which weights do not look at
            chosen = pool.choose(body)
            if not simulated.available:
                assert chosen is None
                continue
            expected = simulated.choose(request, number)
            assert chosen is servers[expected]
            counts[expected] += 1
    assert sum(count > 0 for count in counts) > size / 2, "several servers are chosen"


# ---------------------------------------------------------------- what servers report


def metrics_of(*engines: EngineStats, prefix: Any = "vllm") -> bytes:
    """What a server with these engines answers at /metrics."""
    stats = EngineStats.together(list(engines)) if len(engines) > 1 else engines[0]
    engine = SimpleNamespace(
        name='a "model" {of} mine',
        config=EngineConfig("tiny", data_parallel_size=len(engines)),
        limits=SimpleNamespace(max_model_len=256),
        trace_settings=[],
        stats=stats,
    )
    return bytes(Metrics(engine, prefix).response().body)  # type: ignore[arg-type]


VLLM = b"""# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 1.25e-01
"""
BUSY = EngineStats(3, 4, num_swapped=2, kv_cache_usage=0.58)


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (metrics_of(EngineStats()), (0, 0)),
        (metrics_of(BUSY), (6, 58)),
        (metrics_of(BUSY, prefix="nanovllm"), (6, 58)),
        (metrics_of(BUSY, EngineStats(1, 1, kv_cache_usage=0.1)), (7, 34)),
        (VLLM, (7, 12)),
    ],
)
async def test_the_load_is_what_the_server_reports(text: bytes, load: tuple[int, int]) -> None:
    async with fleet_of(
        [],
        [reporting(lambda: text)],
        policy="load",
        routing_weights=WORDS,
        health_check_interval=60.0,
    ) as fleet:
        (server,) = fleet.backends
        assert (server.num_waiting, server.kv_percent) == load


def reporting(text: Callable[[], bytes], answer: bytes = b"{}", status: int = 200) -> FakeServer:
    """A server that reports a load at /metrics."""

    async def act(exchange: Any) -> None:
        if exchange.path == "/metrics":
            await exchange.answer(text(), status)
        else:
            await exchange.answer(answer)

    return FakeServer(act)


async def test_requests_go_where_fewer_wait_as_soon_as_it_is_known() -> None:
    waiting = {"a": 0, "b": 5}

    def of(name: str) -> FakeServer:
        return reporting(lambda: metrics_of(EngineStats(0, waiting[name])), name.encode())

    async with fleet_of(
        [],
        [of("a"), of("b")],
        policy="load",
        routing_weights="queue:1",
        metrics_interval=0.01,
        health_check_interval=60.0,
    ) as fleet:
        assert [(await fleet.complete()).text for _ in range(4)] == ["a"] * 4
        waiting.update(a=6)
        await until(lambda: fleet.backends[0].num_waiting == 6)
        assert [(await fleet.complete()).text for _ in range(4)] == ["b"] * 4


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"", 404),
        (metrics_of(BUSY), 500),
        (b"vllm:num_requests_waiting 3.0\n", 200),
        (VLLM.replace(b"7.0", b"NaN"), 200),
    ],
)
async def test_a_server_without_a_load_gets_no_requests(text: bytes, status: int) -> None:
    silent = reporting(lambda: text, status=status)
    options: dict[str, Any] = {"policy": "load", "routing_weights": "queue:1", "num_unhealthy": 1}
    async with fleet_of([], [silent, reporting(lambda: VLLM, b"b")], **options) as fleet:
        assert [(await fleet.complete()).text for _ in range(3)] == ["b"] * 3
        assert f"answers GET /metrics with {status}" in fleet.backends[0].problem
        assert "which --routing-weights need" in fleet.backends[0].problem


async def test_a_load_that_cannot_be_read_any_more_is_found_by_the_health_check() -> None:
    text = [VLLM]
    async with fleet_of(
        [],
        [reporting(lambda: text[0])],
        policy="load",
        routing_weights="queue:1",
        metrics_interval=0.01,
        health_check_interval=60.0,
    ) as fleet:
        (server,) = fleet.backends
        text[0] = b"nothing"
        await until(lambda: not server.is_healthy)
        assert server.num_waiting == 7, "as it was"
        assert not server.num_running, "the router's own requests are no load"


# ---------------------------------------------------------------- with engines


@pytest.fixture(scope="module")
def servers(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServerProcess]]:
    """Two servers whose KV pools are small."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                ServerProcess(
                    tiny_model,
                    tmp_path_factory.mktemp("server"),
                    *("--num-kv-blocks", "64", "--max-num-seqs", "2"),
                )
            )
            for _ in range(2)
        ]


@pytest.mark.slow
def test_two_servers_with_engines(servers: list[ServerProcess], tmp_path: pathlib.Path) -> None:
    """A story goes to the server that has its beginning, unless this one is busy."""
    first, second = servers
    words = (
        *("--worker-urls", first.url, second.url),
        *("--policy", "prefix_aware", "--metrics-interval", "0.05"),
        *("--routing-weights", "prefix:1", "kv:1", "queue:1"),
    )
    # The longest prompt has fewer letters than a piece has bytes, but each of these takes two.
    story = "\n" * (PIECE_BYTES // 2)

    def served() -> list[float]:
        return [server.metrics()["prompt_tokens_total"] for server in servers]

    def await_look(server: ServerProcess) -> None:
        """Wait until the router knows the load of now: one look may be on its way."""
        num_looks = server.text.count("GET /metrics")
        wait_until(lambda: server.text.count("GET /metrics") > num_looks + 2)

    with RouterProcess(tmp_path, *words) as router:
        for turn in range(4):
            router.complete(prompt=f"{story}{turn}", max_tokens=2)
            for server in servers:
                await_look(server)
        before = served()
        assert sorted(before)[0] == 0, "the longest prefix wins while both are idle"
        busy = servers[before.index(max(before))]
        idle = second if busy is first else first
        # Past the router: two run, which takes memory, and the others wait.
        with kept_busy(busy, 20, prompt="x" * 100, max_tokens=150, ignore_eos=True):
            wait_until(lambda: busy.metrics()["num_requests_waiting"] > 10)
            await_look(busy)
            num_tokens = idle.metrics()["prompt_tokens_total"]
            router.complete(prompt=story, max_tokens=1)
            assert idle.metrics()["prompt_tokens_total"] > num_tokens
        wait_until(busy.is_idle)
        assert router.router_metrics()["worker_health"] == 2, router.text
