"""Machines, by name or from a file: what they can do, and which part of it programs reach."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from nanovllm.data.checks import did_you_mean
from nanovllm.data.errors import UsageError
from nanovllm.distributed.cost_model import Link

GIB = 2**30
# The smallest and the largest number that a field of a file may have, and its unit: far enough
# apart for any machine, and close enough to find numbers in another unit. A field whose name has a
# dot is in a table.
LIMITS = {
    name: limits
    for limits, names in {
        (0.1, 1e4, "GiB, such as 80"): ["memory_gib"],
        (0, 1e3, "GiB, such as 0.7"): ["reserved_gib", "collectives_gib"],
        (1e9, 1e17, "bytes per second, such as 3.35e12 for 3,350 GB/s"): ["bandwidth"],
        (1e9, 1e19, "FLOP/s, such as 989e12 for 989 TFLOP/s"): ["flops.bf16", "flops.fp8"],
        (1e6, 1e16, "bytes per second, such as 50e9 for 50 GB/s"): [
            "inside.bandwidth",
            "between.bandwidth",
            "host.bandwidth",
        ],
        (0, 0.1, "seconds, such as 2.7e-6 for 2.7 µs"): [
            "inside.latency",
            "between.latency",
            "host.latency",
            "reach.all_to_all",
            "reach.kernel",
            "reach.host_step",
            "reach.host_request",
        ],
        (0.001, 1, "a share, such as 0.8 for 80 %"): [
            "reach.bandwidth",
            "reach.products",
            "reach.attention_bandwidth",
            "reach.attention_products",
            "reach.prompt_attention",
            "reach.links",
        ],
        (0, 1e6, "US dollars per device and hour, such as 3.49"): ["price_per_hour"],
        (1, 1e6, "devices per node, such as 8"): ["devices"],
    }.items()
    for name in names
}
# Fields that a file may omit, even if it has no base.
OPTIONAL = [
    *("file", "name", "base", "efficiency", "mesh", "on_gpu", "devices", "flops.fp8"),
    *("price_per_hour", "price_source", "reserved_gib", "collectives_gib"),
]
FIELDS = [
    *("source", *LIMITS, "inside.name", "between.name", "host.name", "reach.source"),
    *OPTIONAL,
]
# Other names of a field that users may write, and its own.
OTHER_NAMES = {
    "flops": "flops.bf16",
    "tflops": "flops.bf16",
    "memory": "memory_gib",
    "price": "price_per_hour",
    "inside": "inside.bandwidth",
    "nvlink": "inside.bandwidth",
    "between": "between.bandwidth",
    "network": "between.bandwidth",
    "host": "host.bandwidth",
    "pcie": "host.bandwidth",
    "gpus": "devices",
    "reach": "reach.products",
    **{f"efficiency.{name[6:]}": name for name in FIELDS if name.startswith("reach.")},
    "machine": "the same field at the top of the file, without [machine.NAME]",
}


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
    """Nodes of equal devices, as machines.toml and files for --machine have them. Numbers are per
    device.

    Attributes:
        source: where the numbers are from.
        memory_gib: as the driver reports it.
        reserved_gib: what the driver and libraries hold of the share that an engine may use.
        collectives_gib: what collectives between ranks hold in addition.
        bandwidth: bytes per second of its memory.
        flops: dense FLOP/s, by type of number: "bf16", and "fp8" if it has such units.
        inside, between: links to other devices of a node, and to other nodes.
        mesh: whether a device has a link like `inside` to each other device of its node, instead of
            one to a switch.
        host: link to the host's memory.
        efficiency: name of the measured corrections.
        reach: these corrections.
        price_per_hour: in US dollars; None: unknown.
        price_source: where this price is from.
        devices: per node.
        on_gpu: they are GPUs, on which engines compute larger steps by default.
    """

    source: str
    memory_gib: float
    bandwidth: float
    flops: dict[str, float]
    inside: Link
    between: Link
    host: Link
    efficiency: str
    reach: Efficiency
    reserved_gib: float = 0.7
    collectives_gib: float = 0.0
    price_per_hour: float | None = None
    price_source: str = ""
    devices: int = 8
    mesh: bool = False
    on_gpu: bool = True
    name: str = ""

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
    raw = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for machine in raw["machine"].values():
        machine["reach"] = raw["efficiency"][machine["efficiency"]]
    return msgspec.convert(raw, _File)


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
            "after it (H100x8), or the path of a file that describes a machine, or that "
            "--calibrate has written; --list describes them"
        )
    name = next(each for each in known if each.lower() == match[1].lower())
    return msgspec.structs.replace(
        known[name],
        name=name + (match[2] or "").lower(),
        devices=int(match[3] or known[name].devices),
    )


def file_of(machine: str | Mapping[str, object]) -> dict[str, object] | None:
    """Return the fields of the file that --machine names, and this name as "file"; None if it is no
    file, but the name of a machine.

    Args:
        machine: name or path; "my.toml", or "my.tomlx4" for nodes of 4. Or the fields of a file
            that was read before.

    Raises:
        UsageError: the file cannot be read, or is neither TOML nor JSON.
    """
    if not isinstance(machine, str):
        return {"file": "machine", **machine}
    counted = None if os.path.isfile(machine) else re.fullmatch(r"(?is)(.+)x([1-9]\d?)", machine)
    path = counted[1] if counted else machine
    if not os.path.isfile(path):
        return None
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
        fields = msgspec.json.decode(text, type=dict) if text[:1] == "{" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--machine {machine} is neither TOML, which describes a machine, nor JSON of "
            f"--calibrate: {error}"
        ) from error
    return {**fields, "file": machine} | ({"devices": int(counted[2])} if counted else {})


def machine_of(machine: str | Mapping[str, object]) -> Machine:
    """Return the machine of a name, or the one that a file describes.

    Args:
        machine: see `file_of`.

    Raises:
        UsageError: an unknown name; or a field that is missing, unknown or out of its limits.
    """
    fields = file_of(machine)
    if fields is None:
        return find_machine(str(machine))
    try:
        return _described(fields)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--machine {fields['file']}: {str(error).replace('--machine', 'base', 1)}"
        ) from error


def _described(own: Mapping[str, object]) -> Machine:
    """Return the machine with the fields of a file, and with those of its base besides.

    Raises:
        ValueError: see `machine_of`.
    """
    if unknown := [name for name in _flat(own) if name not in FIELDS]:
        raise ValueError(
            "a file of --calibrate describes no machine"
            if "model" in own
            else f"a machine has no field {unknown[0]!r}"
            f"{did_you_mean(unknown[0], [*FIELDS, *OTHER_NAMES], OTHER_NAMES)}"
        )
    base = own.get("base")
    found = {} if base is None else msgspec.to_builtins(find_machine(str(base)))
    if "efficiency" in own:
        known = msgspec.to_builtins(_read().efficiency)
        if own["efficiency"] not in [*known]:
            raise ValueError(
                f"efficiency must be one of {', '.join(known)}, got {own['efficiency']!r}: for "
                "other corrections, set the fields of [reach]"
            )
        found["reach"] = known[own["efficiency"]]
    found |= {
        name: found[name] | value
        if isinstance(value, dict) and isinstance(found.get(name), dict)
        else value
        for name, value in own.items()
    }
    _check_fields(_flat(found))
    if "price_per_hour" in own:
        found["price_source"] = own.get("price_source", own["file"])
    if "reach" in own:
        origin = _origin(own["file"], found.get("efficiency"), found["reach"]["source"])
        found |= {"efficiency": own["file"], "reach": found["reach"] | {"source": origin}}
    found |= {"name": own["file"], "source": _origin(own["file"], base, found["source"])}
    return msgspec.convert(
        {name: found[name] for name in found if name not in ("base", "file")}, Machine
    )


def _flat(fields: Mapping[str, object]) -> dict[str, object]:
    """Return fields, and those of tables under names such as "inside.latency"."""
    return {
        f"{name}.{part}" if part else name: value
        for name, table in fields.items()
        for part, value in (table.items() if isinstance(table, dict) else [("", table)])
        if value is not None
    }


def _check_fields(fields: Mapping[str, object]) -> None:
    """Raise a ValueError if a field is missing, or no number within its limits."""
    if missing := [name for name in FIELDS if name not in fields and name not in OPTIONAL]:
        raise ValueError(
            f"it needs {', '.join(missing)}: set them, or, to have those of a known machine, its "
            'name, such as base = "H100"'
        )
    for name, (low, high, unit) in LIMITS.items():
        value = fields.get(name, low)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{name} must be from {low:g} to {high:g} ({unit}), got {value!r}")


def _origin(path: object, base: object, source: object) -> str:
    """Say in a line where numbers are from."""
    return f"{path}{f', based on {base}' if base else ''}: {' '.join(str(source).split())}"
