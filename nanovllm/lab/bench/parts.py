"""Benchmarks that have parts (`bench parallel`, `bench kv`): the parts, one after another."""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.lab.bench.gpu.shapes import TINY, write_checkpoint
from nanovllm.lab.bench.machine import NoiseMeter
from nanovllm.lab.bench.parallel.findings import Found, Part
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.models.config import ModelConfig

#: What `--part` names, with the titles.
Parts = dict[str, tuple[str, Callable[[Setting], Found]]]


class PartMeter(NoiseMeter):
    """Noise while processes come and go: all of them have ended, and been waited for, when it is read."""

    def __init__(self) -> None:
        super().__init__(os.getpid())

    def _own_seconds(self) -> float:
        return sum(os.times()[:4])  # with those of its children, and theirs


def part_names(given: Sequence[str] | None, parts: Parts) -> list[str]:
    """["weights,orders"] -> ["orders", "weights"]; all parts for None.

    Raises:
        ValueError: one that is not known.
    """
    names = list(parts) if given is None else [name.strip() for part in given for name in part.split(",")]
    for name in names:
        if name not in parts:
            raise ValueError(f"unknown part {name!r}; there are {', '.join(parts)}")
    return [name for name in parts if name in names]


def run_parts(parts: Parts, config: EngineConfig, threads: int, repeats: int, dry_run: bool) -> list[Part]:
    """Measure; a part that fails takes no other one along.

    Args:
        config: model, dtype and seed are taken from it.
    """
    with tempfile.TemporaryDirectory() as work:
        if dry_run:  # the course model would take too long
            folder = write_checkpoint(pathlib.Path(work) / "tiny", TINY)
        else:
            folder = resolve_model(config.model, config.revision).resolve()
        model = ModelConfig.from_pretrained(folder)
        setting = Setting(folder, model, config.dtype, threads, config.seed, repeats, dry_run)
        return [_run_part(name, *parts[name], setting) for name in parts]


def _run_part(name: str, title: str, measure: Callable[[Setting], Found], setting: Setting) -> Part:
    start, meter, found, failure = time.perf_counter(), PartMeter(), Found(), ""
    try:
        found = measure(setting)
    except Exception as error:  # the next part may tell more
        failure = str(error) or traceback.format_exc()
    part = Part(name, title, time.perf_counter() - start, meter.read(), found, failure)
    noise = f"steal {part.noise.steal:.0%}, others {part.noise.others:.0%}"
    why = f", failed: {failure}" if failure else ""
    print(f"{title}: {part.seconds:.0f} s ({noise}){why}", file=sys.stderr)
    return part
