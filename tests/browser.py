"""What tests in a real browser share. A test module says `pytest_plugins = ["tests.browser"]` and
asks for `page`.

PYTEST_DONT_REWRITE: test modules import this one before pytest sees that it is a plugin.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

import nanovllm

WEB = pathlib.Path(nanovllm.__file__).parent / "trace" / "web"
SYSTEM_CHROMIUM = pathlib.Path("/usr/bin/chromium")
SITE = "http://player.test/"
# Each page opens two more, for what drops down below the address bar, and they take half a second
# of a core. The other features are those that playwright disables and that matter here: the browser
# heeds only the last such list.
UNWANTED = (
    "WebUIOmniboxPopup WebUIOmniboxAimPopup HttpsUpgrades HttpsFirstBalancedModeAutoEnable "
    "PaintHolding MediaRouter OptimizationHints DestroyProfileOnBrowserClose"
)
# What a page shows at once may take this long on a busy machine.
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium: the system's, or else playwright's own.

    Of a module, not of the session: as long as playwright runs, no asyncio test can run in this
    thread. For the same reason a module that uses it has no asyncio tests."""
    from playwright.sync_api import Error, expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)  # it does not heed a page's default timeout
    options: dict[str, Any] = {
        "args": ["--disable-dev-shm-usage", f"--disable-features={UNWANTED.replace(' ', ',')}"]
    }
    if os.geteuid() == 0:
        options["args"].append("--no-sandbox")  # Chromium has no sandbox for root
    if SYSTEM_CHROMIUM.exists():
        options["executable_path"] = str(SYSTEM_CHROMIUM)
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(**options)
        except Error as error:
            pytest.fail(f"no Chromium could be started: `make browser` installs it\n{error}")
        yield started
        started.close()


@pytest.fixture
def noise() -> list[str]:
    """Patterns of the errors that a test expects in the console; a test or a module's own fixture
    may add some."""
    return []


@pytest.fixture
def page(browser: Any, noise: list[str]) -> Iterator[Any]:
    """A page of a browser profile of its own. The test fails if a script fails in it or an error
    stands in its console."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    made = context.new_page()
    made.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    made.on("pageerror", lambda error: errors.append(f"{error.message}\n{error.stack}"))
    made.on(
        "console",
        lambda message: errors.append(_told(message)) if message.type == "error" else None,
    )
    yield made
    context.close()
    left = [error for error in errors if not any(re.search(pattern, error) for pattern in noise)]
    assert not left, "errors in the page:\n" + "\n".join(left)


def _told(message: Any) -> str:
    return f"{message.text} ({message.location.get('url', '')})"


def open_site(page: Any, body: str = "", head: str = "") -> None:
    """Open a page of which the web folder's files are at /web/. No server is needed: the browser is
    answered from here."""
    document = (
        "<!doctype html><html"
        f' lang="en"><head><title>test</title>{head}</head><body>{body}</body></html>'
    )

    def answer(route: Any) -> None:
        path = route.request.url.removeprefix(SITE)
        if path == "":
            route.fulfill(body=document, content_type="text/html")
        elif path == "favicon.ico":
            route.fulfill(status=204)
        elif (file := WEB / path.removeprefix("web/")).is_file():
            route.fulfill(path=file)
        else:
            route.fulfill(status=404)

    page.route(f"{SITE}**", answer)
    page.goto(SITE)


def settle(page: Any) -> None:
    """Wait until what was asked for is drawn: a frame after the next."""
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


def position(page: Any) -> str:
    """The player's words for the step that it shows."""
    return page.locator(".nv-position").inner_text()


def check_bundle(text: str) -> None:
    """A bundle of modules has no name twice, and imports nothing."""
    names = re.findall(r"^(?:async )?(?:class|function\*?|const|let) +(\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert not re.search(r"^import\b", text, re.MULTILINE)
