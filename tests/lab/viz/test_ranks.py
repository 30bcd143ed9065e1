"""Timelines of ranks: what is drawn is what the ranks have recorded."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import matplotlib
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.executor.virtual_clock import (
    SECOND,
    RankRead,
    RankStep,
    Timeline,
    TimelineWriter,
    read_timelines,
)
from nanovllm.lab.viz import (
    RankSpan,
    RequestColors,
    draw_ranks,
    image_bytes,
    play_ranks,
    rank_spans,
    rank_totals,
    use_style,
)

# Rank 1 begins when rank 0 has sent; rank 2 is in a group with rank 3, which is slow, and reads KV.
BY_HAND: dict[str, Timeline] = {
    "rank 0": [
        RankStep(order=5, compute=5, wait=8, communicate=8, answer=8, tokens={"a": 20}, parts={}),
        RankStep(order=6, compute=8, wait=9, communicate=9, answer=9, tokens={"b": 1}, parts={}),
    ],
    "rank 1": [
        RankStep(order=5, compute=9, wait=12, communicate=12, answer=12, tokens={}, parts={})
    ],
    "rank 2": [
        RankRead(transfer_id="t", begin=5, end=11, num_bytes=1),
        RankStep(order=5, compute=5, wait=7, communicate=10, answer=11, tokens={"a": 1}, parts={}),
    ],
}


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    matplotlib.use("agg")
    with matplotlib.rc_context():
        use_style()
        yield
        matplotlib.pyplot.close("all")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timeline]:
    """Two stages of two ranks, one of which is slow."""
    folder = tmp_path_factory.mktemp("times")
    llm = LLM(
        "smollm2-135m",
        device="sleep",
        sleep_config={"model": "llama-3.1-8b", "stragglers": {"1": 1.5}, "timelines": str(folder)},
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        max_model_len=256,
    )
    prompts = [{"prompt_token_ids": list(range(40 + i, 60 + 9 * i))} for i in range(3)]
    llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.engine.core.close()
    return read_timelines(folder)


def test_spans_by_hand() -> None:
    found = [(span.row, span.kind, span.begin, span.end) for span in rank_spans(BY_HAND)]
    assert found == [
        ("rank 0", "compute", 0, 3),
        ("rank 0", "compute", 3, 4),
        ("rank 1", "wait", 0, 4),
        ("rank 1", "compute", 4, 7),
        ("rank 2, link", "read", 0, 6),
        ("rank 2", "compute", 0, 2),
        ("rank 2", "wait", 2, 5),
        ("rank 2", "communicate", 5, 6),
    ]


def test_totals_by_hand() -> None:
    totals = {
        name: [round(SECOND / 1000 * time) for time in dataclasses.astuple(total)]
        for name, total in rank_totals(BY_HAND).items()
    }
    # Computes, waits, communicates, has no order, reads.
    assert totals == {
        "rank 0": [4, 0, 0, 3, 0],
        "rank 1": [3, 4, 0, 0, 0],
        "rank 2": [2, 3, 1, 1, 6],
    }
    for total in rank_totals(BY_HAND).values():
        assert total.duration == pytest.approx(7 * 1000 / SECOND)


def test_what_real_ranks_recorded_is_in_order_and_adds_up(recorded: dict[str, Timeline]) -> None:
    spans = rank_spans(recorded)
    assert {span.kind for span in spans} == {"compute", "wait", "communicate"}
    totals = rank_totals(recorded)
    assert len(totals) == 4
    duration = max(span.end for span in spans)
    for total in totals.values():
        assert total.duration == pytest.approx(1000 * duration / SECOND)
    for name, records in recorded.items():
        own = [span for span in spans if span.row == name]
        for span, later in itertools.pairwise(own):
            assert span.begin < span.end <= later.begin < later.end
        order = {"wait": 0, "compute": 1, "communicate": 2}
        for number, step in enumerate(records):
            assert isinstance(step, RankStep)
            kinds = [span.kind for span in own if span.step == number]
            assert kinds.count("compute") == kinds.count("communicate") == 1
            assert [order[kind] for kind in kinds if kind != "wait"] == [1, 2]
            lasting = sum(span.end - span.begin for span in own if span.step == number)
            before = records[number - 1] if number else None
            free = before.answer if isinstance(before, RankStep) else 0
            assert lasting == step.answer - max(step.order, free)
        assert min(totals[name].idle, totals[name].wait) >= 0
    # Rank 0 waits for rank 1, which is in its stage and slow; the second stage waits for the first.
    assert totals["rank 0"].wait > 0.3 * totals["rank 0"].compute
    assert totals["rank 1"].wait == 0
    assert totals["rank 2"].wait == totals["rank 3"].wait > 0


def test_all_bars_and_rows_are_drawn() -> None:
    colors = RequestColors()
    ax = draw_ranks(BY_HAND, colors=colors, title="by hand")
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["rank 0", "rank 1", "rank 2", "rank 2, link"]
    assert list(colors) == ["a", "b"]  # one colour per request
    bars = [patch for patch in ax.patches if patch.get_width() > 0]
    assert len(bars) == 6
    assert sum(bar.get_width() for bar in bars) == pytest.approx((3 + 1 + 3 + 2 + 1 + 6) * 1e-9)
    figure = ax.get_figure(root=True)
    assert figure is not None
    [legend] = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    expected = ["order", "prefill", "decode", "dummy step", "waits", "communicates"]
    assert words == [*expected, "receives KV", "answer"]


def test_a_step_of_many_requests_is_one_bar() -> None:
    def bars(count: int) -> int:
        tokens = {f"r{i}": 1 for i in range(count)}
        step = RankStep(
            order=0, compute=0, wait=9, communicate=9, answer=9, tokens=tokens, parts={}
        )
        return len(draw_ranks({"rank 0": [step]}).patches)

    assert [bars(count) for count in (0, 1, 6, 7, 64)] == [1, 1, 6, 1, 1]


def test_the_same_records_give_the_same_bytes(recorded: dict[str, Timeline]) -> None:
    assert image_bytes(draw_ranks(recorded)) == image_bytes(draw_ranks(recorded))
    assert play_ranks(BY_HAND).saved() == play_ranks(BY_HAND).saved()


def test_no_records_are_told() -> None:
    with pytest.raises(ValueError, match="no rank has a record: run an engine with timelines"):
        draw_ranks({"rank 0": []})
    with pytest.raises(ValueError, match="no rank has a record"):
        rank_totals({})


def test_spans_know_their_requests() -> None:
    [first, *_] = rank_spans(BY_HAND)
    assert first == RankSpan("rank 0", "compute", 0, 3, step=0, tokens={"a": 20})


def test_pictures_from_the_command_line(tmp_path: pathlib.Path) -> None:
    words = [sys.executable, "-m", "nanovllm.lab.viz", str(tmp_path / "out"), "--timelines"]
    times = tmp_path / "times"
    writer = TimelineWriter(str(times), "rank 0")
    failed = subprocess.run([*words, str(times)], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "no rank has a record" in failed.stderr.splitlines()[-1]
    for entry in BY_HAND["rank 0"]:
        writer.write(entry)
    subprocess.run([*words, str(times)], check=True)
    assert (tmp_path / "out" / "ranks.png").read_bytes()[1:4] == b"PNG"
    assert "mountStored" in (tmp_path / "out" / "ranks.html").read_text("utf-8")
