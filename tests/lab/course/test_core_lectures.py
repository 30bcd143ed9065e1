"""Lectures 10 to 18 build the core: no cell that they export has a name that only a later lecture
builds."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import nbformat
import pytest

from nanovllm.lab.course.build import find_lectures
from tests.house import ROOT

CORE = range(10, 19)
DIRECTIVE = re.compile(r"^#\| (default_exp|export|extend)\b *(\S*)", re.MULTILINE)


def exported_cells(path: pathlib.Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the module that each exported cell belongs to, and the cell's syntax tree."""
    module = ""
    for cell in nbformat.read(path, 4).cells:
        directives = DIRECTIVE.findall(cell.source) if cell.cell_type == "code" else []
        for kind, name in directives:
            if kind == "default_exp" or "." in name:
                module = name
        if any(kind != "default_exp" for kind, _ in directives):
            yield module, ast.parse(cell.source)


@functools.cache
def built(first: int, end: int) -> tuple[set[str], set[str]]:
    """Return the modules that these lectures build, and the classes that they define there."""
    modules, classes = set[str](), set[str]()
    for path in find_lectures(ROOT):
        if first <= int(path.name[:2]) < end:
            for module, tree in exported_cells(path):
                modules.add(module)
                classes |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return modules, classes


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the package that a cell imports or names in a string, and all names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


@pytest.mark.parametrize("number", CORE)
def test_the_core_is_built_without_names_of_later_lectures(number: int) -> None:
    modules, classes = built(CORE.start, CORE.stop)
    later_modules, later_classes = built(CORE.stop, 100)
    later = {f"nanovllm.{name}" for name in later_modules - modules} | (later_classes - classes)
    assert "nanovllm.features.cuda_graphs.graphs" in later and "GraphForward" in later
    [path] = [path for path in find_lectures(ROOT) if path.name.startswith(str(number))]
    found = {
        (module, name)
        for module, tree in exported_cells(path)
        for name in names_in(tree)
        # What puts parts together names them.
        if name in later and not module.startswith("assembly.")
    }
    assert found == set()
