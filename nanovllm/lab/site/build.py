"""Builds the site: lectures, READMEs and glossary by Sphinx, the source as pages, and the landing
page."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from filelock import FileLock
from myst_parser.slugs import github_slugify
from sphinx.application import Sphinx
from sphinx.util.console import nocolor
from sphinx.util.docutils import docutils_namespace

from nanovllm.lab.site import labs, pages
from nanovllm.lab.site.labs.packages import KEPT, BuildError, npm
from nanovllm.lab.site.sources import ROOT
from nanovllm.lab.site.weights import BOUND, weights

HERE = Path(__file__).parent
# What Sphinx reads, and what it keeps for the next build.
WORK = KEPT
PATTERNS = ("*.md", "notebooks/*.md", "figures/*.md", "tests/README.md", "nanovllm/**/README.md")
PICTURES = ("figures/*.gif", "figures/*.png", "figures/*.svg")
MATHJAX = ("tex-chtml.js", "input/tex/extensions", "output/chtml/fonts/woff-v2")
UNUSED = ("*.map", "*macros.html", "fontawesome.js")  # files of the theme
MARKER = ".nojekyll"  # which GitHub Pages asks for
PARTS = {
    "Start": ["README", "notebooks/README", "notebooks/weekend", "notebooks/serving"],
    "The core": ["notebooks/00*", "notebooks/1*"],
    "Several processes": ["notebooks/2*"],
    "KV between engines": ["notebooks/3*"],
    "Speed": ["notebooks/4*"],
    "Fleets and servers": ["notebooks/5*", "notebooks/9*"],
    "Look up": ["notebooks/glossary", "nanovllm/README", "nanovllm/*"],
    "Figures": ["figures/README", "figures/*"],
    "Project": ["tests/README", "CONTRIBUTING", "SECURITY"],
}


class SiteError(BuildError):
    """The site cannot be built; the message names the remedy."""


def build(out: Path) -> None:
    """Write the site into a folder that is empty or holds an earlier one.

    Raises:
        SiteError: a lecture without outputs, a link to nothing, a heavy page, or a folder with
            something else.
        BuildError: a package from npm or PyPI is missing.
        ArchiveError: a lab needs a module that cannot run in a browser.
    """
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise SiteError(f"{out} holds something else than a site: name another folder with --out")
    mathjax = npm("mathjax") / "es5"
    WORK.mkdir(parents=True, exist_ok=True)
    with FileLock(WORK / "lock"):
        _build(out, mathjax)


def _build(out: Path, mathjax: Path) -> None:
    stage(WORK / "source")
    made = WORK / "html"
    shutil.rmtree(made, ignore_errors=True)
    run_sphinx(WORK / "source", made)
    for pattern in UNUSED:
        for path in (made / "_static").rglob(pattern):
            path.unlink()
    for name in MATHJAX:
        target = made / "_static/mathjax" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (mathjax / name).is_dir() else shutil.copyfile
        copy(mathjax / name, target)
    labs.build(made / "labs")
    if url := os.environ.get("SITE_URL"):
        write_sitemap(made, url)
    (made / MARKER).touch()
    if heavy := [page for page, size in weights(made).items() if size > BOUND]:
        raise SiteError(f"these pages weigh more than {BOUND:,} bytes: {', '.join(heavy)}")
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(made, out)


def write_sitemap(site: Path, url: str) -> None:
    """Tell search engines which pages there are, at the address where they will be."""
    base = url.rstrip("/")
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    listed = "".join(f"<url><loc>{base}/{quote(page)}</loc></url>\n" for page in pages)
    space = "http://www.sitemaps.org/schemas/sitemap/0.9"
    sitemap = (
        f'<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="{space}">\n{listed}</urlset>\n'
    )
    (site / "sitemap.xml").write_text(sitemap, encoding="utf-8")
    robots = f"User-agent: *\nAllow: /\nSitemap: {base}/sitemap.xml\n"
    (site / "robots.txt").write_text(robots, encoding="utf-8")


def stage(source: Path) -> None:
    """Fill a folder with the pages that Sphinx reads; unchanged files keep their time."""
    wanted = {source / path.relative_to(ROOT): path for path in _files(*PATTERNS, *PICTURES)}
    texts = {path: original.read_bytes() for path, original in wanted.items()}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for title, page in re.findall(r"\[([^\]]+)\]\((figures/\w+\.md)\)", readme):
        if not texts[source / page].startswith(b"# "):  # as `nanovllm bench` writes it
            texts[source / page] = f"# Measured: {title}\n\n".encode() + texts[source / page]
    for page in [path for path in texts if path.suffix == ".md"]:
        texts[page] = link_sections(texts[page].decode()).encode()
    for path in _files("notebooks/*.ipynb"):
        texts[source / path.relative_to(ROOT)] = json.dumps(lecture(path)).encode()
    texts[source / "contents.md"] = _contents([*texts], source).encode()
    for path in source.rglob("*"):
        if path.is_file() and path not in texts:
            path.unlink()
    for path, data in texts.items():
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def link_sections(text: str) -> str:
    """Lead links that name a section of a lecture to it: `[13](13_x.ipynb), “4.6 Title”` of the
    glossary, and `13_x.ipynb#4.6-Title`, as JupyterLab names it."""

    def named(link: re.Match[str]) -> str:
        anchor = _anchors(link[2])[link[3].replace(" ", "-")]
        return f"{link[1]}{link[2]}), [“{link[3]}”]({link[2]}#{anchor})"

    def written(link: re.Match[str]) -> str:
        anchor = unquote(link[2])
        return f"{link[1]}#{_anchors(link[1]).get(anchor, anchor)}"

    text = re.sub(r"((?:notebooks/)?\w+\.ipynb)#([^)\s]+)", written, text)
    return re.sub(r"(\[[^\]]+\]\()(\w+\.ipynb)\), “([^”]+)”", named, text)


@cache
def _anchors(lecture: str) -> dict[str, str]:
    """The headings of a lecture: JupyterLab's name of each -> MyST's."""
    path = ROOT / "notebooks" / Path(lecture).name
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    headings = [found for text in texts for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    names = [re.sub(r"[*`]", "", heading).strip() for heading in headings]
    return {name.replace(" ", "-"): github_slugify(name) for name in names}


def _files(*patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(ROOT.glob(pattern))


def lecture(path: Path) -> dict[str, Any]:
    """A lecture, with folds in myst-nb's words."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not any(cell.get("outputs") for cell in notebook["cells"]):
        name = f"notebooks/{path.name}"
        raise SiteError(f"{name} has no outputs: `make run LECTURES={name}` executes and saves it")
    notebook["cells"] = pages.join_folded(notebook["cells"])
    for cell in notebook["cells"]:
        pages.fold(cell)
        pages.leave_out(cell)
    return notebook


def _contents(staged: list[Path], source: Path) -> str:
    """The page of contents: Sphinx makes the sidebar of it, and the order of all pages."""
    texts = [path for path in staged if path.suffix in (".ipynb", ".md")]
    left = sorted(path.relative_to(source).with_suffix("").as_posix() for path in texts)
    lines = ["# Contents"]
    for title, patterns in PARTS.items():
        found = [name for pattern in patterns for name in left if fnmatch(name, pattern)]
        chosen = list(dict.fromkeys(found))
        left = [name for name in left if name not in chosen]
        lines += ["", "```{toctree}", f":caption: {title}", ":maxdepth: 1", "", *chosen, "```"]
    assert not left, f"pages without a place: {left}"
    return "\n".join(lines)


def run_sphinx(source: Path, out: Path) -> None:
    """Build all pages.

    Raises:
        SiteError: with Sphinx's warnings, such as links to nothing.
    """
    read = WORK / "doctrees"
    code = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py")))
    version = WORK / f"read_by_{sha256(code).hexdigest()[:16]}"
    if not version.exists():  # else Sphinx reads changed pages only
        shutil.rmtree(read, ignore_errors=True)
        for old in WORK.glob("read_by_*"):
            old.unlink()
    warnings = StringIO()
    nocolor()
    with docutils_namespace():
        app = Sphinx(source, HERE, out, read, "html", status=None, warning=warnings)
        app.build()
    if warnings.getvalue():
        lines = dict.fromkeys(warnings.getvalue().splitlines())
        raise SiteError("Sphinx found\n" + "\n".join(lines))
    version.touch()
