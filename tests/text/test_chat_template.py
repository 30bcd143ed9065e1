"""The process that renders chat templates: what it imports, and whom it answers."""

from __future__ import annotations

import importlib
import pathlib
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import pytest

from nanovllm.server.errors import as_api_error
from nanovllm.text import chat_template
from nanovllm.text.chat_template import HelperProcessError, LimitedProcess
from nanovllm.text.tokenizer import Tokenizer
from tests.oracle import make_tokenizer
from tests.stand_ins import set_constants

FORK = """
import multiprocessing, sys, threading, time
from nanovllm.text.chat_template import PROCESS

SLOW = (
    "{% for i in range(9999) %}{% for j in range(50) %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)
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
    """The fork comes while another thread waits for its chat, and so holds the lock and owns the
    next answer."""
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    subprocess.run([sys.executable, str(script)], check=True, timeout=150)


def test_modules_come_from_where_the_parent_finds_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in the current directory replace no module, and the parent's additions to `sys.path`
    count."""
    (tmp_path / "served").mkdir()
    for name in ("psutil", "random", "socket"):
        (tmp_path / "served" / f"{name}.py").write_text(
            "raise SystemExit('this is not the library')"
        )
    (tmp_path / "own_words.py").write_text("class Word(str):\n    pass\n")
    monkeypatch.chdir(tmp_path / "served")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "served")  # as `python -m` does
    word = importlib.import_module("own_words").Word("Hello")
    assert (
        LimitedProcess().ask("{{ word }}", [{"role": "user", "content": "Hi"}], {"word": word})
        == "Hello"
    )


MESSAGES = [{"role": "user", "content": "Hi"}]


def kill(process: LimitedProcess, number: signal.Signals) -> None:
    """Kill a helper from outside, as the system does when memory is short."""
    running, _ = process.start()
    running.send_signal(number)
    running.wait(60)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGPROF]
)
def test_a_process_that_died_while_idle_is_replaced(number: signal.Signals) -> None:
    """Even if a template could have caused this exit code: none was rendered."""
    process = LimitedProcess()
    kill(process, number)
    assert process.ask("{{ messages[0].content }}", MESSAGES, {}) == "Hi"


class Killed(LimitedProcess):
    """Its process is killed while it answers, the first few times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.started = times, 0

    def start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        process, connection = super().start()
        self.started += 1
        if self.started <= self.times:
            process.send_signal(signal.SIGSTOP)  # so that it answers nothing before it is killed
            threading.Timer(0.2, process.kill).start()
        return process, connection


def test_a_process_that_is_killed_is_asked_again_once() -> None:
    once, twice = Killed(1), Killed(2)
    assert once.ask("{{ messages[0].content }}", MESSAGES, {}) == "Hi"
    with pytest.raises(HelperProcessError, match=r"exited with code -9.* try again"):
        twice.ask("{{ messages[0].content }}", MESSAGES, {})
    assert (once.started, twice.started) == (2, 2)
    assert twice.ask("{{ messages[0].content }}", MESSAGES, {}) == "Hi"


def test_a_process_that_somebody_has_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, chat_template, STOPPED_SECONDS=0.1)
    process = LimitedProcess()
    stopped, _ = process.start()
    stopped.send_signal(signal.SIGSTOP)
    assert process.ask("{{ messages[0].content }}", MESSAGES, {}) == "Hi"
    assert stopped.poll() == -signal.SIGKILL


def test_a_verdict_is_not_tried_again() -> None:
    process = Killed(0)
    with pytest.raises(ValueError, match="memory"):
        process.ask("{{ 'x' * 999999999 }}", MESSAGES, {})
    assert process.started == 1


def test_a_variable_that_the_process_does_not_know_is_the_callers_error(
    tmp_path: pathlib.Path,
) -> None:
    """And ends no process."""
    script = tmp_path / "unknown.py"
    script.write_text(
        "import sys\n"
        "from nanovllm.text.chat_template import PROCESS\n"
        "class Word(str): pass\n"
        "try:\n "
        "   PROCESS.ask('{{ word }}', [{'role': 'user', 'content': 'Hi'}], {'word': Word()})\n"
        "except ValueError as error:\n "
        "   sys.exit(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1 and "Word" in done.stderr and "exited" not in done.stderr


def test_a_dead_helper_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(make_tokenizer(), chat_templates={"default": "{{ messages[0].content }}"})
    monkeypatch.setattr("nanovllm.text.tokenizer.PROCESS", Killed(2))
    with pytest.raises(HelperProcessError):
        tokenizer.apply_chat_template(MESSAGES)
    assert as_api_error(HelperProcessError("x")).status_code == 503
    assert tokenizer.apply_chat_template(MESSAGES) == "Hi"
