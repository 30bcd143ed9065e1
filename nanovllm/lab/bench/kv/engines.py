"""Engines under measurement, each in a process of its own, asked by token ids: no tokenizer, and no
HTTP.

They run the loop of a server's engine. A report carries the time at which its step ended, so it
does not matter when this process reads it."""

from __future__ import annotations

import itertools
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.process import Command
from nanovllm.lab.bench.engines import START_SECONDS, STOP_SECONDS, EngineFailed, end_of_log
from nanovllm.lab.bench.machine import usable_cores
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.course.fleet import EngineProcess

ANSWER_SECONDS = 120.0
Params = dict[str, Any] | None  # a request's `kv_transfer_params`


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
    params: Params = None
    prefilled: float | None = None
    on_end: Callable[[Answer], None] = lambda answer: None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.timeline.ttft


class Engines:
    """Several engines, by name; a context manager, at whose end none of them is left.

    Args:
        specs: how to start each.
    """

    def __init__(self, specs: Mapping[str, EngineSpec]) -> None:
        self.specs = dict(specs)
        self._answers: dict[str, Answer] = {}
        self._ids = map(str, itertools.count())

    def __enter__(self) -> Self:
        self._engines = dict[str, EngineProcess]()
        self._poller = zmq.Poller()
        with ExitStack() as at_the_end:
            self._folder = pathlib.Path(
                at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="nanovllm-"))
            )
            for name, spec in self.specs.items():
                self.wait(lambda: self._num_starting < len(usable_cores()), START_SECONDS)
                with (self._folder / str(len(self._engines))).open("w") as log:
                    engine = EngineProcess(
                        EngineConfig(**spec.options), spec.threads, wrapper=spec.wrapper, log=log
                    )
                at_the_end.callback(engine.shutdown, STOP_SECONDS)
                self._engines[name], engine.name = engine, f"engine {name!r}"
                self._poller.register(engine.reports, zmq.POLLIN)
            self.wait(lambda: not self._num_starting, START_SECONDS)
            self._at_the_end = at_the_end.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._at_the_end.close()

    def addresses(self, name: str) -> list[Any]:
        """Of an engine that has KV for other engines, in the format of `prefill_addresses`."""
        return [
            [known["kv_host"], known["kv_port"]] for known in self._engines[name].limits.kv_transfer
        ]

    @property
    def _num_starting(self) -> int:
        return sum(not engine.is_ready for engine in self._engines.values())

    # ---------------------------------------------------------------- requests

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: Params = None,
        answer: Answer | None = None,
    ) -> Answer:
        """Send a greedy request that ignores the end of text; returns at once an answer that `wait`
        fills in.

        Args:
            answer: one that another engine has begun.
        """
        request_id = next(self._ids)
        engine = self._engines[name]
        answer = answer or Answer(Timeline(time.monotonic()))
        self._answers[request_id] = answer
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        engine.add(EngineRequest(request_id, list(prompt), sampling, kv_transfer_params=params))
        return answer

    def ask_both(
        self, prefill: str, decode: str, prompt: Sequence[int], max_tokens: int = 1
    ) -> Answer:
        """Prefill first: send a request to one engine, and then with that engine's
        `kv_transfer_params` to the other."""
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
            engine.send(Command(abort=dict.fromkeys(ids, "abort")))
        for request_id in ids:
            del self._answers[request_id]

    def reset_prefix_cache(self, name: str) -> None:
        """Empty an engine's prefix cache."""
        self._engines[name].send(Command(order="reset_prefix_cache"))

    def wait(
        self, until: Callable[[], bool], seconds: float, on_time: Callable[[], float] | None = None
    ) -> None:
        """Take reports until a condition holds.

        Args:
            on_time: called before each wait; does what is due, and returns the seconds until there
                is more to do.

        Raises:
            EngineFailed: an engine has ended, refuses a request, or the condition does not hold in
            time.
        """
        end = time.monotonic() + seconds
        while not until():
            pause = on_time() if on_time is not None else 1.0
            self._poller.poll(int(1000 * max(0.0, min(pause, 1.0))))
            for number, engine in enumerate(self._engines.values()):
                try:
                    for when, output in engine.outputs():
                        self._take(when, output)
                except RuntimeError as error:
                    raise EngineFailed(
                        f"{error}{end_of_log(self._folder / str(number))}"
                    ) from error
            if time.monotonic() > end:
                raise EngineFailed(
                    f"the engines {', '.join(self._engines)} have not finished in {seconds:g} s"
                )

    def _take(self, when: float, output: EngineOutput) -> None:
        if (answer := self._answers.get(output.request_id)) is None:
            return  # it has been aborted
        if output.error:
            raise RuntimeError(f"request {output.request_id} could not be answered: {output.error}")
        if output.new_token_ids:
            answer.timeline.arrivals.append((when, len(output.new_token_ids)))
            answer.token_ids += output.new_token_ids
            answer.num_cached = max(answer.num_cached, output.num_cached_tokens)
        if output.finish_reason is not None:
            del self._answers[output.request_id]
            answer.finished = True
            params = output.kv_transfer_params
            answer.params = dict(params) if params is not None else None
            answer.on_end(answer)


def draw(length: int, vocab_size: int, *name: object) -> list[int]:
    """Random token ids; the same for the same name."""
    source = random.Random(" ".join(map(str, name)))
    return [source.randrange(vocab_size) for _ in range(length)]
