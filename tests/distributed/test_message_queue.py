"""The message queue in shared memory: order, sizes, readers; processes that stop, die and leave."""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.distributed import shared_memory
from nanovllm.distributed.shared_memory import MessageQueue, PeerLost, QueueHandle
from tests.processes import CONTEXT


@pytest.fixture(params=["compiled", "polled"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the C++ functions, and as where there is no compiler."""
    if request.param == "polled":
        monkeypatch.setattr(shared_memory, "load_shared_memory_library", lambda: None)
    elif shared_memory.load_shared_memory_library() is None:
        pytest.skip("no compiler here")


def read_all(queue: MessageQueue, count: int, received: list[bytes]) -> None:
    for _ in range(count):
        received.append(queue.get(30))


@settings(deadline=None, max_examples=60)
@given(
    messages=st.lists(st.binary(max_size=200) | st.integers(0, 3000).map(os.urandom), max_size=40),
    num_readers=st.integers(1, 3),
    slot_bytes=st.sampled_from([9, 16, 64, 1000]),
    num_slots=st.integers(1, 5),
)
def test_every_reader_gets_every_message_in_order(messages, num_readers, slot_bytes, num_slots):
    queue = MessageQueue.create(num_readers, slot_bytes, num_slots)
    received: list[list[bytes]] = [[] for _ in range(num_readers)]
    readers = [
        threading.Thread(
            target=read_all, args=(MessageQueue.attach(queue.handle, i), len(messages), received[i]), daemon=True
        )
        for i in range(num_readers)
    ]
    queue.wait_until_attached(5)
    for reader in readers:
        reader.start()
    for message in messages:
        queue.put(message, 30)
    for reader in readers:
        reader.join()
    assert received == [messages] * num_readers


def test_kinds_of_bytes(library):
    queue = MessageQueue.create(1, 64, 4)
    reader = MessageQueue.attach(queue.handle, 0)
    for data in (b"", b"x", bytearray(b"abc"), memoryview(b"defg"), memoryview(bytearray(80)).cast("d")):
        queue.put(data, 1)
        assert reader.get(1) == bytes(data)


def test_the_counters_may_wrap_around(library):
    queue = MessageQueue.create(1, 16, 3)
    reader = MessageQueue.attach(queue.handle, 0)
    for end in (queue, reader):
        end._count = 2**32 - 5
        end._segment.count_to(2**32 - 5)
    for number in range(20):
        queue.put(b"%010d" % number, 1)  # two slots each
        assert reader.get(1) == b"%010d" % number


def test_a_full_ring_makes_the_writer_wait_and_loses_nothing(library):
    queue = MessageQueue.create(2, 32, 4)
    readers = [MessageQueue.attach(queue.handle, i) for i in range(2)]
    for number in range(4):
        queue.put(bytes([number]), 1)
    for number in range(4):
        assert readers[0].get(1) == bytes([number])
    with pytest.raises(TimeoutError, match="reader 1 of 2 has not made room"):
        queue.put(b"late", 0.1)
    assert readers[1].get(1) == b"\0"
    queue.put(b"now", 1)
    assert [readers[1].get(1) for _ in range(4)] == [b"\1", b"\2", b"\3", b"now"]
    assert readers[0].get(1) == b"now"


def test_half_of_a_message_breaks_the_queue_with_words(library):
    queue = MessageQueue.create(1, 16, 2)
    reader = MessageQueue.attach(queue.handle, 0)
    with pytest.raises(TimeoutError):
        queue.put(bytes(200), 0.1)
    with pytest.raises(RuntimeError, match="written only in part"):
        queue.put(b"more", 0.1)
    with pytest.raises(TimeoutError, match="writer has not sent"):
        reader.get(0.1)


def test_a_reader_that_gives_up_goes_on_where_it_was(library):
    queue = MessageQueue.create(1, 16, 2)
    reader = MessageQueue.attach(queue.handle, 0)
    message = os.urandom(300)
    writer = threading.Timer(0.3, queue.put, (message, 30))
    writer.start()
    for _ in range(1000):
        try:
            assert reader.get(0.0) == message
            break
        except TimeoutError:
            continue
    writer.join()


def test_who_leaves_is_missed_only_when_all_is_read(library):
    queue = MessageQueue.create(2, 32, 2)
    reader = MessageQueue.attach(queue.handle, 0)
    with pytest.raises(TimeoutError, match=r"reader 1 of 2 not attached after 0.05 s"):
        queue.wait_until_attached(0.05)
    other = MessageQueue.attach(queue.handle, 1)
    queue.put(b"last")
    queue.close()
    assert reader.get(1) == b"last"
    for end in (reader, other):
        with pytest.raises(PeerLost, match="the writer has not sent a message: it has left"):
            end.get(5)
            end.get(5)


def test_a_closed_end_says_so(library):
    queue = MessageQueue.create(1, 32, 2)
    reader = MessageQueue.attach(queue.handle, 0)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.get(1)
    queue.put(b"1")
    queue.put(b"2")
    with pytest.raises(PeerLost, match="reader 0 of 1 has not made room in the queue: it has left"):
        queue.put(b"3")
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.put(b"4")


def test_closing_ends_a_wait_in_another_thread(library):
    queue = MessageQueue.create(1)
    reader = MessageQueue.attach(queue.handle, 0)
    threading.Timer(0.2, reader.close).start()
    with pytest.raises(ValueError, match="closed"):
        reader.get(30)


def test_wrong_ends_and_shapes_are_refused():
    queue = MessageQueue.create(1)
    reader = MessageQueue.attach(queue.handle, 0)
    with pytest.raises(ValueError, match="other end"):
        queue.get(0)
    with pytest.raises(ValueError, match="other end"):
        reader.put(b"")
    with pytest.raises(ValueError, match="member 2 of a segment that has 2"):
        MessageQueue.attach(queue.handle, 1)
    with pytest.raises(ValueError, match="more than 8 bytes a slot"):
        MessageQueue.create(1, 8, 1)
    gone = MessageQueue.create(1).handle
    gc.collect()
    with pytest.raises(OSError, match=r"No such file|No such process"):
        MessageQueue.attach(gone, 0)


# ---------------------------------------------------------------------------------------- other processes


def count_messages(handle: QueueHandle, index: int, pipe: Any) -> None:
    queue = MessageQueue.attach(handle, index)
    total = 0
    while message := queue.get(60):
        total += len(message)
    pipe.send(total)


def write_for_ever(pipe: Any) -> None:
    queue = MessageQueue.create(1, 64, 4)
    pipe.send(queue.handle)
    queue.wait_until_attached(60)
    queue.put(b"hello")
    time.sleep(600)


@pytest.fixture
def start() -> Iterator[Any]:
    processes = []

    def start(function: Any, *arguments: Any) -> Any:
        process = CONTEXT.Process(target=function, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_spawned_readers(start):
    queue = MessageQueue.create(2, 256, 4)
    pipes = [CONTEXT.Pipe() for _ in range(2)]
    for index, (_, theirs) in enumerate(pipes):
        start(count_messages, queue.handle, index, theirs)
    queue.wait_until_attached(60)
    for number in range(500):
        queue.put(bytes(number + 1))
    queue.put(b"")
    assert [ours.recv() for ours, _ in pipes] == [500 * 501 // 2] * 2


def test_one_reader_index_is_one_process(start):
    queue = MessageQueue.create(1, 64, 4)
    ours, theirs = CONTEXT.Pipe()
    start(count_messages, queue.handle, 0, theirs)
    queue.wait_until_attached(60)
    with pytest.raises(OSError, match="another process is member 1 of the segment"):
        MessageQueue.attach(queue.handle, 0)
    gc.collect()
    for message in (b"still", b"there", b""):
        queue.put(message)
    assert ours.recv() == 10


def test_a_segment_as_where_there_is_no_memfd(monkeypatch, tmp_path, library):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    queue = MessageQueue.create(1, 64, 4)
    assert len(list(tmp_path.iterdir())) == 1
    reader = MessageQueue.attach(queue.handle, 0)
    queue.wait_until_attached(1)
    assert not list(tmp_path.iterdir())
    queue.put(b"nameless")
    assert reader.get(1) == b"nameless"
    with pytest.raises(OSError):
        MessageQueue.create(1, 1 << 50, 16)
    assert not list(tmp_path.iterdir())


def test_a_handle_of_another_machine_is_refused(tmp_path):
    queue = MessageQueue.create(1, 64, 4)
    segment = dataclasses.replace(queue.handle.segment, token=bytes(16))
    with pytest.raises(OSError, match="is on another machine, or gone"):
        MessageQueue.attach(dataclasses.replace(queue.handle, segment=segment), 0)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_dies_or_stops_is_named(start, fault, library):
    queue = MessageQueue.create(2, 64, 2)
    pipe = CONTEXT.Pipe()
    processes = [start(count_messages, queue.handle, index, pipe[1]) for index in range(2)]
    queue.wait_until_attached(60)
    queue.put(b"one")
    os.kill(processes[1].pid, fault)
    began = time.monotonic()
    with pytest.raises((PeerLost, TimeoutError)) as raised:
        for _ in range(10):
            queue.put(b"x", 3)
    assert "reader 1 of 2 has not made room" in str(raised.value)
    if fault == signal.SIGKILL:  # not even the timeout has to be waited for
        assert isinstance(raised.value, PeerLost) and f"process {processes[1].pid} has died" in str(raised.value)
        assert time.monotonic() - began < 2.5
    else:
        assert isinstance(raised.value, TimeoutError)


def test_a_writer_that_dies_is_noticed_and_nothing_is_left(start, library):
    ours, theirs = CONTEXT.Pipe()
    process = start(write_for_ever, theirs)
    assert ours.poll(60)
    handle = ours.recv()
    reader = MessageQueue.attach(handle, 0)
    assert reader.get(30) == b"hello"
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=f"process {process.pid} has died"):
        reader.get(30)
    assert not pathlib.Path(handle.segment.path).exists()
    assert not [path for path in pathlib.Path("/dev/shm").iterdir() if "nanovllm" in path.name]


def test_an_idle_reader_takes_no_processor(start):
    queue = MessageQueue.create(1)
    reader = MessageQueue.attach(queue.handle, 0)
    began = time.process_time()
    with pytest.raises(TimeoutError):
        reader.get(1.0)
    assert time.process_time() - began < 0.2
