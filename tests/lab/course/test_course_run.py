"""Running lectures."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.execute import normalise

PLOT = """\
import matplotlib.pyplot as plt
from nanovllm.lab.viz import use_style

use_style()
plt.plot([1, 2], [3, 4])
plt.show()"""
STREAMS = (
    "import sys\nprint('a', flush=True)\nprint('b', flush=True)\nprint(object())\nprint('e', "
    "file=sys.stderr)"
)
PATHS = "import tempfile\nprint(tempfile.mkdtemp())\n{chr(i) for i in range(97, 105)}"
TIMED = "# NBVAL_IGNORE_OUTPUT\nimport time\nprint(time.time_ns())"


def save(root: Path, *sources: str, **metadata: Any) -> Path:
    (root / "notebooks").mkdir(exist_ok=True)
    (root / "pyproject.toml").touch()
    cells = [v4.new_markdown_cell("# Title"), *map(v4.new_code_cell, sources)]
    for number, cell in enumerate(cells):
        cell.id = f"id-{number}"
    path = root / "notebooks/10_first.ipynb"
    nbformat.write(v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


def cells_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cells"]


def test_a_second_run_changes_only_measured_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, "x = 1", STREAMS, PATHS, PLOT, TIMED, gpu=True)
    assert main(["--root", str(tmp_path), "run", "10"]) == 0
    first = path.read_text()
    assert main(["--root", str(tmp_path), "run"]) == 0
    assert capsys.readouterr().out == "notebooks/10_first.ipynb: saved\n" * 2
    cells = cells_of(path)
    measured = cells[5]["outputs"][0]["text"]
    assert path.read_text().replace(json.dumps(measured[0]), "") == first.replace(
        json.dumps(json.loads(first)["cells"][5]["outputs"][0]["text"][0]), ""
    )
    assert [cell["id"] for cell in cells] == [f"id-{number}" for number in range(6)]
    assert [cell["execution_count"] for cell in cells[1:]] == [1, 2, 3, 4, 5]
    assert all(cell["metadata"] == {} for cell in cells)
    streams = cells[2]["outputs"]
    assert ["".join(output["text"]) for output in streams if output["name"] == "stdout"] == [
        "a\nb\n<object object at 0x...>\n"
    ]
    assert cells[3]["outputs"][0]["text"] == ["<temporary file>\n"]
    (image,) = (output["data"]["image/png"] for output in cells[4]["outputs"])
    assert b"Software" not in base64.b64decode(image)
    assert json.loads(first)["metadata"]["gpu"] is True


def test_a_failing_cell_is_located_and_nothing_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(
        tmp_path, "def half(x):\n    if x % 2:\n        raise ValueError('odd')", "x = 3\n\nhalf(x)"
    )
    before = path.read_bytes()
    assert main(["--root", str(tmp_path), "run"]) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        "notebooks/10_first.ipynb: cell 3 (In [2]), line 3: ValueError: odd\n"
    )
    assert "\x1b" not in message
    assert path.read_bytes() == before


def test_a_cell_that_takes_too_long_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "import time\ntime.sleep(30)")
    assert main(["--root", str(tmp_path), "run", "--timeout", "1"]) == 1
    assert "cell 2 (In [1]): took longer than 1 s" in capsys.readouterr().err


def test_measured_values_come_into_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, "x = 2", "x = {'a': 1234.5}", "x['b']")
    notebook = nbformat.read(path, as_version=4)
    text = "It took <!--= x['a'] / 1000 | .2f -->?<!--/--> s, or <!--= x --><!--/-->."
    notebook.cells.insert(3, v4.new_markdown_cell(text, id="text"))
    nbformat.write(notebook, path)
    # The place of a failure is that of the saved notebook.
    assert main(["--root", str(tmp_path), "run", "10"]) == 1
    assert "cell 5 (In [3]), line 1: KeyError: 'b'" in capsys.readouterr().err
    notebook.cells[4].source = "x['a'] = 0"
    nbformat.write(notebook, path)
    for _ in range(2):
        assert main(["--root", str(tmp_path), "run", "10"]) == 0
        cells = cells_of(path)
        assert "".join(cells[3]["source"]) == (
            "It took <!--= x['a'] / 1000 | .2f -->1.23<!--/--> s, "
            "or <!--= x -->{'a': 1234.5}<!--/-->."
        )
        assert [cell["id"] for cell in cells] == ["id-0", "id-1", "id-2", "text", "id-3"]
    notebook.cells[3].source = "<!--= y -->1<!--/-->"
    nbformat.write(notebook, path)
    capsys.readouterr()
    assert main(["--root", str(tmp_path), "run", "10"]) == 1
    assert "cell 4 (values in its text), line 1: NameError" in capsys.readouterr().err


def test_outputs_that_answer_a_prediction_are_hidden(tmp_path: Path) -> None:
    sources = [
        "print(1)",
        "first = course.predict('How long?')",
        "second = course.predict('How many?')",
        "measure()",
        "first.reveal(1)",
        "second.reveal(2)",
        "draw()",
    ]
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# Title")])
    notebook.cells += [v4.new_code_cell(source) for source in sources]
    notebook.cells += [v4.new_markdown_cell("It took 2 s."), v4.new_code_cell("print(2)")]
    notebook.cells[-1].metadata.jupyter = {"source_hidden": True}
    # From an earlier question, as JupyterLab saves it.
    notebook.cells[1].metadata.update(jupyter={"outputs_hidden": True}, collapsed=True)
    for _ in range(2):
        normalise(notebook, tmp_path)
        hidden = [cell.source for cell in notebook.cells if "jupyter" in cell.metadata]
        assert hidden == [*sources[3:], "print(2)"]
    assert notebook.cells[-1].metadata.jupyter == {"source_hidden": True}
    assert notebook.cells[4].metadata.jupyter == {"outputs_hidden": True}
    assert "collapsed" not in notebook.cells[1].metadata


def test_normalise_removes_timing_widgets_and_machine_paths(tmp_path: Path) -> None:
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    error = v4.new_output(
        "error", ename="E", evalue="at 0x7f0123456789", traceback=[f"{tmp_path}/nanovllm/a.py"]
    )
    cell = v4.new_code_cell(
        "x", outputs=[v4.new_output("display_data", dict(view)), error], execution_count=9
    )
    cell.outputs.append(
        v4.new_output("execute_result", {**view, "text/plain": "HTML()"}, execution_count=9)
    )
    cell.metadata.update(execution={"iopub.status.idle": "2024"}, tags=["keep"])
    notebook = v4.new_notebook(cells=[cell], metadata={"widgets": {}, "jupytext": {}, "gpu": True})
    normalise(notebook, tmp_path)
    assert cell.metadata == {"tags": ["keep"]}
    assert [output.output_type for output in cell.outputs] == ["error", "execute_result"]
    assert cell.outputs[0].evalue == "at 0x..." and cell.outputs[0].traceback == ["nanovllm/a.py"]
    assert cell.outputs[1].data == {"text/plain": "HTML()"} and cell.outputs[1].execution_count == 1
    assert set(notebook.metadata) == {"gpu", "kernelspec", "language_info"}
    once = nbformat.writes(notebook)
    assert nbformat.writes(normalise(notebook, tmp_path)) == once


def test_log_lines_of_engines_are_not_saved(tmp_path: Path) -> None:
    """Several processes write them, in any order."""
    logged = "INFO nanovllm.engine: Engine 001: model\nINFO nanovllm.engine: Engine 000: model\n"
    texts = [logged, f"{logged}WARNING nanovllm: slow\n"]
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# Title")])
    for text in texts:
        cell = v4.new_code_cell("serve()")
        cell.outputs = [v4.new_output("stream", name="stderr", text=text)]
        notebook.cells.append(cell)
    normalise(notebook, tmp_path)
    _, quiet, slow = notebook.cells
    assert quiet.outputs == []
    assert [output.text for output in slow.outputs] == ["WARNING nanovllm: slow\n"]


def test_the_engine_does_not_import_the_course() -> None:
    package = Path(__file__).parents[3] / "nanovllm"
    modules = [path for path in package.rglob("*.py") if path.parent.name != "course"]
    assert modules
    for path in modules:
        assert (
            "nanovllm.lab.course import" not in path.read_text()
            and "import nanovllm.lab.course" not in path.read_text()
        ), path


@pytest.mark.started
def test_building_does_not_load_the_notebook_machinery() -> None:
    code = (
        "import sys, nanovllm.lab.course.__main__; print({'nbclient', 'nbformat', 'jupytext'} & "
        "set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
