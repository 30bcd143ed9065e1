"""One rank: its place in the grid, its part of the model, and the loop in which it obeys.

`python -m nanovllm.executor.worker FD` is what `MultiprocessExecutor` starts. FD is a socket to the executor: the first message on it
says who this rank is; answers and signs of life go back.
"""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.distributed.groups import destroy_groups, get_pp_group, get_tp_group, initialize_groups
from nanovllm.distributed.life_signs import (
    STEP_SECONDS,
    TRANSFER_ENDED,
    Complaint,
    Mouth,
    activity_of_this_thread,
    at_rest,
    in_step,
)
from nanovllm.models.config import ModelConfig
from nanovllm.scheduler.data_parallel import engine_grid

if TYPE_CHECKING:
    from nanovllm.distributed.shared_memory import QueueHandle


@dataclass
class WorkerSetup:
    """Who a rank is.

    Attributes:
        folder: the checkpoint.
        rank, local_rank: in the grid, and on this machine.
        init_method: where the ranks find one another; see `initialize_groups`.
        threads: of torch on a CPU.
        orders: the shared-memory queue in which orders come; None if they come through the socket.
        log_level: what its loggers let through.
    """

    config: EngineConfig
    model_config: ModelConfig
    folder: pathlib.Path
    rank: int
    local_rank: int
    init_method: str
    threads: int = 1
    orders: QueueHandle | None = None
    log_level: int = logging.WARNING


class Worker:
    """A rank with its part of the model, which obeys an executor, whichever way the orders come.

    Raises:
        ValueError: settings, a checkpoint or a device that do not fit.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        import torch

        config = setup.config
        use_gpu = config.device != "cpu" and torch.cuda.is_available()
        if use_gpu:
            torch.cuda.set_device(setup.local_rank)
        else:
            torch.set_num_threads(setup.threads)
        grid, _ = engine_grid(config)
        initialize_groups(
            grid,
            setup.rank,
            setup.local_rank,
            setup.init_method,
            f"cuda:{setup.local_rank}" if use_gpu else "cpu",
            disable_custom_all_reduce=config.disable_custom_all_reduce,
        )
        from nanovllm.runner.runner import ModelRunner

        self.runner = ModelRunner(config, setup.model_config, setup.folder)

    @property
    def is_output_rank(self) -> bool:
        """True on the one rank whose results the executor hears: the first of the last stage."""
        return get_pp_group().is_last and get_tp_group().is_first

    def memory(self) -> tuple[int, int, bool]:
        """KV blocks that fit here, bytes of one, and whether this is a GPU."""
        from nanovllm.runner.memory import num_blocks_that_fit

        runner = self.runner
        return num_blocks_that_fit(runner), runner.bytes_per_block, runner.device.type != "cpu"

    def allocate(self, config: EngineConfig, num_blocks: int, num_host_blocks: int) -> None:
        """Make caches and buffers for settings that are settled now."""
        self.runner.config = config
        self.runner.allocate(num_blocks, num_host_blocks)

    def handshake_metadata(self) -> Any:
        """See `WorkerConnector.get_handshake_metadata`."""
        return self.runner.connector.get_handshake_metadata()

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See `ModelRunner.launch`; every rank computes its part."""
        return self.runner.launch(schedule)

    def forget_requests(self) -> dict[str, list[int]]:
        """See `ModelRunner.forget_requests`."""
        return self.runner.forget_requests()


def run_worker(setup: WorkerSetup, next_order: Callable[[], bytes], mouth: Mouth) -> bool:
    """Start the rank, tell of its memory, and carry out orders, in their order, until one says that it is over. What goes
    wrong is said.

    Args:
        next_order: waits for the next order, a pickled name of a method and its arguments. Raises EOFError if none will come.

    Returns:
        True if an order has ended it.
    """
    mouth.watch_this_thread(activity_of_this_thread(setup.rank), STEP_SECONDS)
    try:
        return _obey(setup, next_order, mouth)
    except EOFError:
        return False  # the executor is gone
    except Exception:
        mouth.complain(Complaint.of_error())
        return False
    finally:
        mouth.close()


def _obey(setup: WorkerSetup, next_order: Callable[[], bytes], mouth: Mouth) -> bool:
    try:
        worker = Worker(setup)
        memory = worker.memory()
    except ConnectionError:
        raise  # another rank's fault
    except (ValueError, OSError) as error:
        mouth.complain(Complaint(True, str(error)))
        return False
    mouth.answer(0, _done(memory))
    for number in itertools.count(1):
        with at_rest():
            order = next_order()
        name, arguments = pickle.loads(order)
        if name == "shutdown":
            break
        if name == "launch":
            with in_step():
                wait = worker.launch(*arguments)
            if worker.is_output_rank:
                mouth.answer(number, wait)
            elif arguments[0].connector_metadata is not None:  # what it samples is told by another
                mouth.answer(number, _transfers_of(wait))
        elif name == "allocate":
            try:
                worker.allocate(*arguments)
            except ValueError as error:  # not enough memory: the message says which setting to change
                mouth.complain(Complaint(True, str(error)))
                return False
            worker.runner.connector.notify = lambda: mouth.say(lambda: TRANSFER_ENDED)
            mouth.answer(number, _done(None))
        else:
            mouth.answer(number, _done(getattr(worker, name)(*arguments)))
    worker.runner.close()
    destroy_groups()
    return True


def _transfers_of(wait: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
    return lambda: ModelRunnerOutput(connector_output=wait().connector_output)


def _done(value: Any) -> Callable[[], Any]:
    return lambda: value


def _orders(setup: WorkerSetup, connection: Connection) -> Callable[[], bytes]:
    if setup.orders is None:
        return connection.recv_bytes
    from nanovllm.distributed.shared_memory import MessageQueue, PeerLost

    orders = MessageQueue.attach(setup.orders, setup.local_rank)

    def next_order() -> bytes:
        try:
            return orders.get(timeout=float("inf"))
        except PeerLost:
            raise EOFError("the executor is gone") from None

    return next_order


def main() -> None:
    """The process from beginning to end."""
    # Only the executor decides when a rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    setup: WorkerSetup = connection.recv()
    logging.basicConfig(level=setup.log_level, format=f"%(levelname)s rank {setup.rank} %(name)s: %(message)s")
    mouth = Mouth(connection.send)
    mouth.start()
    was_told = run_worker(setup, _orders(setup, connection), mouth)
    os._exit(0 if was_told else 1)  # at once: groups that others have left would wait for them


if __name__ == "__main__":
    # What is sent must have the classes of the module that the executor knows, not of one called __main__.
    from nanovllm.executor import worker

    worker.main()
