"""Servers that prefill, servers that decode, and the router in front of them, as a user starts
them: `serve --prefill N --decode M`."""

from __future__ import annotations

import pathlib
import re
import signal
import sys

import httpx
import psutil

from tests.forking import children
from tests.server_process import ServerProcess, are_gone, wait_until


class RouterProcess(ServerProcess):
    """`nanovllm router`; whatever asks a `ServerProcess` asks the router.

    Args:
        folder: where its output goes.
        *options: flags.
    """

    def __init__(self, folder: pathlib.Path, *options: str) -> None:
        self._launch([sys.executable, "-m", "nanovllm", "router", "--port", "0", *options], folder)

    def _url(self) -> str | None:
        found = re.search(r"is routed at (http://\S+)/v1", self.text)
        return found[1] if found else None

    def _engine_process(self) -> psutil.Process:
        return psutil.Process(self.process.pid)  # it has none

    def router_metrics(self) -> dict[str, float]:
        """Sums over servers and routes, without the prefix of the names."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, number = line.rsplit(" ", 1)
                key = name.partition("{")[0].removeprefix("vllm_router_")
                found[key] = found.get(key, 0.0) + float(number)
        return found


class KVFleet(RouterProcess):
    """Servers and a router, which is what is asked.

    Args:
        model: folder of the checkpoint.
        folder: where its output goes.
        num_prefill, num_decode: servers of each role.
        *options: further flags, the router's among them.
    """

    def __init__(
        self,
        model: pathlib.Path,
        folder: pathlib.Path,
        num_prefill: int,
        num_decode: int,
        *options: str,
    ) -> None:
        counts = "--prefill", str(num_prefill), "--decode", str(num_decode)
        ServerProcess.__init__(self, model, folder, *counts, *options)
        self.names = [
            *(f"prefill {i}" for i in range(num_prefill)),
            *(f"decode {i}" for i in range(num_decode)),
        ]

    def _last_words(self, name: str, pattern: str) -> str:
        return re.findall(rf"^\[{name}\] .*{pattern}", self.text, re.MULTILINE)[-1]

    def server_url(self, name: str) -> str:
        """Where a server listens: always in the same place, even if it has been started again."""
        return re.findall(rf"^  {name}: (http://\S+)$", self.text, re.MULTILINE)[0]

    def server(self, name: str) -> psutil.Process:
        """A server's process, the newest one of this name. Its engine is its child."""
        return psutil.Process(int(self._last_words(name, r"Started server process \[(\d+)\]")))

    def kill(self, name: str) -> None:
        """End a server as a crash does; its engine sees that by itself."""
        self.server(name).send_signal(signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """All that there are, the command's own among them."""
        root = psutil.Process(self.process.pid)
        return [root, *children(root, recursive=True)]

    def all_blocks_are_back(self) -> bool:
        """Whether all servers answer, and none has a request, or a block for one. The router may
        not have noticed yet that a server was killed."""
        try:
            return all(self.is_idle(self.server_url(name)) for name in self.names)
        except httpx.ConnectError:
            return False

    def wait_until_ready(self) -> None:
        """Until the router sends requests to all servers."""
        wait_until(
            lambda: self.router_metrics()["worker_health"] == len(self.names),
            120,
            "all servers serve",
        )

    def wait_until_gone(self, processes: list[psutil.Process]) -> None:
        """Until none of these, as `processes` has listed them, is left."""
        wait_until(lambda: are_gone(processes), 60, f"all processes have ended: {processes}")
