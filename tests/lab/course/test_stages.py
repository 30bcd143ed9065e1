"""The engine as it stands after a lecture: it generates the tokens of `transformers`, serves, and
has the size that is stated."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from textwrap import indent

import pytest
from transformers import AutoTokenizer

from nanovllm.lab.course.__main__ import main
from tests.examples import by_night
from tests.house import ROOT, code_lines
from tests.oracle import reference_tokens
from tests.server_process import ServerProcess
from tests.test_house import imports
from tests.test_parts import COUNT, PROMPTS, SCRIPT, environment_of, run

STAGES = [18, 26, 32, 43, 51]
DIVISIONS = [f"{kind}_parallel_size=2," for kind in ("tensor", "pipeline", "data")]
README = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
# Operators, and what is between a client and the engine: of the rest a stage's size is wanted.
OPERATORS_AND_SERVER = [
    "ops/",
    "attention/triton",  # the kernels in Triton, and what launches them
    "server/",
    "router/",
    "cli/",
    "assembly/flags",  # the command line's parser; the settings only derive their flags from it
    "trace/",
    "text/chat_template",
    "text/long_texts",
    "text/portions",
]
OPERATORS_AND_SERVER += [
    f"engine/{name}"
    for name in (
        "async_engine",
        "client",
        "errors",
        "process",
        "report_reader",
        "request_stream",
        "watching",
    )
]
# Code lines of the rest, of 100 columns, at most. Some 800 of them read GGUF files.
STAGE_18 = 7_700


def lines_of(package: pathlib.Path) -> tuple[int, int]:
    """Code lines: of everything, and of everything but operators and server. A module that only the
    server imports, such as the one that starts and ends the engine's process, belongs to the
    server."""
    modules = {
        path.relative_to(package).with_suffix("").as_posix(): path for path in package.rglob("*.py")
    }
    users: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for module, _ in imports(path):
            users.get(module.replace(".", "/"), set()).add(name)
    apart = {name for name in modules if name.startswith(tuple(OPERATORS_AND_SERVER))}
    while found := {
        name for name in modules.keys() - apart if users[name] and users[name] <= apart
    }:
        apart |= found
    lines = {name: code_lines(path.read_text("utf-8")) for name, path in modules.items()}
    return sum(lines.values()), sum(count for name, count in lines.items() if name not in apart)


@pytest.mark.slow
# By day the first stage and the last.
@pytest.mark.parametrize("last", [18, 51, *by_night([26, 32, 43])])
def test_a_stage_generates_and_serves(
    last: int, tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    stage = tmp_path / "stage"
    assert main(["--root", str(ROOT), "stage", str(last), "--out", str(stage)]) == 0
    lines, rest = lines_of(stage / "nanovllm")
    print(f"stage {last}: {lines} code lines, {rest} without operators and server")
    row = re.search(rf"^\| {last} \| ([\d,]+) \| ([\d,]+) \|$", README, re.MULTILINE)
    assert row, "notebooks/README.md states its size, in hundreds"
    stated = [int(number.replace(",", "")) for number in row.groups()]
    assert stated == pytest.approx([lines, rest], rel=0.05), (
        "run this test with -s, and write down what it prints"
    )
    assert last != STAGES[0] or rest <= STAGE_18
    expected = [reference_tokens(str(tiny_model), prompt, COUNT) for prompt in PROMPTS]
    divisions = DIVISIONS if last == 26 else []  # as the lectures until then have taught
    for division in ("", *divisions):
        divided = SCRIPT.replace("LLM(model,", f"LLM(model, {division}")
        script = f'if __name__ == "__main__":\n{indent(divided, "    ")}'
        done = run(
            environment_of(stage),
            "-c",
            script,
            str(tiny_model),
            *map(json.dumps, (PROMPTS, COUNT, [])),
        )
        assert done.returncode == 0, (division, done.stderr)
        assert json.loads(done.stdout) == expected, division
    with ServerProcess(tiny_model, tmp_path, package=stage) as server:
        answer = server.complete(prompt=PROMPTS, max_tokens=COUNT, ignore_eos=True)
        assert server.stop() == 0 and "Traceback" not in server.text, server.text
    decode = AutoTokenizer.from_pretrained(tiny_model).decode
    assert [choice["text"] for choice in answer["choices"]] == [
        decode(t, skip_special_tokens=True) for t in expected
    ]


def test_a_stage_is_not_written_over_something(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").touch()
    assert main(["--root", str(ROOT), "stage", "18", "--out", str(tmp_path)]) == 1
    assert "is not empty: name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize("number", [12, 44, 91])
def test_there_is_no_engine_before_lecture_18(
    number: int, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(ROOT), "stage", str(number), "--out", str(tmp_path / "new")]) == 1
    assert (
        f"there is no stage {number}; lectures after which there is an engine: 18, 19, 20"
        in capsys.readouterr().err
    )
    assert main(["--root", str(ROOT), "diff", "18", "18"]) == 0


def test_what_lectures_changed_is_shown() -> None:
    command = [sys.executable, "-m", "nanovllm.lab.course", "diff", "18", "23"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changed = set(re.findall(r"^\+\+\+ \w+/23/(\S+)$", done.stdout, re.MULTILINE))
    assert {
        "nanovllm/distributed/process_groups.py",
        "nanovllm/features/pipeline/scheduling.py",
    } <= changed
    assert not any(name.startswith("nanovllm/core/") for name in changed), "nothing extends it"
    assert "nanovllm/core/block_pool.py" not in changed
