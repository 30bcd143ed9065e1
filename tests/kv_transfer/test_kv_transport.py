"""Transports between processes: what arrives where, what is refused, and what happens when somebody
dies, lies or is silent."""

from __future__ import annotations

import importlib.util
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import Raw, structs

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport import link
from nanovllm.kv_transfer.transport.connection import PeerLost
from nanovllm.kv_transfer.transport.handshake import Credentials, connect
from nanovllm.kv_transfer.transport.messages import (
    Answer,
    Fetch,
    GiveUp,
    Hello,
    Moved,
    Push,
    Refused,
    decode,
    decode_address,
    decode_hello,
    encode,
)
from nanovllm.kv_transfer.transport.transfers import Ended
from tests.compiled import needs_compiled
from tests.kv_ranks import SECRET, Rank, RemoteEngine, layouts, proxy
from tests.pairwise import in_turn
from tests.stand_ins import set_constants

SOURCE, TARGET = 1, 2  # salts
# Engines that differ in every way that is allowed: of the source and of the target.
SHAPES: dict[str, tuple[list[KVLayout], list[KVLayout]]] = {
    "tp 1 to 2": (layouts(), layouts(tp=2, num_blocks=9)),
    "tp 2 to 1": (layouts(tp=2), layouts()),
    "tp 2 to 3": (layouts(tp=2, num_kv_heads=6), layouts(tp=3, num_kv_heads=6)),
    "tp 4 to 1, replicated": (layouts(tp=4), layouts()),
    "tp 1 to 4, replicated": (layouts(), layouts(tp=4)),
    "pp 2 to 1": (layouts(pp=2, num_layers=3), layouts(num_layers=3)),
    "pp 1 to 2, tp 2 to 1": (layouts(tp=2, dtype="bfloat16"), layouts(pp=2, dtype="bfloat16")),
    "latent, tp 2 to pp 2": (layouts(tp=2, num_kv_heads=0), layouts(pp=2, num_kv_heads=0)),
}
LOCAL, REMOTE = [7, 0, 3], [2, 8, 5]  # blocks
KINDS = ["local", "tcp", "nixl"]
# After each of its deaths, a process with NIXL is started anew, which takes longest: by day after
# those in mid-transfer.
NIXL_BY_NIGHT = pytest.mark.parametrize(
    "kind", ["local", "tcp", pytest.param("nixl", marks=pytest.mark.nightly)], indirect=True
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Shared memory, TCP and NIXL."""
    if request.param == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed: pip install 'nanovllm[nixl]'")
    return request.param


class Engines:
    """Two processes that live on from test to test; those that died are replaced."""

    def __init__(self) -> None:
        self._processes: list[RemoteEngine] = []

    def open(
        self, kind: str, *shapes: list[KVLayout], **options: Any
    ) -> tuple[RemoteEngine, RemoteEngine]:
        self._processes = [engine for engine in self._processes if engine.process.is_alive()]
        while len(self._processes) < 2:
            self._processes.append(RemoteEngine())
        source, target = self._processes
        source.open(kind, shapes[0], SOURCE, **options)
        target.open(kind, shapes[-1], TARGET, **options)
        return source, target

    def close(self) -> None:
        for engine in self._processes:
            engine.stop()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


def ended_well(results: list[list[Ended]]) -> bool:
    return all(not end.error for ends in results for end in ends)


def right(engine: RemoteEngine, *args: Any) -> bool:
    wrong = engine.all("wrong_blocks", *args)
    assert not any(wrong), wrong
    return True


# ------------------------------------------------------------------------------------- what arrives


# By day each shape in one way and with one kind; what is common to all kinds says which bytes go
# where.
@pytest.mark.parametrize(("shape", "kind"), in_turn(SHAPES, KINDS), indirect=["kind"])
def test_blocks_are_read(engines, kind, shape):
    source, target = engines.open(kind, *SHAPES[shape])
    target.all("read", "one", source.addresses, LOCAL, REMOTE)
    assert ended_well(target.all("wait"))
    assert right(target, SOURCE, list(zip(REMOTE, LOCAL, strict=True)))
    assert right(source)


@pytest.mark.parametrize(("shape", "kind"), in_turn(SHAPES, KINDS[::-1]), indirect=["kind"])
def test_blocks_are_pushed(engines, kind, shape):
    source, target = engines.open(kind, *SHAPES[shape])
    target.all("expect", "one", source.addresses, LOCAL)
    source.all("push", "one", target.addresses, REMOTE, LOCAL)
    assert ended_well(target.all("wait"))
    assert ended_well(source.all("wait"))
    assert right(target, SOURCE, list(zip(REMOTE, LOCAL, strict=True)))
    assert right(source)


def test_many_at_once_in_both_directions(engines, kind):
    one, other = engines.open(kind, layouts(tp=2), layouts())
    for i in range(4):
        other.all("expect", f"push {i}", one.addresses, [6 + i])
        one.all("read", f"back {i}", other.addresses, [i], [i])
        other.all("read", f"read {i}", one.addresses, [i + 2], [i + 4])
        one.all("push", f"push {i}", other.addresses, [8 + i], [6 + i])
    assert ended_well(one.all("wait", 8))
    assert ended_well(other.all("wait", 8))
    pairs = [(i + 4, i + 2) for i in range(4)] + [(8 + i, 6 + i) for i in range(4)]
    assert right(other, SOURCE, pairs[4:] + pairs[:4])


def test_no_blocks_at_all(engines, kind):
    source, target = engines.open(kind, layouts(tp=2))
    target.all("read", "read", source.addresses, [], [])
    target.all("expect", "push", source.addresses, [])
    source.all("push", "push", target.addresses, [], [])
    assert ended_well(target.all("wait", 2)) and ended_well(source.all("wait"))
    assert right(target) and right(source)


def test_a_block_may_be_pushed_again_as_it_fills_up(engines, kind):
    source, target = engines.open(kind, layouts())
    target.all("expect", "push", source.addresses, [1, 2])
    for blocks in ([3], [3, 4]):
        for layer in (0, 1):
            source.all("push_layer", "push", target.addresses, layer, blocks, [1, 2][: len(blocks)])
    source.all("finish_push", "push", target.addresses)
    assert ended_well(target.all("wait")) and ended_well(source.all("wait"))
    assert right(target, SOURCE, [(3, 1), (4, 2)])


def test_a_push_may_be_ahead_of_what_the_engine_says(engines, kind):
    source, target = engines.open(kind, layouts())
    source.all("push", "push", target.addresses, [3], [1])
    target.all("expect", "push", source.addresses, [1])
    assert ended_well(target.all("wait")) and ended_well(source.all("wait"))
    assert right(target, SOURCE, [(3, 1)])


@needs_compiled
def test_memory_of_who_has_left_is_given_back(engines):
    source, target = engines.open("local", layouts())
    before = target.num_segments()
    target.all("read", "one", source.addresses, LOCAL, REMOTE)
    assert ended_well(target.all("wait"))
    assert target.num_segments() == before + 2  # a segment a layer
    source.close_transports()
    for _ in range(100):  # its thread looks once a second
        if target.num_segments() == before:
            break
        assert target.all("poll", 0.1) == [[]]
    assert target.num_segments() == before


def test_without_a_compiler_the_same_bytes_move(monkeypatch):
    from nanovllm.kv_transfer.transport import local

    monkeypatch.setattr(local, "_copy_function", lambda: None)
    one, other = two_ranks("local", layouts(num_kv_heads=6)[0], layouts(num_kv_heads=6)[0])
    assert not decode_hello(one.transport.credentials.hello).memory, "it moves by TCP"
    other.transport.read("one", [one.transport.address], LOCAL, REMOTE)
    assert other.wait()[0].error == ""
    assert other.wrong_blocks(SOURCE, list(zip(REMOTE, LOCAL, strict=True))) == []
    close(one, other)


# ---------------------------------------------------------------------------------- what is refused


def two_ranks(kind: str, source: KVLayout, target: KVLayout, **options: Any) -> tuple[Rank, Rank]:
    """In this process."""
    return Rank(kind, source, SOURCE, **options), Rank(kind, target, TARGET, **options)


def close(*ranks: Rank) -> None:
    for rank in ranks:
        rank.transport.close()


@pytest.fixture(autouse=True)
def no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a peer does wrong is no error of this process: a thread that has met one would say so
    there."""
    yield
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR
    ] == []


@pytest.fixture
def pair(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank]]:
    set_constants(monkeypatch, link, GRACE_SECONDS=0.1)
    ranks = two_ranks(kind, layouts()[0], layouts()[0], timeout=2.0)
    yield ranks
    close(*ranks)


def changed(address: Raw, **fields: object) -> Raw:
    """The address of a rank with other fields, which may be a lie."""
    return Raw(encode(structs.replace(decode_address(address), **fields)))


def place(address: Raw) -> tuple[str, int]:
    """The host and port of a rank."""
    found = decode_address(address)
    return found.host, found.port


def only(ended: list[Ended]) -> Ended:
    (end,) = ended
    return end


@pytest.mark.parametrize("block", [-1, 12, 1 << 62])
def test_blocks_that_the_peer_does_not_have(pair, block):
    source, target = pair
    target.transport.read("read", [source.transport.address], [1, 2], [3, block])
    source.transport.push("push", [target.transport.address], 0, [3, 4], [1, block])
    source.finish_push("push", [target.transport.address])
    end = only(target.wait())
    assert f"block {block} of a KV cache that has 12" in end.error
    assert "rejected" in only(source.wait()).error
    assert not target.wrong_blocks() and not source.wrong_blocks()


def test_what_the_caller_does_wrong_is_raised_at_once(pair):
    source, target = pair
    peers = [source.transport.address]
    for local, remote, message in [
        ([12], [0], "block 12"),
        ([1], [1, 2], "1 blocks of this rank, but 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            target.transport.read("x", peers, local, remote)
    target.transport.expect("z", peers, [1])
    with pytest.raises(ValueError, match="use a unique id"):
        target.transport.expect("z", peers, [1])
    assert target.transport.poll() == []


@pytest.mark.parametrize("peers", [[{}], [{"host": "127.0.0.1"}], ["nonsense"], []])
def test_addresses_that_are_none(pair, peers):
    _, target = pair
    encoded = [Raw(encode(peer)) for peer in peers]
    target.transport.read("read", encoded, [1], [1])
    target.transport.expect("expect", encoded, [2])
    ends = target.wait(2)
    assert [end.transfer_id for end in ends] == ["expect", "read"] and all(
        end.error for end in ends
    )


@pytest.mark.parametrize("field", ["block_size", "width", "num_kv_heads", "num_layers"])
def test_another_model_or_block_size_is_refused(kind, field):
    other = layouts(**{field: 4 * getattr(layouts()[0], field)})[0]
    source, target = two_ranks(kind, other, layouts()[0])
    target.transport.read("read", [source.transport.address], [1], [1])
    name = "head_dim" if field == "width" else field
    assert (
        f"{name} is {getattr(target.layout, field)} here and {getattr(other, field)} there"
        in only(target.wait()).error
    )
    # The same at the handshake: what an address says may be a lie.
    lie = changed(source.transport.address, layout=target.layout)
    target.transport.read("lie", [lie], [1], [1])
    assert f"{name} is" in only(target.wait()).error
    close(source, target)


def test_another_kind_of_transport_is_refused():
    pytest.importorskip("nixl_cu12")
    source, target = Rank("nixl", layouts()[0], SOURCE), Rank("local", layouts()[0], TARGET)
    target.transport.read("read", [source.transport.address], [1], [1])
    assert "kv_connector is 'local' here and 'nixl' there" in only(target.wait()).error
    close(source, target)


def test_who_does_not_know_the_secret_reads_nothing(kind):
    source, target = (
        Rank(kind, layouts()[0], salt, secret=b"%d" % salt * 20) for salt in (SOURCE, TARGET)
    )
    target.transport.read("read", [source.transport.address], [1], [1])
    end = only(target.wait())
    assert "secret" in end.error
    assert not target.wrong_blocks()
    close(source, target)


def test_a_restarted_peer_is_another_one(kind):
    source, target = two_ranks(kind, layouts()[0], layouts()[0])
    old = source.transport.address
    source.transport.close()
    again = Rank(kind, layouts()[0], SOURCE, port=decode_address(old).port)
    target.transport.read("read", [old], [1], [1])
    assert "another rank" in only(target.wait()).error
    target.transport.read("again", [again.transport.address], [1], [3])
    assert only(target.wait()).error == "" and not target.wrong_blocks(SOURCE, [(3, 1)])
    close(again, target)


def test_a_host_that_nobody_can_connect_to_is_refused():
    for host in ("0.0.0.0", "", "::"):
        with pytest.raises(ValueError, match="kv_ip"):
            from nanovllm.kv_transfer.transport.local import LocalTransport

            layout = layouts()[0]
            caches = {i: torch.zeros(layout.cache_shape) for i in layout.layers}
            LocalTransport(layout, caches, host, SECRET)


@pytest.mark.parametrize(
    "change",
    [
        lambda caches: {0: caches[0]},
        lambda caches: {**caches, 1: caches[1].to(torch.bfloat16)},
        lambda caches: {**caches, 1: caches[1][:-1]},
        lambda caches: {**caches, 1: caches[1].transpose(3, 4).contiguous().transpose(3, 4)},
    ],
)
def test_caches_that_the_layout_does_not_describe_are_refused(change):
    from nanovllm.kv_transfer.transport.local import LocalTransport

    layout = layouts()[0]
    caches = {i: torch.zeros(layout.cache_shape) for i in layout.layers}
    with pytest.raises(ValueError, match="cache"):
        LocalTransport(layout, change(caches), "127.0.0.1", SECRET)


class Guest:
    """Somebody who knows the secret and says what he likes.

    Args:
        rank: to whom.
        id: as whom he introduces himself.
    """

    def __init__(self, rank: Rank, id: str = "guest") -> None:
        transport = rank.transport
        address = decode_address(transport.address)
        hello = encode(Hello(id, rank.layout))
        credentials = Credentials(SECRET, transport.credentials.fingerprint, hello)
        self.connection = connect(address.host, address.port, credentials)

    def ask(self, message: Any) -> None:
        self.connection.send(encode(message))
        answer = decode(self.connection.receive(10))
        assert isinstance(answer, Answer)
        if answer.error:
            raise Refused(answer.error)


REFUSED = [
    Fetch(0, 2, 0, 2, [0, 12]),
    Fetch(0, 2, 0, 2, [-1]),
    Fetch(0, 3, 0, 2, [1]),
    Fetch(-1, 1, 0, 2, [1]),
    Fetch(1, 1, 0, 2, [1]),
    Fetch(0, 2, 0, 3, [1]),
    Fetch(0, 2, -1, 1, [1]),
    Fetch(0, 2, 0, 0, [1]),
    Push("never asked for", 0, 1, [1], [1]),
    Push("expected", 0, 1, [3], [1]),
    Push("expected", 0, 1, [-9], [1]),
    Push("expected", 0, 1, [1], [12]),
    Push("expected", 0, 1, [1], [-1]),
    Push("expected", 0, 1, [1], [1, 2]),
    Push("expected", 2, 3, [1], [1]),
    Push("expected", 0, 3, [1], [1]),
    Push("expected", 1, 1, [1], [1]),
    Push("expected", -1, 1, [1], [1]),
    Push("never asked for", 0, 1, [], [], True),
    GiveUp("never asked for", "for fun"),
]


@pytest.mark.parametrize(("message", "kind"), in_turn(REFUSED, KINDS), indirect=["kind"])
def test_requests_that_are_refused(pair, message):
    rank, other = pair
    guest = Guest(rank, other.transport.id)
    rank.transport.expect("expected", [other.transport.address], [1, 2])
    with pytest.raises(Refused):
        guest.ask(message)
    with pytest.raises(Refused, match="are missing"):  # it goes on
        guest.ask(Push("expected", 0, 1, [], [], True))
    assert not rank.wrong_blocks()
    guest.connection.close()


SENSELESS = [
    b"",
    b"\xc1",
    encode(Hello("x", layouts()[0])),
    encode(Moved()),
    encode(Answer()),
    b"\x81\xa4type\xa3xyz",
]


@pytest.mark.parametrize(("data", "kind"), in_turn(SENSELESS, KINDS), indirect=["kind"])
def test_requests_that_make_no_sense_end_the_connection_and_nothing_else(pair, data):
    rank, other = pair
    guest = Guest(rank)
    guest.connection.send(data)
    with pytest.raises(PeerLost):
        guest.connection.receive(10)
    other.transport.read("read", [rank.transport.address], [1], [3])
    assert only(other.wait()).error == ""


@pytest.mark.parametrize("size", [0, 255, 513, 1024])
def test_a_payload_of_another_length_is_not_written(size):
    rank, other = two_ranks("tcp", layouts()[0], layouts()[0])
    rank.transport.expect("expected", [other.transport.address], [1])
    guest = Guest(rank, other.transport.id)
    guest.connection.send(encode(Push("expected", 0, 1, [1], [2])))
    assert isinstance(decode(guest.connection.receive(10)), Fetch)
    with suppress(PeerLost):  # it may have closed the connection before all is sent
        guest.connection.send(encode(Answer()), b"x" * size)
    assert only(rank.wait()).error
    assert not rank.wrong_blocks()
    guest.connection.close()
    close(rank, other)


def test_who_says_that_all_is_written_but_has_not_is_found_out(pair):
    rank, other = pair
    rank.transport.expect("push", [other.transport.address], [1, 2])
    other.transport.push("push", [rank.transport.address], 0, [3, 4], [1, 2])
    other.transport.push("push", [rank.transport.address], 1, [3], [1])
    other.finish_push("push", [rank.transport.address])
    end = only(rank.wait())
    assert "blocks of layer 1 are missing" in end.error
    assert "blocks of layer 1 are missing" in only(other.wait()).error


# -------------------------------------------------------------------------------------- what breaks


@NIXL_BY_NIGHT
def test_the_owner_dies_before_a_read(engines, kind):
    source, target = engines.open(kind, layouts(tp=2), layouts())
    source.signal(signal.SIGKILL)
    target.all("read", "read", source.addresses, LOCAL, REMOTE)
    end = only(target.all("wait")[0])
    assert end.error
    assert right(target)


@NIXL_BY_NIGHT
def test_the_owner_dies_between_two_reads(engines, kind):
    source, target = engines.open(kind, layouts())
    target.all("read", "one", source.addresses, [1], [2])
    assert ended_well(target.all("wait"))
    source.signal(signal.SIGKILL)
    target.all("read", "two", source.addresses, LOCAL, REMOTE)
    assert only(target.all("wait")[0]).error


def test_the_owner_dies_during_a_read(engines, kind):
    """It is stopped, so that the read has certainly begun and not ended, and then killed. What is
    in memory already may still be read, where it is mapped."""
    source, target = engines.open(kind, layouts())
    source.signal(signal.SIGSTOP)
    target.all("read", "read", source.addresses, LOCAL, REMOTE)
    assert target.all("poll", 0.2) == [[]]
    source.signal(signal.SIGKILL)
    end = only(target.all("wait")[0])
    assert end.error
    assert right(target)


@NIXL_BY_NIGHT
def test_the_owner_dies_somewhere_in_large_reads(engines, kind):
    """Either all is there, or it is said that it is not; wherever it was."""
    shape = layouts(num_blocks=200, block_size=64, width=64)
    source, target = engines.open(kind, shape)
    blocks = list(range(100))
    for i in range(2):
        target.all(
            "read",
            f"{i}",
            source.addresses,
            blocks[50 * i : 50 * i + 50],
            blocks[50 * i : 50 * i + 50],
        )
    source.signal(signal.SIGKILL)
    ends = target.all("wait", 2)[0]
    good = [block for i in range(2) if not ends[i].error for block in range(50 * i, 50 * i + 50)]
    bad = set(blocks) - set(good)
    wrong = target.all("wrong_blocks", SOURCE, [(block, block) for block in good])[0]
    assert not [name for name in wrong if int(name.split()[-1]) not in bad]


def test_the_writer_dies_in_the_middle(engines, kind):
    source, target = engines.open(kind, layouts())
    target.all("expect", "push", source.addresses, [1, 2])
    source.all("push_layer", "push", target.addresses, 0, [3, 4], [1, 2])
    source.all("push_layer", "push", target.addresses, 1, [3], [1])
    # By the same thread: when it has come, so have those.
    source.all("read", "after", target.addresses, [1], [1])
    assert ended_well(source.all("wait"))
    assert target.all("poll") == [[]]
    source.signal(signal.SIGKILL)
    end = only(target.all("wait")[0])
    assert "gone" in end.error


def test_the_one_who_is_written_to_dies(engines, kind):
    source, target = engines.open(kind, layouts())
    target.all("expect", "push", source.addresses, [1])
    source.all("push_layer", "push", target.addresses, 0, [3], [1])
    target.signal(signal.SIGKILL)
    source.all("push_layer", "push", target.addresses, 1, [3], [1])
    source.all("finish_push", "push", target.addresses)
    end = only(source.all("wait")[0])
    assert end.error
    assert right(source)


@NIXL_BY_NIGHT
def test_one_of_two_writers_dies(engines, kind):
    """The other one is told that nobody wants its blocks any more."""
    source, target = engines.open(kind, layouts())
    second = Rank(kind, layouts(tp=2)[1], SOURCE)
    layout = decode_address(source.addresses[0]).layout
    first = changed(source.addresses[0], layout=replace(layout, tp_size=2))
    peers = [first, second.transport.address]
    source.open(kind, layouts(tp=2)[:1], SOURCE)
    peers[0] = source.addresses[0]
    target.all("expect", "push", peers, [1])
    for engine_all in (source.all, lambda name, *args: getattr(second, name)(*args)):
        engine_all("push_layer", "push", target.addresses, 0, [3], [1])
    source.all("read", "after", target.addresses, [2], [2])
    assert ended_well(source.all("wait"))
    source.signal(signal.SIGKILL)
    end = only(target.all("wait")[0])
    assert "gone" in end.error
    second.finish_push("push", target.addresses)
    assert "rejected" in only(second.wait()).error
    close(second)


def test_a_peer_that_is_silent(engines, kind):
    source, target = engines.open(kind, layouts(), timeout=1.0)
    source.signal(signal.SIGSTOP)
    try:
        target.all("read", "one", source.addresses, LOCAL, REMOTE)
        target.all("read", "two", source.addresses, [4], [4])
        ends = target.all("wait", 2)[0]
        assert all(end.error for end in ends)
    finally:
        source.signal(signal.SIGCONT)
    target.all("read", "again", source.addresses, LOCAL, REMOTE)
    assert ended_well(target.all("wait"))
    assert right(target, SOURCE, list(zip(REMOTE, LOCAL, strict=True)))


def test_a_writer_stops_before_it_sends(monkeypatch):
    source, target = two_ranks("tcp", layouts()[0], layouts()[0], timeout=1.0)
    opened = threading.Event()
    monkeypatch.setattr(source.transport, "content", lambda *arguments: opened.wait(60) and b"")
    target.transport.expect("push", [source.transport.address], [1, 2])
    source.transport.push("push", [target.transport.address], 0, [3, 4], [1, 2])
    end = only(target.wait())
    assert "silent" in end.error
    opened.set()
    source.transport.cancel("push")
    close(source, target)


def flip(position: int) -> Callable[[int, bytes], bytes]:
    def tamper(count: int, data: bytes) -> bytes:
        if not count <= position < count + len(data):
            return data
        changed = bytearray(data)
        changed[position - count] ^= 16
        return bytes(changed)

    return tamper


def cut(position: int) -> Callable[[int, bytes], bytes | None]:
    return lambda count, data: data if count + len(data) <= position else None


@pytest.mark.parametrize(
    ("position", "tamper", "kind"),
    in_turn([3, 30, 60, 100, 130, 400, 700, 1000, 2000], [flip, cut], KINDS),
    indirect=["kind"],
)
def test_what_is_changed_or_cut_on_its_way_does_not_count(kind, tamper, position):
    """Position by position: in the handshake, the fingerprint, the hello, the frames, the blocks.
    Where nothing but the way to the memory goes by this connection, it may come before any harm is
    done."""
    source, target = two_ranks(kind, layouts()[0], layouts()[0], timeout=2.0)
    address = source.transport.address
    with proxy(place(address), tamper(position)) as port:
        target.transport.read("read", [changed(address, port=port)], LOCAL, REMOTE)
        end = only(target.wait())
    if kind == "tcp" or position < 130:
        assert end.error
    if not end.error:
        assert not target.wrong_blocks(SOURCE, list(zip(REMOTE, LOCAL, strict=True)))
    target.transport.read("again", [address], LOCAL, REMOTE)
    assert only(target.wait()).error == ""
    assert not target.wrong_blocks(SOURCE, list(zip(REMOTE, LOCAL, strict=True)))
    close(source, target)


@pytest.mark.parametrize("position", [3, 130, 300, 420])
def test_a_push_that_loses_its_answers_fails_at_both_ends(kind, position):
    source, target = two_ranks(kind, layouts()[0], layouts()[0], timeout=0.3)
    address = target.transport.address
    target.transport.expect("push", [source.transport.address], [1, 2])
    with proxy(place(address), cut(position)) as port:
        source.push("push", [changed(address, port=port)], [3, 4], [1, 2])
        here = only(source.wait())
        if not (ended := target.transport.poll(0.3)):
            # The target has not heard of the source: its engine gives it up.
            target.transport.cancel("push")
            ended = target.wait()
        there = only(ended)
    if kind == "tcp":
        assert there.error and here.error
    assert bool(there.error) <= bool(here.error)  # who has written may know less, but never more
    close(source, target)


# --------------------------------------------------------------------------------------- cancelling


def test_a_read_that_cannot_go_on_is_cancelled(engines, kind):
    source, target = engines.open(kind, layouts(), timeout=1.0)
    source.signal(signal.SIGSTOP)
    try:
        target.all("read", "one", source.addresses, LOCAL, REMOTE)
        target.all("cancel", "one")
        end = only(target.all("wait")[0])
        assert end.error == "cancelled"
    finally:
        source.signal(signal.SIGCONT)


def test_who_expected_something_cancels(pair):
    source, target = pair
    target.transport.expect("push", [source.transport.address], [1, 2])
    source.transport.push("push", [target.transport.address], 0, [3, 4], [1, 2])
    source.transport.read("after", [target.transport.address], [9], [9])
    assert only(source.wait()).transfer_id == "after"
    target.transport.cancel("push")
    end = only(target.wait())
    assert end.error == "cancelled"
    source.transport.push("push", [target.transport.address], 1, [3, 4], [1, 2])
    source.finish_push("push", [target.transport.address])
    assert "rejected" in only(source.wait()).error
    assert [name for name in target.wrong_blocks() if "layer 1" in name] == []


def test_who_writes_cancels(pair):
    source, target = pair
    target.transport.expect("push", [source.transport.address], [1, 2])
    source.transport.push("push", [target.transport.address], 0, [3, 4], [1, 2])
    source.transport.cancel("push")
    assert only(source.wait()).error == "cancelled"
    end = only(target.wait())
    assert end.error == "the peer has aborted the transfer: cancelled"
    # In the same step: no harm.
    source.transport.push("push", [target.transport.address], 1, [3, 4], [1, 2])
    source.finish_push("push", [target.transport.address])
    assert source.transport.poll() == [] and target.transport.poll() == []


def test_cancelling_what_is_not_there_does_nothing(pair):
    pair[0].transport.cancel("nothing")
    assert pair[0].transport.poll() == []


def test_closing_ends_what_is_under_way(engines, kind):
    source, _ = engines.open(kind, layouts())
    rank = Rank(kind, layouts()[0], TARGET)
    rank.transport.expect("expect", source.addresses, [1])
    source.signal(signal.SIGSTOP)
    try:
        rank.transport.read("read", source.addresses, [2], [2])
        rank.transport.close()
        assert [end.error for end in rank.wait(2)] == ["this engine has closed its transport"] * 2
    finally:
        source.signal(signal.SIGCONT)
