"""Prefill and decode in two engines, rule by rule, without ranks: what is asked for, what is
pushed, and what is taken over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ScheduledRequest
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.kv_transfer.pd.consumer import ConsumerSide
from nanovllm.kv_transfer.pd.control import Prefill
from nanovllm.kv_transfer.pd.plan import Move
from nanovllm.kv_transfer.pd.producer import Order, ProducerSide
from nanovllm.kv_transfer.scheduling import KVTransfer

BLOCK = 4


def request(num_tokens: int, **params: Any) -> Request:
    made = Request(EngineRequest("a", list(range(num_tokens)), SamplingParams(max_tokens=8)))
    made.kv_transfer_params = params
    return made


# ---------------------------------------------------------------------------------------- take_over


def taken_over(
    num_tokens: int, num_computed: int, num_external: int, *invalid: int
) -> tuple[int, KVTransfer]:
    """How many tokens count as computed afterwards, and the scheduler's half of KV transfer. The
    request's table is 0, 1, 2, ..."""
    queues, manager, one = Queues(), KVCacheManager(9, BLOCK), request(num_tokens)
    queues.add(one)
    queues.move(one, RequestStatus.WAITING_FOR_REMOTE_KVS)
    manager.allocate_slots(one, num_tokens)
    one.num_computed_tokens, one.num_external_tokens = num_computed, num_external
    manager.cache_blocks(one, 0)
    connector = object.__new__(KVConnectorScheduler)  # `take_over` does not call it
    transfer = KVTransfer(connector, queues, manager)
    transfer.num_hit_tokens = 100
    transfer.take_over(one, set(invalid))
    assert queues.running == [one] and not queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS], (
        "whatever has arrived, the request runs"
    )
    queues.check_invariants()
    return one.num_computed_tokens, transfer


def test_what_has_arrived_counts_as_computed() -> None:
    computed, transfer = taken_over(14, 4, 8)
    assert computed == 12, "4 were computed here, and 8 have arrived"
    assert transfer.num_hit_tokens == 108
    found = transfer.manager.get_computed_blocks(request(14))
    assert found == [0, 1, 2], "blocks that have arrived are in the prefix cache"


def test_the_last_token_is_computed_here() -> None:
    assert taken_over(14, 4, 10)[0] == 13, "its logits are needed"
    assert taken_over(12, 0, 12)[0] == 11


def test_nothing_behind_an_invalid_block_is_taken_over() -> None:
    assert taken_over(14, 4, 10, 2)[0] == 8, "tokens 8 to 11 are in block 2"
    assert taken_over(14, 4, 10, 3, 2)[0] == 8, "the first of them counts"
    computed, transfer = taken_over(14, 4, 10, 1)
    assert computed == 4 and transfer.num_hit_tokens == 100
    assert transfer.manager.get_computed_blocks(request(14)) == [0], (
        "no block that did not arrive may be found"
    )
    assert taken_over(14, 8, 6, 1)[0] == 8, "what was computed before stays computed"
    assert taken_over(14, 4, 8, 7)[0] == 12, "block 7 is not this request's"


# ------------------------------------------------------------------------------- ProducerSide._push


class Producer:
    """A producer with an order of 10 tokens, to be pushed into the consumer's blocks 70, 71, 72."""

    def __init__(self, num_computed_tokens: int = 0, push: bool = True) -> None:
        self.side: Any = object.__new__(ProducerSide)
        self.side.config = SimpleNamespace(block_size=BLOCK)
        self.side.metadata, self.side._in_flight = SimpleNamespace(pushes=[]), set()
        message = Prefill(
            "t", list(range(10)), num_computed_tokens, push=[70, 71, 72] if push else None
        )
        self.order = Order(SimpleNamespace(ranks=["its ranks"]), message)  # type: ignore[arg-type]

    def step(self, start: int, num_tokens: int) -> list[Move]:
        """What a step pushes that computes these tokens, in blocks 5, 6, 7."""
        self.side.metadata.pushes.clear()
        self.side._push(self.order, ScheduledRequest("t", start, num_tokens, [], []), [5, 6, 7])
        return list(self.side.metadata.pushes)


def test_each_step_pushes_what_it_computes() -> None:
    producer = Producer()
    assert producer.step(0, 6) == [Move("t", ["its ranks"], [5, 6], [70, 71])], (
        "blocks of tokens 0 to 5"
    )
    assert producer.order.num_pushed == 6 and producer.side._in_flight == {"t"}
    assert producer.step(6, 4) == [Move("t", ["its ranks"], [6, 7], [71, 72], True)], (
        "tokens 6 to 9: block 6 again, which is full now; and it is the last push"
    )
    assert producer.step(10, 1) == [], "a token that was sampled here is not part of the order"
    assert producer.order.num_pushed == 10


def test_the_first_push_has_what_was_cached_too() -> None:
    assert Producer().step(8, 2) == [Move("t", ["its ranks"], [5, 6, 7], [70, 71, 72], True)], (
        "tokens 0 to 7 were in the producer's cache, and the consumer needs them"
    )
    assert Producer(4).step(0, 10) == [Move("t", ["its ranks"], [6, 7], [71, 72], True)], (
        "the consumer has block 70"
    )
    late = Producer(8)
    assert late.step(0, 8) == [] and late.side._in_flight == set(), "the consumer has all of that"


def test_nothing_is_pushed_that_would_be_in_vain() -> None:
    producer = Producer(push=False)
    assert producer.step(0, 10) == [] and producer.order.num_pushed == 0, "this consumer will read"
    producer = Producer()
    producer.step(0, 4)
    producer.side._in_flight.clear()
    assert producer.step(4, 6) == [], "the ranks have stopped pushing it: part of it is lost"
    producer = Producer()
    producer.step(0, 8)
    assert producer.step(0, 8) == [], (
        "a preempted request computes its tokens again: they have been pushed"
    )


# ---------------------------------------------------------- ConsumerSide.get_num_new_matched_tokens


@pytest.fixture
def consumer() -> Any:
    side: Any = object.__new__(ConsumerSide)
    side._block_size, side.min_remote_tokens, side.address = BLOCK, BLOCK + 1, ("here", 1)
    side.declined = []
    side._decline = side.declined.append
    return side


# Prefill first.
FIRST = {"do_remote_prefill": True, "remote_request_id": "x", "remote_block_ids": [8, 9, 10]}
THERE = {"do_remote_prefill": True, "prefill_addresses": [("there", 2)]}  # decode first


@pytest.mark.parametrize("params", [FIRST, THERE], ids=["prefill first", "decode first"])
def test_the_rest_of_the_prompt_comes_from_the_producer(
    consumer: Any, params: dict[str, Any]
) -> None:
    assert consumer.get_num_new_matched_tokens(request(12, **params), 0) == (12, True)
    assert consumer.get_num_new_matched_tokens(request(12, **params), 4) == (8, True), (
        "the first 4 are in this cache"
    )
    assert consumer.get_num_new_matched_tokens(request(9, **params), 4) == (5, True)
    assert consumer.declined == []
    short = request(12, **params)
    assert consumer.get_num_new_matched_tokens(short, 8) == (0, True), (
        "4 tokens are computed here in less time"
    )
    assert consumer.declined == [short], "the producer need not hold anything for this request"
    grown = request(12, **params)
    grown.token_ids.append(5)
    assert consumer.get_num_new_matched_tokens(grown, 0) == (12, True), (
        "tokens behind the prompt are not there"
    )


def test_a_request_that_nobody_prefills_is_computed_here(consumer: Any) -> None:
    assert consumer.get_num_new_matched_tokens(request(12), 0) == (0, True)
    assert consumer.declined == [], "no producer has to be told"
    itself = request(12, do_remote_prefill=True, prefill_addresses=[("here", 1)])
    assert consumer.get_num_new_matched_tokens(itself, 0) == (0, True), (
        "an engine does not ask itself"
    )
    assert consumer.declined == [itself]


def test_a_table_that_does_not_fit_the_prompt_is_declined(consumer: Any) -> None:
    for num_tokens in (8, 13):
        one = request(num_tokens, **FIRST)
        assert consumer.get_num_new_matched_tokens(one, 0) == (0, True), (
            f"3 blocks are not those of {num_tokens} tokens"
        )
        assert consumer.declined.pop() is one
