"""`nanovllm kernels`: compiles every Triton kernel that the engine can launch, for GPUs that are
not in this machine."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nanovllm.data.errors import UsageError
from nanovllm.data.parts import load
from nanovllm.lab.kernel_compiler import INSTRUCTIONS, KIB, TARGETS, Launch, compile_launch

if TYPE_CHECKING:
    import rich.table

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 256)
DEFAULT_TARGETS = ("sm_80", "sm_90", "gfx942")
NO_SPILL_TARGETS = ("sm_80", "sm_90")  # a spill is an error here; elsewhere the table only shows it
TENSOR_CORES = ("wgmma", "tcgen05", "mma.sync", "mfma")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `kernels`."""
    default = f"(default: {' '.join(DEFAULT_TARGETS)})"
    parser.add_argument(
        "--target",
        nargs="+",
        action="extend",
        choices=TARGETS,
        help=f"GPUs to compile for {default}",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="data types to compile for (default: all)",
    )
    dims: dict[str, Any] = {"nargs": "+", "type": int, "choices": HEAD_DIMS, "default": HEAD_DIMS}
    parser.add_argument("--head-dim", **dims, help="head dimensions to compile for (default: all)")
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, help="also write the numbers to a file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile all kernels and print the table. Returns 1 if a kernel has a problem on a target."""
    from rich.console import Console
    from rich.progress import track

    if importlib.util.find_spec("triton") is None:
        raise UsageError(
            "the package 'triton' is not installed (it is not available for macOS and Windows)"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 replaces the compiler by an interpreter: unset it")
    engine_launches = load("nanovllm.lab.kernel_launches:engine_launches", "the command kernels")
    jobs = [
        (launch, target)
        for target in dict.fromkeys(arguments.target or DEFAULT_TARGETS)
        for launch in engine_launches(target, arguments.dtype, arguments.head_dim)
    ]
    progress = Console(stderr=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler's passes release Python's lock
        found = pool.map(examine, *zip(*jobs, strict=True))
        options: dict[str, Any] = {
            "console": progress,
            "transient": True,
            "disable": not progress.is_terminal,
        }
        rows = list(track(found, "compiling", len(jobs), **options))
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    console.print(as_table(rows))
    failed = [row for row in rows if row["problems"]]
    for row in failed:
        line = " ".join([row["target"], row["kernel"], row["dtype"], _words(row["constants"])])
        console.print(
            f"{line}: {'; '.join(row['problems'])}", style="red", soft_wrap=True, markup=False
        )
    console.print(f"{len(rows)} configurations, {len(failed)} with problems")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def examine(launch: Launch, target: str) -> dict[str, Any]:
    """Compile a launch. Returns what it is, the numbers of `compile_launch`, and its problems in
    words."""
    from triton import TritonError

    constants = launch.constants
    name = launch.function.__name__
    row: dict[str, Any] = {
        "target": target,
        "kernel": name,
        "dtype": launch.dtype,
        "constants": constants,
    }
    try:
        row |= compile_launch(launch, target)
        del row["assembly"]
    except (TritonError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton wraps the error once per call within the kernel
            cause = cause.__cause__
        words = str(cause).strip() or type(cause).__name__
        return row | {"problems": [f"does not compile: {words.splitlines()[-1]}"]}
    gpu = TARGETS[target]
    rows = constants.get("TILE_ROWS", 0)
    instructions = row["instructions"]
    shared = row["shared_memory"]
    spilled = row["spilled_bytes"]
    # The smallest kernel, which has no rows of queries, waits for its keys.
    reads_pages = {"BLOCK_SIZE", "TILE_ROWS", "TILE_KEYS"} <= constants.keys()
    # Hopper's matrix instruction takes 64 rows, and no exact float32.
    wants_wgmma = target == "sm_90" and rows >= 64 and row["dtype"] != "float32"
    waits = gpu.backend == "cuda" and reads_pages and not instructions["cp.async"]
    # Tiles of 256 rows are faster nevertheless (lecture 15).
    spills = spilled > (80 if rows == 256 else 0) and target in NO_SPILL_TARGETS
    problems = {
        f"needs {shared} bytes of shared memory; {gpu.shared_memory} is the limit": shared
        > gpu.shared_memory,
        f"spills {spilled} bytes per thread": spills,
        f"has tiles of {rows} rows and no wgmma": wants_wgmma and not instructions["wgmma"],
        "waits for each tile of keys: no cp.async": waits,
    }
    return row | {"problems": [problem for problem, applies in problems.items() if applies]}


def as_table(rows: Iterable[dict[str, Any]]) -> rich.table.Table:
    """A table with one line per kernel and tile.

    A line shows the largest use of each scarce resource, and the smallest number of each wanted
    instruction."""
    from rich.table import Table

    table = Table("target", "kernel", "dtype", "head", "tile")
    numbers = (
        "of, registers, spilled, shared KiB, tensor cores, cp.async, 16-byte load, warps, stages"
    )
    for name in numbers.split(", "):
        table.add_column(name, justify="right")

    def line_of(row: dict[str, Any]) -> tuple[str, ...]:
        constants = row["constants"]
        kernel = row["kernel"].removesuffix("_kernel")
        tile = "×".join(
            str(constants[n]) for n in ("TILE_ROWS", "TILE_KEYS", "TILE_OUTPUTS") if n in constants
        )
        head = str(constants.get("HEAD_DIM", constants.get("RANK", "")))
        return row["target"], kernel, row["dtype"], head, tile

    compiled = sorted((row for row in rows if "registers" in row), key=line_of)
    for line, group in itertools.groupby(compiled, line_of):
        same = list(group)
        most = {
            name: max(row[name] for row in same)
            for name in ("registers", "spilled_bytes", "shared_memory")
        }
        fewest = {name: min(row["instructions"][name] for row in same) for name in INSTRUCTIONS}
        cores = " ".join(f"{name} {fewest[name]}" for name in TENSOR_CORES if fewest[name]) or "-"
        shared = f"{most['shared_memory'] / KIB:.1f} of {TARGETS[line[0]].shared_memory // KIB}"
        chosen = [
            "/".join(map(str, sorted({row[name] for row in same})))
            for name in ("num_warps", "num_stages")
        ]
        cells = (
            len(same),
            most["registers"],
            most["spilled_bytes"],
            shared,
            cores,
            fewest["cp.async"],
        )
        table.add_row(*line, *map(str, cells), str(fewest["16-byte load"]), *chosen)
    return table


def _words(constants: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())
