"""Policies that choose the server for a request: round robin, or by prefix.

`prefix_aware` is what vLLM's production stack calls prefixaware, and SGLang's and vLLM's routers
cache_aware. A router has no tokenizer, so it compares text: it divides a request into pieces, and
computes a hash of each piece and all pieces before it, as a prefix cache does for its blocks.
`EngineRouter` in `features/data_parallel/router.py` does the same for the engines within one
server, with real blocks.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from nanovllm.router.backends import Backend

# Bytes per piece: some sixty tokens, a few blocks.
PIECE_BYTES = 256
# The most pieces of a request that are compared. More would cost time without changing the choice.
ROUTED_PIECES = 64
# Hashes to remember per server (about 150 bytes each): enough for a cache of a million tokens.
CAPACITY = 16384
# A server whose running requests exceed those of the least busy server by more than this gets no
# request because of a cached prefix.
MAX_IMBALANCE = 8


def round_robin(candidates: Sequence[Backend], body: Mapping[str, object]) -> Backend:
    """Return the server that was chosen least recently."""
    return min(candidates, key=lambda each: each.turn)


def prefix_aware(candidates: Sequence[Backend], body: Mapping[str, object]) -> Backend:
    """Return the server that has already received the longest prefix of the request. From now on,
    the request's text counts as cached there.

    Servers with more than `MAX_IMBALANCE` running requests above the least busy one are excluded.
    Of servers with equally long prefixes, the least busy one is chosen, and of equally busy ones
    the one that was chosen least recently."""
    names = prefix_names(body)

    def num_cached(each: Backend) -> int:
        return next((i for i, name in enumerate(names) if name not in each.sent), len(names))

    least = min(candidate.num_running for candidate in candidates)
    not_too_busy = [each for each in candidates if each.num_running - least <= MAX_IMBALANCE]
    chosen = min(not_too_busy, key=lambda each: (-num_cached(each), each.num_running, each.turn))
    for name in reversed(names):  # the last piece first, so that it is evicted first
        chosen.sent[name] = None
        chosen.sent.move_to_end(name)
    while len(chosen.sent) > CAPACITY:
        chosen.sent.popitem(last=False)
    return chosen


POLICIES = {"round_robin": round_robin, "prefix_aware": prefix_aware}
_turns = itertools.count(1)


def choose(policy: str, candidates: Sequence[Backend], body: Mapping[str, object]) -> Backend:
    """Choose the server for a request with one of `POLICIES`.

    Args:
        candidates: the servers to choose from; at least one.
        body: the request.
    """
    chosen = POLICIES[policy](candidates, body)
    chosen.turn = next(_turns)
    return chosen


def prefix_names(body: Mapping[str, object]) -> list[bytes]:
    """Return the hashes of a request's first whole pieces. Two requests have the same hash only if
    they have the same text up to the end of this piece, and the same model, cache salt and
    tools."""
    prompt = body.get("messages") or body.get("prompt")
    if isinstance(prompt, list):  # of token ids or messages; more of them are never compared
        prompt = prompt[: ROUTED_PIECES * PIECE_BYTES]
    # The JSON of a longer list begins with the JSON of its prefix.
    text = msgspec.json.encode(
        [body.get("model"), body.get("cache_salt"), body.get("tools"), prompt]
    )
    name = b""
    names = []
    for end in range(PIECE_BYTES, min(len(text), ROUTED_PIECES * PIECE_BYTES) + 1, PIECE_BYTES):
        name = hashlib.blake2b(name + text[end - PIECE_BYTES : end], digest_size=16).digest()
        names.append(name)
    return names
