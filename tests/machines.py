"""Two machines that are none: network namespaces of this one, joined by a cable of their own. Needs
root."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Any

import pytest

ADDRESSES = ("10.213.0.1", "10.213.0.2")


class Machines:
    """A context in which there are two."""

    def __init__(self) -> None:
        self.names = [f"nanovllm-{os.getpid()}-{i}" for i in range(2)]
        self.cables = [f"nv{os.getpid()}{end}" for end in "ab"]

    def __enter__(self) -> Machines:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip(
                "two machines cannot be simulated: that needs root and the command `ip` (package "
                "iproute2)"
            )
        try:
            self._connect()
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            pytest.skip(
                f"two machines cannot be simulated: {error} (a container needs CAP_NET_ADMIN and "
                "CAP_SYS_ADMIN)"
            )
        return self

    def _connect(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        ends = ["link", "add", self.cables[0], "netns", self.names[0], "type", "veth"]
        _ip(*ends, "peer", "name", self.cables[1], "netns", self.names[1])
        for name, cable, address in zip(self.names, self.cables, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", cable)
            for device in ("lo", cable):
                _ip("-n", name, "link", "set", device, "up")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, machine: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Run a command on one of them."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[machine], *command], **options)

    def unplug(self) -> None:
        """Pull the cable: nobody is told."""
        for name, cable in zip(self.names, self.cables, strict=True):
            _ip("-n", name, "link", "set", cable, "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
