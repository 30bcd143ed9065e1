"""Runs the tests in tests/gpu and reports the outcome of each."""

import os
import pathlib
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanovllm.lab.bench.parts import Setting, Skip
from nanovllm.lab.bench.report import Row

FOLDER = pathlib.Path(__file__).parents[4] / "tests" / "gpu"
TITLE = "Tests on the GPU: kernels against float64, tokens in float32"


class _Reporter:
    """A plugin of pytest that passes on the outcome of each test; `passed` is None if it was
    skipped."""

    def __init__(self, found: queue.SimpleQueue[Row | None]) -> None:
        self._found = found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            passed = None if report.skipped else report.passed
            row = {"table": TITLE, "test": report.nodeid.partition("::")[2], "passed": passed}
            self._found.put(row | {"why": " ".join(_reason(report).split())[:300]})


def _reason(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped."""
    why = report.longrepr
    if isinstance(why, tuple):
        return why[2].removeprefix("Skipped: ")
    crash = getattr(why, "reprcrash", None)  # its class is private
    return "" if crash is None else str(crash.message)


def prove(setting: Setting, file: str, share: str = "0/1") -> Iterator[Row]:
    """Run a file of tests.

    Args:
        share: "i/n": every n-th test from the i-th on; other parts run the rest.
    """
    if not (FOLDER / file).is_file():
        raise Skip(f"the tests are in tests/gpu of a checkout, and there is no {FOLDER / file}")
    words = [
        "-c",
        os.devnull,
        "--confcutdir",
        str(FOLDER),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:logging",
    ]
    words += ["--share", share, str(FOLDER / file)]
    found: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as thread:
        # Each row is passed on at once, in case this process is killed.
        code = thread.submit(pytest.main, words, [_Reporter(found)])
        code.add_done_callback(lambda _: found.put(None))
        yield from iter(found.get, None)
    if code.result() not in (0, 1, 5):  # 1: a test failed, 5: this share has none
        raise RuntimeError(f"pytest ended with exit code {code.result()}")
