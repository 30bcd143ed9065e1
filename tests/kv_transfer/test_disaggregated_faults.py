"""Whatever goes wrong between two engines: the client gets the right tokens or an error, by policy,
and every block comes back."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest

from nanovllm.assembly.engine import Engine
from nanovllm.core.runner import ModelRunner
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.aggregator import OutputAggregator
from nanovllm.kv_transfer.pd import control, disaggregated
from nanovllm.kv_transfer.pd.control import (
    Claim,
    Leases,
    Prefill,
    Prefilled,
    Release,
    credentials,
    encode,
)
from nanovllm.kv_transfer.transport import link
from nanovllm.kv_transfer.transport.handshake import Connection, Listener, PeerLost, connect
from nanovllm.kv_transfer.transport.link import Link
from nanovllm.kv_transfer.transport.local import LocalLink
from nanovllm.kv_transfer.transport.rank import Rank
from nanovllm.processes.activity import waiting_for_others
from tests.kv_engines import Child, Fleet, Gate, address, ask, decode_first, make_engine
from tests.oracle import make_checkpoint, reference_tokens
from tests.pairwise import in_turn
from tests.stand_ins import set_constants, set_failure

PROMPT = [(i * 37 + 11) % 300 + 5 for i in range(43)]
OTHER = [(i * 53 + 7) % 300 + 5 for i in range(30)]
POLICIES = ("recompute", "fail")
FAILED = "the KV from another engine or store did not arrive"
# By day each stage and each way meet one policy or side of the two, in turn, and by night the
# other, too. How far a request has come when something happens; "ordered": the producer has the
# order, and has not begun.
STAGES = [
    ("prefill first", "asked"),
    ("prefill first", "moving"),
    ("prefill first", "confirming"),
    ("pull", "asked"),
    ("pull", "ordered"),
    ("pull", "moving"),
    ("pull", "confirming"),
    ("push", "asked"),
    ("push", "ordered"),
    ("push", "moving"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[int]:
    return reference_tokens(checkpoint, PROMPT, 14)


@pytest.fixture
def engines(checkpoint: str) -> Iterator[Callable[..., Engine]]:
    """Makes engines, which are closed at the end, here or by the test."""
    made: list[Engine] = []

    def make(
        role: str, policy: str = "recompute", model: str = checkpoint, **options: Any
    ) -> Engine:
        extra = {
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": options.pop("settings", {}),
        }
        made.append(make_engine(model, role, extra, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def gate(engines: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Gate]]:
    """Makes gates, which are open at the end: before the engines are closed."""
    made: list[Gate] = []

    def make(owner: Any, name: str) -> Gate:
        made.append(Gate(monkeypatch, owner, name))
        return made[-1]

    yield make
    for one in made:
        one.open()


def prefilled(fleet: Fleet, producer: Engine, name: str = "there") -> dict[str, Any]:
    """Prefill first: what the producer says."""
    ask(producer, name, PROMPT, 1, {"do_remote_decode": True})
    fleet.complete(name)
    answer = fleet.finished(name)
    assert answer is not None and answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def reach(fleet: Fleet, way: str, stage: str, make_gate: Callable[..., Gate]) -> Gate | None:
    """Let a request "r" come to a stage, and stay there until the gate is opened (without one:
    until the producer is stepped)."""
    producer, consumer = fleet.engines
    params = prefilled(fleet, producer) if way == "prefill first" else decode_first(producer, way)
    gates = {
        "asked": (control, "connect"),
        "moving": (LocalLink, "read"),
        "confirming": (Leases, "release"),
    }
    gate = make_gate(*gates[stage]) if stage in gates else None
    ask(consumer, "r", PROMPT, params=params)
    if gate is not None:
        fleet.run_until(gate.entered.is_set)
    else:
        fleet.engines = [consumer]
        fleet.run_until(lambda: producer.has_work)
        fleet.engines = [producer, consumer]
    assert consumer.stats.num_receiving == 1
    return gate


def check(fleet: Fleet, policy: str, expected: list[int]) -> None:
    """The request "r" has got what the policy says."""
    tokens, last = fleet.complete("r"), fleet.finished("r")
    assert last is not None
    if policy == "recompute":
        assert tokens == expected and last.num_cached_tokens == 0
    else:
        assert tokens == [] and last.finish_reason == "error" and FAILED in last.error


# -------------------------------------------------------------------------------- the producer goes


@pytest.mark.parametrize(("way", "stage", "policy"), in_turn(STAGES, POLICIES))
def test_producer_leaves(
    way: str, stage: str, policy: str, engines: Any, expected: list[int], gate: Any
) -> None:
    producer, consumer = engines("kv_producer"), engines("kv_consumer", policy)
    fleet = Fleet([producer, consumer])
    ask(consumer, "plain", OTHER)
    opened = reach(fleet, way, stage, gate)
    fleet.engines = [consumer]
    closer = threading.Thread(target=producer.close)  # it waits for those who are moving something
    closer.start()
    if opened is not None:
        if stage == "asked":
            fleet.run_until(producer.peers.connector._listener._closed.is_set)
        else:
            fetches = consumer.peers.connector.fetches
            fleet.run_until(
                lambda: all(fetch.error for fetch in fetches.values() if fetch.request_id == "r")
            )
        opened.open()
    closer.join()
    check(fleet, policy, expected)
    fleet.complete("plain")
    fleet.settle()
    assert fleet.tokens("plain") == reference_tokens(consumer.config.model, OTHER, 14)
    if stage != "asked":
        # The next one finds nobody: and the consumer keeps no book of those who have gone.
        ask(
            consumer, "r2", PROMPT, params=decode_first([*producer.peers.connector.address], "pull")
        )
        fleet.run_until(lambda: fleet.finished("r2") is not None)
        fleet.settle()
    assert len(consumer.peers.connector._producers) <= 1
    assert not consumer.peers.connector.fetches


KILLED = [
    ("prefill first", (Leases, "release")),
    ("pull", (ModelRunner, "launch")),
    ("pull", (Leases, "release")),
    ("push", (ModelRunner, "launch")),
    ("push", (Rank, "push")),
]


@pytest.mark.parametrize(("way", "frozen_at"), KILLED)
def test_producer_is_killed(
    way: str, frozen_at: Any, checkpoint: str, engines: Any, expected: list[int]
) -> None:
    """SIGKILL, while it computes, offers blocks, or is asked whether all was right."""
    consumer, child = engines("kv_consumer"), Child(checkpoint, "kv_producer", frozen_at)
    fleet = Fleet([consumer])
    params = decode_first(child.address, way)
    if way == "prefill first":
        child.ask("there", PROMPT, 1, {"do_remote_decode": True})
        params = child.answer().kv_transfer_params
    ask(consumer, "r", PROMPT, params=params)
    fleet.run_until(lambda: child.is_frozen)
    assert fleet.finished("r") is None
    child.kill()
    check(fleet, "recompute", expected)
    fleet.settle()


@pytest.mark.parametrize(
    ("owner", "name", "policy"), in_turn([(Rank, "push"), (Link, "ask")], POLICIES)
)
def test_producer_stops_while_it_pushes(
    owner: type, name: str, policy: str, checkpoint: str, engines: Any, expected: list[int]
) -> None:
    """SIGSTOP: the consumer does not wait for ever, and gets its blocks back at once: no other
    process writes to them."""
    consumer = engines("kv_consumer", policy, settings={"prefill_timeout": 1.0, "timeout": 1.0})
    child, fleet = Child(checkpoint, "kv_producer", (owner, name)), Fleet([consumer])
    ask(consumer, "r", PROMPT, params=decode_first(child.address, "push"))
    fleet.run_until(lambda: child.is_frozen)
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGSTOP)
    check(fleet, policy, expected)
    fleet.settle()
    child.kill()
    fleet.settle()


def test_producer_stops_while_it_pushes_and_a_step_breaks_off(
    checkpoint: str, engines: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, and then a step of the consumer fails: it starts over at once."""
    consumer, child = engines("kv_consumer"), Child(checkpoint, "kv_producer", (Rank, "push"))
    fleet = Fleet([consumer])
    ask(consumer, "r", PROMPT, params=decode_first(child.address, "push"))
    fleet.run_until(lambda: child.is_frozen)
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        set_failure(patch, consumer.runner, "launch", RuntimeError("broke"))
        ask(consumer, "victim", OTHER)
        with pytest.raises(RuntimeError, match="broke"):
            fleet.run_until(lambda: False)
    assert not consumer.has_unfinished and not consumer.manager.held
    ask(consumer, "r", PROMPT)
    assert fleet.complete("r") == expected
    child.kill()
    fleet.settle()


@pytest.mark.parametrize("policy", POLICIES)
def test_producer_was_killed_before(
    policy: str, checkpoint: str, engines: Any, expected: list[int]
) -> None:
    consumer, child = engines("kv_consumer", policy), Child(checkpoint, "kv_producer")
    child.ask("there", PROMPT, 1, {"do_remote_decode": True})
    params = child.answer().kv_transfer_params
    child.kill()
    fleet = Fleet([consumer])
    ask(consumer, "r", PROMPT, params=params)
    check(fleet, policy, expected)
    fleet.settle()


# -------------------------------------------------------------------------------- the consumer goes


@pytest.mark.parametrize(
    ("way", "frozen_at"),
    [(way, (LocalLink, "read")) for way in ("prefill first", "pull", "push")]
    + [("pull", None), ("push", None)],
)
def test_consumer_is_killed(way: str, frozen_at: Any, checkpoint: str, engines: Any) -> None:
    """While it reads, or with an order that nobody has begun: what was held for it is free at
    once."""
    producer, child = engines("kv_producer"), Child(checkpoint, "kv_consumer", frozen_at)
    fleet = Fleet([producer])
    params = prefilled(fleet, producer) if way == "prefill first" else decode_first(producer, way)
    child.ask("r", PROMPT, params=params)
    if frozen_at is not None:
        fleet.run_until(lambda: child.is_frozen)
        assert producer.manager.pool.usage > 0, "a thread reads these blocks"
    else:
        wait_for(lambda: producer.has_work)
    child.kill()
    fleet.settle()
    assert not producer.peers.connector.orders


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """What another process or thread brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


def test_ranks_are_known_once_their_message_is_handled(engines: Any) -> None:
    """Whoever sees the ranks may rely on it that no message about them is still to come."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    ask(consumer, "r", PROMPT, params=decode_first(producer, "push"))
    connector = consumer.peers.connector
    while not connector.fetches:
        consumer.step()
    (fetch,) = connector.fetches.values()
    wait_for(lambda: not connector.mailbox.is_empty)
    assert fetch.producer.ranks is None
    consumer.step()
    assert fetch.producer.ranks is not None and connector.mailbox.is_empty


# -------------------------------------------------------------------------------- the client leaves


@pytest.mark.parametrize(("way", "stage"), STAGES)
def test_client_leaves(
    way: str,
    stage: str,
    engines: Any,
    expected: list[int],
    gate: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_constants(monkeypatch, link, GRACE_SECONDS=0.2)
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    fleet = Fleet([producer, consumer])
    opened = reach(fleet, way, stage, gate)
    assert consumer.abort_request("r") and not consumer.abort_request("r")
    with pytest.raises(ValueError, match="in use"):
        ask(consumer, "r", PROMPT)
    for _ in range(10):
        fleet.engines[1].step()
    if stage == "moving":
        # Its blocks are being written to, or may be: nobody gets them, and its id is not to be had.
        assert consumer.manager.pool.usage > 0
        with pytest.raises(ValueError, match="in use"):
            ask(consumer, "r", PROMPT)
    if opened is not None:
        opened.open()
    fleet.settle()
    assert fleet.finished("r") is None
    assert not consumer.peers.connector.fetches and not producer.peers.connector.orders
    ask(consumer, "r", PROMPT, params=decode_first(producer, "pull"))
    assert fleet.complete("r") == expected
    assert fleet.finished("r").num_cached_tokens == len(PROMPT) - 1
    fleet.settle()


def test_request_is_refused(engines: Any) -> None:
    """The consumer cannot take the request: the producer's blocks are free before their lease
    ends."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer", max_model_len=32)
    fleet = Fleet([producer, consumer])
    params = prefilled(fleet, producer)
    with pytest.raises(ValueError, match="a prompt must have 1 to 31 tokens"):
        ask(consumer, "r", PROMPT, params=params)
    fleet.run_until(lambda: producer.stats.num_held_requests == 0, seconds=20)
    fleet.settle()


def test_client_leaves_before_it_is_read(engines: Any) -> None:
    """Prefill first, and the request still waits for a seat when it ends: the producer's blocks are
    free before their lease ends."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer", max_num_seqs=1)
    fleet = Fleet([producer, consumer])
    params = prefilled(fleet, producer)
    ask(consumer, "first", OTHER, 80)
    ask(consumer, "r", PROMPT, params=params)
    fleet.step()
    assert consumer.stats.num_waiting == 1
    consumer.abort_request("r")
    fleet.run_until(lambda: producer.stats.num_held_requests == 0, seconds=20)
    consumer.abort_request("first")
    fleet.settle()


def test_no_consumer_gets_the_request(engines: Any) -> None:
    """Prefill first, and the client's request is refused or lost on its way to a consumer: the
    producer's blocks are free before their lease ends."""
    producer = engines("kv_producer")
    fleet = Fleet([producer])
    prefilled(fleet, producer)
    assert producer.stats.num_held_requests == 1
    producer.abort_request("there")
    fleet.run_until(lambda: producer.stats.num_held_requests == 0, seconds=20)
    fleet.settle()


def test_blocks_that_a_consumer_reads_stay_held(
    engines: Any, expected: list[int], gate: Any
) -> None:
    """The router believes that no consumer got the request; but one has claimed the blocks."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    fleet, opened = Fleet([producer, consumer]), gate(LocalLink, "read")
    ask(consumer, "r", PROMPT, params=prefilled(fleet, producer))
    fleet.run_until(opened.entered.is_set)
    fleet.run_until(lambda: producer.peers.connector.leases._leases["there"].readers != [None])
    producer.abort_request("there")
    fleet.step()
    assert producer.stats.num_held_requests == 1
    opened.open()
    assert (
        fleet.complete("r") == expected and fleet.finished("r").num_cached_tokens == len(PROMPT) - 1
    )
    fleet.settle()


# ----------------------------------------------------------------------- leases end, blocks run out


@pytest.mark.parametrize("policy", POLICIES)
def test_lease_has_ended(policy: str, engines: Any, expected: list[int]) -> None:
    producer = engines("kv_producer", settings={"lease_seconds": 0.01})
    fleet = Fleet([producer, engines("kv_consumer", policy)])
    params = prefilled(fleet, producer)
    fleet.run_until(lambda: producer.stats.num_held_requests == 0)
    ask(fleet.engines[1], "r", PROMPT, params=params)
    check(fleet, policy, expected)
    fleet.settle()


def test_lease_is_kept_for_a_reader(engines: Any, expected: list[int], gate: Any) -> None:
    """Its lease does not end with the time in which somebody has to claim it."""
    producer, consumer = (
        engines("kv_producer", settings={"lease_seconds": 0.2}),
        engines("kv_consumer"),
    )
    fleet, opened = Fleet([producer, consumer]), gate(LocalLink, "read")
    ask(consumer, "r", PROMPT, params=prefilled(fleet, producer))
    fleet.run_until(opened.entered.is_set)
    fleet.run_until(lambda: producer.peers.connector.leases._leases["there"].readers != [None])
    limit = time.monotonic() + 0.3
    fleet.run_until(lambda: time.monotonic() > limit)
    assert producer.stats.num_held_requests == 1
    opened.open()
    assert (
        fleet.complete("r") == expected and fleet.finished("r").num_cached_tokens == len(PROMPT) - 1
    )
    fleet.settle()


def test_reader_stops(
    engines: Any, expected: list[int], gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has claimed blocks, is there, and does not read: they are given up, and what it reads
    later counts for nothing."""
    set_constants(monkeypatch, control, CLAIM_SECONDS=0.2)
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    fleet, opened = Fleet([producer, consumer]), gate(LocalLink, "read")
    ask(consumer, "r", PROMPT, params=prefilled(fleet, producer))
    fleet.run_until(opened.entered.is_set)
    fleet.run_until(lambda: producer.stats.num_held_requests == 0)
    opened.open()
    assert fleet.complete("r") == expected and fleet.finished("r").num_cached_tokens == 0
    fleet.settle()


def test_other_content_than_believed(engines: Any) -> None:
    """A client gives what a producer has said of one prompt along with another prompt of the same
    length: what comes is not used, and least of all found by others."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer", enable_prefix_caching=True)
    fleet, prompt = Fleet([producer, consumer]), PROMPT[::-1]
    params = prefilled(fleet, producer)
    ask(consumer, "r", prompt, params=params)
    assert fleet.complete("r") == reference_tokens(consumer.config.model, prompt, 14)
    ask(
        consumer,
        "s",
        PROMPT,
        params=params | {"remote_block_ids": params["remote_block_ids"][::-1]},
    )
    assert fleet.complete("s") == reference_tokens(consumer.config.model, PROMPT, 14)
    assert consumer.stats.num_external_hit_tokens == 0
    ask(consumer, "t", PROMPT, params=params)  # and who is right may still read
    fleet.complete("t")
    fleet.settle()


@pytest.mark.parametrize("policy", POLICIES)
def test_producer_has_no_room(policy: str, engines: Any, expected: list[int], gate: Any) -> None:
    """A request that is being pushed has to give way to an urgent one: its blocks stay until nobody
    reads them."""
    producer = engines(
        "kv_producer",
        num_kv_blocks=11,
        max_model_len=88,
        long_prefill_token_threshold=1,
        scheduling_policy="priority",
    )
    consumer = engines("kv_consumer", policy)
    fleet, opened = Fleet([producer, consumer]), gate(LocalLink, "read")
    ask(consumer, "r", PROMPT, params=decode_first(producer, "push"))
    # The pushing thread gets there before many more steps are made.
    fleet.run_until(lambda: opened.entered.wait(0.1))
    # alone: there is no other request to preempt instead.
    ask(producer, "urgent", OTHER, 50, priority=-1)
    fleet.run_until(lambda: not producer.peers.connector.orders)
    opened.open()
    assert fleet.complete("urgent") == reference_tokens(consumer.config.model, OTHER, 50)
    check(fleet, policy, expected)
    fleet.settle()


def test_producer_pushes_what_it_can(engines: Any, expected: list[int]) -> None:
    """With a pool that holds one prompt at a time."""
    producer = engines(
        "kv_producer",
        num_kv_blocks=8,
        max_model_len=64,
        max_num_seqs=4,
        long_prefill_token_threshold=8,
    )
    fleet = Fleet([producer, engines("kv_consumer", enable_prefix_caching=False)])
    for i in range(4):
        ask(fleet.engines[1], f"r{i}", PROMPT, params=decode_first(producer, "push"))
    assert [fleet.complete(f"r{i}") for i in range(4)] == [expected] * 4
    fleet.settle()


# --------------------------------------------------------------------------------- who does not fit


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("difference", "word"),
    [
        ({"block_size": 4}, "block_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"model": "weights"}, "weights"),
        ({"model": "mistral"}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_engines(
    difference: dict[str, Any],
    word: str,
    policy: str,
    engines: Any,
    expected: list[int],
    tmp_path: Any,
) -> None:
    """Refused before any byte of KV, by the name of what differs."""
    if "model" in difference:
        variant = "llama" if word == "weights" else word.replace("model", "mistral")
        difference = {"model": str(make_checkpoint(tmp_path, variant, seed=1))}
    fleet = Fleet([engines("kv_producer", **difference), engines("kv_consumer", policy)])
    ask(fleet.engines[1], "r", PROMPT, params=decode_first(fleet.engines[0], "pull"))
    check(fleet, policy, expected)
    if policy == "fail":
        assert word in fleet.finished("r").error
    fleet.settle()


def test_other_secret(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_KV_SECRET", "one secret of so many letters")
    producer = engines("kv_producer")
    monkeypatch.setenv("NANOVLLM_KV_SECRET", "quite another one, as long")
    fleet = Fleet([producer, engines("kv_consumer", "fail")])
    ask(fleet.engines[1], "r", PROMPT, params=decode_first(producer, "pull"))
    fleet.complete("r")
    assert "NANOVLLM_KV_SECRET" in fleet.finished("r").error
    fleet.settle()


def test_prompt_is_too_long_for_the_producer(engines: Any) -> None:
    fleet = Fleet([engines("kv_producer", max_model_len=32), engines("kv_consumer", "fail")])
    ask(fleet.engines[1], "r", PROMPT, params=decode_first(fleet.engines[0], "push"))
    fleet.complete("r")
    assert "rejected the prompt: a prompt must have 1 to 31 tokens" in fleet.finished("r").error
    fleet.settle()


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_there(policy: str, engines: Any, expected: list[int]) -> None:
    fleet = Fleet([engines("kv_consumer", policy)])
    with closing(socket.socket()) as nobody:  # it keeps the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        ask(fleet.engines[0], "r", PROMPT, params=decode_first([*nobody.getsockname()], "pull"))
        check(fleet, policy, expected)
    # No name.
    ask(fleet.engines[0], "s", PROMPT[::-1], params=decode_first(["a..b" * 20, 80], "push"))
    fleet.complete("s")
    fleet.settle()


def test_who_is_there_says_nothing(engines: Any, expected: list[int]) -> None:
    """A stranger takes the connection and is silent: after `prefill_timeout`, that was it."""
    fleet = Fleet([engines("kv_consumer", settings={"prefill_timeout": 0.3})])
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        ask(fleet.engines[0], "r", PROMPT, params=decode_first([*server.getsockname()], "pull"))
        check(fleet, "recompute", expected)
        fleet.settle()


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"remote_port": 70000}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_block_ids": [-1]}, "remote_block_ids"),
        ({"remote_block_ids": "all"}, "remote_block_ids"),
        ({"remote_block_ids": [2**70]}, "remote_block_ids"),
        ({"prefill_addresses": [["127.0.0.1", 1 << 20]]}, "prefill_addresses"),
        ({"prefill_addresses": ["127.0.0.1:80"]}, "prefill_addresses"),
        ({"kv_direction": "sideways"}, "kv_direction"),
        ({"virtual_time": "now"}, "virtual_time"),
        ({"do_remote_prefill": True, "remote_request_id": "x"}, "remote_host"),
        ({"do_remote_decode": True}, "--kv-role producer"),
    ],
)
def test_nonsense_from_a_client(params: dict[str, Any], word: str, engines: Any) -> None:
    consumer = engines("kv_consumer")
    with pytest.raises(ValueError, match="kv_transfer_params") as caught:
        ask(consumer, "r", PROMPT, params=params)
    assert word in str(caught.value)
    assert not consumer.has_work


def test_wrong_number_of_blocks(engines: Any, expected: list[int]) -> None:
    """What cannot be the prompt's blocks is not read; the prompt is computed."""
    fleet = Fleet([engines("kv_producer"), engines("kv_consumer", "fail")])
    params = prefilled(fleet, fleet.engines[0])
    ask(fleet.engines[1], "r", PROMPT, params=params | {"remote_block_ids": [0, 1]})
    assert fleet.complete("r") == expected
    ask(fleet.engines[1], "s", PROMPT, params=params)
    fleet.complete("s")
    fleet.settle()


# ------------------------------------------------------------------------- peers that talk nonsense


@contextmanager
def stranger(producer: Engine, ranks: list[dict[str, Any]]) -> Iterator[Connection]:
    """Somebody who knows the secret, and pretends to be an engine with these ranks."""
    connection = connect(*address(producer), credentials(producer.peers.connector.identity, ranks))
    try:
        yield connection
    finally:
        connection.close()


def order(name: str, **changes: Any) -> Prefill:
    """An order that makes sense but for the changes."""
    return Prefill(**{"transfer_id": name, "token_ids": PROMPT, "num_computed_tokens": 0} | changes)


ORDERS = {
    "push to few": {"push": [0]},
    "push to many": {"push": list(range(99))},
    "unknown token": {"token_ids": [5, 99999]},
    "negative token": {"token_ids": [-1]},
    "nothing": {"token_ids": []},
    "half a block": {"num_computed_tokens": 5},
    "all computed": {"num_computed_tokens": len(PROMPT)},
    "more than there is": {"num_computed_tokens": 8000},
    "less than nothing": {"num_computed_tokens": -8},
    "too long": {"token_ids": PROMPT * 9},
}


def test_nonsense_from_a_consumer(engines: Any, expected: list[int]) -> None:
    """It is told so, and harms nobody else."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    fleet = Fleet([producer, consumer])
    with stranger(producer, []) as connection:
        for name, changes in ORDERS.items():
            connection.send(encode(order(name, **changes)))
        connection.send(encode(order("twice", push=None)))
        connection.send(encode(order("twice", push=None)))
        ask(consumer, "r", PROMPT, params=decode_first(producer, "pull"))
        assert fleet.complete("r") == expected
        answers = [
            msgspec.msgpack.decode(connection.receive(5), type=Prefilled)
            for _ in range(len(ORDERS) + 2)
        ]
        errors = {answer.transfer_id for answer in answers if answer.error}
        assert errors == {*ORDERS, "twice"}
        # It has no claim on what others hold.
        params = prefilled(fleet, producer)
        connection.send(encode(Claim("there", b"what it guesses")))
        connection.send(encode(Release("there")))
        connection.receive(5)
        assert producer.stats.num_held_requests == 2  # and what was computed for "twice"
        ask(consumer, "s", [*PROMPT[:-1], 9], params=params)
        fleet.complete("s")
        ask(consumer, "t", PROMPT, params=params)
        fleet.complete("t")
    fleet.settle()


@pytest.mark.parametrize("blocks", [[10**9] * 6, [-1] * 6, [0] * 6])
@pytest.mark.parametrize("ranks", ["real", "none", "nonsense"])
def test_push_to_nowhere(
    ranks: str,
    blocks: list[int],
    engines: Any,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that the consumer has not, or has not offered; ranks that are none. The order comes to
    its end, and gives all back."""
    set_constants(monkeypatch, link, GRACE_SECONDS=0.2)
    producer, consumer = (
        engines("kv_producer", long_prefill_token_threshold=8),
        engines("kv_consumer"),
    )
    fleet = Fleet([producer, consumer])
    places = {"real": consumer.peers.connector.ranks, "none": [], "nonsense": [{"kind": 7}, {}]}
    consumer.manager.check_invariants([])
    before = [cache.clone() for cache in consumer.runner.kv_caches]
    with stranger(producer, places[ranks]) as connection:
        connection.send(encode(order("push", push=blocks)))
        wait_for(lambda: producer.has_work)
        fleet.settle()
        assert not producer.peers.connector.orders
    assert all(
        cache.equal(old) for cache, old in zip(consumer.runner.kv_caches, before, strict=True)
    )
    ask(consumer, "r", PROMPT, params=decode_first(producer, "push"))
    assert fleet.complete("r") == expected
    fleet.settle()


@pytest.mark.parametrize(
    "noise", [b"garbage", b"", encode({"type": "release"}), encode([1] * 1000)]
)
def test_noise(noise: bytes, engines: Any, expected: list[int]) -> None:
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    fleet = Fleet([producer, consumer])
    with closing(socket.create_connection(tuple(address(producer)))) as plain:
        plain.sendall(noise * 100)
    with stranger(producer, []) as connection:
        connection.send(noise)
        with pytest.raises(PeerLost):
            connection.receive(5)
    ask(consumer, "r", PROMPT, params=decode_first(producer, "push"))
    assert fleet.complete("r") == expected
    fleet.settle()


LIES = [("garbage", []), ([], [b"garbage"]), ([{"host": 3}], ["few"]), ([], ["many"]), ([], [])]


@pytest.mark.parametrize(
    ("ranks", "answers", "way", "policy"),
    in_turn(LIES, ["pull", "push", "prefill first"], POLICIES),
)
def test_nonsense_from_a_producer(
    ranks: Any, answers: list[Any], way: str, policy: str, engines: Any, expected: list[int]
) -> None:
    """A producer that lies, or says what nobody understands, and then leaves."""
    consumer = engines("kv_consumer", policy)

    def lie(connection: Connection) -> None:
        asked = msgspec.msgpack.decode
        for answer in answers:
            if isinstance(answer, str):
                request = asked(connection.receive(5))
                blocks = [0] if answer == "few" else [10**9] * 6
                answer = encode(Prefilled(request.get("transfer_id", ""), blocks))
            connection.send(answer)
        if not answers:
            with suppress(PeerLost, TimeoutError):
                connection.receive(0.5)

    liar = Listener("127.0.0.1", 0, credentials(consumer.peers.connector.identity, ranks), lie)
    fleet = Fleet([consumer])
    params = decode_first([*liar.address], way)
    if way == "prefill first":
        host, port = liar.address
        params = {
            "do_remote_prefill": True,
            "remote_request_id": "p",
            "remote_host": host,
            "remote_port": port,
            "remote_block_ids": list(range(6)),
        }
    try:
        ask(consumer, "r", PROMPT, params=params)
        check(fleet, policy, expected)
        fleet.settle()
    finally:
        liar.close()


# -------------------------------------------------------------------------------- a step breaks off


@pytest.mark.parametrize(("way", "stage", "side"), in_turn(STAGES, ["producer", "consumer"]))
def test_a_step_breaks_off(
    way: str,
    stage: str,
    side: str,
    engines: Any,
    expected: list[int],
    gate: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All requests of this engine are lost; nothing else is, and nothing is left of them on either
    side."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    fleet = Fleet([producer, consumer])
    opened = reach(fleet, way, stage, gate)
    broken = producer if side == "producer" else consumer
    with monkeypatch.context() as patch:
        set_failure(patch, broken.runner, "launch", RuntimeError("broke"))
        ask(broken, "victim", OTHER)
        opener = threading.Timer(0.2, opened.open) if opened is not None else None
        if opener is not None:
            opener.start()  # meanwhile the engine waits until nobody touches its blocks
        fleet.engines = [broken]
        with pytest.raises(RuntimeError, match="broke"):
            fleet.run_until(lambda: False)
        if opener is not None:
            opener.join()
    fleet.engines = [producer, consumer]
    assert not broken.has_unfinished
    if side == "producer":
        tokens = fleet.complete("r")
        assert tokens == expected
    fleet.settle()
    assert not consumer.peers.connector.fetches and not producer.peers.connector.orders
    for way in ("push", "pull"):
        consumer.reset_prefix_cache()
        ask(consumer, "r", PROMPT, params=decode_first(producer, way))
        fleet.outputs.clear()
        assert fleet.complete("r") == expected
        assert fleet.finished("r").num_cached_tokens == len(PROMPT) - 1
        fleet.settle()


def fail(*_: Any) -> None:
    """A step that breaks."""
    raise RuntimeError("it broke")


@pytest.mark.parametrize(("way", "stage"), STAGES)
def test_caches_are_reset(
    way: str, stage: str, engines: Any, expected: list[int], gate: Any
) -> None:
    """Meanwhile: what is on its way is not touched by that."""
    producer, consumer = engines("kv_producer"), engines("kv_consumer", "fail")
    fleet = Fleet([producer, consumer])
    opened = reach(fleet, way, stage, gate)
    producer.reset_prefix_cache()
    consumer.reset_prefix_cache()
    if opened is not None:
        opened.open()
    assert fleet.complete("r") == expected
    assert fleet.finished("r").num_cached_tokens == len(PROMPT) - 1
    fleet.settle()


# --------------------------------------------------------------------- two that wait for each other


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["pull", "push"])
def test_two_engines_wait_for_each_other(
    way: str, policy: str, engines: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of each is full of blocks that the other is to fill, and can only fill with blocks
    of its own."""
    set_constants(monkeypatch, disaggregated, DEADLOCK_SECONDS=0.2)
    both = [
        engines("kv_both", policy, num_kv_blocks=16, enable_prefix_caching=False) for _ in range(2)
    ]
    fleet = Fleet(both)
    for i, engine in enumerate(both):
        for number in range(2):
            ask(engine, f"{i} {number}", PROMPT, params=decode_first(both[1 - i], way))
        engine.step()
        assert engine.stats.num_receiving == 2
    for i, _ in enumerate(both):
        for number in range(2):
            assert fleet.complete(f"{i} {number}") == expected
    fleet.settle()


# ---------------------------------------------------------------------------------- nothing is left


def test_a_consumer_that_does_not_read_is_no_hang() -> None:
    """The producer's thread says that it may wait when it answers one that is stopped."""
    waits: list[bool] = []

    class Stopped:
        def send(self, message: bytes) -> None:
            waits.append(waiting_for_others().depth > 0)
            raise PeerLost("it takes nothing")

        def close(self) -> None:
            """It is lost."""

    connection: Any = Stopped()
    control.Consumer(connection, []).tell(Prefilled("a", [1]))
    assert waits == [True]


def test_mailbox_wakes_only_for_mail() -> None:
    """Readable exactly as long as there is something to take: else an engine would sleep for ever,
    or never."""
    mailbox, taken = control.Mailbox(), []

    def put_many() -> None:
        for i in range(2000):
            mailbox.put(i)

    threads = [threading.Thread(target=put_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(taken) < 6000:
        assert select.select([mailbox], [], [], 10)[0], "mail, and nobody is told"
        taken += mailbox.take()
    for thread in threads:
        thread.join()
    assert not select.select([mailbox], [], [], 0)[0] and mailbox.is_empty and mailbox.take() == []
    assert sorted(taken) == sorted(list(range(2000)) * 3)
    mailbox.close()
    mailbox.put("late")
    mailbox.close()


def test_several_ranks_tell_of_many_transfers() -> None:
    """Each transfer is told once, with what either rank says of it, and is forgotten then."""
    aggregator = OutputAggregator()
    empty = pickle.dumps(vars(aggregator))
    for i in range(100):
        sent, received = {f"s{i}"}, {f"r{i}"}
        first = KVConnectorOutput(sent, received, {f"r{i}": {1}}, reasons={f"r{i}": "torn"})
        assert not aggregator.add([first, KVConnectorOutput()])
        assert aggregator.add(
            [KVConnectorOutput(), KVConnectorOutput(sent, received, {f"r{i}": {2}})]
        ) == KVConnectorOutput(sent, received, {f"r{i}": {1, 2}}, reasons={f"r{i}": "torn"})
    assert pickle.dumps(vars(aggregator)) == empty


@pytest.mark.parametrize("rounds", [5, pytest.param(18, marks=pytest.mark.nightly)])
def test_nothing_grows(
    rounds: int, engines: Any, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds of requests that come, are aborted, find nobody; producers that come and go."""
    caplog.set_level(logging.ERROR)
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    fleet = Fleet([producer, consumer])

    def one_round() -> None:
        passing = make_engine(consumer.config.model, "kv_producer")
        fleet.engines = [producer, consumer, passing]
        for i, way in enumerate(("push", "pull")):
            ask(consumer, f"stays{i}", PROMPT, params=decode_first(producer, way))
            ask(consumer, f"goes{i}", PROMPT, params=decode_first(passing, way))
            ask(consumer, f"aborted{i}", PROMPT[i:], params=decode_first(producer, way))
        for _ in range(3):
            fleet.step()
        for i in range(2):
            consumer.abort_request(f"aborted{i}")
            assert fleet.complete(f"stays{i}") == expected
            assert fleet.complete(f"goes{i}") == expected
        fleet.settle()
        passing.close()
        fleet.engines = [producer, consumer]
        fleet.outputs.clear()
        consumer.reset_prefix_cache()
        producer.reset_prefix_cache()

    def size() -> tuple[int, int]:
        gc.collect()  # an engine is full of cycles
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    one_round()
    one_round()
    before = size()
    for _ in range(rounds):
        one_round()
    # A connection's threads see a moment later that it has ended.
    wait_for(lambda: all(now <= then for now, then in zip(size(), before, strict=True)))
    assert len(consumer.peers.connector._producers) <= 3
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
