"""Connections between engines: who is let in, who is not, and what happens to frames that are no
frames."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kv_transfer.transport import handshake
from nanovllm.kv_transfer.transport.connection import (
    MAX_MESSAGE,
    Connection,
    CorruptFrame,
    PeerLost,
)
from nanovllm.kv_transfer.transport.handshake import (
    Credentials,
    HandshakeError,
    Listener,
    connect,
    secret,
)
from tests.examples import examples
from tests.server_process import wait_until
from tests.stand_ins import set_failure

SECRET = b"only for those who may"
SAME: dict[str, str | int] = {"model": "llama", "block_size": 16}
# Long enough for a handshake on a machine that stands still for a while.
KNOWN = Credentials(SECRET, SAME, b"hello", timeout=5.0)


def echo(connection: Connection) -> None:
    """Send everything back, and twice what has a payload."""
    while True:
        message = connection.receive()
        payload = bytearray(connection.payload_bytes)
        connection.receive_payload(memoryview(payload))
        connection.send(message, payload + payload)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", 0, KNOWN, echo)
    yield made
    made.close()


@contextlib.contextmanager
def connected(patience: float) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection whose handshake is over."""
    server = socket.create_server(("127.0.0.1", 0))
    one = Connection(socket.create_connection(server.getsockname()), "one", patience)
    other = Connection(server.accept()[0], "other", patience)
    server.close()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    with connected(patience=20) as ends:
        yield ends


@pytest.fixture
def impatient_pair() -> Iterator[tuple[Connection, Connection]]:
    """One of them gives the other up."""
    with connected(patience=0.5) as ends:
        yield ends


def raw(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address, 10)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes, within the deadline of the handshake and some."""
    sock.settimeout(20)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def works(listener: Listener) -> bool:
    connection = connect(*listener.address, KNOWN)
    connection.send(b"hello")
    answer = connection.receive(10)
    connection.close()
    return answer == connection.hello == b"hello"


# ------------------------------------------------------------------------------------ who is let in


def test_who_knows_the_secret_and_is_the_same_is_let_in(listener):
    assert works(listener)


def test_it_listens_only_where_it_was_asked_to(listener):
    assert listener.address[0] == "127.0.0.1"


@pytest.mark.parametrize("wrong", [b"something else entirely", SECRET[:-1], SECRET + b" ", b""])
def test_who_has_another_secret_is_not(listener, wrong, caplog):
    with pytest.raises(HandshakeError, match="secret"):
        connect(*listener.address, Credentials(wrong, SAME))
    assert works(listener)
    # The listener's thread may say it later.
    wait_until(lambda: "does not know the secret" in caplog.text)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"model": "llama", "block_size": 32}, "block_size is 32 here and 16 there"),
        ({"model": "gemma", "block_size": 16}, "model is 'gemma' here and 'llama' there"),
        ({"block_size": 16}, "model is None here and 'llama' there"),
        ({**SAME, "dtype": "bfloat16"}, "dtype is 'bfloat16' here and None there"),
        ({"model": "llama", "block_size": "16"}, "block_size is '16' here and 16 there"),
    ],
)
def test_both_say_what_differs(listener, theirs, message, caplog):
    with pytest.raises(HandshakeError, match=message):
        connect(*listener.address, Credentials(SECRET, theirs))
    assert works(listener)
    words = (
        message.replace(" here", " HERE")
        .replace(" there", " here")
        .replace(" HERE", " there")
        .split()
    )
    wait_until(lambda: set(words) <= set(caplog.text.replace(",", "").split()))


def test_a_listener_that_does_not_know_the_secret_is_left():
    """It closes without a proof, or gives a wrong one; whichever, nothing was said to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(handshake.HELLO + os.urandom(32) + os.urandom(32))
                received.append(sock.recv(1000))
                received.append(sock.recv(1000))

        received: list[bytes] = []
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(HandshakeError, match="does not know the secret"):
            connect(*server.getsockname(), Credentials(SECRET, {"hidden": "fingerprint"}))
        thread.join(10)
    assert len(received[0]) == 32 and received[1] == b""  # the proof, and nothing else


def test_an_answer_is_worth_nothing_a_second_time(listener):
    """Everything that a client said is said again: the listener's number is another one."""
    said: list[bytes] = []

    class Recorder(Connection):
        def send_raw(self, data: bytes) -> None:
            said.append(data)
            Connection.send_raw(self, data)

    connection = Recorder(raw(listener), "listener")
    handshake.shake_hands(connection, True, KNOWN)
    connection.close()
    again = raw(listener)
    again.sendall(b"".join(said))
    assert is_closed(again)


def test_its_own_words_are_no_answer(listener):
    """The listener's number sent back as one's own, and its proof, if it gave one, as one's own."""
    mirror = raw(listener)
    mirror.sendall(mirror.recv(1000))
    mirror.sendall(os.urandom(32))
    mirror.settimeout(20)
    assert mirror.recv(1000) == b""  # no proof: who connects has to prove first


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4096),
        b"\xff" * 100,
        handshake.HELLO,
        handshake.HELLO + bytes(31),
    ],
)
def test_garbage_and_silence_end_within_the_deadline_and_hurt_nobody(listener, data, caplog):
    guest = raw(listener)
    guest.sendall(data)
    assert works(listener)  # meanwhile
    assert is_closed(guest)
    guest.close()
    assert works(listener)
    # It is said after the connection is closed.
    wait_until(lambda: "a connection was rejected" in caplog.text)


def test_a_byte_now_and_then_gains_no_time(listener):
    """The deadline is one for all of the handshake."""
    guest = raw(listener)
    guest.settimeout(0.2)
    for byte in (handshake.HELLO + bytes(64))[:60]:
        try:
            guest.sendall(bytes([byte]))
            while guest.recv(1000) != b"":
                pass
        except TimeoutError:
            continue
        except ConnectionError:
            pass
        break
    else:
        pytest.fail("sixty bytes in twelve seconds, and the listener still listens")


def test_many_who_say_nothing_do_not_use_up_the_listener(listener, monkeypatch, caplog):
    guests = [raw(listener) for _ in range(handshake.MAX_HANDSHAKES + 5)]
    assert all(is_closed(guest) for guest in guests)
    wait_until(lambda: "handshakes are in progress" in caplog.text)
    assert works(listener)


def test_an_endless_fingerprint_is_refused(listener):
    sock = raw(listener)
    connection = Connection(sock, "listener")
    nonce = os.urandom(32)
    connection.send_raw(handshake.HELLO + nonce)
    theirs = connection.read(len(handshake.HELLO) + 32)
    nonces = nonce + theirs[len(handshake.HELLO) :]
    connection.send_raw(handshake.proof(SECRET, "client", nonces))
    connection.send_raw(struct.pack("<4sIQ", b"nvkv", 0xFFFFFFFF, 0))
    assert is_closed(sock)
    assert works(listener)


def test_nobody_listens_there():
    with socket.socket() as nobody:  # it keeps the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(PeerLost, match=str(port)):
            connect("127.0.0.1", port, KNOWN)


def test_an_error_in_what_is_done_with_a_connection_ends_only_that(caplog):
    def fail(connection: Connection) -> None:
        if connection.receive() == b"fail":
            raise KeyError("what has gone wrong")
        connection.send(b"hello")

    with caplog.at_level(logging.ERROR):
        listener = Listener("127.0.0.1", 0, KNOWN, fail)
        connection = connect(*listener.address, KNOWN)
        connection.send(b"fail")
        with pytest.raises(PeerLost):
            connection.receive(10)
        assert works(listener)
        listener.close()
    assert "what has gone wrong" in caplog.text


def test_closing_a_listener_ends_its_connections_and_threads():
    before = set(threading.enumerate())
    listener = Listener("127.0.0.1", 0, KNOWN, echo)
    connections = [connect(*listener.address, KNOWN) for _ in range(3)]
    listener.close()
    for connection in connections:
        with pytest.raises(PeerLost):
            connection.receive(10)
        assert connection.is_lost()
    assert not set(threading.enumerate()) - before


# --------------------------------------------------------------------------------------- the secret


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    monkeypatch.delenv("NANOVLLM_KV_SECRET", raising=False)
    return tmp_path


def test_the_secret_is_made_once_and_for_its_owner_alone(home):
    made = secret()
    assert len(made) == 64 and secret() == made
    assert (home / "kv_secret").stat().st_mode & 0o777 == 0o600
    assert os.listdir(home) == ["kv_secret"]


def test_many_who_make_it_at_once_get_the_same(home):
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


@pytest.mark.parametrize("full_at", ["write", "link"])
def test_a_full_disk_is_named_and_leaves_no_secret(home, full_at, monkeypatch):
    # `urandom` is called where the file is written
    function = "link" if full_at == "link" else "urandom"
    set_failure(monkeypatch, os, function, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(
        ValueError, match=r"kv_secret, could not be written: No space left .*; set NANOVLLM_HOME"
    ):
        secret()
    assert os.listdir(home) == []


def test_a_home_that_is_a_file_is_named(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("NANOVLLM_HOME", str(home / "file"))
    with pytest.raises(
        ValueError, match=r"file/kv_secret, could not be written: .*; set NANOVLLM_HOME"
    ):
        secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_file_that_others_can_read_is_refused(home, mode):
    secret()
    (home / "kv_secret").chmod(mode)
    with pytest.raises(ValueError, match="can be read by others"):
        secret()


def test_a_link_to_a_file_is_refused(home):
    (home / "elsewhere").write_text("x" * 64)
    (home / "elsewhere").chmod(0o600)
    (home / "kv_secret").symlink_to(home / "elsewhere")
    with pytest.raises(OSError):
        secret()


def test_the_environment_goes_first(home, monkeypatch):
    monkeypatch.setenv("NANOVLLM_KV_SECRET", " a secret of some length\n")
    assert secret() == b"a secret of some length" and os.listdir(home) == []


@pytest.mark.parametrize("short", ["", "   ", "fifteen letters"])
def test_a_short_secret_is_refused(home, monkeypatch, short):
    monkeypatch.setenv("NANOVLLM_KV_SECRET", short)
    with pytest.raises(ValueError, match="too short"):
        secret()


# ------------------------------------------------------------------------------------------- frames


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=20_000)), max_size=6))
def test_messages_and_payloads_come_as_they_were_sent(frames):
    server = socket.create_server(("127.0.0.1", 0))
    one = Connection(socket.create_connection(server.getsockname()), "one")
    other = Connection(server.accept()[0], "other")
    server.close()
    thread = threading.Thread(target=lambda: [one.send(*frame) for frame in frames])
    thread.start()
    for message, payload in frames:
        assert other.receive(10) == message
        assert other.payload_bytes == len(payload)
        buffer = bytearray(len(payload))
        other.receive_payload(memoryview(buffer))
        assert buffer == payload
    thread.join(10)
    one.close()
    other.close()


def test_a_payload_larger_than_everything_in_between(pair):
    one, other = pair
    data = os.urandom(5_000_000)
    thread = threading.Thread(target=one.send, args=(b"much", data))
    thread.start()
    assert other.receive(10) == b"much"
    received = bytearray(len(data))
    other.receive_payload(memoryview(received))
    thread.join(10)
    assert received == data


def frame_of(pair: tuple[Connection, Connection]) -> bytes:
    """What goes over the wire for a message and a payload."""
    one, other = pair
    one.send(b"message", b"payload")
    size = 16 + len(b"message") + 8 + len(b"payload") + 8
    data = other.read(size)
    assert not other.is_ready()
    return data


def test_any_flipped_bit_is_found(pair):
    """Of a frame with a message and a payload, every bit, one after another."""
    data = frame_of(pair)
    server = socket.create_server(("127.0.0.1", 0))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with socket.create_connection(server.getsockname()) as client:
            connection = Connection(server.accept()[0], "client", patience=5)
            client.sendall(changed)
            client.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerLost):  # a frame that claims to be longer never ends
                connection.receive(5)
                connection.receive_payload(memoryview(bytearray(7)))
            connection.close()
    server.close()


@pytest.mark.parametrize("length", range(0, 46, 5))
def test_a_frame_that_is_cut_off_is_a_lost_peer(pair, length):
    one, other = pair
    one.send_raw(frame_of(pair)[:length])
    one.close()
    with pytest.raises(PeerLost):
        other.receive(5)
        other.receive_payload(memoryview(bytearray(7)))


def test_silence_before_a_message_is_none_and_in_the_middle_is_a_loss(impatient_pair):
    one, other = impatient_pair
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    one.send(b"still here")
    assert other.receive(5) == b"still here"
    one.send_raw(b"nvkv")
    with pytest.raises(PeerLost, match="in the middle"):
        other.receive(5)
    assert other.is_lost()


def test_who_takes_nothing_is_lost(impatient_pair):
    one, _ = impatient_pair
    with pytest.raises(PeerLost, match="in the middle"):
        one.send(b"", bytes(1 << 26))
    with pytest.raises(PeerLost):
        one.send(b"more")


@pytest.mark.parametrize("size", [6, 8, 0])
def test_a_payload_that_was_not_expected_is_not_written(pair, size):
    one, other = pair
    one.send(b"x", b"payload")
    other.receive(5)
    buffer = bytearray(size)
    with pytest.raises(CorruptFrame):
        if size:
            other.receive_payload(memoryview(buffer))
        else:
            other.receive(5)
    assert buffer == bytes(size)


def test_a_message_that_is_too_long_is_not_sent(pair):
    with pytest.raises(ValueError, match="at most"):
        pair[0].send(bytes(MAX_MESSAGE + 1))


def test_closing_wakes_who_waits(pair):
    one, _ = pair
    lost = threading.Event()

    def wait() -> None:
        try:
            one.receive()
        except PeerLost:
            lost.set()

    thread = threading.Thread(target=wait)
    thread.start()
    one.close()
    assert lost.wait(10)
    thread.join()


def test_is_lost_takes_nothing_away(pair):
    one, other = pair
    assert not other.is_lost() and not other.is_ready()
    one.send(b"first")
    one.close()
    assert other.is_ready(5)
    assert not other.is_lost() and other.is_ready()
    assert other.receive(5) == b"first"
    assert other.is_ready(5)
    assert other.is_lost() and other.is_ready()


def test_is_lost_while_another_thread_receives(pair):
    """What one thread has seen may be gone when it looks again: that is neither an end nor a reason
    to wait."""
    one, other = pair
    receiving = threading.Thread(target=lambda: [other.receive(30) for _ in range(5000)])
    sending = threading.Thread(target=lambda: [one.send(b"message") for _ in range(5000)])
    receiving.start()
    sending.start()
    looks = []
    while receiving.is_alive():
        looks.append(other.is_lost())
    sending.join()
    assert looks and not any(looks)
