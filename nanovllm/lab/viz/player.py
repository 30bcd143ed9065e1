"""The player for traces as a notebook widget: the JavaScript modules of the live page in one
bundle, and a trace."""

import base64
import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import anywidget
import matplotlib.pyplot as plt
import traitlets

from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab import stored
from nanovllm.lab.viz import style
from nanovllm.lab.viz.blocks import draw_still
from nanovllm.lab.viz.data import request_ids
from nanovllm.trace.trace import Trace

VIEWS = ("tables", "pool", "timeline", "budget", "queues", "usage", "attention", "batch")
WEB = pathlib.Path(__file__).parents[2] / "trace" / "web"
_MOST_STORED = 100_000  # bytes; more would make the notebook and its page too heavy
_MEASURED = TraceSettings().time_unit  # of times from a clock
Source = Trace | str | pathlib.Path  # a trace, or the file of one
_IMPORT = re.compile(
    r'^import (\{[^}]*\}|\w+) from "(\.[\w./-]+)"(?: with \{[^}]*\})?;\n', re.MULTILINE
)


def bundle(entry: str | pathlib.Path) -> str:
    """All modules that a module needs, and itself, as one module without imports. Each follows
    those that it imports; a JSON file becomes a constant, and a style sheet an object.

    Args:
        entry: the module: the name of one in the web folder, or a path.

    Raises:
        ValueError: an import or export of a form that cannot be taken out.
    """
    texts: dict[pathlib.Path, str] = {}
    visited = set()

    def add(path: pathlib.Path) -> None:
        visited.add(path)
        source = path.read_text(encoding="utf-8")
        for what, imported in _IMPORT.findall(source):
            file = (path.parent / imported).resolve()
            if file.suffix != ".js":
                texts[file] = _constant(what, file)
            elif file not in visited:
                add(file)
        body = re.sub(
            r"^export (?=(?:async )?(?:class|function|const)\b)",
            "",
            _IMPORT.sub("", source),
            flags=re.M,
        )
        if left := re.search(r"^(?:import|export)\b.*", body, re.MULTILINE):
            raise ValueError(f"{path.name}: cannot bundle {left[0]!r}")
        texts[path] = f"// {path.name}\n{body}"

    add((WEB / entry).resolve())
    return "\n".join(texts.values())


def _constant(name: str, file: pathlib.Path) -> str:
    """The statements that stand for the import of a JSON file or a style sheet."""
    text = file.read_text(encoding="utf-8").strip()
    if file.suffix == ".json":
        return f"const {name} = {text};\n"
    return f"const {name} = new CSSStyleSheet();\n{name}.replaceSync({json.dumps(text)});\n"


def widget_module() -> str:
    """The module of the notebook widget, in the form that anywidget expects."""
    return bundle("widget.js") + "\nexport default { render: renderWidget };\n"


class Player(anywidget.AnyWidget):
    """A trace with controls to play, pause, step and scrub, and linked pictures of it.

    Attributes:
        step: number of the step that is shown; setting it moves the player there.
        views: names of the pictures, from top to bottom.
        speed: steps per second, until the reader chooses another.
        theme: "light", "dark", or "auto": as the page around it.
        still: steps that a page without a kernel shows, of views of one step.
        lines: the trace, in the format of trace files.
    """

    step = traitlets.Int(0).tag(sync=True)
    views = traitlets.List(traitlets.Unicode()).tag(sync=True)
    speed = traitlets.Float(2.0).tag(sync=True)
    theme = traitlets.Enum(["auto", "light", "dark"], "auto").tag(sync=True)
    still = traitlets.List(traitlets.Int())
    lines = traitlets.Bytes().tag(sync=True)

    def __init__(self, trace: Source | None, **options: Any) -> None:
        self._esm = widget_module()
        self._css = (WEB / "player.css").read_text(encoding="utf-8")
        self.trace = Trace()
        super().__init__(**options)
        self.show(trace)

    def show(self, trace: Source | None) -> None:
        """Show another trace, at the step with the same number if there is one.

        Raises:
            TraceError: the file is not a trace.
            ValueError: there is no trace, or it has no step.
        """
        if trace is None:  # of an LLM without a record
            raise ValueError(
                "there is no trace: make the LLM with trace=True, or name a file such as"
                ' "run.jsonl"'
            )
        trace = trace if isinstance(trace, Trace) else Trace.load(trace)
        if not len(trace):
            raise ValueError("a player needs a trace with at least one step")
        self.trace = trace
        self.lines = b"".join(trace.lines())

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget, and what a notebook keeps of it for pages where no widget runs."""
        data, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        return data | self.saved(), metadata

    def saved(self) -> dict[str, Any]:
        """The player as a notebook stores it, by MIME type: a picture of its views, and the trace
        for pages that play it without a kernel."""
        pictures = still(self.trace, self.views, self.still)
        trace = deflate(b"".join(untimed(self.trace).lines()))
        if trace is None:
            return pictures
        shown = {"views": self.views, "step": self.step, "speed": self.speed}
        return pictures | {stored.TRACE: shown | {"trace": trace}}

    def __repr__(self) -> str:
        steps = f"{len(request_ids(self.trace))} requests, {len(self.trace)} steps"
        return f"Player: {steps}; run this cell in JupyterLab to play it"


def deflate(data: bytes) -> str | None:
    """Data as notebooks store them: deflated, in base64. None if there are too many."""
    deflated = zlib.compress(data, 9)
    return base64.b64encode(deflated).decode() if len(deflated) <= _MOST_STORED else None


def untimed(trace: Trace) -> Trace:
    """The trace as notebooks keep it: without times that were measured, so that it is the same in
    every run. Each step lasts one step then; simulated times stay. The settings are those that
    pictures need, which name no file of this machine."""
    of = trace.settings
    settings = TraceSettings(
        time_unit=of.time_unit if of.time_unit != _MEASURED else "steps",
        block_size=of.block_size,
        num_blocks=of.num_blocks,
        token_budget=of.token_budget,
        enable_prefix_caching=of.enable_prefix_caching,
    )
    made = Trace(settings=settings)
    for number, record in enumerate(trace):
        kept = dataclasses.replace(record, planned=0.0, arrivals={})
        if of.time_unit == _MEASURED:
            kept.start = float(number)
            kept.duration = float(bool(record.requests))
        made.record(kept)
    return made


def still(trace: Trace, views: Collection[str], steps: Collection[int] = ()) -> dict[str, bytes]:
    """A picture of a trace as a PNG, by its MIME type; see `draw_still`."""
    ax = draw_still(trace, views, steps)
    plt.close(ax.get_figure(root=True))
    return {"image/png": style.image_bytes(ax)}


def play(
    trace: Source | None,
    views: Iterable[str] = ("tables", "timeline"),
    step: int = 0,
    still: Iterable[int] | None = None,
) -> Player:
    """Show a trace in a player: the value of a notebook's cell.

    Args:
        trace: a trace, or the file of one.
        views: what to draw, from top to bottom: "tables" (block tables), "pool" (the whole pool),
            "timeline" (requests over steps), "budget" (the step's tokens), "queues", "usage"
            (blocks and tokens over time), "attention" (pages that the step reads and writes),
            "batch" (the step as the model sees it).
        step: where to begin, a step number.
        still: steps whose "attention" and "batch" are drawn where no widget runs; by default
            `step`.

    Raises:
        TraceError: the file is not a trace.
        ValueError: an unknown view, no trace, or one without steps.
    """
    views = list(views)
    if unknown := [view for view in views if view not in VIEWS]:
        raise ValueError(f"no such view: {', '.join(unknown)}; there are {', '.join(VIEWS)}")
    return Player(trace, views=views, step=step, still=[step] if still is None else list(still))
