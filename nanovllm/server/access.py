"""Who may use a server, and how much it takes from a client: settings, flags and limits. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.server.listen import is_loopback

MAX_BODY_BYTES = 10 * 2**20
# Of all requests that have not been answered, together.
MAX_HELD_BYTES = 256 * 2**20
# What JSON may contain. Strings, lists and objects cost the parser and the validation most: a chat of 5,000 messages has 30,000.
MAX_NODES = 2**15
# Commas between all values: what remains are numbers, such as token ids, a million of which take 0.1 s.
MAX_VALUES = 2**20
# A client has to send all headers, and then the whole body, within these times.
HEADER_SECONDS = 20.0
BODY_SECONDS = 60.0
# Files that the process may need for other things than connections.
RESERVED_FILES = 100
MAX_CONNECTIONS = 10_000

# What needs no key. The page asks for the key itself.
OPEN_PATHS = frozenset(("/", "/health", "/version", "/metrics", "/docs", "/openapi.json"))
OPEN_FOLDER = "/web/"

LIMITS = (
    f"Limits: a request's headers (16 KiB) must arrive within {HEADER_SECONDS:.0f} s and its body "
    f"({MAX_BODY_BYTES // 2**20} MiB, {MAX_NODES} strings, lists and objects, {MAX_VALUES} values) within {BODY_SECONDS:.0f} s, "
    "else the request is refused or the connection closed. The bodies of all requests "
    f"that are not answered yet have {MAX_HELD_BYTES // 2**20} MiB; beyond them the server answers 503. It keeps as many "
    f"connections as the process may open files, less {RESERVED_FILES}, and at most {MAX_CONNECTIONS}; beyond them it closes "
    "the one whose client has kept it waiting for longest."
)
ANY = "*"
# "name", "name:port", "[::1]:port"
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)(:[0-9]*)?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+|null")


@dataclass(frozen=True)
class Access:
    """Who may use a server.

    Attributes:
        api_keys: a client must send one of them; without any, every client may come in.
        allowed_hosts: names by which clients may address the server, in lower case and without port. "*": all names.
        allowed_origins: web pages from elsewhere that may use it, as "https://example.com". "*": all pages.
        allow_credentials, allowed_methods, allowed_headers: what such a page may send, as CORS has it.
    """

    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] = frozenset([ANY])
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = (ANY,)
    allowed_headers: tuple[str, ...] = (ANY,)

    @classmethod
    def from_arguments(
        cls, arguments: argparse.Namespace, listener: socket.socket, api_keys: Sequence[str] = ()
    ) -> Access:
        """The settings on a command line, for a server that listens there."""
        hosts = {host.lower() for host in arguments.allowed_hosts}
        if is_loopback(listener):
            bound = listener.getsockname()[0], arguments.host.lower()
            hosts |= {"localhost", "127.0.0.1", "[::1]"} | {f"[{h}]" if ":" in h else h for h in bound}
        return cls(
            tuple(dict.fromkeys(api_keys)),
            frozenset(hosts or {ANY}),
            tuple(arguments.allowed_origins),
            arguments.allow_credentials,
            tuple(arguments.allowed_methods),
            tuple(arguments.allowed_headers),
        )

    def knows_host(self, host: str) -> bool:
        """Whether a client may address the server so: a Host header's value."""
        return ANY in self.allowed_hosts or host_name(host) in self.allowed_hosts

    def knows_origin(self, origin: str | None) -> bool:
        """Whether pages of this origin may use the server, although it is not the server's own."""
        return ANY in self.allowed_origins or origin in self.allowed_origins


DEFAULT_ACCESS = Access()


def host_name(host: str) -> str:
    """The name in a Host header, in lower case and without the port; "" if that is no host."""
    match = HOST.fullmatch(host.lower())
    return match[1].rstrip(".") if match else ""


def is_same_site(origin: str, host: str) -> bool:
    """Whether an Origin header names what the Host header does. The scheme is not compared: a proxy may have ended TLS."""
    scheme, _, site = origin.lower().partition("://")
    default_port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return site.removesuffix(default_port) == host.lower().removesuffix(default_port)


def add_access_arguments(parser: argparse._ActionsContainer) -> None:
    """Which host names and which web pages are let in. CORS flags have vLLM's names and form; the default is safe here."""
    parser.add_argument(
        "--allowed-hosts",
        type=_hosts,
        default=[],
        metavar="JSON",
        help="""names by which clients may address the server, such as '["llm.example.com"]'; '["*"]': all. On a loopback """
        "address it always answers to localhost, 127.0.0.1, [::1] and --host, and refuses other names, since a web page could "
        "reach it by a name of its own (DNS rebinding). On other addresses the default is all names",
    )
    parser.add_argument(
        "--allowed-origins",
        type=_origins,
        default=[],
        metavar="JSON",
        help="""other origins whose web pages may use the server, such as '["https://chat.example.com"]'; '["*"]': all """
        "(default: none). The server's own page needs it only behind a reverse proxy that changes the Host header",
    )
    parser.add_argument(
        "--allow-credentials", action="store_true", help="let pages of --allowed-origins send credentials (CORS)"
    )
    for name in ("methods", "headers"):
        parser.add_argument(
            f"--allowed-{name}",
            type=_words,
            default=[ANY],
            metavar="JSON",
            help=f"""{name} that pages of --allowed-origins may send (default: '["*"]')""",
        )


def _words(text: str) -> list[str]:
    try:
        words = json.loads(text)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise argparse.ArgumentTypeError(f"""must be a JSON list of strings such as '["*"]', got {text!r}""")
    return words


def _hosts(text: str) -> list[str]:
    for host in (words := _words(text)):
        match = HOST.fullmatch(host.lower())
        if match is None or match[2] is not None:
            raise argparse.ArgumentTypeError(f"must be names without scheme and port, got {host!r}")
    return words


def _origins(text: str) -> list[str]:
    for origin in (words := _words(text)):
        if origin != ANY and not ORIGIN.fullmatch(origin):
            message = f"must be origins such as https://example.com, in lower case and without a path, got {origin!r}"
            raise argparse.ArgumentTypeError(message)
    return words


def api_keys(given: Sequence[str] = ()) -> list[str]:
    """The keys of --api-key, or else those of the environment, where `ps` does not show them.

    Raises:
        ValueError: one of them cannot be a key.
    """
    source, keys = "--api-key", list(given)
    if not keys and (text := os.environ.get("NANOVLLM_API_KEY", "").strip()):
        source, keys = "NANOVLLM_API_KEY", text.split(",")
    if not keys and (key := os.environ.get("VLLM_API_KEY", "")):
        source, keys = "VLLM_API_KEY", [key]
    keys = [key.strip() for key in keys]  # a secret that is kept in a file often ends with a line break
    if any(not key or "," in key for key in keys):
        raise ValueError(f"{source} must not be empty, and must not have commas in a key")
    return keys
