"""An engine in a process of its own that its parent watches through heartbeats: the engine of a
server, or one of several."""

import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import IO

from nanovllm.data.config import EngineConfig
from nanovllm.distributed import life_signs
from nanovllm.distributed.life_signs import Complaint, Mouth, Peer, Watch
from nanovllm.distributed.standstill import Activity, CollectiveError
from nanovllm.engine.client import EngineClient


def start_heart(connection: Connection, config: EngineConfig) -> None:
    """In the engine's process: send heartbeats, and report if the calling thread hangs in a
    step."""
    activities: Callable[[], dict[int, Activity]] = dict
    if config.data_parallel_rank is not None:
        activities = life_signs.heard_activities.copy
        if config.world_size == 1:  # else its ranks have processes of their own
            activities = life_signs.activity_of_this_thread(config.data_parallel_rank)
        # If an engine is gone, the coordinator names it; tracebacks of the engines that miss it
        # would only hide that.
        logging.getLogger("nanovllm.engine").addFilter(
            lambda record: not (record.exc_info and isinstance(record.exc_info[1], CollectiveError))
        )
    # If the parent is gone, the engine's loop notices that as well and ends, unless it hangs.
    Mouth(connection.send, activities, patience=2 * life_signs.SILENCE_SECONDS)


class DataRank(Peer, EngineClient):
    """An engine as the coordinator of several engines knows it, or as a front end knows its only
    one.

    Args:
        config, environment, wrapper, log: see `EngineClient`.
    """

    process: subprocess.Popen[bytes]
    start_heart = staticmethod(start_heart)

    def __init__(
        self,
        config: EngineConfig,
        environment: dict[str, str],
        wrapper: Sequence[str] = (),
        log: IO[bytes] | IO[str] | None = None,
    ) -> None:
        EngineClient.__init__(self, config, environment, wrapper, log)
        self.rank = config.data_parallel_rank or 0
        name = (
            "the engine process" if config.data_parallel_rank is None else f"data rank {self.rank}"
        )
        Peer.__init__(self, name, connection=self.connection, process=self.process)
        self._watch = Watch([self])

    @property
    def num_waiting(self) -> int:
        """Requests that wait there or are in flight to it."""
        return self.stats.num_waiting + self.num_in_flight

    def receive(self) -> None:
        """Take in its heartbeats, complaints and reports."""
        self.drain()
        EngineClient.receive(self)
        if self.complaint is None and (last := self.last_words) is not None:
            ended = time.time() - (time.monotonic() - last.time)
            text = last.fatal if last.user_error else f"failed: {last.fatal}"
            self.complaint = Complaint(last.user_error, text, ended)

    def _listen(self, timeout: float) -> None:
        if timeout:
            self.reports.poll(int(1000 * timeout))
            self.receive()

    def poll(self) -> str:
        """See `EngineClient`. A process that hangs must be ended, too."""
        if reason := EngineClient.poll(self):
            return reason
        verdict = self._watch.look(self._listen)
        return verdict.text if verdict is not None else ""


def rank_environments(config: EngineConfig) -> list[dict[str, str]]:
    """For each engine, the variables of its process: its share of the cores, and its GPUs.

    Raises:
        ValueError: there are not enough GPUs.
    """
    import torch

    size = config.data_parallel_size
    ranks = config.world_size
    threads = max(1, torch.get_num_threads() // size)
    environments = [{"OMP_NUM_THREADS": str(threads)} for _ in range(size)]
    if config.device == "cpu" or not torch.cuda.is_available():
        return environments
    count = torch.cuda.device_count()
    if count < size * ranks:
        raise ValueError(
            f"data_parallel_size {size} x {ranks} ranks per engine need {size * ranks} GPUs, but "
            f"this machine has {count}: use data_parallel_size {max(1, count // ranks)}, or "
            "device cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = visible.split(",")
    for rank, environment in enumerate(environments):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[rank * ranks : (rank + 1) * ranks])
    return environments
