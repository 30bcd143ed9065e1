"""An engine that can only wait for KV sleeps: it neither steps, nor reports, nor orders its ranks
about until something has come."""

from __future__ import annotations

import select
import threading
import time
from collections import Counter
from contextlib import closing
from multiprocessing import Pipe
from typing import Any

import msgspec
import pytest
import zmq

from nanovllm.assembly.engine import Engine
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.process import Command, EngineLoop, Report
from nanovllm.executor.remote import RemoteExecutor, RemoteRank
from nanovllm.executor.uniproc import WorkerSetup
from nanovllm.kv_transfer import peers
from nanovllm.kv_transfer.pd.disaggregated import DisaggregatedWorker
from nanovllm.kv_transfer.transport.transfers import Ended
from nanovllm.processes.channel import TRANSFER_ENDED
from tests.kv_engines import Fleet, ask, decode_first, make_engine, worker_connector
from tests.oracle import make_checkpoint, reference_tokens
from tests.server_process import wait_until
from tests.stand_ins import set_constants

PROMPT = [(i * 37 + 11) % 300 + 5 for i in range(43)]
SECONDS = 1.5


@pytest.mark.parametrize("backend", ["uni", "mp"])
@pytest.mark.parametrize("way", ["push", "pull"])
def test_waiting_for_kv(
    way: str,
    backend: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The producer has the order and does not begin: some steps per second, where there were a
    thousand. Then it computes, and the consumer is woken by what comes: it looks by itself only
    four times per second."""
    checkpoint = str(make_checkpoint(tmp_path))
    context, counts = zmq.Context(), Counter[str]()
    producer = make_engine(checkpoint, "kv_producer")
    core = make_engine(checkpoint, "kv_consumer", distributed_executor_backend=backend)
    request.addfinalizer(lambda: (core.close(), producer.close()))
    if backend == "uni":  # ranks in other processes show every second that they live
        set_constants(monkeypatch, peers, PATIENT_SECONDS=60.0)

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(core, "step")
    count(core.executor, "launch")

    def run() -> None:
        with (
            closing(context.socket(zmq.PULL)) as inbox,
            closing(context.socket(zmq.PUSH)) as outbox,
        ):
            inbox.connect("inproc://commands")
            outbox.connect("inproc://reports")
            EngineLoop(core, inbox, outbox).run()

    with (
        closing(context.socket(zmq.PUSH)) as commands,
        closing(context.socket(zmq.PULL)) as reports,
    ):
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
            Command(
                add=[
                    EngineRequest(
                        "r", PROMPT, params, kv_transfer_params=decode_first(producer, way)
                    )
                ]
            )
        )
        wait_until(lambda: producer.has_work and (way == "pull" or core.peers.connector._in_flight))

        def sleeps() -> bool:
            while reports.poll(0):
                hear(0)
            counts.clear()
            time.sleep(SECONDS)
            while reports.poll(0):
                hear(0)
            return counts["report"] == 0 and max(counts.values(), default=0) < 20 * SECONDS

        wait_until(sleeps, what="the engine sleeps")
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


def looks_again(core: Engine) -> bool:
    """Whether the engine's loop would step again without anything new: the step before has left a
    source readable."""
    return not core.is_idle or bool(select.select(core.sources, [], [], 0)[0])


def test_a_transfer_that_ends_during_a_step_does_not_keep_the_engine_awake(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in flight reports the end, and the notification stays behind."""
    checkpoint = str(make_checkpoint(tmp_path))
    producer, consumer = (
        make_engine(checkpoint, "kv_producer"),
        make_engine(checkpoint, "kv_consumer"),
    )
    fleet = Fleet([producer, consumer])
    worker, reader = worker_connector(producer), worker_connector(consumer)
    assert isinstance(worker, DisaggregatedWorker) and isinstance(reader, DisaggregatedWorker)
    transfers = worker.transport.transfers

    def poll_late(seconds: float) -> list[Ended]:
        wait_until(lambda: not transfers.of())
        return transfers.poll(seconds)

    monkeypatch.setattr(worker.transport, "poll", poll_late)
    ask(consumer, "r", PROMPT, 5, decode_first(producer, "push"))
    Fleet([consumer]).run_until(lambda: len(reader.transport.transfers.of()) == 1)
    assert fleet.complete("r") == reference_tokens(checkpoint, PROMPT, 5)
    fleet.settle()
    producer.step()
    assert not looks_again(producer) and not looks_again(consumer)
    fleet.close()


def test_who_waits_for_blocks_under_a_lease_forgets_an_old_notification(tmp_path: Any) -> None:
    core = make_engine(
        str(make_checkpoint(tmp_path)), "kv_producer", num_kv_blocks=8, max_model_len=64
    )
    fleet = Fleet([core])
    ask(core, "leased", PROMPT, 1, {"do_remote_decode": True})
    fleet.complete("leased")
    ask(core, "waits", PROMPT[::-1], 1)
    worker_connector(core).notify()
    assert select.select(core.sources, [], [], 0)[0], "a step is due"
    core.step()
    assert core.has_unfinished and not looks_again(core)
    worker_connector(core).notify()
    assert select.select(core.sources, [], [], 0)[0], "and a new notification wakes it again"
    core.abort_request("leased")
    fleet.complete("waits")
    fleet.settle()
    fleet.close()


class TalkingRanks(RemoteExecutor):
    """One rank, which notifies and then answers with what has ended."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(model="none"), None, None, None)  # type: ignore[arg-type]

    def _start_ranks(self, setup: WorkerSetup) -> None:
        connection, other_end = Pipe()
        self.supervisor.add(RemoteRank(0, self.grid, connection=connection))
        other_end.send((1, (1, 1, False)))
        self._other_end = other_end

    def _send(self, order: bytes) -> None:
        if self._num_orders > 1:
            self._other_end.send((TRANSFER_ENDED, None))
            answer = ModelRunnerOutput(extras={"told": "r is sent"})
            self._other_end.send((self._num_orders, answer))


def test_a_notification_that_comes_with_the_answer_can_be_forgotten() -> None:
    ranks = TalkingRanks()
    result = ranks.launch(SchedulerOutput(all_report=True))()
    assert result.extras == {"told": "r is sent"}
    assert ranks.transfer_has_ended, "it may be of another transfer"
    ranks.forget_ends()
    assert not ranks.transfer_has_ended
