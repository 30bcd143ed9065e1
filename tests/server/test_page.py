"""The live page in a real browser, against the real server and the course model."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, Route, expect

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import COURSE_MODEL
from nanovllm.lab.viz import SimulatedRequest, simulate
from nanovllm.lab.viz.page import photograph
from tests.server_process import ServerProcess, wait_until
from tests.trace.drafting import drafting_trace

pytest_plugins = ["tests.browser"]

SMALL_POOL = ["--num-kv-blocks", "32", "--max-num-batched-tokens", "256", "--max-num-seqs", "8"]
FAST = ["--dtype", "auto", "--attention-backend", "auto"]
ANSWER_MS = 240_000  # a loaded machine computes slowly


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The course model with a pool so small that a burst does not fit."""
    with ServerProcess(
        resolve_model(COURSE_MODEL), tmp_path_factory.mktemp("page"), *SMALL_POOL, *FAST
    ) as running:
        yield running
        wait_until(running.is_idle, what="all blocks are free again")


@pytest.fixture
def live(page: Page, server: ServerProcess) -> Page:
    """The page of that server, following it."""
    return opened(page, server)


def opened(page: Page, server: ServerProcess) -> Page:
    page.goto(server.url)
    expect(page.locator("#connection")).to_have_text("connected")
    return page


def send(page: Page, text: str, **settings: str) -> None:
    """Type a question, after the settings by their names, and press Enter."""
    if settings:
        if page.locator("#settings").is_hidden():
            page.get_by_role("button", name="Settings").click()
        for name, value in settings.items():
            page.locator(f"#settings [name={name}]").fill(value)
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")


def last_answer(page: Page) -> Locator:
    return page.locator(".answer").last


def fact(page: Page, name: str) -> Locator:
    """One of the numbers under the last answer."""
    return last_answer(page).locator(f"[data-fact={name}]")


def figure(page: Page, name: str) -> Locator:
    """One of the engine's figures."""
    return page.locator(f"#figures [data-figure={name}] b")


def picture(page: Page, view: str) -> str:
    """The pixels of one of the player's pictures."""
    return page.locator(f'[data-view="{view}"] canvas').evaluate("canvas => canvas.toDataURL()")


def test_a_question_is_answered_and_shown_at_work(live: Page) -> None:
    before = picture(live, "pool")
    send(live, "What is the capital of France?", temperature="0")
    expect(fact(live, "reason")).to_have_text("complete", timeout=ANSWER_MS)
    expect(last_answer(live).locator(".prose")).to_have_text("The capital of France is Paris.")
    expect(fact(live, "tokens")).to_have_text("8 tokens")
    expect(fact(live, "ttft")).to_have_text(re.compile(r"^first token after \d+(\.\d+)? m?s$"))
    expect(fact(live, "rate")).to_have_text(re.compile(r"^\d+\.\d tokens/s$"))
    expect(fact(live, "cached")).to_have_text(re.compile(r"^\d+ of 37 prompt tokens cached$"))
    expect(live.locator("#announcer")).to_have_text("The capital of France is Paris.")
    # The request has a colour in the engine; pressing it there tells its story under this page's
    # name for it.
    last_answer(live).get_by_role("button", name="Show this request in the engine").click()
    expect(live.locator(".nv-story")).to_contain_text("you")
    expect(figure(live, "running")).to_have_text("0")
    expect(figure(live, "kv")).to_have_text("0 %")
    assert picture(live, "pool") != before


def test_a_suggestion_is_asked_greedily_unless_the_settings_say_otherwise(live: Page) -> None:
    with live.expect_request("**/v1/chat/completions") as asked:
        live.get_by_role("button", name="What is the capital of Japan?").click()
    assert asked.value.post_data_json.items() >= {"temperature": 0, "max_tokens": 32}.items()
    expect(fact(live, "reason")).to_have_text("complete", timeout=ANSWER_MS)
    expect(last_answer(live).locator(".prose")).to_contain_text("Tokyo")
    live.get_by_role("button", name="New chat").click()
    live.get_by_role("button", name="Settings").click()
    live.locator("#settings [name=max_tokens]").fill("3")
    with live.expect_request("**/v1/chat/completions") as asked:
        live.get_by_role("button", name="What is the capital of Japan?").click()
    assert asked.value.post_data_json.items() >= {"temperature": 0, "max_tokens": 3}.items()
    expect(fact(live, "reason")).to_have_text("cut off at the token limit", timeout=ANSWER_MS)


def test_a_follow_up_finds_the_conversation_in_the_cache(live: Page) -> None:
    send(live, "What is the capital of France?", temperature="0")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    send(live, "And of Spain?")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    words = fact(live, "cached").inner_text().split()
    assert 32 <= int(words[0]) < int(words[2])
    expect(figure(live, "hits")).not_to_have_text("0 %")


def test_an_answer_is_stopped_midway(live: Page, server: ServerProcess) -> None:
    send(live, "Tell a very long story about the sea.", temperature="0")
    expect(last_answer(live).locator(".prose p")).to_contain_text(" ", timeout=ANSWER_MS)
    expect(figure(live, "running")).to_have_text("1")
    expect(figure(live, "kv")).not_to_have_text("0 %")
    live.get_by_role("button", name="Stop", exact=True).click()
    expect(fact(live, "reason")).to_have_text("stopped by you")
    expect(figure(live, "running")).to_have_text("0")
    expect(figure(live, "kv")).to_have_text("0 %")
    wait_until(server.is_idle, what="the engine has given up the request")
    assert last_answer(live).locator(".prose").inner_text()
    expect(live.get_by_role("button", name="Send")).to_be_visible()


def test_a_reload_keeps_the_chat(live: Page) -> None:
    send(
        live,
        "Say `code` and nothing else.",
        temperature="0",
        max_tokens="5",
        system="You are terse.",
    )
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    live.get_by_label("Your message").fill("not sent yet")
    said = live.locator("#messages .prose").inner_text()
    live.reload()
    expect(live.locator(".question p")).to_have_text("Say `code` and nothing else.")
    expect(last_answer(live).locator(".prose")).to_have_text(said)
    expect(fact(live, "tokens")).to_have_text("5 tokens")
    assert live.get_by_label("Your message").input_value() == "not sent yet"
    assert live.locator("#settings [name=system]").input_value() == "You are terse."
    live.get_by_role("button", name="New chat").click()
    expect(live.locator("#messages article")).to_have_count(0)
    live.reload()
    expect(live.locator(".welcome")).to_be_visible()


def test_the_last_question_is_edited_and_sent_again(live: Page) -> None:
    send(live, "What is the capital of France?", temperature="0", max_tokens="12")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    live.get_by_role("button", name="Edit").click()
    live.get_by_label("Your message").press("Escape")
    expect(live.locator(".question")).to_have_count(1)
    live.get_by_role("button", name="Edit").click()
    expect(live.get_by_label("Your message")).to_be_focused()
    send(live, "What is the capital of Germany?")
    expect(live.locator(".question p")).to_have_text(["What is the capital of Germany?"])
    expect(last_answer(live).locator(".prose")).to_contain_text("Berlin", timeout=ANSWER_MS)
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)


def test_shift_enter_is_a_new_line(live: Page) -> None:
    field = live.get_by_label("Your message")
    field.fill("one")
    field.press("Shift+Enter")
    field.type("two")
    assert field.input_value() == "one\ntwo"
    expect(live.locator(".question")).to_have_count(0)


def test_what_a_model_writes_is_never_markup(live: Page) -> None:
    evil = "<img src=x onerror=alert(1)> **bold** <b>no</b>\n```html\n<script>1</script>\n```"
    live.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body=f"data: {json_chunk(evil)}\n\ndata: [DONE]\n\n"
        ),
    )
    send(live, "Hello")
    answer = last_answer(live).locator(".prose")
    expect(answer).to_contain_text("<img src=x onerror=alert(1)> bold <b>no</b>")
    expect(answer.locator("pre")).to_have_text("<script>1</script>")
    expect(answer.locator("img, b, script")).to_have_count(0)
    expect(answer.locator("strong")).to_have_text("bold")


def json_chunk(text: str) -> str:
    """A chunk of a streamed chat that has the whole answer."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "chatcmpl-1", "choices": [choice]})


def test_a_refused_question_says_why(live: Page, noise: list[str]) -> None:
    noise.append("400")
    send(live, "Hello", max_tokens="5000")
    expect(last_answer(live).locator(".problem")).to_contain_text("max_tokens is too large")
    expect(last_answer(live).locator(".problem")).to_contain_text("512 tokens")
    send(live, "Hello", max_tokens="3")
    expect(fact(live, "reason")).to_have_text("cut off at the token limit", timeout=ANSWER_MS)


def test_a_burst_fills_the_pool_until_requests_are_preempted(live: Page) -> None:
    expect(figure(live, "preempted")).to_have_text("0")
    live.get_by_label("Demo load").fill("8")
    expect(live.locator("#load-count")).to_have_text("8 requests")
    live.get_by_role("button", name="Fire a burst").click()
    expect(figure(live, "running")).to_have_text(re.compile("[5-8]"), timeout=ANSWER_MS)
    expect(figure(live, "kv")).to_have_text(re.compile(r"^(9\d|100) %$"), timeout=ANSWER_MS)
    expect(figure(live, "preempted")).not_to_have_text("0", timeout=ANSWER_MS)
    expect(live.locator("#load-state")).to_have_text("8 done", timeout=ANSWER_MS)
    expect(figure(live, "hits")).not_to_have_text("0 %")
    expect(figure(live, "running")).to_have_text("0")
    expect(figure(live, "kv")).to_have_text("0 %")


def test_a_burst_is_stopped_and_one_looks_back(live: Page, server: ServerProcess) -> None:
    live.get_by_role("button", name="Fire a burst").click()
    expect(live.locator("#load-state")).to_contain_text("generating", timeout=ANSWER_MS)
    expect(figure(live, "running")).to_have_text(re.compile("[1-8]"), timeout=ANSWER_MS)
    # Looking back: the page stays where it is while the engine goes on, and "Follow" follows it
    # again.
    slider = live.get_by_label("Step", exact=True)
    slider.press("ArrowLeft")
    expect(live.locator(".nv-follow")).to_have_attribute("aria-pressed", "false")
    standing = live.locator(".nv-position").inner_text().split(" of ")
    expect(live.locator(".nv-position")).not_to_have_text(" of ".join(standing))
    assert live.locator(".nv-position").inner_text().split(" of ")[0] == standing[0]
    live.locator(".nv-follow").click()
    expect(live.locator(".nv-position")).not_to_have_text(re.compile(f"^{standing[0]} of"))
    live.get_by_role("button", name="Cancel burst").click()
    expect(live.locator("#load-state")).to_contain_text("cancelled")
    expect(figure(live, "running")).to_have_text("0")
    wait_until(server.is_idle, what="the burst has ended")


def answer_at_once(page: Page) -> list[list[int]]:
    """Answer completions in the server's place; the lengths of the prompts of each request."""
    sent: list[list[int]] = []

    def answer(route: Route) -> None:
        sent.append([len(prompt) for prompt in route.request.post_data_json["prompt"]])
        choices = [
            {"index": i, "text": "a", "finish_reason": "length"} for i in range(len(sent[-1]))
        ]
        chunk = json.dumps({"id": f"cmpl-{len(sent)}", "choices": choices})
        route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\ndata: [DONE]\n\n")

    page.route("**/v1/completions", answer)
    return sent


def test_the_first_request_of_a_burst_goes_ahead_of_the_long_prompts(live: Page) -> None:
    """Its first step is short, so that something moves at once, and the others find its prefix in
    the cache."""
    sent = answer_at_once(live)
    live.get_by_role("button", name="Fire a burst").click()
    expect(live.locator("#load-state")).to_have_text("16 done")
    expect(live.locator("#load-progress")).to_be_hidden()
    first, chats, documents = sent
    assert [len(first), len(chats), len(documents)] == [1, 13, 2]
    assert first[0] == chats[0] < min(documents)


def test_a_demo_sends_bursts_until_it_is_cancelled(page: Page, server: ServerProcess) -> None:
    sent = answer_at_once(page)
    page.goto(f"{server.url}?demo")
    for _ in range(6):  # two bursts
        with page.expect_request("**/v1/completions"):
            pass
    assert [len(prompts) for prompts in sent[:4]] == [1, 13, 2, 1]
    page.unroute("**/v1/completions")
    page.get_by_role("button", name="Cancel burst").click(timeout=ANSWER_MS)
    expect(page.locator("#load-state")).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Fire a burst")).to_be_visible()


@pytest.mark.nightly
def test_the_picture_of_the_readme_can_be_taken(server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as thread:  # playwright of the fixtures runs in this one
        picture = Image.open(io.BytesIO(thread.submit(photograph, f"{server.url}?demo").result()))
    assert picture.format == "PNG" and picture.size == (1440, 1000)
    assert len(picture.getcolors()) > 24, "requests were drawn"


def test_arrows_look_back_while_one_does_not_type(live: Page) -> None:
    send(live, "Hello", max_tokens="8", temperature="0")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    live.get_by_label("Your message").press("ArrowLeft")
    expect(live.locator(".nv-follow")).to_have_attribute("aria-pressed", "true")
    live.locator("h1").click()
    live.keyboard.press("ArrowLeft")
    expect(live.locator(".nv-follow")).to_have_attribute("aria-pressed", "false")
    live.keyboard.press("End")
    expect(live.locator(".nv-follow")).to_have_attribute("aria-pressed", "true")


BEYOND_THE_EDGE = (
    "[...document.querySelectorAll('body, body *')].filter(e => e.getBoundingClientRect().right > "
    "361)"
)
DRAWN_MS = 10_000


def test_a_phone_shows_one_part_at_a_time(live: Page) -> None:
    live.set_viewport_size({"width": 360, "height": 740})
    send(live, "Count: " + "x" * 200, max_tokens="8", temperature="0")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    for name, shown in (("Chat", "#composer"), ("Engine", "#figures")):
        live.get_by_role("tab", name=name).click()
        expect(live.locator(shown)).to_be_visible()
        # The pictures take the new width at the next frame, which a busy machine draws late.
        live.wait_for_function(f"() => {BEYOND_THE_EDGE}.length === 0", timeout=DRAWN_MS)
    expect(live.locator("#composer")).to_be_hidden()
    live.get_by_role("tab", name="Engine").press("ArrowLeft")
    expect(live.locator("#composer")).to_be_visible()
    expect(live.get_by_role("tab", name="Chat")).to_be_focused()


SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def test_text_can_be_read_in_both_schemes(live: Page) -> None:
    send(live, "Hello", max_tokens="3", temperature="0")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    places = (
        ".question p",
        ".prose p",
        "footer [data-fact]",
        "#figures dt",
        "#figures small",
        "#send",
        "#model",
    )
    for scheme in SCHEMES:
        live.emulate_media(color_scheme=scheme)
        for place in places:
            assert live.locator(place).first.evaluate(CONTRAST) >= 4.5, (scheme, place)


# The contrast of WCAG 2 between an element's text and the nearest background below it.
CONTRAST = """element => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  let below = element;
  while (channels(getComputedStyle(below).backgroundColor)[3] === 0) below = below.parentElement;
  const luminance = (color) => {
    const [r, g, b] = channels(color).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pair = [getComputedStyle(element).color, getComputedStyle(below).backgroundColor].map(luminance).sort((a, b) => a - b);
  return (pair[1] + 0.05) / (pair[0] + 0.05);
}"""


def test_a_lost_server_is_told_and_found_again(live: Page, noise: list[str]) -> None:
    noise.append("ERR_INTERNET_DISCONNECTED|ERR_NETWORK")
    live.context.set_offline(True)
    send(live, "Hello", max_tokens="3")
    expect(last_answer(live).locator(".problem")).to_contain_text("cannot be reached")
    live.context.set_offline(False)
    send(live, "Hello", max_tokens="3")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)


def test_the_key_is_asked_for(
    page: Page, noise: list[str], tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    noise += ["401", "ERR_"]
    with ServerProcess(tiny_model, tmp_path, "--api-key", "sesame") as server:
        page.goto(server.url.replace("127.0.0.1", "localhost"))  # its own page under its other name
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        field.fill("guess")
        field.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The server does not accept this key.")
        field.press("Escape")
        expect(page.locator("#connection")).to_have_text("This server needs an API key.")
        page.get_by_role("button", name="Enter the key").click()
        field.fill("sesame")
        field.press("Enter")
        expect(page.locator("#connection")).to_have_text("connected")
        assert "sesame" not in page.url
        page.reload()
        expect(page.locator("#connection")).to_have_text("connected")
        expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#connection")).to_contain_text("Trying again")


@pytest.fixture(scope="module")
def two_engines(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Data parallelism."""
    options = ["-dp", "2", "--device", "cpu", "--num-kv-blocks", "64"]
    with ServerProcess(tiny_model, tmp_path_factory.mktemp("two"), *options) as running:
        yield running
        wait_until(running.is_idle, what="all blocks are free again")


def tokens_by_engine(server: ServerProcess) -> list[float]:
    """How many tokens each of two engines has generated."""
    found = re.findall(
        r'generation_tokens_total\{engine="([01])".*\} (.*)', server.get("/metrics").text
    )
    assert [engine for engine, _ in found] == ["0", "1"]
    return [float(count) for _, count in found]


def choose(page: Page, engine: int) -> None:
    """Have the page show this one, as somebody without a mouse does."""
    choice = page.get_by_label("Engine shown")
    if choice.input_value() != str(engine):
        with page.expect_request(f"**/trace{'?engine=1' if engine else ''}"):
            choice.press("ArrowDown" if engine else "ArrowUp")
        expect(choice).to_be_focused()
    expect(page.locator("#connection")).to_have_text("connected")


def test_one_of_several_engines_is_chosen(page: Page, two_engines: ServerProcess) -> None:
    opened(page, two_engines)
    expect(page.get_by_label("Engine shown")).to_have_value("0")
    expect(page.get_by_label("Engine shown").locator("option")).to_have_text(
        ["Engine 0", "Engine 1"]
    )
    expect(page.locator("#rank-note")).to_contain_text("Chat and demo load go to all 2 engines.")
    choose(page, 1)
    before = picture(page, "pool")
    # Each takes a part of a burst, and what the other one computes is missing nowhere.
    page.get_by_label("Demo load").fill("16")
    page.get_by_role("button", name="Fire a burst").click()
    expect(page.locator("#load-state")).to_have_text(re.compile("^16 done"), timeout=ANSWER_MS)
    expect(page.locator(".nv-position")).to_contain_text(" of ")  # steps of the burst were seen
    expect(figure(page, "running")).to_have_text("0")
    expect(figure(page, "kv")).to_have_text("0 %")
    assert picture(page, "pool") != before
    assert all(tokens_by_engine(two_engines))


def test_a_chat_is_shown_where_it_is_computed(page: Page, two_engines: ServerProcess) -> None:
    opened(page, two_engines)
    before = tokens_by_engine(two_engines)
    send(page, "What is the capital of France?", max_tokens="8", temperature="0")
    expect(fact(page, "reason")).to_be_visible(timeout=ANSWER_MS)
    (engine,) = [i for i, count in enumerate(tokens_by_engine(two_engines)) if count > before[i]]
    choose(page, engine)
    send(page, "And of Spain?")  # goes to where the conversation is in the prefix cache
    expect(last_answer(page).locator(".swatch")).to_be_visible()
    expect(fact(page, "reason")).to_be_visible(timeout=ANSWER_MS)
    choose(page, 1 - engine)
    expect(page.locator(".swatch")).to_have_count(0)
    expect(page.locator(".prose")).to_have_count(2)
    expect(page.locator("#chat .problem")).to_have_count(0)


def test_the_choice_of_an_engine_fits_a_phone(page: Page, two_engines: ServerProcess) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    opened(page, two_engines)
    page.get_by_role("tab", name="Engine").click()
    expect(page.get_by_label("Engine shown")).to_be_visible()
    page.wait_for_function(f"() => {BEYOND_THE_EDGE}.length === 0", timeout=DRAWN_MS)
    assert page.get_by_label("Engine shown").bounding_box()["height"] >= 34
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        for place in ("#rank", "#rank-note", "#rank-choice label"):
            assert page.locator(place).evaluate(CONTRAST) >= 4.5, (scheme, place)


KEEP_WHAT_IS_SAID = """() => {
  const place = document.querySelector("#connection");
  window.said = [];
  new MutationObserver(() => said.push(place.textContent)).observe(place, { childList: true, characterData: true, subtree: true });
}"""


def test_who_looks_at_an_engine_that_is_gone_gets_another(
    page: Page, two_engines: ServerProcess, noise: list[str]
) -> None:
    noise.append("400")  # as from a server that was started anew with fewer engines
    error = {"error": {"message": "engine must be 0, the only one, not 1"}}
    page.route("**/trace?engine=1", lambda route: route.fulfill(status=400, body=json.dumps(error)))
    opened(page, two_engines)
    page.evaluate(KEEP_WHAT_IS_SAID)  # the reason stands there for half a second only
    page.get_by_label("Engine shown").select_option("Engine 1")
    page.wait_for_function(
        "() => said.some(text => text.includes('Engine must be 0, the only one, not 1.'))"
    )
    expect(page.locator("#connection")).to_have_text("connected")
    expect(page.get_by_label("Engine shown")).to_have_value("0")


def test_a_burst_is_as_large_as_all_engines_need(live: Page) -> None:
    one, two = live.evaluate("""async () => {
      const { plan } = await import("/web/load.js");
      const settings = { block_size: 16, num_blocks: 64, token_budget: 256, max_num_seqs: 8 };
      return [plan(8, settings, 512), plan(16, { ...settings, data_parallel_size: 2 }, 512)];
    }""")
    assert one["fills"] and two == one | {"long": 2 * one["long"], "short": 2 * one["short"]}


def test_a_single_engine_leaves_no_choice(live: Page) -> None:
    expect(live.locator("#figures")).to_be_visible()
    expect(live.locator("#rank-choice")).to_be_hidden()


def test_a_trace_that_cannot_be_read_is_not_asked_for_again(live: Page, noise: list[str]) -> None:
    noise.append("line 2 of the trace")
    settings = {"block_size": 16, "num_blocks": 8, "token_budget": 64, "live": True}
    lines = [{"nanovllm_trace": 2, "settings": settings}, {"step": 0, "requests": [[7, 0, 1]]}]
    asked = []

    def answer(route: Route) -> None:
        asked.append(route)
        route.fulfill(body="".join(json.dumps(line) + "\n" for line in lines))

    live.route("**/trace", answer)
    live.clock.install()
    live.reload()
    expect(live.locator("#connection")).to_have_text(
        "This trace cannot be shown: line 2 of the trace: request 7 was not named by any line "
        "before"
    )
    live.clock.run_for(60_000)
    assert len(asked) == 1


def test_a_browser_that_cannot_read_the_scripts_says_so(live: Page, noise: list[str]) -> None:
    expect(live.locator("#no-script")).to_have_count(0)
    noise.append("SyntaxError|Unexpected identifier")
    live.route(
        "**/web/views.js", lambda route: route.fulfill(content_type="text/javascript", body="a b")
    )
    live.reload()
    expect(live.locator("#no-script")).to_be_visible()


def test_a_conversation_too_long_to_be_kept_is_shown_all_the_same(live: Page) -> None:
    warnings = []
    live.on(
        "console",
        lambda message: warnings.append(message.text) if message.type == "warning" else None,
    )
    live.evaluate("sessionStorage.setItem('full', 'x'.repeat(5 * 2 ** 20 - 1000))")
    send(live, "Count: " + "x" * 900, max_tokens="3", temperature="0")
    expect(fact(live, "reason")).to_be_visible(timeout=ANSWER_MS)
    expect(live.get_by_role("button", name="Send")).to_be_visible()
    assert any("keeps no more of this conversation" in warning for warning in warnings)


def test_a_burst_is_stopped_while_its_prompts_are_made(live: Page) -> None:
    live.route("**/tokenize", lambda route: None)  # never answered
    live.get_by_role("button", name="Fire a burst").click()
    expect(live.locator("#load-progress")).to_be_visible()  # moves before the engine does
    expect(live.locator("#load-state")).to_have_text("0 done · 16 without a token yet")
    live.get_by_role("button", name="Cancel burst").click()
    expect(live.locator("#load-state")).to_have_text("0 done · 16 cancelled")
    expect(live.get_by_role("button", name="Fire a burst")).to_be_visible()


@contextlib.contextmanager
def replaying(path: pathlib.Path, folder: pathlib.Path) -> Iterator[str]:
    """The address of `nanovllm replay` on a recorded trace."""
    output = folder / "replay.txt"
    command = [sys.executable, "-m", "nanovllm", "replay", str(path), "--port", "0"]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(
            lambda: "http://" in output.read_text() or process.poll() is not None,
            60,
            "replay is ready",
        )
        found = re.search(r"http://[\w.:]+", output.read_text())
        assert found, output.read_text()
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def test_tokens_per_verification_of_drafts_are_among_the_figures(
    page: Page, tmp_path: pathlib.Path
) -> None:
    trace = drafting_trace()
    trace.save(tmp_path / "run.jsonl")
    drafts = [share for record in trace for share in record.requests if share.num_drafts]
    first = next(
        i for i, record in enumerate(trace) if any(share.num_drafts for share in record.requests)
    )
    with replaying(tmp_path / "run.jsonl", tmp_path) as url:
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("replay")
        slider = page.get_by_label("Step", exact=True)
        slider.fill(str(trace.steps[first - 1].step))
        expect(figure(page, "drafts")).to_be_hidden()
        slider.press("End")
        length = 1 + sum(share.num_accepted for share in drafts) / len(drafts)
        expect(figure(page, "drafts")).to_have_text(f"{length:.2f}")
        for width in (360, 800, 1100, 1440):  # rows of tiles have no gaps
            page.set_viewport_size({"width": width, "height": 900})
            boxes = page.locator("#figures > div").evaluate_all(
                "tiles => tiles.map((t) => t.offsetWidth * t.offsetHeight)"
            )
            whole = page.locator("#figures").evaluate("box => box.clientWidth * box.clientHeight")
            assert len(boxes) == 7 and 0.96 * whole < sum(boxes) <= whole
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_recorded_trace_is_replayed(page: Page, tmp_path: pathlib.Path) -> None:
    requests = [SimulatedRequest(4 * i, 20 + 7 * i, 30) for i in range(6)]
    trace = simulate(requests, num_kv_blocks=12, max_num_batched_tokens=64)
    assert any(step.preempted for step in trace)
    trace.save(tmp_path / "run.jsonl")
    with replaying(tmp_path / "run.jsonl", tmp_path) as url:
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("replay")
        expect(page).to_have_title("simulated · nanovllm replay")
        expect(page.locator("#chat")).to_be_hidden()
        expect(page.locator("#load")).to_be_hidden()
        expect(page.locator(".nv-position")).to_have_text(f"step 0 of 0–{trace.steps[-1].step}")
        expect(figure(page, "drafts")).to_be_hidden()
        first = picture(page, "pool")
        page.get_by_label("Step", exact=True).press("End")
        expect(figure(page, "preempted")).to_have_text(
            str(sum(len(step.preempted) for step in trace))
        )
        expect(figure(page, "step")).to_have_text("1 unit")
        assert picture(page, "pool") != first
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
