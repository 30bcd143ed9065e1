"""Turns token ids into text while they are generated, and searches that text for stop strings.

A token is not a character: "é" may take two tokens, and a token may end in the middle of an emoji.
Decoding every token on its own breaks such characters; decoding everything again for every token is
quadratic. This detokenizer emits text that no later token can change, and decodes each token once.
"""

import codecs
from collections.abc import Sequence

from nanovllm.text.token_decoder import Streaming
from nanovllm.text.tokenizer import Tokenizer

# Tokens without text at each end of a context; a run of more is cut in the middle.
MOST_EMPTY_TOKENS = 4
# No character of UTF-8 has more bytes than this before its last one.
MOST_BYTES_BEFORE_THE_LAST = 3


class IncrementalDetokenizer:
    """The text of a growing sequence of token ids, in pieces that are final.

    For any ids, the pieces and the one of `flush`, joined, equal `tokenizer.decode(all_ids)`.

    With byte-level tokens, the beginning of a character whose bytes are not complete is held back,
    at most 3 bytes. With SentencePiece, a run of byte tokens is held back until another token ends
    it: `tokenizers` decodes such a run as a whole, and one invalid byte makes all of its characters
    invalid. See `TokenDecoder.streaming` for other decoders.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: leave out special tokens such as the end-of-text token.
        prompt_token_ids: what the ids continue, if they are no text of their own. A first token
            "▁the" keeps its space, which SentencePiece drops otherwise, and a character that the
            prompt leaves incomplete belongs to the first piece if the first token continues it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.token_decoder
        self._tokens_are_bytes = self._decoder.streaming is Streaming.BYTES
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._begun = b""  # bytes of a character that is not complete
        self._pending: list[int] = []  # tokens whose text is not final, unless tokens are bytes
        self._context: list[int] = []  # tokens before them
        # Until the first token: a prompt that ends inside a character.
        self._prompt: Sequence[int] = ()
        self._num_known = 0  # characters of the pending text that the prompt has already
        if prompt_token_ids is not None:
            self._continue(prompt_token_ids)

    def _continue(self, prompt_token_ids: Sequence[int]) -> None:
        """Begin inside the character that a prompt leaves incomplete, if it does."""
        # Any token in front keeps the space; a special token is never a byte.
        self._context = self._tokenizer.all_special_ids[:1]
        tail, spelled = incomplete_tail(self._tokenizer, prompt_token_ids)
        self._prompt = prompt_token_ids if tail else ()
        self._decode_bytes(spelled)
        if tail and not self._tokens_are_bytes:
            self._pending = tail
            self._num_known = len(self._decode_in_context(tail).rstrip("\ufffd"))

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that has become final, which may be empty."""
        if self._prompt and token_ids:
            if not continues_prompt(self._tokenizer, self._prompt, token_ids):
                self._drop_prompt()
            self._prompt = ()
        if self._tokens_are_bytes:
            if not self._skipped.isdisjoint(token_ids):
                token_ids = [index for index in token_ids if index not in self._skipped]
            # The same in less time, as in most steps.
            is_single = len(token_ids) == 1 and not self._begun
            if is_single and (text := self._tokenizer.ascii_text(token_ids[0])) is not None:
                return text
            return self._decode_bytes(b"".join(map(self._tokenizer.token_bytes, token_ids)))
        end = 0  # in self._pending, the end of the last token after which the text is final
        for index in token_ids:
            if index in self._skipped:
                continue
            if (token := self._tokenizer.backend.id_to_token(index)) is not None:
                self._pending.append(index)
                if self._is_final_after(index, token):
                    end = len(self._pending)
        final = self._pending[:end]
        self._pending = self._pending[end:]
        piece = self._decode_in_context(final)
        if final:
            # Tokens without text, such as a first "▁", do not show that text has begun.
            self._context = final if piece else [*self._context, *final]
            if not piece and len(self._context) > 2 * MOST_EMPTY_TOKENS:
                self._context = (
                    self._context[:MOST_EMPTY_TOKENS] + self._context[-MOST_EMPTY_TOKENS:]
                )
        return self._without_known(piece) if final else ""

    def _drop_prompt(self) -> None:
        """Leave the character that the prompt has begun to the prompt: no token continues it."""
        self._begun = b""
        self._pending = []
        self._num_known = 0

    def _is_final_after(self, index: int, token: str) -> bool:
        """True if no later token can change the text up to this one."""
        if self._decoder.streaming is Streaming.AT_THE_END:
            return False
        if self._decoder.is_byte_level:
            self._decode_bytes(self._tokenizer.token_bytes(index))
            return not self._begun
        return not self._decoder.is_byte_token(token)

    def flush(self) -> str:
        """Return the text that is held back; to be called once, after the last token."""
        if self._prompt:
            return ""
        if self._tokens_are_bytes:
            return self._decode_bytes(b"", final=True)
        return self._without_known(self._decode_in_context(self._pending))

    def _decode_bytes(self, spelled: bytes, final: bool = False) -> str:
        """Return the characters that some more bytes complete; invalid bytes become U+FFFD. With
        `final`, so do those of a character that is not complete."""
        spelled = self._begun + spelled
        text, length = codecs.utf_8_decode(spelled, "replace", final)
        self._begun = spelled[length:]
        return text

    def _without_known(self, piece: str) -> str:
        """The first piece without the characters that the prompt has already."""
        known = self._num_known
        self._num_known = 0
        return piece[known:]

    def _decode_in_context(self, token_ids: list[int]) -> str:
        """The text of tokens that come after `self._context`, tokens before them (none at the
        beginning).

        Only the first token of a text loses its leading space; the tokens in front take this place.
        """
        if not token_ids:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=False)[
            len(before) :
        ]


def incomplete_tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[list[int], bytes]:
    """The last tokens of a prompt, if it ends inside a character: from the token in which that
    character begins.

    Returns:
        The tokens, and the bytes that they have of the character; both are empty if the prompt's
        last character is whole.
    """
    tail: list[int] = []
    spelled = b""
    for index in reversed(token_ids):
        token = tokenizer.convert_ids_to_tokens([index])[0] or ""
        is_bytes = tokenizer.token_decoder.is_byte_level or tokenizer.token_decoder.is_byte_token(
            token
        )
        if (
            not is_bytes
            or index in tokenizer.all_special_ids
            or len(spelled) >= MOST_BYTES_BEFORE_THE_LAST
        ):
            break
        tail = [index, *tail]
        spelled = tokenizer.token_bytes(index) + spelled
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(spelled)
        incomplete, _ = decoder.getstate()
        if incomplete:
            return tail, incomplete
    return [], b""


def continues_prompt(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], token_ids: Sequence[int]
) -> bool:
    """True if a prompt ends inside a character, and the first of these tokens continues that
    character."""
    if not token_ids or token_ids[0] in tokenizer.all_special_ids:
        return False
    _, begun = incomplete_tail(tokenizer, prompt_token_ids)
    byte = tokenizer.token_bytes(token_ids[0])[:1]
    return bool(begun and byte) and _continues(begun, byte)


def whole_characters(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of a prompt with its special tokens, and without a character that it leaves
    incomplete."""
    tail, _ = incomplete_tail(tokenizer, token_ids)
    if tail and not tokenizer.token_decoder.is_byte_level:
        # Each of these tokens is a byte of that character.
        token_ids = token_ids[: -len(tail)]
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    return text.removesuffix("\ufffd") if tail and tokenizer.token_decoder.is_byte_level else text


class TextOffsets:
    """Counts at which character of the output each token begins. A token that continues a character
    of the previous token begins where that character does.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: the text has no special tokens.
        prompt_token_ids: what the tokens continue.
        start: characters in front of the first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
        start: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._position = start
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(incomplete_tail(tokenizer, prompt_token_ids)[1])

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._position
        if token_id in self._skipped:
            return offset
        spelled = self._tokenizer.token_bytes(token_id)
        begun, _ = self._utf8.getstate()
        if begun and spelled and not _continues(begun, spelled[:1]):
            offset += 1  # after the U+FFFD of the character that nothing completes
        self._position += len(self._utf8.decode(spelled))
        return offset


def _continues(begun: bytes, byte: bytes) -> bool:
    """True if a byte continues the character that these bytes begin."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(begun + byte)
    except UnicodeDecodeError:
        return False
    return True


class StopChecker:
    """Finds the first of several strings in a text that arrives in pieces, wherever the pieces are
    cut.

    The first is the one that is complete first, as if the text arrived one character at a time; of
    two that are complete at the same character, the longer. So the result does not depend on the
    pieces, and no further text is needed to decide.

    If the end of the text may be the beginning of a stop string, that end is held back: a stop
    string is never emitted in part. With `include_stop_str_in_output` nothing is held back.

    The search is by Knuth, Morris and Pratt (SIAM J. Comput. 6(2), 1977), one automaton per string.
    Its state is the number of the string's characters that the text ends with: it finds the string,
    and says how much to hold back. The work is linear in the text, however long and repetitive a
    client's stop strings are.

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
            check: whether a stop string that becomes complete here counts. False while the request
                is below its `min_tokens`; one that begins there and is complete later counts.

        Returns:
            The text to emit, and the stop string found or None. A stop string ends the text: the
            rest of the piece is dropped, and neither `append` nor `flush` may be called again.
        """
        if not self._stop:
            return text, None
        start = len(self._held) + 1
        self._held = self._held + text
        for end, character in enumerate(text, start):
            complete = self._advance(character)
            if complete and check:
                matched = max(complete, key=len)
                return self._held[: end if self._include else end - len(matched)], matched
        cut = len(self._held) - (0 if self._include else max(self._matched_lengths))
        emitted = self._held[:cut]
        self._held = self._held[cut:]
        return emitted, None

    def flush(self) -> str:
        """Return the text that is held back, when the text has ended for another reason."""
        emitted = self._held
        self._held = ""
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
    """Finds the place at which a form begins in output that arrives in pieces.

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
    """How many characters of `string` a text ends with after one more character, if it ended with
    `length` < len(string) of them.

    Args:
        borders: see `border_lengths`.
    """
    while length and string[length] != character:
        length = borders[length - 1]
    return length + (string[length] == character)
