"""Machines, by name: what they can do, and which part of it programs reach."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from nanovllm.data.errors import UsageError
from nanovllm.distributed.cost_model import Link

GIB = 2**30


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured corrections.

    Attributes:
        source: where they were measured.
        bandwidth: share of the memory's bandwidth that matrix products and small operators reach.
        products: share of the peak that matrix products reach.
        attention_bandwidth, attention_products: the same for attention in decodes.
        prompt_attention: share of the 16-bit peak that attention reaches in prompts.
        links: share of a link's bandwidth that collectives and KV transfers reach.
        all_to_all: seconds that an exchange of nearly nothing between all ranks takes.
        kernel: seconds from the start of a kernel that has nothing to do to that of the next one.
        host_step, host_request: seconds per step, and per request in it, in which the device waits
            for the host.
    """

    source: str
    bandwidth: float
    products: float
    attention_bandwidth: float
    attention_products: float
    prompt_attention: float
    links: float
    all_to_all: float
    kernel: float
    host_step: float
    host_request: float


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of equal devices, as machines.toml has them. Numbers are per device.

    Attributes:
        memory_gib: as the driver reports it.
        reserved_gib: what the driver and libraries hold of the share that an engine may use.
        collectives_gib: what collectives between ranks hold in addition.
        bandwidth: bytes per second of its memory.
        flops: dense FLOP/s, by type of number: "bf16", and "fp8" if it has such units.
        inside, between: links to other devices of a node, and to other nodes.
        mesh: whether a device has a link like `inside` to each other device of its node, instead of
            one to a switch.
        host: link to the host's memory.
        efficiency: name of the corrections.
        price_per_hour: in US dollars; None: unknown.
        price_source: where this price is from.
        devices: per node.
    """

    source: str
    memory_gib: float
    bandwidth: float
    flops: dict[str, float]
    inside: Link
    between: Link
    host: Link
    efficiency: str
    reserved_gib: float = 0.7
    collectives_gib: float = 0.0
    price_per_hour: float | None = None
    price_source: str = ""
    devices: int = 8
    mesh: bool = False
    name: str = ""

    @property
    def reach(self) -> Efficiency:
        """The measured corrections."""
        return _read().efficiency[self.efficiency]

    def link(self, num_devices: int) -> Link:
        """Return the slowest link between so many devices, as collectives reach it. In a mesh, a
        device uses its links to all of them."""
        if num_devices > self.devices:
            return self.network_link
        return self._reached(self.inside, self._num_links(num_devices))

    def pair_link(self, num_devices: int) -> Link:
        """Return the slowest link between two of so many devices, as transfers reach it."""
        return self._reached(self.inside) if num_devices <= self.devices else self.network_link

    @property
    def network_link(self) -> Link:
        """The link to other nodes, as transfers reach it."""
        return self._reached(self.between)

    @property
    def host_link(self) -> Link:
        """The link to the host's memory, as copies reach it."""
        return self._reached(self.host)

    @property
    def node_bandwidth(self) -> float:
        """Bytes per second from a device to all others of its node."""
        return self.inside.bandwidth * self._num_links(self.devices)

    def _num_links(self, num_devices: int) -> int:
        """Return how many links a device has to this number of devices, itself included."""
        return max(1, num_devices - 1) if self.mesh else 1

    def _reached(self, link: Link, count: int = 1) -> Link:
        """Return what programs reach of this number of links."""
        return replace(link, bandwidth=link.bandwidth * count * self.reach.links)

    def peak(self, bytes_per_weight: float) -> float:
        """Return the FLOP/s of products with weights of this size: a machine without FP8 units
        computes with 16 bits."""
        return self.flops.get("fp8" if bytes_per_weight == 1 else "bf16", self.flops["bf16"])


class _File(msgspec.Struct, forbid_unknown_fields=True):
    efficiency: dict[str, Efficiency]
    machine: dict[str, Machine]


@cache
def _read() -> _File:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File)


def known_machines() -> dict[str, Machine]:
    """Return the machines that `find_machine` knows, by name."""
    return dict(_read().machine)


def find_machine(name: str) -> Machine:
    """Return a machine by its name, in any case: "H100", or "H100x4" for nodes of 4.

    Raises:
        UsageError: an unknown name; the message has the list.
    """
    known = _read().machine
    match = re.fullmatch(rf"({'|'.join(known)})(x([1-9]\d?))?", name, re.IGNORECASE)
    if match is None:
        raise UsageError(
            f"--machine {name!r} is unknown: choose {', '.join(known)}, with the devices per node "
            "after it (H100x8), or a file that --calibrate has written; --list describes them"
        )
    name = next(each for each in known if each.lower() == match[1].lower())
    return msgspec.structs.replace(
        known[name],
        name=name + (match[2] or "").lower(),
        devices=int(match[3] or known[name].devices),
    )
