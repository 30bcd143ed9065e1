"""Labs: what runs in the browser, and that a mistake of the reader's is found where it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm.lab.site.labs import links, pages
from nanovllm.lab.site.labs.archive import ArchiveError, write_archive
from nanovllm.lab.site.labs.contest import CONTESTS
from nanovllm.lab.site.labs.driver import answer
from nanovllm.lab.site.labs.pages import source_of
from tests.lab.site.mistakes import MISTAKES, Mistake

ROOT = Path(nanovllm.__file__).parents[1]
LABS = {lab["name"]: lab for lab in pages.read_labs()}
EDITED = [name for name, lab in LABS.items() if lab["kind"] == "edit"]


# As the page's worker: answers each line of JSON. There is nothing but the standard library,
# msgspec and the archive, and no pytest.
WORKER = """
import importlib.abc, sys

class OnlyThese(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {"nanovllm", "tests", "msgspec", *sys.stdlib_module_names}:
            raise ImportError(f"the archive imports {name}")

import msgspec
sys.meta_path.insert(0, OnlyThese())
sys.path[:] = [sys.argv[1], *(each for each in sys.path if "site-packages" not in each)]
from nanovllm.lab.site.labs import driver
assert sys.argv[1] in driver.__file__
for line in sys.stdin:
    print(driver.answer(line, id), flush=True)
"""
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks the driver in the archive for a call, a lab's name and the reader's texts."""
    folder = tmp_path_factory.mktemp("archive")
    pages.write_lab_archive(folder / "nanovllm.zip", list(LABS.values()))
    shutil.unpack_archive(folder / "nanovllm.zip", folder / "engine")
    command = [sys.executable, "-c", WORKER, str(folder / "engine")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=folder, **pipes) as worker:
        assert worker.stdin and worker.stdout and worker.stderr

        def ask(call: str, name: str, texts: dict[str, str], **options: Any) -> dict[str, Any]:
            request = {"call": call, "lab": LABS[name], "texts": texts, "options": options}
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            assert line, worker.stderr.read()
            return json.loads(line)

        yield ask
        worker.stdin.close()


def of_mistake(mistake: Mistake) -> dict[str, str]:
    """The text of a function with a mistake in it."""
    text = source_of(mistake.target)
    assert text.count(mistake.old) == 1, mistake
    return {mistake.target: text.replace(mistake.old, mistake.new)}


# ---------------------------------------------------------------- the archive


def test_the_archive_names_an_import_that_a_browser_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"nanovllm/[a-z_/]+\.py imports (torch|numpy)"):
        write_archive(tmp_path / "a.zip", ["nanovllm.core.runner"], [])
    with pytest.raises(ArchiveError, match=r"nanovllm\.core\.nothing, which does not exist"):
        write_archive(tmp_path / "a.zip", ["nanovllm.core.nothing"], [])
    with pytest.raises(ArchiveError, match=r"test_scheduler\.py has no test_nothing"):
        write_archive(tmp_path / "a.zip", ["tests.core.test_scheduler:test_nothing"], [])


def test_a_module_is_cut_down_to_what_its_members_use(tmp_path: Path) -> None:
    root = "nanovllm.features.speculation.verification:keep_accepted"
    texts = write_archive(tmp_path / "a.zip", [root], [])
    text = texts["nanovllm/features/speculation/verification.py"]
    assert "def keep_accepted" in text and "SchedulerOutput" in text
    assert "torch" not in text and "def verify" not in text


# ---------------------------------------------------------------- the reader's code


@pytest.mark.parametrize("name", EDITED)
def test_the_texts_in_the_editor_are_the_engines_code(ask: Ask, name: str) -> None:
    texts = {target: source_of(target) for target in LABS[name]["targets"]}
    assert all(test["passed"] for test in ask("check", name, {})["tests"])
    plain, edited = ask("run", name, {}), ask("run", name, texts)
    assert "error" not in edited, edited["error"]
    for part in ("trace", "picture", "figures"):
        assert edited.get(part) == plain.get(part)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.lab}: {mistake.new}")
def test_a_mistake_is_found_where_it_is(ask: Ask, mistake: Mistake) -> None:
    """The scene fails with the invariant's sentence or looks different, and the right tests fail,
    and no others; afterwards, the engine's code is in place again."""
    texts = of_mistake(mistake)
    before, found = ask("run", mistake.lab, {}), ask("run", mistake.lab, texts)
    if mistake.says:
        assert mistake.says in found["error"]["message"]
        number, line = found["error"]["place"]
        assert number == 0 and 0 < line <= len(texts[mistake.target].splitlines())
    else:
        assert "error" not in found, found["error"]
        parts = ("trace", "picture", "figures")
        assert [found.get(part) for part in parts] != [before.get(part) for part in parts]
    tests = ask("check", mistake.lab, texts)["tests"]
    failed = {test["name"].partition(":")[2] for test in tests if not test["passed"]}
    assert failed == set(mistake.fails)
    assert all(test["message"] for test in tests if not test["passed"])
    assert all(test["passed"] for test in ask("check", mistake.lab, {})["tests"])


def figures(ask: Ask, name: str, texts: dict[str, str], **options: Any) -> dict[str, str]:
    return dict(ask("run", name, texts, **options)["figures"])


@pytest.mark.parametrize(
    "rule", ["running[0]", "max(running, key=lambda r: r.num_computed_tokens)"]
)
def test_the_oldest_request_starves_if_it_is_preempted(ask: Ask, rule: str) -> None:
    """The run continues after the fault, so that the reader sees what the rule costs."""
    target = "nanovllm.core.scheduler:last_running"
    texts = {target: source_of(target).replace("running[-1]", rule)}
    latency = "steps until A, the oldest, has ended"
    right = [figures(ask, "preemption", {}, stream=count) for count in (6, 12, 24)]
    wrong = [figures(ask, "preemption", texts, stream=count) for count in (6, 12, 24)]
    assert len({each[latency] for each in right}) == 1
    few, some, many = (int(each[latency]) for each in wrong)
    assert int(right[0][latency]) < few < some < many
    again = [int(each["tokens computed again"]) for each in wrong]
    assert min(again) > 3 * int(right[2]["tokens computed again"])
    scene = ask("run", "preemption", texts)
    assert scene["error"]["note"].startswith("The run continues")
    kinds = {each["kind"] for row in scene["lanes"]["rows"] for each in row["pieces"]}
    assert kinds == set(scene["lanes"]["legend"]) == {"prefill", "decode", "again", "waits"}


def test_the_answer_names_a_sequence_of_victims_that_loses_less(ask: Ask) -> None:
    target = "nanovllm.core.scheduler:last_running"
    rule = 'return request if request.request_id == "2" else running[-1]'
    assert rule in LABS["preemption"]["answer"]
    texts = {target: source_of(target).replace("return running[-1]", rule)}
    found = [figures(ask, "preemption", each)["tokens computed again"] for each in ({}, texts)]
    assert found == ["40", "33"]
    assert all(test["passed"] for test in ask("check", "preemption", texts)["tests"])


BALANCED = """def choose(self, request, loads):
    sums = self.__dict__.setdefault("sums", [0] * len(loads))
    rank = sums.index(min(sums))
    sums[rank] += request.sampling_params.max_tokens
    return rank
"""
MAY_PLAN = "nanovllm.features.async_scheduling:OneStepAhead.may_plan"
SCHEDULABLE = "nanovllm.core.request:Request.num_schedulable_tokens"
LAST = "self.num_tokens + pending >= self.max_num_tokens"
ADD = "nanovllm.core.queues:Queues.add"
CHOOSE = "nanovllm.features.data_parallel.router:EngineRouter.choose"
SHORT_FIRST = "    request.order = (request.num_prompt_tokens, request.order[1])\n    insort"
SHARE = "nanovllm.core.scheduler:Scheduler.share"
PROMISE = """    if request.in_prefill:
        share = min(share, max(0, 8 - plan.num_prefill_tokens))
"""
SOLUTIONS = {
    "share": {SHARE: source_of(SHARE).replace("    for limit", f"{PROMISE}    for limit")},
    "priorities": {ADD: source_of(ADD).replace("    insort", SHORT_FIRST)},
    "router": {
        CHOOSE: source_of(CHOOSE).replace(
            "(-self._match(rank, hashes), ", "(2 * loads[rank] - self._match(rank, hashes), "
        )
    },
    "waves": {CHOOSE: BALANCED},
    "in-flight": {
        MAY_PLAN: "def may_plan(self):\n    return True\n",
        SCHEDULABLE: source_of(SCHEDULABLE).replace(LAST, f"(self.looks_back or {LAST})"),
    },
}


def test_a_request_that_all_others_pass_waits_longest(ask: Ask) -> None:
    admit = "nanovllm.core.scheduler:Scheduler.admit"
    text = source_of(admit)
    loop, end = "while (request := self.queues.next_in_line) is not None:", text[-50:]
    assert end.endswith("        if plan.blocked_by:\n            return\n")
    text = text.removesuffix("        if plan.blocked_by:\n            return\n")
    assert text.count(loop) == 1
    found = ask(
        "run",
        "priorities",
        {admit: text.replace(loop, "for request in list(self.queues.waiting):")},
    )
    assert "error" not in found
    before, after = figures(ask, "priorities", {}), dict(found["figures"])
    mean, longest = LABS["priorities"]["measures"]
    assert float(after[mean]) < float(before[mean])
    assert float(after[longest]) > 1.5 * float(before[longest])


# Tests that describe the rule which a solution replaces.
REPLACED = {
    "priorities": {
        "test_requests_are_admitted_in_order_until_one_has_to_wait",
        "test_no_request_overtakes_one_that_has_to_wait",
        "test_a_swapped_request_goes_before_later_ones_that_wait",
    },
    "share": {
        "test_a_request_gets_what_it_misses_and_the_budget_allows",
        "test_without_chunks_a_prompt_is_computed_whole_or_not_at_all",
    },
    "router": {"test_the_engine_with_the_longest_prefix_gets_the_prompt"},
    "waves": {"test_equal_engines_take_turns", "test_the_least_busy_engine_gets_an_unknown_prompt"},
}


@pytest.mark.parametrize("name", [name for name, lab in LABS.items() if "goal" in lab])
def test_the_goal_of_a_hard_task_can_be_reached(ask: Ask, name: str) -> None:
    goal = LABS[name]["goal"]
    assert float(figures(ask, name, {})[goal["figure"]]) > goal["most"], "not by the engine's rule"
    found = ask("run", name, SOLUTIONS[name])
    assert "error" not in found, found["error"]
    assert float(dict(found["figures"])[goal["figure"]]) <= goal["most"]
    tests = ask("check", name, SOLUTIONS[name])["tests"]
    failed = {test["name"].partition(":")[2] for test in tests if not test["passed"]}
    assert failed == REPLACED.get(name, set())
    assert all(test["choice"] for test in tests if not test["passed"]), "nothing is broken"


def test_measures_are_figures(ask: Ask) -> None:
    for name in EDITED:
        assert set(LABS[name].get("measures", ())) <= figures(ask, name, {}).keys()


def test_the_line_of_an_exception_is_the_readers(ask: Ask) -> None:
    target = "nanovllm.core.scheduler:last_running"
    text = "def last_running(request, num_tokens, running):\n    x = 1\n    return running[99]\n"
    error = ask("run", "preemption", {target: text})["error"]
    assert (error["message"], error["place"]) == ("IndexError: list index out of range", [0, 3])
    assert error["raised"] and error["step"] > 0
    error = ask("run", "preemption", {target: "def last_running(a):\n    return (\n"})["error"]
    assert error["message"].startswith("SyntaxError") and error["place"] == [0, 2]
    error = ask("run", "preemption", {target: "def first():\n    pass\n"})["error"]
    assert error["message"] == "NameError: the code must define last_running"


@pytest.mark.parametrize(
    ("name", "target", "old", "new", "step"),
    [
        ("preemption", "last_running", "running[-1]", "running[99]", 7),
        ("share", "Scheduler.share", "min(request.num_schedulable_tokens, left)", "99", 0),
        ("tables", "get_computed_blocks", "(request.num_tokens - 1)", "request.num_tokens", 3),
    ],
)
def test_the_step_that_fails_is_drawn(
    ask: Ask, name: str, target: str, old: str, new: str, step: int
) -> None:
    (whole,) = (each for each in LABS[name]["targets"] if each.endswith(target))
    text = source_of(whole)
    assert text.count(old) == 1
    found = ask("run", name, {whole: text.replace(old, new)})
    last = json.loads(found["trace"].splitlines()[-1])
    assert found["error"]["step"] == last["step"] == step
    assert last["requests"], "as far as it was planned"
    begin, end = found["lanes"]["fault"]
    assert begin < end == found["lanes"]["end"]


def test_a_run_that_fails_has_not_ended(ask: Ask) -> None:
    """It has no time that could be compared with that of a whole run."""
    end = "time until all have ended"
    seen = set()
    for mistake in MISTAKES:
        if end not in LABS[mistake.lab].get("measures", ()):
            continue
        found = ask("run", mistake.lab, of_mistake(mistake))
        whole = "error" not in found or found["error"]["continues"]
        value = dict(found["figures"])[end]
        assert (float(value) > 0) if whole else value == "have not ended", mistake
        seen.add((mistake.lab, whole))
    assert seen >= {(lab, whole) for lab in ("waves", "in-flight") for whole in (True, False)}


def test_the_page_gets_what_the_readers_code_prints(ask: Ask) -> None:
    target = "nanovllm.core.scheduler:last_running"
    text = source_of(target).replace("    return", "    print(request.request_id)\n    return")
    assert set(ask("run", "preemption", {target: text})["printed"].split()) >= {"4", "5"}
    endless = text.replace("request.request_id", "'x' * 10_000")
    assert len(ask("run", "preemption", {target: endless})["printed"]) < 5_000
    assert "printed" not in ask("run", "preemption", {})


def test_drafts_that_are_kept_are_words_of_the_output(ask: Ask) -> None:
    """The picture, the text and the figures agree, also for a rule that keeps wrong words."""
    keep = "nanovllm.features.speculation.verification:keep_accepted"
    everything = {keep: source_of(keep).replace("sampled[name][:count]", "sampled[name]")}
    for texts in ({}, everything):
        found = ask("run", "drafts", texts)
        cells = [each for row in found["picture"]["rows"] for each in row["cells"]]
        kept = [each for each in cells if each["kind"] != "rejected"]
        prompt, output = (words for _, words in found["text"])
        assert [each["text"] for each in kept] == [word for word, _ in output]
        wrong = [word for word, kind in output if kind == "wrong"]
        assert len(wrong) == int(dict(found["figures"])["wrong words"]) == found_wrong(kept)
        assert bool(wrong) == bool(texts) == ("error" in found)
        assert len(prompt) == LABS["drafts"]["prompt"]


def found_wrong(cells: list[dict[str, Any]]) -> int:
    return sum(each["kind"] == "wrong" for each in cells)


def test_helpers_of_the_reader_are_gone_afterwards(ask: Ask) -> None:
    target = "nanovllm.core.scheduler:last_running"
    text = source_of(target).replace("running[-1]", "helper(running)")
    helper = "\n\ndef helper(running):\n    return running[-1]\n"
    found = ask("run", "preemption", {target: text + helper})
    assert found["trace"] == ask("run", "preemption", {})["trace"]
    error = ask("run", "preemption", {target: text})["error"]
    assert error["message"] == "NameError: name 'helper' is not defined"


# ---------------------------------------------------------------- the contest


def score(rule: str, old: str = "", new: str = "") -> tuple[float, list[Any]]:
    """The score of a rule, or of the engine's own; and what was reported."""
    (target,) = (each for each in LABS["contest"]["targets"] if each.endswith(f":{rule}"))
    text = source_of(target)
    assert not old or text.count(old) == 1
    texts = {target: text.replace(old, new)} if old else {}
    request = {"call": "score", "contest": rule, "lab": {}, "texts": texts}
    news = list[Any]()
    found = json.loads(answer(json.dumps(request), lambda each: news.append(json.loads(each))))
    if "error" in found:
        raise AssertionError(found["error"]["message"])
    return found["score"], news


@pytest.mark.parametrize("rule", CONTESTS)
def test_the_engines_own_rule_has_100_points(rule: str) -> None:
    points, news = score(rule)
    assert points == 100 and len(news) == 3
    assert all(each["yours"] == each["usual"] for each in news)


def test_better_rules_have_more_points_and_unfair_or_wrong_ones_none() -> None:
    old = "    self.requests[request.request_id] = request\n"
    short_first = "    request.order = (request.num_prompt_tokens, request.order[1])\n"
    assert score("Queues.add", old, old + short_first)[0] > 120
    with pytest.raises(AssertionError, match=r"^twelve documents: r\d+ waits \d+ steps; at most"):
        score("EngineRouter.choose", "-self._match(rank, hashes), ", "")
    with pytest.raises(AssertionError, match=r"at most \d+ are fair"):
        score("Queues.add", old, old + "    request.order = (0, -request.order[1])\n")
    with pytest.raises(AssertionError, match="would overwrite"):
        score("last_running", "running[-1]", "running[0]")
    assert score("Queues.add")[0] == 100, "the engine's rule is in place again"


@pytest.mark.parametrize(
    ("rule", "old", "new", "says"),
    [
        (
            "Queues.add",
            "    insort",
            "    request.max_num_tokens = request.num_prompt_tokens + 1\n    insort",
            "changes more of r0 than its place in line",
        ),
        (
            "Queues.add",
            "    insort",
            "    del request.token_ids[1:]\n    insort",
            "changes more of r0 than its place in line",
        ),
        (
            "last_running",
            "    return",
            "    running[-1].max_num_tokens = running[-1].num_tokens + 1\n    return",
            r"r\d+ asks for \d+ tokens, and gets \d+: a rule must not change what is computed",
        ),
    ],
    ids=["shorter outputs", "shorter prompts", "a shorter output of the victim"],
)
def test_a_rule_that_computes_less_has_no_score(rule: str, old: str, new: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        score(rule, old, new)


def test_a_score_that_fails_names_workload_and_step(ask: Ask) -> None:
    (target,) = (each for each in LABS["contest"]["targets"] if each.endswith("choose"))
    texts = {target: source_of(target).replace("hashes = ", "1 / 0; hashes = ")}
    asked = {"call": "score", "contest": "EngineRouter.choose", "lab": {}, "texts": texts}
    error = json.loads(answer(json.dumps(asked), id))["error"]
    assert error["note"] == "This is step 0 of the workload. The workload is: twelve documents."
    scene = ask("run", "contest", texts, rule="EngineRouter.choose", workload=1)
    assert scene["error"]["message"].startswith("ZeroDivisionError") and scene["picture"]


@pytest.mark.parametrize("rule", CONTESTS)
def test_the_contest_draws_the_workloads_that_it_scores(ask: Ask, rule: str) -> None:
    unit, workloads = CONTESTS[rule]
    _, news = score(rule)
    for number, (name, requests) in enumerate(workloads.items()):
        scene = ask("run", "contest", {}, rule=rule, workload=number)
        assert news[number]["workload"] == name
        mean = float(dict(scene["figures"])[f"{unit}, mean"])
        assert mean == pytest.approx(news[number]["usual"], abs=0.06)
        rows = scene.get("lanes", {}).get("rows", [])
        assert len(rows) in (0, len(requests))


# ---------------------------------------------------------------- the playground


def test_fleets_are_simulated_in_the_archive(ask: Ask) -> None:
    begin = {slider["name"]: slider["begin"] for slider in LABS["what-if"]["sliders"]}
    whole = ask("run", "what-if", {}, **begin, known=[])
    assert whole["summary"]["completed"] == 80 and whole["frontier"] == [0]
    split = ask("run", "what-if", {}, **{**begin, "split": 1}, known=[whole["summary"]])
    assert split["summary"]["num_transfers"] == 80 and split["summary"]["bottleneck"]
    assert ask("run", "what-if", {}, **{**begin, "split": 4}, known=[])["impossible"]


# ---------------------------------------------------------------- links from lectures


@pytest.mark.parametrize("lab", LABS.values(), ids=list(LABS))
def test_a_lecture_names_its_labs_below_the_heading_of_their_section(lab: dict[str, Any]) -> None:
    lecture = json.loads((ROOT / "notebooks" / f"{lab['lecture']}.ipynb").read_text("utf-8"))
    texts = ["".join(c["source"]) for c in lecture["cells"] if c["cell_type"] == "markdown"]
    (text,) = (each for each in texts if f"## {lab['section']}\n" in each)
    below = text.partition(f"## {lab['section']}\n")[2]
    assert links.line_of(lab) in below.partition("\n#")[0].splitlines()


def test_on_the_site_a_lecture_links_to_its_labs() -> None:
    command = "<code><span>nanovllm</span> <span>docs</span> <span>labs/blocks.html</span></code>"
    line = f"<p><strong>Try it in the browser:</strong> {command}\nopens the lab.</p>"
    context = {"body": f"<h2>Build</h2>\n{line}\n<p>Text</p>"}
    links.add_links(None, "notebooks/11_paged_memory", "page.html", context, None)
    assert context["body"] == (
        '<h2>Build</h2>\n<p class="try-it">Try it in the browser: <a href="../labs/blocks.html">'
        "A free block remembers</a></p>\n<p>Text</p>"
    )
    context = {"body": "<h2>Other</h2>"}
    links.add_links(None, "notebooks/16_sampling", "page.html", context, None)
    assert context["body"] == "<h2>Other</h2>"
    with pytest.raises(ValueError, match=r"lab blocks: notebooks/11_paged_memory has no line"):
        links.add_links(None, "notebooks/11_paged_memory", "page.html", context, None)
    with pytest.raises(ValueError, match="names an unknown lab"):
        links.add_links(None, "notebooks/12_block_tables", "page.html", {"body": line}, None)
