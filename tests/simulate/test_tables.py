"""Tables of simulations: lost work and idle failures are not hidden."""

from __future__ import annotations

import re

import pytest

from nanovllm.cli.main import main
from nanovllm.simulate.outages import Outage, idle_outages
from nanovllm.simulate.report import Summary
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.workload import SECOND

FEW = {"num_prompts": 20, "request_rate": 20.0, "random_output_len": 16}
LONG = ["--random-input-len", "4000", "--random-output-len", "400"]
MIXED = ["--random-input-len", "8000", "--random-range-ratio", "0.9"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints for a few requests."""
    assert main(["simulate", "--num-prompts", "20", "--request-rate", "4", *words]) == 0
    return capsys.readouterr().out


def rows_of(table: str) -> list[dict[str, str]]:
    """The rows of the last table, by the names of its columns."""
    lines = table[table.rindex("┏") :].splitlines()
    heads = [line.strip("┃").split("┃") for line in lines if line.startswith("┃")]
    names = [" ".join(words).strip() for words in zip(*heads, strict=True)]
    names = [re.sub(" +", " ", name) for name in names]
    rows = [line.strip("│").split("│") for line in lines[2:] if line.startswith("│")]
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in rows]


def test_a_sweep_shows_lost_and_cut_requests(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", "max-model-len=4096,8192,16384", "--processes", "1"]
    text = printed(capsys, *MIXED, *sweep)
    rows = rows_of(text)
    lost = [int(row["lost"]) for row in rows]
    assert lost[0] > lost[1] > lost[2] == 0
    assert [row[""] for row in rows] == ["", "", "*"]
    assert re.search(r"^max_model_len 4,096: rejected: a prompt must have 1 to 4095", text, re.M)
    text = printed(capsys, *LONG, *sweep)
    (first, *others) = rows_of(text)
    assert first["cut"] == "20" and {row["cut"] for row in others} == {"0"}
    assert "lost" not in first and first[""] == ""
    assert "\nmax_model_len 4,096: 20 answers were cut by --max-model-len" in text
    columns = rows_of(printed(capsys, *sweep))[0]
    assert not {"lost", "cut"} & columns.keys()


def test_a_sweep_names_its_engines_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    def header(*words: str) -> list[str]:
        return re.split(r"^[┌┏]", printed(capsys, *words), maxsplit=1, flags=re.M)[0].splitlines()

    single = header()
    assert len(single) == 2 and single[1].startswith("step times: computed from NVIDIA H100")
    same = header("--sweep", "request-rate=2,4", "--processes", "1")
    assert same == single
    words = ["--sweep", "machine=H100,A100,H100", "--sweep", "tensor-parallel-size=1,3"]
    both = header(*words, "--processes", "1")
    a100 = header("--machine", "A100")
    assert both == [single[0], a100[0], single[1], a100[1]]
    words = ["--sweep", "num-kv-blocks=" + ",".join(map(str, range(1000, 1007)))]
    many = header(*words, "--processes", "1")
    assert len(many) == 6 and many[4] == "3 more such lines are in the output of --json"


def test_a_sweep_shows_attainment_and_hit_rates(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", "random-prefix-len=0,1000", "--processes", "1"]
    rows = rows_of(printed(capsys, *sweep, "--goodput", "ttft:60"))
    assert rows[0]["hits"] == "0" and 0 < float(rows[1]["hits"]) < 1
    assert all(0 < float(row["SLO"]) <= 1 for row in rows)
    rows = rows_of(printed(capsys, "--sweep", "request-rate=1,2", "--processes", "1"))
    assert not {"SLO", "hits"} & rows[0].keys()


def test_a_note_of_all_rows_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max-model-len", "4096", "--sweep", "max-num-seqs=64,128", "--processes", "1"]
    text = printed(capsys, *LONG, *words)
    assert re.findall(".*were cut.*", text) == [
        "20 answers were cut by --max-model-len: prompt and output have 4,096 tokens at most"
    ]


@pytest.mark.parametrize("more", [{}, {"prefill": 1, "decode": 1}, {"spec_acceptance": "0.9,0.8"}])
def test_cut_answers_are_counted(more: Summary) -> None:
    settings = {**FEW, "random_input_len": 4000, "random_output_len": 96, **more}
    whole = simulate({**settings, "max_model_len": 4096})
    assert "num_cut" not in whole and "notes" not in whole
    cut = simulate({**settings, "max_model_len": 4095})
    assert (cut["completed"], cut["num_cut"]) == (20, 20)
    assert cut["total_output_tokens"] == 20 * 95
    assert cut["notes"] == [
        "20 answers were cut by --max-model-len: prompt and output have 4,095 tokens at most"
    ]


def test_answers_may_be_cut_by_the_size_of_the_cache() -> None:
    small = simulate({**FEW, "random_input_len": 100, "random_output_len": 60, "num_kv_blocks": 9})
    assert small["notes"] == [
        "20 answers were cut by --num-kv-blocks: prompt and output have 144 tokens at most"
    ]


def test_times_of_no_request_are_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    def times(*words: str) -> dict[str, list[str]]:
        text = printed(capsys, *words)
        rows = re.findall(r"^│ (TTFT|TPOT|E2EL|ITL|queue) +│(.*)│$", text, re.MULTILINE)
        return {name: [cell.strip() for cell in cells.split("│")] for name, cells in rows}

    rejected = times("--random-input-len", "5000", "--max-model-len", "4096")
    assert set(map(tuple, rejected.values())) == {("-",) * 5} and len(rejected) == 5
    single = times("--random-output-len", "1", "--request-rate", "0.1")
    missing = {name for name, cells in single.items() if "-" in cells}
    assert missing == {"TPOT", "ITL"} and "-" not in single["TTFT"]
    assert single["queue"] == ["0"] * 5
    words = ["--random-input-len", "5000", "--sweep", "max-model-len=4096,8192"]
    first, second = rows_of(printed(capsys, *words, "--processes", "1"))
    assert (first["P99 TTFT (ms)"], first["P99 TPOT (ms)"], first["lost"]) == ("-", "-", "20")
    assert float(second["P99 TTFT (ms)"]) > 0


def test_the_table_says_when_engines_were_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--replicas", "3", "--failures", "1@2", "0@6000", "1@0", "--cold-start", "1.5"]
    text = printed(capsys, *words)
    assert "\n--failures 0@6000 has no effect: the run ends after " in text
    assert [row["not ready (s)"] for row in rows_of(text)] == ["", "0 to 1.5, 2 to 3.5", ""]
    text = printed(capsys, "--replicas", "2", "--failures", "1@2")
    assert [row["not ready (s)"] for row in rows_of(text)] == ["", "from 2"]
    assert "no effect" not in text
    assert "not ready (s)" not in rows_of(printed(capsys))[0]


def test_a_sweep_may_be_one_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--sweep", "failures=0@2,0@6000", "--processes", "1")
    rows = rows_of(text)
    assert [row["failures"] for row in rows] == ["0@2", "0@6000"]
    assert int(rows[0]["lost"]) > 0 and [row[""] for row in rows] == ["", "*"]
    assert "\nfailures 0@6000: --failures 0@6000 has no effect" in text


def test_failures_without_effect_are_named() -> None:
    outages = [
        Outage(0, 60 * SECOND, 90 * SECOND),
        Outage(0, 95 * SECOND, None),
        Outage(1, round(94.5 * SECOND), None),
        Outage(0, 90 * SECOND, 91 * SECOND),
        Outage(2, 80 * SECOND, None),
        Outage(2, 200 * SECOND, None),
        Outage(3, 1000 * SECOND, None),
    ]
    single = [range(number, number + 1) for number in range(4)]
    late = "--failures 2@200 3@1000 have no effect: the run ends after 127.3 s"
    duration = round(127.3 * SECOND)
    assert idle_outages(outages, single, duration) == [late]
    pairs = [range(2), range(2), range(2, 4), range(2, 4)]
    assert idle_outages(outages, pairs, duration) == [
        late,
        "--failures 0@95: the engine is not ready then, because of 1@94.5",
    ]
    assert idle_outages(outages, single, 2000 * SECOND) == [
        "--failures 2@200: the engine is not ready then, because of 2@80"
    ]
