"""Runs an engine's process from beginning to end: makes the engine, runs its loop between the two
sockets, and reports to the parent why it failed.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from typing import TYPE_CHECKING

import zmq

from nanovllm.data.checks import users_mistake
from nanovllm.data.config import EngineConfig
from nanovllm.engine.process import EngineLoop
from nanovllm.processes.channel import Failure

if TYPE_CHECKING:
    from nanovllm.processes.channel import Channel

logger = logging.getLogger("nanovllm.engine")

# The parent's signal to an engine that still starts: clean up, and exit.
STOP_STARTING = signal.SIGUSR1


def run_engine(
    config: EngineConfig, command_address: str, report_address: str, channel: Channel
) -> None:
    """Run the engine's process from beginning to end. It ends with its parent, however the parent
    ends; see `EngineLoop`.

    Args:
        channel: to the parent, for the reason if the engine fails.
    """
    _ignore_stop_signals()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(STOP_STARTING, lambda number, frame: sys.exit(128 + number))
    context = zmq.Context()
    commands = context.socket(zmq.PULL)
    reports = context.socket(zmq.PUSH)
    reports.set_hwm(0)  # a step never waits for the front end
    reports.setsockopt(zmq.LINGER, 2000)
    commands.connect(command_address)
    reports.connect(report_address)
    core = None
    try:
        # Imports torch, which the parent never needs.
        from nanovllm.assembly.core import create_core

        core = create_core(config, blocking=False)
        signal.signal(STOP_STARTING, signal.SIG_IGN)
        gc.freeze()  # so that garbage collection between steps skips the model
        EngineLoop(core, commands, reports, channel.fileno()).run()
    except Exception as error:
        signal.signal(STOP_STARTING, signal.SIG_IGN)  # it is ending anyway
        # Before this process ends, it reports every error to its parent. An error that the user can
        # fix needs no traceback.
        mistake = users_mistake(error) if core is None else None
        if mistake is None:
            logger.exception("the engine failed")
        reason = f"{type(error).__name__}: {error}" if mistake is None else mistake
        channel.fail(Failure(mistake is not None, reason))
        sys.exit(1)
    finally:
        gc.unfreeze()  # else libraries complain about objects that are never freed
        if core is not None:
            core.close()
        context.destroy()


def _ignore_stop_signals() -> None:
    """Leave it to the parent to end the engine. A terminal sends Ctrl-C to all its processes, and
    the end of a service (systemd, torchrun) signals all processes of the service."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
