"""The landing page: a recorded trace that plays, the ladder as a picture, and what the README
says."""

from __future__ import annotations

import os
import posixpath
import re
import textwrap
import zlib
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from docutils import nodes
from sphinx.application import Sphinx

from nanovllm.lab.bench.ladder import rungs
from nanovllm.lab.course.ladder import Ladder, Step, read
from nanovllm.lab.site.sources import ROOT
from nanovllm.lab.viz.ladder import draw_engines
from nanovllm.lab.viz.player import still
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.lab.viz.style import use_style
from nanovllm.trace.trace import Trace

PAGE = "index"
PREVIEW = "preview.png"
STILL = "player.png"  # what a browser without JavaScript shows
COMPARED = "Compared with other engines"
ASKED = "Find your lecture by a question"
VIEWS = ["tables", "timeline"]
LAST = 100  # all lectures have been read
NARROW = 6  # inches


def introduction() -> tuple[str, str]:
    """The README's first two sentences: what this is, and for whom."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^\*\*(.+?)\*\*\n\nIt is (for .+?\.) ", text, re.MULTILINE | re.DOTALL)
    assert found, "README.md does not begin with a line in bold and with `It is for ...`"
    return found[1], "F" + " ".join(found[2].split())[1:]


def recorded() -> Trace:
    """Four requests in a pool that is too small for them: B shares A's prefix, and C is preempted
    and resumed."""
    prompt = [*range(100, 148)]
    requests = [
        SimulatedRequest(0, prompt, 20, request_id="A"),
        SimulatedRequest(3, [*prompt[:32], *range(300, 310)], 12, request_id="B"),
        SimulatedRequest(5, 40, 14, request_id="C"),
        SimulatedRequest(9, 60, 8, request_id="D"),
    ]
    return simulate(requests, num_kv_blocks=12, max_num_batched_tokens=32)


def stored(trace: Trace) -> str:
    """A trace as pages hold it: deflated, in base64."""
    return b64encode(zlib.compress(b"".join(trace.lines()), 9)).decode()


def draw_ladder(path: Path, speeds: Mapping[str, float], width: float) -> None:
    """Write a picture of recorded speeds, which are in tokens per second."""
    use_style()
    lectures = {rung.name: rung.lecture for rung in rungs()}
    steps = [Step(name, lectures.get(name, 0), None, speeds[name], None) for name in speeds]
    row = 0.42 if width < NARROW else 0.3  # names there have two lines
    figure, axes = plt.subplots(figsize=(width, row * len(steps) + 0.6), layout="constrained")
    draw_engines(axes, Ladder(LAST, steps, [], []))
    axes.set_xlabel("output tokens/s")
    if width < NARROW:
        names = ["\n".join(textwrap.wrap(each.get_text(), 26)) for each in axes.get_yticklabels()]
        axes.set_yticks(range(len(names)), names)
    figure.savefig(path)
    plt.close(figure)


def comparison(app: Sphinx) -> str:
    """The README's table of engines, as HTML."""
    return _html(app, _table_of(app, "README", COMPARED))


def questions(app: Sphinx) -> str:
    """Readers' questions and the sections that answer them, of `notebooks/README.md`, as HTML."""
    table = _table_of(app, "notebooks/README", ASKED)
    for link in table.findall(nodes.reference):
        link["refuri"] = posixpath.normpath(f"notebooks/{link['refuri']}")
    return _html(app, table)


def _table_of(app: Sphinx, page: str, title: str) -> nodes.table:
    """The first table of a section.

    Raises:
        ValueError: the page has no such section.
    """
    tree = app.env.get_and_resolve_doctree(page, app.builder, tags=app.tags)
    for section in tree.findall(nodes.section):
        if section.next_node(nodes.title).astext() == title:
            return section.next_node(nodes.table)
    raise ValueError(f"{page}.md has no section {title!r}")


def _html(app: Sphinx, table: nodes.table) -> str:
    return str(app.builder.render_partial(table)["fragment"])  # type: ignore[attr-defined]


def fill(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Give the landing page its variables, and each page a description and a preview."""
    what, audience = introduction()
    context |= {"sentence": what, "audience": audience}
    base = app.config.html_baseurl
    context["preview"] = base and f"{base.rstrip('/')}/_static/{PREVIEW}"
    if page != PAGE:
        return
    context |= {"title": "LLM inference engines", "trace": stored(recorded()), "views": VIEWS}
    context |= {"comparison": comparison(app), "questions": questions(app)}
    context["repository"] = os.environ.get("SITE_REPOSITORY", "")
    speeds = read(ROOT / "figures/ladder.md")
    context["speeds"] = {name: f"{speed:,.3g}" for name, speed in speeds.items()}
    for name, width in (("ladder.svg", 9.0), ("ladder_narrow.svg", 4.2), (PREVIEW, 11.0)):
        draw_ladder(Path(app.outdir) / "_static" / name, speeds, width)
    [picture] = still(recorded(), VIEWS).values()
    (Path(app.outdir) / "_static" / STILL).write_bytes(picture)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("html-page-context", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
