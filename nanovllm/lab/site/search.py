"""The index of the search: each section of each page with its heading and text. As an extension of
Sphinx, it takes the place of Sphinx's own index, which knows pages but not their sections."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

INDEX = "sections.json"
# How much a match counts, by the name of its page: what explains comes first, and how to use it.
WEIGHTS = {
    "notebooks/[0-9]*": 1.0,
    "notebooks/glossary": 0.8,
    "README": 1.2,
    "notebooks/*": 0.7,
    "nanovllm/server/README": 1.0,
    "nanovllm/*": 0.5,
    "figures/*": 0.5,
    "*": 0.3,
}
_SILENT = (nodes.section, nodes.title, nodes.raw, nodes.math_block, nodes.comment)
_NAME = re.compile(r"[a-z]\w*_\w+|[A-Z]\w+")  # in code; its other words are of every page
# How code for a shell begins.
_COMMANDS = re.compile(r"(?:\.|curl|make|nanovllm|pip|python) [\w./-]")
# Anchor, heading, prose, names in its code, and the lines of its commands.
Section = tuple[str, str, str, str, str]


def sections(doctree: nodes.document) -> list[Section]:
    """The sections of a page; the text of one does not include that of the sections in it."""
    found = []
    for section in doctree.findall(nodes.section):
        prose: list[str] = []
        names: dict[str, None] = {}
        commands: list[str] = []
        _collect(section, prose, names, commands)
        text = " ".join(" ".join(prose).split())
        heading = section.next_node(nodes.title).astext()
        found.append((section["ids"][0], heading, text, " ".join(names), "\n".join(commands)))
    return found


def _collect(
    node: nodes.Element, prose: list[str], names: dict[str, None], commands: list[str]
) -> None:
    for child in node.children:
        if isinstance(child, _SILENT):
            continue
        if isinstance(child, nodes.literal_block) and _COMMANDS.match(child.astext()):
            commands += [" ".join(line.split()) for line in child.astext().splitlines()]
        elif isinstance(child, nodes.literal_block):
            names |= dict.fromkeys(_NAME.findall(child.astext()))
        elif isinstance(child, nodes.TextElement):
            texts = child.findall(nodes.Text)
            prose.append("".join(each for each in texts if not isinstance(each.parent, nodes.raw)))
        elif isinstance(child, nodes.Element):
            _collect(child, prose, names, commands)


def weight(page: str) -> float:
    """How much a match on this page counts."""
    return next(factor for pattern, factor in WEIGHTS.items() if fnmatch(page, pattern))


def begin(app: Sphinx) -> None:
    """Start an index, and keep Sphinx from making its own."""
    app.builder.search = False  # type: ignore[attr-defined]
    app.env.searched = {}  # type: ignore[attr-defined]


def add(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Add a page that Sphinx is about to write. The start page asks for some of them, too."""
    found = sections(doctree)
    if found and page != app.config.root_doc:
        entry = {"page": f"{page}.html", "weight": weight(page), "sections": found}
        app.env.searched[page] = entry  # type: ignore[attr-defined]


def write(app: Sphinx, failure: Exception | None) -> None:
    """Write the index."""
    if not failure:
        index: list[dict[str, Any]] = [*app.env.searched.values()]  # type: ignore[attr-defined]
        text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
        (Path(app.outdir) / "_static" / INDEX).write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("builder-inited", begin)
    app.connect("doctree-resolved", add)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
