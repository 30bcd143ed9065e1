"""Working copies of the lectures: what a learner does there stays, and git does not see it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.copies import FOLDER, copy_lectures
from nanovllm.lab.course.execute import run

ROOT = Path(__file__).parents[3]


def write_lecture(path: Path, source: str, **outputs: str) -> None:
    cells = [
        v4.new_code_cell(
            source,
            id="only",
            outputs=[v4.new_output("stream", text=text) for text in outputs.values()],
        )
    ]
    nbformat.write(v4.new_notebook(cells=cells), path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of two lectures, and a helper that the first one imports."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks/figures.py").write_text("COLOUR = 'blue'\n")
    write_lecture(
        tmp_path / "notebooks/10_first.ipynb", "from figures import COLOUR\nprint(COLOUR)"
    )
    write_lecture(tmp_path / "notebooks/11_second.ipynb", "print(2)")
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(root), *arguments], text=True)


def test_a_copy_that_was_run_leaves_git_status_clean(root: Path) -> None:
    shutil.copy(ROOT / ".gitignore", root)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    before = git(root, "status", "--porcelain")
    copy_lectures(root)
    copy = root / FOLDER / "10_first.ipynb"
    assert run(copy, root, timeout=300)
    assert "blue" in copy.read_text()
    assert git(root, "status", "--porcelain") == before


def test_a_copy_that_was_only_opened_is_updated(root: Path) -> None:
    copy_lectures(root)
    copy = root / FOLDER / "10_first.ipynb"
    opened = json.loads(copy.read_text())
    # JupyterLab writes this when it saves a notebook that nobody has changed.
    opened["metadata"]["language_info"] = {"name": "python", "version": "3.11.7"}
    copy.write_text(json.dumps(opened))
    write_lecture(root / "notebooks/10_first.ipynb", "new")
    assert copy_lectures(root) == []
    assert "new" in copy.read_text()


def test_a_learners_work_is_never_overwritten(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_lectures(root)
    write_lecture(root / FOLDER / "10_first.ipynb", "mine")
    mine = (root / FOLDER / "10_first.ipynb").read_bytes()
    assert copy_lectures(root) == []
    for name in ("10_first", "11_second"):
        write_lecture(root / f"notebooks/{name}.ipynb", "new")
    for _ in range(2):
        assert main(["--root", str(root), "copy"]) == 0
        told = capsys.readouterr().out
        assert "10_first.ipynb" in told and "11_second" not in told and "rename or delete" in told
        assert (root / FOLDER / "10_first.ipynb").read_bytes() == mine
        assert "new" in (root / FOLDER / "11_second.ipynb").read_text()
    (root / FOLDER / "10_first.ipynb").rename(root / FOLDER / "10_mine.ipynb")
    assert copy_lectures(root) == []
    assert "new" in (root / FOLDER / "10_first.ipynb").read_text()
    assert (root / FOLDER / "10_mine.ipynb").read_bytes() == mine


def test_a_lecture_that_was_only_run_again_has_not_changed(root: Path) -> None:
    copy_lectures(root)
    write_lecture(root / FOLDER / "11_second.ipynb", "mine")
    write_lecture(root / "notebooks/11_second.ipynb", "print(2)", first="2.5 s")
    assert copy_lectures(root) == []


def test_a_file_that_was_there_before_the_first_copy_stays(root: Path) -> None:
    (root / FOLDER).mkdir()
    write_lecture(root / FOLDER / "11_second.ipynb", "mine")
    assert copy_lectures(root) == ["11_second.ipynb"]
    assert "mine" in (root / FOLDER / "11_second.ipynb").read_text()


def test_a_copy_shows_no_answer_before_it_is_run(root: Path) -> None:
    lecture = root / "notebooks/10_first.ipynb"
    cells = [v4.new_code_cell("1 + 1", outputs=[v4.new_output("stream", text="2")])]
    cells[0].metadata.jupyter = {"outputs_hidden": True, "source_hidden": True}
    cells.append(
        v4.new_code_cell(
            "measure()",
            outputs=[v4.new_output("stream", text="H200: 7 ms")],
            metadata={"tags": ["gpu"], "jupyter": {"outputs_hidden": True}},
            execution_count=2,
        )
    )
    nbformat.write(v4.new_notebook(cells=cells), lecture)
    copy_lectures(root)
    first, gpu = json.loads((root / FOLDER / lecture.name).read_text())["cells"]
    assert (first["outputs"], first["execution_count"]) == ([], None)
    assert first["metadata"]["jupyter"] == {"source_hidden": True}  # a side matter stays folded
    # Few learners have a GPU, so the recorded result stays, and a click shows it.
    assert gpu == json.loads(lecture.read_text())["cells"][1]
    nbformat.validate(nbformat.read(root / FOLDER / lecture.name, as_version=4))


@pytest.mark.parametrize("command", ["build", "run"])
def test_commands_refuse_a_copy_for_a_lecture(
    root: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_lectures(root)
    before = (root / "notebooks/10_first.ipynb").read_bytes()
    assert main(["--root", str(root), command, str(root / FOLDER / "10_first.ipynb")]) == 1
    assert "notebooks/" in capsys.readouterr().err
    assert (root / "notebooks/10_first.ipynb").read_bytes() == before


def test_links_and_imports_of_the_real_lectures_work_in_copies(tmp_path: Path) -> None:
    for name in ("notebooks", "figures", "nanovllm"):
        (tmp_path / name).symlink_to(ROOT / name)
    copy_lectures(tmp_path)
    folder = tmp_path / FOLDER
    for path in folder.glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\(([^)#\s]+\.\w+)\)", text):
            assert link.startswith("http") or (folder / link).exists(), f"{path.name}: {link}"
    modules = [path.stem for path in (ROOT / "notebooks").glob("figures_*.py")]
    assert modules
    for name in modules:
        code = (
            f"import {name}, pathlib; assert pathlib.Path({name}.__file__).parent == "
            "pathlib.Path.cwd()"
        )
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
