"""Recorded figures: the tables of pages that `nanovllm bench --markdown` has written, and when and
on what they were measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def table(page: Path, title: str) -> Iterator[dict[str, str]]:
    """The rows of the table below the line `**title**`, by the names of their columns.

    Raises:
        ValueError: there is no such table.
    """
    text = page.read_text(encoding="utf-8")
    _, found, rest = text.partition(f"**{title}**\n")
    if not found:
        raise ValueError(f"{page.name} has no table {title!r}")
    rows = rest.strip().split("\n\n", 1)[0]
    head, _, *lines = (
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in rows.split("\n")
    )
    for line in lines:
        yield dict(zip(head, line, strict=True))


def conditions(page: Path) -> tuple[str, str, str]:
    """The command of a page, its date, and the processor that it ran on."""
    text = page.read_text(encoding="utf-8")
    date = re.search(r"^- (\d{4}-\d\d-\d\d) [^,]*, ([^,]+)", text, re.MULTILINE)
    command = re.search(r"^ {4}(nanovllm bench .+)$", text, re.MULTILINE)
    if date is None or command is None:
        raise ValueError(f"{page.name} names no date or no command")
    return command[1], date[1], date[2]
