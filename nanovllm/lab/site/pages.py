"""Adds to Sphinx's pages: folds and unchanged lines of lectures as in `course.pages`,
sizes of pictures, and links."""

from __future__ import annotations

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
from nanovllm.lab.course.unchanged import unchanged_lines


def fold(cell: dict[str, Any]) -> None:
    """Tell myst-nb to fold what JupyterLab hides in a cell."""
    hidden = cell["metadata"].get("jupyter", {})
    keys = {"source_hidden": "hide-input", "outputs_hidden": "hide-output"}
    if tags := [tag for key, tag in keys.items() if hidden.get(key)]:
        cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), *tags]


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
