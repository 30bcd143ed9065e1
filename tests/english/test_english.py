"""The check finds a planted phrase in every kind of text, and lets nothing rise."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys

import pytest

from tests import english
from tests.english import __main__ as command
from tests.stand_ins import set_constants

PLANTED = "Nobody waits."

TEXTS = {
    "page.md": (f"# A page\n\n{PLANTED}\n\n```\n{PLANTED}\n```\n", {"markdown": 1}),
    "code.md": ("`Nobody` is a name here.\n", {}),
    "lecture.ipynb": (
        json.dumps(
            {
                "cells": [
                    {"cell_type": "markdown", "source": ["# A lecture\n", PLANTED]},
                    {"cell_type": "code", "source": [f"# {PLANTED}"]},
                ]
            }
        ),
        {"lectures": 1},
    ),
    "docstring.py": (f'def f():\n    """Do it.\n\n    {PLANTED}"""\n', {"code": 1}),
    "comment.py": (f"x = 1  # {PLANTED}\n", {"code": 1}),
    "error.py": (f'def f(n):\n    raise ValueError(f"got {{n}}. " "{PLANTED}")\n', {"messages": 1}),
    "usage.py": (f'parser.error("{PLANTED}")\n', {"messages": 1}),
    "log.py": (f'logger.warning("{PLANTED} %s", 1)\n', {"messages": 1}),
    "variable.py": (f'mistake = f"{PLANTED} {{n}}"\n', {"messages": 1}),
    "help.py": (f'parser.add_argument("--flag", help="{PLANTED}")\n', {"messages": 1}),
    "table.py": (f'FLAGS = {{"flag": {{"type": int, "help": "{PLANTED}"}}}}\n', {"messages": 1}),
    "string.py": (f'x = "{PLANTED}"\n', {}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_planted_phrase_is_found(name: str, tmp_path: pathlib.Path) -> None:
    text, expected = TEXTS[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = english.hits(tmp_path / name)
    assert collections.Counter(hit.passage.kind for hit in found) == expected
    assert all(hit.phrase.level == "error" and "Nobody" in hit.quote for hit in found)


def test_a_count_may_fall_but_not_rise(tmp_path: pathlib.Path) -> None:
    (tmp_path / "page.md").write_text("It runs beside it.\nIt runs beside it.\n", encoding="utf-8")
    found = english.hits(tmp_path / "page.md")
    now = english.count(found)
    (key,) = now
    assert now[key] == 2
    assert english.complaints(found, now) == []
    assert english.complaints(found, collections.Counter({key: 3})) == []
    risen, *_ = english.complaints(found, collections.Counter({key: 1}))
    assert "2 in markdown, at most 1" in risen


def test_a_rewritten_text_has_no_error_whatever_is_stored(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(f"{PLANTED}\n", encoding="utf-8")
    found = english.hits(tmp_path / "page.md")
    stored = english.count(found)
    set_constants(monkeypatch, english, REWRITTEN={"messages"})
    assert english.complaints(found, stored) == []
    set_constants(monkeypatch, english, REWRITTEN={"markdown"})
    (complaint,) = english.complaints(found, stored)
    assert "page.md:1" in complaint and "Nobody" in complaint


def test_storing_only_lowers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (phrase.pattern for phrase in english.phrases()[:2])
    set_constants(monkeypatch, english, COUNTS=tmp_path / "counts.tsv")
    english.write_counts(collections.Counter({("markdown", first): 2, ("markdown", second): 2}))
    (tmp_path / "page.md").write_text("It belongs into it. " * 5, encoding="utf-8")
    monkeypatch.setattr(english, "all_hits", lambda: english.hits(tmp_path / "page.md"))
    assert english.count(english.all_hits())["markdown", second] == 5
    assert command.store() == 0
    assert english.stored_counts() == {("markdown", second): 2}
    assert command.check() == 1


def test_each_phrase_compiles_and_has_a_level() -> None:
    assert len({phrase.pattern for phrase in english.phrases()}) == len(english.phrases()) > 80
    assert {phrase.level for phrase in english.phrases()} == {"error", "suggestion"}


@pytest.mark.started
def test_the_command_lists_the_occurrences_of_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "page.md").write_text(f"{PLANTED}\n", encoding="utf-8")
    words = [sys.executable, "-m", "tests.english", str(tmp_path / "page.md")]
    output = subprocess.check_output(words, text=True, cwd=english.ROOT)
    assert output.startswith(f"{tmp_path}/page.md:1: error: …Nobody waits")
