"""Cells that assert a time fail on a machine that does other work, too: there are only those that
are stored here, whose bounds are wide."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "thread_time", "monotonic", "timeit"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
# How many a lecture has; most of them compare something else that a function returns together with
# a time. A number may only fall.
STORED = {
    "20_executor": 2,
    "21_process_groups": 1,
    "22_tensor_parallel": 2,
    "23_pipeline_parallel": 1,
    "26_latent_attention": 2,
    "31_pd_disaggregation": 1,
    "32_kv_sharing": 8,
}


class Times:
    """Follows what comes from a clock, statement by statement.

    Attributes:
        names: variables and functions whose values do, so far.
        found: the comparisons of such values by size that are asserted.
    """

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.found: list[str] = []
        self.returns_time = False

    def is_time(self, node: ast.AST | None) -> bool:
        """Whether the value of an expression comes from a clock. That a collection has times in it
        says nothing about its length."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            return False
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS:
            return True
        if isinstance(node, Comprehension):
            return self.is_time_in(node)
        return node is not None and any(map(self.is_time, ast.iter_child_nodes(node)))

    def is_time_in(self, node: Comprehension) -> bool:
        """Whether an element, or what chooses it, comes from a clock. A comprehension has names of
        its own."""
        inside = Times(set(self.names))
        for part in node.generators:
            inside.bind(part.target, inside.is_time(part.iter))
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        chosen_by = [condition for part in node.generators for condition in part.ifs]
        return any(map(inside.is_time, elements + chosen_by))

    def bind(self, target: ast.expr, is_time: bool) -> None:
        """Assign to names; of an object or a list, one part makes all of it a time."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                if is_time:
                    self.names.add(node.id)
                elif isinstance(node.ctx, ast.Store):
                    self.names.discard(node.id)

    def follow(self, statements: list[ast.stmt]) -> None:
        for node in statements:
            self.follow_one(node)
            if not isinstance(node, FUNCTIONS | ast.ClassDef):
                for body in ("body", "orelse", "finalbody"):
                    self.follow(getattr(node, body, []))
                for handler in getattr(node, "handlers", []):
                    self.follow(handler.body)

    def follow_one(self, node: ast.stmt) -> None:
        if isinstance(node, FUNCTIONS):
            self.follow_function(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, self.is_time(node.value))
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            self.bind(node.target, self.is_time(node.value) or self.is_time(node.target))
        elif isinstance(node, ast.For):
            self.bind(node.target, self.is_time(node.iter))
        elif isinstance(node, ast.Return):
            self.returns_time |= self.is_time(node.value)
        elif isinstance(node, ast.Assert):
            self.found += [ast.unparse(node.test)] * any(map(self.compares, ast.walk(node.test)))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value  # such as times.append(...)
            if isinstance(call.func, ast.Attribute) and any(map(self.is_time, call.args)):
                self.bind(call.func.value, True)

    def compares(self, node: ast.AST) -> bool:
        by_size = ast.Lt | ast.LtE | ast.Gt | ast.GtE
        return (
            isinstance(node, ast.Compare)
            and any(isinstance(each, by_size) for each in node.ops)
            and self.is_time(node)
        )

    def follow_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        parameters = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
        inside = Times(self.names - parameters)
        inside.follow(node.body)
        self.found += inside.found
        self.names.discard(node.name)
        if inside.returns_time:
            self.names.add(node.name)


def timed_asserts(path: Path) -> Iterator[tuple[int, str]]:
    """The number of the cell and the assertion."""
    times = Times(set())
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            times.found = []
            times.follow(ast.parse("".join(cell["source"])).body)
            yield from ((number, test) for test in times.found)


def found_in(source: str) -> list[str]:
    times = Times(set())
    times.follow(ast.parse(source).body)
    return times.found


def test_times_are_followed() -> None:
    made = "import time\ndef seconds(work):\n    begin = time.perf_counter()\n    work()\n"
    made += "    return time.perf_counter() - begin\n"
    assert found_in(made + "a = seconds(f)\nb = 2 * a\nassert b < 3") == ["b < 3"]
    assert found_in(
        made + "each = []\nfor i in x:\n    each.append(seconds(f))\nassert max(each) < 1"
    )
    assert (
        found_in(made + "each = [1]\na = seconds(f)\na = 1\nassert a < 2 and len(each) > 0") == []
    )
    assert found_in(made + "each = [a / 2 for a in [seconds(f)]]\nassert max(each) < 1")
    assert not found_in(made + "a = seconds(f)\neach = [a for a in (1, 2)]\nassert max(each) < 3")
    assert found_in(made + "a = [seconds(f)]\nassert len(a) > 0 and a == a") == []
    assert found_in(made + "with x:\n    a, b = f(), seconds(f)\n    assert a > b")


def test_lectures_assert_no_more_times_than_stored() -> None:
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        found = list(timed_asserts(path))
        for number, test in found:
            print(f"{path.stem} cell {number}: assert {test}")
        assert len(found) <= STORED.get(path.stem, 0), f"{path.stem} asserts {len(found)} times"
