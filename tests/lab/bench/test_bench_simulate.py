"""`nanovllm bench simulate`, with tiny sizes."""

from __future__ import annotations

import json
import pathlib

from nanovllm.cli.main import main


def test_the_dry_run(tmp_path: pathlib.Path, forked_parts: None) -> None:
    file = tmp_path / "found.json"
    words = [
        "bench",
        "simulate",
        "--dry-run",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--part",
        "trace,command,fleet",
    ]
    assert main([*words, "--json", str(file)]) == 0
    tables = json.loads(file.read_text())["tables"]
    assert [row["status"] for row in tables.pop("Parts")] == ["done"] * 3
    figures = tables.pop("Figures and goals")
    assert len(figures) == 4
    for figure in figures:
        assert figure["measured"] > 0 and figure["reached"] is None, "tiny sizes reach no goal"
    trace, command, fleet = tables.values()
    assert [row["requests/s"]["median"] > 0 for row in command] == [True] * 3
    cases = [(row["arrival rate"], row["block size"]) for row in trace]
    assert cases == [("1x", 512), ("6x", 512), ("1x", 16), ("1x", 512)]
    assert all(row["x step by step"]["median"] > 1 for row in trace)
    assert fleet[0]["requests"] == 240


def test_the_dry_run_of_live_loads(tmp_path: pathlib.Path, forked_parts: None) -> None:
    file = tmp_path / "found.json"
    words = ["bench", "simulate", "--dry-run", "--threads", "1", "--part", "live", "--repeats", "1"]
    assert main([*words, "--json", str(file)]) == 0
    tables = json.loads(file.read_text())["tables"]
    assert [row["status"] for row in tables["Parts"]] == ["done"]
    assert len(tables["Figures and goals"]) == 16
    assert all(len(row["live"]) == 2 for row in tables["Live and simulated"])
