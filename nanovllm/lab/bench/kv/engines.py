"""Engines under measurement, each in a process of its own, asked by token ids: no tokenizer, and no HTTP.

They run the loop of a server's engine. A report carries the time at which its step ended, so it does not matter when this
process reads it.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.process import Command, Report, run_engine
from nanovllm.lab.bench.engines import START_SECONDS, STOP_SECONDS, EngineFailed, end_of_log
from nanovllm.lab.bench.machine import usable_cores
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.processes import python_environment

ANSWER_SECONDS = 120.0
_PROGRAM = "from nanovllm.lab.bench.kv.engines import main; main()"


@dataclass
class EngineSpec:
    """How to start an engine.

    Attributes:
        options: fields of `EngineConfig`.
        threads: that compute.
        wrapper: a command that the engine's is appended to.
    """

    options: dict[str, Any]
    threads: int
    wrapper: Sequence[str] = ()


@dataclass(eq=False)
class Answer:
    """A request and its output so far.

    Attributes:
        timeline: of the engine that answers it, since it was sent.
        num_cached: prompt tokens that this engine did not compute.
        prefilled: when another engine had computed the prompt, if one was asked first.
    """

    timeline: Timeline
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    finished: bool = False
    params: dict[str, Any] | None = None
    prefilled: float | None = None
    on_end: Callable[[Answer], None] = lambda answer: None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.timeline.ttft


class _Engine:
    def __init__(self, name: str, spec: EngineSpec, context: zmq.Context, folder: pathlib.Path, secret: str) -> None:
        self.name, self.is_ready, self._log = name, False, folder / "log"
        places = [f"ipc://{folder}/{end}" for end in ("commands", "reports")]
        self.commands, self.reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, place in zip((self.commands, self.reports), places, strict=True):
            socket.set_hwm(0)
            socket.bind(place)
        words = [*spec.wrapper, sys.executable, "-c", _PROGRAM, json.dumps(spec.options), *places]
        environment = python_environment() | {
            "OMP_NUM_THREADS": str(spec.threads), "NANOVLLM_KV_SECRET": secret, "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,  # the engine ends when it is closed, also if this process is killed
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which ends the engine
            )

    def tell(self, command: Command) -> None:
        self.commands.send(msgspec.msgpack.encode(command))

    def failed(self, what: str) -> EngineFailed:
        return EngineFailed(f"engine {self.name!r} {what}{end_of_log(self._log)}")


class Engines:
    """Several engines, by name; a context manager, at whose end none of them is left.

    Args:
        specs: how to start each.

    Attributes:
        addresses: of the engines that have KV for other engines, in the format of `prefill_addresses`.
    """

    def __init__(self, specs: Mapping[str, EngineSpec]) -> None:
        self.specs, self.addresses = dict(specs), dict[str, list[Any]]()
        self._answers: dict[str, Answer] = {}
        self._ids = map(str, itertools.count())

    def __enter__(self) -> Self:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="nanovllm-"))
        self._context, self._engines, secret = zmq.Context(), dict[str, _Engine](), secrets.token_hex(32)
        self._poller, self._readers = zmq.Poller(), {}
        num_cores = len(usable_cores())
        try:
            for name, spec in self.specs.items():
                self.wait(lambda: self._num_starting < num_cores, START_SECONDS)
                folder = self._folder / str(len(self._engines))
                folder.mkdir()
                engine = self._engines[name] = _Engine(name, spec, self._context, folder, secret)
                self._poller.register(engine.reports, zmq.POLLIN)
                self._readers[engine.reports] = engine
            self.wait(lambda: not self._num_starting, START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for engine in self._engines.values():
            assert engine.process.stdin is not None
            engine.process.stdin.close()
        for engine in self._engines.values():
            try:
                engine.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                engine.process.kill()
                engine.process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _num_starting(self) -> int:
        return sum(not engine.is_ready for engine in self._engines.values())

    # ---------------------------------------------------------------- requests

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        answer: Answer | None = None,
    ) -> Answer:
        """Send a greedy request that ignores the end of text; returns at once an answer that `wait` fills in.

        Args:
            params: its `kv_transfer_params`.
            answer: one that another engine has begun.
        """
        request_id, engine = next(self._ids), self._engines[name]
        answer = answer or Answer(Timeline(time.monotonic()))
        self._answers[request_id] = answer
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        engine.tell(Command([EngineRequest(request_id, list(prompt), sampling, kv_transfer_params=params)]))
        return answer

    def ask_both(self, prefill: str, decode: str, prompt: Sequence[int], max_tokens: int = 1) -> Answer:
        """Prefill first: send a request to one engine, and then with that engine's `kv_transfer_params` to the other."""
        answer = Answer(Timeline(time.monotonic()))

        def go_on(first: Answer) -> None:
            answer.prefilled = first.timeline.arrivals[-1][0]
            if not answer.finished:  # nor aborted
                self.ask(decode, prompt, max_tokens, first.params, answer)

        self.ask(prefill, prompt, 1, {"do_remote_decode": True}).on_end = go_on
        return answer

    def complete(self, answer: Answer) -> Answer:
        """Wait until a request has ended."""
        self.wait(lambda: answer.finished, ANSWER_SECONDS)
        return answer

    def abort(self, answers: Sequence[Answer]) -> None:
        """End requests in all engines; later outputs of them are ignored."""
        for answer in answers:
            answer.finished = True
        ids = [request_id for request_id, answer in self._answers.items() if answer in answers]
        for engine in self._engines.values():
            engine.tell(Command(abort=dict.fromkeys(ids, "abort")))
        for request_id in ids:
            del self._answers[request_id]

    def reset_prefix_cache(self, name: str) -> None:
        """Empty an engine's prefix cache."""
        self._engines[name].tell(Command(order="reset_prefix_cache"))

    def wait(self, until: Callable[[], bool], seconds: float, on_time: Callable[[], float] | None = None) -> None:
        """Take reports until a condition holds.

        Args:
            on_time: called before each wait; does what is due, and returns the seconds until there is more to do.

        Raises:
            EngineFailed: an engine has ended, refuses a request, or the condition does not hold in time.
        """
        end = time.monotonic() + seconds
        while not until():
            pause = on_time() if on_time is not None else 1.0
            for source, _ in self._poller.poll(int(1000 * max(0.0, min(pause, 1.0)))):
                self._take(self._readers[source], msgspec.msgpack.decode(source.recv(), type=Report))
            for engine in self._engines.values():
                if engine.process.poll() is not None:
                    raise engine.failed(f"has ended with exit code {engine.process.returncode}")
            if time.monotonic() > end:
                raise EngineFailed(f"the engines {', '.join(self._engines)} have not finished in {seconds:g} s")

    def _take(self, engine: _Engine, report: Report) -> None:
        if report.fatal:
            raise engine.failed(f"fails: {report.fatal}")
        for request_id, reason in report.refused.items():
            raise engine.failed(f"refuses request {request_id}: {reason}")
        if report.limits is not None:
            engine.is_ready = True
            for known in report.limits.kv_transfer:
                if known.get("kv_port"):
                    self.addresses[engine.name] = [[known["kv_host"], known["kv_port"]]]
        for output in report.outputs:
            if (answer := self._answers.get(output.request_id)) is None:
                continue  # it has been aborted
            if output.error:
                raise engine.failed(f"could not answer: {output.error}")
            if output.new_token_ids:
                answer.timeline.arrivals.append((report.time, len(output.new_token_ids)))
                answer.token_ids += output.new_token_ids
                answer.num_cached = max(answer.num_cached, output.num_cached_tokens)
            if output.finish_reason is not None:
                del self._answers[output.request_id]
                answer.finished, answer.params = True, output.kv_transfer_params
                answer.on_end(answer)


def draw(length: int, vocab_size: int, *name: object) -> list[int]:
    """Random token ids; the same for the same name."""
    source = random.Random(" ".join(map(str, name)))
    return [source.randrange(vocab_size) for _ in range(length)]


def main() -> None:
    """Run an engine; arguments: its settings as JSON, and its two addresses."""
    options, commands, reports = sys.argv[1:]
    run_engine(EngineConfig(**json.loads(options)), commands, reports, parent_sentinel=os.dup(0))
