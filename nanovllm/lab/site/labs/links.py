"""Links from the sections of lectures to their labs, as an extension of Sphinx.

A lecture names the command that opens a lab, for its reader in JupyterLab. On the site, this line
becomes a link."""

from __future__ import annotations

import html
import re
from typing import Any

from nanovllm.lab.site.labs.pages import Lab, read_labs

LINE = re.compile(r"<p><strong>Try it in the browser:</strong>.*?</p>", re.DOTALL)
NAME = re.compile(r"labs/([\w-]+)\.html")


def line_of(lab: Lab) -> str:
    """Return the line in the lecture that names a lab."""
    command = f"nanovllm docs labs/{lab['name']}.html"
    return f"**Try it in the browser:** `{command}` opens the lab *{lab['title']}*."


def add_links(app: object, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Replace the lines that name labs by links.

    Raises:
        ValueError: the lecture of a lab does not name it.
    """
    labs = {lab["name"]: lab for lab in read_labs() if page == f"notebooks/{lab['lecture']}"}

    def link(line: re.Match[str]) -> str:
        name = NAME.search(line[0])
        if name is None or name[1] not in labs:
            raise ValueError(f"{page} names an unknown lab, or one of another lecture: {line[0]}")
        lab = labs.pop(name[1])
        return (
            f'<p class="try-it">Try it in the browser: <a href="../labs/{lab["name"]}.html">'
            f"{html.escape(lab['title'])}</a></p>"
        )

    if labs:
        context["body"] = LINE.sub(link, context["body"])
    for lab in labs.values():
        raise ValueError(f"lab {lab['name']}: {page} has no line {line_of(lab)!r}")


def setup(app: Any) -> dict[str, Any]:
    """Register the extension."""
    app.connect("html-page-context", add_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
