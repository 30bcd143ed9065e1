"""Links from the sections of lectures to their labs, as an extension of Sphinx."""

from __future__ import annotations

import html
from typing import Any

from nanovllm.lab.site.labs.pages import anchor, read_labs


def add_links(app: object, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Put a link to each lab below the heading of its lecture's section.

    Raises:
        ValueError: the lecture has no such section.
    """
    for lab in read_labs():
        if page != f"notebooks/{lab['lecture']}":
            continue
        place = f'<section id="{anchor(lab["section"])}">'
        before, found, after = context["body"].partition(place)
        heading, end, text = after.partition("</h2>")
        if not found or not end:
            raise ValueError(f"lab {lab['name']}: {page} has no section {lab['section']!r}")
        link = (
            f'<p class="try-it">Try it in the browser: <a href="../labs/{lab["name"]}.html">'
            f"{html.escape(lab['title'])}</a></p>"
        )
        context["body"] = f"{before}{found}{heading}{end}{link}{text}"


def setup(app: Any) -> dict[str, Any]:
    """Register the extension."""
    app.connect("html-page-context", add_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
