"""The ranks of an engine in a process of their own, with KV caches of known content, for the tests
of transports."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from msgspec import Raw
from torch import Tensor

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.local import LocalTransport
from nanovllm.kv_transfer.transport.nixl import NixlTransport
from nanovllm.kv_transfer.transport.transfers import Ended
from tests.processes import CONTEXT

SECRET = b"what only the tests know"


class TcpTransport(LocalTransport):
    """TCP on one machine, too."""

    share_memory = False


TRANSPORTS: dict[str, type[Transport]] = {
    "local": LocalTransport,
    "tcp": TcpTransport,
    "nixl": NixlTransport,
}


def layouts(pp: int = 1, tp: int = 1, **fields: Any) -> list[KVLayout]:
    """Of all ranks of an engine."""
    values = {
        **{
            "num_layers": 2,
            "num_kv_heads": 2,
            "block_size": 4,
            "width": 8,
            "dtype": "float32",
            "num_blocks": 12,
        },
        **fields,
    }
    bounds = [stage * values["num_layers"] // pp for stage in range(pp + 1)]
    return [
        KVLayout(**values, first_layer=first, end_layer=end, tp_rank=rank, tp_size=tp)
        for first, end in itertools.pairwise(bounds)
        for rank in range(tp)
    ]


def content(layout: KVLayout, layer: int, block: int, salt: int) -> Tensor:
    """What stands in a block: other numbers for each layer, block, plane, head, token and engine,
    and the same on all ranks that have the same head; small ones, so that bfloat16 has them
    exactly. The salt 0 means zeros."""
    heads, planes = max(1, layout.num_kv_heads), 1 if layout.is_latent else 2
    seed = torch.Generator().manual_seed(salt * 1_000_003 + layer * 1009 + block)
    shape = (planes, heads, layout.block_size, layout.width)
    numbers = torch.randint(1, 256, shape, generator=seed) * bool(salt)
    own = numbers[:, layout.heads.start : layout.heads.stop].to(getattr(torch, layout.dtype))
    return own.reshape(layout.cache_shape[1:])


class Rank:
    """A rank and its cache.

    Args:
        kind: "local", "tcp" or "nixl".
        salt: of the cache's content.
        options: of the transport.
    """

    def __init__(
        self, kind: str, layout: KVLayout, salt: int, secret: bytes = SECRET, **options: Any
    ) -> None:
        self.layout, self.salt = layout, salt
        transport = TRANSPORTS[kind]
        dtype = getattr(torch, layout.dtype)
        self.caches = {
            layer: transport.empty_cache(layout.cache_shape, dtype, "cpu")
            for layer in layout.layers
        }
        for layer, cache in self.caches.items():
            for block in range(layout.num_blocks):
                cache[block] = content(layout, layer, block, salt)
        self.transport = transport(layout, self.caches, "127.0.0.1", secret, **options)

    def push(
        self, transfer_id: str, peers: list[dict[str, Any]], local: list[int], remote: list[int]
    ) -> None:
        """Write blocks of all layers, and finish."""
        for layer in self.layout.layers:
            self.transport.push(transfer_id, peers, layer, local, remote, is_last=True)

    def finish_push(self, transfer_id: str, peers: list[dict[str, Any]]) -> None:
        """Say that this was all."""
        self.push(transfer_id, peers, [], [])

    def push_layer(
        self,
        transfer_id: str,
        peers: list[dict[str, Any]],
        layer: int,
        local: list[int],
        remote: list[int],
    ) -> None:
        """The same for one layer, if this rank has it, and without an end."""
        if layer in self.layout.layers:
            self.transport.push(transfer_id, peers, layer, local, remote)

    def wait(self, count: int = 1, seconds: float = 60.0) -> list[Ended]:
        """So many transfers that have ended, by their ids."""
        ended: list[Ended] = []
        while len(ended) < count:
            if not (new := self.transport.poll(seconds)):
                raise TimeoutError(f"after {seconds:g} s only {ended} have ended")
            ended += new
        return sorted(ended, key=lambda end: end.transfer_id)

    def wrong_blocks(self, source: int = 0, pairs: Sequence[tuple[int, int]] = ()) -> list[str]:
        """Where the cache differs from what it was but for the blocks that came from elsewhere.

        Args:
            source: the salt of the engine that they came from.
            pairs: of a block there and the one here.
        """
        origin = {here: (source, there) for there, here in pairs}
        wrong = []
        for layer, cache in self.caches.items():
            for block in range(self.layout.num_blocks):
                salt, there = origin.get(block, (self.salt, block))
                if not torch.equal(cache[block], content(self.layout, layer, there, salt)):
                    wrong.append(f"layer {layer}, block {block}")
        return wrong


class Engine:
    """All ranks of an engine, in one process."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []

    def open(
        self, kind: str, layouts: list[KVLayout], salt: int, options: dict[str, Any]
    ) -> list[Raw]:
        """Make the ranks anew; returns their addresses."""
        self.close()
        self.ranks = [Rank(kind, layout, salt, **options) for layout in layouts]
        return [rank.transport.address for rank in self.ranks]

    def close(self) -> None:
        """Close the transports."""
        for rank in self.ranks:
            rank.transport.close()
        self.ranks = []

    def all(self, name: str, *args: Any) -> list[Any]:
        """Call something on all ranks, or on their transports."""
        targets = [rank if hasattr(rank, name) else rank.transport for rank in self.ranks]
        return [getattr(target, name)(*args) for target in targets]

    def num_segments(self) -> int:
        """How many segments this process has mapped, its own and others'."""
        gc.collect()
        with open("/proc/self/maps") as lines:
            return sum("memfd:nanovllm" in line for line in lines)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = Engine()
    while (call := pipe.recv()) is not None:
        name, args = call
        try:
            pipe.send((True, getattr(engine, name)(*args)))
        except Exception as error:
            pipe.send((False, error))
    engine.close()


class RemoteEngine:
    """An engine in another process."""

    def __init__(self) -> None:
        self._pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.addresses: list[Raw] = []

    def open(self, kind: str, layouts: list[KVLayout], salt: int, **options: Any) -> None:
        """Make its ranks anew."""
        self.addresses = self._call("open", kind, layouts, salt, options)

    def all(self, name: str, *args: Any) -> list[Any]:
        """Call something on all ranks."""
        return self._call("all", name, *args)

    def num_segments(self) -> int:
        """See `Engine.num_segments`."""
        return self._call("num_segments")

    def close_transports(self) -> None:
        """The ranks leave, the process stays."""
        self._call("close")

    def _call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        if not self._pipe.poll(90):
            raise TimeoutError(f"no answer to {name}")
        is_right, value = self._pipe.recv()
        if not is_right:
            raise value
        return value

    def signal(self, number: signal.Signals) -> None:
        """Stop, continue or kill the process."""
        assert self.process.pid
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(30)

    def stop(self) -> None:
        """End it in order, if it is still there."""
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(30)
        self._pipe.close()
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError("an engine did not end")


@contextmanager
def proxy(target: tuple[str, int], tamper: Callable[[int, bytes], bytes | None]) -> Iterator[int]:
    """A port whose connections go on to `target`, with what comes back from there tampered with.

    Args:
        tamper: gets the number of the first byte in the stream and some bytes, and returns what is
            passed on; None: the connection is cut.
    """

    def pump(
        source: socket.socket, sink: socket.socket, change: Callable[[int, bytes], bytes | None]
    ) -> None:
        count = 0
        try:
            while data := source.recv(1 << 16):
                if (changed := change(count, data)) is None:
                    break
                sink.sendall(changed)
                count += len(data)
        except OSError:
            pass  # one of the ends has closed: so does the other
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(target)
            sockets.extend((client, server))
            for args in ((client, server, lambda count, data: data), (server, client, tamper)):
                threads.append(threading.Thread(target=pump, args=args, daemon=True))
                threads[-1].start()

    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(10)
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)
        for sock in sockets:
            sock.close()
