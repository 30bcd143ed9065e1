"""Films the scheduler of the package that this module is imported from: as frames for a terminal,
and as a page with the player.

`python -m nanovllm.lab.course.film LECTURE PAGE FRAMES`"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nanovllm.lab.viz.data import PoolState, pool_states
from nanovllm.lab.viz.player import WEB, bundle
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.trace.record import StepRecord
from nanovllm.trace.trace import Trace

# The lecture's own subject; later lectures show the scheduler's decisions.
_VIEWS = {11: ["pool", "timeline"], 12: ["tables", "timeline"]}
_SCHEDULER = ["queues", "budget", "pool", "timeline"]
_SYSTEM_PROMPT = list(range(8))
_WIDTH = 24  # of the bar that shows the token budget
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>{style} body {{ max-width: 62rem; margin: 1rem auto; font-family: sans-serif }}</style>
<h1>{title}</h1>
<div id="player"></div>
<script type="application/json" id="trace">{trace}</script>
<script type="module">
{code}
const lines = JSON.parse(document.getElementById("trace").textContent);
const player = createPlayer(document.getElementById("player"), {{ views: {views}, speed: 2 }});
player.setHistory(readHistory(new TextEncoder().encode(lines)));
</script></html>
"""


def run() -> Trace:
    """Serve eight requests, of which three share a prefix, in a pool that is too small for them."""
    requests = [
        SimulatedRequest(0, [*_SYSTEM_PROMPT, 20, 21], 9, request_id="A"),
        SimulatedRequest(0, 6, 5, request_id="B"),
        SimulatedRequest(1, 5, 12, request_id="C"),
        SimulatedRequest(4, [*_SYSTEM_PROMPT, 30], 8, request_id="D"),
        SimulatedRequest(8, 14, 6, request_id="E"),
        SimulatedRequest(11, 4, 10, request_id="F"),
        SimulatedRequest(14, [*_SYSTEM_PROMPT, 40, 41, 42], 6, request_id="G"),
        SimulatedRequest(17, 12, 4, request_id="H"),
    ]
    return simulate(
        requests,
        num_kv_blocks=10,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        check_invariants=True,
    )


def frame(record: StepRecord, pool: PoolState) -> str:
    """A step as four lines of text: the budget, the queue, the pool, and what happened."""
    shares = "  ".join(f"{s.request_id} {s.kind} {s.num_tokens}" for s in record.requests)
    used = round(_WIDTH * record.num_tokens / record.token_budget)
    bar = "█" * used + "░" * (_WIDTH - used)
    blocks = " ".join(_block(pool, block) for block in range(pool.num_blocks))
    events = [
        *(
            f"{name} found {hit} tokens in the cache"
            for name, hit in record.admitted.items()
            if hit
        ),
        *(f"{name} preempted" for name in record.preempted),
        *(f"{name} finished" for name in record.finished),
    ]
    waiting = " ".join(record.waiting) or "-"
    return (
        f"step {record.step:2}  {bar} {record.num_tokens:2} of {record.token_budget} tokens   "
        f"{shares}\n"
        f"waiting  {waiting}\n"
        f"blocks   {blocks}\n"
        f"         {', '.join(events)}"
    )


def _block(pool: PoolState, block: int) -> str:
    """Who holds a block; ▒ if it is free and its content can still be found."""
    holders = pool.holders(block)
    if holders:
        return "".join(holders)
    return "▒" if block in pool.cached else "·"


def page(trace: Trace, title: str, views: list[str]) -> str:
    """A page that plays a trace without a kernel or a server."""
    lines = json.dumps(b"".join(trace.lines()).decode())
    return _PAGE.format(
        title=html.escape(title),
        style=(WEB / "player.css").read_text(encoding="utf-8"),
        trace=lines.replace("</", "<\\/"),
        code=bundle("widget.js"),
        views=json.dumps(views),
    )


def main(arguments: Sequence[str]) -> int:
    """Write the frames and the page; returns the exit status."""
    lecture, film, frames = arguments
    trace = run()
    title = f"Your engine after lecture {lecture}"
    views = _VIEWS.get(int(lecture), _SCHEDULER)
    Path(film).write_text(page(trace, title, views), encoding="utf-8")
    pictures = [frame(*each) for each in zip(trace, pool_states(trace), strict=True)]
    Path(frames).write_text(json.dumps(pictures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
