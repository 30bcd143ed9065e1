"""Lectures as text: py:percent, by way of jupytext."""

from __future__ import annotations

from pathlib import Path

import jupytext
from jupytext.combine import combine_inputs_with_outputs

from nanovllm.lab.course.execute import cell_id, dump, normalise, parse
from nanovllm.lab.course.notebook import CourseError

_FORMAT = "py:percent"


def to_text(path: Path) -> str:
    """A lecture as py:percent, without header and outputs."""
    notebook = parse(path.read_text(encoding="utf-8"))
    notebook.metadata = {"jupytext": {"notebook_metadata_filter": "-all"}}
    return jupytext.writes(notebook, fmt=_FORMAT)


def from_text(text: Path, path: Path, root: Path) -> bool:
    """Make or update a lecture from py:percent; return whether the file changed.

    Cells that the text did not change keep their ids, outputs and metadata; a changed cell keeps its id.

    Raises:
        CourseError: the text has no cells.
    """
    notebook = jupytext.reads(text.read_text(encoding="utf-8"), fmt=_FORMAT)
    if not notebook.cells:
        raise CourseError(f"{text}: no cells: begin them with `# %%` or `# %% [markdown]`")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    sources: dict[str, str] = {}
    if before:
        old = parse(before)
        sources = {cell.id: cell.source for cell in old.cells}
        metadata = {**old.metadata, **notebook.metadata}
        notebook = combine_inputs_with_outputs(notebook, old, fmt=_FORMAT)
        notebook.metadata.update(metadata)
    taken = set(sources)
    for cell in notebook.cells:
        if cell.id not in sources:
            cell.id = cell_id(cell.source, taken)
        if cell.cell_type == "code" and cell.source != sources.get(cell.id):
            cell.outputs = []
    after = dump(normalise(notebook, root))
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before
