"""The films of lectures 21 to 25: each runs ranks, has them record what they do, and draws the
record."""

from __future__ import annotations

import json
import pathlib
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from figures_parallel import arrow
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from reel import Reel, told

from nanovllm.assembly.engine import Engine
from nanovllm.assembly.scheduling import create_scheduler
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.expert_parallel import ExpertDispatcher, ExpertPlacement
from nanovllm.distributed.groups import Grid, get_ep_group, get_pp_group, get_world_group
from nanovllm.distributed.pipeline_parallel import layer_range
from nanovllm.distributed.process_groups import destroy_groups
from nanovllm.distributed.shared_collectives import PART_BYTES
from nanovllm.distributed.stage_link import StageLink
from nanovllm.features.data_parallel.lock_step import LOCK_STEP
from nanovllm.features.data_parallel.ranks import rank_config
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.lab.viz.style import (
    BACKGROUND,
    FAINT,
    INK,
    MUTED,
    PALETTE,
    ink_on,
    mark_style,
    mix,
    pale,
    request_color,
)

if TYPE_CHECKING:
    from nanovllm.features.data_parallel.lock_step import LockStep


def tile(
    ax: Axes, x: float, y: float, width: float, height: float, text: Any, fill: str = BACKGROUND
) -> None:
    """A filled rectangle with a text in its middle, in the size that a film needs."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=MUTED, linewidth=0.8))
    ax.text(
        x + width / 2,
        y + height / 2,
        str(text),
        ha="center",
        va="center",
        fontsize=11,
        color=ink_on(fill),
    )


# ---------------------------------------------------------------- lecture 21


def numbers(
    ax: Axes, x: float, y: float, width: float, height: float, value: int, is_whole: bool = False
) -> None:
    """A number of lecture 21: its digit at the place r is a piece of rank r, in that rank's colour;
    a sum has several."""
    digits = [(rank, digit) for rank, digit in enumerate(reversed(str(value))) if digit != "0"]
    for i, (rank, _) in enumerate(digits):
        each = width / len(digits)
        ax.add_patch(
            Rectangle((x + i * each, y), each, height, facecolor=PALETTE[rank], edgecolor="none")
        )
    look = {
        "fill": False,
        "edgecolor": INK if is_whole else BACKGROUND,
        "linewidth": 2 if is_whole else 0.8,
    }
    ax.add_patch(Rectangle((x, y), width, height, **look))
    piece = {
        "ha": "center",
        "va": "center",
        "bbox": {"facecolor": BACKGROUND, "pad": 1.2, "linewidth": 0},
    }
    ax.text(x + width / 2, y + height / 2, digits[0][1], fontsize=10, **piece)


def around_a_ring() -> list[tuple[int | None, list[int]]]:
    """An all-reduce around a ring; returns, first before and then after each step, which piece this
    rank has sent, and what its pieces are."""
    group = get_world_group()
    rank, n = group.rank, group.world_size
    pieces = [torch.tensor([10**rank * (piece + 1)]) for piece in range(n)]
    record: list[tuple[int | None, list[int]]] = [(None, [int(piece) for piece in pieces])]
    for step in range(2 * n - 2):
        mine, theirs = (rank - step) % n, (rank - 1 - step) % n
        sending = dist.isend(pieces[mine], (rank + 1) % n)
        dist.recv(arrived := torch.empty(1, dtype=torch.int64), (rank - 1) % n)
        sending.wait()
        pieces[theirs] = pieces[theirs] + arrived if step < n - 1 else arrived
        record.append((mine, [int(piece) for piece in pieces]))
    return record


def ring() -> Reel:
    """The all-reduce that goes around a ring of four ranks."""
    n = 4
    record = run_ranks(around_a_ring, Grid(tensor=n))
    words = {
        0: (
            "Each rank has four numbers, in its colour. The ranks want the four sums. The data is "
            "cut into four pieces."
        ),
        1: (
            "Each rank sends another piece to its right neighbour, at the same time. The receiver "
            "adds it to its own piece."
        ),
        2: "What has arrived goes on, one rank further: these pieces have three terms now.",
        3: (
            "After three steps each rank has one complete sum (black frame). So far it is a "
            "reduce-scatter."
        ),
        4: (
            "The same again, but now the receiver replaces its own piece by the complete sum that "
            "arrives."
        ),
        5: (
            "What has arrived goes on again. No rank adds any more: the second half is an "
            "all-gather."
        ),
        6: (
            "After 6 steps all ranks have all sums. Each has sent 6 pieces, which is 1.5 times its "
            "data, and only to its neighbour."
        ),
    }

    def draw(ax: Axes, record: Any, step: int) -> None:
        ax.set(xlim=(0, 100), ylim=(43, 0))
        whole = [sum(10**rank * (piece + 1) for rank in range(n)) for piece in range(n)]
        for rank in range(n):
            x = 17 + 21 * rank
            ax.text(
                x + 5.5,
                1.5,
                f"rank {rank}",
                ha="center",
                va="center",
                fontsize=12,
                fontweight="bold",
                color=PALETTE[rank],
            )
            sent, pieces = record[rank][step]
            for piece, value in enumerate(pieces):
                numbers(ax, x, 4.4 + 9.6 * piece, 11, 7.4, value, value == whole[piece])
            if sent is not None:
                y = 8.1 + 9.6 * sent
                arrow(ax, (x + 11.4, y), (x + 20.6 if rank < n - 1 else x + 19, y))
                if rank == n - 1:  # and in again on the left
                    arrow(ax, (9, y), (16.6, y))
        for piece in range(n):
            ax.text(0, 8.1 + 9.6 * piece, f"piece {'ABCD'[piece]}", va="center", fontsize=11)

    beats = told(range(2 * n - 1), words)
    return Reel(
        "All-reduce around a ring",
        record,
        beats,
        draw,
        4.0,
        lambda step: f"step {step} of 6" if step else "before",
    )


def in_shared_memory(orders: Sequence[Sequence[int]]) -> list[Any]:
    """Sums in shared memory, for which the ranks arrive one after another.

    Args:
        orders: for each sum, in which order.

    Returns:
        After each arrival: the sum's number, which rank has come, each rank's counter, both halves
        of the segment, and what each rank has as its result.
    """
    group = get_world_group()
    shared, n = group.shared, group.world_size
    segment = shared.segment
    record: list[Any] = []

    def note(number: int, rank: int | None, result: list[int] | None) -> None:
        group.barrier()
        halves = []
        for half in (0, 1):
            starts = [segment.payload + (half * n + member) * PART_BYTES for member in range(n)]
            halves.append(
                [segment.data[start : start + 8 * n].cast("q").tolist() for start in starts]
            )
        results = group.all_gather_object(result)
        record.append(
            [number, rank, [segment.count(member) for member in range(n)], halves, results]
        )
        group.barrier()

    note(0, None, None)
    for number, order in enumerate(orders):
        x = 10**group.rank * (torch.arange(n) + 1 + n * number)
        for turn in order:
            if turn == group.rank:
                before = segment.count(group.rank)
                thread = threading.Thread(target=shared.all_reduce, args=(x,))
                thread.start()
                while segment.count(group.rank) == before:
                    time.sleep(0.001)
            is_over = turn == order[-1]
            group.barrier()  # the last rank has come
            if is_over:
                thread.join()
            note(number, turn, x.tolist() if is_over else None)
    return record


def shared_memory() -> Reel:
    """The all-reduce in shared memory, for which the ranks arrive one after another."""
    n = 4
    record = run_ranks(in_shared_memory, Grid(tensor=n), [[0, 1, 3, 2], [2, 0, 1, 3]])[0]
    words = {
        0: (
            "Four ranks map the same memory. It has a counter per rank, and two halves with a "
            "place per rank. Only that rank writes there."
        ),
        1: (
            "Rank 0 writes its numbers into its place, where all can read them, and counts to 1. "
            "Then it waits."
        ),
        2: (
            "Rank 1 does the same. It needs no lock, since only rank 1 writes to this place and to "
            "this counter."
        ),
        3: (
            "So does rank 3. Three ranks wait until rank 2's counter says 1, too: its part is "
            "missing."
        ),
        4: (
            "Rank 2 has come, and all counters say 1. Each rank reads all parts and adds them up "
            "itself, in the same order."
        ),
        5: (
            "The next sum. Rank 2 writes to the other half: a rank that is slow may still read the "
            "first one."
        ),
        6: (
            "Ranks 0 and 1 follow. That a rank counts to 2 says two things: its second part is "
            "there, and it has read the first."
        ),
        8: (
            "All counters say 2, so all ranks have read the first half: the third sum may "
            "overwrite it. One step per sum, and no socket."
        ),
    }

    def draw(ax: Axes, record: Any, moment: int) -> None:
        ax.set(xlim=(0, 100), ylim=(43, 0))
        number, came, counts, halves, results = record[moment]
        names = ["its numbers", "its counter", "first half", "second half", "its sum"]
        rows = [5, 12.2, 20, 26.8, 37]
        for name, y in zip(names, rows, strict=True):
            ax.text(0, y + 2, name, va="center", fontsize=11)
        ax.add_patch(
            Rectangle((14.6, 11), 85, 22.4, facecolor="#f3f3f3", edgecolor="none", zorder=0)
        )
        ax.text(0, 17.6, "shared memory", va="center", fontsize=10, color=MUTED)
        for rank in range(n):
            x, side = 16 + 21.5 * rank, 4.2
            ax.text(
                x + 2 * side,
                2,
                f"rank {rank}",
                ha="center",
                va="center",
                fontsize=12,
                fontweight="bold",
                color=PALETTE[rank],
            )
            ax.text(x + 2 * side, rows[1] + 2, counts[rank], ha="center", va="center", fontsize=13)
            for piece in range(n):
                at = x + side * piece
                numbers(ax, at, rows[0], side, 4.4, 10**rank * (piece + 1 + n * number))
                for half, y in (
                    (1, rows[2]),
                    (0, rows[3]),
                ):  # an odd count is in the second half of the segment
                    if value := halves[half][rank][piece]:
                        numbers(ax, at, y, side, 4.4, value)
                    else:
                        ax.add_patch(
                            Rectangle((at, y), side, 4.4, facecolor=BACKGROUND, edgecolor=FAINT)
                        )
                if results[rank]:
                    numbers(ax, at, rows[4], side, 4.4, results[rank][piece], is_whole=True)
            middle, y = x + 2 * side, rows[2 + number]
            if results[rank]:
                # Each rank reads all places: past their right ends, to a line below the memory, and
                # from there to its sum.
                look = {"color": MUTED, "linewidth": 0.8, "zorder": 0.5}
                edge = x + 4 * side
                ax.plot([edge, edge + 1.5, edge + 1.5], [y + 2.2, y + 2.2, 34.6], **look)
                ax.plot([middle, middle], [34.6, 36.6], **look)
                ax.plot([16 + 2 * side, 16 + 21.5 * (n - 1) + 4 * side + 1.5], [34.6] * 2, **look)
            elif counts[rank] == number + 1:
                ax.text(
                    middle,
                    rows[4] + 2.2,
                    "waits",
                    ha="center",
                    va="center",
                    fontsize=11,
                    color=MUTED,
                )
            if rank == came:
                ax.add_patch(
                    Rectangle((x, y), 4 * side, 4.4, fill=False, edgecolor=INK, linewidth=2)
                )

    beats = told(range(len(record)), words)
    return Reel(
        "All-reduce in shared memory",
        record,
        beats,
        draw,
        4.0,
        lambda moment: f"sum {1 + record[moment][0]}",
    )


# ---------------------------------------------------------------- lecture 23


def plan_steps(lengths: Mapping[str, int], alone: int, stages: int) -> list[dict[str, Any]]:
    """Steps of the real scheduler, with as many in flight as there are stages.

    Args:
        lengths: requests, and how many tokens each samples; after the first one, the others arrive
            when it has `alone` tokens.

    Returns:
        For each step its requests, with positions of their tokens, and how many results were known
        when it was planned.
    """
    config = EngineConfig(pipeline_parallel_size=stages, max_num_seqs=8, max_num_batched_tokens=64)
    resolved = resolve(config, model_max_len=64, num_kv_blocks=16)
    scheduler = create_scheduler(resolved, KVCacheManager(16, 4))
    steps, in_flight, arriving, known = [], deque(), list(lengths), 0
    while arriving or scheduler.has_unfinished:
        while arriving and (len(arriving) == len(lengths) or known >= alone):
            name, number = arriving.pop(0), len(lengths) - len(arriving)
            params = SamplingParams(max_tokens=lengths[name], ignore_eos=True)
            scheduler.add_request(
                Request(EngineRequest(name, [100 * number + i for i in range(4)], params), number)
            )
        if not (plan := scheduler.schedule()).empty:
            in_flight.append(plan)
            shares = [[share.request_id, share.start, share.num_tokens] for share in plan.requests]
            steps.append({"shares": shares, "known": known})
        if plan.empty or len(in_flight) == stages:  # wait for the oldest
            done, known = in_flight.popleft(), known + 1
            sampled = {
                share.request_id: [SampledToken(7)] for share in done.requests if share.samples
            }
            scheduler.update_from_output(done, ModelRunnerOutput(sampled))
    return steps


def carry_out(steps: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Pass the steps through the stages of the pipeline group. What a stage sends on is its logical
    clock: a stage begins a step when it has ended the step before, and has received what the stage
    before has computed.

    Returns:
        When this stage computed which step: (tick, step).
    """
    group, clock, known, record = get_pp_group(), 0, 0, []
    link = StageLink(torch.float32)
    result = torch.zeros(1)
    received = torch.zeros(1, 1)
    for number, step in enumerate(steps):
        while group.is_first and known < step["known"]:
            dist.recv(result, group.ranks[-1])
            clock, known = max(clock, int(result)), known + 1
        if not group.is_first:
            link.receive(received)
            clock = max(clock, int(received))
        record.append([clock, number])
        clock += 1
        if group.is_last:
            dist.send(torch.full((1,), float(clock)), group.ranks[0])
        else:
            link.send(torch.full((1, 1), float(clock)))
    while group.is_first and known < len(steps):
        dist.recv(result, group.ranks[-1])
        known += 1
    link.flush()
    group.barrier()
    return record


def bubble() -> Reel:
    """Three stages, one request and then three: where stages wait."""
    lengths, alone = {"A": 5, "B": 3, "C": 3}, 2
    steps = plan_steps(lengths, alone, 3)
    stages = [
        {tick: number for tick, number in spans}
        for spans in run_ranks(carry_out, Grid(pipeline=3), steps)
    ]
    ticks = 1 + max(max(spans) for spans in stages)
    idle = 3 * ticks - sum(map(len, stages))
    names = ["".join(name for name, *_ in step["shares"]) for step in steps]
    record = {"steps": steps, "stages": [sorted(spans.items()) for spans in stages]}
    first_b = min(tick for tick, number in stages[0].items() if names[number] == "B")
    full = next(tick for tick in range(ticks) if all(tick in spans for spans in stages))
    drain = 1 + max(stages[0])
    words = {
        0: (
            "A is alone. Stage 0 computes A's prompt (tokens 0 to 3), and hands hidden states to "
            "stage 1. Stages 1 and 2 have nothing to compute."
        ),
        1: (
            "Stage 1 computes its layers. Stage 0 cannot begin A's next token, which is not "
            "sampled yet."
        ),
        2: (
            "Stage 2 computes the last layers and samples token 4, which goes back to the "
            "scheduler."
        ),
        3: (
            "Token 4 takes the same way. In each tick, two of three stages are idle: this is "
            "taking turns."
        ),
        first_b - 1: "B and C have arrived. A's token 5 is known, so that A gets the first step.",
        first_b: (
            "The scheduler does not wait for A's next token: the next step is B's prompt. Two "
            "steps are in flight."
        ),
        full: (
            "C's prompt follows. Three steps are in flight, one on each stage: the pipeline is "
            "full, and no stage is idle."
        ),
        full + 1: (
            "A's token 6 is known, and A gets the next step. The token has taken 3 ticks, as "
            "before: a pipeline does not lower latency."
        ),
        full + 2: (
            "Then B, then C, then A again. As long as three requests run, the pipeline stays full."
        ),
        drain: (
            "Stage 0 has no step left to begin: the pipeline drains, and the grey comes back stage "
            "by stage."
        ),
        ticks - 1: (
            f"{idle} of {3 * ticks} cells were idle: while A was alone, while the pipeline filled, "
            "and while it drained. A longer run adds full columns only."
        ),
    }

    def draw(ax: Axes, record: Any, tick: int) -> None:
        ax.set(xlim=(0, 100), ylim=(46, 0))
        for number, spans in enumerate(stages):
            x, layers = 22 + 27 * number, layer_range(30, 3, number)
            ax.text(
                x + 9,
                0.6,
                f"stage {number}: layers {layers.start}–{layers.stop - 1}",
                ha="center",
                va="top",
                fontsize=11.5,
            )
            ax.add_patch(
                Rectangle((x, 3.6), 18, 12, facecolor=BACKGROUND, edgecolor=INK, linewidth=1.2)
            )
            if tick in spans:
                _draw_step(ax, (x + 1.2, 4.8, 15.6, 9.6), steps[spans[tick]], 12)
                if tick + 1 < ticks and number < 2:
                    arrow(ax, (x + 18.2, 9.6), (x + 26.8, 9.6))
                    ax.text(
                        x + 22.5,
                        8.8,
                        "hidden\nstates",
                        ha="center",
                        va="bottom",
                        fontsize=9,
                        color=MUTED,
                    )
            else:
                ax.text(x + 9, 9.6, "idle", ha="center", va="center", fontsize=12, color=MUTED)
        for row, (name, wanted) in enumerate(lengths.items()):
            sampled = sum(
                done < tick + 1 for done, number in stages[2].items() if names[number] == name
            )
            arrived = name == "A" or tick >= first_b - 1
            y = 4 + 4.1 * row
            if arrived:
                ax.text(
                    0,
                    y + 1.4,
                    name,
                    va="center",
                    fontsize=12,
                    fontweight="bold",
                    color=request_color(row),
                )
                for token in range(wanted):
                    look = (
                        mark_style("decode", request_color(row))
                        if token < sampled
                        else mark_style("free", FAINT)
                    )
                    ax.add_patch(Rectangle((2.6 + 2.8 * token, y), 2.2, 2.8, **look))
        ax.text(0, 0.6, "tokens sampled", va="top", fontsize=11.5)
        if tick in stages[2]:
            ax.plot([85, 85, 9], [15.8, 19.4, 19.4], color=INK, linewidth=1.2)
            arrow(ax, (9, 19.4), (9, 16.6))
            ax.text(
                52, 18.9, "the sampled token", ha="center", va="bottom", fontsize=10, color=MUTED
            )
        cell = 86 / ticks
        for number, spans in enumerate(stages):
            y = 23.5 + 6 * number
            ax.text(0, y + 2.6, f"stage {number}", va="center", fontsize=11.5)
            for each in range(tick + 1):
                at = (9 + cell * each, y, 0.94 * cell, 5.2)
                if each in spans:
                    _draw_step(ax, at, steps[spans[each]], 11, brief=True)
                else:
                    ax.add_patch(Rectangle(at[:2], *at[2:], facecolor="#e9e9e9", edgecolor="none"))
        shown = 3 * (tick + 1)
        waiting = shown - sum(each <= tick for spans in stages for each in spans)
        ax.text(
            9,
            43.6,
            f"grey: idle, {waiting} of {shown} so far ({waiting / shown:.0%})",
            va="center",
            fontsize=11.5,
        )
        ax.text(
            95, 43.6, "one column per tick", va="center", ha="right", fontsize=11.5, color=MUTED
        )

    title = "Three stages of a model: one request, then three"
    return Reel(title, record, told(range(ticks), words), draw, 4.2, lambda tick: f"tick {tick}")


def _draw_step(
    ax: Axes, at: tuple[float, ...], step: Mapping[str, Any], size: float, brief: bool = False
) -> None:
    """The shares of a step in a rectangle (left, top, width, height), side by side."""
    x, y, width, height = at
    width /= len(step["shares"])
    for i, (name, start, _) in enumerate(step["shares"]):
        kind = "prefill" if start == 0 else "decode"
        ax.add_patch(
            Rectangle(
                (x + i * width, y),
                width,
                height,
                **mark_style(kind, request_color("ABCDEF".index(name))),
            )
        )
        text = name if brief else f"{name}\n{'prompt' if start == 0 else f'token {start}'}"
        color = BACKGROUND if kind == "prefill" else INK
        ax.text(
            x + (i + 0.5) * width,
            y + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=size,
            color=color,
        )


# ---------------------------------------------------------------- lecture 24

ROUTINGS = [
    [[0, 1], [0, 2], [3, 2]],
    [[0, 3], [0, 1], [0, 2]],
]  # for each rank, the experts of its tokens


def dispatch_and_combine(routings: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """What a rank sees of a shuffle. Rows are single numbers, and expert e multiplies with e +
    1."""
    group = get_ep_group()
    rank, dispatcher = group.rank_in_group, ExpertDispatcher(ExpertPlacement.initial(4, 2))
    messages, all_to_all = [], group.all_to_all

    def noted(x: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        out = all_to_all(x, send_counts, receive_counts)
        messages.append([x.tolist(), out.tolist()])
        return out

    group.all_to_all = noted
    ids = torch.tensor(routings[rank])
    x = 10.0 * (rank + 1) + torch.arange(float(len(ids)))[:, None]
    rows, slots, _, handle = dispatcher.dispatch(x, ids, torch.ones(ids.shape))
    products = rows * torch.where(slots >= 0, 2 * rank + slots + 1, 0)
    out = dispatcher.combine(products.sum(1, keepdim=True), handle)
    return {
        "x": x[:, 0].tolist(),
        "sent": handle.sent,
        "received": handle.received,
        "tokens": handle.tokens.tolist(),
        "rows": rows[:, 0].tolist(),
        "slots": slots.tolist(),
        "products": products.tolist(),
        "back": [row[0] for row in messages[-1][1]],
        "out": out[:, 0].tolist(),
        "num_messages": len(messages),
    }


def shuffle() -> Reel:
    """Dispatch and combine on two ranks with two experts each."""
    record = {
        "routings": ROUTINGS,
        "ranks": run_ranks(dispatch_and_combine, Grid(tensor=2), ROUTINGS),
    }
    ranks = record["ranks"]
    num_leave = sum(
        count
        for rank, seen in enumerate(ranks)
        for other, count in enumerate(seen["sent"])
        if other != rank
    )
    num_rows, num_visits = (
        sum(sum(seen["sent"]) for seen in ranks),
        sum(len(t) for tokens in ROUTINGS for t in tokens),
    )
    words = {
        0: (
            "Each rank has three tokens (here each is one number). The router has chosen two "
            "experts for each token."
        ),
        1: (
            "Each rank counts the rows that it has for each rank. a1 needs both ranks; b1 needs "
            "experts 0 and 1, but rank 0 only."
        ),
        2: (
            "First message: the counts. Before the router has chosen, no rank knows how many rows "
            "it will receive."
        ),
        3: (
            "Second message: the rows. A row goes once to each rank that has one of its experts. A "
            "thick arrow leaves its rank."
        ),
        4: (
            "Third message: which experts of this rank each row visits. (The weights travel with "
            "it; here they are 1.)"
        ),
        5: (
            "Each expert computes all rows that visit it at once, from both ranks. Expert e "
            "multiplies with e + 1. First experts 0 and 2."
        ),
        6: "Then experts 1 and 3. Each expert's weights are read once, for rows of all ranks.",
        7: (
            "A rank adds up what its experts have computed for a row: one row came, and one row "
            "goes back."
        ),
        8: "Fourth message: the sums go back the way the rows came. This is the combine.",
        9: (
            f"Each rank adds up what came back for a token. {num_visits} visits to experts took "
            f"{num_rows} rows each way, {num_leave} of which left their rank."
        ),
    }
    beats = told(range(len(words)), words)
    return Reel(
        "Dispatch and combine: tokens go to their experts, and back",
        record,
        beats,
        _draw_shuffle,
        4.4,
    )


def _draw_shuffle(ax: Axes, record: Any, moment: int) -> None:
    ax.set(xlim=(0, 100), ylim=(44, 0))
    ranks = record["ranks"]
    lane, row_height = 22.0, 3.3
    names = [[f"{'ab'[rank]}{i}" for i in range(len(seen["x"]))] for rank, seen in enumerate(ranks)]
    arrived: list[
        list[tuple[int, int]]
    ] = []  # for each rank, the source rank and token of each row
    for target in range(2):
        arrived.append([])
        for source, seen in enumerate(ranks):
            begin = sum(seen["sent"][:target])
            arrived[-1] += [
                (source, token) for token in seen["tokens"][begin : begin + seen["sent"][target]]
            ]
    for rank, seen in enumerate(ranks):
        top = 1.5 + lane * rank
        ax.add_patch(
            Rectangle(
                (0, top - 1), 100, lane - 1.6, facecolor="#f6f6f6", edgecolor="none", zorder=0
            )
        )
        ax.text(
            1,
            top + 0.8,
            f"rank {rank}",
            va="center",
            fontsize=12,
            fontweight="bold",
            color=PALETTE[rank],
        )
        for token, chosen in enumerate(record["routings"][rank]):
            y = top + 3.4 + 5.2 * token
            text = f"{names[rank][token]} = {seen['x'][token]:.0f} → {chosen[0]}, {chosen[1]}"
            tile(ax, 1, y, 15.5, 4, text, pale(PALETTE[rank]))
            if moment == 9:
                parts = [
                    value
                    for value, sent in zip(seen["back"], seen["tokens"], strict=True)
                    if sent == token
                ]
                total = " + ".join(f"{part:.0f}" for part in parts)
                text = (
                    f"{total} = {seen['out'][token]:.0f}"
                    if len(parts) > 1
                    else f"{seen['out'][token]:.0f}"
                )
                tile(ax, 18.5, y, 15.5, 4, text, PALETTE[rank])
        if moment in (1, 2):
            for other, count in enumerate(seen["sent"]):
                tile(
                    ax, 21, top + 4.6 + 7 * other, 17, 4.6, f"{count} for rank {other}", BACKGROUND
                )
        if moment == 2:
            for other, count in enumerate(seen["received"]):
                tile(
                    ax,
                    46,
                    top + 4.6 + 7 * other,
                    17,
                    4.6,
                    f"{count} from rank {other}",
                    pale(PALETTE[other]),
                )
                arrow(
                    ax,
                    (38.3, 1.5 + lane * other + 4.6 + 7 * rank + 2.3),
                    (45.7, top + 4.6 + 7 * other + 2.3),
                )
        for slot in range(2):
            expert = 2 * rank + slot
            is_busy = moment == 5 + slot
            y = top + 3 + 8.6 * slot
            tile(
                ax,
                84,
                y,
                14,
                6.4,
                f"expert {expert}\n(× {expert + 1})",
                mix(PALETTE[2], BACKGROUND, 0.4) if is_busy else BACKGROUND,
            )
        if moment < 3:
            continue
        for number, (source, token) in enumerate(arrived[rank]):
            y = top + 0.4 + (row_height + 0.45) * number
            start = 1.5 + lane * source + 3.4 + 5.2 * token + 2
            name, value = names[source][token], seen["rows"][number]
            visits = [slot for slot in seen["slots"][number] if slot >= 0]
            products = {
                slot: seen["products"][number][i]
                for i, slot in enumerate(seen["slots"][number])
                if slot >= 0
            }
            known = [products[slot] for slot in sorted(visits) if moment >= 5 + slot]
            text = f"{name}: {value:.0f}"
            if moment in (5, 6) and known:
                text = f"{name}: " + " + ".join(f"{each:.0f}" for each in known)
            elif moment >= 7:
                text = f"{name}: {sum(products.values()):.0f}"
            tile(
                ax,
                48,
                y,
                13,
                row_height,
                text,
                PALETTE[source] if moment >= 7 else pale(PALETTE[source]),
            )
            middle = y + row_height / 2
            if moment in (3, 8):
                ends = (
                    ((16.8, start), (47.7, middle))
                    if moment == 3
                    else ((47.7, middle), (16.8, start))
                )
                look = {
                    "color": PALETTE[source],
                    "linewidth": 2.4 if source != rank else 1.2,
                    "shrinkA": 0,
                    "shrinkB": 0,
                }
                ax.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>"} | look)
            if moment == 4:
                experts = ", ".join(str(2 * rank + slot) for slot in sorted(visits))
                ax.text(62, middle, f"→ {experts}", va="center", fontsize=11)
            if moment in (5, 6) and moment - 5 in visits:
                ax.plot(
                    [61, 84],
                    [middle, top + 3 + 8.6 * (moment - 5) + 3.2],
                    color=PALETTE[source],
                    linewidth=1.4,
                )


# ---------------------------------------------------------------- lecture 25

Arrival = tuple[
    str, int, int, int
]  # a request: its name, its engine, the step of the wave before which it comes, its tokens
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}


def step_together(folder: str, waves: Sequence[Sequence[Arrival]]) -> list[Any]:
    """An engine in lock-step with those of the other ranks. In place of the coordinator, a script
    adds requests and starts waves, so that each run has the same steps.

    Args:
        folder: of the model; the engines meet there, too.
        waves: the requests of each wave.

    Returns:
        For each step: the wave, the shares, whether this engine had requests and whether any had,
        and all-to-all calls.
    """
    me, n = get_world_group().rank, get_world_group().world_size
    destroy_groups()  # the engine joins its own
    options = {
        "num_kv_blocks": 64,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    options |= {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "enable_expert_parallel": True,
    }
    config = EngineConfig(folder, data_parallel_size=n, **options)
    core = Engine(rank_config(config, me, f"file://{folder}/meet"))
    record, launch, peers = [], core.executor.launch, cast("LockStep", core.peers)

    def noted(plan: Any) -> Any:
        shares = [[share.request_id, share.start, share.num_tokens] for share in plan.requests]
        before, wave, wait = get_ep_group().calls["all_to_all"], peers.waves.ended, launch(plan)

        def done() -> Any:
            result, calls = wait(), get_ep_group().calls["all_to_all"] - before
            record.append([wave, shares, plan.extras[LOCK_STEP], result.extras[LOCK_STEP], calls])
            return result

        return done

    core.executor.launch = noted
    for wave, arrivals in enumerate(waves):
        first = core.num_steps
        peers.waves.start(wave)
        while peers.waves.running:
            for name, engine, step, count in arrivals:
                if (engine, step) == (me, core.num_steps - first):
                    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                    core.add_request(EngineRequest(name, [3, 4, 5, 6], params))
            core.step()
    core.close()
    return record


def lock_step() -> Reel:
    """Three engines that share experts: waves, and dummy batches."""
    script: list[list[Arrival]] = [
        [("A", 0, 0, 6), ("B", 1, 0, 2), ("C", 1, 0, 3), ("D", 2, 3, 2)],
        [("E", 1, 0, 2)],
    ]
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MIXTRAL))
        record = run_ranks(step_together, Grid(data=3), folder, script)
    first, total = sum(step[0] == 0 for step in record[0]), len(record[0])
    dummies = [[not step[1] for step in engine] for engine in record]
    (calls,) = {step[4] for engine in record for step in engine}
    frames = [None, *range(first), None, *range(first, total)]
    words = {
        0: (
            "Three engines share the experts of a model. A comes to engine 0, B and C to engine 1. "
            "The coordinator starts wave 0 on all three."
        ),
        1: (
            "Engine 2 has no request, and computes a dummy batch: without it, the others would "
            "wait for ever in their first all-to-all."
        ),
        2: (
            f"In each step each engine makes {calls} all-to-all calls: 4 in each of 3 layers. "
            "They also sum one bit per engine: does it have requests?"
        ),
        3: "B has its tokens. Engine 1 goes on with C.",
        4: (
            "C has its tokens, too: now engine 1 computes a dummy batch. D comes to engine 2, and "
            "joins the wave at once."
        ),
        5: "D goes on, and so does A. In each step all engines wait for the slowest one.",
        6: "D has ended. Only A is left, and two of three engines compute dummy batches.",
        7: (
            "A has ended. In one more step all compute a dummy batch, and all learn that the sum "
            "is 0: all pause after this same step."
        ),
        8: (
            f"Wave 0 had {first} steps on each engine, and "
            f"{sum(sum(row[:first]) for row in dummies)} of {3 * first} batches were dummies. Now "
            "E comes to engine 1, and wave 1 starts."
        ),
        9: "Wave 1: engines 0 and 2 take part again, with dummy batches.",
        11: "No engine has a request: wave 1 has ended, too. No all-to-all ever missed an engine.",
    }

    def draw(ax: Axes, record: Any, number: int) -> None:
        ax.set(xlim=(0, 100), ylim=(44, 0))
        step = frames[number]
        done = (
            number - 1 - (number > first) if step is not None else (0 if number == 0 else first) - 1
        )
        for row, engine in enumerate(record):
            y = 1 + 7.4 * row
            ax.text(0, y + 2.6, f"engine {row}", va="center", fontsize=11.5)
            if step is None:
                tile(ax, 12, y, 27, 5.2, "paused", BACKGROUND)
                continue
            _, shares, unfinished, _, _ = engine[step]
            if shares:
                _draw_step(ax, (12, y, 27, 5.2), {"shares": shares}, 11, brief=True)
            else:
                tile(ax, 12, y, 27, 5.2, "dummy: 1 padding token", "#e3e3e3")
            arrow(ax, (39.4, y + 2.6), (45.6, y + 2.6))
            arrow(ax, (64.4, y + 2.6), (69.6, y + 2.6))
            tile(ax, 70, y, 7, 5.2, int(unfinished), BACKGROUND)
            arrow(ax, (77.4, y + 2.6), (82.6, y + 2.6))
        if step is not None:
            tile(
                ax,
                46,
                1,
                18,
                20,
                f"the experts of\nall engines\n\n{record[0][step][4]} all-to-all\ncalls on "
                "each\nengine",
                pale(PALETTE[4]),
            )
            total_bits = sum(engine[step][2] for engine in record)
            text = f"sum {total_bits}:\nthe wave\n" + ("goes on" if record[0][step][3] else "ends")
            tile(ax, 83, 1, 16, 20, text, pale(PALETTE[1]) if record[0][step][3] else BACKGROUND)
            ax.text(73.5, 22.8, "requests?", ha="center", va="center", fontsize=10, color=MUTED)
        cell = 7.4
        for row, engine in enumerate(record):
            y = 27.4 + 4.7 * row
            ax.text(0, y + 2, f"engine {row}", va="center", fontsize=11)
            for each in range(done + 1):
                x = 12 + cell * each + 4 * (each >= first)
                if engine[each][1]:
                    _draw_step(
                        ax, (x, y, cell - 0.5, 4), {"shares": engine[each][1]}, 10, brief=True
                    )
                else:
                    ax.add_patch(
                        Rectangle((x, y), cell - 0.5, 4, facecolor="#e3e3e3", edgecolor="none")
                    )
        ax.text(12, 25.6, "wave 0", va="center", fontsize=10.5, color=MUTED)
        if number > first + 1:
            ax.text(16 + cell * first, 25.6, "wave 1", va="center", fontsize=10.5, color=MUTED)
        ax.text(
            12,
            42.9,
            "one column per step; grey: a dummy batch",
            va="center",
            fontsize=10.5,
            color=MUTED,
        )

    def corner(number: int) -> str:
        return "paused" if frames[number] is None else f"step {frames[number]}"

    beats = told(range(len(frames)), words)
    return Reel("Engines in lock-step: every step is made by all", record, beats, draw, 4.4, corner)
