"""The command line: instant help, one-line errors, and chats through a pipe and a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import inspect
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import torch

import nanovllm
from nanovllm.assembly.flags import add_flags, flags_of
from nanovllm.checkpoint import course_model
from nanovllm.cli import main as cli
from nanovllm.cli.chat import converse
from nanovllm.data.config import EngineConfig
from nanovllm.server.access import bind, free_port
from nanovllm.trace.trace import Trace
from tests.server_process import ServerProcess
from tests.stand_ins import note_starts

ENGINE = ["--attention-backend", "torch", "--dtype", "float32", "--num-kv-blocks", "64"]


def run(*words: str, text: str = "", seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanovllm", *words],
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def one_line_of(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    others = ("Starting ",)
    if os.environ.get("NANOVLLM_NATIVE") == "0":  # which the engine says, too
        others = ("Starting ", "WARNING ", "INFO ")
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(others)]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.started
def test_help_needs_no_heavy_import() -> None:
    script = (
        "import sys; from nanovllm.cli.main import main\ntry: main(sys.argv[1:])\nexcept "
        "SystemExit: pass\n"
    )
    script += (
        "heavy = {'torch', 'transformers', 'fastapi', 'zmq', 'tokenizers'} & set(sys.modules)\n"
    )
    script += "sys.exit(f'imported {heavy}' if heavy else 0)"
    for words in (["--help"], ["serve", "--help"], ["fetch", "--help"], ["--version"]):
        result = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
    commands = run("--help").stdout
    names = re.findall(r"^ {4}([a-z-]+)(?: {2,}|$)", commands, re.MULTILINE)
    assert {"serve", "chat", "fetch", "train-eagle"} < set(names)
    for name in names:  # a percent sign in a description is one
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        assert end.value.code == 0


def test_help_shows_a_list_as_the_flag_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert """may use (default: ["*"])""" in text
    assert "(default: (" not in text and "(default: [])" not in text


def test_every_engine_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        for field in flags_of(EngineConfig):
            assert "--" + field.name.replace("_", "-") in text


INDENTED = """Settings of a fan.

    Attributes:
        speed: turns per second,
            at most 9.
    """


@pytest.mark.parametrize("text", [INDENTED, inspect.cleandoc(INDENTED)], ids=["3.12", "3.13"])
def test_flags_are_found_in_a_docstring_with_its_indentation_and_without(text: str) -> None:
    """Python 3.13 and later take the indentation of a docstring away."""

    @dataclasses.dataclass
    class Fan:
        speed: int = 3
        colour: str = "red"

    Fan.__doc__ = text
    assert [field.name for field in flags_of(Fan)] == ["speed"], "colour is not described"
    parser = argparse.ArgumentParser()
    add_flags(Fan, parser)
    assert "turns per second, at most 9. (default: 3)" in " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "command"),
        (["sing"], "sing"),
        (["srve"], "did you mean serve?"),
        (["serve", "--prot", "8001"], "did you mean --port?"),
        (["serve", "--max_model_len=0"], "max_model_len must be an integer of at least 1"),
        (["serve", "--max-model-lenght=9"], "did you mean --max-model-len?"),
        (
            ["serve", "--max-model=9"],
            "unrecognized arguments: --max-model=9; did you mean --max-model-len?",
        ),
        (["serve", "--max-log-length=9"], "unrecognized arguments: --max-log-length=9 (see"),
        (["serve", "--trust-foreign-code"], "unrecognized arguments: --trust-foreign-code (see"),
        (
            ["serve", "--enable-lora-adapters"],
            "unrecognized arguments: --enable-lora-adapters (see",
        ),
        (["serve", "--dtype", "bfloat61"], "did you mean bfloat16?"),
        (["router", "--plicy", "round_robin"], "did you mean --policy?"),
        (["chat", "--temprature", "0"], "did you mean --temperature?"),
        (["serve", "--port", "eighty"], "--port"),
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--block-size", "0"], "block_size must be an integer of at least 1"),
        (["serve", "--block-size", "x"], "--block-size"),
        (
            ["serve", "--max-step-ms", "-1"],
            "max_step_ms must be a finite number of at least 0, got -1.0",
        ),
        (["serve", "--max-step-ms", "fast"], "--max-step-ms"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "--kv-cache-memory", "lots"], "512MiB"),
        (
            ["serve", "--shutdown-timeout", "-1"],
            "shutdown_timeout must be a finite number of at least 0",
        ),
        (["serve", "--api-key", ""], "--api-key"),
        (["serve", "--no-such-flag"], "unrecognized arguments: --no-such-flag (see"),
        (["chat", "--temperature", "nan"], "temperature"),
        (["chat", "--max-tokens", "0"], "max_tokens"),
        (["serve", "--preemption-mode", "swap", "--swap-space", "0"], "raise swap_space"),
        (["serve", "--max-model-len", "8kB"], "8k (8000)"),
        (
            ["serve", "--attention-backend", "flash"],
            "'auto', 'torch', 'cpu', 'triton', 'triton_simple'",
        ),
        (["chat", "--api-key", "secret"], "--api-key has no effect without --url"),
        (["chat", "--url", "127.0.0.1:8000"], "--url must be like http://127.0.0.1:8000"),
        (["chat", "--url", "http://127.0.0.1:abc"], "got 'http://127.0.0.1:abc'"),
        (
            ["chat", "--url", "http://127.0.0.1:9", "--dtype", "half"],
            "--dtype has no effect with --url",
        ),
        (
            ["chat", "--url", "http://127.0.0.1:9", "--no-enable-prefix-caching"],
            "--no-enable-prefix-caching",
        ),
    ],
)
def test_a_bad_argument_is_one_line_and_two(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_names_the_alternative(tiny_model: pathlib.Path) -> None:
    line = one_line_of(run("serve", str(tiny_model), "--port", "0", "--device", "cuda"), 2)
    assert "--device cpu" in line
    line = one_line_of(
        run("serve", str(tiny_model), "--port", "0", "--attention-backend", "triton"), 2
    )
    assert "TRITON_INTERPRET=1" in line and "use 'auto' or 'torch'" in line


def test_a_model_that_is_not_there_or_not_supported(tiny_model: pathlib.Path) -> None:
    assert "/does/not/exist" in one_line_of(run("serve", "/does/not/exist", "--port", "0"), 2)
    too_long = one_line_of(
        run("serve", str(tiny_model), "--port", "0", "--max-model-len", "9999"), 2
    )
    assert "9999" in too_long and "256" in too_long
    assert "/does/not/exist" in one_line_of(run("fetch", "/does/not/exist"), 2)


@pytest.fixture
def without_torch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes that are started now, an import of torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is imported')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{pathlib.Path(nanovllm.__file__).parents[1]}")


IMPOSSIBLE = {
    "--max-model-len 9000000": ["max_model_len (9000000)", "256 positions"],
    "--num-kv-blocks 1": ["one request of 17 tokens needs 2 KV blocks", "raise num_kv_blocks"],
    "--num-kv-blocks 8 --max-model-len 200": [
        "needs 13 KV blocks",
        "or lower max_model_len to 128",
    ],
    "-tp 3": ["tensor_parallel_size may be"],
    "-pp 40": ["pipeline_parallel_size may be"],
    "--enable-expert-parallel --enable-eplb": ["has no experts"],
}


@pytest.mark.started
def test_settings_that_cannot_be_are_refused_without_torch(
    tiny_model: pathlib.Path, without_torch: None
) -> None:
    """All by one process: what is imported for one of them stays for the next."""
    script = "import sys; from nanovllm.cli.main import main\n"
    script += (
        "print([main(['serve', sys.argv[1], '--port', '0', *words.split()]) for words in "
        "sys.argv[2:]])"
    )
    command = [sys.executable, "-c", script, str(tiny_model), *IMPOSSIBLE]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert result.stdout.splitlines()[-1] == str([2] * len(IMPOSSIBLE)), result.stderr
    for line, messages in zip(result.stderr.splitlines(), IMPOSSIBLE.values(), strict=True):
        assert all(message in line for message in messages), line


@pytest.mark.parametrize(
    ("words", "limit"), [("", 200), ("--max-step-ms 0", 0), ("--max-step-ms=7.5", 7.5)]
)
def test_a_server_limits_its_steps_unless_it_is_told_not_to(
    words: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = note_starts(monkeypatch)
    assert cli.main(["serve", "--port", "0", *words.split()]) == 2
    assert [config.max_step_ms for config in seen] == [limit] and EngineConfig().max_step_ms is None


def test_a_pool_whose_size_shows_late_is_refused_too(tiny_model: pathlib.Path) -> None:
    words = ["--kv-cache-memory", "20KB", "--max-model-len", "200", "--device", "cpu"]
    line = one_line_of(run("serve", str(tiny_model), "--port", "0", *words), 2)
    assert (
        "one request of 200 tokens needs 13 KV blocks" in line and "raise kv_cache_memory" in line
    )


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "no-model"],
        ["serve", "no-model", "--prefill", "1", "--decode", "1"],
        ["replay", "no-file"],
        ["router", "--worker-urls", "http://127.0.0.1:9"],
    ],
    ids=" ".join,
)
def test_a_port_that_is_taken_shows_first_and_a_free_one_is_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main([*words, "--port", str(port)]) == 2
        error = capsys.readouterr().err
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use: try --port " in error
        free = int(error.rpartition(" ")[2])
        assert free > port and bind("127.0.0.1", free).close() is None


def test_the_port_that_is_named_is_not_the_next_one_if_that_is_taken() -> None:
    for _ in range(20):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                assert free_port("127.0.0.1", port) > port + 1
                return
    pytest.fail("no two ports in a row are free")


@pytest.mark.parametrize(
    ("unbuffered", "words"),
    [
        ("", ["simulate", "--num-prompts", "3", "--json"]),
        ("1", ["simulate", "--num-prompts", "3", "--json"]),
        # Rich has an answer of its own to a closed pipe.
        ("", ["simulate", "--num-prompts", "3"]),
        ("1", ["simulate", "--num-prompts", "3"]),
        ("", ["simulate", "--list", "--machine", "H100"]),
        ("", ["simulate", "--help"]),
        ("", ["--version"]),
    ],
)
def test_a_command_whose_reader_has_left_ends_quietly(unbuffered: str, words: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as nobody_reads:
        done = subprocess.run(
            [sys.executable, "-m", "nanovllm", *words],
            stdout=nobody_reads,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert done.stderr == b""
    codes = {128 + signal.SIGPIPE}
    if "--help" in words:  # argparse ignores the error, if its text is longer than the buffer
        codes.add(0)
    assert done.returncode in codes


def test_another_broken_pipe_is_no_reader_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "_run", run)
    with pytest.raises(BrokenPipeError):
        cli.main([])


@pytest.mark.started
def test_fetch_prints_where_the_model_is() -> None:
    result = run("fetch")
    assert result.returncode == 0, result.stderr
    assert (pathlib.Path(result.stdout.strip()) / "config.json").is_file()


def test_chat_through_a_pipe_with_an_engine_and_with_a_server(
    server: ServerProcess, tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    lines = "hello\n/reset\nhello\nand again\n/exit\nnever read\n"
    options = ["--temperature", "0", "--max-tokens", "8"]
    trace = tmp_path / "chat.jsonl"
    own = run("chat", str(tiny_model), *options, *ENGINE, "--trace", str(trace), text=lines)
    assert own.returncode == 0, own.stderr
    assert trace.read_text().count("\n") >= 3
    remote = run("chat", "--url", server.url, *options, text=lines)
    assert remote.returncode == 0, remote.stderr
    assert own.stdout == remote.stdout != ""
    with_v1 = run("chat", "--url", f"{server.url}/v1/", *options, text="hello\n")
    assert own.stdout.startswith(with_v1.stdout)


def test_chat_with_a_server_that_is_not_there_or_refuses(server: ServerProcess) -> None:
    assert "cannot be reached" in one_line_of(run("chat", "--url", "http://127.0.0.1:9"), 1), (
        "before any line"
    )
    refused = run("chat", "another-model", "--url", server.url, text="hi\n")
    assert "another-model" in one_line_of(refused, 2)
    refused = run("chat", "--model", "another-model", "--url", server.url, text="hi\n")
    assert "another-model" in one_line_of(refused, 2)
    long = run("chat", "--url", server.url, text="x" * 500 + "\n")
    assert "256" in one_line_of(long, 2)


def test_the_chat_lists_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(chat: list[dict[str, str]]) -> AsyncIterator[str]:
        yield f"{len(chat)} messages"

    lines = iter(["/help", "hi", "/hlep", "/etc/passwd?", "/reset", "hi", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with asyncio.Runner() as runner:
        converse(runner, answer, [])
    printed = capsys.readouterr()
    assert all(
        re.search(rf"^{command} +\w", printed.out, re.MULTILINE)
        for command in ("/help", "/reset", "/exit")
    )
    assert re.findall(r"\d messages", printed.out) == ["1 messages", "3 messages", "1 messages"]
    assert (
        "there is no command /hlep; did you mean /help?" in printed.err
        and next(lines) == "never read"
    )


def test_control_c_stops_an_answer_and_not_the_chat(tiny_model: pathlib.Path) -> None:
    words = [
        sys.executable,
        "-m",
        "nanovllm",
        "chat",
        str(tiny_model),
        *ENGINE,
        "--temperature",
        "0",
    ]
    words += ["--max-model-len", "256", "--max-num-seqs", "1"]
    process, terminal = pty.fork()
    if process == 0:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, words)
    seen = b""

    def comes(text: bytes, seconds: float) -> bool:
        nonlocal seen
        deadline = time.monotonic() + seconds
        while text not in seen and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096)
        return text in seen

    def read_until(text: bytes) -> None:
        nonlocal seen
        assert comes(text, 60), seen
        seen = seen[seen.index(text) + len(text) :]

    try:
        read_until(b"> ")
        os.write(terminal, b"hello\n")
        read_until(b"hello\r\n")
        # The terminal makes a signal of this, for the engine's process too.
        os.write(terminal, b"\x03")
        read_until(b"\n> ")  # stopped, or over before that: the chat goes on either way
        # Python sleeps on in the line editor if the signal comes just before it falls asleep: press
        # again.
        for _ in range(10):
            os.write(terminal, b"\x03")
            if comes(b"ends)\r\n", 8):  # long: a press too many would end the chat
                break
        read_until(b"ends)\r\n")
        read_until(b"> ")
        os.write(terminal, b"/reset\n")
        read_until(b"> ")
        os.write(terminal, b"again\n")
        read_until(b"again\r\n")
        read_until(b"\n> ")
        os.write(terminal, b"\x04")
        deadline = time.monotonic() + 30
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    os.read(terminal, 4096)
                except OSError:  # the other side has closed the terminal
                    time.sleep(0.1)
        assert ended[0] == process and os.waitstatus_to_exitcode(ended[1]) == 0
        process = 0
    finally:
        if process:
            os.kill(process, signal.SIGKILL)
        os.close(terminal)


@pytest.fixture(scope="module")
def model_with_templates(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("templates") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages[-1].content }}")
    (folder / "chat_template.jinja").write_text("<chat>{{ messages[-1].content }}</chat>")
    return folder


def test_a_named_chat_template_over_http_and_in_the_terminal(
    model_with_templates: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
    with ServerProcess(model_with_templates, tmp_path) as served:
        answers = {}
        for name, length in (("short", len("hello")), (None, len("<chat>hello</chat>"))):
            answer = served.post("/v1/chat/completions", chat | {"chat_template": name}).json()
            assert answer["usage"]["prompt_tokens"] == length
            answers[name] = answer["choices"][0]["message"]["content"]
            tokens = served.post(
                "/tokenize", {"messages": chat["messages"], "chat_template": name}
            ).json()
            assert tokens["count"] == length
        refused = served.post("/v1/chat/completions", chat | {"chat_template": "{{ 1 }}"})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "chat_template"
        assert "names one of the model's templates: default, short" in error["message"]
        options = ["--temperature", "0", "--max-tokens", "6"]
        remote = run(
            "chat", "--url", served.url, "--chat-template", "short", *options, text="hello\n"
        )
        assert remote.stdout.rstrip("\n") == answers["short"], remote.stderr
        own = run(
            "chat",
            str(model_with_templates),
            *ENGINE,
            "--chat-template",
            "short",
            *options,
            text="hello\n",
        )
        assert own.stdout == remote.stdout, own.stderr
        assert answers["short"] != answers[None]
    unknown = run(
        "chat", str(model_with_templates), *ENGINE, "--chat-template", "other", text="hello\n"
    )
    assert unknown.returncode == 2 and "it has default, short" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_a_kv_cache_larger_than_the_machine_is_one_line(tiny_model: pathlib.Path) -> None:
    words = ["--kv-cache-memory", "900TB", "--device", "cpu"]
    line = one_line_of(run("serve", str(tiny_model), "--port", "0", *words), 2)
    assert (
        "kv_cache_memory (838190.3 GiB) exceeds the machine's memory" in line and "lower it" in line
    )
    line = one_line_of(
        run("serve", str(tiny_model), "--port", "0", "--num-kv-blocks", "100000000000"), 2
    )
    assert (
        re.search(r"num_kv_blocks \(.* GiB\) exceeds the machine's memory", line)
        and "lower it" in line
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_settings_that_need_more_memory_than_there_is_are_one_line(
    tiny_model: pathlib.Path, ranks: int
) -> None:
    words = [
        "--max-num-seqs",
        "1000000000000",
        "--max-num-batched-tokens",
        "1000000000000",
        "-tp",
        str(ranks),
    ]
    line = one_line_of(
        run("serve", str(tiny_model), "--port", "0", "--num-kv-blocks", "64", *words), 2
    )
    assert (
        "there is not enough memory (Unable to allocate" in line and "lower num_kv_blocks" in line
    )


def test_the_course_model_is_converted_where_control_c_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of asyncio's would convert on, and Ctrl-C would wait for it."""

    def fetch(stop: threading.Event | None) -> pathlib.Path:
        assert threading.current_thread() is threading.main_thread()
        raise KeyboardInterrupt

    monkeypatch.setattr(course_model, "fetch_course_model", fetch)
    assert cli.main(["serve", "--port", "0"]) == 128 + signal.SIGINT


@pytest.mark.parametrize("name", ["full", "ctrl-c"])
def test_half_of_a_converted_trace_is_removed(
    name: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write(path: pathlib.Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise (
            OSError(errno.ENOSPC, "No space left on device")
            if name == "full"
            else KeyboardInterrupt
        )

    trace, new = tmp_path / "run.jsonl", tmp_path / "new.json"
    Trace().save(trace)
    monkeypatch.setattr(pathlib.Path, "write_text", write)
    assert cli.main(["trace", str(trace), "--perfetto", str(new)]) == (1 if name == "full" else 130)
    expected = f"error: {new}: No space left on device: free space on the disk, or name another one"
    assert capsys.readouterr().err.splitlines() == [f"nanovllm trace: {expected}"] * (
        name == "full"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_device_is_not_removed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "device"
    device.symlink_to("/dev/full")
    Trace().save(tmp_path / "run.jsonl")
    assert cli.main(["trace", str(tmp_path / "run.jsonl"), "--perfetto", str(device)]) == 1
    assert f"error: {device}: No space left on device" in capsys.readouterr().err
    assert device.is_symlink()
