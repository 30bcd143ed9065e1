"""Exported lectures in a real browser: stored traces play, and predictions lock."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4
from PIL import Image

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.copies import FOLDER
from nanovllm.lab.viz import SimulatedRequest, simulate
from nanovllm.lab.viz.film import gif_bytes
from nanovllm.lab.viz.player import play

pytest_plugins = ["tests.browser"]

LATENCY = "What is A's *worst* latency?"
POLICY = "Which `policy` wins?"


@pytest.fixture
def noise() -> list[str]:
    """What nbconvert's pages want of other hosts."""
    return ["ERR_INTERNET_DISCONNECTED", "ERR_NAME_NOT_RESOLVED", "ERR_TUNNEL", "ERR_FAILED"]


PREDICTIONS = (
    "from nanovllm.lab import course",
    f'latency = course.predict("{LATENCY}", ..., unit="ms")',
    f'policy = course.predict("{POLICY}", ..., among=("swap", "recompute"))',
    "print('both need it')",
    "latency.reveal(1234.6, formula=1500)",
    "policy.reveal('swap', simulated=True)",
    "print('the same values')",
)


@pytest.fixture(scope="module")
def lecture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a lecture that was run and exported: two predictions, answers of one and of
    both, and a cell that draws the same values."""
    root = tmp_path_factory.mktemp("lecture")
    cells = [v4.new_code_cell(source) for source in PREDICTIONS]
    last = [v4.new_markdown_cell("They differ."), v4.new_code_cell("print('something else')")]
    save(root, v4.new_markdown_cell("# Title"), *cells, *last)
    assert main(["--root", str(root), "run", "10"]) == 0
    assert main(["--root", str(root), "page", "10"]) == 0
    return (root / FOLDER / "10_first.html").as_uri()


def save(root: Path, *cells: Any) -> None:
    (root / "pyproject.toml").touch()
    (root / "notebooks").mkdir()
    nbformat.write(v4.new_notebook(cells=list(cells)), root / "notebooks/10_first.ipynb")


def prediction(page: Any, number: int) -> Any:
    return page.locator(".nv-prediction").nth(number)


def answers(page: Any) -> list[bool]:
    """Which folded outputs are open."""
    folds = page.locator("details.jp-Cell-outputWrapper").all()
    return [fold.evaluate("(fold) => fold.open") for fold in folds]


def told(prediction: Any) -> list[str]:
    """What the card of a locked prediction says."""
    return prediction.get_by_role("status").locator("dd").all_text_contents()


def reveals(page: Any, number: int) -> list[str]:
    return page.locator(".nv-reveal").nth(number).locator("dd").all_text_contents()


def test_predictions_lock_and_reveal(page: Any, lecture: str) -> None:
    page.goto(lecture)
    assert answers(page) == [False] * 4
    assert reveals(page, 0) == ["nothing yet", "1,500 ms, 1.2 times too high", "1,235 ms"]
    latency, policy = prediction(page, 0), prediction(page, 1)
    assert latency.locator("em").inner_text() == "worst"
    assert policy.locator("legend code").inner_text() == "policy"

    field = latency.get_by_role("textbox")
    for wrong in ("", "soon"):
        field.fill(wrong)
        field.press("Enter")
        assert latency.get_by_role("status").inner_text() == "Type a number of ms."
    field.fill("2,469")
    field.press("Enter")
    answer = ["2,469 ms, 2 times too high", "1,500 ms, 1.2 times too high", "1,235 ms"]
    assert told(latency) == answer == reveals(page, 0)
    # These answer the other question, too.
    assert answers(page) == [False] * 4

    policy.get_by_role("button", name="Lock").click()
    assert policy.get_by_role("status").inner_text() == "Choose one of the answers."
    policy.get_by_label("recompute").check()
    policy.get_by_role("button", name="Lock").click()
    assert told(policy) == ["recompute: no", "swap"] == reveals(page, 1)
    # The one was measured, the other simulated.
    for number, source in enumerate(("measured", "simulated")):
        card = prediction(page, number)
        assert card.locator("dt").last.inner_text() == source
        assert card.get_by_role("button", name=f"How it was {source}").is_visible()
        assert page.locator(".nv-reveal").nth(number).locator("dt").last.inner_text() == source
    assert answers(page) == [True] * 4

    # The browser keeps them until the reader predicts again.
    page.reload()
    assert told(latency) == answer
    assert answers(page) == [True] * 4
    latency.get_by_role("button", name="Predict again").click()
    assert reveals(page, 0)[0] == "nothing yet"
    page.reload()
    assert field.is_visible() and policy.locator("form").count() == 0
    assert answers(page) == [False] * 2 + [True] * 2


def test_without_a_script_the_text_stays(browser: Any, lecture: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(lecture)
    assert "put a number of ms in the place of ..." in prediction(page, 0).inner_text()
    fold = page.locator("details.jp-Cell-outputWrapper").nth(1)
    fold.locator("summary").click()
    assert "measured: 1,235 ms" in fold.inner_text()
    context.close()


def test_stored_players_play_and_films_can_be_stopped(page: Any, tmp_path: Path) -> None:
    trace = simulate([SimulatedRequest(0, 4, 9)], num_kv_blocks=16, block_size=4)
    saved = play(trace, views=["pool"], step=3).saved()
    saved["image/png"] = base64.b64encode(saved["image/png"]).decode()
    player = v4.new_output("execute_result", data=saved, execution_count=1)
    picture = v4.new_output("display_data", data={"image/png": saved["image/png"]})
    below = v4.new_markdown_cell("<div style='height: 4000px'></div>")
    # A page embeds the films of its text.
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = base64.b64encode(gif_bytes(frames, [0.1, 0.1], "")).decode()
    film = v4.new_output(
        "display_data", data={"text/html": f'<img src="data:image/gif;base64,{data}">'}
    )
    save(
        tmp_path,
        v4.new_code_cell("play(trace)", outputs=[picture, player]),
        below,
        v4.new_code_cell("film()", outputs=[film]),
        v4.new_code_cell("play(trace)", outputs=[player]),
    )
    assert main(["--root", str(tmp_path), "page", "10"]) == 0
    page.goto((tmp_path / FOLDER / "10_first.html").as_uri())
    shown = page.locator(".nv-player")
    shown.first.locator(".nv-position").filter(has_text="step 3 of 0–8").wait_for()
    pictures = page.locator(".jp-OutputArea-output img[src^='data:image/png']")
    assert [each.is_visible() for each in pictures.all()] == [True, False, True]
    # Those far below begin when the reader comes near.
    assert shown.count() == 1 and page.locator(".nanovllm-film").count() == 0
    page.locator(".nv-stored").nth(1).scroll_into_view_if_needed()
    shown.nth(1).get_by_role("button", name="Step forward").click()
    shown.nth(1).locator(".nv-position").filter(has_text="step 4 of 0–8").wait_for()
    assert shown.first.locator(".nv-position").inner_text() == "step 3 of 0–8"
    page.locator(".nanovllm-film").get_by_title("One picture on").click()
    page.locator(".nanovllm-film output").filter(has_text="2 of 2").wait_for()
    page.emulate_media(media="print")
    assert pictures.nth(1).is_visible() and shown.first.is_hidden()


def test_the_site_plays_the_ranks_of_a_lecture(visit: Any, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit("notebooks/24_expert_parallel.html")
    ranks = page.locator(".nv-stored[data-player*=ranks]")
    still = page.locator(".cell:has(.nv-stored[data-player*=ranks]) img")
    assert still.is_visible()
    ranks.scroll_into_view_if_needed()
    position = ranks.locator(".nv-position")
    position.filter(has_text=re.compile("^0.0 of")).wait_for()
    assert still.is_hidden()
    ranks.get_by_role("slider").press("End")
    ranks.locator("h3", has_text="At ").wait_for()
    first, last = re.findall(r"[\d.]+", position.inner_text())
    assert first == last
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_site_plays_a_lecture_and_asks_its_predictions(visit: Any) -> None:
    page = visit("notebooks/13_scheduler.html")
    player = page.locator(".nv-stored").first
    token = page.locator(".nv-prediction").filter(has_text="D gets one token more per step")
    assert player.is_hidden()
    token.get_by_label("B", exact=True).check()
    token.get_by_role("button", name="Lock").click()
    player.scroll_into_view_if_needed()
    player.get_by_role("button", name="Step forward").click()
    player.locator(".nv-position").filter(has_text="step 9 of").wait_for()
    page.locator("html").evaluate("(html) => (html.dataset.theme = 'dark')")
    player.locator(".nv-player[data-theme=dark]").wait_for()
    latency = page.locator(".nv-prediction").filter(has_text="worst inter-token latency")
    answer = page.locator(".nv-reveal").filter(has_text="worst inter-token latency")
    assert answer.is_hidden()
    latency.get_by_role("textbox").fill("33")
    latency.get_by_role("button", name="Lock").click()
    answer.get_by_text("33 ms, 2 times too low").wait_for()
    latency.get_by_text("33 ms, 2 times too low").wait_for()


def test_the_card_of_a_simulated_answer_says_so(visit: Any) -> None:
    page = visit("notebooks/22_tensor_parallel.html")
    for question, source in (("come from eight", "simulated"), ("MB of weights", "measured")):
        card = page.locator(".nv-prediction").filter(has_text=question)
        card.get_by_role("textbox").fill("5")
        card.get_by_role("button", name="Lock").click()
        assert card.locator("dt").last.inner_text() == source, question


def test_what_explains_an_answer_is_covered_and_code_stays_folded(visit: Any, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit("notebooks/13_scheduler.html")
    taker = page.locator(".nv-prediction").filter(has_text="block 4")
    explanation = page.get_by_text("C lost block 4 by preemption")
    code = page.locator("details.above-input[open]")
    covers = page.locator(".nv-cover")
    before = covers.count()
    assert explanation.is_hidden() and code.count() == 0 and before > 2
    assert page.locator(".nv-covered[hidden=until-found]").count() == before
    taker.get_by_role("radio").first.check()
    taker.get_by_role("button", name="Lock").click()
    assert explanation.is_visible() and code.count() == 0 and covers.count() == before - 1
    taker.get_by_role("button", name="How it was simulated").click()
    place = page.locator(".nv-reveal").filter(has_text="block 4")
    page.wait_for_function(
        "(each) => Math.abs(each.getBoundingClientRect().y) < innerHeight",
        arg=place.element_handle(),
    )
    # Without a guess, a click shows them.
    pause = page.locator(".nv-cover").last
    hidden = page.locator(".nv-covered[hidden] .nv-reveal").last
    assert hidden.is_hidden()
    pause.get_by_role("button", name="Show them").click()
    shown = page.locator(".nv-covered:not([hidden]) .nv-reveal").last
    assert shown.is_visible() and covers.count() == before - 2
    # What is covered can be found, and is read on paper.
    page.emulate_media(media="print")
    assert page.locator(".nv-covered p").first.is_visible() and covers.first.is_hidden()
