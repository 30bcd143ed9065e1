"""Limits of a JSON body's contents: a parser needs longer for a megabyte of empty lists than for a megabyte of text.

The parser and the validation hold the interpreter lock from beginning to end, so a thread would not keep the event loop free.
Instead the server counts a body's contents before it parses them, which takes milliseconds.
"""

from __future__ import annotations

import json

import msgspec

from nanovllm.server.access import MAX_NODES, MAX_VALUES
from nanovllm.server.errors import APIError
from nanovllm.server.protocol import names

# The time to parse a number grows with the square of its digits. No field needs more than 64 bits.
MAX_DIGITS = 100
# Fields that may be too large. Only a few, because all of them are compared with each key of the body.
_LARGE_FIELDS = names("prompt messages tokens stop stop_token_ids logit_bias metadata tools chat_template_kwargs")
_LargeFields = msgspec.defstruct("_LargeFields", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in _LARGE_FIELDS])
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)


def check_contents(body: bytes) -> None:
    """Refuse a JSON body that would take long to parse, without parsing it.

    Raises:
        APIError: names the limit, and the field if one of `_LARGE_FIELDS` takes most of the body.
    """
    if len(body) <= MAX_NODES:
        return
    if not json.detect_encoding(body).startswith("utf-8"):
        raise APIError(400, "the body must be JSON in UTF-8")
    # Without escaped backslashes and quotes, each quote begins or ends a string.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_nodes = plain.count(b'"') // 2
    if num_nodes <= MAX_NODES:
        plain = b"".join(plain.split(b'"')[::2])  # what is outside of strings
        num_nodes += plain.count(b"[") + plain.count(b"{")
    if num_nodes > MAX_NODES:
        raise _refusal(body, f"at most {MAX_NODES} strings, lists and objects")
    if plain.count(b",") > MAX_VALUES:
        raise _refusal(body, f"at most {MAX_VALUES} values")
    if b"0" * (MAX_DIGITS + 1) in plain.translate(_DIGITS_TO_ZERO):
        raise _refusal(body, f"numbers of at most {MAX_DIGITS} digits")


def _refusal(body: bytes, limit: str) -> APIError:
    try:
        fields = msgspec.json.decode(body, type=_LargeFields)  # skips other fields, and builds no values
        sizes = {name: len(memoryview(getattr(fields, name))) for name in _LARGE_FIELDS}
        largest = max(sizes, key=sizes.__getitem__)
    except (msgspec.DecodeError, RecursionError, ValueError):
        largest = ""  # no JSON object: there is no field to name
    if not largest or sizes[largest] < len(body) / 2:
        return APIError(400, f"the body must have {limit}")
    return APIError(400, f"the body must have {limit}; {largest} is too large", largest)
