"""Players on pages without a kernel, in a real browser: as one module, from stored traces."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.lab.site.players import lectures_module, players_module
from nanovllm.lab.viz import SimulatedRequest, simulate
from nanovllm.trace.trace import Trace
from tests.browser import check_bundle, open_site, position, settle

pytest_plugins = ["tests.browser"]

MOUNT = """async ({ module, options }) => {
  const url = URL.createObjectURL(new Blob([module], { type: "text/javascript" }));
  const { mountPlayer } = await import(url);
  window.mounted = mountPlayer(document.querySelector("#root"), options);
  await mounted.ready;
}"""


def trace_of(*outputs: int) -> Trace:
    """Requests of four prompt tokens, which arrive at once."""
    requests = [SimulatedRequest(0, 4, count) for count in outputs]
    return simulate(requests, num_kv_blocks=16, block_size=4)


def lines(trace: Trace) -> str:
    return b"".join(trace.lines()).decode()


def mount(page: Any, root: str = '<div id="root"></div>', **options: Any) -> None:
    open_site(page, body=root)
    page.evaluate(MOUNT, {"module": players_module(), "options": options})
    settle(page)


@pytest.mark.parametrize(
    ("module", "exports"),
    [(players_module, ["export { mountPlayer };"]), (lectures_module, [])],
    ids=["players", "lectures"],
)
def test_a_module_has_no_name_twice_and_imports_nothing(
    module: Callable[[], str], exports: list[str]
) -> None:
    text = module()
    check_bundle(text)
    assert re.findall(r"^export .*", text, re.MULTILINE) == exports


def test_a_program_feeds_a_player_with_traces(page: Any) -> None:
    mount(page, lines=lines(trace_of(9)), views=["pool", "timeline"], step=3, speed=4)
    assert position(page) == "step 3 of 0–8"
    assert page.locator(".nv-speed").input_value() == "4"
    assert page.locator(".nv-view").count() == 2
    # The player has its style sheet with it.
    assert page.locator(".nv-slider").evaluate("(each) => getComputedStyle(each).height") == "32px"
    page.get_by_role("button", name="Step forward").click()
    page.evaluate("(lines) => mounted.update(lines)", lines(trace_of(7, 5)))
    settle(page)
    assert position(page) == "step 4 of 0–6"
    page.evaluate("mounted.update('{}')")
    settle(page)
    assert "not a nanovllm trace" in page.get_by_role("alert").inner_text()
    page.evaluate("(lines) => mounted.update(lines)", lines(trace_of(3)))
    settle(page)
    assert position(page) == "step 2 of 0–2" and page.get_by_role("alert").count() == 0
    page.evaluate("mounted.destroy()")
    assert page.locator("#root > *").count() == 0


def test_a_stored_trace_is_inflated_or_the_page_says_why_not(page: Any) -> None:
    stored = base64.b64encode(zlib.compress(lines(trace_of(9)).encode())).decode()
    mount(page, trace=stored, step=5)
    assert position(page) == "step 5 of 0–8"
    mount(page, trace=stored[: len(stored) // 2])
    assert "This trace cannot be shown" in page.get_by_role("alert").inner_text()


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_a_player_that_starts_by_itself_waits_for_its_reader(page: Any, motion: str) -> None:
    page.emulate_media(reduced_motion=motion)
    below = '<div style="height: 3000px"></div><div id="root"></div>'
    mount(page, below, lines=lines(trace_of(9)), speed=64, autoplay=True)
    assert not page.evaluate("mounted.player.playing") and position(page) == "step 0 of 0–8"
    page.locator(".nv-controls").scroll_into_view_if_needed()
    if motion == "reduce":
        for _ in range(10):
            settle(page)
        assert position(page) == "step 0 of 0–8"
    else:
        page.locator(".nv-position").filter(has_text="step 8 of 0–8").wait_for()


def test_the_player_follows_the_theme_of_the_page(page: Any) -> None:
    mount(page, lines=lines(trace_of(9)))
    theme = page.locator(".nv-player")
    assert theme.get_attribute("data-theme") == "light"
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    settle(page)
    assert theme.get_attribute("data-theme") == "dark"
