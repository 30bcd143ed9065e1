"""The smallest Triton backend, in a process whose Triton interprets: the tests of lecture 15's
workbook."""

from __future__ import annotations

import importlib.util

import pytest

from tests.attention.test_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton on this platform"
)
MODULE = "tests/attention/interpreted/test_simple.py"


def run(*names: str) -> None:
    """Run tests of the module; their failure is this test's."""
    chosen = [f"{MODULE}::{name}" for name in names]
    result = run_interpreted(
        "-x", "--tb=short", "-rN", "--color=no", "--disable-warnings", "-p", "no:nbval", *chosen
    )
    if result.returncode:
        # Without headlines, which would look like those of this process.
        lines = [line for line in result.stdout.splitlines() if not line.startswith(("=", "!"))]
        pytest.fail("\n".join(lines[-60:]), pytrace=False)


def test_any_batch() -> None:
    run("test_any_batch", "test_padding_of_a_batch_becomes_zeros")


def test_rows_of_a_batch() -> None:
    run("test_each_row_knows_its_sequence_and_its_keys")
