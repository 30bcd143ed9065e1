"""Run lectures and save them so that a second run changes nothing."""

from __future__ import annotations

import base64
import configparser
import hashlib
import itertools
import json
import os
import re
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from nanovllm.lab.course.notebook import CourseError

GPU_TAG = "gpu"

_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(path: Path, root: Path, timeout: int) -> bool:
    """Run a lecture from top to bottom and save it normalised. A cell with the tag "gpu" in its metadata is run only
    where torch sees a GPU; elsewhere it keeps its outputs.

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
    notebook = parse(before)
    with tempfile.TemporaryDirectory() as folder:
        # Equal hashes, dates and SVG ids in every run.
        (Path(folder) / "matplotlibrc").write_text("svg.hashsalt: nanovllm\n")
        fixed = {"PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "0", "MATPLOTLIBRC": folder}
        _execute(notebook, path, root, timeout, {**os.environ, **fixed})
    after = dump(normalise(notebook, root))
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def parse(text: str) -> NotebookNode:
    """A notebook from its JSON; a cell without an id gets one that follows from its source."""
    data = json.loads(text)
    data["nbformat_minor"] = max(5, data.get("nbformat_minor", 0))
    taken = {cell["id"] for cell in data["cells"] if "id" in cell}
    for cell in data["cells"]:
        if "id" not in cell:
            cell["id"] = cell_id("".join(cell["source"]), taken)
    return nbformat.reads(json.dumps(data), as_version=4)


def cell_id(source: str, taken: set[str]) -> str:
    """A new id that follows from a cell's source; adds it to those `taken`."""
    names = (hashlib.sha256(f"{attempt}{source}".encode()).hexdigest()[:8] for attempt in itertools.count())
    taken.add(name := next(name for name in names if name not in taken))
    return name


def dump(notebook: NotebookNode) -> str:
    """The JSON of a notebook as it is committed."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def _execute(notebook: NotebookNode, path: Path, root: Path, timeout: int, environment: dict[str, str]) -> None:
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    runs = 0
    with client.setup_kernel(env=environment):
        for index, cell in enumerate(notebook.cells):
            runs += cell.cell_type == "code"
            if GPU_TAG in cell.metadata.get("tags", []) and not _sees_gpu():
                continue
            place = f"{path.relative_to(root).as_posix()}: cell {index + 1} (In [{runs}])"
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                raise CourseError(_failure(place, error)) from None
            except CellTimeoutError:
                raise CourseError(f"{place}: took longer than {timeout} s") from None
            except DeadKernelError:
                raise CourseError(f"{place}: the kernel died") from None


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

    Counts become 1..n, timing and widget state go, addresses and paths are masked, consecutive outputs of one
    stream become one, and images lose their text chunks (software versions and dates). Ids stay.
    """
    rules = _rules(root)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for key in ("widgets", "jupytext", "signature"):
        notebook.metadata.pop(key, None)
    notebook.metadata["kernelspec"] = NotebookNode(_KERNEL)
    notebook.metadata["language_info"] = NotebookNode(name="python")
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
    return notebook


def _rules(root: Path) -> list[tuple[str, str]]:
    parser = configparser.RawConfigParser()
    parser.read(Path(__file__).with_name("sanitize.cfg"), encoding="utf-8")
    found = [(re.escape(f"{root.resolve()}/"), "")]
    return found + [(parser[name]["regex"], parser[name]["replace"]) for name in parser.sections()]


def _keep(output: NotebookNode) -> bool:
    """Whether anything is left of an output without its widget, whose state is not saved."""
    data = output.get("data", {})
    return data.pop(_WIDGET_VIEW, None) is None or bool(data)


def _merged(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Join consecutive outputs of the same stream, which differ from run to run."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == "stream" and output.get("name") == merged[-1].get("name"):
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
        elif kind == "image/png":
            output.data[kind] = base64.b64encode(without_text_chunks(base64.b64decode(value))).decode()


def without_text_chunks(png: bytes) -> bytes:
    """A PNG image without its tEXt, zTXt, iTXt and tIME chunks (PNG specification, section 11.3)."""
    if not png.startswith(_PNG_SIGNATURE):
        return png
    kept, position = [_PNG_SIGNATURE], len(_PNG_SIGNATURE)
    while position < len(png):
        (length,) = struct.unpack(">I", png[position : position + 4])
        end = position + 12 + length  # length, type, data, checksum
        if png[position + 4 : position + 8] not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"):
            kept.append(png[position:end])
        position = end
    return b"".join(kept)
