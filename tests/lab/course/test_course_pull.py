"""Edits of modules carried back into lectures."""

from __future__ import annotations

import json
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.unchanged import KEY, mark
from tests.examples import examples

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"

CELLS = [
    "# Paged memory",
    '#| default_exp pool\n"""Hands out blocks."""\n\nprint("not exported")',
    """
    #| export
    from collections import deque

    from nanovllm.lab.course import extend
    """,
    """
    #| export
    BLOCK = 16
    LIMIT = 3

    # --- helpers ---

    def blocks(tokens: int) -> int:
        return -(-tokens//BLOCK)   # unformatted
    """,
    '''
    #| export
    class Pool:
        """Free blocks."""

        size: int = 4

        def __init__(self) -> None:
            self.free = deque(range(self.size))

        def take(self) -> int:
            return self.free.pop()
    ''',
    """
    #| export
    @extend
    class Pool(Pool):
        # Oldest first.
        def take(self) -> int:
            return self.free.popleft()

        def give(self, block: int) -> None:
            self.free.append(block)
    """,
    """
    #| export
    @extend
    class Pool(Pool):
        @property
        def empty(self) -> bool:
            return not self.free
    """,
    "#| export\npool = Pool()",
]


class Course:
    """A course of one lecture, its module, and what the notebook has beside sources."""

    def __init__(self, root: Path, cells: list[str] = CELLS) -> None:
        self.root = root
        (root / "notebooks").mkdir()
        (root / "pyproject.toml").write_text(PYPROJECT.read_text())
        self.notebook = root / "notebooks/lecture.ipynb"
        self.module = root / "nanovllm/pool.py"
        output = {"name": "stdout", "output_type": "stream", "text": ["kept\n"]}
        raw = []
        for number, source in enumerate(cells):
            lines = textwrap.dedent(source).strip("\n").splitlines(keepends=True)
            cell = {"id": f"id-{number}", "metadata": {"tags": [f"tag-{number}"]}, "source": lines}
            if number:
                raw.append(
                    {"cell_type": "code", "execution_count": number, "outputs": [output], **cell}
                )
            else:
                raw.append({"cell_type": "markdown", **cell})
        text = json.dumps(
            {"cells": raw, "metadata": {"gpu": True}, "nbformat": 4, "nbformat_minor": 5}, indent=1
        )
        self.notebook.write_text(text + "\n")
        assert self("build") == 0

    def __call__(self, *command: str) -> int:
        return main(["--root", str(self.root), *command])

    def edit(self, old: str, new: str) -> None:
        text = self.module.read_text()
        assert text.count(old) == 1, text
        self.module.write_text(text.replace(old, new))

    def cells(self) -> list[str]:
        return ["".join(cell["source"]) for cell in json.loads(self.notebook.read_text())["cells"]]

    def changed_cells(self) -> dict[int, str]:
        """Pull; the sources of the cells that it changed. Checks that module and lecture agree
        afterwards."""
        before = json.loads(self.notebook.read_text())
        sources = self.cells()
        assert self("build", "--pull") == 0
        assert self("build", "--check") == 0
        after = json.loads(self.notebook.read_text())
        changed = {number: now for number, now in enumerate(self.cells()) if now != sources[number]}
        marked = json.loads(self.notebook.read_text())
        mark(marked["cells"])
        assert not changed or marked == after, "unchanged lines are marked"
        for raw in (*before["cells"], *after["cells"]):
            del raw["source"]
            raw["metadata"].pop(KEY, None)
        assert before == after, "something beside sources changed"
        return changed


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def test_nothing_to_pull_changes_nothing(course: Course) -> None:
    before = course.notebook.read_bytes()
    assert course.changed_cells() == {}
    assert course.notebook.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "cell"),
    [
        ("return -(-tokens // BLOCK)  # unformatted", "return -(tokens // -BLOCK)  # exact", 3),
        ("# --- helpers ---", "# --- small functions ---", 3),
        ("LIMIT = 3", "LIMIT = BLOCK // 4", 3),
        ('"""Free blocks."""', '"""The free blocks\n\n    of a rank.\n    """', 4),
        ("size: int = 4", "size: int = 8  # blocks", 4),
        ("class Pool:", "# Not thread-safe.\nclass Pool(object):", 4),
        ("return self.free.popleft()", "block = self.free.popleft()\n        return block", 5),
        ("# Oldest first.", "# Least recently used first.", 5),
        ("return not self.free", "return len(self.free) == 0", 6),
        ("pool = Pool()", "pool: Pool = Pool()", 7),
    ],
)
def test_a_change_goes_to_the_cell_it_came_from(
    course: Course, old: str, new: str, cell: int
) -> None:
    course.edit(old, new)
    changed = course.changed_cells()
    assert list(changed) == [cell]
    assert new in changed[cell]


def test_unchanged_pieces_of_a_changed_cell_stay_as_written(course: Course) -> None:
    course.edit("LIMIT = 3", "LIMIT = 4")
    assert course.changed_cells()[3].endswith("return -(-tokens//BLOCK)   # unformatted")


def test_the_summary_goes_to_its_cell(course: Course) -> None:
    course.edit("Hands out blocks.", "Hands out blocks\nof equal size.\n\nA second paragraph.")
    assert (
        '#| default_exp pool\n"""Hands out blocks\nof equal size.\n\nA second'
        in course.changed_cells()[1]
    )
    course.edit("Hands out blocks\nof equal size.\n\nA second paragraph.", "Hands out.")
    assert course.changed_cells() == {
        1: '#| default_exp pool\n"""Hands out."""\n\nprint("not exported")'
    }


def test_new_members_follow_the_member_before_them(course: Course) -> None:
    course.edit(
        "    def give(self,",
        "    def peek(self) -> int:\n        return self.free[0]\n\n    def give(self,",
    )
    # `take` stands where its first version stood, in cell 4.
    assert course.changed_cells()[4].endswith(
        "\n\n    def peek(self) -> int:\n        return self.free[0]"
    )


PLACED = """
    #| export after=__init__ into=__init__
    @extend
    class Pool(Pool):
        taken = 0  # so far

        def peek(self) -> int:
            return self.free[0]
    """


@pytest.mark.parametrize(
    ("old", "new", "cell", "carried"),
    [
        (
            "return self.free[0]",
            "return self.free[-1]",
            8,
            "peek(self) -> int:\n        return self.free[-1]",
        ),
        (  # a new member above the placed one, which stands directly below `__init__`
            "    def peek",
            "    def one(self) -> int:\n        return 1\n\n    def two(self) -> int:\n"
            "        return 2\n\n    def peek",
            8,
            "return 1\n\n    def two(self) -> int:\n        return 2\n\n    def peek",
        ),
        (  # and below it
            "    def take",
            "    def one(self) -> int:\n        return 1\n\n    # Oldest first.\n    def take",
            8,
            "return self.free[0]\n\n    def one(self) -> int:\n        return 1",
        ),
        (
            "self.taken = 0  # so far",
            "self.taken: int = 1  # now",
            8,
            "\n    taken: int = 1  # now",
        ),
        (
            "self.taken = 0  # so far",
            "self.taken = 0  # so far\n        # in blocks\n        self.given = 0",
            8,
            "    taken = 0  # so far\n    # in blocks\n    given = 0\n",
        ),
        (
            "self.free = deque(range(self.size))\n",
            "self.free = deque(range(self.size))\n        self.limit = LIMIT\n",
            4,
            "(self.size))\n        self.limit = LIMIT\n",
        ),
    ],
)
def test_edits_around_placed_members(
    tmp_path: Path, old: str, new: str, cell: int, carried: str
) -> None:
    course = Course(tmp_path, [*CELLS, PLACED])
    old = old.replace("    def take", "    # Oldest first.\n    def take")
    course.edit(old, new)
    changed = course.changed_cells()
    assert list(changed) == [cell]
    assert carried in changed[cell]
    assert "\n#| export after=__init__ into=__init__\n" in "\n" + course.cells()[8]


def test_another_order_is_for_the_directive_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    course = Course(tmp_path, [*CELLS, PLACED])
    text = course.module.read_text()
    start = text.index("    def peek")
    end = text.index("    # Oldest first.")
    peek = text[start:end]
    course.module.write_text(text.replace(peek, "").replace("\n\npool =", f"\n{peek}\n\npool ="))
    before = course.notebook.read_bytes()
    assert course("build", "--pull") == 1
    assert "cannot be carried back" in capsys.readouterr().err
    assert course.notebook.read_bytes() == before


def test_new_things_of_every_kind(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    course.edit(
        "from collections import deque", "import math\nfrom collections import Counter, deque"
    )
    course.edit("LIMIT = 3\n", "LIMIT = 3\nFIRST = math.inf\n# about the last\nLAST = 2\n")
    course.edit("    size: int = 4", "    size: int = 4\n    counts: Counter[int]")
    course.edit(
        "pool = Pool()",
        "def fill(pool: Pool) -> None:\n    pool.give(1)\n\n\npool = Pool()\npool.give(2)",
    )
    course.edit("    def __init__", "    # --- life ---\n\n    def __init__")
    changed = course.changed_cells()
    assert sorted(changed) == [2, 3, 4, 7]
    assert "import math" in changed[2] and "from collections import Counter" in changed[2]
    assert changed[3].startswith(
        "#| export\nBLOCK = 16\nLIMIT = 3\nFIRST = math.inf\n# about the last\nLAST = 2\n\n#"
    )
    assert (
        "    size: int = 4\n    counts: Counter[int]\n\n    # --- life ---\n\n    def __init__"
        in changed[4]
    )
    assert "def fill(pool: Pool) -> None:" in changed[4]  # it follows the class, which begins there
    assert changed[7] == "#| export\npool = Pool()\npool.give(2)"
    assert "notebooks/lecture.ipynb: changed cell 5\n" in capsys.readouterr().out


def test_type_checking_and_future_imports(course: Course) -> None:
    course.edit("from collections", "from __future__ import annotations\n\nfrom collections")
    course.edit(
        "import deque\n",
        "import deque\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from "
        "nanovllm.data.config import Config\n",
    )
    course.edit(
        "def give(self, block: int)", "def give(self, block: int, config: Config | None = None)"
    )
    assert course.changed_cells()[2].startswith(
        "#| export\nfrom __future__ import annotations\nfrom collections"
    )
    course.edit("import Config\n", "import Config\n    from nanovllm.data.request import Request\n")
    course.edit("config: Config |", "config: Config | Request |")
    assert (
        "import Config\n    from nanovllm.data.request import Request\n"
        in course.changed_cells()[2]
    )


def test_removals(course: Course) -> None:
    course.edit("    def give(self, block: int) -> None:\n        self.free.append(block)\n\n", "")
    course.edit("    @property\n    def empty(self) -> bool:\n        return not self.free\n", "")
    course.edit("LIMIT = 3\n", "")
    course.edit("pool = Pool()\n", "")
    changed = course.changed_cells()
    assert changed[6] == changed[7] == "#| export"
    assert "give" not in changed[5] and "LIMIT" not in changed[3]


def test_a_class_goes_with_all_its_continuations(course: Course) -> None:
    text = course.module.read_text()
    course.module.write_text(
        text[: text.index("class Pool")].replace("from collections import deque\n", "").rstrip()
        + "\n"
    )
    assert [
        number for number, source in course.changed_cells().items() if source == "#| export"
    ] == [4, 5, 6, 7]


def test_spaces_and_first_members(course: Course) -> None:
    course.edit("LIMIT = 3\n", "\n\nLIMIT = 3\n")
    course.edit(
        '    """Free blocks."""\n\n    size: int = 4\n', "    most: int = 9\n    size: int = 4\n"
    )
    changed = course.changed_cells()
    assert changed[3].startswith("#| export\nBLOCK = 16\n\n\nLIMIT = 3\n")
    assert changed[4].startswith(
        "#| export\nclass Pool:\n    most: int = 9\n    size: int = 4\n\n    def __init__"
    )
    course.edit("BLOCK = 16\n\n\nLIMIT", "FIRST = 1\nBLOCK = 16\nLIMIT")
    assert course.changed_cells()[3].startswith("#| export\nFIRST = 1\nBLOCK = 16\nLIMIT = 3\n")


def test_a_change_goes_to_the_lecture_it_came_from(course: Course) -> None:
    """A later lecture replaces one method and adds another; both lectures are changed at once, and
    the rest of them stays."""
    later = course.root / "notebooks/more.ipynb"
    first = json.loads(course.notebook.read_text())
    source = (
        "#| extend pool\n@extend\nclass Pool(Pool):\n    def take(self) -> int:\n        return "
        "5\n\n    def more(self) -> int:\n        return 6"
    )
    later.write_text(
        json.dumps(first | {"cells": [first["cells"][0], first["cells"][-1] | {"source": source}]})
    )
    assert course("build") == 0
    course.edit("return 5", "return 7")
    course.edit("return 6", "return 8")
    course.edit("BLOCK = 16", "BLOCK = 32")
    assert list(course.changed_cells()) == [3]
    changed = "".join(json.loads(later.read_text())["cells"][1]["source"])
    assert changed == source.replace("5", "7").replace("6", "8")
    course.edit("return 7", "return nothing")
    before = later.read_bytes(), course.notebook.read_bytes()
    assert course("build", "--pull") == 1
    assert before == (later.read_bytes(), course.notebook.read_bytes())


def test_an_unformatted_module_is_formatted(course: Course) -> None:
    course.edit("LIMIT = 3", "LIMIT   =   5")
    assert "LIMIT = 5" in course.changed_cells()[3]
    course.edit("LIMIT = 5", "LIMIT   = 5")
    assert course.changed_cells() == {}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            (
                "    # Oldest first.\n    def take(self) -> int:\n        return "
                "self.free.popleft()\n\n"
            ),
            "",
            "+        return self.free.pop()",
        ),
        ("BLOCK = 16\nLIMIT = 3\n", "LIMIT = 3\nBLOCK = 16\n", "BLOCK = 16"),
        ("return not self.free", "return nothing", "Undefined name `nothing`"),
        (
            "return not self.free",
            "return not not",
            "nanovllm/pool.py, line 35: Expected an expression",
        ),
        ("Built by notebooks/lecture.ipynb: ", "Built by hand: ", "Built by hand"),
    ],
)
def test_what_cannot_be_carried_is_told_and_nothing_is_written(
    course: Course, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    course.edit(old, new)
    notebook, module = course.notebook.read_bytes(), course.module.read_bytes()
    assert course("build", "--pull") == 1
    assert words in capsys.readouterr().err
    assert (notebook, module) == (course.notebook.read_bytes(), course.module.read_bytes())


def edit_lecture(course: Course, old: str, new: str) -> None:
    text = course.notebook.read_text()
    assert text.count(old) == 1, text
    course.notebook.write_text(text.replace(old, new))


def test_edits_of_both_sides_are_kept(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    edit_lecture(course, "self.free.popleft()", "self.free.popleft() + 0")
    course.edit("LIMIT = 3", "LIMIT = 5")
    assert course("build", "--pull") == 0
    assert "nanovllm/pool.py: has the lecture's edits, too" in capsys.readouterr().out
    assert course("build", "--check") == 0
    assert all(edit in course.module.read_text() for edit in ("LIMIT = 5", "popleft() + 0"))
    assert (
        any("LIMIT = 5" in cell for cell in course.cells()) and "popleft() + 0" in course.cells()[5]
    )


def test_a_pull_leaves_the_edits_of_a_lecture(course: Course) -> None:
    edit_lecture(course, "LIMIT = 3", "LIMIT = 5")
    assert course("build", "--pull") == 0
    assert course("build", "--check") == 0
    assert "LIMIT = 5" in course.module.read_text() and "LIMIT = 5" in course.cells()[3]


def test_edits_of_the_same_line_are_not_lost(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_lecture(course, "LIMIT = 3", "LIMIT = 5")
    course.edit("LIMIT = 3", "LIMIT = 7")
    before = course.notebook.read_bytes(), course.module.read_bytes()
    assert course("build", "--pull") == 1
    complaint = capsys.readouterr().err
    assert "  nanovllm/pool.py\n" in complaint and "both changed the same lines" in complaint
    assert before == (course.notebook.read_bytes(), course.module.read_bytes())


def test_an_edit_that_was_committed_before_the_pull_is_carried(course: Course) -> None:
    course.edit("LIMIT = 3", "LIMIT = 5")
    git = ["git", "-C", str(course.root), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for arguments in (["init", "-q"], ["add", "nanovllm", "notebooks"], ["commit", "-qm", "Pool"]):
        subprocess.run([*git, *arguments], check=True)
    (course.root / "build/course_modules.json").unlink()
    assert "LIMIT = 5" in course.changed_cells()[3]


NAMES = st.sampled_from(["alpha", "beta", "gamma", "delta"])
MEMBERS = st.lists(
    st.tuples(NAMES, st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=4,
    unique_by=lambda m: m[0],
)


def members(chosen: list[tuple[str, int, bool]]) -> str:
    comment = "    # why\n"
    return "\n\n".join(
        f"{comment * commented}    def {name}(self):\n        return {value}"
        for name, value, commented in chosen
    )


@settings(max_examples=examples(12))
@given(
    parts=st.lists(MEMBERS, min_size=1, max_size=4),
    edits=st.dictionaries(NAMES, st.integers(10, 19)),
    new=st.booleans(),
)
def test_any_class_over_any_cells_makes_the_round_trip(
    parts: list[list[tuple[str, int, bool]]], edits: dict[str, int], new: bool
) -> None:
    cells = [
        "# Title",
        '#| default_exp pool\n"""Doc."""',
        f"#| export\nclass Pool:\n{members(parts[0])}",
    ]
    cells += [f"#| export\n@extend\nclass Pool(Pool):\n{members(part)}" for part in parts[1:]]
    latest = {name: value for part in parts for name, value, _ in part}
    with tempfile.TemporaryDirectory() as folder:
        course = Course(Path(folder), cells)
        for name in latest.keys() & edits.keys():
            course.edit(
                f"def {name}(self):\n        return {latest[name]}",
                f"def {name}(self):\n        return {edits[name]}",
            )
            latest[name] = edits[name]
        if new:
            course.module.write_text(
                course.module.read_text() + "\n    def omega(self):\n        return 20\n"
            )
            latest["omega"] = 20
        course.changed_cells()
        scope: dict[str, type] = {}
        exec(course.module.read_text(), scope)
        pool = scope["Pool"]()
        assert {name: getattr(pool, name)() for name in latest} == latest
        public = [name for name in vars(scope["Pool"]) if not name.startswith("__")]
        assert public == list(latest), "members stand in the order of their first versions"
