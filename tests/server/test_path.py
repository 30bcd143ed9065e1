"""The drawing of a request's path in nanovllm/server/README.md."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

import nanovllm

PACKAGE = pathlib.Path(nanovllm.__file__).parent
PAGE = (PACKAGE / "server" / "README.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## The path of a request")[1].split("\n## ")[0]
# The table below the drawing: function to module.
MODULES = dict(re.findall(r"^\| `([\w.]+)` \|.*\[`([\w/]+)\.py`\]", SECTION, re.MULTILINE))

# What the code of its caller says instead of a function's name.
CALLED_AS = {
    "chat_completions": "app",  # FastAPI, which calls it
    "ClosingStream.__call__": "ClosingStream",  # FastAPI calls it
    "Generation.events": "super",  # `StreamingResponse` iterates over it
    "RequestStream.__anext__": "anext",
    "Forward.__call__": "forward",
    "LlamaForCausalLM.forward": "model",
}


def drawn_calls() -> Iterator[tuple[str, str]]:
    """Each function of the drawing with the one that calls it; "" where no arrow leads to it."""
    lines = [line[4:] for line in SECTION.splitlines() if line.startswith("    ")]
    border = lines[0].index("│")
    for half in (slice(0, border), slice(border + 1, None)):
        above = ""
        latest: dict[int, str] = {}  # by column
        for line in lines[1:]:
            text = line[half]
            if found := re.search(r"([├└╞╘][─═]▶ )?\b([A-Za-z]\w+(?:\.\w+)?)", text):
                arrow, name = found.groups()
                column = found.start(2)
                if arrow:
                    yield name, latest[column - 6]
                elif above[column + 2 : column + 3] in ("▼", "▲"):
                    yield name, latest[column]
                elif "." in name:
                    yield name, ""
                latest[column] = name
            above = text


def find(name: str) -> tuple[Any, CodeType]:
    """The class or module that has a function, and the function's code. Raises an error if there is
    none."""
    owner, _, function = name.rpartition(".")
    module = importlib.import_module("nanovllm." + MODULES[name].replace("/", "."))
    scope = getattr(module, owner) if owner else module
    if function in vars(scope):
        return scope, inspect.unwrap(inspect.unwrap(vars(scope)[function])).__code__
    inner = [
        part
        for outer in vars(scope).values()
        if inspect.isfunction(outer)
        for part in outer.__code__.co_consts
        if isinstance(part, CodeType) and part.co_name == function
    ]
    assert len(inner) == 1, f"{module.__name__} has no {name}"
    return scope, inner[0]


def words(scope: Any, code: CodeType) -> set[str]:
    """The names in a function's code, and in that of the functions of its class that it calls, as
    far as they are not drawn themselves."""
    found: set[str] = set()
    to_read = [code]
    while to_read:
        code = to_read.pop()
        new = set(code.co_names) - found
        found |= new
        to_read += [part for part in code.co_consts if isinstance(part, CodeType)]
        helpers = [n for n in new if not {n, f"{scope.__name__}.{n}"} & MODULES.keys()]
        own = [vars(scope).get(name) for name in helpers]
        to_read += [inspect.unwrap(each).__code__ for each in own if inspect.isfunction(each)]
    return found


def test_each_box_of_the_drawing_is_a_function_that_exists() -> None:
    drawn = [name for name, _ in drawn_calls()]
    assert sorted(MODULES) == sorted(drawn) and len(drawn) == 39
    for name in drawn:
        find(name)


def test_each_arrow_of_the_drawing_is_a_call() -> None:
    calls = [(name, caller) for name, caller in drawn_calls() if caller]
    assert len(calls) == 36
    for name, caller in calls:
        called = CALLED_AS.get(name, name.rpartition(".")[2])
        assert called in words(*find(caller)), f"{caller} does not call {name}"
