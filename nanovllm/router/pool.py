"""The servers of one role, and which of them gets a request.

A router has no tokenizer, so it compares text: it divides a request into pieces, and computes a
hash of each piece and all pieces before it, as a prefix cache does for its blocks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from nanovllm.router.backends import Backend
from nanovllm.router.policies import ROUTED_BLOCKS, Router, RouterState, Weights

# Bytes per piece: about 60 tokens, a few blocks.
PIECE_BYTES = 256
# Hashes to remember per server (about 150 bytes each): enough for a cache of a million tokens.
CAPACITY = 16384


class BackendPool:
    """Servers of one role.

    Args:
        servers: the servers, healthy or not. The pool watches their health, since a server that was
            away may have an empty cache.
        policy: the name of the policy that chooses among them.
        capacity: pieces of text to remember per server.
        weights: of the scores by which the policy chooses. A load is then the number of requests
            that wait at the server, as in llm-d; without weights, it is the number of requests
            that the router has sent and that run.
    """

    def __init__(
        self,
        servers: Sequence[Backend],
        policy: str,
        capacity: int = CAPACITY,
        weights: Weights | None = None,
    ) -> None:
        self.servers = servers
        self.state = RouterState(len(servers), capacity, weights=weights)
        self._router = Router(policy, self.state)
        for number, server in enumerate(servers):
            server.on_change = functools.partial(self.state.sent.forget, number)

    @property
    def is_healthy(self) -> bool:
        """True if one of the servers gets requests."""
        return any(server.is_healthy for server in self.servers)

    def choose(self, body: Mapping[str, object], tried: Sequence[Backend] = ()) -> Backend | None:
        """Choose one of the healthy servers that were not tried yet for a request; None if there is
        none."""
        candidates = 0
        for number, server in enumerate(self.servers):
            self.state.set_load(number, *self._load_of(server))
            candidates |= (server.is_healthy and server not in tried) << number
        if not candidates:
            return None
        names = prefix_names(body) if self._router.compares_prefixes else ()
        return self.servers[self._router.choose(names, candidates)]

    def _load_of(self, server: Backend) -> tuple[int, int]:
        if self.state.weights is None:
            return server.num_running, 0
        return server.num_waiting, server.kv_percent


def prefix_names(body: Mapping[str, object]) -> list[bytes]:
    """Return the hashes of a request's first whole pieces. Two requests have the same hash only if
    they have the same text up to the end of this piece, and the same model, cache salt and
    tools."""
    prompt = body.get("messages") or body.get("prompt")
    if isinstance(prompt, list):  # of token ids or messages; more of them are never compared
        prompt = prompt[: ROUTED_BLOCKS * PIECE_BYTES]
    # The JSON of a longer list begins with the JSON of its prefix.
    text = msgspec.json.encode(
        [body.get("model"), body.get("cache_salt"), body.get("tools"), prompt]
    )
    name = b""
    names = []
    for end in range(PIECE_BYTES, min(len(text), ROUTED_BLOCKS * PIECE_BYTES) + 1, PIECE_BYTES):
        name = hashlib.blake2b(name + text[end - PIECE_BYTES : end], digest_size=16).digest()
        names.append(name)
    return names
