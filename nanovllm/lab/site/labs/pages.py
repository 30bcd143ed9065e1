"""Writes the pages of the labs, and what they load."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt

from nanovllm.lab.site.labs.archive import module_path, write_archive
from nanovllm.lab.site.labs.contest import CONTESTS
from nanovllm.lab.site.labs.driver import answer
from nanovllm.lab.site.labs.packages import KEPT, BuildError, npm, wasm_wheel
from nanovllm.lab.site.players import players_module

HERE = Path(__file__).parent
WEB = HERE / "web"
DRIVER = "nanovllm.lab.site.labs.driver"
# What is imported only when it is called for, or is cut down to a member.
LOADED = (
    "nanovllm.features.batching_policies",
    "nanovllm.features.decodes_first",
    "nanovllm.features.speculation.verification:keep_accepted",
    "nanovllm.features.data_parallel.lock_step:LockStep",
    "nanovllm.features.data_parallel.lock_step:LOCK_STEP",
    "nanovllm.simulate.simulation",
    "nanovllm.checkpoint.files",
    "nanovllm.models.config",
    "nanovllm.distributed.expert_slots",
    "nanovllm.executor.grid",
    "nanovllm.models.moe_config",
    "nanovllm.checkpoint.quantization",
)
DATA = ("nanovllm/simulate/machines.toml", "nanovllm/simulate/models.toml")
# By kind of page: the button that judges the reader's code, and where its verdict is shown.
JUDGES = {
    "edit": (
        '<button id="check" type="button">Check</button>',
        '<ul id="tests" class="tests" aria-label="Tests"></ul>',
    ),
    "contest": (
        '<button id="score" type="button" class="main">Score</button>',
        '<div id="scores" class="scores" aria-live="polite"></div>'
        '<p id="share" class="share" hidden><button id="copy" type="button">Copy a link with your '
        'code</button> <span id="copied" role="status"></span></p>',
    ),
}
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
Lab = dict[str, Any]


def read_labs() -> list[Lab]:
    """Return the labs, in the order of the menu; `labs.toml` describes their fields."""
    return tomllib.loads((HERE / "labs.toml").read_text(encoding="utf-8"))["lab"]


def build(out: Path) -> None:
    """Write the pages of all labs, and what they load, into a folder.

    Raises:
        ArchiveError: a lab needs a module that cannot run in a browser.
        BuildError: a package from npm or PyPI is missing.
    """
    labs = read_labs()
    out.mkdir(parents=True, exist_ok=True)
    write_lab_archive(out / "nanovllm.zip", labs)
    shutil.copyfile(wasm_wheel(), out / "msgspec.whl")
    _copy_pyodide(npm("pyodide"), out / "pyodide")
    _bundle(out)
    for lab in labs:
        page = _page(lab, labs)
        (out / f"{lab['name']}.html").write_text(page, encoding="utf-8")
    (out / "index.html").write_text(_index(labs), encoding="utf-8")


def write_lab_archive(path: Path, labs: Sequence[Lab]) -> None:
    """Write the zip of the modules that the labs need."""
    targets = {target.partition(":")[0] for lab in labs for target in lab.get("targets", ())}
    targets -= {name.partition(":")[0] for name in LOADED}
    tests = [test for lab in labs for test in lab.get("tests", ())]
    roots = [DRIVER, *LOADED, *targets, *tests]
    write_archive(path, roots, DATA)


def _copy_pyodide(source: Path, out: Path) -> None:
    """Copy Pyodide's core, and a list of its other packages, none of which is needed."""
    out.mkdir(exist_ok=True)
    for name in PYODIDE:
        shutil.copyfile(source / name, out / name)
    lock = json.loads((source / "pyodide-lock.json").read_text(encoding="utf-8"))
    lock["packages"] = {}
    (out / "pyodide-lock.json").write_text(json.dumps(lock), encoding="utf-8")


def _bundle(out: Path) -> None:
    """Bundle the page's JavaScript with CodeMirror and the player, and copy the rest."""
    command = [
        str(npm("esbuild") / "bin" / "esbuild"),
        str(WEB / "lab.js"),
        "--bundle",
        "--minify",
        "--format=esm",
        "--external:./players.js",
        f"--outfile={out / 'lab.js'}",
        "--log-level=warning",
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NODE_PATH": str(KEPT / "node_modules")},
    )
    if run.returncode:
        raise BuildError(f"esbuild cannot bundle the labs: {run.stderr.strip()}")
    shutil.copyfile(WEB / "worker.js", out / "worker.js")
    shutil.copyfile(WEB / "lab.css", out / "lab.css")
    (out / "players.js").write_text(players_module(), encoding="utf-8")


def _page(lab: Lab, labs: Sequence[Lab]) -> str:
    """Return a lab's page. It has the trace of the engine's own code, which the player shows until
    Python is there, and where there is none."""
    data = {"lab": lab, "sources": {target: source_of(target) for target in lab.get("targets", ())}}
    if lab["kind"] != "what-if":
        data["scene"] = json.loads(
            answer(json.dumps({"call": "run", "lab": lab, "texts": {}}), print)
        )
        if "error" in data["scene"]:
            raise BuildError(f"lab {lab['name']}: {data['scene']['error']['message']}")
    if lab["kind"] == "contest":
        data["workloads"] = {name: list(workloads) for name, (_, workloads) in CONTESTS.items()}
    main = _fill(
        "main.html",
        title=html.escape(lab["title"]),
        text=MarkdownIt().render(lab["text"]),
        tasks=MarkdownIt().render("\n".join(f"1. {task}" for task in lab["tasks"])),
        bench=_bench(lab["kind"]),
        question=_question(lab),
        links=_links(lab),
        data=json.dumps(data).replace("<", "\\u003c"),
    )
    return _frame(lab["title"], lab["summary"], main, labs, lab["name"])


def _bench(kind: str) -> str:
    if kind not in JUDGES:
        return _fill(f"{kind}.html")
    judge, verdict = JUDGES[kind]
    return _fill("edit.html", judge=judge, verdict=verdict)


def source_of(target: str) -> str:
    """Return the text of a function or method, from the column of its `def`."""
    module, _, path = target.partition(":")
    file = module_path(module)
    assert file is not None, target
    text = file.read_text(encoding="utf-8")
    body: Sequence[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for name in path.split("."):
        node = next(each for each in body if getattr(each, "name", None) == name)
        body = getattr(node, "body", [])
    assert isinstance(node, ast.FunctionDef), target
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n"


def _question(lab: Lab) -> str:
    if "question" not in lab:
        return ""
    return (
        f"<h2>{html.escape(lab['question'])}</h2>"
        "<p><textarea id='reason' rows='3' aria-label='Your answer' placeholder='Your answer first."
        " It stays in this browser.'></textarea></p>"
        f"<details><summary>Compare</summary>{MarkdownIt().render(lab['answer'])}</details>"
    )


def _links(lab: Lab) -> str:
    page = f"../notebooks/{lab['lecture']}.html#{anchor(lab['section'])}"
    number = lab["lecture"].partition("_")[0]
    section = lab["section"].lstrip("0123456789.· ")
    return (
        f"<p>Lecture {number} builds this code: "
        f'<a href="{page}">{section}</a>. '
        "To write it yourself, from the specification to the tests, in a repository of your own: "
        f"<code>nanovllm course start my-engine --at {number}</code>.</p>"
    )


def anchor(heading: str) -> str:
    """Return the id that docutils gives to a heading."""
    return "-".join(re.findall("[a-z0-9]+", heading.lower())).lstrip("0123456789-")


def _frame(title: str, summary: str, main: str, labs: Sequence[Lab], name: str) -> str:
    menu = "".join(
        f'<a data-lab href="{each["name"]}.html"'
        f"{' aria-current=page' if each['name'] == name else ''}>{html.escape(each['title'])}</a>"
        for each in labs
    )
    return _fill(
        "lab.html", title=html.escape(title), summary=html.escape(summary), main=main, menu=menu
    )


def _index(labs: Sequence[Lab]) -> str:
    items = "".join(
        f'<li><a href="{lab["name"]}.html">{html.escape(lab["title"])}</a>'
        f"<p>{html.escape(lab['summary'])}</p></li>"
        for lab in labs
    )
    main = (
        "<h1>Labs in the browser</h1><p>Change the code of a real engine, run it, and watch its "
        "blocks move. Nothing is installed, and nothing leaves your browser.</p>"
        f'<ul class="cards">{items}</ul>'
    )
    return _frame("Labs", "Edit a real inference engine in the browser.", main, labs, "")


def _fill(name: str, **values: str) -> str:
    return Template((WEB / name).read_text(encoding="utf-8")).substitute(values)
