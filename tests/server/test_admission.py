"""Which requests come in: the places of those that wait, and each key's share of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from nanovllm.data.outputs import EngineStats
from nanovllm.engine.errors import EngineDeadError
from nanovllm.server.access import Access
from nanovllm.server.admission import Admission, current_key
from nanovllm.server.app import add_generation_routes, add_token_routes
from nanovllm.server.chat import ChatEndpoint
from nanovllm.server.completions import CompletionEndpoint
from nanovllm.server.errors import APIError, install_error_handlers
from nanovllm.server.generation import Endpoint
from nanovllm.server.middleware import Guard
from nanovllm.text.prompts import EngineLimits

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


class SlowTokenizer:
    """Renders no chat, and encodes no text if `encodes` is False, until `go_on` is called."""

    def __init__(self, encodes: bool) -> None:
        self.chat_templates: dict[str, str] = {}
        self.rendering = threading.Event()
        self.encoding = asyncio.Event()
        if encodes:
            self.encoding.set()
        self.threads: set[str] = set()

    def apply_chat_template(self, **arguments: Any) -> str:
        self.threads.add(threading.current_thread().name)
        assert self.rendering.wait(120)
        return "text"

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        await asyncio.wait_for(self.encoding.wait(), 120)
        return [3]

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        raise NotImplementedError("no test asks for them")

    def go_on(self) -> None:
        self.rendering.set()
        self.encoding.set()


async def refuse(*arguments: Any) -> None:
    raise EngineDeadError("the request has come in, and that is all that matters here")


def doors(engine: Any, tokenizer: SlowTokenizer, num_keys: int = 1) -> httpx.AsyncClient:
    """The routes that take chats and prompts. What comes in ends with 200 or 503."""
    engine.stats = EngineStats()
    engine.config.max_num_seqs = 8
    engine.limits = EngineLimits(max_model_len=256, max_request_tokens=256, vocab_size=320)
    engine.tokenizer = tokenizer
    engine.encode = tokenizer.encode
    engine.add_request = refuse
    app = FastAPI()
    install_error_handlers(app)
    admission = Admission(engine, num_keys)
    add_generation_routes(app, ChatEndpoint(admission), CompletionEndpoint(admission))
    add_token_routes(app, Endpoint(admission))
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120)


async def until_answered(number: int, requests: list[asyncio.Task[httpx.Response]]) -> None:
    async with asyncio.timeout(30):
        while sum(each.done() for each in requests) < number:
            await asyncio.sleep(0.01)


CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello"}), ("/tokenize", CHAT)],
)
async def test_all_doors_count_the_same_places(path: str, body: Any) -> None:
    """What the engine can run at once need not wait: eight of nine come in, and none waits."""
    tokenizer = SlowTokenizer(encodes=False)
    async with doors(busy_engine(0), tokenizer) as client:
        coming = []
        for _ in range(9):
            coming.append(asyncio.create_task(client.post(path, json=body)))
            await asyncio.sleep(0.01)  # until it is there
        await until_answered(1, coming)
        tokenizer.go_on()
        statuses = Counter([(await each).status_code for each in coming])
    assert statuses == {429: 1, 200 if path == "/tokenize" else 503: 8}


async def test_a_slow_template_holds_up_only_chats() -> None:
    """While many chats wait, texts come in, and the threads that prepare long prompts are free;
    more chats than may wait are refused."""
    tokenizer = SlowTokenizer(encodes=True)
    async with doors(busy_engine(42), tokenizer) as client:
        paths = ["/tokenize", "/v1/chat/completions"] * 30
        chats = [asyncio.create_task(client.post(path, json=CHAT)) for path in paths]
        try:
            await until_answered(10, chats)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 30) == "free"
            text = await client.post("/tokenize", json={"prompt": "hello"})
            assert text.json()["tokens"] == [3]
        finally:
            tokenizer.go_on()
        answers = [await each for each in chats]
    statuses = Counter(each.status_code for each in answers)
    assert statuses[429] == 10 and statuses[200] + statuses[503] == 50
    refused = next(each for each in answers if each.status_code == 429).json()["error"]["message"]
    assert refused == "too many requests are already waiting (--max-num-waiting 42)"
    assert len(tokenizer.threads) == 1


async def test_one_keys_slow_chats_leave_the_places_of_another(keys: Any) -> None:
    tokenizer = SlowTokenizer(encodes=True)
    engine = busy_engine(16)
    async with doors(engine, tokenizer, num_keys=2) as client:
        engine.config.max_num_seqs = 1
        chats = {}
        for key, number in ((b"one", 20), (b"two", 9)):
            keys(key)
            chats[key] = [
                asyncio.create_task(client.post("/tokenize", json=CHAT)) for _ in range(number)
            ]
        await until_answered(13, [*chats[b"one"], *chats[b"two"]])
        tokenizer.go_on()
        for key, num_refused in ((b"one", 12), (b"two", 1)):
            statuses = Counter([(await each).status_code for each in chats[key]])
            assert statuses == {200: 8, 429: num_refused}, key


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
