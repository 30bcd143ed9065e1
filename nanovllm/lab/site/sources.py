"""The source as pages: a page per module, highlighted and with an anchor per line, and a page per
folder. Links of lectures and READMEs lead to them."""

from __future__ import annotations

import ast
import contextlib
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pygments
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.osutil import relative_uri

from nanovllm.lab.course.build import builder, find_root
from nanovllm.lab.site.labs.packages import KEPT

ROOT = find_root(Path(__file__))
PACKAGE = "nanovllm"
SUFFIXES = {".cpp", ".css", ".h", ".js", ".py", ".toml"}
Page = tuple[str, dict[str, Any]]


class SourceLinks(SphinxPostTransform):
    """Leads links to files and folders of the repository to their pages."""

    default_priority = 5  # before MyST's resolver, which knows only pages of Sphinx's
    formats = ("html",)

    def run(self, **options: Any) -> None:
        """Replace the links of a page."""
        for link in [*self.document.findall(pending_xref)]:
            if link.get("reftype") == "myst" and link.get("refdomain") is None:
                self._resolve(link)
            elif link.get("reftargetid"):
                self._find_heading(link)

    def _resolve(self, link: pending_xref) -> None:
        target, _, anchor = link["reftarget"].partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(link["refdoc"]), target))
        path = ROOT / name
        if not target or name.startswith("..") or not path.exists():
            return  # MyST's resolver complains
        page = f"{name}/README"
        if page not in self.env.found_docs:
            self.env.linked_sources.add(name)  # type: ignore[attr-defined]
            page = f"{name}/index" if path.is_dir() else name
        uri = relative_uri(f"{link['refdoc']}.html", f"{page}.html")
        uri = f"{uri}#{anchor}" if anchor else uri
        link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))

    def _find_heading(self, link: pending_xref) -> None:
        """JupyterLab names headings as they are written, MyST in small letters."""
        headings = self.env.metadata[link["reftarget"]].get("myst_slugs", {})
        if link["reftargetid"] not in headings:
            link["reftargetid"] = link["reftargetid"].lower()


def write_pages(app: Sphinx, failure: Exception | None) -> None:
    """Write a page per module and folder of the package, and per file and folder that pages link
    to. Sphinx's own way to add pages would draw the sidebar of each, which takes a minute."""
    if failure:
        return
    linked = {ROOT / name for name in app.env.linked_sources}  # type: ignore[attr-defined]
    files = {path for path in (ROOT / PACKAGE).rglob("*") if path.suffix in SUFFIXES}
    files |= {path for path in linked if path.is_file()}
    folders = {path for path in linked if path.is_dir()}
    files |= {path for each in folders for path in each.iterdir() if path.suffix in SUFFIXES}
    folders |= {parent for path in files for parent in path.parents if parent.is_relative_to(ROOT)}
    folders -= {ROOT}
    with _highlighted() as code:
        pages = [_file_page(path, code) for path in files]
    pages += [_folder_page(folder, files, folders, app.env.found_docs) for folder in folders]
    for name, context in pages:
        context |= {"pathto": partial(_path_to, name), "crumbs": context["title"].split("/")}
        if base := app.config.html_baseurl:
            context["pageurl"] = f"{base.rstrip('/')}/{name}.html"
        path = Path(app.outdir) / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(app.builder.templates.render("source.html", context), encoding="utf-8")


def _path_to(page: str, target: str, resource: bool = False) -> str:
    """As Sphinx's function for templates."""
    return relative_uri(f"{page}.html", target if resource else f"{target}.html")


@contextlib.contextmanager
def _highlighted() -> Iterator[Callable[[str, Lexer], str]]:
    """Return a function like `_code`, which keeps the code of unchanged files for the next build:
    highlighting all takes a quarter of a build's time."""
    file = KEPT / "highlighted.json"
    known: dict[str, str] = json.loads(file.read_bytes()) if file.exists() else {}
    used: dict[str, str] = {}

    def code(text: str, lexer: Lexer) -> str:
        key = sha256(f"{pygments.__version__} {lexer.name}\n{text}".encode()).hexdigest()
        used[key] = known.get(key) or _code(text, lexer)
        return used[key]

    yield code
    if used != known:
        file.write_text(json.dumps(used), encoding="utf-8")


def _file_page(path: Path, code: Callable[[str, Lexer], str]) -> Page:
    """A page of a file: its name is the file's."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    built = (path.suffix == ".py" and builder(text)) or ""
    lectures = re.findall(r"notebooks/\w+(?=\.ipynb)", built)
    return name, {"title": name, "code": code(text, _lexer(path)), "lectures": lectures}


def _code(text: str, lexer: Lexer) -> str:
    """Highlight a file's lines, each with its number as an anchor."""
    lines = highlight(text, lexer, HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")
    return "\n".join(
        f'<span id="L{number}"><a href="#L{number}">{number}</a>{line}</span>'
        for number, line in enumerate(lines, start=1)
    )


def _lexer(path: Path) -> Lexer:
    try:
        return get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        return TextLexer(stripnl=False)


def _folder_page(folder: Path, files: set[Path], folders: set[Path], docs: set[str]) -> Page:
    """A page of a folder, which lists what has pages."""
    name = folder.relative_to(ROOT).as_posix()
    inside = [
        (f"{path.name}/", f"{name}/{path.name}/index", _about(path / "__init__.py"))
        for path in sorted(folders)
        if path.parent == folder
    ]
    inside += [
        (path.name, f"{name}/{path.name}", _about(path))
        for path in sorted(files)
        if path.parent == folder
    ]
    readme = f"{name}/README" if f"{name}/README" in docs else None
    return f"{name}/index", {"title": name, "files": inside, "readme": readme}


def _about(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    if path.suffix != ".py" or not path.exists():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def begin(app: Sphinx) -> None:
    """Start a list of the files that pages link to."""
    app.env.linked_sources = set()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.add_post_transform(SourceLinks)
    app.connect("builder-inited", begin)
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
