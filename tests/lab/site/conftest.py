"""The site, built once for all tests of its pages, and a browser that gets it without a server."""

from __future__ import annotations

import mimetypes
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from filelock import FileLock

SITE = "http://site.test/"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the pages. All workers of a run share it."""
    pytest.importorskip("sphinx", reason="there is no Sphinx: `make install` installs it")
    from nanovllm.lab.site.build import build
    from nanovllm.lab.site.labs.packages import BuildError, npm

    try:
        npm("axe-core")  # the last one of package.json
    except BuildError as error:
        pytest.skip(str(error))
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "_site"
    with FileLock(out.with_suffix(".lock")):
        if not (out / "index.html").exists():
            build(out)
    return out


@pytest.fixture
def visit(site: pathlib.Path, page: Any) -> Iterator[Any]:
    """A function that opens a page of the site by its path. A request to another host fails."""
    yield from visitor(site, page)


@pytest.fixture
def visit_without_scripts(site: pathlib.Path, browser: Any) -> Iterator[Any]:
    """The same in a browser without JavaScript."""
    context = browser.new_context(java_script_enabled=False)
    yield from visitor(site, context.new_page())
    context.close()


def visitor(site: pathlib.Path, page: Any) -> Iterator[Any]:
    foreign: list[str] = []

    def answer(route: Any) -> None:
        url = route.request.url
        path = url.removeprefix(SITE).partition("?")[0].partition("#")[0] or "index.html"
        if not url.startswith(SITE):
            foreign.append(url)
            route.abort()
        elif path == "favicon.ico":
            route.fulfill(status=204)
        elif (file := site / path).is_file():
            route.fulfill(path=file, content_type=mimetypes.guess_type(path)[0])
        else:
            route.fulfill(status=404)

    page.route(lambda url: url.startswith("http"), answer)

    def visit(path: str) -> Any:
        page.goto(f"{SITE}{path}")
        return page

    yield visit
    assert not foreign, "the site asks other hosts"
