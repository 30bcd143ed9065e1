"""An engine that can only wait for KV sleeps: it neither steps, nor reports, nor orders its ranks about until something has come."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq

from nanovllm.engine_process import Command, EngineLoop, Report
from nanovllm.kv_transfer import base
from nanovllm.request import EngineRequest
from nanovllm.sampling_params import SamplingParams
from tests.kv_engines import decode_first, make_engine
from tests.oracle import make_checkpoint, reference_tokens
from tests.server_process import wait_until

PROMPT = [(i * 37 + 11) % 300 + 5 for i in range(43)]
SECONDS = 1.5


@pytest.mark.parametrize("backend", ["uni", "mp"])
@pytest.mark.parametrize("way", ["push", "pull"])
def test_waiting_for_kv(
    way: str, backend: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The producer has the order and does not begin: some steps per second, where there were a thousand. Then it computes, and the
    consumer is woken by what comes: it looks by itself only once a minute."""
    checkpoint = str(make_checkpoint(tmp_path))
    context, counts = zmq.Context(), Counter[str]()
    producer = make_engine(checkpoint, "kv_producer")
    core = make_engine(checkpoint, "kv_consumer", distributed_executor_backend=backend)
    request.addfinalizer(lambda: (core.close(), producer.close()))
    if backend == "uni":  # ranks in other processes show every second that they live
        monkeypatch.setattr(base, "PATIENT_SECONDS", 60.0)

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(core, "step")
    count(core.executor, "launch")

    def run() -> None:
        with closing(context.socket(zmq.PULL)) as inbox, closing(context.socket(zmq.PUSH)) as outbox:
            inbox.connect("inproc://commands")
            outbox.connect("inproc://reports")
            EngineLoop(core, inbox, outbox).run()

    with closing(context.socket(zmq.PUSH)) as commands, closing(context.socket(zmq.PULL)) as reports:
        commands.bind("inproc://commands")
        reports.bind("inproc://reports")
        loop = threading.Thread(target=run, daemon=True)
        loop.start()

        def tell(command: Command) -> None:
            commands.send(msgspec.msgpack.encode(command))

        def hear(milliseconds: int) -> Report:
            assert reports.poll(milliseconds), "it says nothing"
            counts["report"] += 1
            return msgspec.msgpack.decode(reports.recv(), type=Report)

        hear(60_000)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        tell(
            Command(add=[EngineRequest("r", PROMPT, params, kv_transfer_params=decode_first(producer, way))])
        )
        wait_until(lambda: producer.has_work and (way == "pull" or core.connector._books.under_way))
        time.sleep(0.3)
        while reports.poll(0):
            hear(0)
        counts.clear()
        time.sleep(SECONDS)
        while reports.poll(0):
            hear(0)
        assert counts["report"] == 0 and max(counts.values(), default=0) < 20 * SECONDS, counts
        tokens: list[int] = []
        while len(tokens) < 5:
            if producer.has_work:
                producer.step()
            elif reports.poll(20):
                tokens += [token for output in hear(0).outputs for token in output.new_token_ids]
            assert counts["report"] < 200
        assert tokens == reference_tokens(checkpoint, PROMPT, 5)
        tell(Command(order="shutdown"))
        loop.join(30)
        assert not loop.is_alive()
    context.term()
