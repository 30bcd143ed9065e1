"""The socket of a server, and its address for users. Imports nothing heavy, so that a taken port shows at once."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, made before the model loads so that a mistake shows at once. Port 0: any free one.

    Raises:
        OSError: the address is taken, or not one of this machine.
    """
    (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect to the socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """The URL of the server for a browser on this machine, without a slash at the end."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def ready_message(listener: socket.socket, model: str, api_keys: Sequence[str]) -> str:
    """The server's address, with a curl command that works."""
    url = url_of(listener)
    key = ' -H "Authorization: Bearer <key>"' if api_keys else ""
    return (
        f"\n{model} is served at {url}/v1, described at {url}/docs.\n"
        f"Chat with it, and watch it work: {url}/\n\nOr try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f'    -d \'{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}\'\n'
    )
