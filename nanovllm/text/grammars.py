"""What a request asks of its output, as a grammar of llguidance; and a check that says what is wrong with it, and where."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from nanovllm.data.structured_outputs import GrammarError, StructuredOutputsParams
from nanovllm.text.chat_template import LimitedProcess, answer_questions
from nanovllm.text.tokenizer import Tokenizer

# Characters of a grammar. OpenAI's limit of a schema is about the same.
LONGEST_GRAMMAR = 2**17
# Between the parts of a JSON text: nothing, a space, or a line break with indentation. If more were allowed, a model could go on
# with white space up to its last token.
WHITESPACE = r"( |\r?\n[ \t]{0,40})?"
# Keywords whose values are no schemas.
PLAIN_VALUES = ("enum", "const", "default", "examples", "required")
# A grammar that can be checked within these limits can be compiled by an engine, whose threads have a deeper stack. Most take
# a millisecond. (Of llguidance's own limits, none bounds `multipleOf`.)
CHECK_SECONDS = 0.5
CHECK_BYTES = 128 << 20
MAX_CHECKED = 64
# Parser items per mask, of which an ambiguous grammar takes a time that grows with their square: 5,000 take 5 milliseconds. A schema
# takes less than a millisecond, and one with 300 optional properties needs more than 25,000. A Lark grammar may contain schemas.
STEP_MAX_ITEMS, STEP_MAX_ITEMS_WITH_SCHEMAS, STEP_MAX_ITEMS_OF_SCHEMA = 5_000, 15_000, 50_000
STEP_LEXER_FUEL = 100_000
FEWER = "allow fewer alternatives at once, such as optional properties"


class _Vocabulary:
    """A tokenizer as llguidance wants it, which asks for the tokens of text that a grammar forces."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id, self.special_token_ids = eos_token_id, tokenizer.all_special_ids
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        # Forced text is plain text, even where it spells a special token.
        self.tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.backend.to_str()))
        self.tokenizer.backend.encode_special_tokens = True
        special = {*self.special_token_ids}
        self.plain = {token: spelling for token, spelling in enumerate(self.tokens) if token not in special}
        self.ids = {spelling: token for token, spelling in self.plain.items() if spelling}
        self.longest = max(map(len, self.ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell exactly this text: the tokenizer's own where possible. SentencePiece puts a space before a text; after a
        control character, the rest is tokenized as in the middle of a text."""
        for before in ("", "\x02"):
            tokens = self.tokenizer.encode(before + text.decode(), add_special_tokens=False)
            spellings = [self.plain.get(token, b"") for token in tokens]
            first, missing = len(tokens), len(text)
            while first and missing > 0:
                first, missing = first - 1, missing - len(spellings[first - 1])
            if b"".join(spellings[first:]) == text and all(spellings[first:]):
                return tokens[first:]
        return self._longest_tokens(text)  # a tokenizer that changes texts, for example to Unicode's form NFC

    def _longest_tokens(self, text: bytes) -> list[int]:
        """Tokens that spell a text, each as long as possible."""
        tokens, at = [], 0
        while at < len(text):
            sizes = range(self.longest, 0, -1)
            spelling = next((text[at : at + size] for size in sizes if text[at : at + size] in self.ids), b"")
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
    """The vocabulary as a trie of bytes, with which masks are computed. Takes a quarter of a second. See `ends`."""
    eos = ends(tokenizer, vocab_size, eos_token_ids)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos[0])), vocab_size, eos)


def new_matcher(grammar: str, trie: LLTokenizer) -> LLMatcher:
    """A matcher that has consumed nothing. It may have an error; see `describe`."""
    items = STEP_MAX_ITEMS_WITH_SCHEMAS if "%json" in grammar else STEP_MAX_ITEMS
    if grammar.startswith('{"grammars":[{"name":"json_schema"'):
        items = STEP_MAX_ITEMS_OF_SCHEMA
    limits = LLParserLimits(verbose_errors=False, step_max_items=items, step_lexer_fuel=STEP_LEXER_FUEL)
    return LLMatcher(trie, grammar, log_level=0, limits=limits)


def of_schema(schema: str | dict[str, Any], lenient: bool = False) -> str:
    """The grammar of a JSON schema. Unknown keywords are errors, unless they are to be ignored (`lenient`); what the schema itself
    says of this does not count."""
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE, "lenient": lenient})


def to_grammar(params: StructuredOutputsParams, lenient: bool = False) -> str:
    """The text from which llguidance makes a grammar.

    Raises:
        ValueError: `json` is text, but not JSON.
    """
    match params.field:
        case "json":
            return of_schema(params.json, lenient)  # type: ignore[arg-type]
        case "json_object":
            return of_schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, params.choice or ())))
        case _:
            return LLMatcher.grammar_from_lark(params.grammar or "")


def fault(grammar: str, trie: LLTokenizer) -> str:
    """What is wrong with a grammar, "" if nothing: it cannot be compiled, or allows no token at all."""
    matcher = new_matcher(grammar, trie)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return describe(matcher)


def describe(matcher: LLMatcher) -> str:
    """A matcher's error in words, "" if there is none."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if missing := re.fullmatch(r"Unimplemented keys: \[(.*)\]", error):
        return f"the keywords {missing[1]} are not supported here; remove them"
    error = re.sub(r"Enable .coerce_one_of.*", "use anyOf", error)
    # llguidance's advice is for Lark.
    error = re.sub(r"Current row has (\d+) items; max is (\d+);.*", rf"\1 items, of at most \2; {FEWER}", error)
    return re.sub(r"^NoExtension\w*", "nothing is allowed", error)


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All parts of a schema that may be schemas themselves, the innermost first, with their places."""
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, part in parts:
        if key not in PLAIN_VALUES:
            yield from subschemas(part, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]")
    if isinstance(schema, dict):
        yield path, schema


def find_fault(grammar: str, trie: LLTokenizer) -> tuple[str, str]:
    """What is wrong with a grammar, and where: the innermost part of its schema that has this fault by itself. Two times "" if
    nothing is."""
    reason = fault(grammar, trie)
    # What is not JSON is Lark, and has no parts.
    schema = json.loads(grammar)["grammars"][0].get("json_schema") if reason and grammar.startswith("{") else None
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema} if schema else {}
    lenient = bool(schema and schema["x-guidance"]["lenient"])
    started = time.process_time()
    for path, part in subschemas(schema):
        if time.process_time() - started > CHECK_SECONDS / 4:
            break
        if fault(of_schema({**definitions, **part}, lenient), trie) == reason:
            return path, reason
    return "", reason


class GrammarProcess(LimitedProcess):
    """The process that finds faults in grammars. The arguments are those of `ends`."""

    program, seconds, memory = __file__, CHECK_SECONDS, CHECK_BYTES

    def __init__(self, *setup: Any) -> None:
        super().__init__()
        self.setup = setup

    def start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """See `LimitedProcess.start`. A new process gets the vocabulary first."""
        with self._lock:
            is_new = self._running is None
            process, connection = super().start()
            if is_new:
                connection.send(self.setup)
            return process, connection


class GrammarChecker:
    """Checks the grammars of requests before an engine gets them, in a process of its own. The arguments are those of
    `ends`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._process = GrammarProcess(tokenizer, vocab_size, ends(tokenizer, vocab_size, eos_token_ids))
        self._faults: dict[str, tuple[str, str]] = {}

    def check(self, params: StructuredOutputsParams, lenient: bool = False) -> None:
        """Check that a grammar can be compiled, and allows a first token. `lenient`: as in `of_schema`.

        Raises:
            GrammarError: it cannot; names the place.
        """
        given, grammar = getattr(params, params.field), ""
        size = len(given) if isinstance(given, str) else sum(map(len, given)) if isinstance(given, list) else 0
        if size <= LONGEST_GRAMMAR:
            try:
                grammar = to_grammar(params, lenient)
            except UnicodeEncodeError as error:
                raise GrammarError(params.place, "must be valid Unicode, without unpaired surrogates") from error
            except (ValueError, RecursionError) as error:
                raise GrammarError(params.place, f"not a JSON schema: {error}") from error
        if (size := max(size, len(grammar))) > LONGEST_GRAMMAR:
            raise GrammarError(params.place, f"has {size} characters; at most {LONGEST_GRAMMAR} are allowed")
        found = self._faults.get(grammar)
        if found is None:
            try:
                found = self._process.ask(grammar)
            except ValueError as error:
                found = "", f"{error}; make it simpler"
            self._faults[grammar] = found
            for oldest in [*self._faults][:-MAX_CHECKED]:
                self._faults.pop(oldest, None)  # another thread may have dropped it
        path, reason = found
        if reason:
            raise GrammarError(params.place + path, reason)


def main() -> None:
    """Find faults."""
    connection = Connection(int(sys.argv[1]))
    trie = token_trie(*connection.recv())
    answer_questions(connection, lambda grammar: find_fault(grammar, trie), CHECK_SECONDS, CHECK_BYTES)


if __name__ == "__main__":
    main()
