"""Pictures of the engine at work, all drawn from its own records. The engine never imports this package.

The visual language, the same in every figure, animation and page:

*   **A request has one colour everywhere**, by its order of appearance: six colours that people with the common forms
    of colour blindness can tell apart (Okabe and Ito, 2008), then the same six darker, then again from the start.
    Colour never carries meaning alone: rows are labelled, and what happens to a token is shown by its mark.
*   **A kind of token has one mark**, in the colour of its request:

    ==============  =====================================================================================
    prefill         solid fill: known tokens (of a prompt, or lost in a preemption) are computed
    decode          pale fill with a solid edge: one new token
    cached          diagonal hatching: found in the prefix cache, not computed
    stalled         thin solid line: it holds blocks, yet has no share in this step
    waiting         thin grey dotted line: it holds nothing
    swapped         thick dashed line: its blocks are in host memory
    transferred     dots: keys and values that came from another engine (later lectures)
    drafted         dashed outline: proposed and not yet accepted (later lectures)
    first token     black triangle above the end of the step that sampled it: arrival to triangle is the TTFT
    preempted       black cross
    finished        black bar; an aborted request ends in a hollow square
    ==============  =====================================================================================

*   **A block is a square of `block_size` cells** (a strip of them where blocks are listed), filled from the top left as
    tokens are written. The pool is a grid of blocks in the order of their ids. A shared block is striped in the colours of
    its holders and carries its reference count; a free block is empty; a free block whose content can still be found is
    hatched in grey, like any cached token.
*   Figures have a white background of their own, so that they read the same on a light and on a dark page; text is at least
    9 points and figures at most 9 inches wide, so that they survive being shown at half size.
*   The x axis counts steps, computed tokens (a step is as wide as the tokens it computes, a stand-in for time that is the
    same on every machine), or time as recorded. Drawing the same record twice gives the same bytes.

What a picture shows can be had as data, to be asserted on: `timeline_spans`, `timeline_events`, `request_metrics`,
`pool_state`, `pool_state_at`. `simulate` makes traces with the real scheduler and block tables, without a model.
"""

from nanovllm.viz.data import (
    Event,
    PoolState,
    Span,
    percentile,
    pool_state,
    pool_state_at,
    request_ids,
    request_metrics,
    share_kind,
    step_edges,
    timeline_events,
    timeline_spans,
)
from nanovllm.viz.memory import draw_block_tables, draw_memory, draw_pool
from nanovllm.viz.simulate import SimulatedRequest, simulate
from nanovllm.viz.style import (
    INK,
    MUTED,
    PALETTE,
    RequestColors,
    image_bytes,
    legend,
    request_color,
    save,
    use_style,
)
from nanovllm.viz.timeline import compare, draw_budget, draw_queues, draw_timeline, draw_usage, overview

__all__ = [
    "INK",
    "MUTED",
    "PALETTE",
    "Event",
    "PoolState",
    "RequestColors",
    "SimulatedRequest",
    "Span",
    "compare",
    "draw_block_tables",
    "draw_budget",
    "draw_memory",
    "draw_pool",
    "draw_queues",
    "draw_timeline",
    "draw_usage",
    "image_bytes",
    "legend",
    "overview",
    "percentile",
    "pool_state",
    "pool_state_at",
    "request_color",
    "request_ids",
    "request_metrics",
    "save",
    "share_kind",
    "simulate",
    "step_edges",
    "timeline_events",
    "timeline_spans",
    "use_style",
]
