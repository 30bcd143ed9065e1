"""Reads from a tokenizer's decoder how tokens become text: which tokens are bytes, and when text is
final."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence

import tokenizers

from nanovllm.data.json import JsonObject

#: The spelling of a single byte in SentencePiece vocabularies.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# GPT-2's alphabet: each byte as a visible character, so that a vocabulary of bytes can be stored as
# text. Visible Latin-1 characters represent themselves; the other 68 bytes follow in order from
# U+0100 on.
_ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
_BYTES = sorted(range(256), key=lambda byte: chr(byte) not in _ALPHABET)
BYTE_OF_CHARACTER = dict(zip(_ALPHABET, _BYTES, strict=True))


class Streaming(enum.Enum):
    """How the text of a growing sequence of tokens can be streamed."""

    #: Tokens are strings of bytes, and nothing else happens to the text.
    BYTES = "bytes"
    #: What a token adds depends on the tokens before it, and never changes what they have added.
    IN_CONTEXT = "in context"
    #: A later token may change the text of earlier ones, so no text is final before the last token.
    AT_THE_END = "at the end"


class TokenDecoder:
    """The decoder of a tokenizer.json, however deeply its steps are nested.

    Attributes:
        steps: the descriptions of the decoder's steps, in order, without the `Sequence`s around
            them.
        is_byte_level: tokens are strings of bytes in GPT-2's alphabet (Llama 3, Qwen).
        has_byte_tokens: tokens such as "<0xE2>" stand for single bytes (Llama 2, Gemma).
        streaming: how text can be streamed.
    """

    def __init__(self, decoder: tokenizers.decoders.Decoder | None) -> None:
        self.steps = [] if decoder is None else _flat_steps(json.loads(decoder.__getstate__()))
        kinds = [step["type"] for step in self.steps]
        self.is_byte_level = "ByteLevel" in kinds
        self.has_byte_tokens = "ByteFallback" in kinds
        self.streaming = _streaming(self.steps)
        # Turns tokens into characters: those of the text or, before a ByteLevel step, those of the
        # alphabet.
        self._to_characters = decoder
        if self.is_byte_level:
            self._to_characters = _decoder_of(self.steps[: kinds.index("ByteLevel")])

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a token, in the vocabulary's spelling, adds to text that has begun."""
        if self.is_byte_token(token):
            return bytes.fromhex(token[3:5])
        characters = self._characters_in_the_middle(token)
        if not self.is_byte_level:
            return characters.encode()
        # A special token may hold characters outside the alphabet, such as a space: it is plain
        # text.
        values = [BYTE_OF_CHARACTER.get(character) for character in characters]
        return (
            characters.encode()
            if None in values
            else bytes(value for value in values if value is not None)
        )

    def is_byte_token(self, token: str) -> bool:
        """True for the spelling of a single byte: its text is known once the run of such tokens has
        ended."""
        return self.has_byte_tokens and BYTE_TOKEN.fullmatch(token) is not None

    def _characters_in_the_middle(self, token: str) -> str:
        """The characters that a token adds between two others."""
        if self.is_byte_level and self._to_characters is None:
            return token
        before = self._characters(["x"])
        after = self._characters(["x", "x"])[len(before) :]
        return self._characters(["x", token, "x"])[len(before) :].removesuffix(after)

    def _characters(self, tokens: list[str]) -> str:
        # Without a decoder, `tokenizers` joins tokens by spaces.
        return (
            " ".join(tokens) if self._to_characters is None else self._to_characters.decode(tokens)
        )


def _decoder_of(steps: list[JsonObject]) -> tokenizers.decoders.Decoder | None:
    """A decoder with these steps alone; None without any."""
    if not steps:
        return None
    decoder = tokenizers.decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())
    return decoder


def _flat_steps(step: JsonObject) -> list[JsonObject]:
    """The steps of a decoder, without the sequences around them."""
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flat_steps(part)]


def _streaming(steps: Sequence[JsonObject]) -> Streaming:
    """How text can be streamed through these steps."""
    kinds = [step["type"] for step in steps]
    if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
        return Streaming.BYTES
    is_one_text = False  # the steps so far have joined the tokens to one text
    for step in steps:
        if is_one_text and not _keeps_a_prefix(step):
            return Streaming.AT_THE_END
        is_one_text = is_one_text or step["type"] in ("ByteLevel", "Fuse")
    return Streaming.IN_CONTEXT


def _keeps_a_prefix(step: JsonObject) -> bool:
    """True if a step, applied to a whole text, changes the beginning of the text in the same way
    whatever follows."""
    match step["type"]:
        case "Fuse":
            return True
        case "Strip":
            # Of more than one space at the beginning, how many are left depends on how the text is
            # divided.
            return bool(step["stop"] == 0 and step["start"] <= 1)
        case "Replace":
            return len(step["pattern"].get("String", "")) == 1
        case _:
            return False
