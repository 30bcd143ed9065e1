"""From token ids to text while they are being generated, and the search for stop strings in that text.

A token is not a character: "é" may take two tokens, and a token may end in the middle of an emoji. Decoding every
token on its own breaks such characters; decoding everything again for every token is quadratic. The detokenizer
here emits what no later token can change, and touches each token once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from nanovllm.text.tokenizer import BYTE_TOKEN, Tokenizer


class IncrementalDetokenizer:
    """The text of a growing sequence of token ids, in pieces that are final.

    Whatever the ids, the pieces together, with that of `flush`, are `tokenizer.decode(all_ids)`.

    What is held back depends on the tokenizer. With byte-level tokens it is the beginning of a character whose
    bytes are not complete, 3 bytes at most. With SentencePiece it is a run of byte tokens, until another token
    ends it: `tokenizers` decodes such a run as a whole, and one bad byte in it spoils all of its characters.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: leave out special tokens such as the end-of-text token.
        keep_leading_space: the ids continue a text, so the space of a first token "▁the" stays. Decoding drops it
            with SentencePiece (and only there), which is right at the beginning of a text and wrong after a prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, keep_leading_space: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        self._pieces: list[str] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._pending: list[int] = []  # SentencePiece: a run of byte tokens that has not ended
        # Any token in front keeps the space; a special one is sure to be no byte.
        self._context = tokenizer.all_special_ids[:1] if keep_leading_space else []

    @property
    def text(self) -> str:
        """Everything returned so far. Joins all pieces: not for every token."""
        return "".join(self._pieces)

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that has become final, which may be empty."""
        if self._utf8 is not None:
            kept = (index for index in token_ids if index not in self._skipped)
            piece = self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, kept)))
        else:
            piece = self._append_characters(token_ids)
        self._pieces.append(piece)
        return piece

    def flush(self) -> str:
        """Return what is held back; to be called once, after the last token."""
        if self._utf8 is not None:
            piece = self._utf8.decode(b"", final=True)
        else:
            piece = self._decode_in_context(self._pending)
            self._pending = []
        self._pieces.append(piece)
        return piece

    def _append_characters(self, token_ids: Sequence[int]) -> str:
        """`append` for SentencePiece: decode up to the last token that is not a byte token."""
        end = 0  # of what is final, in self._pending
        for index in token_ids:
            token = self._tokenizer.backend.id_to_token(index)
            if token is None or index in self._skipped:
                continue
            self._pending.append(index)
            if not BYTE_TOKEN.fullmatch(token):
                end = len(self._pending)
        if not end:
            return ""
        final, self._pending = self._pending[:end], self._pending[end:]
        piece = self._decode_in_context(final)
        self._context = final[-1:]
        return piece

    def _decode_in_context(self, token_ids: list[int]) -> str:
        """The text of tokens that come after `self._context`, the last token before them (none at the beginning).

        Only the first token of a text loses its leading space; with the token before in front, none of these is.
        """
        if not token_ids:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=False)[len(before) :]


class StopChecker:
    """Finds the first of several strings in a text that arrives in pieces, wherever the pieces are cut.

    The first is the one that is complete first, as if the text came one character at a time; of two complete with
    the same character the longer. So nothing depends on the pieces, and no text has to be generated to decide
    whether a string that is complete already is to count.

    Until it is known whether the end of the text is the beginning of a stop string, that end is held back: a stop
    string is never emitted in part. With `include_stop_str_in_output` there is nothing to hide, nor to hold back.

    The search is Knuth, Morris and Pratt's (SIAM J. Comput. 6(2), 1977), one automaton per string: its state is how
    much of the string the text ends with, which is both what finds it and what has to be held back. The work is
    linear in the text, however long and repetitive a client's stop strings are.

    Args:
        stop: the strings to look for.
        include_stop_str_in_output: whether the string that was found belongs to the text.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self._stop = tuple(stop)
        self._fallbacks = [border_lengths(string) for string in stop]
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
            The text to emit, and the stop string found or None. After one was found the text is over: what came
            behind it in the piece is dropped, and there is nothing to append or to flush.
        """
        unseen = len(self._held)
        self._held += text
        for end, character in enumerate(text, start=unseen + 1):
            complete = self._advance(character)
            if complete and check:
                matched = max(complete, key=len)
                return self._held[: end if self._include else end - len(matched)], matched
        hold = 0 if self._include else max(self._matched_lengths, default=0)
        cut = len(self._held) - hold
        emitted, self._held = self._held[:cut], self._held[cut:]
        return emitted, None

    def flush(self) -> str:
        """Return what is held back, when the text has ended for another reason."""
        emitted, self._held = self._held, ""
        return emitted

    def _advance(self, character: str) -> list[str]:
        """Feed one character to every automaton; return the stop strings that it completes."""
        complete = []
        for i, (string, fallback) in enumerate(zip(self._stop, self._fallbacks, strict=True)):
            length = self._matched_lengths[i]
            while length and string[length] != character:
                length = fallback[length - 1]
            length += string[length] == character
            if length == len(string):
                complete.append(string)
                length = fallback[-1]
            self._matched_lengths[i] = length
        return complete


def border_lengths(string: str) -> list[int]:
    """For each prefix of `string`, the length of the longest shorter prefix that it also ends with.

    border_lengths("abab") is [0, 0, 1, 2]: after "abab", "ab" is the most that can still be part of a match.
    """
    lengths = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[length] != string[i]:
            length = lengths[length - 1]
        length += string[length] == string[i]
        lengths[i] = length
    return lengths
