"""The project's files agree with each other."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nanovllm.assembly.flags import Parser
from nanovllm.cli import doors
from nanovllm.lab.course.blanks import Course
from nanovllm.server.access import ready_message
from tests import english

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_within_its_range() -> None:
    pins = {canonical(name): version for name, version in PINS.items()}
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in (Requirement(text) for texts in lists for text in texts):
        if requirement.name == PROJECT["name"]:
            continue
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), requirement
    # PyPI's torch for Linux asks for exactly one version of Triton; the build for CPUs asks for
    # none, so only this test notices.
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


def extras_of(name: str) -> set[str]:
    """An extra, and those that it asks for by the project's own name."""
    requirements = [Requirement(text) for text in PROJECT["optional-dependencies"][name]]
    asked = {
        extra for each in requirements if each.name == PROJECT["name"] for extra in each.extras
    }
    return {name}.union(*map(extras_of, asked))


def distributions(extras: Iterable[str]) -> set[str]:
    """The distributions that the project and these extras ask for by name."""
    lists = [
        PROJECT["dependencies"],
        *(PROJECT["optional-dependencies"][extra] for extra in extras),
    ]
    return {canonical(Requirement(text).name) for texts in lists for text in texts}


def imported(source: str) -> set[str]:
    """The top-level modules that a text of Python imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def cells_of(lecture: pathlib.Path) -> Iterator[str]:
    """The code cells of a lecture, without the lines that are IPython's."""
    for cell in json.loads(lecture.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            yield "\n".join("pass" if line[:1] in ("%", "!") else line for line in lines)


# What each part of the project may import beside the engine's dependencies: extras, and programs
# with environments of their own.
OPTIONAL = ["mooncake", "nixl", "ray", "redis", "sentencepiece"]
PEERS = {"llama_cpp", "vllm"}


@pytest.mark.parametrize(
    ("files", "extras", "others"),
    [
        (
            ["nanovllm/*.py", "nanovllm/[!l]*/**/*.py", "nanovllm/la[!b]*/**/*.py"],
            OPTIONAL,
            {"_typeshed"},  # only mypy reads it, which brings it
        ),
        (["nanovllm/lab/**/*.py"], [*OPTIONAL, "course", "site"], PEERS),
        (["notebooks/*.ipynb", "notebooks/[!c]*.py"], ["course"], set()),
    ],
    ids=["engine", "lab", "lectures"],
)
def test_every_import_is_declared(files: list[str], extras: list[str], others: set[str]) -> None:
    """`make serve` installs the dependencies only, and `make lab` those of the course."""
    paths = [path for pattern in files for path in ROOT.glob(pattern)]
    assert len(paths) > 20
    texts = [
        text
        for path in paths
        for text in (cells_of(path) if path.suffix == ".ipynb" else [path.read_text("utf-8")])
    ]
    own = {"nanovllm", *(path.stem for path in (ROOT / "notebooks").glob("*.py"))}
    foreign = set().union(*map(imported, texts)) - set(sys.stdlib_module_names) - own - others
    provided_by = importlib.metadata.packages_distributions()
    declared = distributions(extras)
    assert {
        name
        for name in foreign
        # What is not installed here is known by its own name.
        if not {canonical(each) for each in provided_by.get(name, [name])} & declared
    } == set()


def judges() -> set[pathlib.Path]:
    """The tests that `course check` runs on what readers write, and what they import of others."""
    found: set[pathlib.Path] = set()
    named = {
        test.partition("::")[0] for blank in Course(ROOT).blanks.values() for test in blank.tests
    }
    todo = [ROOT / "tests/conftest.py", *(ROOT / name for name in named)]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                todo.append((ROOT / str(node.module).replace(".", "/")).with_suffix(".py"))
    return found


def test_a_reader_who_checks_has_what_the_tests_import() -> None:
    """`make lab` installs no more than the course's extra."""
    paths = judges()
    assert len(paths) > 20
    foreign = set().union(*(imported(path.read_text("utf-8")) for path in paths))
    foreign -= {*sys.stdlib_module_names, "nanovllm", "tests"}
    provided_by = importlib.metadata.packages_distributions()
    declared = distributions(["course"])
    assert {
        name
        for name in foreign
        if not {canonical(each) for each in provided_by.get(name, [name])} & declared
    } == set()
    # Plugins whose options are in pytest's settings.
    assert {"pytest-timeout", "pytest-xdist"} <= declared


def test_environment_yml_agrees_with_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    (python,) = [text for text in conda if text.startswith("python")]
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])
    options = dict(text.split(" ", 1) for text in pip["pip"])
    assert (ROOT / options["-c"]).exists()
    where, extras = re.fullmatch(r"(.*)\[(.*)\]", options["-e"]).groups()
    assert where == "." and set().union(*map(extras_of, extras.split(","))) == set(
        PROJECT["optional-dependencies"]
    )


@pytest.mark.started
def test_the_scheduler_knows_no_tensor() -> None:
    code = (
        "import sys, nanovllm.core.scheduler, nanovllm.trace.trace, nanovllm.text.processor; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


READMES = sorted(
    path for pattern in ("*.md", "[!.]*/*.md", "nanovllm/*/*.md") for path in ROOT.glob(pattern)
)


def headings_of(page: pathlib.Path) -> set[str]:
    """The headings of a page, as links name them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in lines
        if line[:1] == "#"
    }


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(readme: pathlib.Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", readme.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, heading = link.partition("#")
        target = readme.parent / path if path else readme
        assert target.exists(), link
        assert not heading or target.suffix != ".md" or heading in headings_of(target), link


def test_readme_is_read_in_three_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    assert sum(any(map(str.isalnum, word)) for word in text.split()) <= 700


# ---------------------------------------------------------------- commands in READMEs

WITH_COMMANDS = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "nanovllm/README.md",
    "nanovllm/lab/README.md",
    "tests/README.md",
]


def commands_of(readme: str) -> list[list[str]]:
    """The commands in a README's indented blocks and in its inline code, as words."""
    text = (ROOT / readme).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(
        r"^ {4}(\S.*)$",
        re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    lines += [
        code
        for code in re.findall(r"`([^`\n]+)`", text)
        if re.match(r"(make|nanovllm|python|pip) \S", code)
    ]
    lines = [re.sub(r" {2,}# .*", "", line) for line in lines]
    # A quotation mark may be closed on a later line, as in a long body of a request: such a command
    # is not checked.
    return [shlex.split(line) for line in lines if line.count("'") % 2 == 0]


@pytest.mark.parametrize("readme", WITH_COMMANDS)
def test_commands_in_readmes_are_there(readme: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands_of(readme):
        while "=" in words[0]:  # a variable of the environment
            words = words[1:]
        program, *arguments = words
        if program == "make":
            unknown = {word for word in arguments if "=" not in word} - targets
            assert not unknown, f"the Makefile has no target {unknown}"
        elif program == "nanovllm":
            assert arguments[0] in doors.COMMANDS, words
            if not arguments[1:] or "--help" in arguments:
                continue  # the name of a command, which may need arguments
            parser = Parser(prog=f"nanovllm {arguments[0]}")
            doors.load_command(arguments[0]).add_arguments(parser)
            parser.parse_args(arguments[1:])  # ends this test if it does not understand a word
        elif program.startswith("python"):
            assert arguments[0] == "-m" and importlib.util.find_spec(arguments[1]), words
        elif program == "pip" and "-e" in arguments:
            options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
            extras = re.fullmatch(r"\.\[(.*)\]", options["-e"])[1].split(",")  # type: ignore[index]
            assert (ROOT / options["-c"]).exists() and set(extras) <= set(
                PROJECT["optional-dependencies"]
            )
        elif program == "curl":
            assert arguments[0] == "http://127.0.0.1:8000/v1/chat/completions"
        else:
            assert program in (".", "jupytext", "pip"), f"an unknown program: {words}"


def test_readme_asks_what_the_server_suggests() -> None:
    """`tests/server/test_server.py` sends the line that the server prints, and checks the
    answer."""
    [readme] = [words for words in commands_of("README.md") if words[0] == "curl"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        message = ready_message(listener, "smollm2-135m", [])
        port = listener.getsockname()[1]
    printed = shlex.split(
        message[message.index("  curl ") :].replace(f":{port}/", ":8000/").replace("\\\n", "")
    )
    assert readme == printed, "README.md and nanovllm/server/access.py print the same curl command"


def test_no_phrase_occurs_more_often_than_stored() -> None:
    """`python -m tests.english FILE` lists the occurrences in a file, with the preferred
    wording."""
    complaints = english.complaints(english.all_hits(), english.stored_counts())
    assert not complaints, "\n".join(complaints)


# ---------------------------------------------------------------- figures in README


def ratios(path: pathlib.Path) -> dict[str, list[float]]:
    """The ratios in a page's tables, by the engine that nanovllm is compared with. A cell may list
    its pairs behind a ratio."""
    found: dict[str, list[float]] = {"vLLM": [], "llama.cpp": []}
    header: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        for title, cell in zip(header, cells, strict=False):
            is_ratio = re.match(r"(ratio|to) ?", title) and re.match(r"\d+\.\d+", cell)
            if is_ratio:
                found["llama.cpp" if "llama.cpp" in title else "vLLM"].append(
                    float(cell.split()[0])
                )
    return found


@pytest.mark.parametrize("engine", ["vLLM", "llama.cpp"])
def test_readme_shows_the_weakest_ratio(engine: str) -> None:
    shown, measured = (ratios(ROOT / name)[engine] for name in ("README.md", "figures/cpu.md"))
    assert len(shown) >= 6 and len(measured) >= 20
    assert set(shown) <= {*measured, *(float(f"{ratio:.3g}") for ratio in measured)}, (
        "measured, and not rounded up"
    )
    assert min(shown) == min(measured)


def test_the_paths_of_make_quick_exist() -> None:
    # Without what a make that runs these tests tells its children.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", "quick"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    [command] = [line for line in printed.stdout.splitlines() if "not slow and not nightly" in line]
    paths = [word for word in command.split() if word.startswith("tests/")]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
