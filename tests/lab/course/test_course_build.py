"""Lectures to modules: directives, folding, imports, and the positions of errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.build import build, find_lectures, read_lectures
from nanovllm.lab.course.notebook import CourseError

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
TITLE = "# Paged memory"
SUMMARY = '"""Hands out blocks."""'
OPENING = f"#| default_exp pool\n{SUMMARY}"


def make_course(root: Path, **lectures: list[str]) -> Path:
    """A course of lectures; a cell that begins with `# ` and a title, or with words, is
    markdown."""
    (root / "notebooks").mkdir(exist_ok=True)
    (root / "pyproject.toml").write_text(PYPROJECT.read_text())
    for name, sources in lectures.items():
        cells = []
        for number, source in enumerate(sources):
            source = textwrap.dedent(source).strip("\n")
            cell = {
                "id": f"cell-{number}",
                "metadata": {},
                "source": source.splitlines(keepends=True),
            }
            if source.startswith(("# Paged", "# Other", "Prose")):
                cells.append({"cell_type": "markdown", **cell})
            else:
                cells.append({"cell_type": "code", "execution_count": None, "outputs": [], **cell})
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
        (root / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook, indent=1) + "\n")
    return root


def built(root: Path, *cells: str, module: str = "pool") -> str:
    """The text of the module that one lecture of these cells builds, below its docstring."""
    make_course(root, lecture=[TITLE, f"#| default_exp {module}\n{SUMMARY}", *cells])
    (item,) = build(root, read_lectures(root))
    return item.text.partition('edit it there.\n"""\n')[2].lstrip("\n")


def export(code: str) -> str:
    return "#| export\n" + textwrap.dedent(code).strip("\n")


def expected(code: str) -> str:
    return textwrap.dedent(code).lstrip("\n")


def failure(root: Path, *cells: str) -> str:
    with pytest.raises(CourseError) as caught:
        built(root, *cells)
    return str(caught.value)


POOL = export('''
    class Pool:
        """Blocks."""

        size = 16

        def free(self) -> int:
            return 1

        def take(self) -> int:
            return 2
    ''')


def test_docstring_names_the_lecture(tmp_path: Path) -> None:
    make_course(tmp_path, lecture=[TITLE, f"#| default_exp kv.pool\n{SUMMARY}", export("x = 1")])
    assert main(["--root", str(tmp_path), "build"]) == 0
    assert (tmp_path / "nanovllm/kv/pool.py").read_text() == expected('''
        """Hands out blocks.

        Built by notebooks/lecture.ipynb: edit it there.
        """

        x = 1
        ''')


def test_one_lecture_builds_several_modules(tmp_path: Path) -> None:
    first = '#| default_exp models.llama\n"""The model.\n\nWith \\\\ and more.\n"""'
    second = (
        '#| default_exp models.loader\n#| export\n"""The loader."""\n\nimport os\n\nhome = os.sep'
    )
    cells = [
        TITLE,
        first,
        export("a = 1"),
        second,
        "#| export models.llama\nb = 2",
        export("c = 3"),
    ]
    make_course(tmp_path, lecture=cells)
    llama, loader = (item.text for item in build(tmp_path, read_lectures(tmp_path)))
    assert llama.startswith(
        'r"""The model.\n\nWith \\ and more.\n\nBuilt by notebooks/lecture.ipynb: '
    )
    assert llama.endswith('"""\n\na = 1\n\nb = 2\n')
    assert loader.startswith('"""The loader.\n\nBuilt by')
    assert loader.endswith('"""\n\nimport os\n\nhome = os.sep\n\nc = 3\n')


def test_a_class_grows_over_cells(tmp_path: Path) -> None:
    text = built(
        tmp_path,
        "from nanovllm.lab.course import extend",
        POOL,
        "Prose between.",
        export("def helper() -> int:\n    return 0"),
        export("""
            from nanovllm.lab.course import extend

            @extend
            class Pool(Pool):
                # Replaces the naive version.
                def free(self) -> int:
                    return 10  # now counted

                # --- new members ---

                @staticmethod
                def least() -> int:
                    return 0
            """),
    )
    assert text == expected('''
        class Pool:
            """Blocks."""

            size = 16

            # Replaces the naive version.
            def free(self) -> int:
                return 10  # now counted

            def take(self) -> int:
                return 2

            # --- new members ---

            @staticmethod
            def least() -> int:
                return 0


        def helper() -> int:
            return 0
        ''')


def test_every_kind_of_member_survives(tmp_path: Path) -> None:
    body = '''
    import abc
    from dataclasses import dataclass
    from typing import overload


    @dataclass(frozen=True)
    class Config:
        size: int
        name: str = "x"  # trailing

        # above a field
        depth: int = 1


    class Pool(abc.ABC):
        """Doc."""

        limit: int = 3

        class Inner:
            def deep(self) -> int:
                return super().__hash__()

        @property
        def free(self) -> int:
            return 1

        @free.setter
        def free(self, value: int) -> None:
            self.limit = value

        @free.deleter
        def free(self) -> None:
            self.limit = 0

        @overload
        def take(self, count: int) -> int: ...
        @overload
        def take(self, count: str) -> str: ...
        def take(self, count):
            return count

        @classmethod
        def make(cls) -> "Pool":
            return cls()

        async def wait(self) -> None:
            pass


    class Empty(Exception): ...


    # --- section ---

    a, b = 1, 2
    c = a
    c += 1

    if c:
        c = 0
    # the end
    '''
    text = built(tmp_path, export(body))
    assert text == expected(textwrap.dedent(body).replace("# the end", "# the end"))


def test_a_later_cell_may_bring_the_docstring(tmp_path: Path) -> None:
    later = '@extend\nclass Pool(Pool):\n    """Late."""'
    assert built(tmp_path, export("class Pool:\n    size = 1\n"), export(later)) == expected('''
        class Pool:
            """Late."""

            size = 1
        ''')


ADDED = """
    @extend
    class Pool(Pool):
        # Oldest first.
        def give(self) -> None:
            pass

        def free(self) -> int:
            return 3

        # --- the end ---

        def close(self) -> None:
            pass
    """
STATE = """
    class Pool:
        def __init__(self) -> None:
            self.size = 1

        def take(self) -> int:
            return 2
    """


def members(text: str) -> list[str]:
    return re.findall(r"^    (?:def )?(\w+)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("directive", "order"),
    [
        ("export", "size free take give close"),
        ("export after=size", "size give close free take"),
        ("export after=free", "size free give close take"),
        ("export after=take", "size free take give close"),
        ("export before=take", "size free give close take"),
        ("export pool before=size", "give close size free take"),
        ("export before=size close:after=free", "give size free close take"),
        ("export give:after=free", "size free give take close"),
        ("export close:after=give give:before=free", "size give free take close"),
    ],
)
def test_new_members_stand_where_the_directive_says(
    tmp_path: Path, directive: str, order: str
) -> None:
    text = built(tmp_path, POOL, f"#| {directive}" + textwrap.dedent(ADDED).rstrip())
    assert members(text) == order.split()
    assert "    # Oldest first.\n    def give" in text
    assert "    # --- the end ---\n\n    def close" in text
    assert "return 3" in text and "return 1" not in text


def test_a_later_lecture_places_its_members(tmp_path: Path) -> None:
    later = "@extend\nclass Pool(Pool):\n    def {}(self) -> int:\n        return 5"
    make_course(
        tmp_path,
        a=[TITLE, OPENING, POOL],
        b=[
            "# Other",
            "#| extend pool after=free\n" + later.format("peek"),
            "#| extend pool after=free\n" + later.format("least"),
            "#| extend pool before=peek\n" + later.format("most"),
        ],
    )
    (item,) = build(tmp_path, read_lectures(tmp_path))
    assert members(item.text) == ["size", "free", "least", "most", "peek", "take"]


def test_state_goes_into_init(tmp_path: Path) -> None:
    code = """
        @extend
        class Pool(Pool):
            # In blocks.
            taken: int = 0  # so far
            last = (
                None,
                -1,
            )

            def give(self) -> None:
                pass
        """
    cell = "#| export after=__init__ into=__init__" + textwrap.dedent(code).rstrip()
    assert built(tmp_path, export(STATE), cell) == expected("""
        class Pool:
            def __init__(self) -> None:
                self.size = 1
                # In blocks.
                self.taken: int = 0  # so far
                self.last = (None, -1)

            def give(self) -> None:
                pass

            def take(self) -> int:
                return 2
        """)


def test_state_stays_when_init_is_replaced(tmp_path: Path) -> None:
    text = built(
        tmp_path,
        export(STATE),
        "#| export into=__init__\n@extend\nclass Pool(Pool):\n    taken = 0",
        export("@extend\nclass Pool(Pool):\n    def __init__(self) -> None:\n        pass"),
    )
    assert "        pass\n        self.taken = 0\n" in text and "size" not in text


@pytest.mark.parametrize(
    ("directive", "body", "message"),
    [
        ("after=x before=y", "def give(self): ...", "line 1: name one place"),
        ("after=", "def give(self): ...", "line 1: `after=` is no place: there are after=member"),
        ("behind=take", "def give(self): ...", "line 1: `behind=take` is no place"),
        ("after=tke", "def give(self): ...", "line 1: class Pool has no member `tke` for new"),
        ("after=tke", "def give(self): ...", "so far it has __init__, take"),
        ("after=give", "def give(self): ...", "line 1: class Pool has no member `give`"),
        ("x:after=take", "def give(self): ...", "line 1: `after=take` places nothing"),
        ("after=__init__", "def take(self): ...", "line 1: `after=__init__` places nothing"),
        ("into=__init__", "taken = []", "line 5: `into=__init__` takes assignments of one name"),
        ("into=__init__", "a = b = 0", "line 5: `into=__init__` takes assignments of one name"),
    ],
)
def test_places_that_cannot_be(tmp_path: Path, directive: str, body: str, message: str) -> None:
    cell = f"#| export {directive}\n\n@extend\nclass Pool(Pool):\n    {body}"
    assert message in failure(tmp_path, export(STATE), cell)


def test_a_place_needs_a_class_that_the_cell_continues(tmp_path: Path) -> None:
    cell = "#| export after=take\ndef give() -> None:\n    pass"
    assert "line 1: a place is for members of a class" in failure(tmp_path, POOL, cell)


def test_redefinition_replaces_function_and_class_but_no_assignment(tmp_path: Path) -> None:
    text = built(
        tmp_path,
        export("x = 1\n\n\ndef f():\n    return 1\n\n\nclass A:\n    y = 1"),
        export("@extend\nclass A(A):\n    z = 1"),
        export("x = x + 1\n\n\n# better\ndef f():\n    return 2"),
        export("class A:\n    y = 2"),
    )
    assert text == expected("""
        x = 1


        # better
        def f():
            return 2


        class A:
            y = 2


        x = x + 1
        """)


def test_imports_are_collected_merged_sorted_and_pruned(tmp_path: Path) -> None:
    text = built(
        tmp_path,
        export(
            "import torch\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from decimal "
            "import Decimal"
        ),
        export(
            "from nanovllm.data.config import Config\nimport json\n\ndef f(x: Decimal):\n    "
            "return json"
        ),
        export(
            "from __future__ import annotations\n\nfrom collections import deque\n\nqueue = deque()"
        ),
        export("from nanovllm.lab.course import extend\nfrom collections import Counter"),
        export("if TYPE_CHECKING:\n    # only here\n    from fractions import Fraction"),
        export("def f(x: Decimal, y: Fraction, z: Config):\n    return Counter, torch.nn"),
    )
    assert text == expected("""
        from __future__ import annotations

        from collections import Counter, deque
        from typing import TYPE_CHECKING

        import torch

        from nanovllm.data.config import Config

        if TYPE_CHECKING:
            from decimal import Decimal

            # only here
            from fractions import Fraction


        def f(x: Decimal, y: Fraction, z: Config):
            return Counter, torch.nn


        queue = deque()
        """)


def test_empty_type_checking_block_goes(tmp_path: Path) -> None:
    code = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import re\n\nx = 1"
    assert built(tmp_path, export(code)) == "x = 1\n"


def test_marker_for_nbval_stays_in_the_notebook(tmp_path: Path) -> None:
    assert built(tmp_path, "# NBVAL_IGNORE_OUTPUT\n#| export\nx = 1") == "x = 1\n"


EXTEND = "#| export\n@extend\nclass Pool(Pool):\n"
ERRORS = {
    "unknown directive": (["#| exprot\nx = 1"], 3, 1, "unknown directive `exprot`"),
    "late directive": (["x = 1\n#| export"], 3, 2, "first lines"),
    "bad module name": (["#| default_exp kv/pool"], 3, 1, "needs the name of a module"),
    "package name": (["#| export nanovllm.pool\nx = 1"], 3, 1, "without `nanovllm.`"),
    "syntax error": ([export("x = 1\ny = = 2")], 3, 3, "syntax error"),
    "magic": ([export("%time x = 1")], 3, 2, "syntax error"),
    "semicolons": ([export("x = 1; y = 2")], 3, 2, "two statements on one line"),
    "indentation": ([export("class A:\n  x = 1")], 3, 3, "four spaces"),
    "never defined": ([EXTEND + "    x = 1"], 3, 2, "no earlier cell defines it"),
    "no reopening": (
        [POOL, export("@extend\nclass Other:\n    x = 1")],
        4,
        2,
        "`class Other(Other):`",
    ),
    "no extend": ([POOL, export("class Pool(Pool):\n    x = 1")], 4, 2, "continued by `@extend`"),
    "more bases": (
        [POOL, export("@extend\nclass Pool(Pool, int):\n    x = 1")],
        4,
        2,
        "nothing else",
    ),
    "comment above": (
        [POOL, export("# lost\n@extend\nclass Pool(Pool):\n    x = 1")],
        4,
        3,
        "nothing else",
    ),
    "course import": (
        [export("from nanovllm.lab.course import Exercise\n\nx = Exercise")],
        3,
        4,
        "Undefined name `Exercise`",
    ),
    "inline body": ([export("class Pool: ..."), EXTEND + "    x = 1"], 3, 2, "on its own lines"),
    "undefined name": (
        [export("def f():\n    x = 1\n    return np.sum(x)")],
        3,
        4,
        "Undefined name `np`",
    ),
    "late name": ([export("def f(b: B): ..."), export("class B: ...")], 3, 2, "Undefined name `B`"),
    "docstring": ([export('"""Doc."""\nx = 1')], 3, 2, "default_exp"),
    "second docstring": (['#| default_exp pool\n"""B."""'], 3, 2, "docstring already"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_file_cell_and_line(tmp_path: Path, case: str) -> None:
    cells, cell, line, words = ERRORS[case]
    message = failure(tmp_path, *cells)
    assert message.startswith(
        f"notebooks/lecture.ipynb: cell {cell} (In [{cell - 1}]), line {line}: "
    ), message
    assert words in message


def test_class_variables_may_be_added_to_a_dataclass(tmp_path: Path) -> None:
    head = (
        "from dataclasses import dataclass\nfrom typing import ClassVar\n\n\n@dataclass\nclass "
        "Pool:\n    size: int"
    )
    text = built(tmp_path, export(head), EXTEND + "    limit: ClassVar[int] = 3")
    assert text.endswith("    size: int\n\n    limit: ClassVar[int] = 3\n")


def test_export_without_module_and_missing_summary(tmp_path: Path) -> None:
    make_course(tmp_path, lecture=[TITLE, export("x = 1")])
    with pytest.raises(
        CourseError, match=r"cell 2 \(In \[1\]\), line 1: `export` before any `default_exp`"
    ):
        read_lectures(tmp_path)
    make_course(tmp_path, lecture=["#| default_exp pool", export("x = 1")])
    with pytest.raises(CourseError, match="pool has no docstring"):
        build(tmp_path, read_lectures(tmp_path))


@pytest.mark.parametrize("names", [[], ["b"]])
def test_two_lectures_may_not_build_one_module(tmp_path: Path, names: list[str]) -> None:
    make_course(
        tmp_path,
        a=[TITLE, OPENING, export("x = 1")],
        b=[TITLE, f"#| default_exp other\n{SUMMARY}", "#| export pool\ny = 1"],
    )
    with pytest.raises(
        CourseError, match=r"b\.ipynb: cell 3 \(In \[2\]\), line 1: pool is built by notebooks/a"
    ):
        read_lectures(tmp_path, names)


LATER = [
    "# Other things",
    """
    #| extend pool
    import math

    from nanovllm.lab.course import extend
    from nanovllm.pool import Pool

    @extend
    class Pool(Pool):
        def free(self) -> int:
            return math.inf

        def give(self) -> int:
            return 3
    """,
]


@pytest.mark.parametrize("names", [[], ["23"], ["11"]])
def test_a_later_lecture_continues_a_module(tmp_path: Path, names: list[str]) -> None:
    make_course(tmp_path, **{"11_paged": [TITLE, OPENING, POOL], "23_more": LATER})
    (item,) = [
        item for item in build(tmp_path, read_lectures(tmp_path, names)) if item.name == "pool"
    ]
    head, _, text = item.text.partition('edit it there.\n"""\n')
    assert "Built by notebooks/11_paged.ipynb and 23:" in head
    assert text.lstrip("\n") == expected('''
        import math


        class Pool:
            """Blocks."""

            size = 16

            def free(self) -> int:
                return math.inf

            def take(self) -> int:
                return 2

            def give(self) -> int:
                return 3
        ''')
    assert main(["--root", str(tmp_path), "build", *names]) == 0
    assert main(["--root", str(tmp_path), "build", "--check"]) == 0


def test_only_an_earlier_lecture_is_continued(tmp_path: Path) -> None:
    make_course(tmp_path, **{"11_paged": [TITLE, OPENING, POOL], "10_early": LATER})
    with pytest.raises(
        CourseError,
        match=r"10_early\.ipynb: cell 2 \(In \[1\]\), line 1: no earlier lecture builds pool",
    ):
        read_lectures(tmp_path)


def test_lectures_are_found_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    make_course(tmp_path, **{"11_paged": [TITLE], "12_tables": [TITLE], "12": [TITLE]})
    assert [
        path.stem for path in find_lectures(tmp_path, ["11", "12", "notebooks/11_paged.ipynb"])
    ] == ["11_paged", "12"]
    with pytest.raises(
        CourseError, match="`1` is more than one lecture; there are: 11_paged, 12, 12_tables"
    ):
        find_lectures(tmp_path, ["1"])
    with pytest.raises(CourseError, match="`13` is no lecture"):
        find_lectures(tmp_path, ["13"])


def test_check_shows_a_diff_until_the_module_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_course(tmp_path, lecture=[TITLE, OPENING, POOL])
    command = ["--root", str(tmp_path), "build"]
    assert main([*command, "--check"]) == 1
    assert "+class Pool:" in capsys.readouterr().out
    assert not (tmp_path / "nanovllm").exists()
    assert main(command) == 0
    assert "wrote nanovllm/pool.py" in capsys.readouterr().out
    assert main([*command, "--check", "lecture"]) == 0
    assert main(command) == 0
    assert "1 modules were up to date" in capsys.readouterr().out
    module = tmp_path / "nanovllm/pool.py"
    module.write_text(module.read_text().replace("return 2", "return 3"))
    assert main([*command, "--check"]) == 1
    assert "-        return 3\n+        return 2\n" in capsys.readouterr().out


def test_check_finds_modules_that_no_lecture_builds_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_course(tmp_path, lecture=[TITLE, OPENING, POOL])
    assert main(["--root", str(tmp_path), "build"]) == 0
    make_course(tmp_path, lecture=[TITLE, f"#| default_exp store\n{SUMMARY}", POOL])
    assert main(["--root", str(tmp_path), "build"]) == 0
    capsys.readouterr()
    assert main(["--root", str(tmp_path), "build", "--check"]) == 1
    assert (
        capsys.readouterr().out
        == "nanovllm/pool.py says that notebooks/lecture.ipynb builds it, but it does not\n"
    )


def test_build_does_not_overwrite_what_no_lecture_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_course(tmp_path, lecture=[TITLE, OPENING, POOL])
    (tmp_path / "nanovllm").mkdir()
    (tmp_path / "nanovllm/pool.py").write_text("mine = 1\n")
    assert main(["--root", str(tmp_path), "build"]) == 1
    assert "nanovllm/pool.py was not built by a lecture" in capsys.readouterr().err
    assert (tmp_path / "nanovllm/pool.py").read_text() == "mine = 1\n"


def test_command_line_finds_the_root_upwards(tmp_path: Path) -> None:
    make_course(tmp_path, lecture=[TITLE, OPENING, POOL])
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm.lab.course", "build"],
        cwd=tmp_path / "notebooks",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (
        0,
        "wrote nanovllm/pool.py\n0 modules were up to date\n",
    ), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm.lab.course", "--help"], capture_output=True, text=True
    )
    assert "build" in done.stdout and "run" in done.stdout


def block_lecture(value: int) -> list[str]:
    return [TITLE, OPENING, export(f"size = {value}")]


def edit_module(root: Path) -> Path:
    """Edit the module as somebody does who does not know that a lecture builds it."""
    module = root / "nanovllm/pool.py"
    module.write_text(module.read_text().replace("size = 1", "size = 100"))
    return module


def test_build_never_discards_an_edited_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_command = ["--root", str(tmp_path), "build"]
    make_course(tmp_path, lecture=block_lecture(1))
    assert main(build_command) == 0
    module = edit_module(tmp_path)
    assert main(build_command) == 1
    complaint = capsys.readouterr().err
    assert (
        "nanovllm/pool.py" in complaint
        and "--pull" in complaint
        and "Nothing was written" in complaint
    )
    assert "size = 100" in module.read_text()
    assert main([*build_command, "--overwrite"]) == 0
    assert "size = 1\n" in module.read_text()
    edit_module(tmp_path)
    assert main([*build_command, "--pull"]) == 0
    assert main(build_command) == 0 and "size = 100" in module.read_text()
    make_course(tmp_path, lecture=block_lecture(2))
    assert main(build_command) == 0 and "size = 2" in module.read_text(), "a pull is a build, too"


def test_check_says_which_side_was_edited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command = ["--root", str(tmp_path), "build", "--check"]
    make_course(tmp_path, lecture=block_lecture(1))
    assert main(check_command[:-1]) == 0
    make_course(tmp_path, lecture=block_lecture(2))
    assert main(check_command) == 1
    assert "the lecture was edited: `make build`" in capsys.readouterr().out
    edit_module(tmp_path)
    assert main(check_command) == 1
    assert "both edited" in capsys.readouterr().out
    make_course(tmp_path, lecture=block_lecture(1))
    assert main(check_command) == 1
    assert (
        "the module was edited: `python -m nanovllm.lab.course build --pull`"
        in capsys.readouterr().out
    )


def test_a_commit_says_which_side_was_edited_where_nothing_was_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a fresh clone, and after `git pull`."""
    command = ["--root", str(tmp_path), "build"]
    make_course(tmp_path, lecture=block_lecture(1))
    assert main(command) == 0
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for arguments in (["init", "-q"], ["add", "nanovllm", "notebooks"], ["commit", "-qm", "Pool"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "build/course_modules.json").unlink()
    make_course(tmp_path, lecture=block_lecture(2))
    assert main([*command, "--check"]) == 1
    assert "the lecture was edited" in capsys.readouterr().out
    edit_module(tmp_path)
    assert main(command) == 1
    assert "--pull" in capsys.readouterr().err
    subprocess.run([*git, "checkout", "-q", "nanovllm"], check=True)
    assert main(command) == 0
    assert "size = 2" in (tmp_path / "nanovllm/pool.py").read_text()


def test_build_says_that_the_learner_edited_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_course(tmp_path, lecture=block_lecture(1))
    command = ["--root", str(tmp_path), "build"]
    assert main(command) == 0 and main(["--root", str(tmp_path), "copy"]) == 0
    capsys.readouterr()
    copy = tmp_path / "my_notebooks/lecture.ipynb"
    copy.write_text(copy.read_text().replace("Paged memory", "My notes"))
    assert main(command) == 0
    assert "my_notebooks" not in capsys.readouterr().out, "prose is the learner's own"
    copy.write_text(copy.read_text().replace("size = 1", "size = 7"))
    assert main(command) == 0
    assert "my_notebooks/lecture.ipynb is your copy" in capsys.readouterr().out
    assert "size = 1\n" in (tmp_path / "nanovllm/pool.py").read_text()
