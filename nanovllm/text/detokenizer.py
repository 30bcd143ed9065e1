"""Turns token ids into text while they are generated, and searches that text for stop strings.

A token is not a character: "é" may take two tokens, and a token may end in the middle of an emoji. Decoding every
token on its own breaks such characters; decoding everything again for every token is quadratic. This detokenizer
emits text that no later token can change, and decodes each token once.
"""

import codecs
from collections.abc import Sequence

from nanovllm.text.tokenizer import BYTE_TOKEN, Tokenizer


class IncrementalDetokenizer:
    """The text of a growing sequence of token ids, in pieces that are final.

    For any ids, the pieces and the one of `flush`, joined, equal `tokenizer.decode(all_ids)`.

    With byte-level tokens, the beginning of a character whose bytes are not complete is held back, at most 3 bytes. With
    SentencePiece, a run of byte tokens is held back until another token ends it: `tokenizers` decodes such a run as a
    whole, and one invalid byte makes all of its characters invalid.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: leave out special tokens such as the end-of-text token.
        keep_leading_space: keep the space of a first token "▁the", since the ids continue a text. SentencePiece (and
            only it) drops this space when decoding, which is right only at the beginning of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, keep_leading_space: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._pending: list[int] = []  # SentencePiece: a run of byte tokens that has not ended
        # Any token in front keeps the space; a special token is never a byte.
        self._context = tokenizer.all_special_ids[:1] if keep_leading_space else []

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that has become final, which may be empty."""
        kept = [index for index in token_ids if index not in self._skipped]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, kept)))
        end = 0  # SentencePiece: in self._pending, the end of the last token that is not a byte token
        for index in kept:
            if (token := self._tokenizer.backend.id_to_token(index)) is not None:
                self._pending.append(index)
                if not BYTE_TOKEN.fullmatch(token):
                    end = len(self._pending)
        final, self._pending = self._pending[:end], self._pending[end:]
        piece = self._decode_in_context(final)
        self._context = final[-1:] or self._context
        return piece

    def flush(self) -> str:
        """Return the text that is held back; to be called once, after the last token."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._decode_in_context(self._pending)

    def _decode_in_context(self, token_ids: list[int]) -> str:
        """The text of tokens that come after `self._context`, the last token before them (none at the beginning).

        Only the first token of a text loses its leading space; the token in front takes this place.
        """
        if not token_ids:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=False)[len(before) :]


class StopChecker:
    """Finds the first of several strings in a text that arrives in pieces, wherever the pieces are cut.

    The first is the one that is complete first, as if the text arrived one character at a time; of two that are complete
    at the same character, the longer. So the result does not depend on the pieces, and no further text is needed to
    decide.

    If the end of the text may be the beginning of a stop string, that end is held back: a stop string is never emitted
    in part. With `include_stop_str_in_output` nothing is held back.

    The search is by Knuth, Morris and Pratt (SIAM J. Comput. 6(2), 1977), one automaton per string. Its state is the
    number of the string's characters that the text ends with: it finds the string, and says how much to hold back. The
    work is linear in the text, however long and repetitive a client's stop strings are.

    Args:
        stop: the strings to look for, none of them empty.
        include_stop_str_in_output: keep the string that was found in the text.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._borders = [border_lengths(string) for string in stop]
        self._matched_lengths = [0] * len(stop)
        self._include = include_stop_str_in_output
        self._held = ""

    def append(self, text: str, check: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            text: what follows the pieces so far.
            check: whether a stop string that becomes complete here counts. False while the request is below its
                `min_tokens`; one that begins there and is complete later counts.

        Returns:
            The text to emit, and the stop string found or None. A stop string ends the text: the rest of the piece is
            dropped, and neither `append` nor `flush` may be called again.
        """
        if not self._stop:
            return text, None
        start, self._held = len(self._held) + 1, self._held + text
        for end, character in enumerate(text, start):
            complete = self._advance(character)
            if complete and check:
                matched = max(complete, key=len)
                return self._held[: end if self._include else end - len(matched)], matched
        cut = len(self._held) - (0 if self._include else max(self._matched_lengths))
        emitted, self._held = self._held[:cut], self._held[cut:]
        return emitted, None

    def flush(self) -> str:
        """Return the text that is held back, when the text has ended for another reason."""
        emitted, self._held = self._held, ""
        return emitted

    def _advance(self, character: str) -> list[str]:
        """Feed one character to every automaton; return the stop strings that it completes."""
        complete = []
        for i, (string, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            length = matched_length(string, borders, self._matched_lengths[i], character)
            if length == len(string):
                complete.append(string)
                length = borders[-1]
            self._matched_lengths[i] = length
        return complete


class FormFinder:
    """Finds out where in a text, which arrives in pieces, a form begins.

    Args:
        begins: the form's first characters; "": there is no form.
    """

    def __init__(self, begins: str) -> None:
        self._begins = begins
        self._end = ""
        self._found = False

    def has_begun(self, text: str) -> bool:
        """Take the next piece; True once the form has begun."""
        if self._begins and not self._found:
            written = self._end + text
            self._found = self._begins in written
            self._end = written[-len(self._begins) :]
        return self._found


def border_lengths(string: str) -> list[int]:
    """For each prefix of `string`, the length of the longest shorter prefix that it also ends with.

    border_lengths("abab") is [0, 0, 1, 2]: after "abab", at most "ab" can still be part of a match.
    """
    lengths = [0] * len(string)
    for i in range(1, len(string)):
        lengths[i] = matched_length(string, lengths, lengths[i - 1], string[i])
    return lengths


def matched_length(string: str, borders: Sequence[int], length: int, character: str) -> int:
    """How many characters of `string` a text ends with after one more character, if it ended with `length` < len(string) of them.

    Args:
        borders: see `border_lengths`.
    """
    while length and string[length] != character:
        length = borders[length - 1]
    return length + (string[length] == character)
