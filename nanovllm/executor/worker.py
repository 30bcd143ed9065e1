"""A rank: its place in the grid, its part of the model, and the loop in which it carries out the executor's orders.

`MultiprocessExecutor` starts `python -m nanovllm.executor.worker FD`. FD is a socket to the executor: the first message on it is a
`WorkerSetup`; answers and heartbeats go back.
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
from typing import Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.distributed.groups import destroy_groups, get_pp_group, get_tp_group, initialize_groups
from nanovllm.distributed.life_signs import (
    STEP_SECONDS,
    TRANSFER_ENDED,
    Complaint,
    Mouth,
    PeerLost,
    activity_of_this_thread,
    at_rest,
    in_step,
)
from nanovllm.distributed.shared_memory import MessageQueue, QueueHandle
from nanovllm.models.config import ModelConfig
from nanovllm.scheduler.data_parallel import engine_grid


@dataclass
class WorkerSetup:
    """What a rank needs to know before it starts.

    Attributes:
        folder: the checkpoint.
        rank, local_rank: in the grid, and on this machine.
        init_method: where the ranks meet; see `initialize_groups`.
        threads: of torch on a CPU.
        orders: the shared-memory queue that carries orders; None if they come through the connection.
        log_level: of this process's loggers.
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
    """A rank with its part of the model. Every public method can be an order.

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

    def memory(self) -> tuple[int, int, bool]:
        """KV blocks that fit here, bytes per block, and whether this rank computes on a GPU."""
        from nanovllm.runner.memory import num_blocks_that_fit

        runner = self.runner
        return num_blocks_that_fit(runner), runner.bytes_per_block, runner.device.type != "cpu"

    def allocate(self, config: EngineConfig, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate caches and buffers; the settings are complete now."""
        self.runner.config = config
        self.runner.allocate(num_blocks, num_host_blocks)

    def handshake_metadata(self) -> Any:
        """See `KVConnectorWorker.get_handshake_metadata`."""
        return self.runner.connector.get_handshake_metadata()

    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See `ModelRunner.launch`; every rank computes its part."""
        return self.runner.launch(schedule)

    def forget_requests(self) -> dict[str, list[int]]:
        """See `ModelRunner.forget_requests`."""
        return self.runner.forget_requests()


def run_worker(setup: WorkerSetup, connection: Connection, mouth: Mouth) -> bool:
    """Start the rank, report its memory, and carry out orders until the executor shuts it down or is gone. Reports errors.

    Args:
        connection: on which orders come, if not through shared memory: pickled names of methods with their arguments.
        mouth: not started yet; sends answers and heartbeats over the same connection.

    Returns:
        True if the executor has shut the rank down.
    """
    mouth.start()
    mouth.watch_this_thread(activity_of_this_thread(setup.rank), STEP_SECONDS)
    try:
        return _obey(setup, _orders(setup, connection), mouth)
    except EOFError:
        return False  # the executor is gone
    except Exception:
        mouth.complain(Complaint.of_error())
        return False
    finally:
        mouth.close()


def _orders(setup: WorkerSetup, connection: Connection) -> Callable[[], bytes]:
    """A function that waits for the next order. Raises EOFError when the executor is gone."""
    if setup.orders is None:
        return connection.recv_bytes
    orders = MessageQueue.attach(setup.orders, setup.local_rank)

    def next_order() -> bytes:
        try:
            return orders.get(timeout=float("inf"))
        except PeerLost as error:
            raise EOFError(str(error)) from None

    return next_order


def _obey(setup: WorkerSetup, next_order: Callable[[], bytes], mouth: Mouth) -> bool:
    try:
        worker = Worker(setup)
        memory = worker.memory()
    except ConnectionError:
        raise  # another rank has failed
    except (ValueError, OSError) as error:
        mouth.complain(Complaint(True, str(error)))
        return False
    mouth.answer(0, lambda: memory)
    is_output_rank = get_pp_group().is_last and get_tp_group().is_first
    for number in itertools.count(1):
        with at_rest():
            name, arguments = pickle.loads(next_order())
        if name == "shutdown":
            break
        if name == "launch":
            with in_step():
                wait = worker.launch(*arguments)
            if is_output_rank:
                mouth.answer(number, wait)
            elif arguments[0].connector_metadata is not None:  # the output rank reports the sampled tokens
                mouth.answer(number, _transfers_of(wait))
            continue
        try:
            value = getattr(worker, name)(*arguments)
        except ValueError as error:  # not enough memory to allocate: the message says which setting to change
            mouth.complain(Complaint(True, str(error)))
            return False
        if name == "allocate":
            worker.runner.connector.notify = lambda: mouth.say(lambda: TRANSFER_ENDED)
        mouth.answer(number, lambda value=value: value)  # type: ignore[misc]
    worker.runner.close()
    destroy_groups()
    return True


def _transfers_of(wait: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
    return lambda: ModelRunnerOutput(connector_output=wait().connector_output)


def main() -> None:
    """Run the process from beginning to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the executor decides when a rank ends
    connection = Connection(int(sys.argv[1]))
    setup: WorkerSetup = connection.recv()
    logging.basicConfig(level=setup.log_level, format=f"%(levelname)s rank {setup.rank} %(name)s: %(message)s")
    was_shut_down = run_worker(setup, connection, Mouth(connection.send))
    os._exit(0 if was_shut_down else 1)  # at once: groups that other ranks have left would wait for them


if __name__ == "__main__":
    # Pickles must name the classes of the module that the executor imports, not of one called __main__.
    from nanovllm.executor import worker

    worker.main()
