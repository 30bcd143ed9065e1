"""Labs in Chromium: one by day, all by night."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.cli.docs import Quiet
from nanovllm.lab.site.labs import pages
from tests.lab.site.mistakes import MISTAKES, Mistake

pytest_plugins = ["tests.browser"]

LABS = pages.read_labs()
READY = "body[data-python=ready]"
CHOOSE = "nanovllm.features.data_parallel.router:EngineRouter.choose"
HASHES = "    hashes = self._block_hashes(request)"
BALANCED = """    sums = self.__dict__.setdefault("sums", [0] * len(loads))
    rank = sums.index(min(sums))
    sums[rank] += request.sampling_params.max_tokens
    return rank
"""
TAKES = 120_000  # milliseconds in which Python is ready, on a busy machine


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the labs, served as `nanovllm docs` does."""
    out = tmp_path_factory.mktemp("site") / "labs"
    try:
        pages.build(out)
    except pages.BuildError as error:
        pytest.skip(f"the labs are NOT TESTED in a browser: {error}")
    handler = functools.partial(Quiet, directory=str(out))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def open_lab(page: Any, site: str) -> Iterator[Any]:
    """Opens a lab by its name, and returns its page when Python is ready. The page asks no other
    host for anything."""
    asked: list[str] = []
    page.context.on("request", lambda request: asked.append(request.url))

    def open_lab(name: str) -> Any:
        page.goto(f"{site}/{name}.html")
        page.wait_for_selector(READY, timeout=TAKES)
        return page

    yield open_lab
    assert any(url.endswith(".wasm") for url in asked), "what the worker asks for is seen here"
    own = (site, "data:", "blob:")
    assert [url for url in asked if not url.startswith(own)] == []


def put(page: Any, mistake: Mistake) -> None:
    """Replace a text in the editor, as a reader does."""
    page.get_by_role("tab", name=mistake.target.partition(":")[2], exact=True).click()
    text = page.evaluate("nanovllmLab.lab.editor.text")
    assert text.count(mistake.old) == 1
    page.click(".cm-content")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text.replace(mistake.old, mistake.new))


def press(page: Any, name: str) -> None:
    """Press a button, and wait for the answer."""
    page.click(f"#{name}")
    page.wait_for_selector("body[data-busy=false]", timeout=TAKES)


def shown(page: Any) -> Any:
    """The trace and the picture on the page."""
    scene = page.evaluate("nanovllmLab.lab.scene")
    return [scene.get(part) for part in ("trace", "lanes", "picture", "figures")]


def do_the_lab(page: Any, mistakes: list[Mistake]) -> None:
    """Run the engine's code, then each mistake; reset."""
    before = shown(page)
    press(page, "run")
    assert shown(page) == before, "the page has the trace of the engine's own code"
    press(page, "check")
    assert page.locator(".tests .failed").count() == 0
    for mistake in mistakes:
        put(page, mistake)
        press(page, "run")
        if mistake.says:
            assert mistake.says in page.inner_text("#message")
            assert page.locator(".cm-fault").count() == 1
        assert shown(page) != before
        press(page, "check")
        assert mistake.says in page.inner_text("#message"), "what the run said is still there"
        failed = page.locator(".tests .failed").all_inner_texts()
        assert len(failed) == len(mistake.fails)
        for name, text in zip(mistake.fails, failed, strict=True):
            assert name.removeprefix("test_").replace("_", " ") in text
        page.click("#reset")
        press(page, "run")
        assert page.is_hidden("#message") and shown(page) == before


def test_a_wrong_victim_is_seen_and_mended(open_lab: Any) -> None:
    page = open_lab("preemption")
    mistakes = [mistake for mistake in MISTAKES if mistake.lab == "preemption"]
    do_the_lab(page, mistakes[:1])
    put(page, mistakes[0])
    page.fill("#reason", "The oldest always advances.")
    page.reload()
    page.wait_for_selector(READY, timeout=TAKES)
    assert mistakes[0].new in page.evaluate("nanovllmLab.lab.editor.text"), "the browser keeps it"
    assert page.input_value("#reason") == "The oldest always advances."
    assert page.inner_text("#caption").startswith("What the engine's own code does")
    assert "press Run" in page.inner_text("#caption"), "the picture is not that of the code shown"
    # An endless loop ends by Stop, and Python is there again.
    page.click("#reset")
    loop = Mistake("", mistakes[0].target, "return running[-1]", "while True: pass")
    put(page, loop)
    page.click("#run")
    page.wait_for_selector("#stop:enabled")
    page.click("#stop")
    assert page.inner_text("#message") == "Stopped."
    page.click("#reset")
    page.wait_for_selector(READY, timeout=TAKES)
    press(page, "run")
    assert page.is_hidden("#message")


@pytest.mark.nightly
@pytest.mark.parametrize("name", [lab["name"] for lab in LABS if lab["kind"] == "edit"])
def test_each_lab_finds_its_mistakes(open_lab: Any, name: str) -> None:
    do_the_lab(open_lab(name), [each for each in MISTAKES if each.lab == name])


@pytest.mark.nightly
def test_the_frontier_is_drawn_while_it_is_simulated(open_lab: Any) -> None:
    page = open_lab("what-if")
    page.wait_for_selector(".frontier .own", timeout=TAKES)
    assert page.evaluate("nanovllmLab.lab.done") is None, "it redraws while it runs"
    assert "Its bottleneck: " in page.inner_text("#caption")
    first = page.inner_text("#figures")
    page.fill("#slider-engines", "1")
    page.fill("#slider-request_rate", "6")
    page.wait_for_function("nanovllmLab.lab.done === nanovllmLab.lab.turn", timeout=TAKES)
    assert page.inner_text("#figures") != first
    assert page.locator(".frontier .fleet").count() == 10, "two splits, and five chunks"
    assert page.locator(".frontier .best").count() >= 1


@pytest.mark.nightly
def test_a_score_and_its_code_are_in_a_link(open_lab: Any) -> None:
    page = open_lab("contest")
    press(page, "score")
    assert "100 points" in page.inner_text("#scores")
    old = "    self.requests[request.request_id] = request\n"
    new = "    request.order = (request.num_prompt_tokens, request.order[1])\n"
    put(page, Mistake("", "nanovllm.core.queues:Queues.add", old, old + new))
    press(page, "score")
    points = float(page.inner_text(".points strong"))
    assert points > 120, "short requests first"
    link = page.evaluate("nanovllmLab.lab.link()")
    # Another reader, who has opened nothing here before.
    context = page.context.browser.new_context()
    other = context.new_page()
    other.goto(link)
    other.wait_for_selector(READY, timeout=TAKES)
    other.evaluate("nanovllmLab.lab.opened")
    assert new in other.evaluate("nanovllmLab.lab.editor.text")
    assert str(points) in other.inner_text("#caption")
    press(other, "score")
    assert float(other.inner_text(".points strong")) == points
    # A text of the reader's own is still there without the link.
    other.goto(link.partition("#")[0])
    other.wait_for_selector(READY, timeout=TAKES)
    other.get_by_role("tab", name="Queues.add", exact=True).click()
    assert new not in other.evaluate("nanovllmLab.lab.editor.text")
    context.close()


@pytest.mark.nightly
def test_an_endless_loop_is_stopped(open_lab: Any) -> None:
    page = open_lab("preemption")
    put(page, Mistake("", MISTAKES[0].target, "return running[-1]", "while True: pass"))
    page.click("#run")
    page.wait_for_selector("#message:visible", timeout=TAKES)
    assert "Stopped after 10 seconds" in page.inner_text("#message")


@pytest.mark.nightly
def test_the_panel_of_a_step_covers_no_picture(open_lab: Any) -> None:
    page = open_lab("blocks")
    page.set_viewport_size({"width": 1300, "height": 900})
    page.evaluate("document.querySelector('#player').scrollIntoView({block: 'end'})")
    page.evaluate("scrollBy(0, -150)")
    panel = page.locator(".nv-story").bounding_box()
    for picture in page.locator(".nv-view").all():
        box = picture.bounding_box()
        assert box["y"] + box["height"] <= panel["y"] + 1


@pytest.mark.nightly
def test_a_verdict_goes_when_the_code_changes(open_lab: Any) -> None:
    page = open_lab("preemption")
    press(page, "check")
    assert page.locator(".tests .passed").count() > 0
    press(page, "run")
    assert page.locator(".tests .passed").count() > 0, "it is the same code"
    put(page, Mistake("", MISTAKES[0].target, "return running[-1]", "return running[0]"))
    assert page.locator(".tests li").count() == 0
    press(page, "check")
    assert page.locator(".tests .failed").count() > 0
    page.click("#reset")
    assert page.locator(".tests li").count() == 0
    page.click(".cm-content")
    page.keyboard.press("Control+z")
    assert "return running[0]" in page.evaluate("nanovllmLab.lab.editor.text"), "undone"


@pytest.mark.nightly
def test_a_goal_is_reached_by_code_that_passes_every_test(open_lab: Any) -> None:
    page = open_lab("waves")
    (only_waiting,) = (each for each in MISTAKES if each.new == "bool(self.queues.waiting)")
    put(page, only_waiting)
    press(page, "run")
    assert "reached by the figures; now press Check" in page.inner_text("#goal")
    press(page, "check")
    assert "not reached: the figures would do, and a test fails" in page.inner_text("#goal")
    press(page, "run")
    assert "a test fails" in page.inner_text("#goal"), "it is the same code"
    page.click("#reset")
    assert page.is_hidden("#goal"), "the result is that of other code"
    put(page, Mistake("", CHOOSE, HASHES, BALANCED + HASHES))
    press(page, "run")
    press(page, "check")
    assert page.inner_text("#goal").endswith("reached.")
    assert page.locator("#goal.reached").count() == 1


@pytest.mark.nightly
def test_an_older_result_is_marked(open_lab: Any) -> None:
    page = open_lab("preemption")
    put(page, Mistake("", MISTAKES[0].target, "return running[-1]", "return running[0]"))
    press(page, "run")
    assert page.locator(".result.old").count() == 0
    assert page.inner_text("#caption").startswith("Run 1: what your code does")
    page.click("#reset")
    press(page, "check")
    assert page.inner_text("#caption").startswith("Older result. Run 1: what your code does")
    page.click(".cm-content")
    page.keyboard.press("Control+z")
    assert page.inner_text("#caption").startswith("Run 1: "), "it is that of this code again"
    page.keyboard.press("Control+End")
    page.keyboard.insert_text("\n    (")
    page.set_viewport_size({"width": 1300, "height": 500})
    page.evaluate("scrollTo(0, 0)")
    press(page, "run")
    assert "SyntaxError" in page.inner_text("#message")
    assert page.inner_text("#caption").startswith("Older result. Run 1: ")
    box = page.locator("#message").bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= 501, "the message is in view"


@pytest.mark.nightly
def test_runs_with_other_settings_are_not_compared(open_lab: Any) -> None:
    page = open_lab("preemption")
    put(page, Mistake("", MISTAKES[0].target, "return running[-1]", "return running[0]"))
    press(page, "run")
    page.select_option("[name=stream]", "24")
    page.wait_for_function(
        "nanovllmLab.lab.numRuns === 2 && document.body.dataset.busy === 'false'"
    )
    page.wait_for_function("document.querySelector('#caption').textContent.startsWith('Run 2')")
    assert "your last run" not in page.inner_text("#measures")
    for rule in ("running[99]", "running[-1 - (len(running) > 2)]"):
        text = page.evaluate("nanovllmLab.lab.editor.text")
        page.click(".cm-content")
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(re.sub(r"return running.*", f"return {rule}", text))
        press(page, "run")
        is_whole = rule != "running[99]"
        assert ("until it fails" in page.inner_text("#measures")) is not is_whole
    card = page.locator(".measure").first.inner_text()
    assert "734" in card and "your last run" in card, "the last whole run with these settings"


@pytest.mark.nightly
def test_memory_stays_flat(open_lab: Any) -> None:
    page = open_lab("preemption")
    session = page.context.new_cdp_session(page)

    def memory() -> tuple[int, int]:
        """Bytes of the worker's Python, and of the page's objects."""
        session.send("HeapProfiler.collectGarbage")
        used = page.evaluate("performance.memory.usedJSHeapSize")
        return page.evaluate("nanovllmLab.python.memory"), used

    for _ in range(10):
        press(page, "run")
    before = memory()
    for _ in range(50):
        press(page, "run")
    after = memory()
    assert after[0] == before[0], "Python's memory does not grow"
    assert after[1] < 1.1 * before[1] + 2**20, f"the page's objects: {before[1]:,}, {after[1]:,}"


@pytest.mark.nightly
def test_from_lab_to_lab_python_stays_loaded(open_lab: Any) -> None:
    page = open_lab(LABS[0]["name"])
    page.evaluate("window.sameDocument = true")
    for lab in LABS[1:]:
        page.click(f"nav a[href='{lab['name']}.html']")
        page.wait_for_function("name => nanovllmLab.lab.data.lab.name === name", arg=lab["name"])
        assert page.evaluate("window.sameDocument && nanovllmLab.python.state") == "ready"
    page.go_back()
    page.wait_for_function("name => nanovllmLab.lab.data.lab.name === name", arg=LABS[-2]["name"])


@pytest.mark.nightly
def test_without_webassembly_the_page_shows_the_film_and_says_why(page: Any, site: str) -> None:
    page.add_init_script("delete globalThis.WebAssembly")
    page.goto(f"{site}/preemption.html")
    assert "no WebAssembly" in page.inner_text("#state")
    assert page.locator(".nv-player canvas").count() > 0 and page.is_disabled("#run")
