"""The package is a house: rooms are floors, and an import goes down, never up."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.density import BOUNDS, ceilings, counts
from tests.house import PACKAGE, PARTS, ROOMS, files_of, up_to_date

# A number of lines at the end of a row of the table, or of an entry of the reading path.
SIZE = re.compile(r"[\d,]+(?= \|$| lines$)")


def module_files() -> dict[str, pathlib.Path]:
    """Each module of the package, by its dotted name without `nanovllm.`; the package itself is
    ""."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()


def resolve(name: str) -> str | None:
    """The module that a dotted name below `nanovllm.` belongs to."""
    parts = name.split(".") if name else []
    for length in range(len(parts), 0, -1):
        if (module := ".".join(parts[:length])) in FILES:
            return module
    return None


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is `TYPE_CHECKING` or `typing.TYPE_CHECKING`."""
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def nodes_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes in it but the bodies of `if TYPE_CHECKING:`."""
    yield node
    if isinstance(node, ast.If) and is_type_checking(node.test):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from nodes_at_run_time(child)


def imports_of(source: str, path: str) -> list[tuple[str, bool]]:
    """Return what a module imports from the package at run time.

    Imports in functions count, and so do strings that name a module, for which the second value is
    True. Imports under `if TYPE_CHECKING:` do not count: they may point anywhere."""
    found = []
    for node in nodes_at_run_time(ast.parse(source)):
        names, by_string = [], False
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names, by_string = re.findall(r"^nanovllm(?:\.\w+)+(?=$|:\w+$)", node.value), True
        for name in names:
            if (
                name.startswith("nanovllm.")
                and (module := resolve(name.removeprefix("nanovllm."))) is not None
            ):
                found.append((module, by_string))
    return found


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[str, bool]]:
    """Return what a file imports from the package at run time, as `imports_of` does."""
    return imports_of(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def edges(with_strings: bool) -> set[tuple[str, str]]:
    return {
        (name, module)
        for name, path in FILES.items()
        for module, by_string in imports(path)
        if module != name and (with_strings or not by_string)
    }


def floor(module: str) -> int:
    return ROOMS.index(module.split(".")[0]) if module and module != "__main__" else len(ROOMS)


def circles(graph: set[tuple[str, str]]) -> set[frozenset[str]]:
    """The strongly connected components with more than one member."""
    below: dict[str, set[str]] = {}
    for start, end in graph:
        below.setdefault(start, set()).add(end)

    def reachable(start: str) -> set[str]:
        seen, stack = set(), [start]
        while stack:
            for module in below.get(stack.pop(), ()):
                if module not in seen:
                    seen.add(module)
                    stack.append(module)
        return seen

    reach = {module: reachable(module) for module in below}
    return {
        frozenset(other for other in reach[module] if module in reach.get(other, ()))
        for module in below
        if module in reach[module]
    }


def test_every_module_has_a_room() -> None:
    assert {name.split(".")[0] for name in FILES} == {"", "__main__", *ROOMS}


def test_an_import_goes_down_never_up() -> None:
    """What puts an engine together also names modules above it, for those who call it from there:
    the classes between which it chooses."""
    upwards = {edge for edge in edges(with_strings=False) if floor(edge[0]) < floor(edge[1])}
    assert upwards == set()
    upwards = {edge for edge in edges(with_strings=True) if floor(edge[0]) < floor(edge[1])}
    assert {edge for edge in upwards if not edge[0].startswith("assembly.")} == set()


# Where parts are put together: these modules import by a string, since a copy of the package may
# lack what it names. All others are passed what they use, or import it.
PUT_TOGETHER = re.compile(r"assembly\.\w+|cli\.doors|lab\..*")
BY_STRING = re.compile(r"data\.parts import .*\bload\b|\bimport_module\b|\bresolve_name\b")


def test_only_modules_that_put_parts_together_import_by_a_string() -> None:
    found = {
        name
        for name, path in FILES.items()
        if BY_STRING.search(path.read_text(encoding="utf-8")) and not PUT_TOGETHER.fullmatch(name)
    }
    # The package imports its public names on first use. `data.parts` has the function.
    assert found - {"", "data.parts"} == set()


def test_imports_for_types_alone_may_point_anywhere() -> None:
    source = """
import typing
from typing import TYPE_CHECKING

from nanovllm.core.request import Request

if TYPE_CHECKING:
    import nanovllm.engine.core
    from nanovllm.engine.llm import LLM
else:
    from nanovllm.data.outputs import RequestOutput

if typing.TYPE_CHECKING:
    from nanovllm.engine.group import EngineGroup


def make(scheduler: "nanovllm.engine.process") -> "LLM":
    from nanovllm.core.kv_cache_manager import KVCacheManager

    if not TYPE_CHECKING:
        from nanovllm.engine.client import EngineClient
    return load("nanovllm.kv_transfer.connector:Connector")
"""
    assert imports_of(source, "made_up.py") == [
        ("core.request", False),
        ("data.outputs", False),
        ("engine.process", True),
        ("core.kv_cache_manager", False),
        ("engine.client", False),
        ("kv_transfer.connector", True),
    ]


def test_no_files_import_each_other() -> None:
    assert circles(edges(with_strings=False)) == set()


def test_the_parts_that_peel_off_are_there() -> None:
    for part, patterns in PARTS.items():
        assert files_of(part) and all(any(PACKAGE.glob(pattern)) for pattern in patterns), part


def test_the_packages_readme_has_the_packages_and_the_reading_path() -> None:
    """`python -m tests.house` writes them. Sizes may be out of date by a tenth, or by twenty
    lines."""
    written = (PACKAGE / "README.md").read_text(encoding="utf-8").splitlines()
    wanted = up_to_date("\n".join(written) + "\n").splitlines()
    assert len(written) == len(wanted)
    for line, other in zip(written, wanted, strict=True):
        assert SIZE.sub("", line) == SIZE.sub("", other)
        for found, true in zip(SIZE.findall(line), SIZE.findall(other), strict=True):
            size, now = (int(number.replace(",", "")) for number in (found, true))
            assert abs(size - now) <= max(20, now / 10), f"run python -m tests.house: {line}"


@pytest.mark.parametrize("kind", BOUNDS)
def test_code_is_not_compressed_further(kind: str) -> None:
    """`python -m tests.density KIND` lists the places; `--store` lowers a ceiling for good."""
    count, most = counts()[kind], max(ceilings()[kind], BOUNDS[kind])
    assert count <= most, f"{kind}: {count}, at most {most}: see python -m tests.density"
