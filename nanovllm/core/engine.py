"""The engine: plans a step, has it computed, takes its result. It works on token ids, not on
text.

Built by notebooks/18_engine.ipynb: edit it there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.core.block_pool import InvariantError
from nanovllm.core.peers import Peers
from nanovllm.core.recorder import Recorder
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.outputs import EngineStats
from nanovllm.data.request import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from nanovllm.executor.base import Executor
    from nanovllm.trace.recorder import RecordSink
    from nanovllm.trace.trace import StepRecord


@dataclass(frozen=True)
class EngineSettings:
    """The settings of the engine's loop.

    Attributes:
        by_priority: requests run in the order of their priority; otherwise in that of arrival.
        steps_ahead: the most steps in flight when `step` returns. The scheduler plans the next step
            without their results: above 0, a feature must hold back what needs them
            (`features.async_scheduling`).
        is_one_device: steps run one after another. A step in flight then begins when the one before
            it has ended.
        check_invariants: check queues, tables and pools after each plan and each result.
    """

    by_priority: bool = False
    steps_ahead: int = 0
    is_one_device: bool = True
    check_invariants: bool = False


@dataclass
class StepInFlight:
    """A step whose result is still missing.

    Attributes:
        wait: waits for its result.
        record: its record, if records have a reader.
        start: when it was planned, in seconds since the engine started.
        is_counted: it is one of the engine's numbered steps.
    """

    plan: SchedulerOutput
    wait: Callable[[], ModelRunnerOutput]
    record: StepRecord | None
    start: float
    is_counted: bool


class EngineCore:
    """Runs all requests, step by step.

    Args:
        scheduler: plans the steps.
        executor: computes them; of its methods, the loop calls `launch`, `forget_requests`
            and `close`.
        peers: other engines and stores with which this one works; by default there are none.
        create_recorder: makes what records steps, once a reader wants records.
        clock: returns the time in seconds.

    Attributes:
        recorder: records steps and requests; one that does nothing while records have no reader.
        num_steps: steps so far.
        first_scheduled: by request, the time of its first step, on the system's monotonic clock. A
            caller that wants to know sets it to an empty dictionary.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        settings: EngineSettings,
        peers: Peers | None = None,
        create_recorder: Callable[[], Recorder] = Recorder,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.settings = settings
        self.peers = peers or Peers()
        self.create_recorder = create_recorder
        self.recorder = Recorder()
        self.num_steps = 0
        self.first_scheduled: dict[str, float] | None = None
        self._num_added = 0
        self._in_flight: deque[StepInFlight] = deque()
        self._found_nothing = False  # the last step had nothing to compute, and none was in flight
        self._clock = clock
        self._started = clock()
        # When the last step's results arrived, in seconds since the engine started.
        self._last_results = 0.0

    @property
    def stats(self) -> EngineStats:
        """Queue lengths, memory and counters."""
        stats = self.scheduler.stats
        stats.num_steps = self.num_steps
        return stats

    @property
    def has_unfinished(self) -> bool:
        """True while a request has not ended."""
        return self.scheduler.has_unfinished

    @property
    def has_work(self) -> bool:
        """True if there is a step to run: for this engine's requests, or for its peers."""
        return self.peers.has_work(self.has_unfinished)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to compute. The next step can then wait until a request arrives,
        or others send something (`peers`)."""
        return not self.has_work or (self._found_nothing and self.peers.is_quiet)

    # ---------------------------------------------------------------- in and out

    def add_request(self, source: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never run here; see `Scheduler.add_request`.
        """
        request = Request(source, self._num_added)
        if not self.settings.by_priority:
            request.order = (0, self._num_added)
        self.peers.check_request(request)
        try:
            self.scheduler.add_request(request)
        except ValueError as error:
            self.peers.decline(request, str(error))
            raise
        self._num_added += 1
        self.recorder.arrived(request, self._now())

    def abort_request(self, request_id: str, reason: str = "abort") -> bool:
        """End a request between two steps and free its blocks; returns False if it has ended
        already."""
        self.peers.revoke(request_id)
        aborted = self.scheduler.abort_request(request_id)
        if aborted:
            self.recorder.ended(request_id, reason)
        self._drain_if_idle()
        return aborted

    # ---------------------------------------------------------------- one step

    def step(self) -> list[EngineOutput]:
        """Launch one step for the requests that the scheduler picks; returns new outputs. Without
        work, do nothing.

        After an error or Ctrl-C, it is unknown which parts of the KV cache the step has written.
        The engine then ends all requests, forgets all cached prefixes, and raises the error. It
        accepts new requests as before."""
        if not self.has_work:
            self.peers.rest()
            return []
        with self._all_or_nothing():
            outputs = self._step()
            self._drain_if_idle()
            return outputs

    def _step(self) -> list[EngineOutput]:
        """Plan a step and launch it, then take results until at most `steps_ahead` are missing. If
        nothing can be planned, take the result of the oldest step in flight: it may change that."""
        start = self._now()
        outputs = self.peers.take(self)
        plan = self.scheduler.schedule()
        if self.settings.check_invariants:
            self.scheduler.check_invariants()  # while the plan is in flight
        self._found_nothing = plan.empty and not self._in_flight
        if self._found_nothing and self.has_unfinished and not self.peers.may_free_blocks:
            raise InvariantError(f"requests wait, yet none could be scheduled: {plan.blocked_by}")
        is_counted = not plan.empty or self.peers.in_lock_step
        if not is_counted and not self.peers.must_run(plan):
            if self._found_nothing:
                self.peers.wait()
            return outputs + self.take_results()
        self._launch(plan, start, is_counted)
        outputs += self.take_results(keep=self.settings.steps_ahead)
        # A step that computes nothing keeps no request waiting: take its result immediately.
        while self._in_flight and not any(step.is_counted for step in self._in_flight):
            outputs += self.take_results()
        return outputs

    def _launch(self, plan: SchedulerOutput, start: float, is_counted: bool) -> None:
        if plan.empty:
            # The next plan that is not empty tells the runner which requests to drop.
            plan = plan.without_removals()
        self.peers.launching(plan)
        record = self.recorder.begin(plan, self.num_steps, start) if is_counted else None
        if plan.admitted and self.first_scheduled is not None:
            self.first_scheduled |= dict.fromkeys(plan.admitted, time.monotonic())
        wait = self.executor.launch(plan)
        self._in_flight.append(StepInFlight(plan, wait, record, start, is_counted))
        self.num_steps += is_counted

    def take_results(self, keep: int = 0) -> list[EngineOutput]:
        """Wait for the oldest step in flight, and pass its result to the scheduler; returns the
        outputs for the front end.

        Return [] immediately while at most `keep` steps are in flight: the device still has work,
        so the engine can plan the next step. When no work is left, take all other steps in flight,
        too: `step` will not be called again.

        With `settings.check_invariants`, the scheduler checks itself after each result. The time of
        a step is

            now - max(step.start, _last_results)    with `settings.is_one_device`: the device has
                                                    begun when it had finished the previous step
            now - step.start                        otherwise

        Then set `_last_results` to now, and the start of the step's record, if it has one, to the
        start in this formula. Pass record, time (in seconds, rounded to microseconds), result and
        outputs to `recorder.finish`, and plan and time to `scheduler.took`."""
        if len(self._in_flight) <= keep:
            return []
        step = self._in_flight.popleft()
        result = step.wait()
        outputs = self.scheduler.update_from_output(step.plan, result)
        start = max(step.start, self._last_results) if self.settings.is_one_device else step.start
        self._last_results = self._now()
        if step.record is not None:
            step.record.start = start
        self.recorder.finish(step.record, round(self._last_results - start, 6), result, outputs)
        self.scheduler.took(step.plan, self._last_results - start)
        if self.settings.check_invariants:
            self.scheduler.check_invariants()
        return outputs if self.has_work else outputs + self.take_results()

    def _now(self) -> float:
        """Return the seconds since the engine started, rounded to microseconds as in a trace."""
        return round(self._clock() - self._started, 6)

    def _drain_if_idle(self) -> None:
        """When idle, drain steps in flight and flush the trace."""
        if not self.has_work:
            with self._all_or_nothing():
                self.take_results()
        if not self._in_flight:
            self.recorder.flush(self.num_steps, self._now(), is_idle=not self.has_work)

    # ---------------------------------------------------------------- errors

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        """End all requests, and forget what the steps in flight would have computed."""
        lost = self.scheduler.forget_requests()
        self._in_flight.clear()
        self.executor.forget_requests()
        self.peers.forget_requests()
        self.recorder.start_over(lost)

    # ---------------------------------------------------------------- control

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.manager.pool.reset_prefix_cache()
        self.recorder.cache_reset()
        self._drain_if_idle()

    def watch(self, sink: RecordSink) -> None:
        """Pass a record of each further step to `sink`. The first record contains a snapshot. An
        idle engine sends it immediately. A sink that is already registered gets a new snapshot.
        Without a sink, nothing is recorded."""
        if not self.recorder.is_on:
            self.recorder = self.create_recorder()
        self.recorder.watch(sink)
        self._drain_if_idle()

    def unwatch(self, sink: RecordSink) -> None:
        """Pass no more records to `sink`. Stop recording if there is no other sink."""
        if not self.recorder.unwatch(sink):
            self.recorder = Recorder()
            for step in self._in_flight:
                step.record = None

    def close(self) -> None:
        """Finish the trace, and free everything."""
        self.peers.close()
        self.executor.close()
        self.recorder.flush(self.num_steps, self._now())
        self.recorder.close()
