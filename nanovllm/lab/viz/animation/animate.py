"""Animations of any trace, as GIF files: one view, one function."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping

import matplotlib

from nanovllm.lab.viz import attention, style
from nanovllm.lab.viz.animation.batch import batch_scene
from nanovllm.lab.viz.animation.gif import gif_bytes
from nanovllm.lab.viz.animation.memory import tables_scene
from nanovllm.lab.viz.animation.pool import pool_scene
from nanovllm.lab.viz.animation.schedule import scheduler_scene
from nanovllm.lab.viz.animation.stage import Scene
from nanovllm.lab.viz.animation.timeline import timeline_scene
from nanovllm.trace.trace import Trace

DEFAULT_STEPS = 60  # what can be followed in a quarter of a minute

# A view is a function of a trace, the numbers of the steps to show (sorted, all of them in the trace) and captions that
# replace its own, by step number.
View = Callable[[Trace, list[int], Mapping[int, str]], Scene]
VIEWS: dict[str, View] = {
    "tables": tables_scene,
    "pool": pool_scene,
    "scheduler": scheduler_scene,
    "timeline": timeline_scene,
    "attention": attention.attention_scene,
    "batch": batch_scene,
}


def animate(
    trace: Trace | str | pathlib.Path,
    view: str = "tables",
    steps: Iterable[int] | None = None,
    captions: Mapping[int, str] | None = None,
) -> bytes:
    """An animation of a trace: the bytes of a GIF file of 900 x 500 pixels that takes 8 to 15 seconds.

    Args:
        trace: a trace, or the path of one. The same trace gives the same bytes.
        view: what to draw, one of `VIEWS`.
        steps: numbers of the steps to show; those that the trace does not have are left out. By default the first 60.
        captions: by step number, to be shown instead of what the view says by itself.

    Raises:
        ValueError: no such view, or none of the steps is in the trace.
        TraceError: the file is not a trace.
    """
    if view not in VIEWS:
        raise ValueError(f"no such view: {view!r} (there are {', '.join(VIEWS)})")
    if not isinstance(trace, Trace):
        trace = Trace.load(trace)
    present = list(dict.fromkeys(record.step for record in trace))
    chosen = present[:DEFAULT_STEPS]
    if steps is not None:
        wanted = set(steps)
        chosen = [step for step in present if step in wanted]
    if not chosen:
        reason = f"it has steps {present[0]} to {present[-1]}" if present else "it is empty"
        raise ValueError(f"none of these steps is in the trace: {reason}")
    return render(lambda: VIEWS[view](trace, chosen, captions or {}))


def render(make_scene: Callable[[], Scene]) -> bytes:
    """A scene as the bytes of a GIF file, in the style of the course whatever matplotlib is set to."""
    with matplotlib.rc_context():
        style.use_style()
        return gif_bytes(*make_scene())
