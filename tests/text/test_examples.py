"""Short strings that match regular expressions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.text.examples import LONGEST_EXAMPLE, shortest_match

EXPRESSIONS = {
    "abc": "abc",
    "": "",
    "^a|bc$": "a",
    "xyz|(ab)": "ab",
    "[^a-z]": "0",
    r"\d{3}-\w+": "aaa-a".replace("aaa", "000"),
    r"(?:a|bb){2,5}c*?": "aa",
    r"(?P<first>[xy])(?P=first)": "xx",
    r"[é-ü]": "é",
    r"(?i)HI": "HI",
    r"[\w-.]@(?<name>x)": "a@x",
    r"[^\S]": " ",
}


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_the_shortest_match_of_an_expression(pattern: str) -> None:
    assert shortest_match(pattern) == EXPRESSIONS[pattern]


@pytest.mark.parametrize("pattern", ["(", "a{1000000}", r"\p{L}", r"(?(1)a|b)"])
def test_no_match_of_what_is_not_known(pattern: str) -> None:
    assert shortest_match(pattern) is None


ATOMS = st.sampled_from(["a", "[b-d]", "[^x]", r"\d", r"\w", r"\s", ".", r"\.", "é", "(?:fg|h)"])
PIECES = st.tuples(ATOMS, st.sampled_from(["", "?", "*", "+", "{2}", "{1,3}"])).map("".join)
BRANCHES = st.lists(PIECES, max_size=5).map("".join)


@given(st.lists(BRANCHES, min_size=1, max_size=3).map("|".join))
def test_what_is_found_matches(pattern: str) -> None:
    found = shortest_match(pattern)
    assert found is not None and re.fullmatch(pattern, found)
    assert len(found) <= LONGEST_EXAMPLE
