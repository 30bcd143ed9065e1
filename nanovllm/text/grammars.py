"""What a request asks of its output, as a grammar of llguidance; and a check that says what is
wrong with it, and where."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from nanovllm.data.structured_outputs import OPTIONS, Form, GrammarError, StructuredOutputsParams
from nanovllm.text.chat_template import LimitedProcess, answer_questions
from nanovllm.text.examples import shortest_match
from nanovllm.text.schemas import (
    MAX_WORDS,
    SPELLING,
    Preparation,
    Sizes,
    examples_of_patterns,
    has_open_objects,
    without,
)
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.text.guides import Guide

# Characters of a grammar. OpenAI's limit of a schema is about the same.
LONGEST_GRAMMAR = 2**17
# Between the parts of a JSON text: nothing, a space, or a line break. If more were allowed, a model
# could go on with white space up to its last token.
WHITESPACE = r"[ \n]?"
# What one token can add to the shortest way to the end, where no schema tells.
COST_OF_BEGINNING = 32
EXAMPLES = 'write EBNF such as root ::= "yes" | "no", or Lark such as start: "yes" | "no"'
# Strings, classes of characters, comments and line breaks before an alternative, in EBNF.
EBNF_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*|\s*\n\s*(?=\|)')
# Keywords whose values are no schemas.
PLAIN_VALUES = ("enum", "const", "default", "examples", "required")
# A grammar that can be checked within these limits can be compiled by an engine, whose threads have
# a deeper stack. Most take a millisecond. (Of llguidance's own limits, none bounds `multipleOf`.)
CHECK_SECONDS = 0.5
CHECK_BYTES = 128 << 20
MAX_CHECKED = 64
# Parser items per mask, of which an ambiguous grammar takes a time that grows with their square:
# 5,000 take 5 milliseconds. A schema takes less than a millisecond, and one with 300 optional
# properties needs more than 25,000. A Lark grammar may contain schemas.
STEP_MAX_ITEMS = 5_000
STEP_MAX_ITEMS_WITH_SCHEMAS = 15_000
STEP_MAX_ITEMS_OF_SCHEMA = 50_000
STEP_LEXER_FUEL = 100_000
FEWER = "allow fewer alternatives at once, such as optional properties"


# Result of a check: a checked grammar, or the place and the reason of a fault.
Finding = tuple[Form | None, str, str]


class _Vocabulary:
    """A tokenizer as llguidance wants it, which asks for the tokens of text that a grammar
    forces."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = tokenizer.all_special_ids
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        # Forced text is plain text, even where it spells a special token.
        self.tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.backend.to_str()))
        self.tokenizer.backend.encode_special_tokens = True
        special = {*self.special_token_ids}
        self.plain = {
            token: spelling for token, spelling in enumerate(self.tokens) if token not in special
        }
        self.ids = {spelling: token for token, spelling in self.plain.items() if spelling}
        self.longest = max(map(len, self.ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell exactly this text: the tokenizer's own where possible. SentencePiece
        puts a space before a text; after a control character, the rest is tokenized as in the
        middle of a text."""
        for before in ("", "\x02"):
            tokens = self.tokenizer.encode(before + text.decode(), add_special_tokens=False)
            spellings = [self.plain.get(token, b"") for token in tokens]
            first = len(tokens)
            missing = len(text)
            while first and missing > 0:
                first, missing = first - 1, missing - len(spellings[first - 1])
            if b"".join(spellings[first:]) == text and all(spellings[first:]):
                return tokens[first:]
        return self._longest_tokens(
            text
        )  # a tokenizer that changes texts, for example to Unicode's form NFC

    def _longest_tokens(self, text: bytes) -> list[int]:
        """Tokens that spell a text, each as long as possible."""
        tokens = []
        at = 0
        while at < len(text):
            sizes = range(self.longest, 0, -1)
            spelling = next(
                (text[at : at + size] for size in sizes if text[at : at + size] in self.ids), b""
            )
            if not spelling:  # no token has this byte, so the grammar cannot be followed
                break
            tokens.append(self.ids[spelling])
            at += len(spelling)
        return tokens


def ends(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> list[int]:
    """The model's end-of-sequence tokens, and the tokenizer's own.

    Raises:
        ValueError: there is none, so no output could end.
    """
    known = [*eos_token_ids, -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id]
    if found := sorted({token for token in known if 0 <= token < vocab_size}):
        return found
    raise ValueError("structured_outputs must not be set: this model has no end-of-sequence token")


def token_trie(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary as a trie of bytes, with which masks are computed. Takes a quarter of a
    second. See `ends`."""
    eos = ends(tokenizer, vocab_size, eos_token_ids)
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos[0])), vocab_size, eos
    )


def new_matcher(grammar: str, trie: LLTokenizer) -> LLMatcher:
    """A matcher that has consumed nothing. It may have an error; see `describe`."""
    items = STEP_MAX_ITEMS_WITH_SCHEMAS if "%json" in grammar else STEP_MAX_ITEMS
    if grammar.startswith('{"grammars":[{"name":"json_schema"'):
        items = STEP_MAX_ITEMS_OF_SCHEMA
    limits = LLParserLimits(
        verbose_errors=False, step_max_items=items, step_lexer_fuel=STEP_LEXER_FUEL
    )
    return LLMatcher(trie, grammar, log_level=0, limits=limits)


def of_schema(
    schema: str | dict[str, Any], lenient: bool = False, whitespace: str = WHITESPACE
) -> str:
    """The grammar of a JSON schema. Unknown keywords are errors, unless they are to be ignored
    (`lenient`); what the schema itself says of this does not count.

    Args:
        whitespace: a regular expression of the white space between the parts; "": there is none.
    """
    options: dict[str, Any] = {
        "lenient": lenient,
        "coerce_one_of": False,
        "whitespace_flexible": bool(whitespace),
    }
    options |= SPELLING
    options |= {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_pattern": whitespace or None,
    }
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def whitespace_of(params: StructuredOutputsParams) -> str:
    """A regular expression of the white space that JSON may have between its parts, "" for none."""
    if params.disable_any_whitespace:
        return ""
    return WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern


def to_lark(grammar: str) -> str:
    """A grammar in Lark; one in EBNF, as in vLLM and llama.cpp, is translated.

    Raises:
        ValueError: it is EBNF that cannot be read; names the place.
    """
    if is_lark_syntax(grammar) or "::=" not in grammar:
        return grammar

    def clean(part: re.Match[str]) -> str:
        if part[0].startswith("#"):
            return ""
        return with_characters(part[0]) if part[0][0] in '["' else " "

    try:
        return gbnf_to_lark(EBNF_PARTS.sub(clean, grammar))
    except Exception as error:  # the library raises this class itself
        raise ValueError(f"{error}; {EXAMPLES}") from error


def with_characters(part: str) -> str:
    """A string or class of EBNF with characters instead of their numbers, which the library does
    not translate."""

    def character(number: re.Match[str]) -> str:
        code = int(number[1] or number[2], 16)
        plain = chr(code).isprintable() and chr(code) not in '"\\\\[]^-/'
        return chr(code) if plain else f"\\x{code:02X}" if code < 128 else number[0]

    return re.sub(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})", character, part)


def to_grammar(params: StructuredOutputsParams, lenient: bool = False) -> str:
    """The text from which llguidance makes a grammar: the checked one, if the front end has added
    it.

    Raises:
        ValueError: `json` is text, but not JSON; or `grammar` is EBNF that cannot be read.
    """
    if params.form is not None:
        return params.form.grammar
    match params.field:
        case "json":
            return of_schema(params.json, lenient, whitespace_of(params))  # type: ignore[arg-type]
        case "json_object":
            return of_schema({"type": "object"}, whitespace=whitespace_of(params))
        case "regex":
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, params.choice or ())))
        case _:
            return LLMatcher.grammar_from_lark(to_lark(params.grammar or ""))


def form_of(params: StructuredOutputsParams) -> Form:
    """The checked grammar that the front end has added, or else one that is made now."""
    form = params.form or Form(to_grammar(params), COST_OF_BEGINNING)
    return replace(form, free_text_before=params.free_text_before)


def fault(grammar: str, trie: LLTokenizer) -> str:
    """What is wrong with a grammar, "" if nothing: it cannot be compiled, or allows no token at
    all."""
    matcher = new_matcher(grammar, trie)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return describe(matcher)


def describe(matcher: LLMatcher | Guide) -> str:
    """A matcher's error in words, "" if there is none."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if missing := re.fullmatch(r"Unimplemented keys: \[(.*)\]", error):
        return f"the keywords {missing[1]} are not supported here; remove them"
    error = re.sub(r"Enable .coerce_one_of.*", "use anyOf", error)
    # llguidance's advice is for Lark.
    error = re.sub(
        r"Current row has (\d+) items; max is (\d+);.*", rf"\1 items, of at most \2; {FEWER}", error
    )
    return re.sub(r"^NoExtension\w*", "nothing is allowed", error)


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All parts of a schema that may be schemas themselves, the innermost first, with their
    places."""
    parts = (
        schema.items()
        if isinstance(schema, dict)
        else enumerate(schema)
        if isinstance(schema, list)
        else ()
    )
    for key, part in parts:
        if key not in PLAIN_VALUES:
            yield from subschemas(
                part, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
            )
    if isinstance(schema, dict):
        yield path, schema


def find_fault(grammar: str, trie: LLTokenizer) -> tuple[str, str]:
    """What is wrong with a grammar, and where: the innermost part of its schema that has this fault
    by itself. Two times "" if nothing is."""
    reason = fault(grammar, trie)
    # What is not JSON is Lark, and has no parts.
    schema = (
        json.loads(grammar)["grammars"][0].get("json_schema")
        if reason and grammar.startswith("{")
        else None
    )
    definitions = (
        {key: schema[key] for key in ("$defs", "definitions") if key in schema} if schema else {}
    )
    lenient = bool(schema and schema["x-guidance"]["lenient"])
    started = time.process_time()
    for path, part in subschemas(schema):
        if time.process_time() - started > CHECK_SECONDS / 4:
            break
        if fault(of_schema({**definitions, **part}, lenient), trie) == reason:
            return path, reason
    return "", reason


class Examiner:
    """Prepares and checks what requests ask for. It runs in the process that finds faults."""

    def __init__(self, trie: LLTokenizer) -> None:
        self.trie = trie
        self._is_known = functools.lru_cache(MAX_CHECKED)(self._is_known_anew)

    def examine(self, question: str) -> Finding:
        """A checked grammar, or what is wrong with it.

        Args:
            question: the fields of a `StructuredOutputsParams` and `lenient`, as JSON.
        """
        fields = json.loads(question)
        lenient = fields.pop("lenient")
        params = StructuredOutputsParams(**fields)
        try:
            if params.field in ("json", "json_object"):
                return self._examine_schema(params, lenient)
            grammar = to_grammar(params)
        except UnicodeEncodeError:
            return None, "", "must be valid Unicode, without unpaired surrogates"
        except (ValueError, RecursionError) as error:
            kind = "grammar" if params.field == "grammar" else "JSON schema"
            return None, "", f"not a {kind}: {error or 'it is nested too deeply'}"
        reason = fault(grammar, self.trie)
        if reason and params.field == "grammar" and not is_lark_syntax(grammar):
            reason += f"; {EXAMPLES}"
        if reason:
            return None, "", reason
        is_open = False
        cost = COST_OF_BEGINNING
        examples: list[str | None] = []
        if params.regex is not None:
            examples.append(shortest_match(params.regex))
        for schema in embedded_schemas(params.grammar or ""):
            sizes = Sizes(schema)
            whole = min(sizes.sizes["#"], LONGEST_GRAMMAR)
            cost = max(cost, COST_OF_BEGINNING + int(whole), sizes.cost_of_beginning())
            is_open = is_open or has_open_objects(schema)
            examples += examples_of_patterns(schema)
        return Form(grammar, cost, is_open, tuple(filter(None, examples))), "", ""

    def _examine_schema(self, params: StructuredOutputsParams, lenient: bool) -> Finding:
        schema = params.json if params.field == "json" else {"type": "object"}
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, dict):
            raise ValueError("it must be an object")
        prepared = Preparation(schema, self._is_known, self._words_of, lenient).result()
        whitespace = whitespace_of(params)
        sizes = Sizes(prepared)
        endless = {
            place
            for place, size in sizes.sizes.items()
            if size == math.inf and sizes.parts[place] is not False
        }
        if "#" not in endless:
            prepared = without(prepared, endless)
        path, reason = find_fault(of_schema(prepared, lenient, whitespace), self.trie)
        if not reason and "#" in endless:
            reason = (
                "no finite text satisfies this schema, since a value requires another one inside "
                "it, without end"
            )
        if reason:
            return None, path, reason
        grammar = of_schema(prepared, lenient, whitespace)
        form = Form(
            grammar,
            sizes.cost_of_beginning(),
            has_open_objects(prepared),
            tuple(examples_of_patterns(prepared)),
        )
        return form, "", ""

    def _is_known_anew(self, pattern: str) -> bool:
        """Whether the regex engine can parse a pattern."""
        return not fault(of_schema({"type": "string", "pattern": pattern}), self.trie)

    def _words_of(self, pattern: str) -> list[str] | None:
        """Return all strings that match a pattern, if there are at most `MAX_WORDS`; else None."""
        matcher = new_matcher(of_schema({"type": "string", "pattern": pattern}), self.trie)
        found = [] if matcher.is_error() else continuations(matcher, self.trie)
        return (
            None
            if found is None or matcher.is_error()
            else sorted(json.loads(text) for text in found)
        )


def continuations(
    matcher: LLMatcher, trie: LLTokenizer, limit: int = MAX_WORDS
) -> list[bytes] | None:
    """Return all ways in which a matcher's output can end; None if there are more than `limit`, or
    long ones."""
    waiting = [(matcher, b"")]
    found = []
    num_seen = 0
    while waiting:
        before, text = waiting.pop()
        num_seen += 1
        if before.is_accepting():
            found.append(text)
        mask = np.frombuffer(before.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: trie.vocab_size]).tolist()
        spelled = {
            token: trie.decode_bytes([token])
            for token in allowed[: 8 * limit]
            if token not in trie.eos_tokens
        }
        # Each string is found by its single bytes, or by what is forced.
        steps = {
            token: part for token, part in spelled.items() if len(part) == 1 or len(spelled) == 1
        }
        if len(steps) > limit or len(found) > limit or num_seen > 16 * limit or len(text) > 64:
            return None
        for token, part in steps.items():
            copy = before.deep_copy()
            copy.consume_token(token)
            waiting.append((copy, text + part))
    return found


def embedded_schemas(grammar: str) -> Iterator[dict[str, Any]]:
    """The JSON schemas in a Lark grammar."""
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:
            continue
        if isinstance(schema, dict):
            yield schema


class GrammarProcess(LimitedProcess):
    """The process that finds faults in grammars. The arguments are those of `ends`."""

    program = __file__
    seconds = CHECK_SECONDS
    memory = CHECK_BYTES

    def __init__(self, *setup: Any) -> None:
        super().__init__()
        self.setup = setup

    def start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """See `LimitedProcess.start`. A new process gets the vocabulary first."""
        with self._lock:
            is_new = self._running is None
            process, connection = super().start()
            if is_new:
                with contextlib.suppress(OSError):  # it has died already, which `ask` will find
                    connection.send(self.setup)
            return process, connection


class GrammarChecker:
    """Checks the grammars of requests before an engine gets them, in a process of its own. The
    arguments are those of `ends`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._process = GrammarProcess(
            tokenizer, vocab_size, ends(tokenizer, vocab_size, eos_token_ids)
        )
        self._findings: dict[str, Finding] = {}

    def check(self, params: StructuredOutputsParams, lenient: bool = False) -> Form:
        """Prepare a grammar, and check that it can be compiled, allows a first token, and can end.
        `lenient`: as in `of_schema`.

        Raises:
            GrammarError: it cannot; names the place.
        """
        if params.form is not None:
            return params.form
        names = (params.field, *OPTIONS)
        given = {name: getattr(params, name) for name in names}
        try:
            question = json.dumps({**given, "lenient": lenient})
        except (RecursionError, TypeError, ValueError) as error:
            raise GrammarError(params.place, f"not JSON, or nested too deeply: {error}") from error
        size = len(question) - sum(len(name) + 8 for name in names)
        if size > LONGEST_GRAMMAR:
            raise GrammarError(
                params.place, f"has {size} characters; at most {LONGEST_GRAMMAR} are allowed"
            )
        found = self._findings.get(question)
        if found is None:
            try:
                found = self._process.ask(question)
            except ValueError as error:
                found = None, "", f"{error}; make it simpler"
            self._findings[question] = found
            for oldest in [*self._findings][:-MAX_CHECKED]:
                self._findings.pop(oldest, None)  # another thread may have dropped it
        form, path, reason = found
        if form is None:
            raise GrammarError(params.place + path, reason)
        return form

    def prepared_schema(
        self, schema: dict[str, Any], place: str, lenient: bool = False
    ) -> dict[str, Any]:
        """Return a schema as grammars need it; see `schemas`. Arguments and errors: as in
        `check`."""
        form = self.check(StructuredOutputsParams(json=schema, place=place), lenient)
        prepared: dict[str, Any] = json.loads(form.grammar)["grammars"][0]["json_schema"]
        return {key: value for key, value in prepared.items() if key != "x-guidance"}


def main() -> None:
    """Find faults."""
    connection = Connection(int(sys.argv[1]))
    examiner = Examiner(token_trie(*connection.recv()))
    answer_questions(connection, examiner.examine, CHECK_SECONDS, CHECK_BYTES)


if __name__ == "__main__":
    main()
