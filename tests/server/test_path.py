"""The drawing of a request's path in nanovllm/server/README.md."""

from __future__ import annotations

import importlib
import pathlib
import re

import nanovllm

PACKAGE = pathlib.Path(nanovllm.__file__).parent


def test_each_box_of_the_drawing_is_a_function_that_exists() -> None:
    page = (PACKAGE / "server" / "README.md").read_text(encoding="utf-8")
    section = page.split("## The path of a request")[1].split("\n## ")[0]
    drawing = "\n".join(line for line in section.splitlines() if line.startswith("    "))
    drawn = re.findall(r"\b[A-Z]\w+\.\w+\b|\b[a-z]+(?:_[a-z]+){2,}\b", drawing)
    rows = re.findall(r"^\| `([\w.]+)` \|.*\[`([\w/]+)\.py`\]", section, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(drawn) and len(drawn) == 33
    for name, module in rows:
        owner, _, function = name.rpartition(".")
        found = importlib.import_module(f"nanovllm.{module.replace('/', '.')}")
        scope = vars(getattr(found, owner)) if owner else vars(found)
        assert callable(scope.get(function)), f"{module} has no {name}"
