"""Which clients may use a server, and how much it accepts from them: settings, flags and limits.
Imports nothing heavy."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from msgspec import Meta

from nanovllm.assembly.flags import Words, json_words
from nanovllm.data.checks import Amount, Keywords
from nanovllm.data.errors import UsageError

MAX_BODY_BYTES = 10 * 2**20
# The bodies of all unanswered requests together.
MAX_HELD_BYTES = 256 * 2**20
# Strings, lists and objects in a JSON body, which cost the parser and the validation most: a chat
# of 5,000 messages has 30,000.
MAX_NODES = 2**15
# Values in a JSON body, counted as commas. Most are numbers such as token ids, a million of which
# take 0.1 s.
MAX_VALUES = 2**20
# Within these times a client has to send all headers, and then the whole body.
HEADER_SECONDS = 20.0
BODY_SECONDS = 60.0
# Open files that the process may need besides its connections.
RESERVED_FILES = 100
MAX_CONNECTIONS = 10_000

# Paths that need no key. The page asks for the key itself.
OPEN_PATHS = frozenset(("/", "/health", "/version", "/metrics", "/docs", "/openapi.json"))
OPEN_FOLDERS = ("/web/", "/docs/")

LIMITS = (
    f"Limits: 16 KiB of headers within {HEADER_SECONDS:.0f} s; a body of {MAX_BODY_BYTES // 2**20} "
    f"MiB, with {MAX_NODES} strings, lists and objects and {MAX_VALUES} values, within "
    f"{BODY_SECONDS:.0f} s; {MAX_HELD_BYTES // 2**20} MiB for the bodies of all requests; the "
    f"limit of open files minus {RESERVED_FILES} connections, and at most {MAX_CONNECTIONS}. "
    "Beyond that, the server closes the connection whose client has been silent longest"
)
ANY = "*"
HOST_NAME = r"(?i:\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)"
ORIGIN = r"[a-z][a-z0-9+.-]*://[^/\s]+|null|\*"
ORIGIN_FORM = "origins such as https://example.com, in lower case and without a path"


HostNames = Annotated[
    Collection[str], partial(json_words, pattern=HOST_NAME, what="names without scheme and port")
]
Origins = Annotated[Sequence[str], partial(json_words, pattern=ORIGIN, what=ORIGIN_FORM)]


@dataclass(frozen=True)
class Access(Keywords):
    """Where a server listens, and which clients may use it. The CORS flags have vLLM's names and
    form, with a safe default.

    Attributes:
        host: address to listen on
        port: port to listen on (0: a free one)
        shutdown_timeout: seconds that running requests may continue after the first signal
        allowed_hosts: host names that clients may use for the server, such as
            '["llm.example.com"]'; '["*"]': any. On a loopback address, the server always accepts
            localhost, 127.0.0.1, [::1] and --host, and rejects other names, which prevents attacks
            by web pages (DNS rebinding). On other addresses, the default is any name
        allowed_origins: other origins whose web pages may use the server, such as
            '["https://chat.example.com"]'; '["*"]': any (default: none). The server's own page
            needs it only behind a reverse proxy that changes the Host header
        allow_credentials: allow pages from --allowed-origins to send credentials (CORS)
        allowed_methods: methods that pages from --allowed-origins may use
        allowed_headers: headers that pages from --allowed-origins may send
    """

    # A client must send one of them; without keys, every client may use the server.
    api_keys: Sequence[str] = ()
    allowed_hosts: HostNames = ()
    allowed_origins: Origins = ()
    allow_credentials: bool = False
    allowed_methods: Words = (ANY,)
    allowed_headers: Words = (ANY,)
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    shutdown_timeout: Amount = 30.0

    def listen(self, keys: Sequence[str] = ()) -> tuple[socket.socket, Access]:
        """A bound socket, and these settings for a server that listens there, and lets in clients
        with these keys.

        Raises:
            UsageError: the address is taken, or not an address of this machine.
        """
        try:
            listener = bind(self.host, self.port)
        except OSError as error:
            hint = (
                f": try --port {free_port(self.host, self.port)}"
                if error.errno == errno.EADDRINUSE
                else ""
            )
            raise UsageError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror}{hint}"
            ) from error
        hosts = {host.lower() for host in self.allowed_hosts}
        if is_loopback(listener):
            bound = listener.getsockname()[0], self.host.lower()
            hosts |= {"localhost", "127.0.0.1", "[::1]"} | {
                f"[{h}]" if ":" in h else h for h in bound
            }
        return listener, replace(self, api_keys=list(dict.fromkeys(keys)), allowed_hosts=hosts)

    def knows_host(self, host: str) -> bool:
        """Whether clients may address the server by this name (the value of a Host header)."""
        return (
            not self.allowed_hosts
            or ANY in self.allowed_hosts
            or host_name(host) in self.allowed_hosts
        )


def host_name(host: str) -> str:
    """The name in a Host header, in lower case and without the port; "" if that is no host."""
    match = re.fullmatch(f"({HOST_NAME})(:[0-9]*)?", host.lower())
    return match[1].rstrip(".") if match else ""


def is_same_site(origin: str, host: str) -> bool:
    """Whether an Origin header names what the Host header does. The scheme is not compared: a proxy
    may have ended TLS."""
    scheme, _, site = origin.lower().partition("://")
    default_port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return site.removesuffix(default_port) == host.lower().removesuffix(default_port)


def api_keys(given: Sequence[str | None] = ()) -> list[str]:
    """The keys of --api-key, or else those of the environment, where `ps` does not show them.

    Raises:
        UsageError: a text that cannot be a key.
    """
    source = "--api-key"
    keys = [key for key in given if key is not None]
    if not keys and (text := os.environ.get("NANOVLLM_API_KEY", "").strip()):
        source = "NANOVLLM_API_KEY"
        keys = text.split(",")
    if not keys and (key := os.environ.get("VLLM_API_KEY", "")):
        source = "VLLM_API_KEY"
        keys = [key]
    keys = [key.strip() for key in keys]  # a secret from a file often ends with a line break
    if any(not key or "," in key for key in keys):
        raise UsageError(f"{source} must not be empty, and a key must not contain commas")
    return keys


# ---------------------------------------------------------------- the socket


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, made before the model loads so that a mistake shows at once. Port 0: any free
    one.

    Raises:
        OSError: the address is taken, or not one of this machine.
    """
    found = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )
    # asyncio sends small packets at once only where the socket says that it is TCP.
    listener = socket.socket(*found[0][:3])
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(found[0][4])
    return listener


def free_port(host: str, port: int) -> int:
    """The first port after this one that is free now; 0, which is any free one, if the next hundred
    are taken."""
    for other in range(port + 1, min(port + 101, 2**16)):
        with contextlib.suppress(OSError), bind(host, other):
            return other
    return 0


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
        f"Chat with it, and watch it work: {url}/\n\nOr try:\n\n "
        f" curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f'    -d \'{{"messages": [{{"role": "user", "content": "What is the capital of Japan?"}}],'
        f' "temperature": 0}}\'\n'
    )
