"""Text in pieces is the text as a whole; stop strings are found and never leaked, wherever the
pieces are cut."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.text.detokenizer import (
    IncrementalDetokenizer,
    StopChecker,
    border_lengths,
    whole_characters,
)
from nanovllm.text.token_decoder import BYTE_OF_CHARACTER, Streaming
from nanovllm.text.tokenizer import Tokenizer
from tests.examples import examples

EMOJI = "👩‍🚀"
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level_backend(decoder: decoders.Decoder) -> Backend:
    """Every byte, a few longer tokens that end inside a character, and a special token with a space
    in it."""
    character_of_byte = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}

    def spell(data: bytes) -> str:
        return "".join(character_of_byte[byte] for byte in data)

    pieces = [
        *SPECIAL,
        *character_of_byte.values(),
        spell(b" the"),
        spell(b"\xf0\x9f"),
        spell(b"a\xe2\x82"),
    ]
    pieces += [spell(b"\xac b"), spell("\ufffd".encode()), spell(b"\x91\xa9\xe2")]
    backend = Backend(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token in [*SPECIAL, "<a special ▁ one>"]]
    )
    backend.add_tokens(["<tool call>"])
    return backend


def sentencepiece_backend(decoder: decoders.Decoder) -> Backend:
    pieces = [
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁the",
        "a",
        "é",
        "a▁",
        EMOJI,
    ]
    backend = Backend(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


def llama_decoder(*strip: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def nested(*steps: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Sequence([decoders.Sequence(list(steps))])])


def word_backend(decoder: decoders.Decoder | None) -> Backend:
    """A vocabulary of words and their endings, which no checkpoint for text generation has, but a
    file may."""
    pieces = [
        *SPECIAL,
        "the",
        "##ing",
        "ing</w>",
        "a</w>",
        ".",
        "|",
        "▁",
        "▁a",
        "'",
        "n't",
        "é",
        "<pad>",
        "a",
        " ",
        "",
    ]
    backend = Backend(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


BACKENDS = {
    "byte-level": byte_level_backend(decoders.ByteLevel()),
    "byte-level in sequences": byte_level_backend(nested(decoders.ByteLevel(), decoders.Fuse())),
    "byte-level, stripped": byte_level_backend(
        nested(decoders.ByteLevel(), decoders.Strip(" ", 1, 0))
    ),
    "byte-level, spelled otherwise": byte_level_backend(
        nested(decoders.Replace("▁", "Ġ"), decoders.ByteLevel())
    ),
    "byte-level, one letter replaced": byte_level_backend(
        nested(decoders.ByteLevel(), decoders.Replace("€", "E"))
    ),
    "byte-level, words replaced": byte_level_backend(
        nested(decoders.ByteLevel(), decoders.Replace(" the", "!"))
    ),
    "llama": sentencepiece_backend(llama_decoder(decoders.Strip(" ", 1, 0))),
    "llama, nested": sentencepiece_backend(nested(llama_decoder(), decoders.Strip(" ", 1, 0))),
    "llama, stripped twice": sentencepiece_backend(llama_decoder(decoders.Strip(" ", 2, 0))),
    "gemma": sentencepiece_backend(llama_decoder()),
    "metaspace": sentencepiece_backend(decoders.Metaspace()),
    "metaspace, never stripped": sentencepiece_backend(decoders.Metaspace(prepend_scheme="never")),
    "metaspace with bytes": sentencepiece_backend(
        nested(decoders.ByteFallback(), decoders.Metaspace())
    ),
    "bytes alone": sentencepiece_backend(decoders.ByteFallback()),
    "bytes of a joined text": sentencepiece_backend(
        nested(decoders.Fuse(), decoders.ByteFallback())
    ),
    "no decoder": word_backend(None),
    "an empty sequence": word_backend(nested()),
    "word pieces": word_backend(decoders.WordPiece()),
    "word ends": word_backend(decoders.BPEDecoder()),
    "repeated letters": word_backend(decoders.CTC()),
}
# Decoders whose text a later token may change, so that no part of it can be sent early.
ONLY_AT_THE_END = {"byte-level, words replaced", "llama, stripped twice", "bytes of a joined text"}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
SMALL_VOCABULARY = 280  # larger than that of any of the above: ids without a token come up too

# Bytes of which valid, truncated, overlong and impossible sequences are made, more often than by
# chance.
TELLING_BYTES = [
    0x20,
    0x41,
    0x80,
    0x82,
    0x9F,
    0xA0,
    0xAC,
    0xBF,
    0xC0,
    0xC3,
    0xE0,
    0xE2,
    0xED,
    0xF0,
    0xF4,
    0xF5,
    0xFF,
]
TELLING_IDS = [*(3 + byte for byte in TELLING_BYTES), *range(3), *range(259, SMALL_VOCABULARY)]
IDS = st.lists(st.sampled_from(TELLING_IDS) | st.integers(0, SMALL_VOCABULARY), max_size=40)


def cut(sequence: Sequence, sizes: list[int]) -> list[Sequence]:
    """The sequence in pieces of these sizes (repeated; 0 is an empty piece)."""
    pieces, start, i = [], 0, 0
    while start < len(sequence):
        size = sizes[i % len(sizes)]
        pieces.append(sequence[start : start + size])
        start, i = start + size, i + 1
    return pieces


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


def check_detokenizer(
    tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    emitted = ""
    for piece in cut(token_ids, sizes):
        emitted += detokenizer.append(piece)
        assert expected.startswith(emitted), "what was emitted must be final"
    emitted += detokenizer.flush()
    assert emitted == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(400, by_day=40))
@given(token_ids=IDS, sizes=SIZES, skip=st.booleans())
def test_pieces_are_the_text_for_any_ids(
    name: str, token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    check_detokenizer(TOKENIZERS[name], token_ids, sizes, skip)


def test_what_can_be_streamed() -> None:
    waiting = {
        name
        for name, each in TOKENIZERS.items()
        if each.token_decoder.streaming is Streaming.AT_THE_END
    }
    assert waiting == ONLY_AT_THE_END


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(200, by_day=20))
@given(before=IDS, token=st.sampled_from(TELLING_IDS), after=IDS)
def test_bytes_of_a_token_are_what_it_adds_to_a_text(
    name: str, before: list[int], token: int, after: list[int]
) -> None:
    """As far as it adds whole characters: a part of one adds nothing that can be compared."""
    tokenizer = TOKENIZERS[name]
    spelled = tokenizer.token_bytes(token)
    assert isinstance(spelled, bytes)
    if name in ONLY_AT_THE_END or name in ("repeated letters", "byte-level, one letter replaced"):
        return  # what a token adds depends on its neighbours
    whole = (
        tokenizer.backend.token_to_id("a")
        if tokenizer.backend.token_to_id("a") is not None
        else 3 + 0x41
    )
    context = [whole, *(index for index in before if index != token), whole]
    text = tokenizer.decode([*context, token, whole], skip_special_tokens=False)
    start = tokenizer.decode(context, skip_special_tokens=False)
    end = tokenizer.decode([whole, whole], skip_special_tokens=False)[
        len(tokenizer.decode([whole], False)) :
    ]
    assert text.startswith(start) and text.endswith(end)
    assert text[len(start) : len(text) - len(end)] == spelled.decode(errors="replace")


@pytest.fixture(scope="session")
def course_tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model("smollm2-135m"))


@settings(max_examples=examples(300))
@given(token_ids=st.lists(st.integers(0, 49160), max_size=40), sizes=SIZES, skip=st.booleans())
def test_pieces_are_the_text_for_the_course_model(
    course_tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    check_detokenizer(course_tokenizer, token_ids, sizes, skip)


@given(text=st.text() | st.text(f"é€{EMOJI}🇫🇷 a"), sizes=SIZES)
def test_pieces_of_real_text_for_the_course_model(
    course_tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    check_detokenizer(course_tokenizer, course_tokenizer.encode(text), sizes, skip=True)


def test_byte_level_text_comes_as_soon_as_a_character_is_whole() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    byte_ids = [tokenizer.backend.token_to_id(character) for character in BYTE_OF_CHARACTER]
    id_of_byte = dict(zip(BYTE_OF_CHARACTER.values(), byte_ids, strict=True))
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append([id_of_byte[byte]]) for byte in "a€b".encode()]
    assert pieces == ["a", "", "", "€", "b"]
    # A bad byte is final at once, and the next character is not delayed by it.
    pieces = [detokenizer.append([id_of_byte[byte]]) for byte in b"\xff\xe2\x82A"]
    assert pieces == ["\ufffd", "", "", "\ufffdA"]
    assert detokenizer.append([id_of_byte[0xF0]]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_sentencepiece_byte_run_is_decided_as_a_whole() -> None:
    tokenizer = TOKENIZERS["llama"]
    a = tokenizer.backend.token_to_id("a")
    euro = [3 + byte for byte in "€".encode()]
    good, bad = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    assert [good.append([index]) for index in [*euro, a]] == ["", "", "", "€a"]
    # `tokenizers` replaces each byte of a run with a bad one: emitting "€" early would have been
    # wrong.
    assert [bad.append([index]) for index in [*euro, 3 + 0xFF, a]] == [
        "",
        "",
        "",
        "",
        "\ufffd" * 4 + "a",
    ]
    assert tokenizer.decode([*euro, 3 + 0xFF, a]) == "\ufffd" * 4 + "a"


def test_leading_space_after_a_prompt() -> None:
    tokenizer = TOKENIZERS["llama"]
    the = tokenizer.backend.token_to_id("▁the")
    assert IncrementalDetokenizer(tokenizer).append([the, the]) == "the the"
    continued = IncrementalDetokenizer(tokenizer, prompt_token_ids=[])
    assert [continued.append([the]), continued.append([the])] == [" the", " the"]
    byte_level = TOKENIZERS["byte-level"]
    the = byte_level.backend.token_to_id("Ġthe")
    for prompt in ([], None):
        assert IncrementalDetokenizer(byte_level, prompt_token_ids=prompt).append([the]) == " the"


@pytest.mark.parametrize(
    "name", ["byte-level", "byte-level, stripped", "llama", "gemma", "metaspace with bytes"]
)
@settings(max_examples=examples(200))
@given(text=st.text(f"é€{EMOJI}🇫🇷 a", min_size=1), where=st.integers(0), sizes=SIZES)
def test_a_character_that_a_prompt_leaves_incomplete(
    name: str, text: str, where: int, sizes: list[int]
) -> None:
    """Prompt and answer have the characters of the whole text, wherever it is cut."""
    tokenizer = TOKENIZERS[name]
    byte_ids = {tokenizer.token_bytes(index): index for index in range(3, 259)}
    token_ids = [byte_ids[bytes([byte])] for byte in text.encode()]
    at = where % len(token_ids)
    prompt = whole_characters(tokenizer, [2, *token_ids[:at]])
    assert prompt == tokenizer.decode([2], False) + text.encode()[:at].decode(errors="ignore")
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=token_ids[:at])
    answer = "".join(map(detokenizer.append, cut(token_ids[at:], sizes))) + detokenizer.flush()
    assert prompt + answer == tokenizer.decode([2], False) + text


def test_nothing_completes_what_a_prompt_leaves_incomplete() -> None:
    for name in ("byte-level", "byte-level, stripped", "llama"):
        tokenizer = TOKENIZERS[name]
        byte_ids = {tokenizer.token_bytes(index): index for index in range(3, 259)}
        prompt = [byte_ids[b"\xf0"], byte_ids[b"\x9f"]]
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt)
        emitted = detokenizer.append([tokenizer.backend.token_to_id("a")])
        assert (emitted, detokenizer.flush()) == ("a", "")
        assert IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt).flush() == ""
        # A special token ends the character, too.
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=[*prompt, 2])
        assert detokenizer.append([tokenizer.backend.token_to_id("a")]) == "a"
        assert whole_characters(tokenizer, [*prompt, 2]) == tokenizer.decode([*prompt, 2], False)


class CountingTokenizer(Tokenizer):
    """Counts the tokens that pass through `decode` and `token_bytes`."""

    decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        self.decoded += 1
        return super().token_bytes(token_id)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ["words", "bad bytes", "bytes without end", "special tokens"])
def test_work_is_linear_in_the_length(name: str, kind: str) -> None:
    tokenizer = CountingTokenizer(BACKENDS[name])
    spelled = (tokenizer.backend.token_to_id(token) for token in ("▁the", "Ġthe", "the"))
    the = next(token for token in spelled if token is not None)
    byte = min(3 + 0xFF, tokenizer.backend.get_vocab_size() - 1)
    cycle = {
        "words": [the],
        "bad bytes": [byte, byte, the],
        "bytes without end": [byte],
        "special tokens": [2],
    }[kind]
    length = 2000
    detokenizer = IncrementalDetokenizer(tokenizer)
    for i in range(length):
        detokenizer.append([cycle[i % len(cycle)]])
    detokenizer.flush()
    assert tokenizer.decoded <= 20 * length


# --- Stop strings ---------------------------------------------------------------------------------


def first_stop(text: str, stop: list[str]) -> tuple[int, int] | None:
    """Where the stop string that is complete first begins and ends, the longest if several end
    there."""
    ends = [
        (start + len(s), start)
        for s in stop
        for start in range(len(text))
        if text.startswith(s, start)
    ]
    if not ends:
        return None
    end, start = min(ends)
    return start, end


def stream(checker: StopChecker, pieces: Sequence[str]) -> tuple[list[str], str | None]:
    """What is emitted for each piece up to a match, or the end."""
    emitted = []
    for piece in pieces:
        text, matched = checker.append(piece)
        emitted.append(text)
        if matched is not None:
            return emitted, matched
    return [*emitted, checker.flush()], None


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=examples(1000))
@given(text=st.text("abc", max_size=30), stop=STOPS, sizes=SIZES, include=st.booleans())
@example(text="abcabd", stop=["abd"], sizes=[1], include=False)
@example(text="aaab", stop=["aab"], sizes=[1], include=False)
def test_stop_strings_cut_the_text_alike_for_any_pieces(
    text: str, stop: list[str], sizes: list[int], include: bool
) -> None:
    found = first_stop(text, stop)
    emitted, matched = stream(StopChecker(stop, include), cut(text, sizes))
    if found is None:
        assert (matched, "".join(emitted)) == (None, text)
    else:
        start, end = found
        assert (matched, "".join(emitted)) == (text[start:end], text[: end if include else start])
    assert stream(StopChecker(stop, include), [text])[1] == matched


@settings(max_examples=examples(500))
@given(text=st.text("ab", max_size=20), stop=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    seen = emitted = ""
    for character in text:
        seen += character
        piece, matched = checker.append(character)
        emitted += piece
        if matched is not None:
            break
        ends = [k for s in stop for k in range(len(s)) if seen.endswith(s[:k])]
        assert emitted == seen[: len(seen) - max(ends, default=0)]


def test_stop_string_over_several_pieces() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert [
        checker.append(piece) for piece in ["Yes.", "\n", "\nUs", "es it. ", "\n\nUser", ": more"]
    ] == [
        ("Yes.", None),
        ("", None),
        ("", None),
        ("\n\nUses it. ", None),
        ("", None),
        ("", "\n\nUser:"),
    ]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopChecker(["b", "abc"]).append("abc") == ("a", "b")
    assert StopChecker(["bc", "abc", "c"]).append("xabcx") == ("x", "abc")
    assert StopChecker(["ab", "abc"]).append("abc") == ("", "ab")


def test_stop_string_in_the_output() -> None:
    checker = StopChecker(["END"], include_stop_str_in_output=True)
    assert checker.append("the E") == ("the E", None)
    assert checker.append("NDing") == ("ND", "END")


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    checker = StopChecker(["END"])
    assert checker.append("END ", check=False) == ("END ", None)
    assert checker.append("EN", check=False) == ("", None)
    assert checker.append("D EN", check=True) == ("", "END"), "complete where it counts"
    checker = StopChecker(["ab", "abab"])
    assert checker.append("ab", check=False) == ("", None)
    assert checker.append("c") == ("abc", None), "complete where it did not count"
    assert checker.append("ab") == ("", "ab")
    checker = StopChecker(["aa"])
    assert checker.append("aa", check=False) == ("a", None)
    assert checker.append("a") == ("", "aa"), "its end counts, not its beginning"


def test_flush_gives_what_is_held_back_once() -> None:
    checker = StopChecker(["END"])
    assert checker.append("the EN") == ("the ", None)
    assert checker.flush() == "EN"
    assert checker.flush() == ""


class CountingText(str):
    """A stop string that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        CountingText.looks += 1
        return super().__getitem__(key)


def test_repetitive_stop_strings_cost_no_more() -> None:
    size = 2000
    stop = CountingText("a" * size + "b")
    CountingText.looks = 0
    checker = StopChecker([stop])
    for _ in range(size):
        checker.append("a" * 3)
    assert CountingText.looks < 40 * size


def test_border_lengths() -> None:
    assert border_lengths("abab") == [0, 0, 1, 2]
    assert border_lengths("aabaaab") == [0, 1, 0, 1, 2, 2, 3]
    for string in ("abacabab", "aaaa", "abcd"):
        for end, length in enumerate(border_lengths(string), start=1):
            prefix = string[:end]
            assert length == max(k for k in range(end) if prefix.endswith(prefix[:k]))
