"""One engine of several: its process, and what the coordinator knows of it.

`DataRank` starts a process in which `main` runs, with the number of a socket to the coordinator. The first message on it says
which engine this is; signs of life go back. Commands and reports go over sockets of their own, see `engine_process`.

Built by notebooks/25_data_parallel.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from nanovllm.config import EngineConfig
from nanovllm.distributed.data_parallel import load_score
from nanovllm.distributed.shared_collectives import CollectiveError
from nanovllm.engine_process import Command, Report, run_engine
from nanovllm.executor.multiprocess import how_it_ended
from nanovllm.outputs import EngineStats
from nanovllm.worker import Mouth


class DataRank:
    """One of the engines, as the coordinator knows it.

    Args:
        context: of the sockets.
        folder: where they get names, for this user alone.
        rank: its number.
        config: its settings.
        environment: variables of its process beside those of this one.

    Attributes:
        name: "data rank 1".
        reports: the socket on which `Report`s come.
        stats: as of its last report.
        ready: its first report; None until that has come.
        fatal: its last words.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        folder: str,
        rank: int,
        config: EngineConfig,
        environment: dict[str, str],
    ) -> None:
        self.rank, self.name = rank, f"data rank {rank}"
        self.stats = EngineStats()
        self.ready: Report | None = None
        self.fatal: Report | None = None
        self.is_gone = False
        self.heard = time.monotonic()
        self._num_sent = self._num_taken = 0
        self.commands, self.reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._start(config, folder, environment)

    def _start(self, config: EngineConfig, folder: str, environment: dict[str, str]) -> None:
        addresses = []
        for bound, kind in ((self.commands, "commands"), (self.reports, "reports")):
            bound.set_hwm(0)  # neither side ever waits for the other
            bound.setsockopt(zmq.LINGER, 0)
            addresses.append(f"ipc://{folder}/{kind}{self.rank}")
            bound.bind(addresses[-1])
        ours, theirs = socket.socketpair()
        self._pulse = Connection(ours.detach())  # only signs of life come here
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from nanovllm.data_rank import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the parent to see
            )
        self._pulse.send((config, *addresses))

    @property
    def load(self) -> int:
        """How busy it is, with what it has been sent and does not know of yet."""
        return load_score(self.num_waiting, self.stats.num_running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait there, or are on their way."""
        return self.stats.num_waiting + self.stats.num_swapped + self._num_sent - self._num_taken

    def send(self, command: Command) -> None:
        """Tell it something. What it does not get because it is gone, it will not miss."""
        self._num_sent += len(command.add)
        with contextlib.suppress(zmq.Again):
            self.commands.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)

    def receive(self) -> list[Report]:
        """What it has reported."""
        found = []
        while self.reports.poll(0):
            report = msgspec.msgpack.decode(self.reports.recv(), type=Report)
            if report.fatal:
                self.fatal = report
                break
            self.ready = self.ready or report
            self.heard = time.monotonic()
            self.stats, self._num_taken = report.stats, report.num_taken
            found.append(report)
        return found

    def feel_pulse(self) -> None:
        """See whether it has given signs of life, or has ended."""
        try:
            while self._pulse.poll(0):
                self._pulse.recv()
                self.heard = time.monotonic()
        except (EOFError, OSError):
            self.is_gone = True

    def end(self) -> str:
        """How its process ended, in words; "" if it lives."""
        return how_it_ended(self.process)

    def close(self) -> None:
        """Close the lines to it."""
        self._pulse.close()
        self.commands.close()
        self.reports.close()


def rank_environments(config: EngineConfig) -> list[dict[str, str]]:
    """For each engine, the environment of its process: its part of the cores, and its GPUs.

    Raises:
        ValueError: there are not enough GPUs.
    """
    import torch

    size, ranks = config.data_parallel_size, config.world_size
    threads = max(1, torch.get_num_threads() // size)
    environments = [{"OMP_NUM_THREADS": str(threads)} for _ in range(size)]
    if config.device == "cpu" or not torch.cuda.is_available():
        return environments
    count = torch.cuda.device_count()
    if count < size * ranks:
        raise ValueError(
            f"data_parallel_size {size} x {ranks} ranks of an engine need {size * ranks} GPUs, and this machine has "
            f"{count}: use data_parallel_size {max(1, count // ranks)}, or device cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = visible.split(",")
    for rank, environment in enumerate(environments):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[rank * ranks : (rank + 1) * ranks])
    return environments


def main() -> None:
    """The process of one engine, from beginning to end."""
    # If another engine is gone, the coordinator says who; a traceback of each one that misses it would only hide that.
    logging.getLogger("nanovllm.engine").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], CollectiveError))
    )
    connection = Connection(int(sys.argv[1]))
    config, commands, reports = connection.recv()
    Mouth(connection.send).start()
    code: Any = 0
    try:
        run_engine(config, commands, reports, connection.fileno())
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    os._exit(code)  # at once: groups that others have left would wait for them
