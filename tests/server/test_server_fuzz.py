"""Requests drawn from the server's own OpenAPI description, right and wrong ones: none may end in a
5xx."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.server_process import ServerProcess, wait_until


@pytest.mark.parametrize("examples", ["10", pytest.param("40", marks=pytest.mark.nightly)])
def test_the_description_holds_and_nothing_breaks_the_server(
    server: ServerProcess, tmp_path: pathlib.Path, examples: str
) -> None:
    command = [
        sys.executable,
        "-c",
        "from schemathesis.cli import schemathesis; schemathesis()",
        "run",
    ]
    command += [
        f"{server.url}/openapi.json",
        "--max-examples",
        examples,
        "--seed",
        "1",
        "--request-timeout",
        "60",
    ]
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    command += [
        "--checks",
        "response_schema_conformance",
        "--phases",
        "examples,fuzzing",
        "--no-color",
    ]
    command += ["--suppress-health-check", "all", "--exclude-path", "/trace"]  # which never ends
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    wait_until(server.is_idle)
    assert "Traceback" not in server.text
