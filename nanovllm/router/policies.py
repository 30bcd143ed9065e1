"""Policies that choose the server for a request, as functions of plain state.

    random       any server, with equal probability
    round_robin  the next server
    load         the least busy server
    estimated    the longest prefix among those that were sent to a server, unless it is too busy
    precise      the longest prefix among those that a server really has cached, likewise

`estimated` is what vLLM's production stack calls prefixaware, and SGLang's and vLLM's routers
cache_aware; `precise` is the production stack's kvaware, and the precise prefix cache scorer of
llm-d. `EngineRouter` in `features/data_parallel/router.py` makes the same choices as `estimated`.

A set of servers is an int with one bit per server, so a choice costs a few operations per block of
the prompt and per level of load, whatever the number of servers. Nothing here knows HTTP, a clock
or tokens: a prompt is a sequence of names, one per block, each of which stands for its block and
all blocks before it.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

# The most blocks of a prompt that are compared. More would cost time without changing the choice.
ROUTED_BLOCKS = 64
# A server whose load exceeds the lowest load by more than this gets no request because of a cached
# prefix.
MAX_IMBALANCE = 8
MASK_64 = 2**64 - 1


class Weights(NamedTuple):
    """Weights of llm-d's scorers. The server with the highest sum of weighted scores is chosen.

    The scores, from 0 to 1, are the share of the prompt's blocks that the server has (`prefix`),
    the share of its KV memory that is free (`kv`), and where its load is between the highest load
    (0) and the lowest (1) of all servers (`queue`).
    """

    prefix: float = 0
    kv: float = 0
    queue: float = 0


class PrefixIndex:
    """Which servers have which blocks.

    Attributes:
        where: the servers that have a block, by its name.
    """

    def __init__(self) -> None:
        self.where: dict[Hashable, int] = {}

    def add(self, server: int, name: Hashable) -> None:
        """Record that a server has a block."""
        self.where[name] = self.where.get(name, 0) | 1 << server

    def remove(self, server: int, names: Iterable[Hashable]) -> None:
        """Record that a server no longer has these blocks, all of which it had."""
        where = self.where
        bit = 1 << server
        for name in names:
            if left := where.pop(name) ^ bit:
                where[name] = left

    def longest(self, names: Iterable[Hashable], servers: int) -> int:
        """Return those of the servers that have the most leading blocks."""
        where = self.where
        for name in names:
            if not (fewer := servers & where.get(name, 0)):
                break
            servers = fewer
        return servers

    def lengths(self, names: Sequence[Hashable], servers: int) -> list[tuple[int, int]]:
        """Return how many leading blocks the servers have: each number with the servers that have
        exactly this many, largest number first."""
        found = []
        for count, name in enumerate(names):
            more = servers & self.where.get(name, 0)
            if fewer := servers ^ more:
                found.append((count, fewer))
            servers = more
            if not servers:
                return found[::-1]
        return [(len(names), servers), *reversed(found)]


class SentPrefixes(PrefixIndex):
    """The blocks that were sent to each server, the least recently used ones forgotten first.

    Args:
        num_servers: how many servers there are.
        capacity: blocks to remember per server.
    """

    def __init__(self, num_servers: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        # Of each server: its blocks, in the order in which they will be forgotten.
        self._sent: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(num_servers)]

    def remember(self, server: int, names: Sequence[Hashable]) -> None:
        """Record that a prompt was sent to a server."""
        sent = self._sent[server]
        where = self.where
        bit = 1 << server
        move_to_end = sent.move_to_end
        for name in reversed(names):  # the last block is forgotten first
            servers = where.get(name, 0)
            if servers & bit:
                move_to_end(name)
            else:
                sent[name] = None
                where[name] = servers | bit
        num_extra = len(sent) - self.capacity
        if num_extra > 0:
            oldest = list(islice(sent, num_extra))
            for name in oldest:
                del sent[name]
            self.remove(server, oldest)

    def forget(self, server: int) -> None:
        """Forget what was sent to a server, since its cache was emptied."""
        self.remove(server, self._sent[server])
        self._sent[server].clear()


class RouterState:
    """The servers' loads and blocks, on which a choice depends.

    Args:
        num_servers: how many servers there are.
        capacity: blocks to remember per server, for `estimated`.
        max_imbalance: the most by which the chosen server's load may exceed the lowest load.
        weights: choose by the sum of weighted scores instead; None: see `estimated`.
        seed: of `random`.

    Attributes:
        everyone: all servers.
        sent: the prompts that were sent to each server.
        cached: the blocks that each server has, as the servers report them.
        turn: the server after the one that was chosen last.
        num_choices: how many requests have been routed.
        loads: each server's load, and the percentage of its KV memory that is in use.
        levels: all different loads, in ascending order.
        at: the servers that have a load.
    """

    def __init__(
        self,
        num_servers: int,
        capacity: int = 0,
        max_imbalance: int = MAX_IMBALANCE,
        weights: Weights | None = None,
        seed: int = 0,
    ) -> None:
        self.num_servers = num_servers
        self.max_imbalance = max_imbalance
        self.weights = weights
        self.seed = seed
        self.everyone = (1 << num_servers) - 1
        self.sent = SentPrefixes(num_servers, capacity)
        self.cached = PrefixIndex()
        self.turn = 0
        self.num_choices = 0
        self.loads = [(0, 0)] * num_servers
        self.levels = [(0, 0)]
        self.at = {(0, 0): self.everyone}

    def set_load(self, server: int, load: int, kv_percent: int = 0) -> None:
        """Record a server's load.

        Args:
            load: such as its number of running requests.
            kv_percent: the percentage of its KV memory that is in use; only `weights` need it.
        """
        old, new = self.loads[server], (load, kv_percent)
        if old == new:
            return
        self.loads[server] = new
        self.at[old] ^= 1 << server
        if not self.at[old]:
            del self.at[old]
            del self.levels[bisect.bisect_left(self.levels, old)]
        if new not in self.at:
            bisect.insort(self.levels, new)
            self.at[new] = 0
        self.at[new] |= 1 << server


# Chooses one of the servers in the last argument, which has at least one, for a prompt.
Policy = Callable[[RouterState, Sequence[Hashable], int], int]


def random(state: RouterState, names: Sequence[Hashable], servers: int) -> int:
    """Return any of the servers, with equal probability."""
    number = random_bits(state.seed, state.num_choices) % servers.bit_count()
    low, high = 0, state.num_servers
    while high - low > 1:  # the server that has `number` others before it
        middle = (low + high) // 2
        before = (servers & ((1 << middle) - 1)).bit_count()
        low, high = (middle, high) if before <= number else (low, middle)
    return low


def round_robin(state: RouterState, names: Sequence[Hashable], servers: int) -> int:
    """Return `state.turn` or, if it is not among the servers, the next one that is."""
    later = servers >> state.turn
    if later:
        return (later & -later).bit_length() - 1 + state.turn
    return (servers & -servers).bit_length() - 1


def load(state: RouterState, names: Sequence[Hashable], servers: int) -> int:
    """Return the server with the lowest load; of several, the next one."""
    return _best(state, state.cached, (), servers)


def estimated(state: RouterState, names: Sequence[Hashable], servers: int) -> int:
    """Return the server to which most leading blocks were sent. Servers whose load exceeds the
    lowest load by more than `max_imbalance` are excluded. Of servers with equally many blocks, the
    one with the lowest load is chosen, and of several the next one."""
    return _best(state, state.sent, names, servers)


def precise(state: RouterState, names: Sequence[Hashable], servers: int) -> int:
    """Return the server that has most leading blocks cached, with the rules of `estimated`."""
    return _best(state, state.cached, names, servers)


def _best(state: RouterState, index: PrefixIndex, names: Sequence[Hashable], servers: int) -> int:
    if state.weights is not None:
        return _highest_score(state, index, names, servers, state.weights)
    near: list[int] = []
    union = limit = 0
    for level in state.levels:
        if near and level[0] > limit:
            break
        if having := state.at[level] & servers:
            if not near:
                limit = level[0] + state.max_imbalance
            near.append(having)
            union |= having
    best = index.longest(names, union)
    for having in near:
        if best & having:
            break
    return round_robin(state, (), best & having)


def _highest_score(
    state: RouterState,
    index: PrefixIndex,
    names: Sequence[Hashable],
    servers: int,
    weights: Weights,
) -> int:
    """Return the server with the highest sum of scores; of several, the next one."""
    levels = [(level, having) for level in state.levels if (having := state.at[level] & servers)]
    least, most = levels[0][0][0], levels[-1][0][0]
    lengths = index.lengths(names, servers)
    highest = -1.0
    best = 0
    for (load, kv_percent), having in levels:
        score = weights.kv * (100 - kv_percent) / 100
        score += weights.queue * (most - load) / (most - least) if most > least else weights.queue
        # The longest prefix is the best of those with this load.
        count, those = next((count, found) for count, some in lengths if (found := some & having))
        score += weights.prefix * count / max(1, len(names))
        if score > highest:
            highest = score
            best = those
        elif score == highest:
            best |= those
    return round_robin(state, (), best)


def random_bits(seed: int, number: int) -> int:
    """Return a random number of 64 bits (SplitMix64): the same for the same arguments, in every
    version of Python."""
    bits = (seed + (number + 1) * 0x9E3779B97F4A7C15) & MASK_64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK_64
    return bits ^ bits >> 31


POLICIES: dict[str, Policy] = {
    "random": random,
    "round_robin": round_robin,
    "load": load,
    "estimated": estimated,
    "precise": precise,
}
# Other names of policies.
SAME_POLICY = {"prefix_aware": "estimated"}


class Router:
    """Chooses servers with one of `POLICIES`, and keeps what the next choice depends on.

    Args:
        policy: its name, or the one in `SAME_POLICY`.
        state: the state, whose loads and cached blocks the caller keeps up to date.
        max_blocks: the most blocks of a prompt that are compared.

    Attributes:
        compares_prefixes: the policy needs the names of the prompt's blocks.
        reads_caches: it needs to know which blocks each server has cached.
    """

    def __init__(self, policy: str, state: RouterState, max_blocks: int = ROUTED_BLOCKS) -> None:
        policy = SAME_POLICY.get(policy, policy)
        self.state = state
        self.max_blocks = max_blocks
        self.compares_prefixes = policy in ("estimated", "precise")
        self.reads_caches = policy == "precise"
        self._policy = POLICIES[policy]
        self._remembers = policy == "estimated" and state.sent.capacity > 0

    def choose(self, names: Sequence[Hashable], servers: int | None = None) -> int:
        """Return the server for a request; with `estimated`, its prompt then counts as cached
        there.

        Args:
            names: the names of the prompt's blocks.
            servers: the servers to choose from, at least one; None: all.
        """
        state = self.state
        names = names[: self.max_blocks]
        server = self._policy(state, names, state.everyone if servers is None else servers)
        state.turn = (server + 1) % state.num_servers
        state.num_choices += 1
        if self._remembers:
            state.sent.remember(server, names)
        return server
