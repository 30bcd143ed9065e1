"""The process that renders chat templates: what it imports, and whom it answers."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys

import pytest

from nanovllm.text.chat_template import LimitedProcess

FORK = """
import multiprocessing, sys, threading, time
from nanovllm.text.chat_template import PROCESS

SLOW = "{% for i in range(9999) %}{% for j in range(50) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
answers = {}

def render(name, template, content):
    answers[name] = PROCESS.ask(template, [{"role": "user", "content": content}], {})

def in_child():
    render("child", "{{ messages[0].content }}", "child's")
    sys.exit(answers["child"] != "child's")

if __name__ == "__main__":
    PROCESS.start()
    thread = threading.Thread(target=render, args=("parent", SLOW, "parent's"))
    thread.start()
    while PROCESS._lock.acquire(blocking=False):
        PROCESS._lock.release()
        time.sleep(0.001)
    child = multiprocessing.get_context("fork").Process(target=in_child, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0, child.exitcode
    thread.join(60)
    assert answers == {"parent": "parent's"}, answers
"""


def test_a_forked_child_has_a_process_of_its_own(tmp_path: pathlib.Path) -> None:
    """The fork comes while another thread waits for its chat, and so holds the lock and owns the next answer."""
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    subprocess.run([sys.executable, str(script)], check=True, timeout=150)


def test_modules_come_from_where_the_parent_finds_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the current directory replace no module, and the parent's additions to `sys.path` count."""
    (tmp_path / "served").mkdir()
    for name in ("psutil", "random", "socket"):
        (tmp_path / "served" / f"{name}.py").write_text("raise SystemExit('this is not the library')")
    (tmp_path / "own_words.py").write_text("class Word(str):\n    pass\n")
    monkeypatch.chdir(tmp_path / "served")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "served")  # as `python -m` does
    word = importlib.import_module("own_words").Word("Hello")
    assert LimitedProcess().ask("{{ word }}", [{"role": "user", "content": "Hi"}], {"word": word}) == "Hello"
