"""The glossary and the lectures lead to each other."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

NOTEBOOKS = pathlib.Path(__file__).parents[3] / "notebooks"
LECTURES = {path.name: path for path in NOTEBOOKS.glob("*.ipynb")}
ENTRIES = dict(
    re.findall(
        r"^## (.+)\n\n((?:.+\n?)+)", (NOTEBOOKS / "glossary.md").read_text(encoding="utf-8"), re.M
    )
)
# JupyterLab finds a heading only in its own case; GitHub finds it in any case.
ANCHORS = {term.replace(" ", "-") for term in ENTRIES}


def text_of(lecture: str) -> str:
    cells = json.loads(LECTURES[lecture].read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def plain(text: str) -> str:
    return " ".join(re.sub(r"[*`]", "", text).casefold().split())


def test_entries_are_sorted() -> None:
    assert len(ENTRIES) > 50 and list(ENTRIES) == sorted(ENTRIES, key=str.casefold)


@pytest.mark.parametrize("term", ENTRIES)
def test_each_entry_names_a_section_of_a_lecture_that_uses_the_term(term: str) -> None:
    lecture, section = re.search(
        r"Lecture \[[^\]]+\]\((\S+\.ipynb)\), “(.+)”\.", ENTRIES[term]
    ).groups()
    text = text_of(lecture)
    assert plain(section) in [plain(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)]
    assert plain(term) in plain(text)


@pytest.mark.parametrize("lecture", LECTURES)
def test_links_into_the_glossary_arrive(lecture: str) -> None:
    for anchor in re.findall(r"\(glossary\.md#([^)]+)\)", text_of(lecture)):
        assert anchor in ANCHORS
