"""Checks the grammar that a request asks for: what is wrong with it, and where."""

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
from multiprocessing.connection import Connection

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import is_lark_syntax

from nanovllm.data.json import JsonObject
from nanovllm.data.structured_outputs import OPTIONS, Form, GrammarError, StructuredOutputsParams
from nanovllm.text.chat_template import LimitedProcess, answer_questions
from nanovllm.text.examples import shortest_match
from nanovllm.text.grammars import (
    COST_OF_BEGINNING,
    EXAMPLES,
    ends,
    fault,
    new_matcher,
    of_schema,
    to_grammar,
    token_trie,
    whitespace_of,
)
from nanovllm.text.schema_sizes import Sizes, examples_of_patterns, has_open_objects, without_parts
from nanovllm.text.schemas import MAX_WORDS, Preparation, Schema
from nanovllm.text.tokenizer import Tokenizer

# Characters of a grammar. OpenAI's limit of a schema is about the same.
LONGEST_GRAMMAR = 2**17
# Keywords whose values are no schemas.
PLAIN_VALUES = ("enum", "const", "default", "examples", "required")
# A grammar that can be checked within these limits can be compiled by an engine, whose threads have
# a deeper stack. Most take a millisecond. (Of llguidance's own limits, none bounds `multipleOf`.)
CHECK_SECONDS = 0.5
CHECK_BYTES = 128 << 20
MAX_CHECKED = 64

# llguidance's words if two schemas describe the same value, and each refers to itself: it never
# comes to the end of what both have in common. The schema of a free value is one, unless its arrays
# and objects are nested only so deep.
INTERSECTION = "intersection stack level exceeded"
NESTING = 4

# Result of a check: a checked grammar, or the place and the reason of a fault.
Finding = tuple[Form | None, str, str]


def subschemas(schema: object, path: str = "") -> Iterator[tuple[str, JsonObject]]:
    """All parts of a schema that may be schemas themselves, the innermost first, with their
    places."""
    if isinstance(schema, list):
        for i, part in enumerate(schema):
            yield from subschemas(part, f"{path}[{i}]")
    if isinstance(schema, dict):
        for key, part in schema.items():
            if key not in PLAIN_VALUES:
                yield from subschemas(part, f"{path}.{key}")
        yield path, schema


def find_fault(grammar: str, trie: LLTokenizer) -> tuple[str, str]:
    """Return what is wrong with a grammar, and the innermost part of its schema that alone has this
    fault; "" and "" if nothing is wrong."""
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
        found = self._examine_prepared(params, schema, lenient, nesting=None)
        if INTERSECTION in found[2]:
            return self._examine_prepared(params, schema, lenient, nesting=NESTING)
        return found

    def _examine_prepared(
        self, params: StructuredOutputsParams, schema: Schema, lenient: bool, nesting: int | None
    ) -> Finding:
        """Prepare a schema, and check what was made of it. `nesting`: as in `Preparation`."""
        prepared = Preparation(schema, self._is_known, self._words_of, lenient, nesting).result()
        whitespace = whitespace_of(params)
        sizes = Sizes(prepared)
        endless = {
            place
            for place, size in sizes.sizes.items()
            if size == math.inf and sizes.parts[place] is not False
        }
        if "#" not in endless:
            prepared = without_parts(prepared, endless)
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


def embedded_schemas(grammar: str) -> Iterator[JsonObject]:
    """The JSON schemas in a Lark grammar."""
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:
            continue
        if isinstance(schema, dict):
            yield schema


class GrammarProcess(LimitedProcess[Finding]):
    """A process that finds faults in grammars. The arguments are those of `ends`.

    Attributes:
        process: which is started again when it has died.
    """

    program = __file__
    seconds = CHECK_SECONDS
    memory = CHECK_BYTES

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        super().__init__()
        self.setup = (tokenizer, vocab_size, eos_token_ids)

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
    """Checks the grammars of requests in a separate process, before an engine gets them.

    Args:
        tokenizer, vocab_size, eos_token_ids: see `ends`.

    Attributes:
        process: the checking process, which is started again if it has died.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.process = GrammarProcess(
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
                found = self.process.ask(question)
            except ValueError as error:
                found = None, "", f"{error}; make it simpler"
            self._findings[question] = found
            for oldest in [*self._findings][:-MAX_CHECKED]:
                self._findings.pop(oldest, None)  # another thread may have dropped it
        form, path, reason = found
        if form is None:
            raise GrammarError(params.place + path, reason)
        return form

    def prepared_schema(self, schema: JsonObject, place: str, lenient: bool = False) -> JsonObject:
        """Return a schema as grammars need it; see `schemas`. Arguments and errors: as in
        `check`."""
        form = self.check(StructuredOutputsParams(json=schema, place=place), lenient)
        prepared: JsonObject = json.loads(form.grammar)["grammars"][0]["json_schema"]
        return {key: value for key, value in prepared.items() if key != "x-guidance"}


def main() -> None:
    """Find faults."""
    connection = Connection(int(sys.argv[1]))
    examiner = Examiner(token_trie(*connection.recv()))
    answer_questions(connection, examiner.examine, CHECK_SECONDS, CHECK_BYTES)


if __name__ == "__main__":
    main()
