"""The loop in which a rank in another process carries out the executor's orders.

`MultiprocessExecutor` starts `python -m nanovllm.executor.worker FD`. FD is a socket to the executor: the first message on it is a
`WorkerSetup`; answers and heartbeats go back.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from nanovllm.data.schedule import ModelRunnerOutput
from nanovllm.distributed.activity import at_rest, in_step
from nanovllm.distributed.groups import get_pp_group, get_tp_group
from nanovllm.distributed.life_signs import TRANSFER_ENDED, Complaint, Mouth, PeerLost, activity_of_this_thread
from nanovllm.distributed.shared_memory import MessageQueue
from nanovllm.executor.uniproc import Worker, WorkerSetup


def run_worker(setup: WorkerSetup, connection: Connection, mouth: Mouth) -> bool:
    """Start the rank, report its memory, and carry out orders until the executor shuts it down or is gone. Reports errors.

    Args:
        connection: brings orders, if they do not come through shared memory: pickled names of methods with their arguments.
        mouth: not started yet; sends answers and heartbeats over the same connection.

    Returns:
        True if the executor has shut the rank down.
    """
    mouth.start()
    mouth.watch_this_thread(activity_of_this_thread(setup.rank))
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
    worker.close()
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
