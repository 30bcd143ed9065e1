"""Run lectures and save them so that a second run changes nothing."""

import configparser
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from nanovllm.lab.course import prose, unchanged
from nanovllm.lab.course.notebook import GPU_TAG, CourseError

_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_READING_TIME = re.compile(r"(?<=Reading time: )about .*?(?=\.(\s|$))")
_QUESTION = re.compile(r"^(\w+) = course\.predict\(", re.MULTILINE)
_ANSWER = re.compile(r"\b(\w+)\.reveal\(")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOGGED = re.compile(r"^INFO nanovllm.*\n?", re.MULTILINE)


def run(path: Path, root: Path, timeout: int) -> bool:
    """Run a lecture from top to bottom and save it normalised. A cell with the tag "gpu" in its
    metadata is run only where torch sees a GPU; elsewhere it keeps its outputs.

    Args:
        path: the notebook; its code runs in its folder.
        root: the folder that its name in messages is relative to.
        timeout: the longest a cell may take, in seconds.

    Returns:
        Whether the file changed.

    Raises:
        CourseError: a cell failed or took too long; the file is as it was then.
    """
    before = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(before, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Equal hashes, dates and SVG ids in every run.
        (Path(folder) / "matplotlibrc").write_text("svg.hashsalt: nanovllm\n")
        fixed = {"PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "0", "MATPLOTLIBRC": folder}
        _execute(notebook, path, root, timeout, {**os.environ, **fixed})
    after = nbformat.writes(normalise(notebook, root)).rstrip("\n") + "\n"
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def _execute(
    notebook: NotebookNode, path: Path, root: Path, timeout: int, environment: dict[str, str]
) -> None:
    tags = {tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])}
    begun: list[int] = []
    prose.ask(notebook)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        skip_cells_with_tag=GPU_TAG if GPU_TAG in tags and not _sees_gpu() else "",
        on_cell_start=lambda cell, cell_index: begun.append(cell_index),
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        ran = notebook.cells[: begun[-1] + 1]
        own = [cell for cell in ran if not prose.is_inserted(cell)]
        runs = sum(cell.cell_type == "code" for cell in own)
        place = f"{path.relative_to(root).as_posix()}: cell {len(own)} (In [{runs}])"
        if prose.is_inserted(ran[-1]):
            place = f"{path.relative_to(root).as_posix()}: cell {len(own) + 1} (values in its text)"
        if isinstance(error, CellExecutionError):
            raise CourseError(_failure(place, error)) from None
        what = (
            f"took longer than {timeout} s"
            if isinstance(error, CellTimeoutError)
            else "the kernel died"
        )
        raise CourseError(f"{place}: {what}") from None
    prose.answer(notebook)


def _sees_gpu() -> bool:
    import torch  # slow, and most lectures need not ask

    return torch.cuda.is_available()


def _failure(place: str, error: CellExecutionError) -> str:
    """Where a cell failed, and the traceback's last lines."""
    trace = _COLOURS.sub("", error.traceback)
    frames = list(re.finditer(r"Cell In\[(\d+)\], line (\d+)", trace))
    # The frame of the failing cell comes first, before frames of functions from earlier cells.
    line = f", line {frames[0][2]}" if frames else ""
    return f"{place}{line}: {error.ename}: {error.evalue}\n{trace.strip()}"


def normalise(notebook: NotebookNode, root: Path) -> NotebookNode:
    """Remove from a notebook everything that differs from run to run, in place, and return it.

    The reading time is stated anew. Counts become 1..n, timing and widget state go, addresses and
    paths are masked, and consecutive outputs of one stream become one. Ids stay. JupyterLab shows
    the outputs that answer a prediction after a click. (`viz.use_style` keeps versions and dates
    out of images.)"""
    rules = _rules(root)
    notebook.nbformat = 4
    notebook.nbformat_minor = 5
    for key in ("widgets", "jupytext", "signature"):
        notebook.metadata.pop(key, None)
    notebook.metadata["kernelspec"] = NotebookNode(_KERNEL)
    notebook.metadata["language_info"] = NotebookNode(name="python")
    first = notebook.cells[0]
    first.source = _READING_TIME.sub(
        reading_time([(c.cell_type, c.source) for c in notebook.cells[1:]]), first.source
    )
    count = 0
    for cell in notebook.cells:
        for key in ("execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _merged(output for output in cell.outputs if _keep(output))
        for output in cell.outputs:
            _normalise_output(output, count, rules)
    _hide_answers(notebook)
    unchanged.mark(notebook.cells)
    return notebook


def _hide_answers(notebook: NotebookNode) -> None:
    """Hide the outputs between a prediction and the cell that compares it with what was measured,
    and those of the cells right below, which often draw the same values."""
    open_questions: set[str] = set()
    is_hidden = False
    for cell in notebook.cells:
        if cell.cell_type != "code":
            is_hidden = bool(open_questions)
            continue
        view = cell.metadata.pop("jupyter", {})
        view.pop("outputs_hidden", None)
        cell.metadata.pop("collapsed", None)  # JupyterLab writes both
        asked = set(_QUESTION.findall(cell.source))
        if is_hidden and not asked:
            view["outputs_hidden"] = True
        if view:
            cell.metadata.jupyter = view
        open_questions = (open_questions | asked) - set(_ANSWER.findall(cell.source))
        is_hidden = is_hidden or bool(open_questions)


def reading_time(cells: Iterable[tuple[str, str]]) -> str:
    """How long a lecture takes: 160 words of text or 15 lines of code per minute, and 25 minutes
    per exercise. The first two are fitted to the minutes that readers took for 25 lectures, which
    they predict within 6 minutes in the mean.

    Args:
        cells: kinds ("markdown" or "code") and sources.
    """
    text, code = (
        "\n".join(source for kind, source in cells if kind == wanted)
        for wanted in ("markdown", "code")
    )
    reading = (
        len(text.split()) / 160 + len([line for line in code.split("\n") if line.strip()]) / 15
    )
    alone, whole = (
        15 * round(minutes / 15) for minutes in (reading, reading + 25 * code.count("Exercise("))
    )
    words = [
        f"{minutes // 60} h {minutes % 60} min".removesuffix(" 0 min") for minutes in (alone, whole)
    ]
    return f"about {words[0]}, and {words[1]} with the exercises"


def _rules(root: Path) -> list[tuple[str, str]]:
    parser = configparser.RawConfigParser()
    parser.read(Path(__file__).with_name("sanitize.cfg"), encoding="utf-8")
    found = [(re.escape(f"{root.resolve()}/"), "")]
    return found + [(parser[name]["regex"], parser[name]["replace"]) for name in parser.sections()]


def _keep(output: NotebookNode) -> bool:
    """Whether anything is left of an output without its widget, whose state is not saved, and
    without the log lines of engines, whose processes write in any order."""
    if output.get("name") == "stderr":
        output.text = _LOGGED.sub("", output.text)
        return bool(output.text)
    data = output.get("data", {})
    return data.pop(_WIDGET_VIEW, None) is None or bool(data)


def _merged(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Join consecutive outputs of the same stream, which differ from run to run."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if (
            merged
            and output.output_type == "stream"
            and output.get("name") == merged[-1].get("name")
        ):
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _normalise_output(output: NotebookNode, count: int, rules: list[tuple[str, str]]) -> None:
    def mask(text: str) -> str:
        for pattern, replacement in rules:
            text = re.sub(pattern, replacement, text)
        return text

    if output.output_type == "execute_result":
        output.execution_count = count
    if output.output_type == "stream":
        output.text = mask(output.text)
    if output.output_type == "error":
        output.evalue = mask(output.evalue)
        output.traceback = [mask(line) for line in output.traceback]
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") and isinstance(value, str):
            output.data[kind] = mask(value)
