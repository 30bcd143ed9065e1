"""The loop in which a rank in another process carries out the executor's orders.

The executor starts a Python that calls `main`, with the number of a socket as its argument. The
first message on the socket is a `WorkerSetup`; answers and heartbeats go back.

Built by notebooks/20_executor.ipynb: edit it there.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.checks import users_mistake
from nanovllm.distributed.groups import get_pp_group, get_tp_group
from nanovllm.distributed.shared_memory import MessageQueue
from nanovllm.executor.uniproc import Worker, WorkerFunction, WorkerSetup
from nanovllm.processes.activity import at_rest, in_step
from nanovllm.processes.channel import TRANSFER_ENDED, Channel, Failure, activity_of_this_thread

logger = logging.getLogger(__name__)


def run_worker(setup: WorkerSetup, connection: Connection) -> bool:
    """Start the rank, and carry out orders until the executor shuts it down or is gone. Reports
    errors.

    Args:
        connection: brings orders, if they do not come through shared memory: pickled names of
            methods, or functions, with their arguments. Takes answers and heartbeats.

    Returns:
        True if the executor has shut the rank down.
    """
    channel = Channel(connection, activity_of_this_thread(setup.rank))
    is_starting = True
    try:
        worker = setup.create_worker(setup)
        worker.runner.notify = lambda: channel.answer(TRANSFER_ENDED, lambda: None)
        for number, (name, arguments) in enumerate(_orders(setup, connection), start=1):
            if name == "launch":
                is_starting = False
                _launch(worker, arguments[0], number, channel)
                continue
            value = worker.call(name, *arguments)
            channel.answer(number, lambda value=value: value)  # type: ignore[misc]
        worker.close()
        return True
    except EOFError:
        return False  # the executor is gone
    except Exception as error:
        # Until the first step, the user can mend what the message names, but not the loss of
        # another rank.
        mistake = users_mistake(error) if is_starting else None
        failure = Failure.of_exception() if mistake is None else Failure(True, mistake)
        channel.fail(failure)
        if setup.init_method == "env://":  # torchrun may end rank 0 before it reports this
            logger.error("rank %d: %s", setup.rank, failure.text)
        return False
    finally:
        channel.close()


def _orders(
    setup: WorkerSetup, connection: Connection
) -> Iterator[tuple[str | WorkerFunction, tuple[Any, ...]]]:
    """Wait for orders, and yield them until the rank is shut down. Raises EOFError when the
    executor is gone."""
    receive = connection.recv_bytes
    if setup.orders is not None:
        receive = partial(MessageQueue.attach(setup.orders, setup.local_rank).get, float("inf"))
    while True:
        try:
            with at_rest():
                name, arguments = pickle.loads(receive())
        except OSError as error:
            raise EOFError from error
        if name == "shutdown":
            return
        yield name, arguments


def _launch(worker: Worker, plan: SchedulerOutput, number: int, channel: Channel) -> None:
    """Start a step. The output rank reports the sampled tokens, every other rank only what its
    features have to tell, and only if all ranks report."""
    with in_step():
        wait = worker.launch(plan)
    if get_pp_group().is_last and get_tp_group().is_first:
        channel.answer(number, wait)
    elif plan.all_report:
        channel.answer(number, lambda: ModelRunnerOutput(extras=wait().extras))


def main() -> None:
    """Run the process from beginning to end. Its argument is the number of the socket to the
    executor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the executor decides when a rank ends
    connection = Connection(int(sys.argv[1]))
    setup: WorkerSetup = connection.recv()
    logging.basicConfig(
        level=setup.log_level, format=f"%(levelname)s rank {setup.rank} %(name)s: %(message)s"
    )
    # An orderly exit would wait in groups that other ranks have left.
    os._exit(0 if run_worker(setup, connection) else 1)
