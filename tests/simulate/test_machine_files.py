"""Machines that a file describes: `--machine my.toml`."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import nanovllm
from nanovllm.cli.main import main
from nanovllm.data.errors import UsageError
from nanovllm.simulate.machines import (
    FIELDS,
    LIMITS,
    Efficiency,
    Machine,
    file_of,
    find_machine,
    known_machines,
    machine_of,
)
from nanovllm.simulate.measured import write_cost
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.sweep import run_all, with_files
from tests.examples import examples
from tests.simulate.test_measured import COST

README = Path(nanovllm.__file__).parent / "simulate" / "README.md"
FEW = {"num_prompts": 20, "request_rate": 20.0, "random_input_len": 64, "random_output_len": 8}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in FEW.items()]
WHOLE = """
source = "our lab"
memory_gib = 48
bandwidth = 900e9
flops = { bf16 = 200e12 }
inside = { name = "PCIe", latency = 1e-6, bandwidth = 32e9 }
between = { name = "Ethernet", latency = 30e-6, bandwidth = 1.25e9 }
host = { name = "PCIe", latency = 10e-6, bandwidth = 32e9 }
efficiency = "nanovllm"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def described(text: str, path: str = "my.toml") -> Machine:
    """Return the machine of a file with this text."""
    Path(path).write_text(text, encoding="utf-8")
    return machine_of(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```\n\n```text\n\$ nanovllm (.*?)\n(.*?)```", text, re.S)
    assert example is not None
    Path("my.toml").write_text(example[1])
    output = printed(capsys, *example[2].split()[1:], "--num-prompts=20")
    assert output.startswith(example[3])
    machine = machine_of("my.toml")
    assert (machine.price_per_hour, machine.memory_gib, machine.reach.products) == (2.1, 94, 0.65)
    assert machine.between.name == "RoCE 200 Gb/s"
    h100 = find_machine("H100")
    assert machine.reach.kernel == h100.reach.kernel and machine.inside == h100.inside


def test_the_example_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    lines = capsys.readouterr().out.rpartition("a file for --machine")[2].splitlines()[1:]
    assert described("\n".join(lines)).between.bandwidth == 25e9


def test_a_file_changes_some_numbers_of_its_base() -> None:
    machine = described('base = "h200x4"\nflops.fp8 = 1e15\n[host]\nlatency = 0\n')
    base = find_machine("H200x4")
    assert machine.flops == {**base.flops, "fp8": 1e15}
    assert machine.host.latency == 0 and machine.host.bandwidth == base.host.bandwidth
    assert machine.devices == 4 and machine.efficiency == base.efficiency
    assert machine.name == "my.toml"
    assert machine.source == f"my.toml, based on h200x4: {base.source}"
    assert machine.price_source == base.price_source


def test_a_new_price_has_another_source() -> None:
    assert described('base = "H100"\nprice_per_hour = 2').price_source == "my.toml"
    text = 'base = "H100"\nprice_per_hour = 0\nprice_source = "it is ours"'
    assert described(text).price_source == "it is ours"
    assert described('base = "H20"\nprice_per_hour = 1').price_per_hour == 1


def test_a_file_without_a_base() -> None:
    machine = described(WHOLE)
    assert machine.source == "my.toml: our lab"
    assert machine.reach == find_machine("H100").reach and machine.price_per_hour is None
    assert (machine.devices, machine.mesh, machine.on_gpu) == (8, False, True)
    summary = simulate({**FEW, "model": "llama-3.2-1b", "machine": "my.toml"})
    assert summary["completed"] == 20


def test_corrections_by_name_and_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    text = 'base = "H100"\nefficiency = "deepseek"\n'
    assert described(text).reach == find_machine("H800").reach
    machine = described(f"{text}reach.links = 0.5\n")
    deepseek = find_machine("H800").reach
    assert machine.reach == msgspec.structs.replace(
        deepseek, links=0.5, source=f"my.toml, based on deepseek: {deepseek.source}"
    )
    assert machine.efficiency == "my.toml"
    sources = simulate({**FEW, "machine": "my.toml"})["sources"]
    assert isinstance(sources, dict)
    assert sources["machines"] == {"my.toml": machine.source}
    assert sources["corrections"] == {"my.toml": machine.reach.source}
    line = printed(capsys, *FLAGS, "--machine=my.toml").splitlines()[1]
    assert line == (
        "step times: computed from my.toml, based on H100: NVIDIA H100 SXM data sheet, corrected "
        f"by {machine.reach.source}"
    )


def test_a_machine_costs_what_its_file_says() -> None:
    described('base = "H100"\nbandwidth = 1.675e12\nmemory_gib = 160\n')
    half = simulate({**FEW, "machine": "my.toml"})
    whole = simulate({**FEW, "machine": "H100"})
    assert isinstance(half["mean_tpot_ms"], float) and isinstance(whole["mean_tpot_ms"], float)
    assert 1.5 < half["mean_tpot_ms"] / whole["mean_tpot_ms"] < 2
    described('base = "H100"\n', "same.toml")
    same = simulate({**FEW, "machine": "same.toml"})
    for name in ("setup", "sources"):
        same.pop(name)
        whole.pop(name)
    assert same == whole


@pytest.mark.parametrize("name", known_machines())
def test_every_machine_is_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What `--list --json` prints of it describes the same machine."""
    found = json.loads(printed(capsys, "--list", "--machine", name, "--json"))["machines"][name]
    machine = described(json.dumps(found), "my.json")
    known = find_machine(name)
    plain = {"name": "", "source": "", "efficiency": ""}
    reach = msgspec.structs.replace(machine.reach, source=known.reach.source)
    assert msgspec.structs.replace(machine, **plain, reach=reach) == msgspec.structs.replace(
        known, **plain, price_source=machine.price_source
    )


def test_every_number_has_limits() -> None:
    """A new field needs them, or is a text or switch."""
    names = {"base", "file", *Machine.__struct_fields__} - {"flops", "inside", "between", "host"}
    tables = {f"reach.{name}" for name in Efficiency.__struct_fields__}
    tables |= {f"flops.{name}" for name in ("bf16", "fp8")}
    tables |= {
        f"{link}.{name}"
        for link in ("inside", "between", "host")
        for name in ("name", "latency", "bandwidth")
    }
    assert {*FIELDS} == (names - {"reach"}) | tables
    numbers = {name for name in {*FIELDS} - {*LIMITS} if "bandwidth" in name or "latency" in name}
    assert not numbers


def test_a_file_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    described('base = "H100"\nprice_per_hour = 2.25\nreach.products = 0.123\n')
    table = printed(capsys, "--list", "--machine", "my.tomlx4")
    assert re.search(r"my.tomlx4 .*│ +4 │ +2\.25 │ my\.tomlx4", table)
    assert "0.123" in table and "price: my.tomlx4" in table
    found = json.loads(printed(capsys, "--list", "--machine", "my.toml", "--json"))
    assert list(found["machines"]) == list(found["corrections"]) == ["my.toml"]
    assert found["machines"]["my.toml"]["price_per_hour"] == 2.25


def test_devices_per_node_after_a_path() -> None:
    text = 'base = "H100"\ndevices = 2\n'
    assert described(text).devices == 2
    assert machine_of("my.tomlx4").devices == machine_of("my.tomlX4").devices == 4
    described('base = "A100"\n', "my.tomlx4")
    assert machine_of("my.tomlx4").devices == 8, "a file of this name comes first"


def test_names_that_look_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    described('base = "H100"\n', "my [bold]machine.toml")
    setup = printed(capsys, *FLAGS, "--machine=my [bold]machine.toml").splitlines()[0]
    assert setup.startswith("llama-3.1-8b on my [bold]machine.toml, TP 1")
    sweep = [*FLAGS, "--sweep=machine=my [bold]machine.toml,A100", "--processes=1"]
    assert "my [bold]machine.toml" in " ".join(printed(capsys, *sweep).split())


def test_roles_have_files(capsys: pytest.CaptureFixture[str]) -> None:
    described('base = "H200"\nbetween.bandwidth = 1e9\n')
    apart = [*FLAGS, "--prefill=1", "--decode=1", "--decode-config.machine=my.toml"]
    lines = printed(capsys, *apart).splitlines()
    assert "engines for decode: 1 on my.toml, TP 1, PP 1" in lines[0]
    assert "NVIDIA H100 SXM data sheet and my.toml, based on H200: NVIDIA H200 SXM" in lines[1]
    found = json.loads(printed(capsys, *apart, "--json"))
    assert found["mean_transfer_ms"] > 8, "8 MB over 0.8 GB/s"
    Path("my.toml").write_text('base = "H200"\nbetween.bandwidth = 1\n')
    assert main(["simulate", *apart]) == 2
    assert "--decode-config: --machine my.toml: between.bandwidth" in capsys.readouterr().err


def test_a_sweep_over_files(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is wrong is no obstacle for the others."""
    os.mkdir("folder")
    described('base = "H100"\nprice_per_hour = 1\n', "folder/my.toml")
    described('base = "H100"\nprice_per_hour = 10\n', "a,b.toml")
    Path("wrong.toml").write_text("price_per_hour = 10\n")
    sweep = '--sweep=machine=A100,folder/my.toml,"a,b.toml",wrong.toml,none.toml'
    rows = json.loads(printed(capsys, *FLAGS, sweep, "--json", "--processes=2"))
    names = ["A100", "folder/my.toml", "a,b.toml", "wrong.toml", "none.toml"]
    assert [row["settings"]["machine"] for row in rows] == names
    prices = [row["dollars_per_million_tokens"] for row in rows[1:3]]
    assert prices[1] == pytest.approx(10 * prices[0])
    assert rows[3]["error"].startswith("--machine wrong.toml: it needs source, memory_gib, ")
    assert rows[4]["error"].startswith("--machine 'none.toml' is unknown: choose A100")
    table = printed(capsys, *FLAGS, sweep, "--processes=1")
    assert "wrong.toml: --machine wrong.toml: it needs" in table and "folder/my.toml" in table


def summary_without_files(settings: Mapping[str, object]) -> dict[str, object]:
    """Simulate on a node that has none of the files."""
    for path in Path().glob("*.toml"):
        path.unlink()
    return simulate(settings)


def test_files_are_read_where_the_sweep_begins() -> None:
    described('base = "A100"\n')
    described('base = "H200"\n', "role.toml")
    write_cost(
        msgspec.structs.replace(COST, num_kv_blocks=100, model="llama-3.1-8b"), Path("cost.toml")
    )
    roles = {"prefill": 1, "decode": 1, "decode_config": '{"machine": "role.toml"}'}
    points = [
        {**FEW, "machine": "my.toml"},
        {**FEW, "machine": "my.tomlx4", **roles},
        {**FEW, "machine": "cost.toml"},
    ]
    expected = [simulate(point) for point in points]
    assert run_all(summary_without_files, points, num_processes=1) == expected
    assert not list(Path().glob("*.toml"))
    described('base = "A100"\n')
    kept = with_files(points[0])
    Path("my.toml").write_text("base = 5\n")
    assert simulate(kept) == expected[0], "the file has changed"


def test_ray_gets_the_content_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    described('base = "A100"\n')
    sent: list[str] = []

    def send(job: object) -> object:
        sent.append(json.dumps(job, default=str))
        return job

    ray = SimpleNamespace(
        is_initialized=lambda: True,
        remote=lambda run: SimpleNamespace(remote=lambda job: (send(job), run(job))[1]),
        get=list,
    )
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    (summary,) = run_all(simulate, [{**FEW, "machine": "my.toml"}])
    assert summary["completed"] == 20
    assert '"base": "A100"' in sent[0] and "Mapping" not in sent[0]


MISTAKES = {
    "bandwidth = 3350": r"bandwidth must be from 1e\+09 .*3.35e12 for 3,350 GB/s\), got 3350",
    "bandwidth = 3.35": "bandwidth must be .*, got 3.35",
    "bandwidth = nan": "bandwidth must be .*, got nan",
    "bandwidth = inf": "bandwidth must be .*, got inf",
    "bandwidth = -3.35e12": "bandwidth must be .*, got -3",
    "bandwidth = '3.35 TB/s'": "bandwidth must be .*, got '3.35 TB/s'",
    "bandwidth = {}": "it needs bandwidth: set them",
    "bandwidth.x = 1": "no field 'bandwidth.x'; did you mean bandwidth",
    "memory_gib = 81920": r"memory_gib must be .*GiB, such as 80\), got 81920",
    "memory_gib = 80e9": "memory_gib must be",
    "memory_gib = 0": "memory_gib must be",
    "flops.bf16 = 989.4": r"flops.bf16 must be .*989e12 for 989 TFLOP/s\), got 989.4",
    "flops.fp4 = 989e12": "no field 'flops.fp4'; did you mean flops.fp8",
    "flops = 989e12": "no field 'flops'; did you mean flops.bf16",
    "inside.bandwidth = 450": "inside.bandwidth must be .*bytes per second, .*, got 450",
    "inside = 450e9": "no field 'inside'; did you mean inside.bandwidth",
    "between.latency = 2.7": "between.latency must be .*2.7e-6 for 2.7 µs.*, got 2.7",
    "host.bandwith = 1e9": "no field 'host.bandwith'; did you mean host.bandwidth",
    "reach.products = 60": r"reach.products must be .*0.8 for 80 %\), got 60",
    "reach.kernel = 3.4": "reach.kernel must be .*seconds",
    "reach.kernal = 3e-6": "no field 'reach.kernal'; did you mean reach.kernel",
    "reach = 0.6": "no field 'reach'; did you mean",
    "efficiency.products = 0.6": "no field 'efficiency.products'; did you mean reach.products",
    "efficiency = 'deepsek'": "efficiency must be one of nanovllm, deepseek, .*, got 'deepsek'",
    "efficiency = ['a']": r"efficiency must be one of .*, got \['a'\]",
    "price_per_hour = -1": "price_per_hour must be .*US dollars per device and hour.*, got -1",
    "price = 2": "no field 'price'; did you mean price_per_hour",
    "devices = 0": "devices must be",
    "devices = 2.5": "Expected `int`, got `float` - at `\\$.devices`",
    "mesh = 1": "Expected `bool`, got `int` - at `\\$.mesh`",
    "price_source = 5": "Expected `str`, got `int` - at `\\$.price_source`",
    "vram = 80": "no field 'vram'",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_a_line_with_the_file_and_the_field(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.toml").write_text(f'base = "H100"\n{line}\n')
    assert main(["simulate", *FLAGS, "--machine=my.toml"]) == 2
    output = capsys.readouterr()
    pattern = f"nanovllm simulate: error: --machine my.toml: .*{MISTAKES[line]}.*\n"
    assert re.fullmatch(pattern, output.err) and not output.out, output.err


OTHER_MISTAKES = {
    "": 'it needs source, memory_gib, .*, such as base = "H100"$',
    "memory_gib = 80": "it needs source, bandwidth, ",
    'base = "H10"': "base 'H10' is unknown: choose A100",
    "base = 5": "base '5' is unknown",
    '[machine.mine]\nbase = "H100"': "without \\[machine.NAME\\]",
    "hello": "is neither TOML, which describes a machine, nor JSON of --calibrate: ",
    'base = "H100"\nbase = "A100"': "is neither TOML",
    '{"base": "H100"': "is neither TOML",
    '["H100"]': "it needs|neither",
    '{"model": "x"}': "no file of --calibrate",
}


@pytest.mark.parametrize("text", OTHER_MISTAKES)
def test_a_file_that_describes_nothing(text: str) -> None:
    Path("my.toml").write_text(text)
    with pytest.raises(UsageError, match=f"^--machine my.toml.*{OTHER_MISTAKES[text]}") as caught:
        simulate({**FEW, "machine": "my.toml"})
    assert "\n" not in str(caught.value)


def test_other_files_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0\xff\xfe{}")
    with pytest.raises(UsageError, match="is neither TOML, which describes a machine, nor JSON"):
        machine_of("model.safetensors")
    Path("mine.toml").write_text('\ufeffbase = "H100"\r\nprice_per_hour = 2\r\n', encoding="utf-8")
    assert machine_of("mine.toml").price_per_hour == 2, "as Windows writes it"
    write_cost(COST, Path("this.json"))
    with pytest.raises(UsageError, match=r"this\.json: a file of --calibrate describes no machine"):
        machine_of("this.json")
    assert main(["simulate", "--list", "--machine", "this.json"]) == 2
    assert "this.json: a file of --calibrate describes no machine" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"this\.jsonx4: no file of --calibrate: .*`devices`"):
        simulate({**FEW, "machine": "this.jsonx4"})
    os.mkdir("H100")
    assert file_of("H100") is None and machine_of("H100") == find_machine("H100")


def test_a_machine_of_fields() -> None:
    """From Python, and in JSON, no file is needed."""
    machine = {"base": "H100", "price_per_hour": 1.0}
    summary = simulate({**FEW, "machine": machine})
    assert str(summary["setup"]).startswith("llama-3.1-8b on machine, TP 1")
    role = json.dumps({"machine": machine})
    apart = simulate({**FEW, "prefill": 1, "decode": 1, "prefill_config": role})
    assert "engines for prefill: 1 on machine, TP 1" in str(apart["setup"])
    with pytest.raises(UsageError, match="machine must be a string or a dictionary, got 5"):
        simulate({**FEW, "machine": 5})


def damaged(text: str, numbers: random.Random) -> str:
    """Return a text in which something was lost, doubled, or exchanged."""
    for _ in range(numbers.randrange(1, 4)):
        place = numbers.randrange(len(text) + 1)
        end = place + numbers.choice([0, 1, 1, 3, 20])
        new = ["", text[place:end] * 2, numbers.choice('"[]{}=.,#\n\\\0 é-+e0919nx'), "\n", "nan"]
        text = text[:place] + numbers.choice(new) + text[end:]
        lines = text.splitlines(keepends=True)
        if numbers.random() < 0.2:
            numbers.shuffle(lines)
        text = "".join(lines)
    return text


@pytest.mark.parametrize("kind", ["toml", "changes", "json", "calibration"])
def test_a_damaged_file_is_a_line_or_a_machine(kind: str) -> None:
    whole = {
        "toml": WHOLE,
        "changes": 'base = "H100"\nprice_per_hour = 2\n[between]\nbandwidth = 25e9\n'
        "[reach]\nproducts = 0.65\n",
        "json": json.dumps(msgspec.to_builtins(find_machine("H100"))),
        "calibration": msgspec.json.encode(
            msgspec.structs.replace(COST, num_kv_blocks=100, max_model_len=1024)
        ).decode(),
    }[kind]
    numbers = random.Random(kind)
    num_machines = 0
    num_mistakes = 0
    path = Path("my.toml")
    for _ in range(examples(3000, by_day=400)):
        path.write_bytes(damaged(whole, numbers).encode())
        try:
            simulate({**FEW, "num_prompts": 1, "machine": "my.toml"})
            num_machines += 1
        except UsageError as error:
            num_mistakes += 1
            assert str(error).startswith("--machine my.toml") or "KV cache" in str(error), error
            assert "\n" not in str(error)
    assert num_machines and num_mistakes
