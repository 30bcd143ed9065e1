"""Pictures of the engine, all drawn from its own traces. The engine never imports this package.

The visual language, the same in every figure, animation and page:

*   **A request has one colour everywhere**, by its order of appearance: six colours that people
    with the common forms of colour blindness can tell apart (Okabe and Ito, 2008), the same six
    darker, twelve more, then again from the start. Colour never carries meaning alone: rows are
    labelled, and what happens to a token is shown by its mark.
*   **What happens to a token or a request has one mark**, in the request's colour: `style.MEANINGS`
    describes each in a sentence, `draw_language` draws them all, and figures/README.md shows them.
*   **A block is a square of `block_size` cells** (a strip of them where blocks are listed), filled
    from the top left as tokens are written. The pool is a grid of blocks in the order of their ids.
    A shared block is striped in the colours of its holders and carries its reference count; a free
    block is empty; a free block that is still cached is hatched in grey, like any cached token.
*   Figures have a white background, so that they look the same on a light and on a dark page. Text
    has at least 9 points and figures are at most 9 inches wide, so that they are legible at half
    size.
*   The x axis counts steps, computed tokens (a step is as wide as the tokens it computes: a
    substitute for time that is the same on every machine), or recorded time. Drawing the same trace
    twice gives the same bytes.

The `draw_...` functions draw stills. `play` shows a trace in a notebook, `what_if` simulates it
again when the reader changes a setting, and `animate` films it as a GIF file; all three use the
player in `trace/web`, as the page of `nanovllm serve` does. `draw_ranks` and `play_ranks` show what
the ranks of `device="sleep"` did: one timeline per rank, as a still and in this player.

What a picture shows is available as data for assertions: `timeline_spans`, `timeline_events`,
`request_metrics`, `pool_state`, `pool_state_at`, `pool_states`. `simulate` makes traces with the
real scheduler and block tables, without a model."""

# What the package offers under its own name.
# ruff: noqa: F401
from nanovllm.lab.viz.blocks import draw_blocks
from nanovllm.lab.viz.data import (
    Event,
    PoolState,
    Span,
    pool_state,
    pool_state_at,
    pool_states,
    request_ids,
    timeline_events,
    timeline_spans,
)
from nanovllm.lab.viz.film import animate
from nanovllm.lab.viz.language import draw_language
from nanovllm.lab.viz.memory import draw_block_tables, draw_memory, draw_pool
from nanovllm.lab.viz.metrics import percentile, request_metrics, step_edges
from nanovllm.lab.viz.player import Player, play
from nanovllm.lab.viz.ranks import (
    RankPlayer,
    RankSpan,
    RankTotals,
    draw_ranks,
    play_ranks,
    rank_spans,
    rank_totals,
)
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.lab.viz.style import (
    INK,
    MUTED,
    PALETTE,
    RequestColors,
    image_bytes,
    legend,
    request_color,
    use_style,
)
from nanovllm.lab.viz.timeline import compare, draw_budget, draw_timeline, draw_usage, overview
from nanovllm.lab.viz.what_if import WhatIf, what_if
