"""Connections of ranks that the executor has not started itself: where they connect to it, and
how."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import psutil

from nanovllm.executor.base import ExecutorError
from nanovllm.executor.remote import START_SECONDS
from nanovllm.processes.activity import LOOK_SECONDS

# The longest time for what connects to say what it is.
GREETING_SECONDS = 5.0
# A connection whose other end acknowledges or takes nothing for this long is closed.
LOST_SECONDS = 60.0

Invitation = tuple[str, int, str]  # host, port, and the key that lets a rank in


@dataclass(frozen=True)
class Card:
    """Identity of a rank that connects to its executor.

    Attributes:
        local_rank: its number on its machine.
        pid: of its process, if that runs on the executor's machine.
        where: its process and machine, for messages.
    """

    rank: int
    local_rank: int = 0
    pid: int | None = None
    where: str = ""


def use_network_of(address: str) -> None:
    """Have gloo use this machine's network interface that has the address, unless the user names
    another."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class Reception:
    """Where ranks that the executor has not started connect to it. Only ranks that know the key are
    let in.

    Args:
        host: the address of this machine at which the ranks can reach it.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._key = secrets.token_hex(32)
        self.invitation: Invitation = (host, self._listener.getsockname()[1], self._key)

    def wait_for(
        self, ranks: Collection[int], seconds: float = START_SECONDS
    ) -> list[tuple[Card, Connection]]:
        """Wait until these ranks have connected; nothing listens any more after that.

        Raises:
            ExecutorError: a rank has not connected in time.
        """
        found: dict[int, tuple[Card, Connection]] = {}
        deadline = time.monotonic() + seconds
        with self._listener:
            self._listener.settimeout(LOOK_SECONDS)
            while missing := [rank for rank in ranks if rank not in found]:
                if time.monotonic() > deadline:
                    raise ExecutorError(
                        f"ranks {missing} have not connected within {seconds:g} seconds"
                    )
                with contextlib.suppress(OSError, EOFError):  # it may be a stranger
                    connection = _connection(self._listener.accept()[0])
                    key = connection.recv_bytes(256) if connection.poll(GREETING_SECONDS) else b""
                    if secrets.compare_digest(key, self._key.encode()):
                        card: Card = connection.recv()
                        found[card.rank] = card, connection
        return [found[rank] for rank in ranks]


def connect(invitation: Invitation, here: str, card: Card) -> Connection:
    """A rank's connection to its executor.

    Args:
        invitation: see `Reception`.
        here: the name of this machine.
        card: identifies this rank.
    """
    host, port, key = invitation
    connection = _connection(socket.create_connection((host, port), START_SECONDS))
    connection.send_bytes(key.encode())
    connection.send(replace(card, where=f"process {os.getpid()} on {here}"))
    return connection


def _connection(line: socket.socket) -> Connection:
    """A connection over TCP: messages leave at once, and sending fails when the other end is gone
    or stopped."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
    return Connection(line.detach())
