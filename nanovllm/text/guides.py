"""A matcher that knows how to end: its output is complete within the number of tokens that a
request may have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from nanovllm.data.structured_outputs import Form

# Bytes that end parts of JSON soon, the best first, where no string is open; with two orders of the
# beginnings of values.
SHORT_ENDS = (b'}],:"0123456789tfn-[{', b'}],:0123456789ntf"-[{')
# Random ways to the end that are tried where no other has been found, for example through a regular
# expression.
RANDOM_TRIES = 4
# Tokens other than the next one on the way to the end that are tried anew, with one search each.
MAX_SEARCHES = 8
# Tokens after which a search that found nothing is repeated; the next time, twice as many, but
# never more than this share of the tokens that are left: a way to the end may be found from another
# place.
SEARCH_AGAIN = 16
SHARE_WITHOUT_SEARCH = 1 / 4
# The longest way to the end that is looked for, in JSON and in other grammars, whose steps may take
# milliseconds.
LONGEST_END_OF_JSON = 512
LONGEST_END = 128


class TokenTable:
    """The spelling of tokens: what a search for a short end needs of a vocabulary."""

    def __init__(self, trie: LLTokenizer) -> None:
        self.eos_token_ids = set(trie.eos_tokens)
        self.spelled = [trie.decode_bytes([token]) for token in range(trie.vocab_size)]
        # The token of each byte; -1 if it has none of its own.
        self.of_byte = np.full(256, -1)
        for token, spelling in enumerate(self.spelled):
            if len(spelling) == 1 and token not in self.eos_token_ids:
                self.of_byte[spelling[0]] = token
        self.quoted = [token for token, spelling in enumerate(self.spelled) if b'"' in spelling]
        self.quoted_twice = [token for token in self.quoted if self.spelled[token].count(b'"') > 1]


class KeyReader:
    """Reads JSON byte by byte, and notices a key that comes twice in an object.

    Text before, between and after JSON values is skipped, up to the next bracket.

    Args:
        begins: the text after which JSON comes; "": the output begins with it.
    """

    def __init__(self, begins: str = "") -> None:
        self._begins = begins.encode()
        self._before = b""
        # Of each open bracket: the keys so far, None for an array.
        self._keys: list[set[str] | None] = []
        self._string: bytearray | None = None  # the string that is open
        self._is_escaped = False
        self._expects_key = False

    def copy(self) -> KeyReader:
        """A reader in the same state."""
        other = KeyReader()
        vars(other).update(vars(self))
        other._keys = [None if keys is None else set(keys) for keys in self._keys]
        other._string = None if self._string is None else bytearray(self._string)
        return other

    @property
    def in_string(self) -> bool:
        """Whether a string is open."""
        return self._string is not None

    @property
    def in_key(self) -> bool:
        """Whether the string that is open is a key."""
        return self.in_string and self._expects_key

    @property
    def is_inside(self) -> bool:
        """Whether a bracket is open."""
        return bool(self._keys)

    @property
    def has_keys(self) -> bool:
        """Whether a key could come twice."""
        return any(self._keys)

    def read(self, text: bytes) -> bool:
        """Take the next bytes; False if an object repeats a key."""
        return all(self._read(byte) for byte in text)

    def _read(self, byte: int) -> bool:
        character = chr(byte)
        if self._string is not None:
            return self._read_in_string(byte, character)
        if self._begins:
            self._before = (self._before + bytes([byte]))[-len(self._begins) :]
            if self._before != self._begins:
                return True
            self._begins = b""
            self._before = b""
            return True
        if character in "{[":
            self._keys.append(set() if character == "{" else None)
            self._expects_key = character == "{"
        elif character in "}]" and self._keys:
            self._keys.pop()
            self._expects_key = False
        elif character == "," and self._keys:
            self._expects_key = self._keys[-1] is not None
        elif character == '"':
            self._string = bytearray()
        return True

    def _read_in_string(self, byte: int, character: str) -> bool:
        assert self._string is not None
        if character == '"' and not self._is_escaped:
            written = bytes(self._string)
            self._string = None
            keys = self._keys[-1] if self._keys else None
            if not self._expects_key or keys is None:
                return True
            self._expects_key = False
            key = unescaped(written)
            is_new = key not in keys
            keys.add(key)
            return is_new
        self._is_escaped = character == "\\" and not self._is_escaped
        self._string.append(byte)
        return True


def unescaped(written: bytes) -> str:
    """The text of a JSON string, given what is between its quotes."""
    text = written.decode("utf-8", "replace")
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:  # the form is not JSON
        return text


def _kind(character: str) -> str:
    """Return "0" for a digit, "a" for a lower-case letter, and "A" for other characters."""
    if character.isdigit():
        return "0"
    return "a" if character.islower() else "A"


class Guide:
    """A matcher with foresight. It has the methods of `LLMatcher` that masks need.

    It looks for a short way to the end of the output from time to time: as often as it must, since
    one token adds no more to this way than the form's `cost_of_beginning`. Once the tokens that are
    left are just enough, it allows only tokens after which they still are.

    Args:
        matcher: has consumed nothing.
        table: the vocabulary of the matcher.
        form: what is known about the grammar.

    Attributes:
        is_tight: whether only tokens in `fitting` may come next; see `look_ahead`.
    """

    def __init__(self, matcher: LLMatcher, table: TokenTable, form: Form) -> None:
        self.matcher = matcher
        self.table = table
        self.form = form
        self.keys = KeyReader(form.free_text_before)
        self.is_tight = False
        self._remaining = 0
        self._num_tokens = 0
        self._next_look = 0
        self._search_again = SEARCH_AGAIN
        self._longest_end = LONGEST_END_OF_JSON if "json" in form.grammar else LONGEST_END
        self._end: list[int] | None = None  # tokens that complete the output
        self._last_end: list[int] = []  # tokens that completed it when the guide last looked
        # The same, after each token that `fitting` has returned.
        self._ends: dict[int, list[int]] = {}

    # ---------------------------------------------------------------- as a matcher

    def deep_copy(self) -> Guide:
        """A guide in the same state."""
        other = Guide(self.matcher.deep_copy(), self.table, self.form)
        other.keys = self.keys.copy()
        return other

    def is_error(self) -> bool:
        """Whether the grammar cannot be followed any further."""
        return self.matcher.is_error()

    def get_error(self) -> str:
        """Why."""
        return self.matcher.get_error()

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Take the next tokens; False if they do not fit."""
        for token in tokens:
            self._end = self._ends.get(token)
            self._ends = {}
            if self._last_end[:1] == [token]:
                self._last_end = self._last_end[1:]
            self._read(token)
        self._num_tokens += len(tokens)
        return self.matcher.consume_tokens(list(tokens))

    def compute_bitmask(self) -> bytes:
        """A bit per token: whether it may come next. See `LLMatcher.compute_bitmask`."""
        mask = self.matcher.compute_bitmask()
        if not self.form.has_open_objects or not self.keys.has_keys:
            return mask
        candidates = self.table.quoted if self.keys.in_key else self.table.quoted_twice
        bits = np.frombuffer(mask, dtype=np.uint8).copy()
        for token in candidates:
            if bits[token >> 3] >> (token & 7) & 1 and not self.keys.copy().read(
                self.table.spelled[token]
            ):
                bits[token >> 3] &= ~(1 << (token & 7)) & 255
        return bits.tobytes() if bits.any() else mask

    # ---------------------------------------------------------------- foresight

    def look_ahead(self, remaining: int | None) -> None:
        """Find out whether the end has to be kept in sight; sets `is_tight`.

        Args:
            remaining: how many tokens the output may still have, with the one that ends it; None:
                any number.
        """
        self.is_tight = False
        if (
            remaining is None
            or self.is_error()
            or (self._end is None and self._num_tokens < self._next_look)
        ):
            return
        self._remaining = remaining
        if self._end is None and self._last_end and self._allows(self._last_end):
            self._end = self._last_end  # for example, within a string
        if self._end is None:
            self._end = self._shortest_end(remaining)
        if self._end is None:
            self._next_look = self._num_tokens + min(
                self._search_again, max(1, int(SHARE_WITHOUT_SEARCH * remaining))
            )
            self._search_again *= 2
            return
        self._search_again = SEARCH_AGAIN
        self._last_end = self._end
        cost = self.form.cost_of_beginning
        slack = remaining - len(self._end) - cost
        self.is_tight = slack <= 0 and len(self._end) <= remaining
        if not self.is_tight:
            self._next_look = self._num_tokens + max(slack, 0) // (cost + 1)
            self._end = None

    def fitting(self, candidates: Iterable[int]) -> list[int]:
        """The next token of a short way to the end, and those candidates after which the output can
        still be completed.

        Args:
            candidates: tokens that the mask allows, the likeliest first.
        """
        assert self._end is not None
        self._ends = {self._end[0]: self._end[1:]}
        num_searches = 0
        for token in candidates:
            if token in self._ends:
                continue
            if token in self.table.eos_token_ids:
                self._ends[token] = []
            elif len(self._end) < self._remaining and self._allows([token, *self._end]):
                self._ends[token] = self._end
            elif num_searches < MAX_SEARCHES:
                num_searches += 1
                after = self.deep_copy()
                end = (
                    after._way_to_end(SHORT_ENDS[0], self._remaining - 1, min)
                    if after.consume_tokens([token])
                    else None
                )
                if end is not None:
                    self._ends[token] = end
        return list(self._ends)

    def _allows(self, tokens: list[int]) -> bool:
        """Whether these tokens can come next, one after the other."""
        if self.matcher.validate_tokens(tokens) < len(tokens):
            return False
        if not self.form.has_open_objects:
            return True
        return self.keys.copy().read(b"".join(self.table.spelled[token] for token in tokens[:-1]))

    def _read(self, token: int) -> bool:
        return token in self.table.eos_token_ids or self.keys.read(self.table.spelled[token])

    def _shortest_end(self, limit: int) -> list[int] | None:
        """The shortest of the ways to the end that are found: tokens, the last of which ends the
        output. None if all are longer than `limit`, or none is found."""
        limit = min(limit, self._longest_end)
        best: list[int] | None = None
        for order in SHORT_ENDS:
            draw: Callable[[list[int]], int] = min
            found = self.deep_copy()._way_to_end(
                order, limit if best is None else len(best) - 1, draw
            )
            best = found if found is not None else best
        for seed in range(RANDOM_TRIES):
            if best is None:
                best = self.deep_copy()._way_to_end(
                    SHORT_ENDS[0], limit, random.Random(seed).choice
                )
        return best

    def _way_to_end(
        self, order: bytes, limit: int, draw: Callable[[list[int]], int]
    ) -> list[int] | None:
        """Go to the end, byte by byte, where the text is not forced. This guide is used up."""
        way: list[int] = []
        known: set[bytes] = set()
        while len(way) < limit:
            if self.matcher.is_accepting():
                return [*way, min(self.table.eos_token_ids)]
            forced = self.matcher.compute_ff_tokens()
            tokens = list(forced) or self._step(order, known, draw)
            way += tokens
            if (
                not tokens
                or not all([self._read(token) for token in tokens])
                or not self.matcher.consume_tokens(tokens)
            ):
                return None
        return None

    def _step(self, order: bytes, known: set[bytes], draw: Callable[[list[int]], int]) -> list[int]:
        """The token of one byte that comes next on a way to the end; none if nothing may come.

        Args:
            known: the sets of bytes that were allowed where the way was free. A byte after which
                another set is allowed leads on. A set is added.
        """
        of_byte = self.table.of_byte
        preferred = b""
        if self.keys.in_string:
            preferred = b'"'
        elif self.keys.is_inside:
            preferred = order
        for byte in preferred:
            token = int(of_byte[byte])
            if token >= 0 and self.matcher.validate_tokens([token]) == 1 and self._can_read(token):
                return [token]
        if example := self._example():
            return example
        allowed = self._allowed_bytes()
        known.add(allowed)
        choices = [byte for byte in allowed if chr(byte).isalnum()] or [*allowed]
        # Of bytes that seem to be alike, one letter or digit of each kind is tried.
        kinds = {_kind(chr(byte)): byte for byte in choices[::-1]}
        for byte in [*(byte for byte in allowed if byte not in choices), *kinds.values()]:
            after = self.matcher.deep_copy()
            if after.consume_tokens([int(of_byte[byte])]):
                ahead = Guide(after, self.table, self.form)
                if after.is_accepting() or ahead._allowed_bytes() not in known:
                    return [int(of_byte[byte])]
        return [int(of_byte[draw(choices)])] if choices else []

    def _example(self) -> list[int]:
        """The shortest rest of an example, as tokens of one byte, after which the string or the
        output can end; none if there is none."""
        quote = b'"' if self.keys.in_string else b""
        found: list[list[int]] = []
        for example in self.form.examples:
            written = example.encode()
            for start in range(len(written)):
                tokens = [int(self.table.of_byte[byte]) for byte in written[start:] + quote]
                fits = -1 not in tokens and self.matcher.validate_tokens(tokens) == len(tokens)
                if fits and (quote or self._accepts_after(tokens)):
                    found.append(tokens)
        return min(found, key=len, default=[])

    def _accepts_after(self, tokens: list[int]) -> bool:
        after = self.matcher.deep_copy()
        return after.consume_tokens(tokens) and after.is_accepting()

    def _allowed_bytes(self) -> bytes:
        """The printable ASCII characters that may come next, as single tokens; other bytes only if
        there is none."""
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(mask, bitorder="little")
        every = np.flatnonzero((self.table.of_byte >= 0) & bits[self.table.of_byte].astype(bool))
        printable = every[(every >= 32) & (every < 127) & (every != ord("\\"))]
        return bytes((printable if len(printable) else every).tolist())

    def _can_read(self, token: int) -> bool:
        return not self.form.has_open_objects or self.keys.copy().read(self.table.spelled[token])
