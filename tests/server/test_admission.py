"""Which requests come in: the places of those that wait, and each key's share of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.data.outputs import EngineStats
from nanovllm.server.access import Access
from nanovllm.server.admission import Admission, current_key
from nanovllm.server.errors import APIError
from nanovllm.server.middleware import Guard

from .test_server_guard import never_called, post_scope


def busy_engine(max_num_waiting: int, **stats: Any) -> Any:
    """An engine with one place, which is taken."""
    return SimpleNamespace(
        config=SimpleNamespace(
            max_num_waiting=max_num_waiting, max_num_seqs=1, data_parallel_size=1
        ),
        client=SimpleNamespace(num_in_flight=0),
        num_requests=1,
        stats=EngineStats(num_running=1, **stats),
    )


def request(num_sequences: int = 1) -> Any:
    return SimpleNamespace(is_waiting=True, completions=dict.fromkeys(range(num_sequences)))


def has_room(admission: Admission, num_sequences: int, reason: str) -> bool:
    try:
        with admission.place(num_sequences):
            return True
    except APIError as error:
        assert error.status_code == 429 and reason in error.detail
        return False


@pytest.fixture
def keys() -> Iterator[Any]:
    """Makes a key that of the current request."""
    before = current_key.get()
    yield current_key.set
    current_key.set(before)


def test_without_keys_all_share_the_places() -> None:
    admission = Admission(busy_engine(2))
    reason = "too many requests are already waiting (--max-num-waiting 2)"
    assert has_room(admission, 2, reason) and not has_room(admission, 3, reason)
    with admission.place(1):
        assert has_room(admission, 1, reason) and not has_room(admission, 2, reason)
    admission.engine.client.num_in_flight = 2
    assert not has_room(admission, 1, reason)


def test_a_place_is_free_again_after_an_error() -> None:
    admission = Admission(busy_engine(1))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.place(1):
            raise ZeroDivisionError
    assert has_room(admission, 1, "")


def test_new_sequences_stand_behind_those_that_wait() -> None:
    """A place that has just become free belongs to one of them."""
    engine = busy_engine(9)
    engine.config.max_num_seqs = 4
    admission = Admission(engine)
    assert [admission.num_waiting_with(n) for n in (1, 3, 4)] == [0, 0, 1]
    engine.stats = EngineStats(num_running=1, num_waiting=1)
    assert admission.num_waiting_with(1) == 2
    engine.stats = EngineStats(num_running=1, num_swapped=2)
    assert admission.num_waiting_with(1) == 3
    engine.num_requests = 0
    assert admission.num_waiting_with(100) == 0, "an idle engine takes any request"


def test_one_key_cannot_take_the_places_of_another(keys: Any) -> None:
    engine = busy_engine(9)
    admission = Admission(engine, num_keys=3)
    reason = (
        "this API key are already waiting: at most 3 (--max-num-waiting 9, divided among 3 keys"
    )
    requests = [request() for _ in range(3)]
    keys(b"one")
    for each in requests:
        with admission.place(1) as streams:
            streams.append(each)
    assert not has_room(admission, 1, reason)
    keys(b"two")
    assert has_room(admission, 3, reason) and not has_room(admission, 4, reason)
    keys(b"one")
    requests[0].is_waiting = False  # it has its first token
    assert has_room(admission, 1, reason) and not has_room(admission, 2, reason)
    with admission.place(1):  # which is prepared in a thread, perhaps
        assert not has_room(admission, 1, reason)
        keys(b"two")
        assert has_room(admission, 3, reason), "another key's request takes no place of this one"
        keys(b"one")
    assert has_room(admission, 1, reason)
    engine.config.max_num_seqs = 200
    assert has_room(admission, 100, reason), "what can run at once need not wait"


def test_all_sequences_of_a_request_wait(keys: Any) -> None:
    admission = Admission(busy_engine(8), num_keys=2)
    keys(b"one")
    with admission.place(3) as streams:
        streams.append(request(3))
    assert admission.num_waiting_of(b"one") == 3
    assert has_room(admission, 1, "at most 4") and not has_room(admission, 2, "at most 4")


async def test_the_guard_notes_the_key_of_each_request() -> None:
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current_key.get())

    guard = Guard(app, Access(("a", "b")))
    for key in ("a", "b", "a"):
        scope = post_scope("/x", (b"authorization", b"Bearer " + key.encode()))
        await asyncio.create_task(guard(scope, never_called, never_called))
    assert seen[0] == seen[2] != seen[1] and b"" not in seen
    assert current_key.get() == b"", "it is noted for the request alone"
