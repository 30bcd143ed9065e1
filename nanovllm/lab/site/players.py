"""Players of stored traces, predictions that lock, and animations with controls, on pages without a
kernel: on the site, and in exported lectures.

As a Sphinx extension, it prepares the outputs of notebooks for the site's pages, and adds the
modules to them."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.lab import stored
from nanovllm.lab.viz.player import bundle

if TYPE_CHECKING:
    from sphinx.application import Sphinx  # the extra `site`, which exported lectures do not need

WEB = Path(__file__).parent / "web"


def players_module() -> str:
    """The JavaScript module of a page with players in one file, with their style sheet. It exports
    `mountPlayer`."""
    return bundle(WEB / "players.js") + "\nexport { mountPlayer };\n"


def lectures_module() -> str:
    """The JavaScript module of a lecture's page in one file, for outputs that `enliven` has
    prepared."""
    return bundle(WEB / "lectures.js")


def page_of(saved: Mapping[str, Any], title: str) -> str:
    """A complete page that plays what a notebook stores of a player, by MIME type. Without
    JavaScript it shows the picture."""
    picture = base64.b64encode(saved["image/png"]).decode()
    [player] = _prepared({"data": saved})[1:]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width"></head>
<body><img src="data:image/png;base64,{picture}" alt="{html.escape(title)}">
{player["data"]["text/html"]}
<script type="module">
{lectures_module()}
</script></body></html>
"""


def enliven(cells: Iterable[dict[str, Any]]) -> None:
    """Prepare the outputs of a notebook for a page with `lectures_module`: stored traces and
    predictions become elements of the page. Without JavaScript they show the picture, and the
    text."""
    for cell in cells:
        if "outputs" in cell:
            cell["outputs"] = [part for output in cell["outputs"] for part in _prepared(output)]


def _prepared(output: dict[str, Any]) -> list[dict[str, Any]]:
    data = output.get("data", {})
    if shown := data.get(stored.TRACE) or data.get(stored.RANKS):
        return [output, _element("nv-stored", "player", shown)]
    if asked := data.get(stored.PREDICTION):
        text = html.escape("".join(data["text/plain"]))
        is_answer = "measured" in asked
        return [
            _element(
                "nv-reveal" if is_answer else "nv-prediction",
                "answer" if is_answer else "prediction",
                asked,
                f"<pre>{text}</pre>",
            )
        ]
    return [output]


def _element(kind: str, name: str, data: dict[str, Any], content: str = "") -> dict[str, Any]:
    """An output that is an element of the page, with the data that its script needs."""
    value = html.escape(json.dumps(data, ensure_ascii=False))
    text = f'<div class="{kind}" data-{name}="{value}">{content}</div>'
    return {"output_type": "display_data", "metadata": {}, "data": {"text/html": text}}


def _read(app: Sphinx, name: str, content: list[str]) -> None:
    """Prepare a document that is a notebook before Sphinx reads it."""
    if app.env.doc2path(name).suffix == ".ipynb":
        notebook = json.loads(content[0])
        enliven(notebook["cells"])
        content[0] = json.dumps(notebook)


def _write_modules(app: Sphinx) -> None:
    folder = app.outdir / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "players.js").write_text(players_module(), encoding="utf-8")
    (folder / "lectures.js").write_text(lectures_module(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("builder-inited", _write_modules)
    app.connect("source-read", _read)
    app.add_js_file("lectures.js", type="module")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
