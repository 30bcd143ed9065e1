"""The plan of the house: its floors, the parts that peel off, sizes in lines of code, and the
reading path.

`python -m tests.house` prints the sizes of packages and parts, and brings the table of packages and
the reading path in nanovllm/README.md up to date."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize

from nanovllm.lab.course import stages

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"

# From the ground up.
ROOMS = [
    "data",
    "checkpoint",
    "ops",
    "processes",
    "distributed",
    "text",
    "layers",
    "attention",
    "models",
    "core",
    "features",
    "kv_transfer",
    "executor",
    "trace",
    "assembly",
    "engine",
    "offline",
    "server",
    "router",
    "simulate",
    "lab",
    "cli",
]

# What can be deleted, as patterns below the package: the rest still generates and serves.
PARTS = {name: patterns for name, (_, patterns) in stages.PARTS.items()}

# Packages of features that came after the first engine; `sizes` counts them apart.
LATER = "quantization, speculation and structured output"
LATER_PARTS = ["structured output", "quantization", "speculation"]
# What they need of the plain data, which cannot be deleted: sampling parameters name it.
LATER_FILES = ["data/structured_outputs.py", "data/spec_decoding.py"]

# The core in an afternoon.
READING_PATH = [
    "core/request",
    "core/schedule",
    "core/block_pool",
    "core/kv_cache_manager",
    "core/queues",
    "core/hooks",
    "core/scheduler",
    "attention/base",
    "attention/torch",
    "models/llama",
    "core/batch",
    "core/runner",
    "core/engine",
    "engine/llm",
]


def code_lines(text: str) -> int:
    """Lines of a module that hold code: no blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


@functools.cache
def module_lines() -> dict[str, int]:
    """Code lines of each module, by its path below the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {
        path.relative_to(PACKAGE).as_posix(): code_lines(path.read_text(encoding="utf-8"))
        for path in paths
    }


def files_of(part: str, package: pathlib.Path = PACKAGE) -> list[pathlib.Path]:
    """The files of a part, in a copy of the package that other parts may have left already."""
    found = {path for pattern in PARTS[part] for path in package.glob(pattern) if path.is_file()}
    return sorted(path for path in found if "__pycache__" not in path.parts)


def sizes() -> dict[str, int]:
    """Lines of code of the packages, of the parts that peel off, and of the engine as a whole."""
    modules = module_lines()
    found = {
        f"{room}/": sum(n for path, n in modules.items() if path.startswith(f"{room}/"))
        for room in ROOMS
    }
    peeled: set[str] = set()
    for part in sorted(PARTS, key=lambda part: part not in LATER_PARTS):
        # A file may belong to two, such as a Triton kernel of theirs.
        files = {
            path.relative_to(PACKAGE).as_posix() for path in files_of(part) if path.suffix == ".py"
        }
        found[f"part: {part}"] = sum(modules[path] for path in files - peeled)
        peeled |= files
    found[LATER] = sum(found[f"part: {part}"] for part in LATER_PARTS) + sum(
        modules[path] for path in LATER_FILES
    )
    found["the engine"] = sum(modules.values()) - found["lab/"] - found[LATER]
    found["the workshop"] = found["lab/"]
    found["the core that remains"] = sum(n for path, n in modules.items() if path not in peeled)
    return found


def first_sentence(room: str) -> str:
    """What a room is for: the first sentence of its docstring."""
    docstring = ast.get_docstring(
        ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    )
    assert docstring, f"nanovllm/{room}/__init__.py has no docstring"
    return " ".join(docstring.split("\n\n")[0].split())


def room_table() -> str:
    """The table of packages in nanovllm/README.md, from the top layer down, with their sizes in
    tens of lines of code."""
    found = sizes()
    rows = [
        f"| [`{room}/`]({room}) | {first_sentence(room).rstrip('.')} | "
        f"{round(found[f'{room}/'], -1):,} |"
        for room in reversed(ROOMS)
    ]
    return "\n".join(["| package | what it does | lines of code |", "| --- | --- | ---: |", *rows])


def reading_path() -> str:
    """The reading path in nanovllm/README.md: files in order, with their sizes in tens of lines of
    code."""
    modules = module_lines()
    return "\n".join(
        f"{number}. [`{name}.py`]({name}.py), {round(modules[f'{name}.py'], -1)} lines"
        for number, name in enumerate(READING_PATH, start=1)
    )


def up_to_date(readme: str) -> str:
    """The README of the package with its table of packages and its reading path as they should
    be."""
    for block in (room_table(), reading_path()):
        start = re.escape(re.match(r"[^\n]*?(?=,|$)", block, re.MULTILINE)[0])  # type: ignore[index]
        readme, count = re.subn(
            rf"^{start}.*?\n(?=\n|\Z)",
            lambda _, block=block: block + "\n",
            readme,
            flags=re.MULTILINE | re.DOTALL,
        )
        assert count == 1, f"README lacks the block that begins with {block.splitlines()[0]}"
    return readme


def main() -> None:
    for name, lines in sizes().items():
        print(f"{lines:7,}  {name}")
    path = PACKAGE / "README.md"
    path.write_text(up_to_date(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
