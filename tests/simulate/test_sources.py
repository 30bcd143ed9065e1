"""Where the numbers of a simulation come from: `--list`, and what a summary says of it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nanovllm
from nanovllm.cli.main import main
from nanovllm.simulate.measured import write_cost
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.sources import catalog, select
from nanovllm.simulate.tables import print_summary
from tests.simulate.test_measured import COST

FOLDER = Path(nanovllm.__file__).parent / "simulate"
FEW = {"num_prompts": 20, "request_rate": 20.0, "random_input_len": 64, "random_output_len": 8}
H100 = "NVIDIA H100 SXM data sheet; DGX H100: a 400 Gb/s port per GPU"
MEASURED = "figures/gpu.md, NVIDIA H200, 2026-11-27"


def file_of(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def test_the_json_list_has_what_the_files_have(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "--list", "--json"))
    assert found == json.loads(json.dumps(catalog(select())))
    machines = file_of("machines.toml")
    assert list(found["machines"]) == list(machines["machine"])
    for name, machine in machines["machine"].items():
        for field, value in machine.items():
            listed = found["machines"][name][field]
            assert listed == (listed | value if isinstance(value, dict) else value), field
    assert found["corrections"] == machines["efficiency"]
    models = file_of("models.toml")
    assert list(found["models"]) == list(models)
    for name, model in models.items():
        listed = found["models"][name]
        assert listed["source"] == f"huggingface.co/{model['source']}"
        assert listed["num_layers"] == model["num_hidden_layers"]
        assert listed["max_model_len"] == model["max_position_embeddings"]
        routed = {"num_experts", "num_local_experts", "n_routed_experts"} & model.keys()
        assert listed["num_experts"] == sum(model[field] for field in routed)
        assert listed["num_experts_per_tok"] == model.get("num_experts_per_tok", 0)
    llama = found["models"]["llama-3.1-8b"]
    assert llama["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert llama["num_parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert found["models"]["deepseek-v3"]["bytes_per_weight"] == 1


def test_everything_in_the_files_has_a_source() -> None:
    machines = file_of("machines.toml")
    tables = [*machines["machine"].values(), *machines["efficiency"].values()]
    tables += file_of("models.toml").values()
    assert all(table["source"].strip() for table in tables)
    for machine in machines["machine"].values():
        assert ("price_per_hour" in machine) == ("price_source" in machine)


def test_the_tables_have_whole_names_and_all_sources(capsys: pytest.CaptureFixture[str]) -> None:
    table = printed(capsys, "--list")
    assert "…" not in table
    rows = {
        cells[0]: cells[1:]
        for line in table.splitlines()
        if (cells := [cell.strip() for cell in line.strip("│").split("│")])[1:]
    }
    numbers = ["79.65", "3,350", "989.4", "1,979", "450", "50", "64", "8", "3.49", "nanovllm"]
    assert rows["H100"] == numbers
    assert rows["A100"][3] == "", "it has no FP8 units"
    assert rows["deepseek-v3"][:6] == ["671", "1", "70,272", "61", "8/256", "163,840"]
    assert rows["llama-3.1-8b"][4] == ""
    assert rows["host_step"] == [*["5e-05"] * 5, "0.0002"]
    assert rows["MI300X"][4] == "448", "seven links of 64 GB/s"
    text = " ".join(table.split())
    found = catalog(select())
    for kind in ("machines", "corrections", "models"):
        tables = found[kind]
        assert isinstance(tables, dict)
        for name, each in tables.items():
            assert name in rows or f"{name}: {each['source']}" in text
            assert each["source"].removeprefix("huggingface.co/") in text
    assert "price: RunPod Secure Cloud, runpod.io/pricing, 2026-09-25" in text


def test_the_list_of_one_machine_and_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    everything = json.loads(printed(capsys, "--list", "--json"))
    # The default machine, too, if it is named.
    found = json.loads(printed(capsys, "--list", "--machine", "H100", "--json"))
    assert found["machines"] == {"H100": everything["machines"]["H100"] | {"name": "H100"}}
    assert found["corrections"] == {"nanovllm": everything["corrections"]["nanovllm"]}
    assert found["models"] == {}
    found = json.loads(
        printed(capsys, "--list", "--machine=mi300xx4", "--model=qwen3-8b", "--json")
    )
    assert found["machines"]["MI300Xx4"]["devices"] == 4
    assert list(found["corrections"]) == ["mi300x"]
    assert found["models"] == {"qwen3-8b": everything["models"]["qwen3-8b"]}
    table = printed(capsys, "--list", "--model", "llama-3.1-8b")
    assert "meta-llama/Llama-3.1-8B" in table and "H100" not in table and "qwen" not in table
    table = printed(capsys, "--list", "--machine", "L4")
    assert "│ L4 " in table and "nanovllm: figures/gpu.md" in table and "L40S" not in table
    for flag in ("--machine", "--model"):
        assert main(["simulate", "--list", flag, "nothing"]) == 2
        assert re.search(r"'nothing' is unknown: choose .* --list ", capsys.readouterr().err)


def test_a_summary_names_its_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sources = simulate(FEW)["sources"]
    assert sources == {
        "machines": {"H100": H100},
        "corrections": {"nanovllm": MEASURED},
        "model": "huggingface.co/meta-llama/Llama-3.1-8B",
    }
    line = f"step times: computed from NVIDIA H100 SXM data sheet, corrected by {MEASURED}"
    assert printed(capsys, *flags()).splitlines()[1] == line
    roles = simulate({**FEW, "prefill": 1, "decode": 1, "decode_config": '{"machine": "H800"}'})
    assert isinstance(roles["sources"], dict)
    assert list(roles["sources"]["machines"]) == ["H100", "H800"]
    assert list(roles["sources"]["corrections"]) == ["nanovllm", "deepseek"]
    path = tmp_path / "config.json"
    model = file_of("models.toml")["llama-3.2-1b"]
    path.write_text(json.dumps({**model, "source": "mine"}))
    other = simulate({**FEW, "model": str(path), "machine": "h800X4"})["sources"]
    assert isinstance(other, dict) and other["model"] == str(path)
    assert list(other["machines"]) == ["H800x4"] and list(other["corrections"]) == ["deepseek"]


COUNTED = {"measured": "steps of by hand on none", "error": 0.0123, "low": 0.96, "high": 1.051}


def test_a_summary_names_its_calibration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "this.json"
    cost = msgspec.structs.replace(COST, num_kv_blocks=100, error=0.0123, low=0.96, high=1.051)
    write_cost(cost, path)
    assert simulate({**FEW, "machine": str(path)})["sources"] == {
        "calibrations": {str(path): COUNTED}
    }
    assert (
        f"\nstep times: {path}, steps of by hand on none; half are within 1.2% of the prediction, "
        "and 16 in a row take 0.96 to 1.05 of it\n"
    ) in printed(capsys, *flags(), "--machine", str(path))


def test_each_role_has_its_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = {}
    for name in ("one", "two"):
        cost = msgspec.structs.replace(
            COST, model="llama-3.1-8b", machine=name, num_kv_blocks=100, max_model_len=2048
        )
        write_cost(cost, tmp_path / name)
        measured[name] = json.dumps({"machine": str(tmp_path / name)})
    apart = {**FEW, "prefill": 1, "decode": 1, "kv_transfer_bandwidth": 1.0}
    roles: dict[str, object] = {"prefill_config": measured["two"], "decode_config": measured["one"]}
    both = simulate({**apart, **roles})["sources"]
    assert isinstance(both, dict) and list(both) == ["calibrations"]
    assert list(both["calibrations"]) == [str(tmp_path / name) for name in ("two", "one")]
    mixed = simulate({**apart, "decode_config": measured["one"]})
    assert isinstance(mixed["sources"], dict)
    assert mixed["sources"]["machines"] == {"H100": H100}
    (calibration,) = mixed["sources"]["calibrations"].items()
    assert calibration[0] == str(tmp_path / "one")
    assert calibration[1]["measured"] == "steps of llama-3.1-8b on one"
    print_summary(mixed)
    line = " ".join(capsys.readouterr().out.split())
    assert f"corrected by {MEASURED}; {tmp_path / 'one'}, steps of llama-3.1-8b on one;" in line


def flags() -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in FEW.items()]


def test_messages_of_unknown_names_lead_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--machine", "--model"):
        assert main(["simulate", flag, "nothing"]) == 2
        assert re.search(r"is unknown: choose .* --list ", capsys.readouterr().err)
