"""What executors of ranks in other processes have in common: orders go out and answers come back
over one connection per rank, and a supervisor watches all ranks.

Built by notebooks/20_executor.ipynb: edit it there.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import pickle
import subprocess
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, cast

from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid
from nanovllm.executor.base import Executor, ExecutorError
from nanovllm.executor.uniproc import CreateWorker, WorkerFunction, WorkerSetup
from nanovllm.features.data_parallel.ranks import engine_grid
from nanovllm.models.config import ModelConfig
from nanovllm.processes.activity import LOOK_SECONDS, waiting_for_others
from nanovllm.processes.channel import TRANSFER_ENDED
from nanovllm.processes.start import start_process, uninterrupted
from nanovllm.processes.supervisor import Child, Supervisor

logger = logging.getLogger(__name__)

# Loading a large model takes long; a rank that is not ready after this time will not be.
START_SECONDS = 600.0
# The longest time for a live rank to carry out an order.
ORDER_SECONDS = 300.0
# How long ranks may take to end by themselves.
CLOSE_SECONDS = 1.0


class RemoteRank(Child):
    """A rank as its executor knows it. Its name tells its place in the grid if there are several
    stages.

    Args:
        connection, where, process, pid: see `Child`. Among its `answers` is TRANSFER_ENDED while a
            KV transfer has ended that no step has taken in yet.
        local_rank: its number on its machine.
    """

    def __init__(
        self,
        rank: int,
        grid: Grid,
        *,
        connection: Connection | None = None,
        where: str = "",
        process: subprocess.Popen[bytes] | None = None,
        local_rank: int = 0,
        pid: int | None = None,
    ) -> None:
        stage, tensor = divmod(rank, grid.tensor)
        place = f" (stage {stage}, tensor rank {tensor})" if grid.pipeline > 1 else ""
        super().__init__(f"rank {rank}{place}", where, connection, process, pid)
        self.local_rank = local_rank


class RemoteExecutor(Executor):
    """Sends every order to all ranks, in the same sequence; the first rank of the last stage
    answers with a step's result.

    A subclass says how to start the ranks.

    Attributes:
        program: what runs as a rank on this machine.
        supervisor: watches the ranks.
        ranks: in order, stage by stage.

    Raises:
        ValueError: there is no room for the ranks, or one refuses a checkpoint, a device or a size;
            in its words.
        ExecutorError: a rank could not start.
    """

    program = "from nanovllm.executor.worker import main; main()"

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: pathlib.Path,
        create_worker: CreateWorker,
    ) -> None:
        self.supervisor = Supervisor[RemoteRank](ExecutorError)
        self.ranks = self.supervisor.children
        self.config = config
        self.grid = Grid(1, config.pipeline_parallel_size, config.tensor_parallel_size)
        self._num_orders = 0
        setup = WorkerSetup(
            config, model_config, folder, create_worker, log_level=logger.getEffectiveLevel()
        )
        try:
            self._start_all(setup)
        except BaseException:
            self.supervisor.end("the ranks could not start")
            raise
        for rank in self.ranks:
            rank.expect_heartbeats()
        self.sources = [rank.connection for rank in self.ranks]

    def _start_all(self, setup: WorkerSetup) -> None:
        """Start the ranks, send each its settings, and take their memory."""
        self._start_ranks(setup)
        _, first = engine_grid(self.config)
        for number, rank in enumerate(self.ranks):
            setup.rank = first + number
            setup.local_rank = rank.local_rank
            with contextlib.suppress(OSError):  # `_answer` finds out why
                rank.connection.send(setup)
        self._take_memory()

    def _start_ranks(self, setup: WorkerSetup) -> None:
        """Start the processes that the ranks will run in, and have the supervisor watch the ranks,
        with a connection to each. They wait for `setup`, which this method completes (except for
        their numbers). The supervisor's `resources` get all that the ranks use."""
        raise NotImplementedError

    def _start_rank(self, rank: int, environment: Mapping[str, str], local_rank: int) -> None:
        """Start a rank on this machine."""
        process, connection = start_process(["-c", self.program], environment)
        self.supervisor.add(
            RemoteRank(
                rank, self.grid, connection=connection, process=process, local_rank=local_rank
            )
        )

    def collective_rpc(self, method: str | WorkerFunction, *arguments: object) -> list[Any]:
        """See `Executor`."""
        number = self._order(method, *arguments)
        return [self._answer(rank, number) for rank in self.ranks]

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Order a step from every rank, without waiting for it: the order is called "launch".

        Returns:
            A function that waits for the result (`_answer`), which comes from the first tensor rank
            of the last stage; the ranks are in order, stage by stage. If all ranks report on the
            step (`all_report`), every rank answers, and the `extras` of the others become the
            result's `others`, in the order of the ranks. Such a step also drops the notifications
            of the ranks (`forget_ends`) before the order, since each rank will report.
        """
        output_rank = self.ranks[-self.grid.tensor]
        if plan.all_report:
            self.forget_ends()
        number = self._order("launch", plan)

        def gather() -> ModelRunnerOutput:
            if not plan.all_report:
                return cast(ModelRunnerOutput, self._answer(output_rank, number))
            results = [cast(ModelRunnerOutput, self._answer(rank, number)) for rank in self.ranks]
            result = results.pop(-self.grid.tensor)
            result.others = [other.extras for other in results]
            return result

        return gather

    def _order(self, name: str | WorkerFunction, *arguments: object) -> int:
        """Send all ranks an order; returns its number."""
        self.supervisor.check()
        order = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
        with uninterrupted(), waiting_for_others():  # a full queue is for the ranks to empty
            self._num_orders += 1
            self._send(order)
        return self._num_orders

    def _send(self, order: bytes) -> None:
        """Send an order to all ranks. The supervisor finds out if a rank is gone."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(order)

    def _answer(self, rank: RemoteRank, order: int) -> object:
        """Wait for a rank's answer to an order.

        The supervisor listens to all ranks meanwhile (`hear`, for LOOK_SECONDS at most), so that it
        notices one that fails. This waiting is marked as `waiting_for_others()`. The rank's answers
        to this order and to earlier ones are dropped, later ones are kept.

        Args:
            order: its number, under which the answer comes into `rank.answers`.

        Raises:
            ExecutorError: the ranks have been ended (`check`), one has failed (`hear` raises it),
                or this one has not answered after ORDER_SECONDS. A rank that is not ready yet
                (`is_ready`) has START_SECONDS. Then the supervisor's `fail` ends all ranks, with
                the message f"{rank}, has not answered after {seconds:g} seconds", or "has not
                started".
        """
        self.supervisor.check()
        what, seconds = ("answered", ORDER_SECONDS) if rank.is_ready else ("started", START_SECONDS)
        deadline = time.monotonic() + seconds
        while order not in rank.answers:
            with waiting_for_others():
                self.supervisor.hear(LOOK_SECONDS)
            if time.monotonic() > deadline:
                self.supervisor.fail(f"{rank}, has not {what} after {seconds:g} seconds")
        answer = rank.answers[order]
        rank.answers = {number: other for number, other in rank.answers.items() if number > order}
        return answer

    @property
    def transfer_has_ended(self) -> bool:  # type: ignore[override]
        """See `Executor`."""
        return any(TRANSFER_ENDED in rank.answers for rank in self.ranks)

    def forget_ends(self) -> None:
        """See `Executor`."""
        for rank in self.ranks:
            rank.answers.pop(TRANSFER_ENDED, None)

    def check_health(self) -> None:
        """See `Executor`."""
        self.supervisor.hear()

    def forget_requests(self) -> None:
        """Drop the state of all requests on every rank; see `Executor`."""
        if not self.supervisor.reason:
            Executor.forget_requests(self)

    def close(self) -> None:
        """End all ranks; those that have not ended after CLOSE_SECONDS are killed."""
        if self.supervisor.reason:
            return
        with contextlib.suppress(ExecutorError, OSError):
            self._order("shutdown")
            self.supervisor.listen_until(
                lambda: all(rank.is_gone for rank in self.ranks), CLOSE_SECONDS
            )
        self.supervisor.end("the ranks have been shut down")
