"""A check on the project's English: phrases to avoid, how often each occurs, and a stored number
that only falls.

`patterns.tsv` lists the phrases as regular expressions, each with the preferred wording and a
level. `counts.tsv` stores how often each occurs per kind of text; a change may not exceed it.
Phrases of level `error` must not occur at all in the texts of `REWRITTEN`.

    python -m tests.english             the number of occurrences of each phrase
    python -m tests.english FILE ...    every occurrence in these files
    python -m tests.english --check     exit with 1 if a count exceeds the stored one
    python -m tests.english --store     lower the stored counts to the present ones

`make lint` runs the check.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import io
import json
import pathlib
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
PATTERNS = pathlib.Path(__file__).with_name("patterns.tsv")
COUNTS = pathlib.Path(__file__).with_name("counts.tsv")

# The files that are read.
TEXTS = [
    "*.md",
    "figures/*.md",
    "notebooks/*.md",
    "notebooks/*.ipynb",
    "nanovllm/**/*.md",
    "nanovllm/**/*.py",
    "tests/**/*.md",
]

# Kinds of text in which no phrase of level `error` may occur.
REWRITTEN = {"markdown", "messages"}

# Calls whose strings users read, besides `raise`, and the arguments that hold such strings.
REPORTING_CALLS = {"error", "exit", "info", "warning"}
REPORTING_ARGUMENTS = {"help", "description", "epilog"}
# Variables that hold a part of a message before it is raised.
MESSAGE_VARIABLES = {"mistake", "message", "hint"}

Counts = collections.Counter[tuple[str, str]]  # by kind of text and pattern


@dataclasses.dataclass(frozen=True)
class Phrase:
    """A phrase to avoid.

    Attributes:
        pattern: Regular expression that finds it.
        preferred: What to write instead.
        level: "error" or "suggestion".
    """

    pattern: str
    preferred: str
    level: str


@dataclasses.dataclass(frozen=True)
class Passage:
    """A piece of text to check.

    Attributes:
        kind: "markdown", "lectures", "code" (docstrings and comments) or "messages" (help, errors
            and logs).
        place: Line number, or number of the notebook's cell.
        text: The text, without code.
    """

    kind: str
    place: str
    text: str


@dataclasses.dataclass(frozen=True)
class Hit:
    """An occurrence of a phrase."""

    path: str
    passage: Passage
    phrase: Phrase
    quote: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.passage.place}"
        return f"{where}: {self.phrase.level}: …{self.quote}… → {self.phrase.preferred}"


@functools.cache
def phrases() -> list[Phrase]:
    """Return the list of phrases."""
    rows = [line.split("\t") for line in PATTERNS.read_text(encoding="utf-8").splitlines()[1:]]
    return [Phrase(*row) for row in rows]


def without_code(text: str) -> str:
    """Replace code in backticks, and the addresses of links, by an ellipsis."""
    return re.sub(r"\]\([^)\s]+\)", "](…)", re.sub(r"`[^`\n]+`", "`…`", text))


def markdown_passages(text: str) -> Iterator[Passage]:
    """Yield each line outside code blocks."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield Passage("markdown", str(number), without_code(line))


def notebook_passages(text: str) -> Iterator[Passage]:
    """Yield each cell of prose."""
    for number, cell in enumerate(json.loads(text)["cells"]):
        if cell["cell_type"] == "markdown":
            prose = "".join(cell["source"]).replace("\n", " ")
            yield Passage("lectures", f"cell {number}", without_code(prose))


def literals(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the strings of an expression, f-strings as a whole."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    ):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from literals(child)


def text_of(literal: ast.expr) -> str:
    """Return a string's text, with an ellipsis for each value of an f-string."""
    if isinstance(literal, ast.JoinedStr):
        return "".join(text_of(part) for part in literal.values)
    return str(literal.value) if isinstance(literal, ast.Constant) else "…"


def message_roots(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the expressions whose strings are errors or help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.exc
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in REPORTING_CALLS:
                yield from node.args
            yield from (each.value for each in node.keywords if each.arg in REPORTING_ARGUMENTS)
        elif isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & MESSAGE_VARIABLES:
                yield node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in REPORTING_ARGUMENTS:
                    yield value


def module_passages(text: str) -> Iterator[Passage]:
    """Yield the docstrings, comments and messages of a module."""
    tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            prose = re.sub(r"\s+", " ", docstring)
            yield Passage("code", str(node.body[0].lineno), without_code(prose))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(
            r"#\s*(fmt|type:|noqa|---)", token.string
        ):
            yield Passage("code", str(token.start[0]), without_code(token.string.lstrip("# ")))
    messages = {id(each): each for root in message_roots(tree) for each in literals(root)}
    for literal in messages.values():
        yield Passage("messages", str(literal.lineno), without_code(text_of(literal)))


READERS = {".md": markdown_passages, ".ipynb": notebook_passages, ".py": module_passages}


def hits(path: pathlib.Path) -> list[Hit]:
    """Return the occurrences of all phrases in a file, in the order of its passages."""
    found = []
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
    for passage in READERS[path.suffix](path.read_text(encoding="utf-8")):
        for phrase in phrases():
            for match in re.finditer(phrase.pattern, passage.text):
                quote = passage.text[max(0, match.start() - 40) : match.end() + 40]
                found.append(Hit(name, passage, phrase, quote))
    return found


def all_hits() -> list[Hit]:
    """Return the occurrences in the whole project."""
    paths = sorted({path for pattern in TEXTS for path in ROOT.glob(pattern)})
    return [hit for path in paths for hit in hits(path)]


def count(found: Iterable[Hit]) -> Counts:
    """Count occurrences by kind of text and pattern."""
    return collections.Counter((hit.passage.kind, hit.phrase.pattern) for hit in found)


def stored_counts() -> Counts:
    """Read the stored counts."""
    rows = [line.split("\t") for line in COUNTS.read_text(encoding="utf-8").splitlines()[1:]]
    return collections.Counter({(kind, pattern): int(number) for kind, number, pattern in rows})


def write_counts(counts: Counts) -> None:
    """Store counts, one line per kind of text and pattern, so that changes merge line by line."""
    order = [phrase.pattern for phrase in phrases()]
    keys = sorted(+counts, key=lambda key: (key[0], order.index(key[1])))
    lines = [
        "kind\tcount\tpattern",
        *(f"{kind}\t{counts[kind, pattern]}\t{pattern}" for kind, pattern in keys),
    ]
    COUNTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def changed_files() -> set[str] | None:
    """Return the files that changed since the counts were stored; None if git cannot tell."""
    try:
        options = {"cwd": ROOT, "text": True, "stderr": subprocess.DEVNULL}
        stored = subprocess.check_output(
            ["git", "log", "-1", "--format=%H", "--", COUNTS.as_posix()], **options
        )
        changed = subprocess.check_output(
            ["git", "diff", "--name-only", *stored.split()], **options
        )
        new = subprocess.check_output(
            ["git", "ls-files", "--others", "--exclude-standard"], **options
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {*changed.splitlines(), *new.splitlines()}


def complaints(found: list[Hit], stored: Counts) -> list[str]:
    """Return what breaks the rules: phrases that occur more often than stored, and errors in
    rewritten texts."""
    lines = [
        f"{hit} (must not occur in {hit.passage.kind})"
        for hit in found
        if hit.phrase.level == "error" and hit.passage.kind in REWRITTEN
    ]
    now = count(found)
    risen = sorted(key for key in now if now[key] > stored[key])
    changed = changed_files() if risen else None
    for kind, pattern in risen:
        lines.append(
            f"{pattern}: {now[kind, pattern]} in {kind}, at most {stored[kind, pattern]}. Reword "
            "the new one:"
        )
        same = [hit for hit in found if (hit.passage.kind, hit.phrase.pattern) == (kind, pattern)]
        lines += [f"    {hit}" for hit in same if changed is None or hit.path in changed]
    return lines
