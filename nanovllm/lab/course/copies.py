"""Working copies of the lectures, for learners: running a lecture changes its file, and git does
not follow the copies."""

import json
from pathlib import Path

from nanovllm.lab.course.notebook import GPU_TAG, source_of

# Beside notebooks/, so that links and imports relative to a lecture lead to the same places.
FOLDER = "my_notebooks"
# Each file as it was when it was copied.
_ORIGINALS = ".originals"


def copy_lectures(root: Path) -> list[str]:
    """Bring the working copies up to date: copy what is missing, and replace what the learner has
    neither run nor changed. Copies have no outputs, so that these do not answer a prediction before
    the learner does; only cells that need a GPU keep the result of the last run on one.

    Returns:
        The copies that the learner has run or changed and whose lecture has changed since they were
        made. They stay as they are.
    """
    folder = root / FOLDER
    originals = root / FOLDER / _ORIGINALS
    originals.mkdir(parents=True, exist_ok=True)
    older = []
    for lecture in sorted((root / "notebooks").iterdir()):
        if lecture.suffix not in (".ipynb", ".md", ".py") or lecture.name == "conftest.py":
            continue
        copy = folder / lecture.name
        original = originals / lecture.name
        if not copy.exists() or (original.exists() and _work(copy) == _work(original)):
            fresh = _without_outputs(lecture)
            copy.write_bytes(fresh)
            original.write_bytes(fresh)
        elif not original.exists() or _text(original) != _text(lecture):
            older.append(copy.name)
    return older


def edited_copies(root: Path) -> list[str]:
    """Return the names of the working copies in which the learner has changed a cell that a module
    is built from."""
    folder = root / FOLDER
    found = []
    for original in sorted((folder / _ORIGINALS).glob("*.ipynb")):
        copy = folder / original.name
        if copy.exists() and _exported(copy) != _exported(original):
            found.append(copy.name)
    return found


def _without_outputs(path: Path) -> bytes:
    """Return the content of a copy."""
    content = path.read_bytes()
    if path.suffix != ".ipynb":
        return content
    notebook = json.loads(content)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and GPU_TAG not in cell["metadata"].get("tags", []):
            cell["outputs"] = []
            cell["execution_count"] = None
            cell["metadata"].get("jupyter", {}).pop("outputs_hidden", None)
    text = json.dumps(notebook, ensure_ascii=False, indent=1)
    return f"{text}\n".encode()


def _exported(path: Path) -> list[str]:
    """Return the sources of the cells that modules are built from."""
    sources = [
        "".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]
    return [source for source in sources if source.startswith("#|")]


def _work(path: Path) -> object:
    """A notebook's cells and their outputs: what a learner changes. JupyterLab changes other parts
    when it opens a notebook."""
    if path.suffix != ".ipynb":
        return path.read_bytes()
    return [
        (source_of(cell), cell.get("outputs"), cell.get("execution_count"))
        for cell in json.loads(path.read_bytes())["cells"]
    ]


def _text(path: Path) -> object:
    """What an author writes: a notebook's cells without their outputs, which differ from run to
    run."""
    text = path.read_text(encoding="utf-8")
    return (
        [source_of(cell) for cell in json.loads(text)["cells"]] if path.suffix == ".ipynb" else text
    )
