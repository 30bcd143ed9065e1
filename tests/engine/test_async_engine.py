"""The engine in its own process: streams, aborts, failures, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
import pytest_asyncio

from nanovllm import SamplingParams
from nanovllm.checkpoint.home import ModelNotFoundError
from nanovllm.cli.chat import engine_answer
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import OutputCollector, RequestOutput
from nanovllm.data.request import EngineOutput
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.client import EngineClient
from nanovllm.engine.errors import EngineDeadError, EngineStartError, RequestRefusedError
from nanovllm.processes import supervisor
from nanovllm.server.admission import Admission
from nanovllm.text import portions
from nanovllm.trace.trace import Trace
from tests import engine_faults
from tests.forking import ORIGIN
from tests.server_process import SOON
from tests.stand_ins import set_constants, set_program, set_temporary_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def config(model: pathlib.Path, **options: Any) -> EngineConfig:
    options = {"attention_backend": "torch", "dtype": "float32", "num_kv_blocks": 64} | options
    return EngineConfig(model=str(model), **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: pathlib.Path) -> AsyncIterator[AsyncEngine]:
    with pytest.MonkeyPatch.context() as patch:
        set_program(patch, EngineClient, engine_faults.FAULTY)
        running = await AsyncEngine.start(config(tiny_model))
    yield running
    await running.shutdown()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engines that this test starts take the prompts of `engine_faults`."""
    set_program(monkeypatch, EngineClient, engine_faults.FAULTY)


async def collect(
    engine: AsyncEngine, prompt: Any, params: SamplingParams, request_id: str
) -> RequestOutput:
    collector = OutputCollector()
    async for output in engine.generate(prompt, params, request_id):
        collector.add(output)
    return collector.result()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def is_empty(engine: AsyncEngine) -> bool:
    stats = engine.stats
    return stats.num_running + stats.num_waiting == 0 and stats.kv_cache_usage == 0


def has_no_request(engine: AsyncEngine) -> bool:
    """Whether all outputs have come."""
    return engine.num_requests == 0


async def test_many_at_once_get_what_the_offline_engine_gives(
    engine: AsyncEngine, tiny_model: pathlib.Path
) -> None:
    from nanovllm import LLM

    llm = LLM(str(tiny_model), attention_backend="torch", dtype="float32", num_kv_blocks=64)
    prompts = [f"prompt number {i} " * (i + 1) for i in range(6)]
    params = SamplingParams(temperature=0.8, seed=7, n=2, max_tokens=20, logprobs=1)
    expected = llm.generate(prompts, params, use_tqdm=False)
    tasks = [collect(engine, prompt, params, f"many-{i}") for i, prompt in enumerate(prompts)]
    for got, want in zip(await asyncio.gather(*tasks), expected, strict=True):
        assert [c.token_ids for c in got.outputs] == [c.token_ids for c in want.outputs]
        assert [c.text for c in got.outputs] == [c.text for c in want.outputs]
        assert [c.finish_reason for c in got.outputs] == [c.finish_reason for c in want.outputs]
        assert got.outputs[1].logprobs is not None
    await until(lambda: is_empty(engine))


async def test_a_request_arrives_before_it_is_tokenized_and_sent(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times count from there: the engine's first token may be reported while `send` returns."""
    process, called = engine.input_processor.process, []

    def note(*arguments: Any) -> Any:
        called.append(time.monotonic())
        return process(*arguments)

    monkeypatch.setattr(engine.input_processor, "process", note)
    stream = await engine.add_request("timed", "abc", SHORT)
    assert stream.times.arrival <= called[0]
    assert (await anext(aiter(stream))).outputs
    stream.close()
    await until(lambda: is_empty(engine))


async def test_closing_the_iterator_frees_the_blocks(engine: AsyncEngine) -> None:
    steps = engine.stats.num_steps
    answer = engine.generate(engine_faults.PATIENT_PROMPT, LONG, "left")
    await anext(answer)
    assert engine.stats.num_running == 1
    await answer.aclose()
    await until(lambda: is_empty(engine))
    assert engine.stats.num_steps - steps <= engine_faults.NUM_PATIENT_TOKENS + 1, (
        "it ran on to its end"
    )


def engines() -> set[psutil.Process]:
    """The processes of engines that this one has started, without what forks them in tests."""
    children = psutil.Process().children()
    return {child for child in children if ORIGIN not in " ".join(child.cmdline())}


async def test_a_start_that_is_cancelled_twice_leaves_no_process(tiny_model: pathlib.Path) -> None:
    """As Ctrl-C does: asyncio cancels the main task, and then all tasks that are left."""
    before = engines()
    starting = asyncio.create_task(AsyncEngine.start(config(tiny_model)))
    await until(lambda: bool(engines() - before))
    started = engines() - before
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(process.is_running() for process in started)


async def test_cancelling_the_reader_frees_the_blocks(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, engine_faults.PATIENT_PROMPT, LONG, "cancelled"))
    await until(lambda: engine.stats.num_running == 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: is_empty(engine))
    assert has_no_request(engine)


async def test_an_aborted_request_ends_with_what_it_has(engine: AsyncEngine) -> None:
    stream = await engine.add_request("aborted", engine_faults.PATIENT_PROMPT, LONG.clone(n=2))
    first = await anext(stream)
    assert not first.finished
    engine.abort("aborted")
    rest = [output async for output in stream]
    assert rest[-1].finished
    assert {piece.finish_reason for piece in rest[-1].outputs} == {"abort"}
    await until(lambda: is_empty(engine))
    engine.abort("aborted")  # a second time does nothing


@pytest.mark.parametrize("count", [1, 2])
async def test_a_reused_id_gets_the_text_of_its_own_prompt(engine: AsyncEngine, count: int) -> None:
    """Abort, and ask again at once under the same id: tokens of the aborted request are still on
    their way."""
    params = SHORT.clone(max_tokens=12, n=count)
    expected = [
        piece.text for piece in (await collect(engine, "the next one", params, "other")).outputs
    ]
    for i in range(30):
        stream = await engine.add_request("reused", "another text entirely", LONG.clone(n=count))
        for _ in range(i % 4):
            await anext(stream)
        stream.close()
        answer = await collect(engine, "the next one", params, "reused")
        assert answer.request_id == "reused"
        assert [piece.text for piece in answer.outputs] == expected, i
    await until(lambda: is_empty(engine))


async def test_the_chats_next_answer_has_no_word_of_the_interrupted_one(
    engine: AsyncEngine,
) -> None:
    """Ctrl-C, /reset, ask again: the chat in the terminal gives both requests the same id."""
    options = {"temperature": 0, "max_tokens": 10}

    async def ask(text: str, pieces: list[str]) -> None:
        async for piece in engine_answer(engine, options, [{"role": "user", "content": text}]):
            pieces.append(piece)

    await ask("hello", expected := [])
    for i in range(20):
        interrupted = asyncio.create_task(ask("what else?", []))
        await until(lambda: not has_no_request(engine))
        await asyncio.sleep(0.002 * (i % 5))
        interrupted.cancel()
        await asyncio.gather(interrupted, return_exceptions=True)
        await ask("hello", answer := [])
        assert "".join(answer) == "".join(expected), i


async def test_an_ended_stream_that_is_closed_late_ends_no_other_request(
    engine: AsyncEngine,
) -> None:
    first = await engine.add_request("again", "abc", SHORT)
    assert [output async for output in first][-1].finished
    second = await engine.add_request("again", "abc", SHORT)
    first.close()
    outputs = [output async for output in second]
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "length"


async def test_a_slow_reader_finds_one_merged_piece(engine: AsyncEngine) -> None:
    stream = await engine.add_request("slow", "slow reader", SHORT.clone(max_tokens=30))
    await until(lambda: has_no_request(engine))  # the engine is done, and nothing has been read
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert len(outputs[0].outputs[0].token_ids) == 30


async def test_bad_prompts_and_used_ids_are_refused_at_once(engine: AsyncEngine) -> None:
    for prompt, words in (
        ([], "empty"),
        ([9999], "vocabulary"),
        ({"prompt": "", "cache_salt": "salt"}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [], "prompt": "long " * 10_000}, "empty"),
        ({"prompt_token_ids": None, "prompt": "abc"}, "must be text, token ids"),
        ({"prompt_token_ids": 7}, "must be text, token ids"),
        ({"text": "abc"}, "must be text, token ids"),
        (7, "must be text, token ids"),
        ("x" * 300, "context length is 256 tokens.*leaves no room"),
    ):
        with pytest.raises(ValueError, match=words):
            await engine.add_request("bad", prompt, SHORT)
    stream = await engine.add_request("twice", engine_faults.PATIENT_PROMPT, LONG)
    with pytest.raises(ValueError, match="in use"):
        await engine.add_request("twice", "abc", LONG)
    stream.close()
    with pytest.raises(ValueError, match=r"cache_salt.* must be Unicode"):
        await engine.add_request("salted", {"prompt": "abc", "cache_salt": "\ud800"}, SHORT)
    with pytest.raises(ValueError, match="priority must be 0"):
        await engine.add_request("urgent", "abc", SHORT, priority=2**70)
    await until(lambda: is_empty(engine))


async def test_of_token_ids_and_text_the_ids_are_the_prompt(engine: AsyncEngine) -> None:
    both = {"prompt_token_ids": [5, 6, 7], "prompt": "long " * 10_000}
    output = await collect(engine, both, SHORT, "both")
    alone = await collect(engine, [5, 6, 7], SHORT, "alone")
    assert output.prompt_token_ids == [5, 6, 7] and output.prompt is None
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


async def test_long_prompts_are_tokenized_in_a_thread(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    encode = engine.tokenizer.encode

    def spy(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*arguments)

    monkeypatch.setattr(engine.tokenizer, "encode", spy)
    await engine.encode("short")
    await engine.encode("long " * 10_000)
    with pytest.raises(ValueError, match="50000 tokens"):
        await engine.add_request("long", "long " * 10_000, SHORT)
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]


async def test_the_log_probabilities_of_a_long_prompt_are_delivered_in_portions(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3, n=2)
    prompt = list(range(10, 110))
    whole = await collect(engine, prompt, params, "whole")
    sizes: list[int] = []
    process = engine.output_processor.process

    def spy(outputs: list[EngineOutput]) -> Any:
        sizes.append(sum(len(output.prompt_logprobs or []) for output in outputs))
        return process(outputs)

    monkeypatch.setattr(engine.output_processor, "process", spy)
    set_constants(monkeypatch, portions, PORTION=8)
    again = await collect(engine, prompt, params, "again")
    assert again.prompt_logprobs is not None and len(again.prompt_logprobs) == 100
    assert again.prompt_logprobs == whole.prompt_logprobs and again.outputs == whole.outputs
    assert max(sizes) <= 16 and sum(sizes) >= 99, (
        "each of the two sequences has at most 8 left in the last portion"
    )


async def test_forgetting_the_prefix_cache(engine: AsyncEngine) -> None:
    prompt = list(range(10, 74))
    engine.reset_prefix_cache()
    assert (await collect(engine, prompt, SHORT, "cold")).num_cached_tokens == 0
    assert (await collect(engine, prompt, SHORT, "warm")).num_cached_tokens == 48
    engine.reset_prefix_cache()
    assert (await collect(engine, prompt, SHORT, "cold again")).num_cached_tokens == 0


@pytest.mark.usefixtures("faulty")
async def test_requests_beyond_the_bound_have_no_room(tiny_model: pathlib.Path) -> None:
    engine = await AsyncEngine.start(config(tiny_model, max_num_seqs=1, max_num_waiting=2))
    try:
        waiting_with = Admission(engine).num_waiting_with
        assert waiting_with(8) == 0, "an idle engine takes any request"
        streams = [await engine.add_request("a", engine_faults.PATIENT_PROMPT, LONG)]
        await anext(streams[0])
        assert waiting_with(2) == 2
        # On its way: the engine has not said so yet.
        streams.append(await engine.add_request("b", "abc", LONG))
        assert waiting_with(1) == 2
        await until(lambda: engine.stats.num_waiting == 1)
        assert waiting_with(1) == 2
        for stream in streams:
            stream.close()
        await until(lambda: is_empty(engine))
        assert waiting_with(2) == 0
    finally:
        await engine.shutdown()


@pytest.mark.usefixtures("faulty")
async def test_a_killed_engine_fails_everybody_and_hangs_nobody(tiny_model: pathlib.Path) -> None:
    engine = await AsyncEngine.start(config(tiny_model))
    try:
        stream = await engine.add_request("running", engine_faults.PATIENT_PROMPT, LONG)
        await anext(stream)
        os.kill(engine.client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            async with asyncio.timeout(60):
                async for _ in stream:
                    pass
        assert "SIGKILL" in (engine.error or "")
        with pytest.raises(EngineDeadError):
            await engine.add_request("later", "abc", SHORT)
    finally:
        await asyncio.wait_for(engine.shutdown(), SOON)


@pytest.mark.usefixtures("faulty")
async def test_an_engine_that_dies_while_it_drains_ends_no_request_well(
    tiny_model: pathlib.Path,
) -> None:
    engine = await AsyncEngine.start(config(tiny_model))
    try:
        stream = await engine.add_request("running", engine_faults.PATIENT_PROMPT, LONG)
        await anext(stream)
        draining = asyncio.ensure_future(engine.drain(60))
        await asyncio.sleep(0)
        os.kill(engine.client.process.pid, signal.SIGKILL)
        await draining  # it ends before the reader looks
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            async for output in stream:
                assert not output.finished
    finally:
        await asyncio.wait_for(engine.shutdown(), SOON)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("fault", ["is stopped", "hangs in a step"])
async def test_a_stopped_or_hanging_engine_is_named_and_killed(
    tiny_model: pathlib.Path, fault: str
) -> None:
    engine = await AsyncEngine.start(config(tiny_model))
    process = engine.client.process
    try:
        stream = await engine.add_request("running", engine_faults.PATIENT_PROMPT, LONG)
        await anext(stream)
        if fault == "is stopped":
            os.kill(process.pid, signal.SIGSTOP)
            words = "nothing was heard of it for 4 s"
        else:
            await engine.add_request("hanging", engine_faults.HANGING_PROMPT, SHORT)
            words = "for 4 seconds it has been at .*engine_faults.py:.* in faulty_step"
        with pytest.raises(
            EngineDeadError, match=f"the engine process, process {process.pid}, hangs: {words}"
        ):
            async with asyncio.timeout(60):
                async for _ in stream:
                    pass
        assert engine.died.is_set()
        with pytest.raises(EngineDeadError):
            engine.check_alive()
        await until(lambda: process.poll() is not None)
    finally:
        await asyncio.wait_for(engine.shutdown(), SOON)


async def test_an_engine_is_not_missed_while_it_loads_or_while_this_process_was_stopped(
    tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, supervisor, SILENCE_SECONDS=engine_faults.LOAD_SECONDS - 0.5)
    set_program(monkeypatch, EngineClient, engine_faults.SLOW)
    engine = await AsyncEngine.start(config(tiny_model))
    try:
        stream = await engine.add_request("running", "abc", LONG)
        await anext(stream)
        # As Ctrl-Z and fg do to both processes.
        os.kill(engine.client.process.pid, signal.SIGSTOP)
        time.sleep(engine_faults.LOAD_SECONDS)  # on purpose: the event loop must not run meanwhile
        os.kill(engine.client.process.pid, signal.SIGCONT)
        outputs = [output async for output in stream]
        assert outputs[-1].finished
        engine.check_alive()
    finally:
        await engine.shutdown()


@pytest.mark.usefixtures("faulty")
async def test_a_failing_step_ends_the_engine_and_a_refused_request_only_itself(
    tiny_model: pathlib.Path,
) -> None:
    engine = await AsyncEngine.start(config(tiny_model))
    try:
        with pytest.raises(RequestRefusedError, match="this prompt is refused"):
            await collect(engine, engine_faults.REFUSED_PROMPT, SHORT, "refused")
        assert len((await collect(engine, "fine", SHORT, "fine")).outputs[0].token_ids) == 4
        running = asyncio.create_task(
            collect(engine, engine_faults.PATIENT_PROMPT, LONG, "running")
        )
        await until(lambda: engine.stats.num_running == 1)
        with pytest.raises(RequestRefusedError, match="this prompt is refused"):
            await collect(engine, engine_faults.REFUSED_PROMPT, SHORT, "refused again")
        engine.check_alive()
        assert not running.done()
        with pytest.raises(EngineDeadError, match="RuntimeError: this prompt is fatal"):
            await collect(engine, engine_faults.FATAL_PROMPT, SHORT, "fatal")
        with pytest.raises(EngineDeadError, match="RuntimeError: this prompt is fatal"):
            await running
    finally:
        await engine.shutdown()


async def test_what_cannot_start_says_why_in_one_line(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        await AsyncEngine.start(EngineConfig(model="/does/not/exist"))
    unsupported = tmp_path / "unsupported"
    shutil.copytree(tiny_model, unsupported)
    raw = json.loads((unsupported / "config.json").read_text())
    (unsupported / "config.json").write_text(
        json.dumps(raw | {"architectures": ["OPTForCausalLM"]})
    )
    with pytest.raises(
        EngineStartError, match="'OPTForCausalLM' is not supported; supported are Llama"
    ):
        await AsyncEngine.start(config(unsupported))
    with pytest.raises(EngineStartError, match="raise kv_cache_memory") as caught:
        await AsyncEngine.start(config(tiny_model, num_kv_blocks=None, kv_cache_memory="10"))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("faulty")
async def test_the_end_leaves_a_whole_trace_and_no_files(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    set_temporary_folder(monkeypatch, folder)
    trace_file = tmp_path / "run.jsonl"
    engine = await AsyncEngine.start(config(tiny_model, trace=str(trace_file)))
    assert list(folder.iterdir()) == [], (
        "the sockets have names only until both sides are connected"
    )
    await collect(engine, "abc", SHORT, "traced")
    cut = asyncio.create_task(collect(engine, engine_faults.PATIENT_PROMPT, LONG, "cut"))
    await until(lambda: engine.stats.num_running == 1)
    process = engine.client.process
    await engine.shutdown(drain_timeout=0.0)
    assert (await cut).outputs[0].finish_reason == "abort"
    assert process.returncode == 0
    steps = Trace.load(trace_file).steps
    assert steps[0].arrived == {"traced": 3} and len(steps) > 4
    assert list(folder.iterdir()) == []
    with pytest.raises(EngineDeadError):
        await engine.add_request("later", "abc", SHORT)


NO_TORCH = """
import asyncio, sys
from nanovllm import SamplingParams
from nanovllm.cli.doors import server_parts
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.data.config import EngineConfig
import nanovllm.server.app

async def main():
    engine = await AsyncEngine.start(EngineConfig(model=sys.argv[1], attention_backend="torch"))
    engine.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    async for output in engine.generate("abc", SamplingParams(max_tokens=3), "one"):
        pass
    await engine.shutdown()
    assert output.finished
    # An import of torch, when a request asks for one of these, would stop the answers of all others
    # for a second.
    server_parts().check_transfer({}, "kv_both")
    assert engine.preparation.forms is not None
    engine.preparation.forms.checker()
    parts = {"nanovllm.kv_transfer.pd.plan", "nanovllm.server.tools", "nanovllm.server.page"}
    assert parts <= sys.modules.keys()
    assert "torch" not in sys.modules

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.started
async def test_the_front_end_never_imports_torch(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "front_end.py"
    script.write_text(NO_TORCH)
    await asyncio.to_thread(
        subprocess.run, [sys.executable, str(script), str(tiny_model)], check=True, timeout=120
    )


async def test_the_course_model_answers(tmp_path: pathlib.Path) -> None:
    engine = await AsyncEngine.start(EngineConfig(num_kv_blocks=64))
    try:
        text = engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
        )
        answer = await collect(engine, text, SamplingParams(temperature=0, max_tokens=12), "france")
        assert "Paris" in answer.outputs[0].text
    finally:
        await engine.shutdown()


async def test_control_c_does_not_reach_the_engine(engine: AsyncEngine) -> None:
    for _ in range(3):
        os.kill(engine.client.process.pid, signal.SIGINT)
    assert (await collect(engine, "still there", SHORT, "still there")).outputs[
        0
    ].finish_reason == "length"


async def test_a_death_that_was_not_noticed_yet(tiny_model: pathlib.Path) -> None:
    """The terminal's loop stands still between two questions: the next one finds the engine
    gone."""
    engine = await AsyncEngine.start(config(tiny_model))
    process = engine.client.process
    process.kill()
    process.wait()
    time.sleep(0.2)  # on purpose: the event loop must not run in between
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        await collect(engine, "abc", SHORT, "too late")
    await asyncio.wait_for(engine.shutdown(), SOON)
