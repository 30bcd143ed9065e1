"""The command line: instant help, one-line errors, and chats through a pipe and a terminal."""

from __future__ import annotations

import os
import pathlib
import pty
import select
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from nanovllm.cli import main as cli
from nanovllm.data.config import EngineConfig
from tests.server_process import ServerProcess

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
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_help_needs_no_heavy_import() -> None:
    script = "import sys; from nanovllm.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    script += "heavy = {'torch', 'transformers', 'fastapi', 'zmq', 'tokenizers'} & set(sys.modules)\n"
    script += "sys.exit(f'imported {heavy}' if heavy else 0)"
    for words in (["--help"], ["serve", "--help"], ["fetch", "--help"], ["--version"]):
        result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    commands = run("--help").stdout
    assert all(f"  {name} " in commands for name in ("serve", "chat", "fetch"))


def test_every_engine_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        for field in EngineConfig.flags():
            assert "--" + field.name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "command"),
        (["sing"], "sing"),
        (["serve", "--port", "eighty"], "--port"),
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--block-size", "0"], "block_size must be an integer of at least 1"),
        (["serve", "--block-size", "x"], "--block-size"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "--kv-cache-memory", "lots"], "512MiB"),
        (["serve", "--shutdown-timeout", "-1"], "shutdown_timeout must be a finite number of at least 0"),
        (["serve", "--api-key", ""], "--api-key"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["chat", "--temperature", "nan"], "temperature"),
        (["chat", "--max-tokens", "0"], "max_tokens"),
        (["serve", "--preemption-mode", "swap", "--swap-space", "0"], "raise swap_space"),
        (["serve", "--max-model-len", "8kB"], "8k (8000)"),
        (["serve", "--attention-backend", "flash"], "'auto', 'torch', 'cpu', 'triton'"),
        (["chat", "--api-key", "secret"], "--api-key has no effect without --url"),
        (["chat", "--url", "http://127.0.0.1:9", "--dtype", "half"], "--dtype has no effect with --url"),
        (["chat", "--url", "http://127.0.0.1:9", "--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
    ],
)
def test_a_bad_argument_is_one_line_and_two(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    line = one_line_of(run("serve", str(tiny_model), "--port", "0", "--attention-backend", "triton"), 2)
    assert "TRITON_INTERPRET=1" in line and "use 'auto' or 'torch'" in line


def test_a_model_that_is_not_there_or_not_supported(tiny_model: pathlib.Path) -> None:
    assert "/does/not/exist" in one_line_of(run("serve", "/does/not/exist", "--port", "0"), 2)
    too_long = one_line_of(run("serve", str(tiny_model), "--port", "0", "--max-model-len", "9999"), 2)
    assert "9999" in too_long and "256" in too_long
    assert "/does/not/exist" in one_line_of(run("fetch", "/does/not/exist"), 2)


def test_a_port_that_is_taken_shows_at_once(tiny_model: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in one_line_of(run("serve", str(tiny_model), "--port", port), 2)


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
    assert "cannot be reached" in one_line_of(run("chat", "--url", "http://127.0.0.1:9", text="hi\n"), 2)
    refused = run("chat", "another-model", "--url", server.url, text="hi\n")
    assert "another-model" in one_line_of(refused, 2)
    refused = run("chat", "--model", "another-model", "--url", server.url, text="hi\n")
    assert "another-model" in one_line_of(refused, 2)
    long = run("chat", "--url", server.url, text="x" * 500 + "\n")
    assert "256" in one_line_of(long, 2)


def test_control_c_stops_an_answer_and_not_the_chat(tiny_model: pathlib.Path) -> None:
    words = [sys.executable, "-m", "nanovllm", "chat", str(tiny_model), *ENGINE, "--temperature", "0"]
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
        os.write(terminal, b"\x03")  # the terminal makes a signal of this, for the engine's process too
        read_until(b"\n> ")  # stopped, or over before that: the chat goes on either way
        # Python sleeps on in the line editor if the signal comes just before it falls asleep: press again.
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
