"""The ranks as processes of this machine: the same tokens as one rank, and what happens when a rank
goes wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.data.config import EngineConfig
from nanovllm.executor import base, multiprocess
from nanovllm.executor.base import ExecutorError
from nanovllm.executor.grid import check_grid
from nanovllm.models.config import ModelConfig
from nanovllm.processes.start import uninterrupted
from tests.examples import examples
from tests.oracle import greedy, greedy_choices, make_checkpoint, reference_tokens
from tests.rank_faults import BURN_SECONDS, EXIT_CODE, RANK
from tests.server_process import SOON, are_gone, wait_for_shared_memory_to_go, wait_until
from tests.stand_ins import set_failure, set_gpu, set_program, set_temporary_folder

OPTIONS: dict[str, Any] = {
    "attention_backend": "torch",
    "dtype": "float32",
    "distributed_executor_backend": "mp",
}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(autouse=True)
def folder_for_temporary_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """See that an executor leaves no file, no shared memory and no process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    set_temporary_folder(monkeypatch, folder)
    yield
    assert list(folder.iterdir()) == []
    wait_for_shared_memory_to_go()


def processes_of(llm: LLM) -> list[psutil.Process]:
    """The ranks' processes."""
    executor = llm.engine.core.executor
    assert isinstance(executor, multiprocess.MultiprocessExecutor)
    return [psutil.Process(rank.process.pid) for rank in executor.ranks]


def prompts_with_common_prefix(count: int) -> list[list[int]]:
    """Prompts of 50 to 70 tokens, the first 32 of which are the same."""
    rng = random.Random(0)
    prefix = rng.choices(range(3, 300), k=32)
    return [prefix + rng.choices(range(3, 300), k=rng.randint(18, 38)) for _ in range(count)]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "preemption_mode"),
    [(2, 1, "recompute"), (2, 1, "swap"), (1, 2, "recompute")],
)
def test_tokens_are_those_of_transformers(
    tiny_model: pathlib.Path, tensor: int, pipeline: int, preemption_mode: str
) -> None:
    """With prefix caching, chunked prefill, preemption and requests that leave midway."""
    llm = LLM(
        str(tiny_model),
        **OPTIONS,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        preemption_mode=preemption_mode,
        num_kv_blocks=20,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        check_invariants=True,
    )
    processes = processes_of(llm)
    prompts = prompts_with_common_prefix(6)
    found = greedy(llm, prompts, 16)
    assert found == greedy_choices(str(tiny_model), prompts, found, 16)
    stats = llm.engine.core.stats
    assert stats.num_preemptions > 0 and stats.num_hit_tokens > 0
    llm.engine.add_request("leaves", {"prompt_token_ids": prompts[0]}, LONG)
    for _ in range(10):
        llm.engine.step()
    llm.engine.abort_request("leaves")
    assert greedy(llm, prompts[::-1], 16) == found[::-1]
    llm.engine.core.close()
    assert are_gone(processes)
    with pytest.raises(ExecutorError, match="shut down"):
        greedy(llm, prompts[:1], 1)


def test_control_c_breaks_off_a_step_and_no_more(tiny_model: pathlib.Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS, tensor_parallel_size=2, num_kv_blocks=64)
    prompts = prompts_with_common_prefix(3)
    expected = [reference_tokens(str(tiny_model), prompt, 12) for prompt in prompts]
    rng = random.Random(1)
    for _ in range(examples(12)):
        timer = threading.Timer(rng.uniform(0.01, 0.3), os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                llm.generate([{"prompt_token_ids": p} for p in prompts], LONG, use_tqdm=False)
        assert not llm.engine.has_unfinished
    assert greedy(llm, prompts, 12) == expected
    llm.engine.core.close()


def test_control_c_waits_for_the_end_of_a_message() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")
        reached.append("what comes after it")
    assert reached == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "victim", "grid", "words"),
    [
        (
            signal.SIGKILL,
            0,
            {"tensor_parallel_size": 2},
            r"rank 0, process \d+, was killed by SIGKILL",
        ),
        (
            signal.SIGKILL,
            1,
            {"tensor_parallel_size": 2},
            r"rank 1, process \d+, was killed by SIGKILL",
        ),
        (
            signal.SIGKILL,
            0,
            {"pipeline_parallel_size": 2},
            r"rank 0 \(stage 0, tensor rank 0\), process \d+, was killed by SIGKILL",
        ),
        (signal.SIGSTOP, 1, {"tensor_parallel_size": 2}, r"rank 1, process \d+, hangs"),
    ],
)
def test_a_lost_rank_is_named(
    tiny_model: pathlib.Path, number: signal.Signals, victim: int, grid: dict[str, int], words: str
) -> None:
    llm = LLM(str(tiny_model), **OPTIONS, **grid, num_kv_blocks=64)
    processes = processes_of(llm)
    llm.engine.add_request("lost", {"prompt_token_ids": [5, 6, 7]}, LONG)
    for _ in range(5):
        llm.engine.step()
    processes[victim].send_signal(number)
    start = time.monotonic()
    with pytest.raises(ExecutorError, match=words):
        while True:
            llm.engine.step()
    assert time.monotonic() - start < SOON
    assert are_gone(processes) and not llm.engine.has_unfinished
    with pytest.raises(ExecutorError, match=words):
        greedy(llm, [[5, 6, 7]], 3)


def test_a_rank_that_dies_while_nothing_is_computed(tiny_model: pathlib.Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS, tensor_parallel_size=2, num_kv_blocks=64)
    core, processes = llm.engine.core, processes_of(llm)
    core.check_health()
    processes[1].kill()
    with pytest.raises(ExecutorError, match="rank 1"):
        wait_until(lambda: core.check_health(), SOON)
    assert are_gone(processes)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (
            "1 construct raise",
            ExecutorError,
            "rank 1, .*failed:(.|\n)*RuntimeError: this rank has no luck",
        ),
        ("1 construct refuse", ValueError, "^this rank has no luck$"),
        ("0 construct exit", ExecutorError, f"rank 0, .*ended with exit code {EXIT_CODE}"),
        (
            "1 launch raise",
            ExecutorError,
            "rank 1, .*failed:(.|\n)*RuntimeError: this rank has no luck",
        ),
    ],
)
def test_a_rank_that_fails_says_why(
    fork_server: None,
    tiny_model: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    kind: type[Exception],
    words: str,
) -> None:
    set_program(monkeypatch, multiprocess.MultiprocessExecutor, RANK)
    monkeypatch.setenv("RANK_FAULT", fault)
    before = set(psutil.Process().children())
    with pytest.raises(kind, match=words):
        llm = LLM(str(tiny_model), **OPTIONS, tensor_parallel_size=2, num_kv_blocks=64)
        greedy(llm, [[5, 6, 7]], 30)
    assert are_gone([child for child in psutil.Process().children() if child not in before])


@pytest.mark.parametrize(
    "grid",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_who_computes_for_long_or_waits_for_it_does_not_hang(
    tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, grid: dict[str, int]
) -> None:
    """Rank 0 computes for more than twice the time after which one that rests would be taken to
    hang."""
    set_program(monkeypatch, multiprocess.MultiprocessExecutor, RANK)
    monkeypatch.setenv("RANK_FAULT", "0 launch burn")
    llm = LLM(str(tiny_model), **OPTIONS, **grid, num_kv_blocks=64)
    start = time.monotonic()
    assert greedy(llm, [[5, 6, 7]], 12) == [reference_tokens(str(tiny_model), [5, 6, 7], 12)]
    assert time.monotonic() - start > BURN_SECONDS
    llm.engine.core.close()


@pytest.mark.parametrize(
    ("grid", "fault", "words"),
    [
        (
            {"tensor_parallel_size": 2},
            "1 launch skip",
            r"rank 1, process \d+, hangs: for 4 seconds it has been idle while rank 0, process"
            r" \d+, waits for it in "
            r"all_reduce no \d+ of group tp",
        ),
        (
            {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
            "1 launch barrier",
            r"rank 0, process \d+, hangs: for 4 seconds it has waited in all_reduce no \d+ of"
            r" group tp for "
            r"rank 1, process \d+, which waits in barrier no \d+ of group world",
        ),
        (
            {"pipeline_parallel_size": 2},
            "0 launch skip",
            r"rank 0 \(stage 0, .*\), process \d+, hangs: for 4 seconds it has been idle while"
            r" rank 1 .*, waits for it in "
            r"receive no \d+ of group pp from rank 0 to rank 1",
        ),
    ],
)
def test_ranks_that_wait_for_one_another_are_named(
    tiny_model: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    grid: dict[str, Any],
    fault: str,
    words: str,
) -> None:
    set_program(monkeypatch, multiprocess.MultiprocessExecutor, RANK)
    monkeypatch.setenv("RANK_FAULT", fault)
    llm = LLM(str(tiny_model), **OPTIONS, **grid, num_kv_blocks=64)
    processes = processes_of(llm)
    start = time.monotonic()
    with pytest.raises(ExecutorError, match=words):
        greedy(llm, [[5, 6, 7]], 30)
    assert time.monotonic() - start < 2 * SOON
    assert are_gone(processes)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="down_proj"):
        LLM(str(broken), **OPTIONS, tensor_parallel_size=2, num_kv_blocks=64)


PARENT = """
import json, sys, time
from nanovllm import LLM
if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        attention_backend="torch",
        dtype="float32",
        num_kv_blocks=64,
        tensor_parallel_size=2,
    )
    print(json.dumps([rank.process.pid for rank in llm.engine.core.executor.ranks]), flush=True)
    time.sleep(100)
"""


def test_the_ranks_end_with_their_parent_however_it_dies(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tiny_model)], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    processes = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
    assert len(processes) == 2 and not are_gone(processes)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: are_gone(processes), SOON, "the ranks have ended")


# ---------------------------------------------------------------- grids that do not fit


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model of nine heads and three KV heads, as the course model has."""
    folder = tmp_path_factory.mktemp("nine-heads")
    make_checkpoint(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_a_grid_that_the_model_cannot_take_is_refused_before_anything_starts(
    nine_heads: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_failure(monkeypatch, subprocess, "Popen", AssertionError("a process is started"))
    with pytest.raises(ValueError, match=r"9 attention heads.*tensor_parallel_size may be 1 or 3"):
        LLM(str(nine_heads), tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"3 layers.*pipeline_parallel_size may be 1 to 3"):
        LLM(str(nine_heads), pipeline_parallel_size=4)


def test_the_command_line_refuses_it_with_2(nine_heads: pathlib.Path) -> None:
    command = [
        sys.executable,
        "-m",
        "nanovllm",
        "serve",
        str(nine_heads),
        "--port",
        "0",
        "-tp",
        "2",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert (
        "9 attention heads" in ended.stderr and "tensor_parallel_size may be 1 or 3" in ended.stderr
    )
    assert "Traceback" not in ended.stderr


def test_more_ranks_than_gpus(tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, is_available=True, device_count=2)
    model = ModelConfig.from_pretrained(tiny_model)
    config = EngineConfig(str(tiny_model), tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"is 4 ranks.*has 2 GPUs: lower the sizes, .*device cpu"):
        check_grid(config, model)
    check_grid(dataclasses.replace(config, device="cpu"), model)


def test_what_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert base.choose_backend(EngineConfig()) == "uni"
    assert base.choose_backend(EngineConfig(tensor_parallel_size=2)) == "mp"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert base.choose_backend(EngineConfig(tensor_parallel_size=2)) == "external_launcher"
    assert base.is_follower(EngineConfig()) and not base.is_follower(
        EngineConfig(distributed_executor_backend="mp")
    )
