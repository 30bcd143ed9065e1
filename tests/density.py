"""How compressed the code is: constructs that save lines and cost readers, as counts that may only
fall.

`python -m tests.density` lists the counts, `python -m tests.density KIND` the places of one kind,
and `python -m tests.density --store` lowers the stored ceilings to the present counts.

Not counted:

- `getattr` with a default and `hasattr` on modules of the standard library, torch and psutil: they
  ask what the platform has (`hasattr(os, "memfd_create")`);
- calls with many positions of variadic functions: their arguments have no names
  (`logger.info(format, ...)`, `create_subprocess_exec(program, ...)`);
- calls in and of kernels of Triton's: positional by custom."""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
CEILINGS = pathlib.Path(__file__).with_suffix(".json")
TESTS = pathlib.Path(__file__).parent
WIDTH = 100
LONGEST_FUNCTION = 60
LONGEST_MODULE = 500
# A call with so many positional arguments does not show what each of them is.
MANY_POSITIONS = 6
MANY_RESULTS = 4
# What looks private and is documented: methods of named tuples, and leaving a forked process.
PUBLIC_NAMES = {"_asdict", "_exit", "_fields", "_make", "_replace"}
# Packages whose modules differ by platform and version, besides the standard library.
PLATFORM_PACKAGES = {"psutil", "torch"}
# Variadic functions from outside. Those of the package are found.
VARIADIC = {"create_subprocess_exec", "debug", "error", "exception", "info", "warning"}

# `tests/stand_ins.py` patches in one place what tests would patch in many: its uses count apart.
STAND_INS = set(
    re.findall(r"^def (\w+)", (TESTS / "stand_ins.py").read_text("utf-8"), re.MULTILINE)
)

# The count of each kind that is wanted in the end. "engine" is the package without its workshop,
# `lab`. Statements have the allowance that was planned for records with names, base classes and
# hooks (1,430 and 350), on top of what the engine and the lab had before: 17,968 and 6,549, and 450
# for features as classes and what puts them together; 570 for GGUF files. The simulator was given
# 1,400 and has 2,800: its engine, which makes steps at once, 710; fleets, links and routers 540;
# costs 370; inputs, reports, sweeps and command 780; replays 230; what is measured here 200. 510
# are for devices that sleep, and 150 for what traces record for replays; 270 for KV tiers, for
# what a router asks for, and for queueing times; 90 for the smallest Triton backend,
# from which lecture 15 grows; 180 for replays by time; 60 for the request
# rows and the methods from which lectures 17 to 20 begin; 80 for a calibration without a
# trace whose requests arrive while others decode (and 140 in the lab for the live loads that check
# it); 140 in the lab for which lines of a cell are new, and for lectures as web pages; 70 for a
# simulator in fewer calls, and 170 for checks of the files of a model without pydantic; 20 for
# the hooks with which KV from elsewhere leaves the scheduler, and for a module of random
# checkpoints; 25 for the heads of three modules that lectures 24 and 26 read and do not build; 45
# for simulated fleets that are several things at once; in the lab 120 for stills of single steps,
# 250 for a timeline per rank, 120 for a check of workbooks that answers within five seconds, 320
# for the ladder of engines, 750 for the reader's own engine, which grows with the lectures, and 520
# for workloads to beat with it, of fifteen lectures, each with a file for the reader and a count;
# 30 for the heads of three modules that lecture 91 reads and does not build; 100 for simulated
# steps that are made in one call until the memory is used up, and for output whose reader has left;
# 1,000 in the lab for labs in the browser: what collects the archive 140, what runs the reader's
# code 120 and tests 75, engines, scenes and scores 480, pages and packages 180; 250 in the lab for
# the site's other pages, and 170 for the traces and predictions that lectures store, and that pages
# play and ask; 180 for what labs draw and measure beside the engine's rule: lanes, host and device,
# and the engine's own lock-step; 30 for steps that fail and for what a contest draws; 40 for what
# pages of lectures leave out; 83 for the site's search over sections, and for answers that were
# simulated; 34 for `nanovllm docs`; 8 for checks of plans in flight; 56 for simulated copies of
# swapped blocks, counts of drafts, reasons of rejections, and flags that would have no effect; 607
# for simulated engines: settings per role 210, sweeps of parts of a setting 60, bottlenecks other
# than the device 70, transfers and failures in Perfetto 120, printed sources 60, layouts and links
# of calibrated machines 87; 53 for a router that weighs what its servers report; 24 for /docs
# without a network, and for hints at routes; 23 in the lab for stages that are measured without the
# rest of their engine; 46 for simulated machines whose devices have a link to each other one,
# models of like matrices, and `--list` of one name; 77 for the slowest stage of a measured or
# simulated pipeline; 64 for bad input, short contexts and interruptions; 74 for tables that show
# lost requests, cut answers and failures without effect; 43 for dropped steps of simulated engines
# that fail, for names of models in any case, and for hints; 41 for the engines of sweeps, and for
# settings of traces that differ; 35 for the memory of simulated engines: activations of their
# largest step, and what libraries hold; 26 for files without an end or that can be read once, and
# for simulated steps that were dropped; 47 for loads that a fleet sustains, and for measurements
# that other programs disturb; 50 for simulated machines from files, whose fields are checked one by
# one; 59 for settings from traces, and for queues that grow; 23 for a simulator in fewer
# instructions. A new feature brings its own number.
# `nanovllm/core/` counts in the engine, too.
BOUNDS = {
    "Any, engine": 120,
    "JsonObject, engine": 90,  # an `Any` for each value: both together should be at most 120
    "calls with a splatted tuple or six positions": 10,
    "comments behind closing brackets": 0,
    "fmt: skip": 0,
    "functions over 60 lines": 0,
    "getattr with a default, hasattr": 10,
    "modules over 500 lines": 0,
    "monkeypatches in tests": 108,
    "nested conditional expressions": 0,
    "private names in tests": 135,
    "stand-ins in tests": 0,
    "statements, core": 1_608,
    "statements, engine": 27_105,
    "statements, lab": 11_280,
    "tuple assignments of unrelated values": 60,
    "tuples of four and more results": 0,
    "wide lines in lectures": 0,
}


@dataclass(frozen=True)
class Place:
    """Where something was found.

    Attributes:
        path: below the root.
        line: its number; in a lecture that of the cell.
        text: the code, shortened.
    """

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text[:100]}"


@functools.cache
def places() -> dict[str, list[Place]]:
    """All places of each kind in the package, in the tests and in the lectures."""
    found: dict[str, list[Place]] = {kind: [] for kind in BOUNDS}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        for kind, line, text in _in_module(path, file.read_text(encoding="utf-8")):
            found[kind].append(Place(path, line, text))
    for file in sorted(TESTS.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        for kind, line, text in _in_tests(file.read_text(encoding="utf-8")):
            found[kind].append(Place(path, line, text))
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        path = file.relative_to(ROOT).as_posix()
        for number, text in _wide_lines(json.loads(file.read_text(encoding="utf-8"))):
            found["wide lines in lectures"].append(Place(path, number, text))
    return found


def counts() -> dict[str, int]:
    """The number of places of each kind."""
    return {kind: len(found) for kind, found in places().items()}


def ceilings() -> dict[str, int]:
    """The stored counts, which may only fall."""
    return json.loads(CEILINGS.read_text(encoding="utf-8"))


def _wide_lines(notebook: dict[str, list[dict[str, object]]]) -> Iterator[tuple[int, str]]:
    """Lines of code that are too wide, with the numbers of their cells. A directive may be wide."""
    for number, cell in enumerate(notebook["cells"], start=1):
        source = cell["source"]
        assert isinstance(source, list)
        for line in "".join(source).split("\n"):
            is_code = cell["cell_type"] == "code" and not line.startswith("#|")
            # As in ruff, comments for tools do not count.
            if is_code and len(re.sub(r"\s*# (type: ignore|noqa).*", "", line)) > WIDTH:
                yield number, line


def _in_module(path: str, source: str) -> Iterator[tuple[str, int, str]]:
    """The kind, line and code of each find in a module."""
    lines = source.split("\n")
    is_lab = path.startswith("nanovllm/lab/")
    if len(lines) > LONGEST_MODULE:
        yield "modules over 500 lines", len(lines), path
    for number, line in enumerate(lines, start=1):
        if re.search(r"# fmt: (skip|off)", line):
            yield "fmt: skip", number, line
        if re.match(r"\s*[])}][^#]*\s# (?!type: ignore|noqa)", line):
            # The comment is about what stands above; a formatter pushed it there.
            yield "comments behind closing brackets", number, line
    tree = ast.parse(source)
    passed_over = _platform_probes(tree) | _calls_in_kernels(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            yield f"statements, {'lab' if is_lab else 'engine'}", node.lineno, ""
            if path.startswith("nanovllm/core/"):
                yield "statements, core", node.lineno, ""
        if isinstance(node, ast.Name) and node.id in ("Any", "JsonObject") and not is_lab:
            yield f"{node.id}, engine", node.lineno, lines[node.lineno - 1].strip()
        kind = _kind_of(node)
        if kind is not None and node not in passed_over:
            yield kind, node.lineno, ast.unparse(node).split("\n")[0]  # type: ignore[attr-defined]


def _in_tests(source: str) -> Iterator[tuple[str, int, str]]:
    """The kind, line and code of each find in a module of tests: what breaks when a class is
    rewritten that behaves as before."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=owner, attr=name) if _is_private(name):
                is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                if not is_own:
                    yield "private names in tests", node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id=name)) if name in STAND_INS:
                yield "stand-ins in tests", node.lineno, ast.unparse(node).split("\n")[0]
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr")):
                yield "monkeypatches in tests", node.lineno, ast.unparse(node).split("\n")[0]


def _is_private(name: str) -> bool:
    is_protocol = name.endswith("_")  # `__len__`, and `_repr_html_` of notebooks
    return name.startswith("_") and not is_protocol and name not in PUBLIC_NAMES


def _platform_probes(tree: ast.Module) -> set[ast.AST]:
    """Calls whose first argument is a module of the platform, or in such a module."""
    modules = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] in PLATFORM_PACKAGES | sys.stdlib_module_names
    }
    return {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and ast.unparse(node.args[0]).split(".")[0] in modules
    }


def _is_kernel(node: ast.AST) -> bool:
    """Whether a node defines a function that Triton compiles."""
    return isinstance(node, ast.FunctionDef) and any(
        "triton.jit" in ast.unparse(each) for each in node.decorator_list
    )


def _calls_in_kernels(tree: ast.Module) -> set[ast.AST]:
    """Calls in functions that Triton compiles."""
    kernels = [node for node in ast.walk(tree) if _is_kernel(node)]
    return {node for kernel in kernels for node in ast.walk(kernel) if isinstance(node, ast.Call)}


@functools.cache
def _variadic() -> set[str]:
    """Names of functions that take any number of arguments, in the package and outside."""
    return VARIADIC | {
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.args.vararg
        and len(node.args.posonlyargs + node.args.args) < MANY_POSITIONS
    }


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _kind_of(node: ast.AST) -> str | None:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            is_swap = {ast.unparse(each) for each in targets} & {
                ast.unparse(each) for each in values
            }
            return None if is_swap else "tuple assignments of unrelated values"
        case ast.Call():
            return _kind_of_call(node)
        case ast.IfExp() if any(isinstance(part, ast.IfExp) for part in ast.iter_child_nodes(node)):
            return "nested conditional expressions"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            # To split a kernel of Triton's would change the code that is compiled.
            return None if _is_kernel(node) else _kind_of_function(node)
        case _:
            return None


def _kind_of_call(call: ast.Call) -> str | None:
    name = ast.unparse(call.func)
    if name == "hasattr" or (name == "getattr" and len(call.args) == 3):
        return "getattr with a default, hasattr"
    has_tuple = any(isinstance(argument, ast.Starred) for argument in call.args)
    is_class = isinstance(call.func, ast.Name) and call.func.id[:1].isupper()
    # A kernel of Triton's is called through a grid, with pointers and strides in the order of its
    # own.
    is_kernel = isinstance(call.func, ast.Subscript)
    is_variadic = name.split(".")[-1] in _variadic()
    is_long = len(call.args) >= MANY_POSITIONS and not is_kernel and not is_variadic
    if (has_tuple and is_class) or is_long:
        return "calls with a splatted tuple or six positions"
    return None


def _kind_of_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    assert function.end_lineno is not None
    if function.end_lineno - function.lineno > LONGEST_FUNCTION:
        return "functions over 60 lines"
    returned = function.returns
    if not isinstance(returned, ast.Subscript) or ast.unparse(returned.value) != "tuple":
        return None
    results = returned.slice.elts if isinstance(returned.slice, ast.Tuple) else []
    return "tuples of four and more results" if len(results) >= MANY_RESULTS else None


def main() -> None:
    """Print the counts or the places of a kind, or store the counts."""
    match sys.argv[1:]:
        case ["--store"]:
            lower = {
                kind: min(count, ceilings().get(kind, count)) for kind, count in counts().items()
            }
            CEILINGS.write_text(json.dumps(lower, indent=1) + "\n", encoding="utf-8")
        case [kind]:
            for place in places()[kind]:
                print(place)
        case _:
            for kind, count in counts().items():
                print(f"{count:6,}  at most {max(ceilings()[kind], BOUNDS[kind]):6,}  {kind}")


if __name__ == "__main__":
    main()
