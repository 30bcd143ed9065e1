"""The project's files agree with each other."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), requirement
    # PyPI's torch for Linux asks for exactly one version of Triton; the build for CPUs asks for none, so only this test notices.
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


def test_environment_yml_agrees_with_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    (python,) = [text for text in conda if text.startswith("python")]
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])
    options = dict(text.split(" ", 1) for text in pip["pip"])
    assert (ROOT / options["-c"]).exists()
    where, extras = re.fullmatch(r"(.*)\[(.*)\]", options["-e"]).groups()
    assert where == "." and set(extras.split(",")) == set(PROJECT["optional-dependencies"])


@pytest.mark.started
def test_the_scheduler_knows_no_tensor() -> None:
    code = "import sys, nanovllm.scheduler.scheduler, nanovllm.trace.trace, nanovllm.text.processor; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


READMES = sorted(path for pattern in ("*.md", "[!.]*/*.md", "nanovllm/*/*.md") for path in ROOT.glob(pattern))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(readme: pathlib.Path) -> None:
    text = readme.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in text.splitlines()
        if line[:1] == "#"
    }
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif not link.startswith("http"):
            assert (readme.parent / link.partition("#")[0]).exists(), link


def test_readme_is_read_in_three_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert sum(any(map(str.isalnum, word)) for word in text.split()) <= 1200


def test_no_phrase_occurs_more_often_than_stored() -> None:
    """`python -m tests.english FILE` lists the occurrences in a file, with the preferred wording."""
    complaints = english.complaints(english.all_hits(), english.stored_counts())
    assert not complaints, "\n".join(complaints)
