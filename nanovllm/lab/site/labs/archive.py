"""The Python that runs in a browser: the scheduler half of the engine, the simulator and tests.

As in the core, modules may import nothing but the standard library, msgspec, and modules that
do the same."""

from __future__ import annotations

import ast
import importlib.util
import sys
import zipfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[4]
# `judge.py` stands in for pytest.
ALLOWED = {"msgspec", *sys.stdlib_module_names}
ALLOWED_IN_TESTS = {*ALLOWED, "pytest"}
OURS = ("nanovllm", "tests")


class ArchiveError(Exception):
    """A module cannot run in a browser."""


def write_archive(path: Path, roots: Collection[str], data: Iterable[str]) -> dict[str, str]:
    """Write a zip of the modules that `roots` need; returns their sources by path.

    Args:
        roots: modules; or `module:member`, of a module that is cut down to what its named members
            need. Modules of `tests` are cut down to what is imported from them.
        data: paths of other files.

    Raises:
        ArchiveError: a module needs anything else, or is missing.
    """
    sources = _Collector(roots).sources
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted({**sources, **{d: _read(ROOT / d) for d in data}}.items()):
            # A fixed date: equal files make an equal archive.
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return sources


class _Collector:
    """Follows imports, from roots.

    Attributes:
        sources: of each module that is needed, by path.
    """

    def __init__(self, roots: Collection[str]) -> None:
        self.sources: dict[str, str] = {}
        self._members: dict[str, set[str]] = {}  # of modules that are cut; whole ones have none
        self._cut = {root.partition(":")[0] for root in roots if ":" in root}
        self._queue = [(root, "the list of labs") for root in roots]
        while self._queue:
            self._add(*self._queue.pop())

    def _add(self, name: str, user: str) -> None:
        module, _, member = name.partition(":")
        parts = module.split(".")
        if parts[0] not in OURS:
            allowed = ALLOWED_IN_TESTS if user.startswith("tests") else ALLOWED
            if parts[0] not in allowed:
                raise ArchiveError(
                    f"{user} imports {parts[0]}: in a browser there is only the standard library "
                    "and msgspec"
                )
            return
        for end in range(1, len(parts)):
            self._add(".".join(parts[:end]), user)
        path = module_path(module)
        if path is None:
            raise ArchiveError(f"{user} needs {module}, which does not exist")
        place = str(path.relative_to(ROOT))
        members = self._members.setdefault(module, set())
        if place in self.sources and (member in members or not members):
            return
        text = _read(path)
        tree = ast.parse(text)
        if member:
            members.add(member)
            tree = cut(tree, members, place)
            text = ast.unparse(tree)
        else:
            members.clear()
            if path.name == "__init__.py" and parts[:2] == ["nanovllm", "lab"]:
                # It collects the names of its package, some of which need matplotlib.
                tree.body = tree.body[:1]
                text = ast.unparse(tree)
        self.sources[place] = text
        self._queue += [(needed, place) for needed in imports(tree, module, self._cut)]


def module_path(module: str) -> Path | None:
    """Return the file of a module or package of ours; None if there is none."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((each for each in candidates if each.exists()), None)


def imports(tree: ast.Module, module: str, cut: Collection[str]) -> Iterator[str]:
    """Yield what a module imports when it is imported itself, as `write_archive` names it.

    Args:
        cut: modules of which members are imported one by one, besides those of tests.
    """
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            path = module_path(module)
            is_package = path is not None and path.name == "__init__.py"
            package = module if is_package else module.rpartition(".")[0]
            dots = "." * node.level
            base = importlib.util.resolve_name(dots + (node.module or ""), package)
            for alias in node.names:
                ours = base.split(".")[0] in OURS
                if ours and module_path(f"{base}.{alias.name}"):
                    yield f"{base}.{alias.name}"
                else:
                    is_cut = base.startswith("tests.") or base in cut
                    yield f"{base}:{alias.name}" if is_cut else base


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that an import executes, without those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(
                node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node.body
            )
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            yield from _statements(node.body)


def cut(tree: ast.Module, members: Iterable[str], place: str) -> ast.Module:
    """Return a module with the named members, and what they use.

    Raises:
        ArchiveError: there is no such member.
    """
    owners: dict[str, ast.stmt] = {}
    for node in tree.body:
        for name in _names_bound(node):
            owners[name] = node
    kept: set[ast.stmt] = set()
    used: set[str] = set()
    wanted = list(members)
    if missing := [name for name in wanted if name not in owners]:
        raise ArchiveError(f"{place} has no {missing[0]}")
    while wanted:
        owner = owners.get(wanted.pop())
        if owner is not None and owner not in kept:
            kept.add(owner)
            used |= _names_used(owner)
            wanted += _names_used(owner)
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            body.append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            left = [a for a in node.names if (a.asname or a.name.split(".")[0]) in used]
            if left:
                node.names = left
                body.append(node)
        elif node in kept:
            body.append(node)
    return ast.Module(body, [])


def _names_used(node: ast.stmt) -> set[str]:
    """Return the names of the module that a statement reads: not those of its own variables."""
    used: set[str] = set()
    own: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            (used if isinstance(each.ctx, ast.Load) else own).add(each.id)
        elif isinstance(each, ast.arg):
            own.add(each.arg)
    return used - own if isinstance(node, ast.FunctionDef) else used


def _names_bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [
        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
    ]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
