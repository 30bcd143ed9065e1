"""Grammars of llguidance, and matchers that follow them, from what a request asks of its output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from nanovllm.data.json import JsonObject
from nanovllm.data.structured_outputs import Form, StructuredOutputsParams
from nanovllm.text.schemas import SPELLING
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.text.guides import Guide

# Between the parts of a JSON text: nothing, a space, or a line break. If more were allowed, a model
# could go on with white space up to its last token.
WHITESPACE = r"[ \n]?"
# What one token can add to the shortest way to the end, where no schema tells.
COST_OF_BEGINNING = 32
EXAMPLES = 'write EBNF such as root ::= "yes" | "no", or Lark such as start: "yes" | "no"'
# Strings, classes of characters, comments and line breaks before an alternative, in EBNF.
EBNF_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*|\s*\n\s*(?=\|)')
# Parser items per mask, of which an ambiguous grammar takes a time that grows with their square:
# 5,000 take 5 milliseconds. A schema takes less than a millisecond, and one with 300 optional
# properties needs more than 25,000. A Lark grammar may contain schemas.
STEP_MAX_ITEMS = 5_000
STEP_MAX_ITEMS_WITH_SCHEMAS = 15_000
STEP_MAX_ITEMS_OF_SCHEMA = 50_000
STEP_LEXER_FUEL = 100_000
FEWER = "allow fewer alternatives at once, such as optional properties"


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
                first -= 1
                missing -= len(spellings[first])
            if b"".join(spellings[first:]) == text and all(spellings[first:]):
                return tokens[first:]
        # The tokenizer changes texts, for example to Unicode's form NFC.
        return self._longest_tokens(text)

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


def of_schema(schema: str | JsonObject, lenient: bool = False, whitespace: str = WHITESPACE) -> str:
    """The grammar of a JSON schema. Unknown keywords are errors, unless they are to be ignored
    (`lenient`); what the schema itself says of this does not count.

    Args:
        whitespace: a regular expression of the white space between the parts; "": there is none.
    """
    options = {
        "lenient": lenient,
        "coerce_one_of": False,
        "whitespace_flexible": bool(whitespace),
        **SPELLING,
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
        if plain:
            return chr(code)
        return f"\\x{code:02X}" if code < 128 else number[0]

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
