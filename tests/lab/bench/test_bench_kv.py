"""`nanovllm bench kv`: what its figures say of made-up times, the engines it starts, and the whole
as a dry run."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import pytest

from nanovllm.cli.main import main
from nanovllm.lab.bench.engines import EngineFailed
from nanovllm.lab.bench.kv import first_token, latency, router, tiers, transport
from nanovllm.lab.bench.kv.engines import Answer, Engines, EngineSpec, draw
from nanovllm.lab.bench.local import TINY, write_checkpoint
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.report import text_of
from tests.lab.bench.rows import measured, reached, rows_of

# ---------------------------------------------------------------- figures


def test_transfers_are_compared_with_a_copy_pair_by_pair() -> None:
    seconds = {
        transport.COPY: [1.0, 2.0, 4.0],
        transport.READ: [1.25, 2.5, 50.0],  # one of three was disturbed
        transport.WRITE: [2.0, 4.0, 8.0],
        transport.TCP: [10.0, 20.0, 40.0],
    }
    found = list(transport.compare(4_000_000_000, seconds))
    assert reached(found) == [True, False, None]
    assert measured(found) == pytest.approx([0.8, 0.5, 0.1])
    assert [text_of(rows_of(found)[-1][name]) for name in ("way", "GB/s", "ms")] == [
        transport.TCP,
        "0.20",
        "20000",
    ]


def test_what_the_router_adds_is_the_difference_of_pairs() -> None:
    found = list(router.compare("a", [0.001, 0.005, 0.001], [0.002, 0.006, 0.021], 0.0005))
    assert reached(found) == [True, None] and measured(found)[0] == pytest.approx(1.0)
    assert rows_of(found)[0]["router CPU time, ms"] == pytest.approx(0.5)
    found = list(router.compare("b", [0.001] * 3, [0.004] * 3, 0.001))
    assert reached(found) == [False, None] and measured(found)[0] == pytest.approx(3.0)


def answer(start: float, *times: float) -> Answer:
    return Answer(Timeline(start, [(time, 1) for time in times]), finished=True)


def test_only_what_streams_wait_for_while_prompts_arrive_counts() -> None:
    streams = [answer(0.0, 1.0, 2.0, 2.5, 6.0), answer(0.0, 2.25, 2.75)]
    seen = latency.run_between(streams, [answer(1.5, 3.5)], begin=1.5, end=4.0)
    assert sorted(seen.gaps) == [0.5, 0.5, 1.0], "the one that ends at 6 is over too late"
    assert seen.ttfts == [2.0]
    assert seen.tokens_per_second == pytest.approx(5 / 2.5)


def with_runs(way: latency.Way, alone: float, *worst: float) -> latency.Way:
    runs = [latency.Run([0.03] * 98 + [gap] * 2, [1.0], 100.0) for gap in worst]
    return dataclasses.replace(way, alone=alone, runs=runs)


def test_the_goal_is_half_of_what_whole_prompts_cost() -> None:
    load, ways = latency.Load(pause=1.0), latency.ways_of(2, dry_run=False)
    assert [(way.chunk, way.threads) for way in ways] == [
        (0, 2),
        (0, 1),
        (512, 2),
        (256, 2),
        (128, 2),
        (0, 1),
    ]
    assert len(latency.specs_of(ways, {}, 16)) == 7
    for threads in (1, 4):
        names = [way.name for way in latency.ways_of(threads, dry_run=False)]
        assert len(set(names)) == len(names)
    chosen = [ways[0], ways[1], ways[3], ways[5]]
    late = [(0.4, 0.8), (0.9, 1.8), (0.1, 0.2), (0.1, 0.2)]
    runs = [with_runs(way, 0.4, *worst) for way, worst in zip(chosen, late, strict=True)]
    found = list(latency.compare(load, runs))
    assert reached(found) == [None, None, True] and measured(found)[-1] == pytest.approx(0.25)
    predicted = [latency.predict(run, runs[0], load) for run in runs]
    assert predicted == pytest.approx([0.43, 0.43, 0.03 + 0.4 * 256 / 900, 0.03])
    runs[-1] = with_runs(chosen[-1], 0.4, 0.3, 0.6)
    assert reached(latency.compare(load, runs)) == [None, None, False]


def test_a_pull_adds_the_bytes_and_a_push_does_not() -> None:
    cold = first_token.Case(100, seconds={way: [0.4] for way in first_token.WAYS}, prefilled=[0.3])
    half = first_token.Case(
        100, first_token.CONSUMER, {way: [0.25] for way in first_token.WAYS}, [0.3]
    )
    both = first_token.Case(100, first_token.BOTH, {way: [0.2] for way in first_token.WAYS}, [0.3])
    cases = [cold, half, both]
    predicted = [
        [
            first_token.predict(case, cases, way, again=0.05, seconds_per_token=1e-3)
            for way in (first_token.ONE, first_token.PULL, first_token.PUSH)
        ]
        for case in cases
    ]
    # The producer has not seen the half that the consumer has.
    expected = [[0.4, 0.55, 0.45], [0.25, 0.5, 0.45], [0.2, 0.3, 0.25]]
    assert predicted == [pytest.approx(numbers) for numbers in expected]
    found = list(first_token.compare(cases, {100: 0.05}, 1e-3))
    assert measured(found) == [1.0] * 6 and len(rows_of(found)) == 12 + 3


def tiers_of(times: dict[str, tuple[float, ...]], store: tuple[float, float]) -> tiers.Tiers:
    """Of lengths 32, 64 and 128; the store takes so long for 32 and for 128 tokens of 1000
    bytes."""
    plan = tiers.Plan(lengths=(32, 64, 128), num_documents=2, num_questions=2)
    found = tiers.Tiers(plan, 1000, 32)
    times = {tiers.AGAIN: (0.03, 0.05, 0.09), tiers.POOL: (0.01,) * 3} | times
    found.ttfts = {
        name: {n: [t] * 3 for n, t in zip((32, 64, 128), taken, strict=True)}
        for name, taken in times.items()
    }
    found.stores = {"x": {32_000: store[0], 128_000: store[1]}}
    found.documents = {tiers.PLAIN: [(0.4, 0.0), (0.4, 0.0)], "x": [(0.4, 0.0), (0.1, 0.9)]}
    return found


def test_fetching_is_faster_where_the_bytes_say_so() -> None:
    # A token takes 0.625 ms to compute and 0.125 ms to fetch, with 24 ms before, and 1 ms to
    # notice: they meet at 50 tokens.
    found = tiers_of({"x": (0.04, 0.045, 0.05)}, (0.024 + 32 * 0.000125, 0.024 + 128 * 0.000125))
    assert (
        tiers.crossing(found, "x") == pytest.approx(50)
        and tiers.measured_crossing(found, "x") == 64
    )
    rows = list(tiers.compare_lengths(found))
    assert reached(rows) == [True] and measured(rows) == [64]
    assert list(rows_of(rows)[-1].values())[-2:] == ["50", "64"]
    assert measured(tiers.compare_documents(found)) == pytest.approx([0.25 / 0.4])

    late = tiers_of({"x": (0.04, 0.06, 0.05)}, (0.028, 0.04))
    assert tiers.measured_crossing(late, "x") == 128 and reached(tiers.compare_lengths(late)) == [
        False
    ]
    slow = tiers_of({"x": (0.04, 0.08, 0.16)}, (0.04, 0.16))
    assert tiers.crossing(slow, "x") == tiers.measured_crossing(slow, "x") == math.inf
    assert reached(tiers.compare_lengths(slow)) == [False]
    at_once = tiers_of({"x": (0.02, 0.02, 0.02)}, (1e-6, 4e-6))
    assert tiers.crossing(at_once, "x") == 32, "nothing shorter than a block is kept"


def test_hits_are_those_of_a_list_of_the_documents_used_last() -> None:
    assert tiers.lru_share([0, 1, 0, 2, 1, 0], room=2) == pytest.approx(1 / 6)
    assert tiers.lru_share([0, 1, 0, 2, 1, 0], room=3) == pytest.approx(3 / 6)
    assert tiers.Plan().questions() == tiers.Plan().questions()


# ---------------------------------------------------------------- engines


def test_engines_answer_alike_and_leave_nothing(tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {
        "model": str(write_checkpoint(tmp_path / "tiny", TINY)),
        "device": "cpu",
    }
    options |= {"num_kv_blocks": 128, "block_size": 8, "max_model_len": 500}
    roles = {"prefill": "producer", "decode": "consumer"}
    prompt = draw(50, 320, "prompt")
    assert prompt == draw(50, 320, "prompt") != draw(50, 320, "another")
    with Engines(
        {name: EngineSpec(options | {"kv_role": role}, 1) for name, role in roles.items()}
    ) as engines:
        alone = engines.complete(engines.ask("prefill", prompt, 6))
        divided = engines.complete(engines.ask_both("prefill", "decode", prompt, 6))
        assert divided.token_ids == alone.token_ids and len(alone.token_ids) == 6
        assert divided.num_cached == 49 and divided.prefilled is not None
        assert 0 < divided.prefilled - divided.timeline.start < divided.ttft
        endless = engines.ask("decode", prompt, 440)
        engines.wait(lambda: bool(endless.timeline.arrivals), 60)
        engines.abort([endless])
        assert endless.finished and len(endless.token_ids) < 440
        with pytest.raises(EngineFailed, match=r"'decode' rejected request .*1 to 499 tokens"):
            engines.complete(engines.ask("decode", draw(520, 320), 6))
        processes = [engine.process for engine in engines._engines.values()]
    assert all(process.poll() is not None for process in processes)
    with (
        pytest.raises(EngineFailed, match=r"'one' (fails|has ended).*positions"),
        Engines({"one": EngineSpec(options | {"max_model_len": 100_000}, 1)}),
    ):
        pass


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "names",
    [
        "transport,router",
        pytest.param("latency", marks=pytest.mark.nightly),
        pytest.param("first-token", marks=pytest.mark.nightly),
        pytest.param("tiers", marks=pytest.mark.nightly),
    ],
)
def test_the_dry_run(
    names: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], forked_parts: None
) -> None:
    files = tmp_path / "found.json", tmp_path / "found.md"
    words = ["bench", "kv", "--dry-run", "--repeats", "1", "--part", names]
    assert main([*words, "--json", str(files[0]), "--markdown", str(files[1])]) == 0, (
        capsys.readouterr().err
    )
    data = json.loads(files[0].read_text())
    assert data["dry_run"] is True and len(data["tables"]["Parts"]) == len(names.split(","))
    found = data["tables"]["Figures and goals"]
    assert found and all(row["measured"] is None or math.isfinite(row["measured"]) for row in found)
    assert all(row["reached"] is None for row in found)
    text = files[1].read_text()
    assert "NOT A MEASUREMENT" in text and all(f"| {row['figure']} |" in text for row in found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "weights"], "there are transport, router, latency, first-token, tiers"),
        (["--kv-role", "both"], "unrecognized arguments: --kv-role both"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "kv", *words])
    assert message in capsys.readouterr().err
