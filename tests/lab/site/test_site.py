"""The site: links, weights, and its pages in a real browser."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any
from urllib.parse import unquote

import pytest

pytest_plugins = ["tests.browser"]

ROOT = pathlib.Path(__file__).parents[3]
LECTURES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
LINK = re.compile(r'<\w[^<>]*?\b(?:href|src|srcset)="([^"]*)"')
NAME = re.compile(r'\bid="([^"]*)"')
A_FEW = [
    "index.html",
    "notebooks/13_scheduler.html",
    "nanovllm/core/scheduler.py.html",
    "search.html?q=block+table",
]
PHONE = {"width": 390, "height": 844}


def pages(site: pathlib.Path) -> dict[pathlib.Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_every_lecture_package_and_module_has_a_page(site: pathlib.Path) -> None:
    for lecture in LECTURES:
        assert (site / f"notebooks/{lecture}.html").is_file()
    for path in [*(ROOT / "nanovllm").rglob("*.py"), *(ROOT / "nanovllm").rglob("README.md")]:
        name = path.relative_to(ROOT).as_posix().removesuffix(".md")
        assert (site / f"{name}.html").is_file(), name


def test_every_link_leads_somewhere_on_the_site(site: pathlib.Path) -> None:
    texts = pages(site)
    names = {path: set(NAME.findall(text)) for path, text in texts.items()}
    broken = []
    for path, text in texts.items():
        for link in set(LINK.findall(text)):
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", target):  # another site, mail, or data
                continue
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (anchor and file in names and anchor not in names[file]):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(texts) > 500
    assert not broken, "\n".join(broken)


def test_pages_are_light(site: pathlib.Path) -> None:
    from nanovllm.lab.site.weights import BOUND, table, weights

    found = weights(site)
    assert found["notebooks/13_scheduler.html"] > 50_000  # style sheets and scripts are counted
    assert max(found.values()) <= BOUND, table(site)


def test_unchanged_lines_are_pale_and_folded_cells_folded(site: pathlib.Path) -> None:
    from nanovllm.lab.course.pages import ANSWER, FOLDED

    text = (site / "notebooks/13_scheduler.html").read_text(encoding="utf-8")
    cells = json.loads((ROOT / "notebooks/13_scheduler.ipynb").read_text("utf-8"))["cells"]
    hidden = [cell["metadata"].get("jupyter", {}) for cell in cells]
    folded = [bool(each.get("source_hidden")) for each in hidden]
    # Folded cells without outputs are in one fold with the next one.
    folds = sum(folded) - sum(
        here and below and not cell["outputs"]
        for here, below, cell in zip(folded, folded[1:], cells, strict=False)
    )
    answers = sum(
        bool(each.get("outputs_hidden") and cell["outputs"])
        for each, cell in zip(hidden, cells, strict=True)
        if cell["cell_type"] == "code"
    )
    assert folds and answers
    summaries = re.findall("<summary>(.*?)</summary>", text)
    assert sum(FOLDED in each for each in summaries) == folds
    assert sum(ANSWER in each for each in summaries) >= answers
    marked = sum("unchanged" in cell["metadata"].get("nanovllm", {}) for cell in cells)
    assert text.count('class="unchanged"') >= marked > 0


@pytest.mark.parametrize("path", A_FEW)
def test_a_page_fits_a_phone(visit: Any, page: Any, path: str) -> None:
    page.set_viewport_size(PHONE)
    visit(path)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


WIDE = [
    ("notebooks/13_scheduler.html", ".cell_output:has(img[width]):not(:has(.nv-stored)):visible"),
    ("notebooks/13_scheduler.html", ".cell_input pre:visible"),
    ("figures/cpu.html", ".pst-scrollable-table-container"),
    ("index.html", ".scroll"),
    ("nanovllm/core/scheduler.py.html", ".highlight"),
]
IS_FADED = "(each) => getComputedStyle(each).maskImage !== 'none'"


@pytest.mark.parametrize(("path", "boxes"), WIDE)
def test_what_is_cut_on_a_phone_fades_until_it_is_scrolled_to_its_end(
    visit: Any, page: Any, path: str, boxes: str
) -> None:
    page.set_viewport_size(PHONE)
    visit(path)
    page.locator("[data-goes-on]").first.wait_for(state="attached")
    found = page.locator(boxes).all()
    rooms = [each.evaluate("(box) => box.scrollWidth - box.clientWidth") for each in found]
    assert [each.evaluate(IS_FADED) for each in found] == [room > 1 for room in rooms]
    cut = found[rooms.index(max(rooms))]
    is_faded = f"([box, expected]) => ({IS_FADED})(box) === expected"
    for place, expected in ((max(rooms) // 2, True), (max(rooms), False), (0, True)):
        cut.evaluate("(box, place) => (box.scrollLeft = place)", place)
        page.wait_for_function(is_faded, arg=[cut.element_handle(), expected])
    page.emulate_media(media="print")
    assert not cut.evaluate(IS_FADED)


def test_the_landing_page_plays_a_trace(visit: Any) -> None:
    page = visit("index.html")
    position = page.locator(".nv-position")
    first = position.inner_text()
    page.wait_for_function(
        "first => document.querySelector('.nv-position').innerText !== first", arg=first
    )


def results(page: Any) -> Any:
    """The links that a search has found, once they are there."""
    links = page.locator("#search-results li a")
    links.first.wait_for()
    return links


def test_a_search_leads_to_the_section_of_a_lecture(visit: Any) -> None:
    page = visit("search.html?q=Preempted+requests")
    link = results(page).first
    assert re.search(r"notebooks/\d\d_\w+\.html#.", link.get_attribute("href"))
    found = page.locator("#search-results li").first.locator("mark").all_inner_texts()
    assert any(word.lower().startswith("preempt") for word in found)
    assert re.match(r"\d+ sections of \d+ pages", page.get_by_role("status").inner_text())
    link.click()
    page.locator(":target").wait_for()
    page.locator(".bd-article .highlighted").first.wait_for()
    # In code, names count with all their parts.
    page = visit("search.html?q=allocate_slots")
    assert "notebooks/" in results(page).first.get_attribute("href")
    # A lecture is found by its number, and a question by most of its words.
    page = visit("search.html?q=lecture+31")
    assert "31_pd_disaggregation" in results(page).first.get_attribute("href")
    page = visit("search.html?q=Why+do+zebras+wait+while+a+long+prompt+is+computed?")
    page.get_by_role("status").filter(has_text="Nothing has all words of “Why do zebras").wait_for()
    assert "notebooks/" in results(page).first.get_attribute("href")
    page = visit("search.html?q=zebra")
    page.get_by_role("status").filter(has_text="Nothing has half of the words").wait_for()


@pytest.mark.parametrize("query", ["run server", "start the server", "how to run the server"])
def test_who_looks_for_the_server_finds_how_to_start_it(visit: Any, query: str) -> None:
    page = visit(f"search.html?q={query.replace(' ', '+')}")
    found = [link.get_attribute("href").removeprefix("./") for link in results(page).all()]
    start = found.index("README.html#start")
    server = next(at for at, each in enumerate(found) if each.startswith("nanovllm/server/README"))
    lectures = [at for at, each in enumerate(found) if re.search(r"/(51|91)_", each)]
    assert max(start, server) < min(lectures)
    command = page.locator("#search-results li").nth(start).locator("code")
    assert command.inner_text().startswith("make serve # installs")
    assert "serve" in command.locator("mark").all_inner_texts()


def test_a_rare_word_of_a_question_weighs_more_than_a_frequent_one(visit: Any) -> None:
    page = visit("search.html?q=Which+lecture+explains+tensor+parallelism")
    assert "22_tensor_parallel" in results(page).first.get_attribute("href")


def test_without_scripts_pages_have_pictures_and_no_dead_buttons(
    visit_without_scripts: Any,
) -> None:
    page = visit_without_scripts("notebooks/13_scheduler.html")
    buttons = "button:visible, input[type=button]:visible, label[for]:visible"
    assert page.locator(buttons).all() == []
    stored = page.locator(".cell:has(.nv-stored)")
    assert stored.count() > 0
    for cell in stored.all():
        for fold in cell.locator("details:not([open]):has(.nv-stored) > summary").all():
            fold.click()
        assert cell.locator("img").last.is_visible()
    question = page.locator(".nv-prediction").first
    assert "You predict: put " in question.inner_text()
    solution = page.locator("article details:not(.hide)").first
    solution.locator("summary").click()
    assert solution.locator("div, p, pre").first.is_visible()
    page = visit_without_scripts("index.html")
    assert page.get_by_alt_text("Four requests, step by step").is_visible()
    assert page.get_by_text("Drag the slider").is_hidden()
    assert page.locator("button:visible").all_inner_texts() == ["Search"]
    page = visit_without_scripts("search.html?q=preempt")
    told = page.locator(".bd-search-container noscript p")
    assert told.is_visible() and "The search needs JavaScript" in told.inner_text()
    assert page.locator("button:visible, input:visible").all() == []
    assert told.locator("a[href$='contents.html']").is_visible()


PAPER = {"width": 718, "height": 1047}  # A4 with margins, in CSS pixels


def test_on_paper_a_lecture_is_whole(visit: Any, page: Any) -> None:
    page.set_viewport_size(PAPER)
    visit("notebooks/24_expert_parallel.html")
    player = page.locator(".nv-stored[data-player*=ranks]")
    player.scroll_into_view_if_needed()
    player.locator(".nv-position").wait_for()
    page.emulate_media(media="print")
    assert player.is_hidden()
    assert page.locator(".cell:has(.nv-stored[data-player*=ranks]) img").is_visible()
    page.emulate_media(media="screen")
    visit("notebooks/13_scheduler.html")
    closed = page.locator("article details:not([open])").count()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for menu in (".bd-sidebar-primary", ".bd-sidebar-secondary", ".bd-header-article"):
        assert page.locator(menu).is_hidden(), menu
    assert page.locator("button:visible").all() == []
    assert page.locator("article details:not([open])").count() == closed > 0
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".bd-article :is(pre, table, img)")]
          .filter((each) => each.scrollWidth > each.clientWidth + 1
            || each.getBoundingClientRect().right > innerWidth + 1)
          .map((each) => each.textContent.slice(0, 60) || each.src)"""
    )
    assert cut == []
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    # Links to other sites can be typed.
    visit("README.html")
    address = page.locator(".bd-article a[href^=http]").first
    written = address.evaluate("(each) => getComputedStyle(each, '::after').content")
    assert address.get_attribute("href") in written


@pytest.mark.parametrize(
    ("button", "drawer", "link", "heading"),
    [
        ("On this page", "#pst-secondary-sidebar-modal", "4.6 Memory runs out", "4.6 Memory runs"),
        ("All pages", "#pst-primary-sidebar-modal", "12 · Block tables", "12 · Block tables"),
    ],
)
def test_on_a_phone_a_drawer_leads_to_a_section_and_to_a_page(
    visit: Any, page: Any, button: str, drawer: str, link: str, heading: str
) -> None:
    page.set_viewport_size(PHONE)
    visit("notebooks/13_scheduler.html")
    page.get_by_role("button", name=button).click()
    page.locator(drawer).get_by_role("link", name=link).click()
    page.locator(f"{drawer}:not([open])").wait_for(state="attached")
    reached = page.get_by_role("heading", name=heading)
    is_near_the_top = f"(each) => Math.abs(each.getBoundingClientRect().y) < {PHONE['height'] / 2}"
    page.wait_for_function(is_near_the_top, arg=reached.element_handle())
    # Escape leaves the page where it is, and the drawer can be opened again.
    page.get_by_role("button", name=button).click()
    page.locator(f"{drawer}[open]").wait_for()
    place = page.evaluate("scrollY")
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0 and page.evaluate("scrollY") == place


def test_on_a_wide_screen_the_menu_hides_the_sidebar(visit: Any) -> None:
    page = visit("notebooks/13_scheduler.html")
    sidebar = page.locator("#pst-primary-sidebar")
    labs = sidebar.get_by_role("link", name="Labs", exact=True)
    assert labs.get_attribute("href") == "../labs/index.html"
    assert sidebar.locator(".logo").get_attribute("href") == "../index.html"
    page.get_by_role("button", name="All pages").click()
    sidebar.wait_for(state="hidden")
    page.get_by_role("button", name="All pages").click()
    sidebar.wait_for(state="visible")


def test_tables_of_outputs_are_tables(site: pathlib.Path) -> None:
    for lecture in LECTURES:
        text = (site / f"notebooks/{lecture}.html").read_text(encoding="utf-8")
        assert not re.search(r"<p>\s*\|.*\|\s*$", text, re.MULTILINE), lecture


def test_pages_leave_out_what_only_helps_those_who_run_a_cell() -> None:
    pytest.importorskip("sphinx", reason="there is no Sphinx: `make install` installs it")
    from nanovllm.lab.site.pages import join_folded, leave_out

    def code(source: str, unchanged: str = "", **metadata: Any) -> dict[str, Any]:
        marks = {"nanovllm": {"unchanged": unchanged, "length": 1}} if unchanged else {}
        return {"cell_type": "code", "source": source, "metadata": metadata | marks, "outputs": []}

    folded = {"jupyter": {"source_hidden": True}}
    first = code("#| export\na = 1\nb = 2", "2", **folded)
    second = code("# NBVAL_IGNORE_OUTPUT\nc = 3\nd = 4", "3", **folded)
    shown = code("e = 5")
    joined = join_folded([first, second, shown])
    assert len(joined) == 2
    leave_out(joined[0])
    lines = joined[0]["source"].split("\n")
    assert lines == ["a = 1", "b = 2", "", "", "c = 3", "d = 4"]
    assert joined[0]["metadata"]["nanovllm"]["unchanged"] == "1 6"

    question = 'gain = course.predict(\n    "How much?", ..., unit="ms"\n)'
    asked = code(f"{question}\n{question.replace('gain', 'loss')}")
    leave_out(asked)
    assert asked["metadata"]["tags"] == ["remove-input"]
    computed = code('n = 3\ngain = course.predict("How much?", ..., unit="ms")')
    leave_out(computed)
    assert "tags" not in computed["metadata"]

    exercise = code("check()")
    verdict = {"output_type": "stream", "text": ["Exercise 1: not solved yet.\n"]}
    result = {"output_type": "stream", "text": ["stuck: not solved yet, and 3 wait\n"]}
    exercise["outputs"] = [verdict, result]
    leave_out(exercise)
    assert exercise["outputs"] == [result]
    heading = {"cell_type": "markdown", "source": ["## 7 · Exercises\n", "\n", "Solve them."]}
    leave_out(heading)
    assert "No code runs on this page" in heading["source"]
    assert heading["source"].endswith("Solve them.")


def test_the_glossary_and_questions_lead_to_sections(site: pathlib.Path) -> None:
    glossary = (site / "notebooks/glossary.html").read_text(encoding="utf-8")
    assert re.search(r'href="13_scheduler.html#memory-runs-out"[^>]*>(<\w[^>]*>)*“4.6', glossary)
    text = (site / "index.html").read_text(encoding="utf-8")
    table = text.partition('id="questions"')[2].partition("</table>")[0]
    links = re.findall(r'href="([^"]+)"', table)
    sections = [link for link in links if re.match(r"notebooks/\d\d_\w+\.html#\w", link)]
    assert len(sections) >= 20 and 'href="#questions"' in text


def test_on_paper_the_landing_page_shows_its_player_without_controls(visit: Any, page: Any) -> None:
    visit("index.html")
    page.locator(".nv-position").wait_for()
    page.set_viewport_size(PAPER)
    page.emulate_media(media="print")
    assert page.locator("button:visible, input:visible").all() == []
    assert page.get_by_text("Drag the slider").is_hidden()
    box = page.locator(".live").bounding_box()
    for canvas in page.locator(".live canvas").all():
        place = canvas.bounding_box()
        assert 0 < place["width"] <= box["width"] and place["x"] >= box["x"]


def test_pictures_are_dark_in_the_dark(visit: Any) -> None:
    page = visit("notebooks/13_scheduler.html")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background)[:3])) < 60
    picture = page.locator("div.cell_output img").first
    assert "invert" in picture.evaluate("each => getComputedStyle(each).filter")


AXE = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter(({ impact }) => impact === "serious" || impact === "critical")
  .map(({ id, nodes }) => `${id}: ${nodes.length}, such as ${nodes[0].html.slice(0, 200)}`)"""


def accessibility_findings(page: Any) -> list[str]:
    from nanovllm.lab.site.labs.packages import npm

    # As a test it may do what a page's policy forbids scripts.
    page.evaluate((npm("axe-core") / "axe.min.js").read_text(encoding="utf-8"))
    return page.evaluate(AXE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", A_FEW)
def test_a_page_can_be_read_by_all(visit: Any, page: Any, scheme: str, path: str) -> None:
    # Without motion, no colour is between two others.
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    visit(path)
    page.wait_for_load_state("networkidle")
    assert accessibility_findings(page) == []


@pytest.mark.nightly
def test_every_page_has_no_error_fits_a_phone_and_can_be_read_by_all(
    visit: Any, page: Any, site: pathlib.Path
) -> None:
    """Errors in the console, and requests to other hosts, fail the test when it ends."""
    findings: dict[str, object] = {}
    page.set_viewport_size(PHONE)
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        visit(name)
        if (width := page.evaluate("document.documentElement.scrollWidth")) > PHONE["width"]:
            findings[f"{name} width"] = width
        if not name.endswith((".py.html", ".js.html", ".cpp.html", ".css.html")):
            findings |= {
                f"{name} {number}": found
                for number, found in enumerate(accessibility_findings(page))
            }
    assert not findings, json.dumps(findings, indent=1)


TERMS = {
    "block table": "12_block_tables",
    "preempt": "13_scheduler",
    "speculative": "42_speculative_decoding",
    "rejection": "42_speculative_decoding",
    "CUDA graph": "40_cuda_graphs",
    "quantization": "41_quantization",
    "pipeline bubble": "23_pipeline_parallel",
    "all-reduce": "21_process_groups",
    "grammar": "19_structured_output",
    "Redis": "32_kv_sharing",
}


@pytest.mark.nightly
@pytest.mark.parametrize(("term", "lecture"), TERMS.items())
def test_the_lecture_of_a_term_is_found_first(visit: Any, term: str, lecture: str) -> None:
    page = visit(f"search.html?q={term.replace(' ', '+')}")
    assert lecture in results(page).first.get_attribute("href")


def test_an_address_brings_a_sitemap(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sphinx", reason="there is no Sphinx: `make install` installs it")
    from nanovllm.lab.site.build import write_sitemap

    (tmp_path / "labs").mkdir()
    (tmp_path / "labs/index.html").touch()
    write_sitemap(tmp_path, "https://example.org/course/")
    sitemap = (tmp_path / "sitemap.xml").read_text(encoding="utf-8")
    assert re.findall("<loc>(.*?)</loc>", sitemap) == ["https://example.org/course/labs/index.html"]
    robots = (tmp_path / "robots.txt").read_text(encoding="utf-8")
    assert "Sitemap: https://example.org/course/sitemap.xml\n" in robots


@pytest.mark.started
def test_a_lecture_without_outputs_and_a_missing_package_are_named(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sphinx", reason="there is no Sphinx: `make install` installs it")
    from nanovllm.lab.site import build

    lecture = tmp_path / "notebooks/13_scheduler.ipynb"
    lecture.parent.mkdir()
    lecture.write_text(json.dumps({"cells": [{"cell_type": "code", "outputs": []}]}))
    with pytest.raises(build.SiteError, match=r"13_scheduler.ipynb has no outputs: `make run"):
        build.lecture(lecture)
    (tmp_path / "letter.txt").touch()
    command = [sys.executable, "-m", "nanovllm.lab.site", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "name another folder with --out" in done.stderr


@pytest.mark.started
@pytest.mark.parametrize("package", ["sphinx", "docutils", "myst_nb"])
def test_a_missing_package_of_the_extra_is_named(package: str, tmp_path: pathlib.Path) -> None:
    without = (
        f"import runpy, sys; sys.modules[{package!r}] = None;"
        f"sys.argv[1:] = ['--out', {str(tmp_path)!r}];"
        "runpy.run_module('nanovllm.lab.site', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    told = f"error: the site needs the package {package}: `make site` installs what is missing"
    assert done.returncode == 1 and done.stderr.startswith(told), done.stderr
    assert done.stderr.count("\n") == 1
