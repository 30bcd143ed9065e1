"""The player: in a real browser with the modules as they are served, and as the bundle that a
notebook gets."""

from __future__ import annotations

import base64
import dataclasses
import pathlib
import random
import re
import zlib
from typing import Any

import msgspec
import pytest

from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab import stored
from nanovllm.lab.viz import SimulatedRequest, image_bytes, request_metrics, simulate
from nanovllm.lab.viz.blocks import draw_still
from nanovllm.lab.viz.player import VIEWS, WEB, Player, bundle, play, widget_module
from nanovllm.lab.viz.what_if import figures, what_if
from nanovllm.trace.record import Arrival
from nanovllm.trace.trace import Trace, TraceError
from tests.browser import check_bundle, open_site, position, settle

pytest_plugins = ["tests.browser"]

HEAD = (
    '<meta name="viewport" content="width=device-width"><link rel="stylesheet"'
    ' href="/web/player.css">'
)
START = """async ({ text, options, read = Infinity }) => {
  const { createPlayer } = await import("/web/player.js");
  const { readHistory } = await import("/web/widget.js");
  const { History } = await import("/web/history.js");
  window.whole = text === null ? null : readHistory(new TextEncoder().encode(text));
  window.player = createPlayer(document.querySelector("#root"), { ...options, onStep: (index) => (window.told = index) });
  if (!whole) return;
  window.history_ = read < whole.length ? new History(whole.settings) : whole;
  for (let i = 0; i < read && history_ !== whole; i++) history_.append(whole.record(i));
  player.setHistory(history_);
}"""


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Six requests in a small pool: shared prefixes, waiting, a preemption, an abort."""
    requests = [
        SimulatedRequest(0, list(range(18)), 10),
        SimulatedRequest(2, 30, 14),
        SimulatedRequest(3, [*range(16), 99], 9),
        SimulatedRequest(5, 9, 20),
        SimulatedRequest(6, 12, 9),
        SimulatedRequest(9, 22, 5, abort_step=13),
    ]
    made = simulate(requests, num_kv_blocks=20, block_size=4, max_num_batched_tokens=24)
    assert any(record.preempted for record in made)
    assert any(record.blocked_by for record in made)
    return made


def start(page: Any, trace: Trace | None, read: int | None = None, **options: Any) -> None:
    """Open a page with a player of the trace, or of its first `read` records."""
    open_site(page, body='<div id="root"></div>', head=HEAD)
    text = b"".join(trace.lines()).decode() if trace is not None else None
    page.evaluate(
        START, {"text": text, "options": options} | ({"read": read} if read is not None else {})
    )
    settle(page)


def wait_for_position(page: Any, text: str) -> None:
    """A live picture is drawn when there is time for it."""
    page.wait_for_function(
        "text => document.querySelector('.nv-position').textContent === text", arg=text
    )


def picture(page: Any, view: str) -> str:
    settle(page)
    return page.evaluate(
        "(view) => document.querySelector(`[data-view=${view}] canvas`).toDataURL()", view
    )


def story(page: Any) -> str:
    settle(page)
    return page.locator(".nv-story").inner_text()


def click_region(page: Any, view: str, **wanted: Any) -> None:
    """Click into the middle of what a view drew for a block, request or step."""
    settle(page)
    box = page.evaluate(
        """([name, wanted]) => {
          const view = player.views.find((each) => each.name === name);
          const found = view.regions.find((r) => Object.entries(wanted).every(([key, value]) => r[key] === value));
          const { left, top } = view.canvas.getBoundingClientRect();
          return [left + scrollX + found.x + found.width / 2, top + scrollY + found.y + found.height / 2];
        }""",
        [view, wanted],
    )
    page.mouse.click(*box)


# ---------------------------------------------------------------- controls


def test_buttons_keys_and_slider_move_the_reader_and_all_pictures(page: Any, trace: Trace) -> None:
    start(page, trace)
    last = trace.steps[-1].step
    assert position(page) == f"step 0 of 0–{last}"
    assert page.get_by_role("button", name="Step back").is_disabled()
    before = {view: picture(page, view) for view in ("tables", "timeline")}

    page.get_by_role("button", name="Step forward").click()
    settle(page)
    assert position(page) == f"step 1 of 0–{last}"
    assert page.evaluate("told") == 1
    assert all(picture(page, view) != before[view] for view in before)

    slider = page.get_by_role("slider", name="Step")
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    settle(page)
    assert position(page) == f"step 3 of 0–{last}"
    assert slider.get_attribute("aria-valuetext") == position(page)
    slider.press("End")
    settle(page)
    assert position(page) == f"step {last} of 0–{last}"
    assert page.get_by_role("button", name="Step forward").is_disabled()
    slider.press("Home")
    assert {
        view: picture(page, view) for view in before
    } == before  # what is drawn depends on the step alone

    slider.fill("7")
    settle(page)
    assert position(page) == f"step 7 of 0–{last}"
    assert (
        page.locator("[data-view=tables] canvas")
        .get_attribute("aria-label")
        .startswith("Block tables, step 7: ")
    )


def test_every_control_can_be_reached_by_keyboard_and_shows_where_one_is(
    page: Any, trace: Trace
) -> None:
    start(page, trace)
    page.evaluate("player.seek(3)")
    settle(page)
    names = []
    for _ in range(5):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "[document.activeElement.ariaLabel, "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert focused[1] == "solid"
        names.append(focused[0])
    assert names == ["Step back", "Play", "Step forward", "Step", "Speed, in steps per second"]
    page.keyboard.press("Tab")  # on into the story, whose names are buttons
    page.keyboard.press("Enter")
    assert "prompt" in story(page)


def test_keys_of_a_page_move_the_player_unless_one_types(page: Any, trace: Trace) -> None:
    open_site(page, body='<input id="field"><div id="root"></div>', head=HEAD)
    page.evaluate(
        START.replace("...options,", "keysFrom: document,"),
        {"text": b"".join(trace.lines()).decode()},
    )
    for key, index in (
        ("ArrowRight", 1),
        ("End", len(trace) - 1),
        ("ArrowLeft", len(trace) - 2),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert page.evaluate("player.index") == index
    page.keyboard.press(" ")
    assert page.evaluate("player.playing")
    page.keyboard.press(" ")
    page.locator("#field").focus()
    for key in ("ArrowRight", "End", " "):
        page.keyboard.press(key)
    assert page.locator("#field").input_value() == " "
    assert page.evaluate("[player.index, player.playing]") == [0, False]


def test_slider_and_label_count_the_steps_of_the_engine(page: Any, trace: Trace) -> None:
    """A record may begin when the engine has computed for long, and has gaps where it was idle."""
    later = Trace(settings=trace.settings)
    later.steps = [
        dataclasses.replace(record, step=386 + record.step + 5 * (i > 8))
        for i, record in enumerate(trace)
    ]
    last = later.steps[-1].step
    start(page, later)
    slider = page.get_by_role("slider", name="Step")
    shown = "slider => [slider.min, slider.max, slider.value, slider.ariaValueText].join()"
    assert slider.evaluate(shown) == f"386,{last},386,step 386 of 386–{last}"
    slider.fill("390")
    settle(page)
    assert position(page) == f"step 390 of 386–{last}" and page.evaluate("player.index") == 4
    slider.fill("397")  # between two records
    settle(page)
    assert position(page) == f"step 394 of 386–{last}" and slider.input_value() == "394"
    start(page, later, read=1)
    assert position(page) == "step 386" and slider.is_disabled()


def test_playing_goes_to_the_end_at_the_chosen_speed(page: Any, trace: Trace) -> None:
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    start_text = b"".join(trace.lines()).decode()
    open_site(page, body='<div id="root"></div>', head=HEAD)
    page.evaluate(START, {"text": start_text, "options": {"speed": 4}})
    page.clock.run_for(100)
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(1100)
    assert page.evaluate("player.index") == 4
    assert page.get_by_role("button", name="Pause").count() == 1
    page.keyboard.press("Escape")
    page.get_by_role("slider").press(" ")  # pauses
    page.clock.run_for(2000)
    assert page.evaluate("player.index") == 4
    page.get_by_label("Speed").select_option("64")
    page.get_by_role("slider").press(" ")
    page.clock.run_for(3000)
    assert page.evaluate("player.index") == len(trace) - 1
    assert page.get_by_role("button", name="Play").count() == 1  # it has stopped by itself
    page.get_by_role("button", name="Play").click()  # and starts over
    page.clock.run_for(50)
    assert page.evaluate("player.index") < len(trace) - 1


def test_nothing_is_drawn_while_nothing_changes(page: Any, trace: Trace) -> None:
    start(page, trace)
    page.evaluate(
        "window.draws = 0; const draw = player._draw; player._draw = (now) => { draws += 1; "
        "draw.call(player, now); }; 0"
    )
    page.mouse.move(5, 5)
    for _ in range(3):
        settle(page)
    assert page.evaluate("draws") == 0
    page.evaluate("player.seek(2); player.seek(5); player.select({ kind: 'block', id: 1 })")
    settle(page)
    assert page.evaluate("draws") == 1


# ---------------------------------------------------------------- stories and selection


def test_a_block_is_selected_in_all_views_and_tells_its_story(page: Any, trace: Trace) -> None:
    start(page, trace, views=["tables", "pool"])
    page.evaluate("player.seek(4)")
    before = {view: picture(page, view) for view in ("tables", "pool")}
    click_region(page, "pool", kind="block", id=0)
    page.mouse.move(2, 2)
    assert all(picture(page, view) != before[view] for view in before)
    told = story(page)
    assert (
        told.startswith("Block 0") and "r0" in told and "shared" in told and "by 2 requests" in told
    )
    assert "4 of 4 tokens" in told and "step 3: found in the prefix cache by r2" in told
    page.locator(".nv-slider").press("Escape")
    assert {view: picture(page, view) for view in before} == before
    assert story(page).startswith("Step 4")


def test_a_request_tells_its_story(page: Any, trace: Trace) -> None:
    start(page, trace)
    preempted = next(record for record in trace if record.preempted)
    (request_id,) = preempted.preempted
    metrics = request_metrics(trace)[request_id]
    page.evaluate("player.seek(player.history.length - 1)")
    click_region(page, "timeline", kind="request", id=request_id)
    page.mouse.move(2, 2)
    told = story(page)
    assert told.startswith(request_id)
    assert f"after {metrics['ttft']:.0f} step" in told
    assert f"step {preempted.step}: preempted" in told
    # A press on a step in the story goes there; a press on a block tells of it.
    page.locator(".nv-story").get_by_role("button", name=f"step {preempted.step - 1}").or_(
        page.locator(".nv-story").get_by_role("button", name=f"step {preempted.step}", exact=True)
    ).first.click()
    settle(page)
    assert position(page) in (
        f"step {preempted.step} of 0–{trace.steps[-1].step}",
        f"step {preempted.step - 1} of 0–{trace.steps[-1].step}",
    )


def test_a_step_says_what_was_scheduled_and_who_waits(page: Any, trace: Trace) -> None:
    start(page, trace)
    at, record = next((i, r) for i, r in enumerate(trace) if r.blocked_by == "kv blocks")
    page.evaluate("(at) => player.seek(at)", at)
    told = story(page)
    assert told.startswith(f"Step {record.step}\n")
    assert f"{record.num_tokens} of at most {record.token_budget}" in told
    assert "too few blocks are free" in told
    for request_id in record.waiting:
        assert request_id in told


@pytest.mark.parametrize(
    ("settings", "fate"),
    [
        ({}, "its output so far again, except for tokens that are still in the prefix cache then"),
        ({"enable_prefix_caching": False}, "its prompt and its output so far again"),
        ({"preemption_mode": "swap"}, "copied to host memory, and back before it runs again"),
    ],
)
def test_a_step_says_what_becomes_of_who_was_preempted(
    page: Any, settings: dict[str, Any], fate: str
) -> None:
    requests = [SimulatedRequest(0, 16, 20), SimulatedRequest(0, 16, 20)]
    trace = simulate(requests, num_kv_blocks=10, block_size=4, **settings)
    start(page, trace)
    at, record = next((i, r) for i, r in enumerate(trace) if r.preempted)
    page.evaluate("(at) => player.seek(at)", at)
    (victim,) = record.preempted
    told = next(line for line in story(page).splitlines() if line.startswith(f"{victim} loses"))
    assert told.endswith(fate)


def test_hovering_tells_and_leaving_brings_the_selected_back(page: Any, trace: Trace) -> None:
    start(page, trace, views=["pool"])
    page.evaluate("player.seek(4); player.select({ kind: 'request', id: 'r1' })")
    click = "player.views[0].regions.find((r) => r.kind === 'block' && r.id === 0)"
    settle(page)
    x, y = page.evaluate(
        f"(() => {{ const r = {click}, b = player.views[0].canvas.getBoundingClientRect(); return "
        "[b.x + r.x + 3, b.y + r.y + 3]; })()"
    )
    page.mouse.move(x, y)
    assert story(page).startswith("Block 0")
    page.mouse.move(x, 2)
    assert story(page).startswith("r1")


def test_each_view_shows_in_a_player_and_has_a_name(page: Any, trace: Trace) -> None:
    for view in VIEWS:
        start(page, trace, views=[view])
        page.evaluate("player.seek(12)")
        settle(page)
        canvas = page.get_by_role("img")
        assert re.match(
            r".+, step 12: \d+ requests computed", canvas.get_attribute("aria-label")
        ), view
        assert canvas.bounding_box()["height"] > 40, view


def test_the_views_are_those_of_the_modules(page: Any) -> None:
    open_site(page)
    assert page.evaluate(
        "import('/web/views.js').then((module) => Object.keys(module.VIEWS))"
    ) == list(VIEWS)


# ---------------------------------------------------------------- live


def test_live_follows_until_it_is_paused(page: Any, trace: Trace) -> None:
    start(page, trace, read=5, live=True)
    append = (
        "(to) => { while (history_.length < to) history_.append(whole.record(history_.length)); "
        "player.changed(); }"
    )
    assert page.evaluate("player.index") == 4
    page.evaluate(append, 9)
    wait_for_position(page, "step 8 of 0–8")
    live = page.get_by_role("button", name="Follow")
    assert live.get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Step back").click()
    page.evaluate(append, 12)
    wait_for_position(page, "step 7 of 0–11")
    assert live.get_attribute("aria-pressed") == "false"
    live.click()
    settle(page)
    assert (position(page), live.get_attribute("aria-pressed")) == ("step 11 of 0–11", "true")


def test_an_empty_live_page_says_so_and_begins_with_the_first_record(
    page: Any, trace: Trace
) -> None:
    start(page, trace, read=0, live=True)
    assert position(page) == "no step yet"
    assert page.get_by_role("button", name="Play").is_disabled()
    page.keyboard.press("ArrowRight")
    page.evaluate("history_.append(whole.record(0)); player.changed()")
    wait_for_position(page, "step 0")


def test_records_that_were_dropped_cannot_be_looked_at(page: Any, trace: Trace) -> None:
    start(page, trace, live=True)
    page.evaluate("player.pause(); player.seek(0)")
    page.evaluate("""async () => {
          const { History } = await import("/web/history.js");
          window.history_ = new History(whole.settings, { keep: 64 });
          player.setHistory(history_);
          for (let i = 0; i < 8; i++) for (let k = 0; k < 20; k++) history_.append(whole.record(k));
          player.pause();
          player.seek(history_.first);
          for (let i = 0; i < 8; i++) for (let k = 0; k < 20; k++) history_.append(whole.record(k));
          player.changed();
        }""")
    settle(page)
    assert page.evaluate("[player.index - history_.first, history_.first > 0]") == [0, True]


def test_a_frame_between_the_loss_of_a_record_and_the_word_of_it(page: Any, trace: Trace) -> None:
    start(page, trace, live=True)
    page.evaluate("""async () => {
          const { History } = await import("/web/history.js");
          window.history_ = new History(whole.settings, { keep: 64 });
          window.append = () => { for (let k = 0; k < 20; k++) history_.append(whole.record(k)); };
          append();
          player.setHistory(history_);
          player.pause();
          player.seek(0);
          player.hover = { kind: "step", index: 3 };
          while (!history_.first) append();
          player.select({ kind: "request", id: "r1" }); // draws, and `changed` was not called
        }""")
    settle(page)  # the page fixture fails at an error in the frame
    assert page.evaluate("history_.record(player.index) === history_.record(history_.first)")
    assert story(page).startswith("r1")


def test_a_reader_who_looks_back_gets_no_picture_for_every_batch(page: Any, trace: Trace) -> None:
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    open_site(page, body='<div id="root"></div>', head=HEAD)
    text = b"".join(trace.lines()).decode()
    page.evaluate(START, {"text": text, "options": {"live": True}, "read": 3})
    page.evaluate("player.pause()")
    page.clock.run_for(2000)
    page.evaluate("""() => {
          window.draws = 0;
          const draw = player._draw;
          player._draw = (now) => { draws += 1; draw.call(player, now); player.drawingTime = 1e6; };
        }""")
    # So slow that a picture a second is all there is time for.
    page.evaluate("player.drawingTime = 1e6")
    for _ in range(15):
        page.evaluate("history_.append(whole.record(history_.length)); player.changed()")
        page.clock.run_for(50)
    assert 1 <= page.evaluate("draws") <= 2
    assert page.evaluate("player.index") == 2


def test_a_live_picture_that_was_too_high_for_a_while_shrinks(page: Any, trace: Trace) -> None:
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    open_site(page, body='<div id="root"></div>', head=HEAD)
    text = b"".join(trace.lines()).decode()
    page.evaluate(START, {"text": text, "options": {"live": True, "views": ["queues"]}, "read": 10})
    page.clock.run_for(1000)
    height = "player.views[0].height"
    needed = page.evaluate(height)
    grow = (
        f"player.views[0].drawing = {{ ...player.views[0].drawing, height: () => {needed} + more "
        "}; player.changed()"
    )
    for more in (100, 20):
        page.evaluate(f"more => {{ {grow} }}", more)
        page.clock.run_for(1500)
        assert page.evaluate(height) == needed + 100
    page.clock.run_for(6000)  # nothing more is said
    assert page.evaluate(height) == needed + 20
    page.evaluate("player.pause()")
    page.evaluate(f"more => {{ {grow} }}", 0)
    page.clock.run_for(9000)
    assert page.evaluate(height) == needed + 20  # who looks back is not disturbed


@pytest.mark.parametrize(("motion", "least", "most"), [("reduce", 2, 3), ("no-preference", 15, 21)])
def test_who_asked_for_less_motion_gets_two_pictures_a_second(
    page: Any, trace: Trace, motion: str, least: int, most: int
) -> None:
    page.emulate_media(reduced_motion=motion)
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    open_site(page, body='<div id="root"></div>', head=HEAD)
    text = b"".join(trace.lines()).decode()
    page.evaluate(START, {"text": text, "options": {"live": True}, "read": 0})
    page.clock.run_for(2000)
    page.evaluate(
        "window.draws = 0; const draw = player._draw; player._draw = (now) => { draws += 1; "
        "draw.call(player, now); }; 0"
    )
    for _ in range(20):
        page.evaluate("history_.append(whole.record(history_.length)); player.changed()")
        page.clock.run_for(50)
    assert least <= page.evaluate("draws") <= most


# ---------------------------------------------------------------- appearance


def test_themes_follow_the_page(page: Any, trace: Trace) -> None:
    page.emulate_media(color_scheme="dark")
    start(page, trace, views=["pool"])
    theme = "document.querySelector('.nv-player').dataset.theme"
    assert page.evaluate(theme) == "dark"
    dark = picture(page, "pool")
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{theme} === 'light'")
    assert picture(page, "pool") != dark
    # JupyterLab's word goes before the system's.
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    page.wait_for_function(f"{theme} === 'dark'")
    assert picture(page, "pool") == dark


def test_it_fits_any_width_and_redraws_when_that_changes(page: Any, trace: Trace) -> None:
    start(page, trace, views=list(VIEWS))
    for width in (320, 1100, 360, 700):
        page.set_viewport_size({"width": width, "height": 800})
        settle(page)
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for canvas in page.get_by_role("img").all():
            box = canvas.bounding_box()
            assert box["x"] + box["width"] <= width
        boxes = [
            each.bounding_box()
            for each in page.locator(".nv-controls > *:visible, .nv-buttons > *").all()
        ]
        inner = [b for b in boxes if b]
        assert all(b["x"] + b["width"] <= width for b in inner), width


def test_taking_it_off_the_page_leaves_nothing(page: Any, trace: Trace) -> None:
    start(page, trace)
    page.evaluate("player.play(); player.destroy()")
    settle(page)
    assert page.locator("#root > *").count() == 0
    page.evaluate(
        "window.draws = 0; player._draw = () => (draws += 1); document.body.dataset.jpThemeLight = "
        "'false'"
    )
    settle(page)
    assert page.evaluate("draws") == 0


def test_an_unknown_view_is_refused(page: Any) -> None:
    open_site(page, body='<div id="root"></div>')
    with pytest.raises(Exception, match="no such view: blocks; there are tables, pool"):
        page.evaluate(START, {"text": None, "options": {"views": ["blocks"]}})


# ---------------------------------------------------------------- the notebook's widget


def test_the_bundle_has_every_module_and_no_name_twice() -> None:
    text = bundle("film.js")
    check_bundle(text)
    both = text + bundle("rank_player.js")
    modules = set(re.findall(r"^// (\S+\.js)$", both, re.MULTILINE))
    assert modules == {path.name for path in WEB.glob("*.js")}
    assert not re.search(r"^export\b", text, re.MULTILINE)
    exports = re.findall(r"^export .*", widget_module(), re.MULTILINE)
    assert (
        exports == ["export default { render: renderWidget };"] and "film.js" not in widget_module()
    )


MODEL = """async ({ bundle, text, step }) => {
  const module = await import(URL.createObjectURL(new Blob([bundle], { type: "text/javascript" })));
  const state = { lines: new DataView(new TextEncoder().encode(text).buffer), views: ["pool"], theme: "auto", speed: 2, step };
  const listeners = {};
  window.saved = 0;
  window.model = {
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; for (const listener of listeners[`change:${name}`] ?? []) listener(); },
    save_changes: () => { saved += 1; },
    on: (name, listener) => (listeners[name] ??= []).push(listener),
    off: (name, listener) => { listeners[name] = listeners[name].filter((each) => each !== listener); },
  };
  window.finish = module.default.render({ model, el: document.querySelector("#root") });
}"""


def test_the_widget_keeps_its_step_and_the_kernels_equal(page: Any, trace: Trace) -> None:
    open_site(page, body='<div id="root"></div>', head=HEAD)
    text = b"".join(trace.lines()).decode()
    page.evaluate(MODEL, {"bundle": widget_module(), "text": text, "step": 5})
    settle(page)
    assert position(page).startswith("step 5 of")
    page.get_by_role("button", name="Step forward").click()
    assert page.evaluate("[model.get('step'), saved]") == [6, 1]
    page.evaluate("model.set('step', 11)")
    settle(page)
    assert position(page).startswith("step 11 of")
    assert page.evaluate("saved") == 1  # the kernel is not told what it said itself

    shorter = simulate([SimulatedRequest(0, 5, 4)], num_kv_blocks=8, block_size=4)
    page.evaluate(
        "(text) => model.set('lines', new DataView(new TextEncoder().encode(text).buffer))",
        b"".join(shorter.lines()).decode(),
    )
    settle(page)
    assert position(page) == f"step {shorter.steps[-1].step} of 0–{shorter.steps[-1].step}"
    page.evaluate("model.set('lines', new DataView(new TextEncoder().encode('{}').buffer))")
    assert "not a nanovllm trace" in page.get_by_role("alert").inner_text()
    page.evaluate("finish()")
    assert page.locator(".nv-player").count() == 0


def test_the_players_python_side(trace: Trace, tmp_path: pathlib.Path) -> None:
    player = play(trace, step=12)
    assert (
        repr(player)
        == f"Player: 6 requests, {len(trace)} steps; run this cell in JupyterLab to play it"
    )
    picture = player._repr_mimebundle_()[0]["image/png"]
    assert picture == image_bytes(draw_still(trace, ["tables", "timeline"]))
    timeline = play(trace, views=["timeline"])._repr_mimebundle_()[0]["image/png"]
    assert timeline == image_bytes(draw_still(trace, ["timeline"])) != picture
    trace.save(tmp_path / "run.jsonl")
    assert (
        play(tmp_path / "run.jsonl").lines == player.lines == (tmp_path / "run.jsonl").read_bytes()
    )
    data, _ = player._repr_mimebundle_()
    assert data["text/plain"] == repr(player)


def test_a_notebook_stores_the_trace_that_a_page_plays(
    trace: Trace, tmp_path: pathlib.Path
) -> None:
    """Measured times are left out: they would differ from run to run."""
    kept = []
    for pace in (0.5, 0.7):
        measured = Trace(settings=trace.settings | TraceSettings(model="/home/me/a model"))
        measured.settings = msgspec.structs.replace(measured.settings, time_unit="s")
        for number, record in enumerate(trace):
            times = {"start": pace * number, "duration": pace, "planned": pace / 2}
            arrivals = {name: Arrival(time=pace * number, max_tokens=5) for name in record.arrived}
            measured.record(dataclasses.replace(record, arrivals=arrivals, **times))
        player = play(measured, views=["pool"], step=7)
        data, _ = player._repr_mimebundle_()
        kept.append(data[stored.TRACE])
    assert kept[0] == kept[1]
    assert {name: kept[0][name] for name in ("views", "step", "speed")} == {
        "views": ["pool"],
        "step": 7,
        "speed": 2.0,
    }
    (tmp_path / "run.jsonl").write_bytes(zlib.decompress(base64.b64decode(kept[0]["trace"])))
    again = Trace.load(tmp_path / "run.jsonl")
    assert again.settings.model == "" and again.settings.time_unit == "steps"
    assert [record.requests for record in again] == [record.requests for record in trace]
    assert [record.start for record in again] == list(range(len(trace)))
    # Simulated times are the same in every run.
    simulated = play(trace)._repr_mimebundle_()[0][stored.TRACE]["trace"]
    (tmp_path / "run.jsonl").write_bytes(zlib.decompress(base64.b64decode(simulated)))
    assert Trace.load(tmp_path / "run.jsonl").settings.time_unit == "simulated units"


def test_a_trace_that_is_too_long_for_a_page_is_not_stored(trace: Trace) -> None:
    record = trace.steps[0]
    texts = {"r0": random.Random(0).randbytes(150_000).hex()}
    trace = Trace(settings=trace.settings)
    trace.record(dataclasses.replace(record, text=texts))
    assert play(trace)._repr_mimebundle_()[0].keys() & {stored.TRACE, "image/png"} == {"image/png"}


def test_what_a_player_refuses(tmp_path: pathlib.Path, trace: Trace) -> None:
    with pytest.raises(ValueError, match=r"there is no trace: .*trace=True"):
        play(None)
    with pytest.raises(ValueError, match="no such view: block; there are tables, "):
        play(trace, views=["block"])
    with pytest.raises(ValueError, match="at least one step"):
        play(Trace())
    (tmp_path / "foreign").write_text("hello\n")
    with pytest.raises(TraceError, match="not a nanovllm trace"):
        play(tmp_path / "foreign")


# ---------------------------------------------------------------- what if

REQUESTS = [SimulatedRequest(4 * i, 20 + i % 7, 15) for i in range(16)]


def test_turning_a_control_runs_the_simulation_again() -> None:
    seen = what_if(REQUESTS, num_kv_blocks=40, block_size=4, max_num_batched_tokens=32)
    assert isinstance(seen.player, Player)
    assert seen.values == {
        "block_size": 4,
        "num_kv_blocks": 40,
        "max_num_batched_tokens": 32,
        "batching_policy": "chunked",
        "arrival_rate": 1,
    }
    seen.controls["num_kv_blocks"].value = 20
    expected = simulate(REQUESTS, num_kv_blocks=20, block_size=4, max_num_batched_tokens=32)
    assert seen.player.trace.steps == expected.steps
    assert seen.figures == figures(expected)
    seen.controls["arrival_rate"].value = 4
    faster = [SimulatedRequest(i, 20 + i % 7, 15) for i in range(16)]
    assert (
        seen.player.trace.steps
        == simulate(faster, num_kv_blocks=20, block_size=4, max_num_batched_tokens=32).steps
    )
    assert (
        repr(seen) == "What if: 5 controls and a player; run this cell in JupyterLab to turn them"
    )
    still = image_bytes(draw_still(seen.player.trace, seen.player.views))
    assert seen._repr_mimebundle_()["image/png"] == still


def test_an_impossible_setting_says_why_and_keeps_the_last_picture() -> None:
    seen = what_if(
        REQUESTS, num_kv_blocks=40, block_size=4, controls=["num_kv_blocks", "batching_policy"]
    )
    before = seen.player.lines
    seen.controls["num_kv_blocks"].min = 2
    seen.controls["num_kv_blocks"].value = 2
    with pytest.raises(ValueError) as error:
        simulate(REQUESTS, num_kv_blocks=2, block_size=4)
    assert seen.error == str(error.value)
    assert seen.player.lines == before
    seen.controls["num_kv_blocks"].value = 30
    assert seen.error == "" and seen.player.lines != before


def test_figures_of_a_trace_and_their_change() -> None:
    trace = simulate(REQUESTS, num_kv_blocks=20, block_size=4, max_num_batched_tokens=32)
    metrics = request_metrics(trace).values()
    shown = figures(trace)
    assert shown["worst gap"] == max(gap for each in metrics for gap in each["itl"])
    assert shown["TTFT p99"] == max(each["ttft"] for each in metrics)
    assert shown["preemptions"] == sum(each["num_preemptions"] for each in metrics) > 0
    assert shown["KV peak"] == 100 * max(1 - r.num_free_blocks / 20 for r in trace)


def test_requests_can_be_made_from_the_controls() -> None:
    def some(prompt_len: int = 8, sharing: bool = False) -> list[SimulatedRequest]:
        prompts = [[7] * prompt_len if sharing else prompt_len for _ in range(3)]
        return [SimulatedRequest(5 * i, prompt, 3) for i, prompt in enumerate(prompts)]

    seen = what_if(
        some,
        controls={"prompt_len": [4, 16, 64], "sharing": None, "arrival_rate": [1, 5]},
        block_size=4,
    )
    assert seen.values == {"prompt_len": 8, "sharing": False, "arrival_rate": 1}
    seen.controls["prompt_len"].value = 64
    assert [record.arrived for record in seen.player.trace if record.arrived] == [
        {f"r{i}": 64} for i in range(3)
    ]
    seen.controls["sharing"].value = True
    assert sum(sum(record.admitted.values()) for record in seen.player.trace) > 0
    seen.controls["arrival_rate"].value = 5
    assert [record.step for record in seen.player.trace if record.arrived] == [0, 1, 2]
    fixed = what_if(some, controls=["num_kv_blocks"], num_kv_blocks=40, prompt_len=32)
    assert fixed.player.trace.steps[0].arrived == {"r0": 32}


def test_the_pool_can_be_given_in_tokens() -> None:
    seen = what_if(REQUESTS, controls=["block_size", "kv_tokens"], kv_tokens=160, block_size=4)
    assert seen.player.trace.settings.num_blocks == 40
    seen.controls["block_size"].value = 16
    assert seen.player.trace.settings.num_blocks == 10


def test_a_control_that_nobody_hears_is_refused() -> None:
    with pytest.raises(ValueError, match="nor the requests have the option temperature"):
        what_if(REQUESTS, controls=["temperature"])
    with pytest.raises(ValueError, match="step_cost needs its values"):
        what_if(REQUESTS, controls=["step_cost"])
