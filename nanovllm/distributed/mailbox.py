"""A queue of messages that can be waited for like a file."""

import socket
import threading
from contextlib import suppress
from typing import Generic, TypeVar

M = TypeVar("M")


class Mailbox(Generic[M]):
    """A queue of messages from many threads to one. `fileno` is readable exactly while there are
    messages, so that the thread can wait for them and for other sources in one call."""

    def __init__(self) -> None:
        self._messages: list[M] = []
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._reader.fileno()

    def put(self, message: M) -> None:
        """Append a message. Thread-safe; does nothing after `close`."""
        with self._lock, suppress(OSError):
            if not self._messages:
                self._writer.send(b"!")
            self._messages.append(message)

    def take(self) -> list[M]:
        """Remove and return all messages."""
        with self._lock:
            if self._messages:
                self._reader.recv(1)
            messages = self._messages
            self._messages = []
            return messages

    @property
    def is_empty(self) -> bool:
        """True if there are no messages."""
        return not self._messages

    def close(self) -> None:
        """Drop all messages, and those that are put later."""
        with self._lock:
            self._messages = []
            self._reader.close()
            self._writer.close()
