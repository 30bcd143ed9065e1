"""Schemas as grammars get them: closed, finite, with numbers that end; and the grammars that are
made of them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pydantic
import pytest
from llguidance import LLTokenizer

from nanovllm import SamplingParams
from nanovllm.data.config import EngineConfig
from nanovllm.data.structured_outputs import Form, GrammarError, StructuredOutputsParams
from nanovllm.text.grammar_check import Examiner, GrammarChecker
from nanovllm.text.grammars import new_matcher, token_trie
from nanovllm.text.guides import Guide, KeyReader, TokenTable
from nanovllm.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.oracle import make_tokenizer
from tests.text.json_schema_suite import GROUPS, NEVER_WRITTEN, NUM_FOLLOWED

TOKENIZER = Tokenizer(make_tokenizer(), {"eos_token": "</s>"})
NOTHING: dict[str, Any] = {}


@pytest.fixture(scope="module")
def trie() -> LLTokenizer:
    return token_trie(TOKENIZER, 259, [])


@pytest.fixture(scope="module")
def table(trie: LLTokenizer) -> TokenTable:
    return TokenTable(trie)


@pytest.fixture(scope="module")
def examiner(trie: LLTokenizer) -> Examiner:
    return Examiner(trie)


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker(TOKENIZER, 259, [])


def examined(
    examiner: Examiner, wanted: dict[str, Any], lenient: bool = False
) -> tuple[Form | None, str]:
    form, _, reason = examiner.examine(json.dumps({**wanted, "lenient": lenient}))
    return form, reason


def form_of(examiner: Examiner, **wanted: Any) -> Form:
    form, reason = examined(examiner, wanted)
    assert form is not None, reason
    return form


def accepts(form: Form, table: TokenTable, trie: LLTokenizer, text: str) -> bool:
    """Whether the text can be written, token by token, and then its end. (Forced text may be
    spelled with other tokens, too.)"""
    guide = Guide(new_matcher(form.grammar, trie), table, form)
    for token in TOKENIZER.encode(text):
        bare, mask = (
            each.compute_bitmask()[token // 8] >> token % 8 & 1 for each in (guide.matcher, guide)
        )
        if guide.matcher.validate_tokens([token]) != 1 or mask < bare:
            return False
        guide.consume_tokens([token])
    return guide.matcher.is_accepting()


def fits(
    examiner: Examiner, schema: Any, table: TokenTable, trie: LLTokenizer, *values: Any
) -> list[bool]:
    form = form_of(examiner, json=schema, disable_any_whitespace=True)
    return [
        accepts(form, table, trie, json.dumps(value, separators=(",", ":"))) for value in values
    ]


# ---------------------------------------------------------------- closed objects


class Part(pydantic.BaseModel):
    name: str


class Whole(pydantic.BaseModel):
    part: Part
    parts: list[Part] = []
    extra: dict[str, int] = {}
    other: Part | None = None


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


A, B = object_of("a", a=NOTHING), object_of("b", b=NOTHING)
# A schema, what may be written, and what may not, since a property is not named.
CLOSED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an object": (A, [{"a": 1}], [{"a": 1, "b": 1}]),
    "without properties": (object_of(), [{}], [{"a": 1}]),
    "any object": ({"type": "object"}, [{}, {"a": 1}], []),
    "open": ({**A, "additionalProperties": True}, [{"a": 1, "b": 1}], []),
    "others of a type": (
        {**A, "additionalProperties": {"type": "null"}},
        [{"a": 1, "b": None}],
        [{"a": 1, "b": 1}],
    ),
    "nested": (object_of("x", x=A), [{"x": {"a": 1}}], [{"x": {"a": 1, "b": 1}}]),
    "items": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "b": 1}]]),
    "a definition": ({"$ref": "#/$defs/a", "$defs": {"a": A}}, [{"a": 1}], [{"a": 1, "b": 1}]),
    "one of several": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "c": 1}]),
    "all of several": ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "c": 1}]),
    "a definition with more": (
        {**B, "$ref": "#/$defs/a", "$defs": {"a": A}},
        [{"b": 1, "a": 1}],
        [{"b": 1, "a": 1, "c": 1}],
    ),
    "a definition with more, and alone": (
        {
            "type": "array",
            "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/a"}, B]}]},
            "$defs": {"a": A},
        },
        [[{"a": 1}, {"a": 1, "b": 1}]],
        [[{"a": 1, "c": 1}], [{"a": 1, "b": 1, "c": 1}]],
    ),
    "required without a schema": (object_of("a", "b", a=NOTHING), [{"a": 1, "b": [2]}], [{"a": 1}]),
    "pydantic": (
        Whole.model_json_schema(),
        [{"part": {"name": ""}, "parts": [{"name": "x"}], "extra": {"k": 1}, "other": None}],
        [
            {"part": {"name": ""}, "x": 1},
            {"part": {"name": "", "x": 1}},
            {"part": {"name": ""}, "extra": {"k": ""}},
        ],
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_objects_whose_properties_are_named_are_closed(
    name: str, examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    schema, right, wrong = CLOSED[name]
    assert fits(examiner, schema, table, trie, *right, *wrong) == [True] * len(right) + [
        False
    ] * len(wrong)
    for value in right:
        jsonschema.Draft202012Validator(schema).validate(value)


def test_the_public_suite_as_prepared(
    examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    """What is prepared accepts no invalid instance, and every valid one but those with properties
    that the schema does not name."""
    known = [words for kind in NEVER_WRITTEN.values() for words in kind]
    closed = [
        "additional properties are allowed",
        "both anyOf valid (complex)",
        "doesn't invalidate other properties",
    ]
    closed += ["valid on both fields"]
    num_followed, unexplained = 0, []
    for group, schema, tests in GROUPS:
        form, _ = examined(examiner, {"json": schema}) if isinstance(schema, dict) else (None, "")
        if form is None:
            continue
        num_followed += 1
        for name, instance, valid in tests:
            text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            matcher = new_matcher(form.grammar, trie)
            tokens = TOKENIZER.encode(text)
            accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert valid or not accepted, f"{group}: {name}: an invalid instance is accepted"
            if (
                valid
                and not accepted
                and not any(words in f"{group}: {name}" for words in known + closed)
            ):
                unexplained.append(f"{group}: {name}")
    assert unexplained == []
    assert num_followed == NUM_FOLLOWED


# ---------------------------------------------------------------- free values

FREE: dict[str, dict[str, Any]] = {
    "a property": {"allOf": [{"properties": {"a": {}}}, {"properties": {"a": {"minimum": 3}}}]},
    "a base that is refined": {
        "$defs": {"base": {"properties": {"a": {"type": "array"}}, "required": ["a"]}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"a": {"minItems": 1}}}],
    },
    "other properties": {
        "type": "object",
        "additionalProperties": True,
        "allOf": [{"additionalProperties": True}],
    },
}


@pytest.mark.parametrize("kind", FREE)
def test_two_schemas_of_one_free_value_are_followed(
    examiner: Examiner, table: TokenTable, trie: LLTokenizer, kind: str
) -> None:
    """llguidance alone never comes to the end of what two schemas that refer to themselves have in
    common."""
    values = [{"a": nested(depth)} for depth in (2, 4, 6)]
    assert fits(examiner, FREE[kind], table, trie, *values) == [True, True, False]


@pytest.mark.parametrize("schema", [{}, {"properties": {"a": {}}}])
def test_a_free_value_that_one_schema_describes_is_as_deep_as_it_likes(
    examiner: Examiner, table: TokenTable, trie: LLTokenizer, schema: dict[str, Any]
) -> None:
    assert fits(examiner, schema, table, trie, {"a": nested(40)}) == [True]


def nested(depth: int) -> list[Any]:
    """A list in a list, and so on, `depth` of them."""
    return [nested(depth - 1)] if depth > 1 else []


# ---------------------------------------------------------------- conflicts


OVERLAP: dict[str, dict[str, Any]] = {
    "a name": {"patternProperties": {"^a$": {"type": "integer"}}},
    "names": {"patternProperties": {"^(a|b)$": {"type": "integer"}}},
    "required names": {"patternProperties": {"^b$": {"type": "integer"}}, "required": ["a", "b"]},
    "many names": {"patternProperties": {"^a": {"type": "integer"}}},
}


@pytest.mark.parametrize("name", OVERLAP)
def test_names_that_a_pattern_names_too_do_not_get_stuck(
    name: str, examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    """A grammar would allow a comma after which no name is left."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": False,
        **OVERLAP[name],
    }
    form = form_of(examiner, json=schema)
    for seed in range(40):
        text = random_text(form, table, trie, seed)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def random_text(
    form: Form, table: TokenTable, trie: LLTokenizer, seed: int, limit: int = 150
) -> str:
    """What a model writes that chooses at random, with some preference for what ends a part."""
    draw = random.Random(seed)
    guide, output = Guide(new_matcher(form.grammar, trie), table, form), b""
    for count in range(limit):
        guide.look_ahead(limit - count)
        bits = np.unpackbits(
            np.frombuffer(guide.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        assert not guide.is_error(), (output, guide.get_error())
        allowed = np.flatnonzero(bits[:259]).tolist()
        draw.shuffle(allowed)
        if guide.is_tight:
            kept = guide.fitting(allowed[:32])
            allowed = [token for token in allowed if token in kept] or kept[:1]
        short = [
            token
            for token in allowed
            if table.spelled[token] in (b'"', b"}", b"]", b"a") or token == 2
        ]
        token = draw.choice(short if short and draw.random() < 0.5 else allowed)
        if token == 2:
            return output.decode()
        output += table.spelled[token]
        assert guide.consume_tokens([token])
    raise AssertionError(f"{output!r} does not end")


# Expressions that allow the same bytes wherever one is in a string.
UNANCHORED = [
    "abc",
    "(?i)abc",
    r"@x",
    r"[\w-.]+@x",
    r"end\d{2}$",
    r"(foo|barbaz)!",
    r"é\"",
    r"[\w-\.]+@x",
]


@pytest.mark.parametrize("pattern", UNANCHORED)
def test_a_string_with_an_unanchored_pattern_ends(
    pattern: str, examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": pattern}},
        "required": ["x"],
    }
    form = form_of(examiner, json=schema)
    for seed in range(examples(8, by_day=2)):
        value = json.loads(random_text(form, table, trie, seed, limit=60))
        assert re.search(pattern.replace(r"\w-", r"-\w"), value["x"])


def test_a_regular_expression_ends(
    examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    form = form_of(examiner, regex=r"(.|\n)*abc")
    for seed in range(8):
        assert random_text(form, table, trie, seed, limit=60).endswith("abc")


# What to ask for, and the words of the refusal.
REFUSED: dict[str, tuple[Any, str]] = {
    "required name that is forbidden": (
        {**object_of("b", a=NOTHING), "additionalProperties": False},
        "'b'",
    ),
    "a property that requires itself": (object_of("a", a={"$ref": "#"}), "no finite text"),
    "itself in turns": (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": object_of("b", b={"$ref": "#/$defs/b"}),
                "b": object_of("a", a={"$ref": "#/$defs/a"}),
            },
        },
        "no finite text",
    ),
    "items": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite text"),
    "one of two": (
        {
            "anyOf": [
                object_of("a", a={"$ref": "#"}),
                {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
            ]
        },
        "no finite text",
    ),
    "too few properties": (
        {**object_of(a=NOTHING, b=NOTHING, c=NOTHING), "minProperties": 2},
        "maxProperties only supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_text_satisfies_is_refused_before_generation(
    name: str, checker: GrammarChecker
) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(GrammarError, match=words):
        checker.check(StructuredOutputsParams(json=schema))


def test_what_never_ends_is_not_begun_where_it_is_optional(
    examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    endless = {"$ref": "#/$defs/endless"}
    schema = {
        **object_of(
            "b",
            a=endless,
            b={"anyOf": [endless, {"type": "null"}]},
            c={"type": "array", "items": endless},
        ),
        "$defs": {"endless": object_of("x", x=endless)},
    }
    right: list[Any] = [{"b": None}, {"b": None, "c": []}]
    assert fits(examiner, schema, table, trie, *right, {"b": {"x": 1}}) == [True, True, False]
    form = form_of(examiner, json=schema)
    for seed in range(20):
        assert json.loads(random_text(form, table, trie, seed)) in right


# ---------------------------------------------------------------- keys and numbers


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"a":1,"\\u0061":2}',
        '{"x":{"a":1},"a":1,"a":2}',
        '[{"a":1,"b":{"a":2},"b":3}]',
        '{"/":1,"\\/":2}',
    ],
)
def test_no_key_comes_twice(
    text: str, examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    form = form_of(examiner, json=NOTHING, disable_any_whitespace=True)
    assert form.has_open_objects and not accepts(form, table, trie, text)
    once = text[:-1].rsplit(",", 1)[0] + text[text.rindex("}") :]
    assert accepts(form, table, trie, once), "the last key is the only fault"


def test_keys_are_those_of_one_object() -> None:
    reader = KeyReader("<call>")
    assert reader.read(
        b'say {"a":1,"a":2} <call>\n{"a": "{\\"b\\"", "b": [{"a": {}}, {"a": {}}], "c": "}"},'
        b' {"a": 1'
    )
    assert not reader.copy().read(b', "a":') and reader.read(b', "b":')


def test_at_least_two_keys_are_two_keys(
    examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    schema = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
    form = form_of(examiner, json=schema)
    for seed in range(40):
        assert len(json.loads(random_text(form, table, trie, seed))) >= 2


def test_numbers_end(examiner: Examiner, table: TokenTable, trie: LLTokenizer) -> None:
    for schema in (
        NOTHING,
        {"type": "number"},
        {"type": ["number", "null"]},
        {"type": "number", "minimum": -1},
    ):
        form = form_of(examiner, json=schema)
        for right in ("0", "-0.5", "9007199254740991", "0.123456789"):
            assert accepts(form, table, trie, right), (schema, right)
        for wrong in ("1e999", "1E5", "9" * 17, "0." + "1" * 30):
            assert not accepts(form, table, trie, wrong), (schema, wrong)
    form = form_of(examiner, json={"type": "array", "items": {"type": "integer"}})
    assert accepts(form, table, trie, "[-9007199254740991, 5]") and not accepts(
        form, table, trie, f"[{2**53}]"
    )
    huge = {"type": "integer", "minimum": 10**17}
    assert accepts(form_of(examiner, json=huge), table, trie, str(10**17)), (
        "a bound of the schema itself counts"
    )


def test_a_search_for_an_end_is_bounded(
    table: TokenTable, trie: LLTokenizer, examiner: Examiner
) -> None:
    """A grammar without an end costs a few searches, however many tokens there may be."""
    guide = Guide(
        new_matcher(form_of(examiner, grammar='start: ("a" | "b") start').grammar, trie),
        table,
        Form("", 8),
    )
    num_searches = 0
    for count in range(2000):
        before = guide._next_look
        guide.look_ahead(8000 - count)
        num_searches += guide._next_look != before
        guide.consume_tokens(TOKENIZER.encode("a"))
    assert not guide.is_tight and num_searches < 10


# ---------------------------------------------------------------- patterns of functions


def test_a_pattern_is_left_out_if_the_regex_engine_cannot_parse_it(examiner: Examiner) -> None:
    """Whatever the reason: the engine says so, and no list of what it does not know."""
    for pattern in (r"(?=a)b", r"(a)\1", r"\bx\b", r"^\p{Foo}$", "(", r"(?<!a)b", r"\Gx", "a{2,1}"):
        schema = object_of(
            a={"type": "string", "pattern": pattern}, b={"type": "string", "pattern": "^[a-c]$"}
        )
        form, reason = examined(examiner, {"json": schema}, lenient=True)
        assert form is not None, (pattern, reason)
        properties = json.loads(form.grammar)["grammars"][0]["json_schema"]["properties"]
        assert "pattern" not in properties["a"] and properties["b"]["pattern"] == "^[a-c]$", pattern
        assert examined(examiner, {"json": schema})[0] is None, (
            f"{pattern} is refused where it must be followed"
        )


# ---------------------------------------------------------------- how to ask for it


def test_a_class_of_pydantic_is_a_schema() -> None:
    for params in (
        SamplingParams(structured_outputs={"json": Part}),
        SamplingParams(structured_outputs=StructuredOutputsParams(json=Part)),  # type: ignore[arg-type]
    ):
        assert params.structured_outputs is not None
        assert params.structured_outputs.json == Part.model_json_schema()
    for wrong in (Part(name="x"), int):
        with pytest.raises(ValueError, match=r"structured_outputs\.json must be"):
            SamplingParams(structured_outputs={"json": wrong})


EBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "vLLM's example": (
        """
        root ::= select_statement

        select_statement ::= "SELECT " column " from " table " where " condition

        column ::= "col_1 " | "col_2 "

        table ::= "table_1 " | "table_2 "

        condition ::= column "= " number

        number ::= "1 " | "2 "
        """,
        ["SELECT col_1  from table_2  where col_2 = 1 "],
        ["SELECT col_3  from table_2  where col_2 = 1 ", "SELECT col_1 "],
    ),
    "recursion": (
        (
            'root ::= expr ("=" expr)*\nexpr ::= term ([-+*/] term)*\nterm ::= num | "(" expr'
            ' ")"\nnum ::= [0-9]+'
        ),
        ["1+2", "(3*4)-5=7"],
        ["1+", "(3"],
    ),
    "lines": (
        'root ::= "a" b # "c"\nb ::= "x"\n    | "y" # or\n    | [^"\\\\\\x7F\\x00-\\x1F]{2,3}',
        ["ax", "ay", "auv"],
        ["a", "aé"],
    ),
    "characters": (r'root ::= "\"" [a-z\]]+ "\n" "\\" "\u00e9"', ['"a]\n\\é'], ['"A\n\\é']),
}


@pytest.mark.parametrize("name", EBNF)
def test_grammars_in_ebnf(
    name: str, examiner: Examiner, table: TokenTable, trie: LLTokenizer
) -> None:
    grammar, right, wrong = EBNF[name]
    form = form_of(examiner, grammar=grammar)
    assert [accepts(form, table, trie, text) for text in right + wrong] == [True] * len(right) + [
        False
    ] * len(wrong)


@pytest.mark.parametrize("grammar", ["root ::= x", 'root ::= "a', "rot ::= 'a'", "yes or no"])
def test_a_grammar_that_cannot_be_read_is_answered_with_an_example(
    grammar: str, checker: GrammarChecker
) -> None:
    with pytest.raises(GrammarError, match=r'root ::= "yes" \| "no".*start: "yes" \| "no"'):
        checker.check(StructuredOutputsParams(grammar=grammar))


def test_white_space_is_an_option(examiner: Examiner, table: TokenTable, trie: LLTokenizer) -> None:
    schema = object_of("a", a={"type": "integer"})
    for wanted, right, wrong in (
        ({}, ['{"a":1}', '{ "a": 1\n}'], ['{  "a":1}', '{\t"a":1}']),
        ({"disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"whitespace_pattern": r"\t{0,2}"}, ['{\t\t"a":1}'], ['{"a": 1}']),
    ):
        form = form_of(examiner, json=schema, **wanted)
        texts = right + wrong
        assert [accepts(form, table, trie, text) for text in texts] == [
            text in right for text in texts
        ]
    with pytest.raises(ValueError, match="whitespace_pattern"):
        StructuredOutputsParams(json=schema, disable_any_whitespace=True, whitespace_pattern=" ?")


def test_settings_of_an_engine() -> None:
    config = EngineConfig(structured_outputs_config='{"disable_any_whitespace": true}')
    assert config.structured_outputs.disable_any_whitespace
    for wrong, words in (
        ("{", "JSON object"),
        ('{"whitespace": 1}', "is not one of"),
        ('{"backend": "outlines"}', "one of auto"),
    ):
        with pytest.raises(ValueError, match=f"structured_outputs_config.*{words}"):
            EngineConfig(structured_outputs_config=wrong)
