"""The description of the API at /docs, in a browser that reaches nothing but the server."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, Route, expect

from tests.server_process import ServerProcess

pytest_plugins = ["tests.browser"]

KEY = "sk-description"
# A host for which Swagger UI would ask its validator on the web.
HOST = "llm.example.com"


@pytest.fixture(scope="module")
def server(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that wants a key."""
    folder = tmp_path_factory.mktemp("docs")
    words = "--api-key", KEY, "--allowed-hosts", f'["{HOST}"]'
    with ServerProcess(tiny_model, folder, *words) as running:
        yield running


@pytest.mark.parametrize("prefix", ["", "/behind/a/proxy"])
def test_the_description_needs_no_network_and_no_key(
    page: Page, server: ServerProcess, prefix: str
) -> None:
    missing = []

    def answer(route: Route) -> None:
        url = route.request.url
        if url.startswith(f"http://{HOST}{prefix}/"):
            path = url.removeprefix(f"http://{HOST}{prefix}")
            found = server.get(path, headers={"Host": HOST})
            route.fulfill(
                status=found.status_code,
                content_type=found.headers["content-type"],
                body=found.content,
            )
        else:
            missing.append(url)
            route.abort()

    page.route("**/*", answer)
    page.goto(f"http://{HOST}{prefix}/docs")
    expect(page.locator(".info .title")).to_contain_text("nanovllm")
    for path in ("/v1/chat/completions", "/v1/completions", "/metrics"):
        expect(page.locator(f'.opblock-summary-path[data-path="{path}"]')).to_be_visible()
    page.locator('.opblock-summary-path[data-path="/v1/completions"]').click()
    expect(page.get_by_text("max_tokens").first).to_be_visible()
    assert not missing
    assert page.title() == "nanovllm"


def test_the_files_of_the_page_are_no_more_than_that(server: ServerProcess) -> None:
    assert server.get("/docs/files/swagger-ui.css").headers["content-type"].startswith("text/css")
    for path in ("/docs/files/../__init__.py", "/docs/files/%2e%2e/core.py", "/docs/files/"):
        assert server.get(path).status_code in (401, 404)
