"""Labs in the browser: pages on which the reader edits the engine's code, runs it, and sees its
blocks move."""

from __future__ import annotations

from pathlib import Path


def build(out: Path) -> None:
    """Write the pages of all labs, and what they load, into a folder; see `pages.build`."""
    # The labs' other modules run in a browser, which has no Markdown.
    from nanovllm.lab.site.labs import pages

    pages.build(out)
