"""Recorded figures, for readers without the machine that was measured: the tables of a page in
`figures/`, and when and on what they were measured."""

import re
from collections.abc import Iterator
from pathlib import Path

from nanovllm.lab.recorded import table

FIGURES = Path(__file__).resolve().parents[1] / "figures"


def measured(page: str) -> str:
    """The command, the date and the GPU of a page such as "gpu.md"."""
    text = (FIGURES / page).read_text(encoding="utf-8")
    command = text.strip().split("\n", 1)[0].strip()
    date = re.search(r"\d{4}-\d\d-\d\d", text)
    gpu = re.search(r"^\| name \| (.+) \|$", text, re.MULTILINE)
    assert date is not None and gpu is not None, f"{page} names no date, or no GPU"
    return f"{gpu[1]}, {date[0]}, `{command}`"


def rows(page: str, title: str) -> Iterator[dict[str, str]]:
    """The rows of the table below the line `**title**`, by the names of their columns."""
    return table(FIGURES / page, title)
