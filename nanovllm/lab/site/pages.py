"""Adds to Sphinx's pages: folds and unchanged lines of lectures as in `course.pages`,
sizes of pictures, and links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imagesize
from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxTranslator
from sphinx.writers.html5 import HTML5Translator

from nanovllm.lab.course.pages import ANSWER, FOLDED, show_paler
from nanovllm.lab.course.unchanged import KEY, unchanged_lines


def fold(cell: dict[str, Any]) -> None:
    """Tell myst-nb to fold what JupyterLab hides in a cell."""
    hidden = cell["metadata"].get("jupyter", {})
    keys = {"source_hidden": "hide-input", "outputs_hidden": "hide-output"}
    if tags := [tag for key, tag in keys.items() if hidden.get(key)]:
        cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), *tags]


# Lines of a cell that address the tools which build and test lectures.
_FOR_TOOLS = re.compile(r"#\| ?\w.*|# NBVAL_\w+")
_ASKS = re.compile(r"\w+ = course\.predict\(")
_NOT_SOLVED = re.compile(r"[\w ,:'-]+: not solved yet\.\n")
_EXERCISES = re.compile(r"^## .*Exercises.*$", re.MULTILINE)
_NOTE = (
    "\n\nNo code runs on this page. In the notebook (`make lab`), the cell below an exercise "
    'checks your answer; the <a href="../labs/index.html">labs</a> run parts of the engine in '
    "the browser."
)


def join_folded(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one cell of folded cells that follow each other: a page has one fold for them."""
    joined: list[dict[str, Any]] = []
    for cell in cells:
        if joined and _is_folded(cell) and _is_folded(joined[-1]) and not joined[-1]["outputs"]:
            before = joined.pop()
            first = "".join(before["source"]).rstrip("\n") + "\n\n\n"
            shift = first.count("\n")
            lines = unchanged_lines(before["metadata"])
            lines |= {shift + line for line in unchanged_lines(cell["metadata"])}
            if lines:
                marks = {"unchanged": " ".join(map(str, sorted(lines)))}
                cell["metadata"][KEY] = cell["metadata"].get(KEY, {}) | marks
            cell["source"] = first + "".join(cell["source"])
        joined.append(cell)
    return joined


def _is_folded(cell: dict[str, Any]) -> bool:
    return bool(cell["metadata"].get("jupyter", {}).get("source_hidden"))


def leave_out(cell: dict[str, Any]) -> None:
    """Leave out of a cell what only helps those who run it: lines for the tools, the code of a
    question that the page asks, and the verdict on an exercise without an answer."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        cell["source"] = _EXERCISES.sub(lambda heading: heading[0] + _NOTE, text)
        return
    lines = text.split("\n")
    kept = [number for number, line in enumerate(lines, start=1) if not _FOR_TOOLS.fullmatch(line)]
    cell["source"] = "\n".join(lines[number - 1] for number in kept).strip("\n")
    if marks := cell["metadata"].get(KEY):
        unchanged = unchanged_lines(cell["metadata"])
        moved = [str(place) for place, number in enumerate(kept, start=1) if number in unchanged]
        cell["metadata"][KEY] = marks | {"unchanged": " ".join(moved)}
    code = ast.parse(_without_magics(cell["source"]))
    if code.body and all(_ASKS.match(ast.unparse(statement)) for statement in code.body):
        cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "remove-input"]
    cell["outputs"] = [each for each in cell["outputs"] if not _is_verdict(each)]


def _without_magics(source: str) -> str:
    """Code without IPython's own lines."""
    return re.sub(r"^[%!].*", "", source, flags=re.MULTILINE)


def _is_verdict(output: dict[str, Any]) -> bool:
    return bool(_NOT_SOLVED.fullmatch("".join(output.get("text", ""))))


_DRAWN = "What the cell above draws"


class Translator(HTML5Translator):
    """Sphinx's writer of pages, which shows unchanged lines of a cell paler."""

    def visit_literal_block(self, node: nodes.Element) -> None:
        """Write a block of code."""
        try:
            super().visit_literal_block(node)
        except nodes.SkipNode:
            if unchanged := node.get("unchanged"):
                self.body[-1] = show_paler(self.body[-1], unchanged)
            raise


def prepare(app: Sphinx, doctree: nodes.document) -> None:
    """Note in the nodes of a page what the writer needs."""
    for cell in doctree.findall(_is_cell):
        for block in _sources(cell):
            block["unchanged"] = unchanged_lines(cell["cell_metadata"])
    for picture in doctree.findall(nodes.image):
        _give_size(picture, Path(app.srcdir))
        if picture.get("alt", "").endswith(".png"):  # a name that myst-nb made
            picture["alt"] = _DRAWN


def _begin_fold(writer: SphinxTranslator, node: nodes.Element) -> None:
    """As myst-nb's fold, with its own words as its name for a screen reader."""
    classes = " ".join(node["classes"])
    words = FOLDED if "above-input" in node["classes"] else ANSWER
    writer.body.append(f'<details class="hide {classes}">\n<summary>{words}</summary>\n')


def _end_fold(writer: SphinxTranslator, node: nodes.Element) -> None:
    writer.body.append("</details>\n")


def _is_cell(node: nodes.Node) -> bool:
    return isinstance(node, nodes.container) and node.get("nb_element") == "cell_code"


def _sources(cell: nodes.Element) -> Iterator[nodes.literal_block]:
    for part in cell.children:
        if isinstance(part, nodes.container) and part.get("nb_element") == "cell_code_source":
            yield from part.findall(nodes.literal_block)


def _give_size(picture: nodes.image, folder: Path) -> None:
    """Let a picture load when the reader comes near it, and keep its place until then."""
    picture["loading"] = "lazy"
    width, height = imagesize.get(folder / picture["uri"])
    if width > 0 and not picture.get("width"):
        picture["width"] = str(width)
        picture["height"] = str(height)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.set_translator("html", Translator)
    app.add_node(HideCodeCellNode, override=True, html=(_begin_fold, _end_fold))
    app.connect("doctree-read", prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
