"""The reader's own engine: how it starts and grows, what a check runs and says, and that nothing is
lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.blanks import Blank, Course, Functions
from nanovllm.lab.course.growing import Growing, _merged, git
from nanovllm.lab.course.hints import HINTS
from nanovllm.lab.course.trials import Outcome, Trials
from nanovllm.lab.course.verdicts import Checker, status
from nanovllm.lab.course.workloads import WORKLOADS, Workload, later
from nanovllm.lab.course.workloads.__main__ import main as count
from tests.house import ROOT

POOL = "nanovllm/core/block_pool.py"
SAID = "AssertionError: it is wrong"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The course, with a folder for workbooks of its own."""
    folder = tmp_path / "course"
    folder.mkdir()
    for name in ("nanovllm", "notebooks", "tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """git knows whose commits these are, and nothing else of this machine."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "ada@example.org")


def start(root: Path, lecture: int) -> Growing:
    return Growing.start(Course(root), root.parent / "mine", lecture)


def write(engine: Growing, *names: str, old: str = "", new: str = "") -> None:
    """Write the lecture's code for some functions, with one change."""
    for name in names:
        blank = engine.course.blanks[name]
        lines = "\n".join(engine.course.solution(blank))
        assert not old or lines.count(old) == 1, name
        text = lines.replace(old, new) if old else lines
        replaced = engine.functions(blank.path).replace({name: text.split("\n")})
        engine.write({blank.path: replaced.text})


def names_of(engine: Growing, *lectures: int) -> list[str]:
    return [blank.name for blank in engine.blanks(lectures)]


def log(engine: Growing) -> list[str]:
    return git(engine.folder, "log", "--format=%s").splitlines()


class Script(Trials):
    """Notes which tests are run on what; some functions, if they are the reader's, fail them."""

    def __init__(self, *wrong: str, engine: Growing) -> None:
        self.wrong = wrong
        self.engine = engine
        self.runs: list[list[str]] = []
        self.mine: list[set[str]] = []
        self.blind = ""
        self.needs = 0

    def run_tests(self, folder: Path, tests: list[str]) -> Outcome:
        self.runs.append(tests)
        self.mine.append({b.name for b in self.engine.blanks() if self._is_mine(folder, b)})
        fails = self.mine[-1] & set(self.wrong) or "another line" in self.wrong
        fails = fails and len(self.mine[-1]) >= self.needs and tests != [self.blind]
        return Outcome(int(bool(fails)), f"= FAILURES =\n{SAID}" if fails else "")

    def _is_mine(self, folder: Path, blank: Blank) -> bool:
        text = (folder / blank.path).read_text("utf-8")
        return "# mine" in "\n".join(Functions(text, blank.path).lines(blank.name))


def mine(engine: Growing, *names: str) -> None:
    """Write functions with a mark."""
    for name in names:
        write(engine, name)
        blank = engine.course.blanks[name]
        functions = engine.functions(blank.path)
        head = len(functions.opened(name)) - 1
        lines = functions.lines(name)
        lines.insert(head, "        # mine")
        engine.write({blank.path: functions.replace({name: lines}).text})


def check(engine: Growing, trials: Trials, lecture: int) -> tuple[bool, list[str]]:
    said: list[str] = []
    return Checker(engine, trials, said.append).check(lecture), said


# ---------------------------------------------------------------- start, next


def test_an_engine_starts_with_the_modules_of_its_lecture(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root.parent / "with a space" / "mine"
    assert main(["--root", str(root), "start", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "load_weights, src/nanovllm/models/loader.py" in said
    workbook = root / "my_notebooks/10_first_tokens_workbook.ipynb"
    assert str(workbook) in said and workbook.is_file()
    files = {path.name for path in (folder / "src").rglob("*.py")}
    assert files == {"llama.py", "basic.py", "loader.py"}
    assert 'NotImplementedError("write stretched")' in (
        folder / "src/nanovllm/models/llama.py"
    ).read_text("utf-8")
    assert git(folder, "status", "--porcelain") == "", "the launcher is ignored"
    done = subprocess.run([folder / "course", "status"], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^10  first tokens +□□ +load_weights stretched$", done.stdout, re.M)


def test_nothing_is_written_over_something(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root.parent / "full").mkdir()
    (root.parent / "full" / "mine.py").touch()
    for folder, at, words in (
        ("full", "10", "is not empty: name a new folder"),
        ("full/mine.py", "10", "is not empty: name a new folder"),
        ("new", "9", "no lecture 9 builds a module; these do: 10, 11, 12"),
    ):
        command = ["--root", str(root), "start", str(root.parent / folder), "--at", at]
        assert main(command) == 1
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert [path.name for path in (root.parent / "full").iterdir()] == ["mine.py"]
    assert not (root.parent / "new").exists()


def test_without_an_identity_commits_are_by_reader(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{role}_NAME")
        monkeypatch.delenv(f"GIT_{role}_EMAIL")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.useConfigOnly")  # as where git cannot guess
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    engine = start(root, 11)
    assert not engine.has_identity
    assert git(engine.folder, "log", "--format=%an") == "Reader\n"


def test_the_next_lecture_adds_its_modules(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = start(root, 11)
    assert main(["--root", str(root), "next", "--engine", str(engine.folder)]) == 0
    said = capsys.readouterr().out
    assert "Not right yet, you can write them at any time: load_weights, " in said
    assert "new: src/nanovllm/core/kv_cache_manager.py" in said
    assert log(engine) == ["Lecture 12: begin", "Lecture 11: begin"]
    engine = Growing(engine.course, engine.folder)
    engine.place("nanovllm/core/scheduler.py").write_text("mine = 1\n")
    assert main(["--root", str(root), "next", "--engine", str(engine.folder)]) == 1
    assert "src/nanovllm/core/scheduler.py is a module of lecture 13" in capsys.readouterr().err
    assert engine.read("nanovllm/core/scheduler.py") == "mine = 1\n"


def test_a_lecture_continues_a_module_around_the_readers_lines(root: Path) -> None:
    engine = start(root, 23)
    path = "nanovllm/layers/basic.py"
    before = engine.read(path)
    assert "import Tensor, nn\n" in before
    engine.write({path: before.replace("import Tensor, nn\n", "import Tensor, nn  # mine\n")})
    _, lost = engine.open_next()
    after = engine.read(path)
    assert "# mine" in after
    whole = (ROOT / path).read_text("utf-8")
    added = set(whole.splitlines()) - set(before.splitlines())
    missing = [line for line in added - set(after.splitlines()) if "Built by" not in line]
    assert [*filter(str.strip, missing)] == lost[path], "the line that the reader has changed"
    with pytest.raises(Exception, match="lecture 91 is the last"):
        start_last(root).open_next()


BEFORE = """import a


class A:
    def one(self):
        return 1
"""
AFTER = (
    BEFORE.replace("import a\n", "import a\nimport b\n")
    + "\n    def two(self):\n        return 2\n"
)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("return 1", "return 1 + 0", ["import b", "def two", "return 1 + 0"]),
        ("import a\n", "import a\nimport mine\n", ["import mine\nimport b\n", "def two"]),
        ("import a\n", "import mine\n", ["import mine\nimport b\n", "def two"]),
        (
            "        return 1\n",
            "        return 1\n\n    def mine(self):\n        return 3",
            ["def mine", "return 3\n\n    def two", "import b"],
        ),
        ("        return 1\n", "        return 1", ["def two", "import b"]),
    ],
    ids=["end", "both insert", "line above", "both add a method", "no line end"],
)
def test_a_readers_module_and_a_lectures_changes(old: str, new: str, kept: list[str]) -> None:
    assert BEFORE.count(old) == 1
    merged, missing = _merged(BEFORE.replace(old, new), BEFORE, AFTER)
    assert all(words in merged for words in kept), merged
    assert not missing and "<<<<" not in merged


def test_lines_that_a_lecture_could_not_add_are_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start(root, 23)
    path = "nanovllm/layers/basic.py"
    engine.write({path: "mine = 1\n"})
    assert main(["--root", str(root), "next", "--engine", str(engine.folder)]) == 0
    said = capsys.readouterr().out
    assert f"new: src/{path}\nYou have changed this place. Add the lecture's lines" in said
    assert "\n      def parameter_of(self, name: str) -> str:\n" in said
    assert engine.read(path) == "mine = 1\n"
    assert log(engine) == ["Lecture 24: begin", "Lecture 23: begin"]


def start_last(root: Path) -> Growing:
    shutil.rmtree(root.parent / "mine")
    return start(root, 91)


# ---------------------------------------------------------------- check


def test_new_tests_come_first_and_then_the_earlier_ones(root: Path) -> None:
    engine = start(root, 12)
    mine(engine, *names_of(engine, 10, 11, 12))
    trials = Script(engine=engine)
    right, said = check(engine, trials, 12)
    assert right
    assert trials.runs == [
        ["tests/core/test_block_tables.py"],
        [
            "tests/models/test_parts.py",
            "tests/core/test_block_pool.py",
            "tests/core/test_scheduler_machine.py::TestBlockPool",
        ],
    ]
    assert all(found == set(names_of(engine, 10, 11, 12)) for found in trials.mine)
    assert said[-1] == "Tests of lectures 10, 11: still right"


def test_what_is_not_written_is_the_lectures_and_is_named(root: Path) -> None:
    engine = start(root, 12)
    mine(engine, "stretched", "KVCacheManager.allocate_slots")
    trials = Script(engine=engine)
    right, said = check(engine, trials, 12)
    assert not right, "a function of lecture 12 is missing"
    assert said == [
        "Not written in earlier lectures, hence the lecture's: load_weights (10), "
        "BlockPool.free_blocks (11), BlockPool.touch (11), BlockPool.cache_full_block (11)",
        "KVCacheManager.get_computed_blocks: not written yet",
        "KVCacheManager.allocate_slots: right",
    ]
    assert trials.mine == [{"stretched", "KVCacheManager.allocate_slots"}]
    assert log(engine) == ["Lecture 12: begin"]


def test_the_one_that_is_wrong_is_found_alone(root: Path) -> None:
    engine = start(root, 12)
    ours = names_of(engine, 12)
    mine(engine, "BlockPool.touch", *ours)
    trials = Script(ours[1], engine=engine)
    right, said = check(engine, trials, 12)
    assert not right and said[1:] == [f"{ours[0]}: right", f"{ours[1]}: wrong\n{SAID}"]
    assert trials.mine == [{"BlockPool.touch", *ours}, {ours[0]}, {ours[1]}]
    assert not engine.is_right(engine.course.blanks[ours[1]])


def test_a_verdict_is_told_before_the_next_function_is_tried(root: Path) -> None:
    engine = start(root, 12)
    ours = names_of(engine, 12)
    mine(engine, *ours)
    trials = Script(ours[0], engine=engine)
    runs_when_said: list[int] = []
    Checker(engine, trials, lambda line: runs_when_said.append(len(trials.runs))).check(12)
    assert runs_when_said == [0, 2, 3], "what is not written; then each function, after its run"


def test_an_earlier_function_that_is_wrong_is_not_blamed_on_the_new_ones(root: Path) -> None:
    engine = start(root, 12)
    ours = names_of(engine, 12)
    mine(engine, "BlockPool.touch", *ours)
    right, said = check(engine, Script("BlockPool.touch", engine=engine), 12)
    assert not right and said[1:3] == [f"{ours[0]}: right", f"{ours[1]}: right"]
    assert said[3] == f"BlockPool.touch: wrong\n{SAID}"


def test_functions_that_are_wrong_only_together_are_told(root: Path) -> None:
    engine = start(root, 12)
    ours = names_of(engine, 12)
    mine(engine, *ours)
    trials = Script(*ours, engine=engine)
    trials.needs = 2
    right, said = check(engine, trials, 12)
    assert not right and said[1:3] == [f"{ours[0]}: right", f"{ours[1]}: right"]
    assert said[3].startswith("Each is right with the lecture's code for all others, but not with")


def test_what_has_changed_is_tried_first(root: Path) -> None:
    engine = start(root, 11)
    ours = names_of(engine, 11)
    mine(engine, *names_of(engine, 10, 11))
    assert check(engine, Script(engine=engine), 11)[0]
    text = engine.read(POOL)
    engine.write({POOL: text.replace("return True", "return 1 == 1")})
    trials = Script(ours[2], engine=engine)
    right, said = check(engine, trials, 11)
    assert not right and trials.mine[1:] == [{ours[2]}, set()]
    assert said == [
        f"{ours[2]}: wrong\n{SAID}",
        f"{ours[0]}: right before, and unchanged",
        f"{ours[1]}: right before, and unchanged",
    ]
    assert engine.is_right(engine.course.blanks[ours[0]])


@pytest.mark.parametrize("is_seen", ["by this lecture's tests", "by its own tests only"])
def test_an_earlier_function_that_has_changed_is_named(is_seen: str, root: Path) -> None:
    engine = start(root, 12)
    mine(engine, *names_of(engine, 10, 11, 12))
    assert check(engine, Script(engine=engine), 12)[0]
    text = engine.read(POOL)
    engine.write({POOL: text.replace("return True", "return 1 == 1")})
    name = names_of(engine, 11)[2]
    trials = Script(name, engine=engine)
    if is_seen == "by its own tests only":
        trials.blind = "tests/core/test_block_tables.py"
    right, said = check(engine, trials, 12)
    assert not right and said[-1] == f"{name}: wrong\n{SAID}"
    assert trials.mine[-1] == {name}
    assert not any("but not with yours" in line for line in said)


def test_another_line_that_is_wrong_is_told_from_the_functions(root: Path) -> None:
    engine = start(root, 12)
    mine(engine, *names_of(engine, 12))
    trials = Script("another line", engine=engine)
    right, said = check(engine, trials, 12)
    assert not right and said[-1].startswith("The same tests fail with the lecture's code for all")
    assert trials.mine[-1] == set(), "the last run has the lecture's code for all functions"


@pytest.fixture
def trials() -> Iterator[Trials]:
    with Trials(limit=100) as made:
        yield made


def test_real_tests_on_accumulated_code(root: Path, trials: Trials) -> None:
    engine = start(root, 12)
    write(engine, *names_of(engine, 11, 12))
    assert check(engine, trials, 12)[0]
    write(engine, "BlockPool.touch", old="+= 1", new="+= 2")
    right, said = check(engine, trials, 12)
    assert not right
    assert said[-1].startswith("BlockPool.touch: wrong")
    assert "src/nanovllm/core/" in said[-1] or "tests/core/" in said[-1]


def test_places_are_those_of_the_readers_files(root: Path) -> None:
    engine = start(root, 11)
    calls = "while True: self.get_cached_block(block_hash)"
    write(engine, "BlockPool.cache_full_block", old="return True", new=calls)
    with Trials(limit=4) as trials:
        right, said = check(engine, trials, 11)
    assert not right
    found = re.search(
        r"cache_full_block was running, src/(\S+):(\d+)\. Is its loop endless", said[-1]
    )
    assert found and found[1] == POOL, "above it, the lecture's code is longer than the blank"
    assert "while True" in engine.read(POOL).split("\n")[int(found[2]) - 1]


def bad(engine: Growing, what: str) -> None:
    """Break something."""
    file = engine.place(POOL)
    text = file.read_text("utf-8")
    match what:
        case "syntax":
            file.write_text(text.replace("def touch(self", "def touch(self:"))
        case "function":
            file.write_text(text.replace("def touch(", "def tuch("))
        case "missing":
            file.unlink()
        case "conflict":
            file.write_text(text.replace("class BlockPool", "<<<<<<< HEAD\nclass BlockPool"))
        case "binary":
            file.write_bytes(b"\xff\xfe")
        case "state":
            (engine.folder / "course.json").write_text("{")
        case "git":
            shutil.rmtree(engine.folder / ".git")
        case "engine":
            (engine.folder / "course.json").unlink()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("syntax", rf"src/{POOL}:\d+: syntax error: "),
        ("function", r"`BlockPool.touch` is missing: is it misspelt\? `git diff src/"),
        ("missing", "block_pool.py is missing: `git restore src/"),
        ("conflict", rf"src/{POOL}:\d+: git has left two versions of these lines in a merge"),
        ("binary", "block_pool.py is not UTF-8: save it as UTF-8$"),
        ("state", "course.json cannot be read: `git checkout HEAD course.json` brings"),
        ("git", "is not a git repository: `git init "),
        ("engine", "is no engine that `course start` made: "),
    ],
)
def test_what_cannot_be_checked_is_told_in_one_line(
    what: str, words: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start(root, 11)
    bad(engine, what)
    assert main(["--root", str(root), "check", "--engine", str(engine.folder)]) == 1
    said = capsys.readouterr().err
    assert re.search(words, said) and said.count("\n") == 1


@pytest.mark.parametrize(
    ("lecture", "words"),
    [("12", "is not open yet: `course next` opens"), ("99", "no lecture 99 builds a module")],
)
def test_a_lecture_that_is_not_there(
    lecture: str, words: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start(root, 11)
    assert main(["--root", str(root), "check", lecture, "--engine", str(engine.folder)]) == 1
    assert words in capsys.readouterr().err


def test_outside_of_an_engine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "status", "next", "hint"):
        assert main(["--root", str(root), command]) == 1
        assert "is in no engine that `course start` made: go to yours" in capsys.readouterr().err


# ---------------------------------------------------------------- when all are right


def test_a_lecture_that_is_right_is_committed_filmed_and_compared(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start(root, 12)
    write(engine, *names_of(engine, 12))
    write(engine, names_of(engine, 12)[0], old="return found", new="return list(found)")
    (engine.folder / "notes.txt").write_text("mine")
    git(engine.folder, "add", "notes.txt")
    command = ["--root", str(root), "check", "--engine", str(engine.folder)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Committed: Lecture 12\n" in said
    assert "preempted\nThe lecture's scheduler with your code in the browser: " in said, (
        "one step, without a terminal"
    )
    assert "\n-        return list(found)\n+        return found\n" in said
    assert "KVCacheManager.allocate_slots, yours (-) and the lecture's (+):\nthe same\n" in said
    assert re.search(r"workloads/lecture_12.py: (\S+) lookups .* \1: 1.00 ×, to beat", said)
    commits = [f"Lecture 12: {', '.join(names_of(engine, 12))}", "Lecture 12: begin"]
    assert log(engine) == commits, "the second part is not beaten yet"
    assert git(engine.folder, "status", "--porcelain") == "A  notes.txt\n", "it is not ours"
    page = (engine.folder / "film.html").read_text("utf-8")
    assert "createPlayer" in page and '\\"preempted\\"' in page
    out = root.parent / "served"
    assert main([*command, "--out", str(out)]) == 0
    path = "nanovllm/core/kv_cache_manager.py"
    assert (out / path).read_text("utf-8") == engine.read(path)
    assert "NotImplementedError" not in (out / POOL).read_text("utf-8"), "the lecture's"
    again = capsys.readouterr().out
    assert "Nothing has changed since all tests passed" in again
    assert "browser" not in again and "list(found)" not in again, "shown once"
    assert log(engine) == commits, "nothing is new"
    shutil.copy(SOLUTIONS / "lecture_12.py", engine.folder / "workloads")
    assert main(command) == 0
    assert re.fullmatch(r"Lecture 12: .+, 0\.\d\d ×", log(engine)[0])
    assert log(engine)[1:] == commits
    state = engine.folder / "course.json"
    in_another_order = dict(reversed(json.loads(state.read_text()).items()))
    state.write_text(json.dumps(in_another_order))
    assert main(command) == 0
    assert log(engine)[1:] == commits, "the reader's progress alone is no reason"
    assert re.search(
        r"^12  block tables +■■ +second part: 0\.\d\d ×$",
        "\n".join(status(engine_again(engine))),
        re.M,
    )


def test_a_second_part_that_is_not_right_is_not_committed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start(root, 12)
    write(engine, *names_of(engine, 12))
    (engine.folder / "workloads").mkdir()
    file = engine.folder / "workloads/lecture_12.py"
    file.write_text("MyManager = 1 / 0\n")
    command = ["--root", str(root), "check", "--engine", str(engine.folder)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Committed: Lecture 12\n" in said and "ZeroDivisionError" in said
    assert 'wrong\n  File "workloads/lecture_12.py", line 1' in said and "runpy" not in said
    assert git(engine.folder, "status", "--porcelain") == "?? workloads/\n"
    file.write_text("def wait():\n    while True: pass\nwait()\n")
    assert main([*command, "--limit", "2"]) == 0
    said = capsys.readouterr().out
    assert "lecture_12.py: no end within the time limit: wait was running, workloads/" in said
    assert "workloads/lecture_12.py:2. Is its loop endless?" in said
    shutil.copy(SOLUTIONS / "lecture_12.py", file)
    assert main(command) == 0
    assert git(engine.folder, "status", "--porcelain") == ""
    assert re.fullmatch(r"Lecture 12: .+, 0\.\d\d ×", log(engine)[0])


def engine_again(engine: Growing) -> Growing:
    return Growing(engine.course, engine.folder)


def test_in_the_middle_of_a_merge_nothing_is_committed_or_lost(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start(root, 12)
    (engine.folder / "notes.txt").write_text("one")
    for branch, text in (("other", "two"), ("-", "three")):
        git(engine.folder, "checkout", "-q", *(["-b"] if branch == "other" else []), branch)
        (engine.folder / "notes.txt").write_text(text)
        git(engine.folder, "add", "notes.txt")
        git(engine.folder, "commit", "-q", "-m", text)
    with pytest.raises(Exception, match="git: "):
        git(engine.folder, "merge", "other")
    write(engine, *names_of(engine, 12))
    before = engine.read("nanovllm/core/kv_cache_manager.py")
    assert main(["--root", str(root), "check", "--engine", str(engine.folder)]) == 0
    said = capsys.readouterr().out
    assert "Nothing was committed (git: " in said and "says why" in said
    assert (engine.folder / ".git/MERGE_HEAD").exists()
    assert engine.read("nanovllm/core/kv_cache_manager.py") == before


def test_the_film_is_of_the_readers_own_scheduler(root: Path, trials: Trials) -> None:
    engine = start(root, 13)
    said: list[str] = []
    checker = Checker(engine, trials, said.append)
    usual = checker.film(13)
    text = engine.read("nanovllm/core/scheduler.py")
    line = "        share = min(request.num_schedulable_tokens, left)\n"
    assert text.count(line) == 1
    engine.write(
        {"nanovllm/core/scheduler.py": text.replace(line, line.replace("left)", "left, 2)"))}
    )
    slow = checker.film(13)
    assert " 4 of 16 tokens   A prefill 2  B prefill 2\n" in slow[0]
    assert "16 of 16 tokens" in usual[0] and not said
    engine.write({"nanovllm/core/scheduler.py": text.replace(line, "        share = 1 / 0\n")})
    assert checker.film(13) == []
    assert said[0].startswith("The film broke off: ") and "ZeroDivisionError" in said[0]


def test_a_scheduler_that_is_not_the_readers_is_not_called_so(root: Path) -> None:
    for lecture, written, title in (
        (12, 12, "The lecture's scheduler with your code"),
        (13, 12, "The lecture's scheduler with your code"),
        (13, 13, "Your scheduler"),
    ):
        shutil.rmtree(root.parent / "mine", ignore_errors=True)
        engine = start(root, lecture)
        write(engine, *names_of(engine, written))
        assert Checker(engine, Script(engine=engine), print).film_title() == title


def test_three_hints_from_the_lecture(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = start(root, 11)
    hint = ["--root", str(root), "hint", "BlockPool.touch", "--engine", str(engine.folder)]
    wanted = [
        "4.3 Sharing: reference counts",
        "The lecture's code has 4 lines: for, if, assignment",
        "del self.free_block_queue[block_id]",
    ]
    for number, words in enumerate([*wanted, wanted[-1]]):
        assert main(hint) == 0
        said = capsys.readouterr().out
        assert f"hint {min(number + 1, 3)} of 3" in said and words in said
    assert main([*hint[:3], "nothing", *hint[4:]]) == 1
    assert "no function nothing to write; there are: load_weights, " in capsys.readouterr().err
    course = engine.course
    for blank in course.blanks.values():
        texts = [make(course, blank) for make in HINTS]
        assert all(texts) and "..." in texts[-1], blank.name
        assert not any("raise NotImplementedError" in text for text in texts)


# ---------------------------------------------------------------- watch


def test_a_watch_checks_changes_and_ends_quietly(root: Path) -> None:
    engine = start(root, 12)
    command = [sys.executable, "-u", "-m", "nanovllm.lab.course", "--root", str(root)]
    watch = subprocess.Popen(
        [*command, "check", "--watch", "--engine", str(engine.folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert watch.stdout is not None
    assert _until(watch.stdout, "Checking") == "Checking …\n"
    first = _until(watch.stdout, "Watching")
    assert "not written yet" in first and "\033" not in first, "no redraws without a terminal"
    file = engine.place("nanovllm/core/kv_cache_manager.py")
    text = file.read_text("utf-8")
    file.write_text("(")
    assert "kv_cache_manager.py:1: syntax error" in _until(watch.stdout, "Watching")
    file.write_text(text)
    write(engine, *names_of(engine, 12))
    said = _until(watch.stdout, "Watching")
    while "Committed" not in said:  # between two functions, both files were whole
        said = _until(watch.stdout, "Watching")
    assert "KVCacheManager.allocate_slots: right" in said
    shutil.copy(SOLUTIONS / "lecture_12.py", engine.folder / "workloads")
    said = _until(watch.stdout, "Watching")
    assert "Nothing has changed since all tests passed" in said and "beaten at" in said
    watch.send_signal(signal.SIGINT)
    rest, _ = watch.communicate(timeout=60)
    assert (watch.returncode, rest) == (0, "")


def _until(stream: Iterator[str], words: str) -> str:  # type: ignore[misc]
    """The lines up to one that contains the words."""
    deadline = time.monotonic() + 240
    lines = []
    for line in stream:
        lines.append(line)
        if words in line:
            return "".join(lines)
        assert time.monotonic() < deadline
    raise AssertionError("".join(lines))


# ---------------------------------------------------------------- second parts

SOLUTIONS = Path(__file__).with_name("workloads")


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: str(each.lecture))
def test_a_second_part_can_be_beaten(workload: Workload, tmp_path: Path) -> None:
    file, result = tmp_path / workload.file, tmp_path / "result.json"
    file.write_text(workload.template())
    assert count([str(workload.lecture), str(file), str(result)]) == 0
    found = json.loads(result.read_text())
    assert found["yours"] == found["lecture"] > 0, "the file does nothing yet"
    solution = SOLUTIONS / workload.file
    assert count([str(workload.lecture), str(solution), str(result)]) == 0
    found = json.loads(result.read_text())
    assert found["yours"] <= workload.target * found["lecture"]


@pytest.mark.parametrize(
    ("lecture", "text"),
    [
        (
            32,  # stores nothing
            "from nanovllm.kv_transfer.stores.store import HostKeys\n"
            "MyStore = type('S', (HostKeys,), {'put': lambda self, keys, buffers: None})",
        ),
        (
            51,  # counts unfinished requests
            "from nanovllm.simulate.fleet import RoundRobin\n"
            "class MyRouter(RoundRobin):\n"
            "    loads = property(lambda self: self.__dict__.setdefault('all', [0] * 6))\n"
            "    def choose(self, request, now): return self.loads.index(min(self.loads))\n"
            "    def set_load(self, replica, engine, now):\n"
            "        self.loads[replica] = engine.num_waiting + engine.num_running",
        ),
    ],
)
def test_the_first_idea_is_not_enough(lecture: int, text: str, tmp_path: Path) -> None:
    file, result = tmp_path / "mine.py", tmp_path / "result.json"
    file.write_text(text)
    assert count([str(lecture), str(file), str(result)]) == 0
    found = json.loads(result.read_text())
    (workload,) = (each for each in WORKLOADS if each.lecture == lecture)
    assert workload.target * found["lecture"] < found["yours"] < found["lecture"]


def test_every_lecture_has_a_second_part_or_a_reason() -> None:
    rows = re.findall(r"(?m)^    (\d\d(?:, \d\d)*)  +\w", later.__doc__ or "")
    without = {int(number) for row in rows for number in row.split(", ")}
    assert without | {each.lecture for each in WORKLOADS} == set(Course(ROOT).titles)
    assert not without & {each.lecture for each in WORKLOADS}


@pytest.mark.parametrize(
    ("lecture", "text", "words"),
    [
        (10, "mine = 1", "the file defines no generate"),
        (16, "mine = 1", "the file defines no nucleus"),
        (10, "generate = lambda forward, prompt, num: [0] * num", "the tokens differ"),
        (12, "MyManager = type('M', (Base,), {'get_computed_blocks': none})", "the plans differ"),
        (13, "MyScheduler = type('S', (Scheduler,), {'add_request': shortest})", "a request waits"),
        (14, "attention = lambda q, *rest: q", "the result differs"),
        (16, "nucleus = lambda largest, top_p: [1e-3] * len(top_p)", "a nucleus is not the"),
        (
            20,
            "sent = []\n"
            "class Encoder:\n"
            "    def encode(self, plan): return sent.append(plan) or b''\n"
            "class Decoder:\n"
            "    def decode(self, order): return sent[-1] if sent else None",
            "a rank reads another plan",
        ),
        (21, "all_reduce = lambda ranks, size: []", "a rank does not have the sum"),
        (21, "all_reduce = lambda ranks, size: [[(0, 1, 0, size, True)]] * 2", "a rank does not"),
        (23, "layers_per_stage = lambda costs, stages: [1] * stages", "every layer needs a stage"),
        (
            23,
            "layers_per_stage = lambda costs, n: [len(costs)] + [0] * (n - 1)",
            "every stage a layer",
        ),
        (24, "rebalance = lambda loads, old: old", "the busiest ranks have 2.44 times"),
        (
            32,
            "from nanovllm.kv_transfer.stores.store import HostKeys\n"
            "all_there = lambda self, keys: len(keys)\n"
            "MyStore = type('S', (HostKeys,), {'contains': all_there})",
            "the store counts a block that it does not keep",
        ),
        (
            32,
            "from nanovllm.kv_transfer.stores.store import HostKeys\n"
            "larger = lambda self, size: HostKeys.__init__(self, 10 * size)\n"
            "MyStore = type('S', (HostKeys,), {'__init__': larger})",
            "more blocks than it has slots",
        ),
        (40, "graph_sizes = lambda seen, most: sorted(set(seen))", "at most 11 graphs"),
        (40, "graph_sizes = lambda seen, most: [6, 13]", "large enough for every step"),
        (41, "quantize = lambda w, size: (w, w[:, :8] * 0 + 1)", "256 integers from -8 to 7"),
        (41, "quantize = lambda w, size: (w.round(), w)", "and 8 scales"),
        (
            42,
            "class MyProposer:\n"
            "    def __init__(self, *lengths): pass\n"
            "    def propose(self, tokens, count): return [0] * 5",
            "more than four drafts",
        ),
    ],
)
def test_who_does_something_else_beats_nothing(
    lecture: int, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from nanovllm.core.kv_cache_manager import KVCacheManager as Base\n"
        "from nanovllm.core.scheduler import Scheduler\n"
        "none = lambda self, request: []\n"
        "def shortest(self, request):\n"
        "    request.order = (request.num_tokens, request.order[1])\n"
        f"    Scheduler.add_request(self, request)\n{text}\n"
    )
    assert count([str(lecture), str(file), str(tmp_path / "result.json")]) == 2
    assert words in capsys.readouterr().out
