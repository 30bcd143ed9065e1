"""Weighs pages: counts the bytes that a browser loads before it shows a page, compressed as
servers send them."""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path

BOUND = 1_000_000
_LOADED = re.compile(
    r'<(?:link(?=[^>]*\brel="(?:stylesheet|preload)")|script|img(?![^>]*\bloading="lazy"))'
    r'[^>]*?\b(?:href|src)="([^"#?:]+)'
)


def weights(site: Path) -> dict[str, int]:
    """The weight of each page in bytes, by its path, the heaviest first. Pictures that load when
    the reader comes near them do not count."""
    found = {}
    for page in site.rglob("*.html"):
        files = set(_LOADED.findall(page.read_text(encoding="utf-8")))
        loaded = {(page.parent / name).resolve() for name in files}
        found[page.relative_to(site).as_posix()] = sum(map(_compressed, {page, *loaded}))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@cache
def _compressed(file: Path) -> int:
    return len(gzip.compress(file.read_bytes(), 6)) if file.is_file() else 0


def table(site: Path, rows: int = 5) -> str:
    """The heaviest pages, as a table."""
    heaviest = [*weights(site).items()][:rows]
    lines = [f"{size / 1e3:8,.0f}  {page}" for page, size in heaviest]
    return "\n".join([f"The heaviest pages, in kB gzipped (at most {BOUND / 1e3:,.0f}):", *lines])
