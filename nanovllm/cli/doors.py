"""Puts the doors together: the only module of the command line and of the server that knows which
of their parts a copy of the package may lack. Imports nothing heavy."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import MissingPartError, is_there, load

if TYPE_CHECKING:
    from fastapi import FastAPI

    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.router.config import RouterConfig
    from nanovllm.server.parts import ServerParts, Tools
    from nanovllm.trace.trace import Trace

# For each command: what it does, and the module whose `add_arguments` declares its flags and whose
# `run` runs it.
COMMANDS = {
    "serve": ("serve a model through OpenAI's API", "nanovllm.cli.serve"),
    "router": (
        "route requests to several servers, with prefill and decode together or separate",
        "nanovllm.router.command",
    ),
    "simulate": (
        "predict how a fleet of engines would serve a workload, without GPU and model",
        "nanovllm.simulate.command",
    ),
    "chat": ("chat with a model in the terminal", "nanovllm.cli.chat"),
    "trace": ("summarise a recorded trace, or convert it", "nanovllm.cli.trace"),
    "replay": (
        "replay a recorded trace in the browser, for anyone who can reach the port",
        "nanovllm.cli.replay",
    ),
    "fetch": ("download a model", "nanovllm.cli.fetch"),
    "quantize": ("make a quantized checkpoint", "nanovllm.offline.command"),
    "train-eagle": (
        "train a draft head for speculative decoding",
        "nanovllm.offline.eagle_command",
    ),
    "docs": ("open the course as web pages", "nanovllm.cli.docs"),
    "bench": ("measure speed", "nanovllm.lab.bench"),
    "kernels": (
        "compile the GPU kernels, and show their registers, shared memory and spills",
        "nanovllm.lab.kernels",
    ),
}
FLEET = "nanovllm serve --prefill"


# ---------------------------------------------------------------- the command line


class Command(Protocol):
    """The module of a command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's flags."""

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Run the command; returns the exit code, None for 0."""


def load_command(name: str) -> Command:
    """Import the module of a command.

    Raises:
        MissingPartError: this copy of the package does not have it.
    """
    command: Command = load(f"{COMMANDS[name][1]}:", f"nanovllm {name}")
    return command


def router_flags() -> type[RouterConfig] | None:
    """The flags of the router in front of several servers, if this copy has one."""
    try:
        flags: type[RouterConfig] = load("nanovllm.router.config:RouterConfig", FLEET)
    except MissingPartError:
        return None
    return flags


def run_fleet(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Start several servers with a router in front; see `router.fleet.run_fleet`."""
    run: Callable[[EngineConfig, argparse.Namespace], int] = load(
        "nanovllm.router.fleet:run_fleet", FLEET
    )
    return run(config, arguments)


def can_limit_steps() -> bool:
    """Whether this copy can limit the duration of steps."""
    return is_there("nanovllm.features.step_time_limit")


def animate(
    trace: Trace, view: str, steps: Sequence[int] | None, progress: Callable[..., Iterable[object]]
) -> bytes:
    """Render a GIF of a trace; see `viz.film.animate`."""
    film: Callable[..., bytes] = load("nanovllm.lab.viz.film:animate", "an animation")
    return film(trace, view, steps, progress=progress)


# ---------------------------------------------------------------- the server


def server_parts() -> ServerParts:
    """Return what a server has besides text generation. Imports the web framework."""
    from nanovllm.server.parts import ServerParts

    return ServerParts(_tools(), _check_transfer, _page())


def _tools() -> Tools:
    from nanovllm.server.parts import Tools

    try:
        create: type[Tools] = load("nanovllm.server.tools:ToolCalls", "tools")
    except MissingPartError as error:
        return Tools(str(error))
    return create()


def _check_transfer(kv_transfer_params: object, kv_role: str) -> None:
    # Only an engine with KV transfer has a role.
    check: Callable[[object, str], None] = load(
        "nanovllm.kv_transfer.pd.plan:TransferParams.check", "KV transfer"
    )
    check(kv_transfer_params, kv_role)


def _page() -> Callable[[FastAPI, AsyncEngine, bool], None]:
    from nanovllm.server.parts import add_no_page

    try:
        add_page: Callable[[FastAPI, AsyncEngine, bool], None] = load(
            "nanovllm.server.page:add_live_routes", "the page"
        )
    except MissingPartError as error:
        return functools.partial(add_no_page, reason=str(error))
    return add_page
