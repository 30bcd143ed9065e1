"""The landing page: a recorded trace that plays, the ladder as a picture, and what the README
says."""

from __future__ import annotations

import re
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from docutils import nodes
from sphinx.application import Sphinx

from nanovllm.lab.bench.ladder import rungs
from nanovllm.lab.course.ladder import Ladder, Step, read
from nanovllm.lab.site.sources import ROOT
from nanovllm.lab.viz.ladder import draw_engines
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.lab.viz.style import use_style
from nanovllm.trace.trace import Trace

PAGE = "index"
COMPARED = "Compared with other engines"
VIEWS = ["tables", "timeline"]


def sentence() -> str:
    """The README's first sentence: what this is."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^\*\*(.+?)\*\*$", text, re.MULTILINE)
    assert found, "README.md has no line in bold"
    return found[1]


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


def draw_ladder(path: Path, width: float) -> None:
    """Write a picture of the ladder that is recorded in `figures/`."""
    use_style()
    speeds = read(ROOT / "figures/ladder.md")
    lectures = {rung.name: rung.lecture for rung in rungs()}
    steps = [Step(name, lectures.get(name, 0), None, speeds[name], None) for name in speeds]
    figure, axes = plt.subplots(figsize=(width, 0.3 * len(steps) + 0.6), layout="constrained")
    draw_engines(axes, Ladder(100, steps, [], []))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def comparison(app: Sphinx) -> str:
    """The README's table of engines, as HTML."""
    readme = app.env.get_and_resolve_doctree("README", app.builder)
    for section in readme.findall(nodes.section):
        if section.next_node(nodes.title).astext() == COMPARED:
            table = section.next_node(nodes.table)
            return str(app.builder.render_partial(table)["fragment"])  # type: ignore[attr-defined]
    raise ValueError(f"README.md has no section {COMPARED!r}")


def fill(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Give the landing page its variables, and each page a description."""
    context["sentence"] = sentence()
    if page != PAGE:
        return
    context |= {"trace": stored(recorded()), "views": VIEWS, "comparison": comparison(app)}
    for name, width in (("ladder", 8.5), ("ladder_narrow", 4.4)):
        draw_ladder(Path(app.outdir) / "_static" / f"{name}.svg", width)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("html-page-context", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
