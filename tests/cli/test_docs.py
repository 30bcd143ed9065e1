"""`nanovllm docs`: the course as web pages, on this machine."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import urllib.request

import pytest

from nanovllm.cli.main import main

pytestmark = pytest.mark.started


def test_it_serves_the_pages_that_were_built(tmp_path: pathlib.Path) -> None:
    (tmp_path / "index.html").write_text("the course", encoding="utf-8")
    command = [sys.executable, "-m", "nanovllm", "docs", "--site", str(tmp_path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().split()[4]
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == b"the course"
        process.terminate()


def test_without_pages_it_names_the_command_that_builds_them(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", "--site", str(tmp_path)]) == 2
    assert "`make site` builds it" in capsys.readouterr().err
