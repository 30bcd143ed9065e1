"""A number in a lecture's prose comes from its code or its compared outputs, or the sentence says
where it comes from; a file that prose names exists. Otherwise the next machine, or the next change
of the engine, contradicts the sentence."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm.lab.course.prose import VALUE

LECTURES = sorted((Path(__file__).parents[3] / "notebooks").glob("[0-9]*.ipynb"))
LECTURE_NUMBERS = {float(path.name[:2]) for path in LECTURES} | {41, 42}
NUMBER = re.compile(r"(?<![\w.,/#-])\d[\d,]*(?:\.\d+)?(?!\w)")
SMALL = 12  # whole numbers up to this one are said, not measured

# What is no claim of this lecture: code, links and pictures' descriptions, formulas, references,
# reading times, quotations.
NO_CLAIM = re.compile(
    r"```.*?```|`[^`]*`|!\[[^]]*\]|\]\([^)]*\)|\$\$.*?\$\$|\$[^$\n]*\$"
    r"|^\#.*?$|^> .*?$|^ {4}\S.*?$|^Reading time.*?\n\n|Reading time[^.]*\."
    r"|\b(?:[Ll]ectures?|[Ss]ections?|[Ee]xercises?|issue|pull request|[Pp]art) \(?\d+(?:(?:, |"
    r" and | to |–)\d+)*"
    r"|\(\d\d(?:(?:, | and )\d\d)*\)|\b\d+\.\d+\.\d+\b|\barXiv[ :]*[\d.]+(?:,"
    r" [\d.]+)*|\b(?:19|20)\d\d\b",
    re.DOTALL | re.MULTILINE,
)
# A sentence that names what its numbers are from: a paper, a data sheet, a published model,
# hardware that is not here.
SOURCE = re.compile(
    r"\bet al\b|\bpapers?\b|\bdata"
    r" ?sheets?\b|arXiv|\bpublish|\bNCCL\b|\bvLLM|\b[AH][12]00\b|\bGPUs?\b"
    r"|\bNVLink\b|\bInfiniBand\b|\bEthernet\b"
    r"|\bLlama|\bDeepSeek|\bQwen|\bMixtral|\bSmolLM|\bGemma"
)
TERM = r"[−-]?\(?\d[\d.,]*[π%)]*(?: ?[A-Za-zµ/]{1,8})?\)?"
# A reader can check it.
CALCULATION = re.compile(
    rf"(?:\bln |{TERM} ?[-×·*/+−–^] ?(?:{TERM} ?[-×·*/+−–^] ?)*){TERM} ?[=≈] ?\**{TERM}"
)
# A table is one sentence.
SENTENCE = re.compile(r"(?<=[.!?])[)*\"”]*\s+(?=[^a-z])|\n(?=[-*\d<])|\n\n")
# From here on, it is about another project.
END = re.compile(r"^#+ .*[Tt]he same (?:idea|house) in vLLM", re.MULTILINE)


def numbers_in(text: str) -> set[float]:
    return {
        float(found.replace(",", "").replace("_", ""))
        for found in re.findall(r"\d[\d,_]*(?:\.\d+)?", text)
    }


def unbacked(cells: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """(cell, number, its sentence) of all numbers that nothing in the lecture backs."""
    backed, found = set(), []
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            backed |= numbers_in(source)
            if "NBVAL_IGNORE_OUTPUT" not in source:
                # What that one prints is another number elsewhere.
                for output in cell["outputs"]:
                    backed |= numbers_in("".join(output.get("text", "")))
        else:
            backed |= {
                float(number)
                for number in re.findall(r"^#+ (\d+\.\d+)", "".join(cell["source"]), re.MULTILINE)
            }
    backed |= {100 * value for value in backed if 0 < value < 1}  # 0.05 in code is 5 % in prose
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            end = END.search(text)
            ours = VALUE.sub(" ", text[: end.start()] if end else text)
            for sentence in SENTENCE.split(NO_CLAIM.sub(" ", ours)):
                sentence = " ".join(sentence.split())
                if sentence and not SOURCE.search(sentence):
                    here = (
                        backed | LECTURE_NUMBERS
                        if "ecture" in sentence or "uilds on" in sentence
                        else backed
                    )
                    for number in NUMBER.findall(CALCULATION.sub(" ", sentence)):
                        value = float(number.rstrip(",").replace(",", ""))
                        if value not in here and (value > SMALL or value % 1):
                            found.append((index, number.rstrip(","), sentence))
            if end:
                break
    return found


def is_right(calculation: str) -> bool:
    """Whether the left side is the right one, as far as that is written out, in some power of ten
    of its unit."""
    left, right = re.split("[=≈]", calculation)
    for word, value in {
        ",": "",
        "−": "-",
        "–": "-",
        "×": "*",
        "·": "*",
        "^": "**",
        "π": "*math.pi",
        "ln": "math.log",
    }.items():
        left = left.replace(word, value)
    for power, word in enumerate(("KiB", "MiB", "GiB"), start=1):
        left = re.sub(rf"([\d.]+) {word}", rf"(\1*1024**{power})", left)
    left = re.sub(r"(?<![*.])\b(?!math|pi|log)[A-Za-zµ]+(?:/s)?", "", left).strip()
    left = re.sub(
        r"math\.log (\S+)", r"math.log(\1)", left[1:] if left.count("(") > left.count(")") else left
    )
    said = re.search(r"[−-]?\d[\d,]*(?:\.\d+)?", right)
    assert said is not None
    number, value = said.group().replace(",", "").replace("−", "-"), eval(left, {"math": math})
    margin = (
        float(number) / 50 if "≈" in calculation else 0.51 * 10.0 ** -len(number.partition(".")[2])
    )
    return any(abs(value * 10.0**k - float(number)) <= abs(margin) for k in range(-12, 13))


@pytest.mark.parametrize("lecture", LECTURES, ids=lambda path: path.stem)
def test_numbers_in_prose_have_a_source(lecture: Path) -> None:
    found = unbacked(json.loads(lecture.read_text(encoding="utf-8"))["cells"])
    shown = "\n".join(
        f"  cell {index}: {number} in “{sentence[:150]}”" for index, number, sentence in found
    )
    assert not found, (
        f"{lecture.name}: these numbers in prose are in no code and in no compared output of the "
        "lecture. For each of them: say it without the number (and assert it in the cell above), "
        "or print it in a cell whose output is compared, or write the calculation out (“576 × 4 "
        "= 2,304 bytes”), or let the lecture insert what it measures (`lab/course/prose.py`), or "
        "name its source in the same sentence (a paper, a data sheet, a GPU, a published "
        f"model).\n{shown}"
    )


def test_calculations_in_prose_are_right() -> None:
    wrong = []
    for lecture in LECTURES:
        for index, cell in enumerate(json.loads(lecture.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "markdown":
                text = " ".join(NO_CLAIM.sub(" ", VALUE.sub(" ", "".join(cell["source"]))).split())
                wrong += [
                    (lecture.stem, index, found)
                    for found in CALCULATION.findall(text)
                    if not is_right(found)
                ]
    assert not wrong


def test_files_named_in_prose_exist() -> None:
    root, missing = Path(__file__).parents[3], []
    files = [
        f"/{path.relative_to(root)}"
        for room in ("nanovllm", "tests", "notebooks")
        for path in (root / room).rglob("*.*")
    ]
    for lecture in LECTURES:
        for index, cell in enumerate(json.loads(lecture.read_text(encoding="utf-8"))["cells"]):
            text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            end = END.search(text)
            ours = text[: end.start()] if end else text
            named = re.findall(r"`([\w/.]+\.(?:py|cpp))`", ours)
            named += re.findall(
                r"`([\w/.]+\.(?:py|cpp))`",
                "\n".join(re.findall(r"^\| [^|]*", text[len(ours) :], re.MULTILINE)),
            )
            missing += [
                (lecture.stem, index, name)
                for name in named
                if not any(file.endswith(f"/{name}") for file in files)
            ]
            if end:
                break
    assert not missing, "prose names files that do not exist (or exist no more)"


def test_an_unbacked_number_is_found() -> None:
    def cell(kind: str, source: str, printed: str = "") -> dict[str, Any]:
        return {"cell_type": kind, "source": [source], "outputs": [{"text": [printed]}]}

    code = cell("code", "size = 1536\nprint(3 * size)", "4608\n")
    timed = cell("code", "# NBVAL_IGNORE_OUTPUT\nprint(seconds)", "0.0731\n73.1 ms\n")
    for prose in (
        "It has 1,536 rows, 4,608 numbers, and 12 heads.",
        "A token takes 1,536 × 2 = 3,072 bytes (lecture 17).",
        "Kwon et al. report 96.3 %.",
        "It takes <!--= 1e3 * seconds | .1f -->73.1<!--/--> ms.",
        "As in `f(73)`.\n\n## 8 · The same idea in vLLM\n\nIt has 64 of them.",
    ):
        assert unbacked([code, timed, cell("markdown", prose)]) == []
    for prose, number in (
        ("It takes 73.1 ms here.", "73.1"),  # what a clock said, elsewhere it says another thing
        ("One has 81 blocks.", "81"),
        ("By the paper it is 96.3 %. Here it is 95.2 %.", "95.2"),
    ):
        assert [found for _, found, _ in unbacked([code, timed, cell("markdown", prose)])] == [
            number
        ]
    assert is_right("141 GB / 8 / 3,350 GB/s = 5.3 ms") and is_right(
        "8 GiB / 128 KiB = 65,536 tokens"
    )
    assert not is_right("16 · 46,080 = 736,280 bytes") and not is_right("28.3 / 106.2 = 28 %")
