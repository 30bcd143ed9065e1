"""Grammars: what they accept, by a public suite; what is refused, and where the fault is said to
be; what cannot do harm."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC, Lowercase, Prepend, Replace, Sequence

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.structured_outputs import GrammarError, StructuredOutputsParams
from nanovllm.processes.start import start_process
from nanovllm.text import chat_template
from nanovllm.text.chat_template import HelperProcessError
from nanovllm.text.forms import Forms
from nanovllm.text.grammar_check import GrammarChecker, find_fault
from nanovllm.text.grammars import describe, new_matcher, of_schema, to_grammar, token_trie
from nanovllm.text.prompts import EngineLimits
from nanovllm.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.oracle import make_tokenizer
from tests.text.json_schema_suite import GROUPS, NEVER_WRITTEN, NUM_FOLLOWED

TOKENIZER = Tokenizer(make_tokenizer(), {"eos_token": "</s>"})


@pytest.fixture(scope="module")
def trie() -> LLTokenizer:
    return token_trie(TOKENIZER, 259, [])


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker(TOKENIZER, 259, [])


def accepts(grammar: str, trie: LLTokenizer, text: str) -> bool:
    matcher = new_matcher(grammar, trie)
    assert not matcher.is_error(), describe(matcher)
    tokens = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_public_suite(trie: LLTokenizer) -> None:
    """Each schema that is not refused accepts no invalid instance, and every valid one but those
    that are never written."""
    known = [words for kind in NEVER_WRITTEN.values() for words in kind]
    num_followed, unexplained = 0, []
    for group, schema, tests in GROUPS:
        if not isinstance(schema, dict):
            continue
        grammar = of_schema(schema)
        if new_matcher(grammar, trie).is_error():
            continue
        num_followed += 1
        for name, instance, valid in tests:
            text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            accepted, place = accepts(grammar, trie, text), f"{group}: {name}"
            assert valid or not accepted, f"{place}: an invalid instance is accepted"
            if valid and not accepted and not any(words in place for words in known):
                unexplained.append(place)
    assert unexplained == []
    assert num_followed == NUM_FOLLOWED


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=examples(60))
@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
def test_a_choice_is_one_of_the_texts(trie: LLTokenizer, choices: list[str], other: str) -> None:
    grammar = to_grammar(StructuredOutputsParams(choice=choices))
    for text in [*choices, other, choices[0] + "x"]:
        assert accepts(grammar, trie, text) == (text in choices)


def sentencepiece(pieces: bool, *normalizers: Any) -> Tokenizer:
    """A few words, the letters and every byte, spelled as in Llama 2: its tokenizer puts a space in
    front of a text."""
    letters = [
        "<unk>",
        "</s>",
        "<|x|>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"helojabcx|<>",
        "é",
    ]
    merges = [("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo"), ("▁", "hello")]
    vocabulary = {
        token: i for i, token in enumerate([*letters, *("".join(merge) for merge in merges)])
    }
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = Sequence(
        [*normalizers, *([] if pieces else [Prepend("▁"), Replace(" ", "▁")])]
    )
    if pieces:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "</s>", "<|x|>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


def byte_level(*normalizers: Any) -> Tokenizer:
    return byte_level_with(decoders.ByteLevel(), *normalizers)


def byte_level_with(decoder: Any, *normalizers: Any) -> Tokenizer:
    backend = make_tokenizer()
    backend.decoder = decoder
    backend.normalizer = Sequence([*normalizers])
    backend.add_special_tokens(["<|x|>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


@functools.cache
def named_tokenizer(name: str) -> Tokenizer:
    return {
        "bytes": byte_level,
        "bytes in a sequence": lambda: byte_level_with(
            decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
        ),
        "composed characters": lambda: byte_level(NFC()),
        "small letters": lambda: byte_level(Lowercase()),
        "a space in front": lambda: sentencepiece(False),
        "a space in front of the pieces": lambda: sentencepiece(True),
        "composed characters, a space in front": lambda: sentencepiece(False, NFC()),
        "course": lambda: Tokenizer.from_pretrained(resolve_model("smollm2-135m")),
    }[name]()


KINDS = [
    "bytes",
    "bytes in a sequence",
    "composed characters",
    "small letters",
    "a space in front",
    "a space in front of the pieces",
    "composed characters, a space in front",
    "course",
]
FORCED = [
    "hello",
    " hello",
    "hello hello",
    "a",
    "<|x|>",
    "a<|x|>b",
    "</s>",
    "<unk>",
    "<|im_end|>",
    "É e\u0301 \u2581",
    "été",
    "A\n\x02B",
    "<0x41>",
]


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_comes_out_whole(kind: str) -> None:
    """Whatever the tokenizer does to a text, and also where it spells a special token."""
    tokenizer = named_tokenizer(kind)
    size = tokenizer.backend.get_vocab_size()
    trie = token_trie(tokenizer, size, [])
    for text in FORCED:
        schema = {
            "type": "object",
            "properties": {text: {"const": text}},
            "required": [text],
            "additionalProperties": False,
        }
        compact = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
        written = json.dumps({text: text}, ensure_ascii=False, separators=(",", ":"))
        for expected, grammar in (
            (text, to_grammar(StructuredOutputsParams(choice=[text]))),
            (written, compact),
        ):
            matcher, output = new_matcher(grammar, trie), b""
            for _ in range(100):
                allowed = np.unpackbits(
                    np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
                )
                assert not matcher.is_error(), (text, output, describe(matcher))
                ids = np.flatnonzero(allowed[:size]).tolist()
                assert ids and not {*ids} & {*tokenizer.all_special_ids} - {tokenizer.eos_token_id}
                if ids == [tokenizer.eos_token_id]:
                    break
                matcher.consume_token(ids[0])
                output += tokenizer.token_bytes(ids[0])
            assert output.decode() == expected or json.loads(output) == {text: text}


def test_forced_text_has_the_tokens_that_the_model_knows() -> None:
    """Those of the middle of a text, where SentencePiece puts no space."""
    for name in ("a space in front", "a space in front of the pieces"):
        tokenizer = named_tokenizer(name)
        trie = token_trie(tokenizer, tokenizer.backend.get_vocab_size(), [])
        spelled = [
            tokenizer.convert_ids_to_tokens(trie.tokenize_str(text))
            for text in ("hello", " hello", "a hello")
        ]
        assert spelled == [["hello"], ["▁hello"], ["a", "▁hello"]], name


def test_white_space_is_possible_and_bounded(trie: LLTokenizer) -> None:
    """Else a model could write line breaks up to its last token."""
    value = {"a": [1, {"b": {"c": [True, "  "]}}], "d": {}}
    grammar = of_schema({"type": "object"})
    assert accepts(grammar, trie, json.dumps(value)) and accepts(
        grammar, trie, json.dumps(value, indent=0)
    )
    for endless in ('{"a":  1}', '{"a":\n\n1}', '{"a":\n 1}', '{"a":\t1}'):
        assert not accepts(grammar, trie, endless)


# What is asked for, the words of the refusal, and its place behind "structured_outputs."
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": {"type": "strin"}}, "Invalid type: strin", "json"),
    (
        {"json": {"properties": {"a": {}, "age": {"type": "intger"}}}},
        "Invalid type: intger",
        "json.properties.age",
    ),
    (
        {"json": {"items": {"anyOf": [{}, {"not": {}}]}}},
        'keywords "not" are not supported',
        "json.items.anyOf[1]",
    ),
    (
        {"json": {"$ref": "#/$defs/x", "$defs": {"x": {"uniqueItems": True}}}},
        '"uniqueItems"',
        "json.$defs.x",
    ),
    ({"json": {"properties": {"a": {"if": {}, "then": {}}}}}, '"if", "then"', "json.properties.a"),
    ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, '"not"', "json"),
    (
        {"json": {"properties": {"a": {"$ref": "#/$defs/no"}}}},
        "does not exist",
        "json.properties.a",
    ),
    ({"json": {"$ref": "https://example.com/schema"}}, "not present", "json"),
    ({"json": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}}, "use anyOf", "json"),
    ({"json": {"items": {"pattern": "(", "type": "string"}}}, "unclosed group", "json.items"),
    ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable", "json"),
    ({"json": {"$ref": "#"}}, "nothing is allowed", "json"),
    ({"json": '{"type": '}, "not a JSON schema", "json"),
    ({"json": "[1]"}, "not a JSON schema", "json"),
    ({"regex": "(a"}, "unclosed group", "regex"),
    ({"regex": r"(?=a)b"}, "look-ahead", "regex"),
    ({"grammar": "start: word"}, 'unknown name: "word"', "grammar"),
    ({"grammar": "root ::= x"}, "", "grammar"),
    ({"grammar": 'start: "a" <|tool|>'}, "unknown special token", "grammar"),
    ({"grammar": "{}"}, "", "grammar"),
    ({"choice": ["x" * 2**17]}, "at most 131072", "choice"),
    ({"json": '{"type": "object"' + " " * 2**17 + "}"}, "at most 131072", "json"),
    ({"choice": ["a", "\ud800"]}, "valid Unicode", "choice"),
    ({"regex": "\ud800"}, "valid Unicode", "regex"),
    ({"grammar": "start: \ud800"}, "valid Unicode", "grammar"),
]


@pytest.mark.parametrize(
    ("wanted", "words", "place"), FAULTS, ids=lambda value: json.dumps(value)[:50]
)
def test_a_fault_is_said_with_its_place(
    checker: GrammarChecker, wanted: dict[str, Any], words: str, place: str
) -> None:
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(GrammarError) as refusal:
            checker.check(StructuredOutputsParams(**wanted))
        assert refusal.value.place == f"structured_outputs.{place}"
        assert str(refusal.value).startswith(f"structured_outputs.{place}: ") and words in str(
            refusal.value
        )


def chain(rule: str, last: str) -> str:
    """Rules that each refer to the next one."""
    return (
        "start: r0\n"
        + "".join(rule.format(i=i, j=i + 1) for i in range(4000))
        + last.format(i=4000)
    )


NEST: dict[str, Any] = {"type": "integer"}
for _ in range(300):
    NEST = {"type": "array", "items": NEST}
# What took 10 seconds and more, or killed the process, by itself.
HOSTILE: dict[str, dict[str, Any]] = {
    "a remainder of a million states": {"json": {"type": "integer", "multipleOf": 1000003}},
    "remainders that multiply": {
        "json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}
    },
    "a long chain of rules": {"grammar": chain('r{i}: "a" r{j} | r{j} r{j}\n', 'r{i}: "b"')},
    "a long chain of references": {
        "json": {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2800)},
        }
    },
    "rules that are other rules": {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"'
    },
    "references to references": {
        "json": {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000)} | {"4000": {}},
        }
    },
    "keywords to be found in many parts": {
        "json": {
            "properties": {f"{i:06x}": {} for i in range(6000)},
            "uniqueItems": True,
            "contains": {},
        }
    },
    "a deep schema": {"json": NEST},
    "many formats": {
        "json": {"properties": {f"p{i}": {"type": "string", "format": "uri"} for i in range(2000)}}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_not(
    checker: GrammarChecker, name: str
) -> None:
    with pytest.raises(GrammarError):
        checker.check(StructuredOutputsParams(**HOSTILE[name]))
    checker.check(StructuredOutputsParams(regex=f"after {name}"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_of_the_checking_process_reserve_no_memory_of_their_own(
    checker: GrammarChecker,
) -> None:
    """An arena of 64 MiB for each thread that allocates, at a moment that nobody knows, would count
    against the limit."""
    checker.check(StructuredOutputsParams(regex="a+"))
    process, _ = checker.process.start()
    maps = [
        line.split()[:2]
        for line in pathlib.Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    ]
    reserved = [
        int(end, 16) - int(begin, 16)
        for (begin, end), access in ((m[0].split("-"), m[1]) for m in maps)
        if access == "---p"
    ]
    assert max(reserved) < 32 << 20


def test_what_would_take_long_for_each_token_is_refused() -> None:
    """Tokens of many characters can be divided in many ways. A large schema has many parts too, but
    costs little."""
    ambiguous = "start: e+\ne: e e | e e e | e e e e | A\nA: /[a-zA-Z ]/"
    trie = token_trie(named_tokenizer("course"), 49152, [])
    place, reason = find_fault(to_grammar(StructuredOutputsParams(grammar=ambiguous)), trie)
    assert (place, "Too many items" in reason) == ("", True)
    large = {
        "type": "object",
        "properties": {f"property_{i}": {"type": "string"} for i in range(300)},
    }
    matcher = new_matcher(of_schema(large), trie)
    for token in named_tokenizer("course").encode('{"property_7": "a", "property_250": "b"}'):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), describe(matcher)
    assert matcher.is_accepting()


def test_places_are_short() -> None:
    """A client chooses the names in a schema."""
    assert len(GrammarError("json." + "x" * 10**6, "bad").place) < 1000


def test_a_checker_that_died_is_started_again_and_its_death_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker = GrammarChecker(TOKENIZER, 259, [])
    fine, other = StructuredOutputsParams(choice=["yes"]), StructuredOutputsParams(choice=["no"])
    checker.check(fine)
    process, _ = checker.process.start()
    process.kill()
    process.wait(60)
    checker.check(other)

    def killed() -> Any:
        process, connection = start()
        process.kill()
        process.wait(60)
        return process, connection

    with monkeypatch.context() as patch:
        num_started = 0

        def dies_at_first(*arguments: Any) -> Any:
            nonlocal num_started
            num_started += 1
            process, connection = start_process(*arguments)
            if num_started == 1:  # before it has got the vocabulary
                process.kill()
                process.wait(60)
            return process, connection

        patch.setattr(chat_template, "start_process", dies_at_first)
        process, _ = checker.process.start()
        process.kill()
        process.wait(60)
        checker.check(StructuredOutputsParams(choice=["maybe"]))
        assert num_started == 2

    third, start = StructuredOutputsParams(choice=["perhaps"]), checker.process.start
    checker.process.start = killed  # type: ignore[method-assign]
    with pytest.raises(HelperProcessError):
        checker.check(third)
    checker.process.start = start  # type: ignore[method-assign]
    checker.check(third)
    wrong = StructuredOutputsParams(regex="(")
    for _ in range(2):  # a real verdict, the second time from memory
        with pytest.raises(GrammarError):
            checker.check(wrong)


def test_requests_that_come_together_share_one_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    created = []

    def create(*arguments: Any) -> GrammarChecker:
        time.sleep(0.05)
        created.append(GrammarChecker(*arguments))
        return created[-1]

    monkeypatch.setattr("nanovllm.text.grammar_check.GrammarChecker", create)
    forms = Forms(TOKENIZER, EngineLimits(256, 256, 259))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: forms.checker(), range(8)))
    assert len(created) == 1 and all(each is created[0] for each in found)
