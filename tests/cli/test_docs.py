"""`nanovllm docs`: the course as web pages, on this machine."""

from __future__ import annotations

import pathlib
import socket
import subprocess
import sys
import urllib.request

import pytest

from nanovllm.cli.main import main

pytestmark = pytest.mark.started


def test_it_serves_the_pages_that_were_built(tmp_path: pathlib.Path) -> None:
    (tmp_path / "index.html").write_text("the course", encoding="utf-8")
    (tmp_path / "a-lab.html").write_text("the lab", encoding="utf-8")
    command = [sys.executable, "-m", "nanovllm", "docs", "--site", str(tmp_path), "--no-browser"]
    command.append("a-lab.html")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().split()[4]
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == b"the lab", "the address is that of the page"
        with urllib.request.urlopen(url.removesuffix("a-lab.html")) as answer:
            assert answer.read() == b"the course"
        process.terminate()


def test_a_port_that_cannot_be_used_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").touch()
    command = ["docs", "--site", str(tmp_path), "--no-browser", "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*command, str(port)]) == 2
        assert f"port {port}: Address already in use: choose another" in capsys.readouterr().err
    for port in (-1, 99_999):
        assert main([*command, str(port)]) == 2
        assert f"to 65535, got {port}" in capsys.readouterr().err


def test_without_pages_it_names_the_command_that_builds_them(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", "--site", str(tmp_path)]) == 2
    assert "`make site` builds it" in capsys.readouterr().err


def test_without_the_page_it_says_that_the_site_is_older(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text("the course", encoding="utf-8")
    assert main(["docs", "--site", str(tmp_path), "labs/nothing.html"]) == 2
    assert "has no page labs/nothing.html: `make site` builds it again" in capsys.readouterr().err
