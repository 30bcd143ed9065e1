"""The kernels with parts of a decode's context, in a process whose Triton interprets."""

from __future__ import annotations

import importlib.util

import pytest

from tests.attention.test_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton on this platform"
)
MODULE = "tests/attention/interpreted/test_parts.py"


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


def test_parts_of_a_context() -> None:
    run("test_parts_are_whole_tiles")


def test_parts_become_one() -> None:
    run(
        "test_the_result_is_the_weighted_average_of_the_parts",
        "test_parts_that_were_not_written_do_not_count",
        "test_parts_without_visible_keys_have_no_weight",
        "test_results_are_at_their_tokens",
    )
