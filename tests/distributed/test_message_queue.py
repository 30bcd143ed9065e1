"""The message queue in shared memory: order, sizes, readers; processes that stop, die and leave."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.distributed import shared_memory
from nanovllm.distributed.shared_memory import (
    MessageQueue,
    PeerLost,
    SegmentHandle,
    load_shared_memory_library,
)
from nanovllm.ops.native_library import BuildError
from tests.examples import examples
from tests.processes import CONTEXT
from tests.server_process import wait_until
from tests.stand_ins import set_failure, set_temporary_folder


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load_shared_memory_library()
    except OSError as error:
        pytest.skip(str(error))


def test_without_a_compiler_there_is_no_queue(monkeypatch):
    set_failure(monkeypatch, shared_memory, "load_library", BuildError("no compiler"))
    load_shared_memory_library.cache_clear()
    with pytest.raises(OSError, match="are not compiled: no compiler"):
        MessageQueue.create(1)


def read_all(queue: MessageQueue, count: int, received: list[bytes]) -> None:
    for _ in range(count):
        received.append(queue.get(30))


@settings(max_examples=examples(60))
@given(
    messages=st.lists(st.binary(max_size=200) | st.integers(0, 3000).map(os.urandom), max_size=40),
    num_readers=st.integers(1, 3),
    num_bytes=st.sampled_from([16, 32, 128, 1024]),
)
def test_every_reader_gets_every_message_in_order(messages, num_readers, num_bytes):
    queue = MessageQueue.create(num_readers, num_bytes)
    received: list[list[bytes]] = [[] for _ in range(num_readers)]
    readers = [
        threading.Thread(
            target=read_all,
            args=(MessageQueue.attach(queue.handle, i), len(messages), received[i]),
            daemon=True,
        )
        for i in range(num_readers)
    ]
    for reader in readers:
        reader.start()
    for message in messages:
        queue.put(message, 30)
    for reader in readers:
        reader.join()
    assert received == [messages] * num_readers


def test_a_message_that_is_longer_than_the_readers_buffer():
    queue = MessageQueue.create(1, 1 << 10)
    reader = MessageQueue.attach(queue.handle, 0)
    for size in (0, 1, 1 << 16, (1 << 16) + 1, 1 << 20):
        message = os.urandom(size)
        writer = threading.Thread(target=queue.put, args=(message, 30))
        writer.start()
        assert reader.get(30) == message
        writer.join()


def test_the_counters_may_wrap_around():
    queue = MessageQueue.create(1, 64)
    reader = MessageQueue.attach(queue.handle, 0)
    for end in (queue, reader):
        end.segment._words[16 * end.segment.member] = 2**32 - 50
    for number in range(20):
        queue.put(b"%010d" % number, 1)
        assert reader.get(1) == b"%010d" % number


def test_a_full_ring_makes_the_writer_wait_and_loses_nothing():
    queue = MessageQueue.create(2, 64)
    readers = [MessageQueue.attach(queue.handle, i) for i in range(2)]
    messages = [b"12345678", b"abcdefgh", b"ABCDEFGH", b"--------"]
    for message in messages:
        queue.put(message, 1)
    for message in messages:
        assert readers[0].get(1) == message
    with pytest.raises(TimeoutError, match="reader 1 of 2 has not made room"):
        queue.put(b"late", 0.1)
    assert readers[1].get(1) == messages[0]
    queue.put(b"now", 1)
    assert [readers[1].get(1) for _ in range(4)] == [*messages[1:], b"now"]
    assert readers[0].get(1) == b"now"


def test_a_reader_that_gives_up_goes_on_where_it_was():
    queue = MessageQueue.create(1, 32)
    reader = MessageQueue.attach(queue.handle, 0)
    message = os.urandom(300)
    with pytest.raises(TimeoutError):
        reader.get(0.0)
    writer = threading.Thread(target=queue.put, args=(message, 30))
    writer.start()
    found: list[bytes] = []

    def comes() -> bool:
        with contextlib.suppress(TimeoutError):
            found.append(reader.get(0.0))
        return bool(found)

    wait_until(comes)
    writer.join()
    assert found == [message]


def test_who_leaves_is_missed_only_when_all_is_read():
    queue = MessageQueue.create(2, 64)
    reader, other = (MessageQueue.attach(queue.handle, i) for i in range(2))
    queue.put(b"last")
    queue.segment.close()
    assert reader.get(1) == b"last"
    for end in (reader, other):
        with pytest.raises(PeerLost, match="the writer has not sent a message: it has left"):
            end.get(5)
            end.get(5)


def test_a_reader_that_has_left_makes_no_room():
    queue = MessageQueue.create(1, 32)
    reader = MessageQueue.attach(queue.handle, 0)
    reader.segment.close()
    reader.segment.close()
    queue.put(b"1")
    queue.put(b"2")
    with pytest.raises(PeerLost, match="reader 0 of 1 has not made room in the queue: it has left"):
        for _ in range(2):
            queue.put(b"3")


def test_who_comes_too_late_is_told():
    gone = MessageQueue.create(1).handle
    gc.collect()
    with pytest.raises(OSError, match=r"No such file|No such process"):
        MessageQueue.attach(gone, 0)


# ---------------------------------------------------------------------------------- other processes


def count_messages(handle: SegmentHandle, index: int, pipe: Any) -> None:
    queue = MessageQueue.attach(handle, index)
    total = 0
    while message := queue.get(60):
        total += len(message)
    pipe.send(total)


def write_for_ever(pipe: Any) -> None:
    queue = MessageQueue.create(1, 256)
    pipe.send(queue.handle)
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
    queue = MessageQueue.create(2, 1024)
    pipes = [CONTEXT.Pipe() for _ in range(2)]
    for index, (_, theirs) in enumerate(pipes):
        start(count_messages, queue.handle, index, theirs)
    for number in range(500):
        queue.put(bytes(number + 1))
    queue.put(b"")
    assert [ours.recv() for ours, _ in pipes] == [500 * 501 // 2] * 2


def test_a_segment_as_where_there_is_no_memfd(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    set_temporary_folder(monkeypatch, tmp_path)
    queue = MessageQueue.create(1, 256)
    assert len(list(tmp_path.iterdir())) == 1
    reader = MessageQueue.attach(queue.handle, 0)
    queue.put(b"hello")
    assert reader.get(1) == b"hello"
    queue.segment.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError):
        MessageQueue.create(1, 1 << 60)
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_handle_of_another_machine_is_refused(tmp_path):
    queue = MessageQueue.create(1, 256)
    with pytest.raises(OSError, match="is on another machine, or gone"):
        MessageQueue.attach(dataclasses.replace(queue.handle, token=bytes(16)), 0)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_dies_or_stops_is_named(start, fault):
    queue = MessageQueue.create(2, 32)
    pipe = CONTEXT.Pipe()
    processes = [start(count_messages, queue.handle, index, pipe[1]) for index in range(2)]
    queue.put(b"one")
    wait_until(lambda: queue.segment.ahead(1) == queue.segment.ahead(2) == 0)  # both have read it
    os.kill(processes[1].pid, fault)
    with pytest.raises((PeerLost, TimeoutError)) as raised:
        for _ in range(10):
            queue.put(b"x", 3)
    assert "reader 1 of 2 has not made room" in str(raised.value)
    if fault == signal.SIGKILL:  # not even the timeout has to be waited for
        assert isinstance(raised.value, PeerLost) and f"process {processes[1].pid} has died" in str(
            raised.value
        )
    else:
        assert isinstance(raised.value, TimeoutError)


def test_a_writer_that_dies_is_noticed_and_nothing_is_left(start):
    ours, theirs = CONTEXT.Pipe()
    process = start(write_for_ever, theirs)
    assert ours.poll(60)
    handle = ours.recv()
    reader = MessageQueue.attach(handle, 0)
    assert reader.get(30) == b"hello"
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=f"process {process.pid} has died"):
        reader.get(30)
    assert not pathlib.Path(handle.path).exists()


def test_an_idle_reader_takes_no_processor(start):
    queue = MessageQueue.create(1)
    reader = MessageQueue.attach(queue.handle, 0)
    began = time.thread_time()
    with pytest.raises(TimeoutError):
        reader.get(1.0)
    assert time.thread_time() - began < 0.2
