"""Which of several servers gets a request: they take turns, or each prefix has a home server.

`prefix_aware` is what vLLM's production stack calls prefixaware, and SGLang's and vLLM's routers
cache_aware. A router has no tokenizer, so it compares texts: it divides a request into pieces, and
names each by a hash of this piece and all before it, as a prefix cache names its blocks.
`scheduler.data_parallel.Router` does the same for the engines within one server, with real blocks.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from nanovllm.router.backends import Backend

# Bytes per piece: some sixty tokens, a few blocks.
PIECE_BYTES = 256
# Requests that agree in so many pieces count as equal: comparing more would only cost time.
ROUTED_PIECES = 64
# Names to remember per server (some 150 bytes each), as if its cache had a million tokens.
CAPACITY = 16384
# A server may have so many more running requests than the least busy one and still get a request
# for the sake of its prefix.
MAX_IMBALANCE = 8


def round_robin(candidates: Sequence[Backend], body: Mapping[str, object]) -> Backend:
    """The server whose last request is the oldest."""
    return min(candidates, key=lambda each: each.turn)


def prefix_aware(candidates: Sequence[Backend], body: Mapping[str, object]) -> Backend:
    """The server that has been sent the longest part of the request before, unless it is too busy;
    else the least busy one; among equals they take turns. From now on the request's text counts as
    cached there."""
    names = prefix_names(body)

    def num_cached(each: Backend) -> int:
        return next((i for i, name in enumerate(names) if name not in each.sent), len(names))

    least = min(candidate.num_running for candidate in candidates)
    not_too_busy = [each for each in candidates if each.num_running - least <= MAX_IMBALANCE]
    chosen = min(not_too_busy, key=lambda each: (-num_cached(each), each.num_running, each.turn))
    for name in reversed(names):  # the end of a text is dropped before its beginning
        chosen.sent[name] = None
        chosen.sent.move_to_end(name)
    while len(chosen.sent) > CAPACITY:
        chosen.sent.popitem(last=False)
    return chosen


POLICIES = {"round_robin": round_robin, "prefix_aware": prefix_aware}
_turns = itertools.count(1)


def choose(policy: str, candidates: Sequence[Backend], body: Mapping[str, object]) -> Backend:
    """The server that gets a request, by one of POLICIES.

    Args:
        candidates: the servers that can get it; at least one.
        body: the request.
    """
    chosen = POLICIES[policy](candidates, body)
    chosen.turn = next(_turns)
    return chosen


def prefix_names(body: Mapping[str, object]) -> list[bytes]:
    """Names of a request's first whole pieces. Requests share a name only if they agree in
    everything up to there, and in the fields that keep caches apart (model, salt and tools)."""
    prompt = body.get("messages") or body.get("prompt")
    if isinstance(prompt, list):  # token ids or messages, no more of them than can matter
        prompt = prompt[: ROUTED_PIECES * PIECE_BYTES]
    # A list that goes on has the same JSON up to there.
    text = msgspec.json.encode(
        [body.get("model"), body.get("cache_salt"), body.get("tools"), prompt]
    )
    name = b""
    names = []
    for end in range(PIECE_BYTES, min(len(text), ROUTED_PIECES * PIECE_BYTES) + 1, PIECE_BYTES):
        name = hashlib.blake2b(name + text[end - PIECE_BYTES : end], digest_size=16).digest()
        names.append(name)
    return names
