"""The player of ranks, in a real browser: what it shows and tells is what the ranks recorded."""

from __future__ import annotations

import base64
import itertools
import json
import pathlib
import zlib
from typing import Any

import matplotlib
import pytest

from nanovllm.executor.virtual_clock import SECOND, RankRead, RankStep, Timeline
from nanovllm.lab import stored
from nanovllm.lab.site.players import page_of
from nanovllm.lab.viz import RequestColors, play_ranks, rank_spans, rank_totals
from nanovllm.lab.viz.ranks import RankPlayer
from tests.browser import open_site

pytest_plugins = ["tests.browser"]

MS = SECOND // 1000
HEAD = '<link rel="stylesheet" href="/web/player.css">'
START = """async (record) => {
  const { createRankPlayer } = await import("/web/rank_player.js");
  const { readRanks } = await import("/web/ranks.js");
  window.player = createRankPlayer(document.querySelector("#root"), { speed: 4 });
  player.setHistory(readRanks(new TextEncoder().encode(record)));
}"""


def step(order: int, *phases: int, **tokens: int) -> RankStep:
    """A step with its order and the ends of its phases in milliseconds."""
    names = ("order", "compute", "wait", "communicate", "answer")
    times = {name: MS * time for name, time in zip(names, (order, *phases), strict=True)}
    return RankStep(**times, tokens=tokens, parts={})


# Rank 1 waits for what rank 0 sends; rank 0 waits for rank 1 at the end of the step.
RANKS: dict[str, Timeline] = {
    "rank 0": [step(0, 0, 10, 20, 22, a=40, b=1), step(22, 22, 25, 26, 28, b=1)],
    "rank 1": [
        RankRead(transfer_id="t", begin=0, end=8 * MS, num_bytes=1),
        step(0, 10, 20, 20, 22, a=40, b=1),
        step(22, 22, 26, 26, 28),
    ],
}
MOMENTS = [0, 8, 10, 20, 22, 25, 26, 28]


@pytest.fixture(autouse=True)
def drawing() -> None:
    matplotlib.use("agg")


def start(page: Any, timelines: dict[str, Timeline] = RANKS, title: str = "Two ranks") -> None:
    open_site(page, body='<div id="root"></div>', head=HEAD)
    page.evaluate(START, play_ranks(timelines, title=title).lines.decode())
    settle(page)


def settle(page: Any) -> None:
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


def position(page: Any) -> str:
    settle(page)
    return page.locator(".nv-position").inner_text()


def told(page: Any) -> list[str]:
    """The facts of the story, one a line."""
    settle(page)
    pairs = page.locator(".nv-story dt").all(), page.locator(".nv-story dd").all()
    texts = [[" ".join(each.inner_text().split()) for each in column] for column in pairs]
    return [" ".join(pair) for pair in zip(*texts, strict=True)]


def click(page: Any, **wanted: Any) -> None:
    """Click into the middle of the first region of this kind."""
    settle(page)
    box = page.evaluate(
        """(wanted) => {
          const [view] = player.views;
          const asked = Object.entries(wanted);
          const fits = (region) => asked.every(([key, value]) => region[key] === value);
          const { x, y, width, height } = view.regions.find(fits);
          const { left, top } = view.canvas.getBoundingClientRect();
          return [left + scrollX + x + width / 2, top + scrollY + y + height / 2];
        }""",
        wanted,
    )
    page.mouse.click(*box)


def test_the_reader_steps_from_change_to_change(page: Any) -> None:
    start(page)
    assert page.locator("figcaption").inner_text() == "Two ranks"
    seen = [position(page)]
    while page.get_by_role("button", name="Step forward").is_enabled():
        page.get_by_role("button", name="Step forward").click()
        seen.append(position(page))
    assert seen == [f"{moment}.0 of 28.0 ms" for moment in MOMENTS]
    slider = page.get_by_role("slider", name="Step")
    slider.press("Home")
    assert position(page) == "0.0 of 28.0 ms"
    slider.press("ArrowRight")
    assert position(page) == slider.get_attribute("aria-valuetext") == "8.0 of 28.0 ms"
    slider.evaluate("(each) => { each.value = 5; each.dispatchEvent(new Event('input')); }")
    assert position(page) == "25.0 of 28.0 ms"
    words = page.locator("canvas").get_attribute("aria-label")
    assert words.endswith(", 25.0 of 28.0 ms, rank 0 waits, rank 1 computes")


def test_each_moment_tells_what_every_rank_does(page: Any) -> None:
    start(page)
    link = "rank 1, link"
    assert told(page) == [
        "rank 0 computes step 0, 41 tokens: a b",
        "rank 1 waits",
        f"{link} receives KV",
    ]
    page.evaluate("player.seek(3)")
    assert told(page) == ["rank 0 communicates", "rank 1 communicates"]
    page.evaluate("player.seek(4)")
    assert told(page) == ["rank 0 computes step 1, 1 token: b", "rank 1 computes"]


def test_a_rank_and_a_request_can_be_selected(page: Any) -> None:
    start(page)
    totals = rank_totals(RANKS)["rank 0"]
    click(page, kind="rank", id="rank 0")
    assert told(page) == [
        "now computes",
        "steps 2",
        f"computes {totals.compute:.1f} ms, 46 %",
        f"waits {totals.wait:.1f} ms, 39 %",
        f"communicates {totals.communicate:.1f} ms, 14 %",
    ]
    page.keyboard.press("Escape")
    click(page, kind="request", id="b")
    events = page.locator(".nv-story-events li").all_inner_texts()
    assert events == [
        "0.0 ms: rank 0, 1 token",
        "10.0 ms: rank 1, 1 token",
        "22.0 ms: rank 0, 1 token",
    ]
    page.get_by_role("button", name="10.0 ms").click()
    assert position(page) == "10.0 of 28.0 ms"
    page.evaluate("player.select(null)")
    click(page, kind="step", index=6)
    assert position(page) == "26.0 of 28.0 ms"


def test_a_long_moment_is_shown_for_longer(page: Any) -> None:
    start(page)
    turns = page.evaluate("() => [...Array(7).keys()].map((index) => player._turns(index))")
    lasting = [after - now for now, after in itertools.pairwise(MOMENTS)]
    assert turns == pytest.approx([max(0.4, each / 28 * 7) for each in lasting])
    # Playing ends at the last moment, and begins again.
    page.evaluate("player.speed = 64")
    page.get_by_role("button", name="Play").click()
    page.locator(".nv-position").filter(has_text="28.0 of 28.0 ms").wait_for()
    page.get_by_role("button", name="Play").wait_for()


def test_the_picture_shows_the_colours_of_requests_up_to_the_moment(page: Any) -> None:
    start(page)
    page.evaluate("player.seek(2)")
    settle(page)
    colors = page.evaluate(
        """() => {
          const [view] = player.views;
          const ratio = view.canvas.width / view.width;
          const pen = view.canvas.getContext("2d");
          const hex = (channel) => channel.toString(16).padStart(2, "0").toUpperCase();
          const bars = view.regions.filter(({ kind }) => kind === "request");
          return bars.map(({ id, x, y, width, height }) => {
            const at = [x + width / 2, y + height / 2].map((each) => Math.round(each * ratio));
            const [r, g, b] = pen.getImageData(...at, 1, 1).data;
            return [id, "#" + [r, g, b].map(hex).join("")];
          });
        }"""
    )
    requests = RequestColors(["a", "b"])
    assert [each[0] for each in colors] == ["a", "b", "b", "a", "b"]
    assert colors[0][1] == requests["a"]  # prefill, before the moment
    assert colors[3][1] != requests["a"]  # after it, pale


def test_many_steps_are_shown_a_window_at_a_time(page: Any) -> None:
    steps: Timeline = [step(3 * i, 3 * i, 3 * i + 1, 3 * i + 2, 3 * i + 3, a=1) for i in range(400)]
    start(page, {"rank 0": steps})
    page.evaluate("player.seek(600)")
    settle(page)
    edges = page.evaluate(
        """() => {
          const [view] = player.views;
          const steps = view.regions.filter((region) => region.kind === "step");
          return [steps[0].index, steps.at(-1).index, player.index];
        }"""
    )
    first, last, now = edges
    assert 0 < first < now < last < 1200
    bars = page.evaluate(
        """() => player.views[0].regions
          .filter(({ kind }) => kind === "request").map(({ width }) => width)"""
    )
    assert bars and min(bars[1:-1]) > 2


def test_a_notebook_keeps_the_record_beside_the_picture() -> None:
    data, _ = play_ranks(RANKS, title="a & b")._repr_mimebundle_()
    assert data["image/png"][1:4] == b"PNG"
    kept = data[stored.RANKS]
    record = json.loads(zlib.decompress(base64.b64decode(kept["ranks"])))
    assert record["title"] == "a & b" and record["requests"] == [["a", 0], ["b", 1]]
    spans = [
        (row["name"], kind, begin, end)
        for row in record["rows"]
        for kind, begin, end, _, _ in row["spans"]
    ]
    expected = [(each.row, each.kind, each.begin, each.end) for each in rank_spans(RANKS)]
    assert sorted(spans) == sorted(expected)
    # Colours are those of the other figures that share them.
    player = play_ranks(RANKS, colors=RequestColors(["x", "b"]))
    assert json.loads(player.lines)["requests"] == [["a", 2], ["b", 1]]


WIDGET = """async ({ bundle, record }) => {
  const url = URL.createObjectURL(new Blob([bundle], { type: "text/javascript" }));
  const { default: widget } = await import(url);
  const lines = new DataView(new TextEncoder().encode(record).buffer);
  const values = { step: 2, views: ["ranks"], speed: 4, theme: "auto", lines };
  window.model = {
    get: (name) => values[name], set: (name, value) => (values[name] = value),
    save_changes() {}, on() {}, off() {},
  };
  window.finish = widget.render({ model, el: document.querySelector("#root") });
}"""


def test_a_kernel_and_the_widget_tell_each_other_the_moment(page: Any) -> None:
    player = play_ranks(RANKS)
    open_site(page, body='<div id="root"></div>', head=HEAD)
    page.evaluate(WIDGET, {"bundle": player._esm, "record": player.lines.decode()})
    assert position(page) == "10.0 of 28.0 ms"
    page.get_by_role("button", name="Step forward").click()
    assert page.evaluate("model.get('step')") == 3
    page.evaluate("finish()")
    assert page.locator(".nv-player").count() == 0


def test_what_the_player_refuses(page: Any) -> None:
    with pytest.raises(ValueError, match="no rank has a record"):
        play_ranks({"rank 0": []})
    long = {"rank 0": [step(i, i, i + 1, i + 1, i + 1, **{f"{i:x}" * 20: i}) for i in range(9000)]}
    assert stored.RANKS not in RankPlayer(long, RequestColors()).saved()
    open_site(page, body='<div id="root"></div>')
    failed = page.evaluate(
        """() => import("/web/ranks.js")
          .then(({ readRanks }) => readRanks(new TextEncoder().encode('{"nanovllm_trace": 2}')))
          .catch((error) => error.message)"""
    )
    assert failed == "not a record of ranks in format 1"


def test_a_finger_plays_stops_and_selects(browser: Any, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ranks.html"
    file.write_text(page_of(play_ranks(RANKS).saved(), "Ranks"), encoding="utf-8")
    phone = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = phone.new_page()
    page.goto(file.as_uri())
    canvas = page.locator("canvas")
    canvas.wait_for()
    settle(page)
    for button in page.locator(".nv-button:visible").all():
        assert button.bounding_box()["height"] >= 40
    canvas.tap(position={"x": 10, "y": 25})
    page.locator(".nv-story h3", has_text="rank 0").wait_for()
    page.get_by_role("button", name="Play").tap()
    page.get_by_role("button", name="Pause").wait_for()
    page.get_by_role("button", name="Pause").tap()
    page.get_by_role("button", name="Play").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    phone.close()


def test_a_page_by_itself_plays_and_has_a_picture_without_scripts(
    page: Any, browser: Any, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "ranks.html"
    file.write_text(page_of(play_ranks(RANKS).saved(), "Ranks"), encoding="utf-8")
    page.goto(file.as_uri())
    page.locator(".nv-position").filter(has_text="0.0 of 28.0 ms").wait_for()
    assert page.locator("img").is_hidden()
    page.get_by_role("button", name="Step forward").click()
    assert position(page) == "8.0 of 28.0 ms"
    still = browser.new_context(java_script_enabled=False).new_page()
    still.goto(file.as_uri())
    assert still.get_by_role("img", name="Ranks").is_visible()
    assert still.get_by_role("button").count() == 0
    still.context.close()
