"""Measured values in a lecture's text, which running the lecture inserts.

A sentence that states a measured value would be false on the next machine. Instead, the text says

    A step takes <!--= 1e3 * seconds | .2f -->4.31<!--/--> ms.

where `1e3 * seconds` is an expression of the lecture's own names, evaluated above the text, and
`.2f` is its format, which may be omitted. Pages do not show the comments.
"""

import re

from nbformat import NotebookNode, v4

VALUE = re.compile(r"(?P<start><!--= (?P<expression>.+?)(?: \| (?P<format>\S+))? -->).*?<!--/-->")
# Marks the cells that print the values.
TAG = "values"


def ask(notebook: NotebookNode) -> None:
    """Insert a cell that prints the values above each cell of text that shows some."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and VALUE.search(cell.source):
            lines = [
                f"print(format({found['expression']}, {found['format'] or ''!r}))"
                for found in VALUE.finditer(cell.source)
            ]
            cells.append(v4.new_code_cell("\n".join(lines), metadata={"tags": [TAG]}))
        cells.append(cell)
    notebook.cells = cells


def answer(notebook: NotebookNode) -> None:
    """Put the printed values into the text, and remove the cells that `ask` has inserted."""
    values = iter(
        [
            value
            for cell in notebook.cells
            if is_inserted(cell)
            for output in cell.outputs
            for value in output.text.splitlines()
        ]
    )
    notebook.cells = [cell for cell in notebook.cells if not is_inserted(cell)]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = VALUE.sub(
                lambda found: f"{found['start']}{next(values)}<!--/-->", cell.source
            )


def is_inserted(cell: NotebookNode) -> bool:
    """Whether a cell is one of those that `ask` inserts."""
    return TAG in cell.metadata.get("tags", [])
