"""Data parallelism: several engines, each in a process of its own, behind the interface of one.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from nanovllm.assembly.executor import read_model_config
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.engine.client import EngineClient
from nanovllm.engine.process import Command, Report
from nanovllm.executor.base import ExecutorError
from nanovllm.executor.remote import START_SECONDS
from nanovllm.features.data_parallel.environments import rank_environments
from nanovllm.features.data_parallel.ranks import rank_config
from nanovllm.features.data_parallel.router import EngineRouter, load_score
from nanovllm.features.data_parallel.waves import Waves
from nanovllm.processes.activity import LOOK_SECONDS
from nanovllm.processes.start import uninterrupted
from nanovllm.processes.supervisor import Supervisor
from nanovllm.text.prompts import EngineLimits

if TYPE_CHECKING:
    from nanovllm.trace.trace import Trace

logger = logging.getLogger(__name__)


class DataParallelCore:
    """The coordinator: has the interface of `EngineCore`, divides the requests among engines, and
    collects their outputs.

    Engines that share the experts of a model (`enable_expert_parallel`) can only step together; the
    coordinator starts the waves of these steps, see `Waves`.

    Args:
        config: the settings of all engines.
        trace: gets the steps of the first engine. (With `config.trace`, each engine writes a file,
            see `trace_path`.)
        blocking: `step` waits for a report. Otherwise it takes what has arrived, for callers that
            poll `sources`.

    Attributes:
        supervisor: watches the engines.
        ranks: the engines.
        engines: the same, to `watch` each of them.
        rank_of: by request that has not ended, its engine.

    Raises:
        ValueError: settings that do not fit; no process is left.
        ExecutorError: an engine could not start.
    """

    # it only reacts
    has_work = False
    is_idle = True
    first_scheduled: dict[str, float] | None = None  # see `EngineLoop`
    idle_seconds = None

    def __init__(
        self, config: EngineConfig, trace: Trace | None = None, blocking: bool = True
    ) -> None:
        self.supervisor = Supervisor[EngineClient](ExecutorError)
        self.ranks = self.engines = self.supervisor.children
        self.config = config
        self.trace = trace
        self._blocking = blocking
        folder = resolve_model(config.model, config.revision)
        has_experts = read_model_config(config, folder).moe is not None
        self.waves = Waves() if config.enable_expert_parallel and has_experts else None
        self.rank_of: dict[str, EngineClient] = {}
        self._start(
            dataclasses.replace(config, model=str(folder), served_model_name=config.model_names)
        )
        blocks = min(rank.trace_settings.num_blocks for rank in self.ranks)
        capacity = blocks if config.enable_prefix_caching else 0
        self.router = EngineRouter(len(self.ranks), config.block_size, capacity)
        if trace is not None:
            settings = self.ranks[0].trace_settings
            trace.settings |= settings | TraceSettings(model=config.model_names[0])
            self.ranks[0].watch(trace.record)

    def _start(self, config: EngineConfig) -> None:
        folder = self.supervisor.make_folder()  # where the engines in lock-step meet
        address = f"file://{folder}/rendezvous" if self.waves is not None else ""
        try:
            for rank, environment in enumerate(environments := rank_environments(config)):
                settings = rank_config(config, rank, address)
                self.supervisor.add(EngineClient(settings, environment))
            deadline = time.monotonic() + START_SECONDS
            while late := [rank.name for rank in self.ranks if not rank.is_ready]:
                self.supervisor.hear(LOOK_SECONDS)
                if time.monotonic() > deadline:
                    reason = f"{late[0]} has not started after {START_SECONDS:g} seconds"
                    self.supervisor.fail(reason)
            if not self.waves or not environments[0].get("CUDA_VISIBLE_DEVICES"):
                # All have met; but NCCL uses the file when two ranks first talk.
                shutil.rmtree(folder)
        except BaseException:
            self.supervisor.end("the engines could not start")
            raise

    # ---------------------------------------------------------------- what a front end calls

    @property
    def limits(self) -> EngineLimits:
        """The limits that hold for every engine."""
        limits = [rank.limits for rank in self.ranks]
        least = min(limits, key=lambda each: each.max_request_tokens)
        kv_transfer = [information for each in limits for information in each.kv_transfer]
        return dataclasses.replace(least, kv_transfer=kv_transfer)

    @property
    def stats(self) -> EngineStats:
        """The sums over all engines, and each engine's. Requests in flight to an engine count as
        waiting there."""
        return EngineStats.together(
            [dataclasses.replace(rank.stats, num_waiting=rank.num_waiting) for rank in self.ranks]
        )

    @property
    def has_unfinished(self) -> bool:
        """True while some request has not ended."""
        return bool(self.rank_of)

    @property
    def sources(self) -> Sequence[int | zmq.Socket[bytes]]:
        """File descriptors and sockets that become readable when an engine has sent something."""
        return [source for rank in self.ranks for source in rank.sources]

    def add_request(self, source: EngineRequest) -> None:
        """Hand a sequence to one of the engines. If the engine refuses it, `step` returns its
        error.

        Raises:
            ExecutorError: an engine has died.
        """
        self.supervisor.check()
        loads = [
            load_score(rank.num_waiting + rank.stats.num_swapped, rank.stats.num_running)
            for rank in self.ranks
        ]
        rank = self.ranks[self.router.choose(source, loads)]
        with uninterrupted():
            self.rank_of[source.request_id] = rank
            rank.send(Command(add=[source]))
            self._start_wave()

    def abort_request(self, request_id: str, reason: str = "abort") -> bool:
        """End a sequence within a step. False if it has ended already."""
        rank = self.rank_of.pop(request_id, None)
        # An engine may still hold the KV of a request that has ended.
        for each in [rank] if rank is not None else self.ranks:
            each.send(Command(abort={request_id: reason}))
        return rank is not None

    def step(self) -> list[EngineOutput]:
        """Take in what the engines have reported; if `blocking`, wait for an output.

        Raises:
            ExecutorError: an engine has died, hangs, or failed; all others have been ended.
        """
        while True:
            waits = self._blocking and self.has_unfinished
            self.supervisor.hear(LOOK_SECONDS if waits else 0)
            outputs = self._take_reports()
            if outputs or not waits:
                return outputs

    def _start_wave(self) -> None:
        """Have all engines start a wave if there is a request and no wave runs."""
        if self.waves is None or self.waves.running or not self.rank_of:
            return
        self.waves.start(self.waves.ended)
        for rank in self.ranks:
            rank.send(Command(order="start_wave", wave=self.waves.ended))

    # ---------------------------------------------------------------- reports

    def _take_reports(self) -> list[EngineOutput]:
        with uninterrupted():
            return [
                o
                for rank in self.ranks
                for report in rank.take_reports()
                for o in self.take_report(rank, report)
            ]

    def take_report(self, rank: EngineClient, report: Report) -> list[EngineOutput]:
        """Take in an engine's report.

        A request that the engine refused (`report.refused`: id to reason) ends with an output with
        finish reason "error" and the reason as `error`, and a line in the log. Each output gets the
        engine's number (`rank.rank`) as `engine`; if it has a finish reason, its request leaves
        `rank_of`. In lock-step, a report with more ended waves (`report.stats.num_waves`) than
        `waves.ended` is the first that tells of the end of a wave: end that wave, and start the
        next one if it is needed (`_start_wave`).

        Returns: outputs, then errors; without those of requests that are not, or no longer, this
        engine's."""
        refused = [
            EngineOutput(key, finish_reason="error", error=reason)
            for key, reason in report.refused.items()
        ]
        for request_id, reason in report.refused.items():
            # Its id was in use, or its kv_transfer_params are invalid.
            logger.error("%s has rejected request %s: %s", rank.name, request_id, reason)
        if self.first_scheduled is not None:
            self.first_scheduled |= report.first_scheduled
        # Outputs of requests that were aborted meanwhile are dropped.
        news = [o for o in [*report.outputs, *refused] if self.rank_of.get(o.request_id) is rank]
        for output in news:
            output.engine = rank.rank
            if output.finish_reason is not None:
                del self.rank_of[output.request_id]
        if self.waves is not None and report.stats.num_waves > self.waves.ended:
            # The first engine to report the end of the wave. The others will, or have a request and
            # need a new wave.
            self.waves.end(report.stats.num_waves - 1)
            self._start_wave()
        return news

    # ---------------------------------------------------------------- life and death

    def check_health(self) -> None:
        """Check whether an engine has ended, hangs, or has been silent for too long.

        Raises:
            ExecutorError: one has; all others have been ended.
        """
        self.supervisor.hear()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes in the engines, and the router's guesses about them."""
        self.supervisor.check()
        self.router.forget()
        for rank in self.ranks:
            rank.send(Command(order="reset_prefix_cache"))

    def close(self) -> None:
        """End all engines; those that have not ended after a second are killed."""
        if not self.supervisor.reason:
            # An engine that left in the middle of a wave would leave the others waiting.
            for request_id in list(self.rank_of):
                self.abort_request(request_id)
            self.wait_for_pause()
            for rank in self.ranks:
                rank.send(Command(order="shutdown"))
            self.supervisor.listen_until(lambda: all(rank.how_it_ended() for rank in self.ranks))
            self.supervisor.end("the engines have been shut down")

    def wait_for_pause(self, seconds: float = 1.0) -> None:
        """Take in reports until every engine that is in lock-step has seen the end of the last wave
        that was ordered, for at most this many seconds."""

        def is_paused() -> bool:
            self._take_reports()
            return self.waves is None or all(
                rank.stats.num_waves == self.waves.ended + self.waves.running for rank in self.ranks
            )

        self.supervisor.listen_until(is_paused, seconds)
