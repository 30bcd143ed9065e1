"""The player in JupyterLab, in a real browser: run all, move the slider, see the picture change."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from playwright.sync_api import TimeoutError as PageTimeoutError

from nanovllm.lab.course.copies import FOLDER, copy_lectures
from nanovllm.lab.course.notebook import GPU_TAG
from nanovllm.lab.course.unchanged import mark
from tests.server_process import wait_until

pytest_plugins = ["tests.browser"]

ROOT = pathlib.Path(__file__).parents[3]
NOTEBOOKS = ROOT / "notebooks"
LECTURES = ["11_paged_memory"]  # run as a whole; more of them by the environment
LECTURES += os.environ.get("NANOVLLM_LAB_LECTURES", "").split()

PLAYER_CELL = """
from nanovllm.lab import viz
from nanovllm.lab.viz.player import play
requests = [viz.SimulatedRequest(3 * i, 20 + i, 12) for i in range(6)]
trace = viz.simulate(requests, num_kv_blocks=24, block_size=4, max_num_batched_tokens=32)
player = play(trace)
player
"""
WHAT_IF_CELL = """
from nanovllm.lab.viz.what_if import what_if
what_if(requests, num_kv_blocks=24, block_size=4, max_num_batched_tokens=32, views=["pool"])
"""
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Otherwise cells out of sight are not in the page.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
START_SECONDS = 60


@pytest.fixture
def noise() -> list[str]:
    """What JupyterLab itself writes into the console."""
    return []


class Lab:
    """JupyterLab of this Python, without token, with settings of its own, on a repository that is
    laid out as the project."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.output = folder / "lab.log"
        self.project = folder / "project"
        (self.project / "notebooks").mkdir(parents=True)
        for name in (".gitignore", "pyproject.toml"):
            shutil.copy(NOTEBOOKS.parent / name, self.project)
        self.git("init", "--quiet")
        # What lectures import, and show.
        for script in NOTEBOOKS.glob("*.py"):
            shutil.copy(script, self.project / "notebooks")
        shutil.copytree(NOTEBOOKS.parent / "figures", self.project / "figures")
        for name, values in SETTINGS.items():
            path = folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        places = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        environment = os.environ | {name: str(folder / place) for name, place in places.items()}
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"]
        command += [
            "--IdentityProvider.token=",
            f"--ServerApp.root_dir={self.project}",
            "--LabApp.news_url=",
            # What `make lab` adds.
            *re.findall(r"--LabApp\.extra\S+", (ROOT / "Makefile").read_text(encoding="utf-8")),
        ]
        if os.geteuid() == 0:
            command.append("--allow-root")
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def __enter__(self) -> Lab:
        wait_until(
            lambda: self._url() or self.process.poll() is not None,
            START_SECONDS,
            "JupyterLab is ready",
        )
        assert self.process.poll() is None, self.output.read_text()
        self.url = self._url()
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)  # its kernels are of the same group
        self.process.wait(30)

    def _url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+/", self.output.read_text(errors="replace"))
        return found[0] if found else ""

    def git(self, *arguments: str) -> str:
        return subprocess.check_output(["git", "-C", str(self.project), *arguments], text=True)

    def add(self, notebook: nbformat.NotebookNode, name: str) -> str:
        """Make a lecture of a notebook, with outputs of GPU cells only; the address that opens its
        working copy."""
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        for cell in notebook.cells:
            if cell.cell_type == "code" and GPU_TAG not in cell.metadata.get("tags", []):
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, self.project / "notebooks" / f"{name}.ipynb")
        self.git("add", ".")
        copy_lectures(self.project)
        return f"{self.url}lab/tree/{FOLDER}/{name}.ipynb?reset"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


def run_all(page: Any, url: str) -> None:
    """Open a notebook and run all of its cells, by the menu; wait until the first has begun."""
    page.set_default_timeout(120_000)
    page.goto(url)
    page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
    # Before there is a kernel the notebook looks idle, too; whoever runs a cell then is asked for
    # one.
    page.locator(".jp-Toolbar-kernelName").filter(has_text="Python 3").wait_for()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    begun = (
        page.locator(".jp-CodeCell .jp-InputPrompt")
        .filter(has_text=re.compile(r"\[(\*|\d+)\]"))
        .first
    )
    dialog = page.locator("dialog.jp-Dialog")

    def has_begun() -> bool:
        # What is run while the kernel's connection is still being made is dropped by JupyterLab
        # without a word.
        assert not dialog.is_visible(), f"JupyterLab asks: {dialog.inner_text()}"
        try:
            page.get_by_role("menuitem", name="Run", exact=True).click(timeout=3000)
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click(timeout=3000)
            begun.wait_for(timeout=3000)
        except PageTimeoutError:
            return False
        return True

    wait_until(has_begun, 120, "the first cell runs")


def check_player(page: Any, player: Any) -> None:
    """Move the slider by keyboard, three steps from the first: the position and the pictures
    change."""
    player.wait_for()
    player.scroll_into_view_if_needed()
    slider = player.get_by_role("slider", name="Step")
    position = player.locator(".nv-position")
    slider.press("Home")
    page.wait_for_function("(slider) => slider.value === slider.min", arg=slider.element_handle())
    told = position.inner_text()
    canvases = [canvas.element_handle() for canvas in player.locator("canvas").all()]
    before = [picture_of(page, canvas) for canvas in canvases]
    for _ in range(3):
        slider.press("ArrowRight")
    page.wait_for_function(
        "([now, told]) => now.textContent !== told", arg=[position.element_handle(), told]
    )
    page.wait_for_function(
        "([canvases, before]) => canvases.some((canvas, i) => canvas.toDataURL() !== before[i])",
        arg=[canvases, before],
    )
    assert int(slider.input_value()) == int(slider.get_attribute("min") or 0) + 3


def picture_of(page: Any, canvas: Any) -> str:
    """The canvas as a data URL, once something has been drawn in it."""
    page.wait_for_function(
        """(canvas) => canvas.height > 40 && new Uint32Array(
             canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer
           ).some((pixel, _, all) => pixel !== all[0])""",
        arg=canvas,
    )
    return canvas.evaluate("(canvas) => canvas.toDataURL()")


def notebook_of(*cells: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells]
    )


@pytest.mark.nightly
def test_a_player_and_its_kernel(page: Any, lab: Lab) -> None:
    cells = [PLAYER_CELL, "player.step = 9", "print('reader at', player.step)"]
    run_all(page, lab.add(notebook_of(*cells), "tiny"))
    player = page.locator(".nv-player")
    player.wait_for()
    page.get_by_text("reader at 9").wait_for()
    page.wait_for_function(
        "document.querySelector('.nv-position').textContent.startsWith('step 9 of')"
    )
    check_player(page, player)
    page.locator(".jp-CodeCell").nth(2).locator(".cm-content").click()

    def kernel_knows() -> bool:
        page.keyboard.press("Control+Enter")
        try:
            page.get_by_text("reader at 3").wait_for(timeout=3000)
        except PageTimeoutError:
            return False  # the widget tells of its last steps a little later
        return True

    wait_until(kernel_knows, 30, "the kernel knows the reader's step")
    copy, tracked = lab.project / FOLDER / "tiny.ipynb", lab.git("status", "--porcelain")
    page.keyboard.press("Control+s")
    wait_until(lambda: "reader at 3" in copy.read_text(), 30, "the copy is saved with its outputs")
    assert lab.git("status", "--porcelain") == tracked
    assert copy_lectures(lab.project) == [] and "reader at 3" in copy.read_text()


def test_what_if_runs_the_scheduler_again(page: Any, lab: Lab) -> None:
    run_all(
        page, lab.add(notebook_of(PLAYER_CELL.replace("\nplayer\n", "\n"), WHAT_IF_CELL), "what_if")
    )
    player = page.locator(".nv-player")
    player.wait_for()
    check_player(page, player)
    before = player.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    table = page.locator(".widget-html table")
    figures = table.inner_text()
    # The sliders of ipywidgets have no name of their own.
    pool = (
        page.locator(".widget-slider").filter(has_text="blocks in the pool").locator(".noUi-handle")
    )
    pool.focus()
    for _ in range(8):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "([table, old]) => !table.isConnected || table.innerText !== old",
        arg=[table.element_handle(), figures],
    )
    page.wait_for_function(
        "(old) => document.querySelector('.nv-player canvas').toDataURL() !== old", arg=before
    )
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    page.get_by_role("alert").filter(
        has_text="The picture shows the last setting that worked"
    ).wait_for()
    assert player.locator(".nv-position").inner_text().startswith("step 3 of")


CONTINUED = (
    "@extend\nclass Pool(Pool):\n    def take(self):\n        count = 1\n        return count"
)


def test_unchanged_lines_are_pale(page: Any, lab: Lab) -> None:
    notebook = notebook_of(CONTINUED.replace("count", "number"), CONTINUED, CONTINUED + " + 1")
    mark(notebook.cells)
    notebook.cells[2].source += "  # edited since"
    page.set_default_timeout(120_000)
    page.goto(lab.add(notebook, "pool"))
    cell = page.locator(".jp-CodeCell").nth(1)
    pale = cell.locator(".nanovllm-unchanged")
    pale.first.wait_for()
    wanted = ["@extend", "class Pool(Pool):", "    def take(self):"]
    assert pale.all_inner_texts() == wanted
    assert float(pale.first.evaluate("(line) => getComputedStyle(line).opacity")) < 0.6
    assert page.locator(".jp-CodeCell").nth(2).locator(".nanovllm-unchanged").count() == 0
    # They follow what the reader types.
    cell.locator(".cm-line").first.click()
    page.keyboard.press("Home")
    page.keyboard.type("# A pool\n")
    cell.get_by_text("# A pool").wait_for()
    assert pale.all_inner_texts() == wanted


def test_an_output_that_answers_a_prediction_opens_by_a_click(page: Any, lab: Lab) -> None:
    notebook = notebook_of("guess = course.predict('How many?', ...)", "print(6 * 7)", "print(5)")
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="42\n")]
    notebook.cells[1].metadata.jupyter = {"outputs_hidden": True}
    notebook.cells[1].metadata.tags = [GPU_TAG]  # so that copies keep it
    page.set_default_timeout(120_000)
    page.goto(lab.add(notebook, "answers"))
    cell = page.locator(".jp-CodeCell").nth(1)
    placeholder = cell.locator(".jp-OutputPlaceholder")
    placeholder.wait_for()
    # JupyterLab would show the first line of the output.
    text = placeholder.locator(".jp-PlaceholderText")
    assert text.evaluate("(text) => getComputedStyle(text).fontSize") == "0px"
    shown = text.evaluate("(text) => getComputedStyle(text, '::after').content")
    assert "click to show" in shown
    placeholder.click()
    output = cell.locator(".jp-OutputArea-output").filter(has_text="42")
    output.wait_for()
    assert output.bounding_box()["height"] > 5


def test_a_film_can_be_stopped_and_stepped(page: Any, lab: Lab) -> None:
    notebook = notebook_of("1 + 1")
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("![Blocks](../figures/pool.gif)"))
    page.set_default_timeout(120_000)
    page.goto(lab.add(notebook, "film"))
    film = page.locator(".nanovllm-film")
    film.wait_for()
    assert page.locator(".jp-RenderedMarkdown img").is_hidden()
    canvas, position = film.locator("canvas").element_handle(), film.locator("output")
    first = picture_of(page, canvas)
    # It stands still until it is played.
    assert position.inner_text() == "1 of 21"
    for _ in range(2):
        film.get_by_title("One picture on").click()
    position.filter(has_text="3 of 21").wait_for()
    page.wait_for_function("([canvas, first]) => canvas.toDataURL() !== first", arg=[canvas, first])
    film.get_by_title("One picture back").click()
    position.filter(has_text="2 of 21").wait_for()
    film.get_by_role("button", name="Play").click()
    position.filter(has_text="4 of 21").wait_for()
    film.get_by_role("button", name="Pause").click()
    film.get_by_role("slider", name="Picture").press("End")
    position.filter(has_text="21 of 21").wait_for()
    film.get_by_role("button", name="Play").click()
    position.filter(has_text="1 of 21").wait_for()


@pytest.mark.nightly
@pytest.mark.parametrize("lecture", LECTURES)
def test_a_lecture_as_a_whole(page: Any, lab: Lab, lecture: str) -> None:
    run_all(page, lab.add(nbformat.read(NOTEBOOKS / f"{lecture}.ipynb", as_version=4), lecture))
    page.locator(".nv-player").first.wait_for(timeout=300_000)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=300_000)
    errors = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']")
    assert errors.all_inner_texts() == []
    for player in page.locator(".nv-player").all():
        check_player(page, player)
